"""Small floats, NaN, wrapping and averages against torch."""

import numpy as np
import pytest

import unjam

torch = pytest.importorskip("torch")

SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def inputs(ranks, count, name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(ranks, count, generator=generator)
    return [row.to(getattr(torch, name)) for row in data]


def reduce_all(tensors, op="sum", **config):
    outs = [torch.zeros_like(tensor) for tensor in tensors]
    with unjam.init_all(len(tensors), **config) as contexts:
        unjam.wait_all(
            [
                context.group().all_reduce(tensor, out, op=op)
                for context, tensor, out in zip(contexts, tensors, outs, strict=True)
            ],
            30,
        )
    for out in outs[1:]:
        assert torch.equal(bits(out), bits(outs[0])), "ranks have different bits"
    return outs[0]


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("count", [1, 13, 1000, 30_011])
@pytest.mark.parametrize("name", SMALL)
def test_sum_of_two_is_rounded_once(name, count):
    a, b = inputs(2, count, name)
    expected = (a.float() + b.float()).to(a.dtype)
    assert torch.equal(bits(reduce_all([a, b])), bits(expected))


@pytest.mark.parametrize("name", SMALL)
def test_ring_sum_is_rounded_once_a_hop(name):
    """Each element is added along the ring, from some rank on, with one rounding a hop."""
    ranks = 5
    tensors = inputs(ranks, 4099, name)
    result = reduce_all(tensors, algorithm="ring")
    candidates = []
    for first in range(ranks):
        total = tensors[first]
        for step in range(1, ranks):
            other = tensors[(first + step) % ranks]
            total = (total.float() + other.float()).to(total.dtype)
        candidates.append(bits(total) == bits(result))
    assert torch.stack(candidates).any(dim=0).all()


@pytest.mark.parametrize("algorithm", ["ring", "one_shot"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_close_to_double_precision(name, op, algorithm):
    tensors = inputs(4, 1000, name)
    stack = torch.stack([tensor.double() for tensor in tensors])
    expected = {
        "sum": lambda: stack.sum(0),
        "avg": lambda: stack.mean(0),
        "prod": lambda: stack.prod(0),
        "min": lambda: stack.amin(0),
        "max": lambda: stack.amax(0),
    }[op]()
    result = reduce_all(tensors, op, algorithm=algorithm).double()
    if op in ("min", "max"):
        assert torch.equal(result, expected)
        return
    # One rounding a hop, each relative to a partial result that is at most the sum of magnitudes.
    unit = float(torch.finfo(tensors[0].dtype).eps)
    scale = stack.abs().prod(0) if op == "prod" else stack.abs().sum(0)
    if op == "avg":
        scale = scale / 4
    tiny = float(torch.finfo(tensors[0].dtype).tiny)
    assert ((result - expected).abs() <= 3 * unit * scale + 4 * tiny).all()


@pytest.mark.parametrize("name", [*SMALL, "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_is_kept(name, op):
    a = torch.tensor([float("nan"), 1.0, 2.0, -0.5]).to(getattr(torch, name))
    b = torch.tensor([1.0, float("nan"), 3.0, -4.0]).to(getattr(torch, name))
    result = reduce_all_any([a, b], op).double()
    assert result[:2].isnan().all()
    assert result[2:].tolist() == ([2.0, -4.0] if op == "min" else [3.0, -0.5])


def reduce_all_any(tensors, op):
    outs = [torch.zeros_like(tensor) for tensor in tensors]
    with unjam.init_all(len(tensors)) as contexts:
        calls = zip(contexts, tensors, outs, strict=True)
        unjam.wait_all([c.group().all_reduce(x, out, op=op) for c, x, out in calls], 30)
    return outs[0]


@pytest.mark.parametrize("name", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_integers_wrap(name):
    dtype = np.dtype(name)
    limits = np.iinfo(dtype)
    rows = np.array([[limits.max, 3, limits.min, 100], [1, 5, limits.min, 100]], dtype=dtype)
    with np.errstate(over="ignore"):
        sums, products = rows.sum(0, dtype=dtype), rows.prod(0, dtype=dtype)
    for op, expected in (("sum", sums), ("prod", products)):
        outs = np.zeros_like(rows)
        with unjam.init_all(2) as contexts:
            calls = zip(contexts, rows, outs, strict=True)
            unjam.wait_all([c.group().all_reduce(x, out, op=op) for c, x, out in calls], 30)
        np.testing.assert_array_equal(outs, [expected, expected])


def test_integer_average_divides_towards_zero():
    rows = np.array([[-7, 7, -1, 5], [0, 0, 0, 1], [0, 0, 0, 2]], dtype=np.int32)
    outs = np.zeros_like(rows)
    with unjam.init_all(3) as contexts:
        calls = zip(contexts, rows, outs, strict=True)
        unjam.wait_all([c.group().all_reduce(x, out, op="avg") for c, x, out in calls], 30)
    np.testing.assert_array_equal(outs, [[-2, 2, 0, 2]] * 3)
