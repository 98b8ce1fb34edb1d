"""Collectives on GPUs against torch, in one process: ``python3 -m pytest -m gpu tests/python``."""

import importlib.util
import itertools

import pytest

import unjam
from unjam.cuda import gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpus.lacking(2)), reason=gpus.lacking(2) or "GPUs are here"),
]
if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch  # noqa: E402

from unjam.cuda.program import CudaProgram, run_processes, run_threads  # noqa: E402

GPUS = max(2, min(4, gpus.gpu_count()))
DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
OPS = ("sum", "prod", "min", "max", "avg")
COUNTS = (1, 7, 1000, 65_537)
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast")


@pytest.fixture(scope="module", params=sorted({2, GPUS}))
def job(request):
    """Contexts of a job, used by many tests: each takes keys of its own."""
    with unjam.init_all(request.param, device="cuda") as contexts:
        yield contexts


keys = (f"test {n}" for n in itertools.count())


def values(count, dtype, rank):
    """Small integers from 1 to 3, which every type holds; on the CPU, as int64."""
    places = torch.arange(count, dtype=torch.int64)
    return 1 + (places * 7 + 5 * rank + places // 64) % 3


def reduced(parts, op):
    """The exact result, as int64 (as float64 for an average, where it may be fractional)."""
    stack = torch.stack(parts)
    if op == "avg":
        return stack.sum(0).double() / len(parts)
    if op in ("min", "max"):
        return getattr(stack, "a" + op)(0)
    return getattr(stack, op)(0)


def same(got, want, dtype, op):
    """Exact, but for averages in floats (rounded once a hop) and of integers (towards zero)."""
    got, kind = got.cpu(), getattr(torch, dtype)
    if op == "avg" and not kind.is_floating_point:
        return torch.equal(got.to(torch.int64), want.trunc().to(torch.int64))
    if op == "avg" or kind.is_floating_point:
        bits = {"float8_e4m3fn": 3, "float8_e5m2": 2, "bfloat16": 7, "float16": 10}.get(dtype, 22)
        error = (got.double() - want.double()).abs()
        return bool((error <= want.double().abs() * 2.0**-bits).all())
    return torch.equal(got.to(torch.int64), want)


def run_case(contexts, collective, dtype, op, count, in_place, in_stream, root=0):
    """Calls it on all ranks, in threads; checks every rank's result."""
    size, key, kind = len(contexts), next(keys), getattr(torch, dtype)
    whole = count * size
    inputs = [
        values(whole if collective == "reduce_scatter" else count, dtype, rank)
        for rank in range(size)
    ]

    def rank(context):
        group, me = context.group(), context.rank
        device = torch.device(context.device)
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            x = inputs[me].to(device, kind, copy=True)
            options = {"key": key, "in_stream": in_stream}
            if collective in REDUCTIONS:
                options["op"] = op
            if collective in ("reduce", "broadcast"):
                options["root"] = root
            if collective == "all_gather":
                out = torch.zeros(whole, device=device).to(kind)
                if in_place:
                    part = out[me * count : (me + 1) * count]
                    part.copy_(x)
                    x = part
            elif collective == "reduce_scatter":
                part = x[me * count : (me + 1) * count]
                out = part if in_place else torch.zeros(count, device=device).to(kind)
            else:
                out = None if in_place else torch.zeros(count, device=device).to(kind)
            request = getattr(group, collective)(x, out, **options)
            if not in_stream:
                request.wait()  # the stream waits, not the thread
            got = (x if out is None else out).clone()
            stream.synchronize()
            request.synchronize(30)
        if collective == "reduce" and me != root:
            return
        if collective == "all_gather":
            want = torch.cat(inputs)
        elif collective == "broadcast":
            want = inputs[root]
        else:
            want = reduced(inputs, op)
            if collective == "reduce_scatter":
                want = want[me * count : (me + 1) * count]
        used = op if collective in REDUCTIONS else "sum"
        assert same(got, want, dtype, used), (collective, dtype, op, count, in_place, me)

    unjam.run_ranks(contexts, rank)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in-place"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives(job, collective, dtype, in_place):
    for op in OPS if collective in REDUCTIONS else ("sum",):
        for turn, count in enumerate(COUNTS):
            root = turn % len(job)
            run_case(job, collective, dtype, op, count, in_place, bool(turn % 2), root)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_large(job, collective):
    for in_stream in (False, True):
        run_case(job, collective, "bfloat16", "sum", (4 << 20) + 8, True, in_stream)


def test_nothing_to_do(job):
    run_case(job, "all_reduce", "float32", "sum", 0, True, False)


def test_a_call_comes_after_the_streams_work_and_before_what_waits(job):
    """Many rounds in stream order, with the host never waiting in between."""
    key, size = next(keys), len(job)

    def rank(context):
        device = torch.device(context.device)
        torch.cuda.set_device(device)
        group, stream = context.group(), torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            x = torch.ones(100_000, device=device, dtype=torch.float64)
            for turn in range(40):
                torch.cuda._sleep(100_000)
                x.add_(context.rank)
                if turn % 2:
                    group.all_reduce(x, key=key, in_stream=True)
                else:
                    group.all_reduce(x, key=key).wait()
                x.div_(size)
            stream.synchronize()
        want = 1 + 40 * sum(range(size)) / size
        assert torch.allclose(x, torch.full_like(x, want), rtol=1e-12)

    unjam.run_ranks(job, rank)


def test_different_orders(job):
    names = [next(keys) for _ in range(16)]

    def rank(context):
        device = torch.device(context.device)
        torch.cuda.set_device(device)
        group = context.group()
        data = {name: torch.full((4096,), 1 + i, device=device) for i, name in enumerate(names)}
        order = names[context.rank * 3 :] + names[: context.rank * 3]
        requests = []
        for name in order:
            requests.append(group.all_reduce(data[name], key=name))
            torch.cuda.synchronize(device)
        unjam.wait_all(requests, 60)
        for i, name in enumerate(names):
            assert bool((data[name] == (1 + i) * len(job)).all())

    unjam.run_ranks(job, rank)


def test_memory_of_a_dropped_request_is_not_given_away(job):
    key = next(keys)

    def rank(context):
        device = torch.device(context.device)
        torch.cuda.set_device(device)
        group = context.group()
        for _ in range(50):
            group.all_reduce(torch.ones(1 << 16, device=device), key=key)  # dropped at once
            torch.zeros(1 << 16, device=device).fill_(7)
        out = group.all_reduce(torch.ones(4, device=device), key=key).result(30)
        assert out.tolist() == [len(job)] * 4

    unjam.run_ranks(job, rank)


def test_host_memory_is_refused(job):
    with pytest.raises(unjam.InvalidArgument, match="works on cuda:0"):
        job[0].group(name="refused").all_reduce(torch.ones(4))


def test_another_gpus_memory_is_refused(job):
    x = torch.ones(4, device="cuda:1")
    with pytest.raises(unjam.InvalidArgument, match="in cuda:1, but rank 0 works on cuda:0"):
        job[0].group(name="refused").all_reduce(x)
    with pytest.raises(unjam.InvalidArgument, match="the stream is of cuda:1"):
        job[0].group(name="refused").all_reduce(
            torch.ones(4, device="cuda:0"), stream=torch.cuda.Stream("cuda:1")
        )


@pytest.mark.parametrize("device_sync", [False, True], ids=["program-1", "program-2"])
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_programs(run, device_sync):
    found = run(CudaProgram(GPUS, 20, 1, device_sync))
    assert found.results == GPUS * 2 * 20 * 8
