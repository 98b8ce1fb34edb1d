"""What counts as memory, and what the errors say."""

import array
import ctypes
import mmap

import numpy as np
import pytest

import unjam
from argument_tools import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from unjam import DType, InvalidArgument, InvalidType
from unjam._buffers import buffer_of
from unjam._types import ARRAY_DTYPES, dtype_of

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")


@pytest.mark.parametrize(
    "name",
    ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"],
)
def test_numpy(name):
    x = np.zeros((2, 3), dtype=name)
    found = buffer_of(x, "x")
    assert found.address == x.ctypes.data
    assert (found.elements, found.dtype.label, found.writable) == (6, name, True)
    assert found.nbytes == x.nbytes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", DType.BFLOAT16),
        ("float8_e4m3fn", DType.FLOAT8_E4M3),
        ("float8_e5m2", DType.FLOAT8_E5M2),
    ],
)
def test_small_floats_of_ml_dtypes_and_torch(name, dtype):
    x = np.zeros(5, dtype=getattr(ml_dtypes, name))
    assert buffer_of(x, "x")[:3] == (x.ctypes.data, 5, dtype)
    t = torch.zeros(5, dtype=getattr(torch, name))
    assert buffer_of(t, "t")[:3] == (t.data_ptr(), 5, dtype)


@pytest.mark.parametrize("name", sorted(set(ARRAY_DTYPES) & set(dir(torch))))
def test_torch(name):
    t = torch.zeros(2, 3, dtype=getattr(torch, name))
    found = buffer_of(t, "x")
    assert (found.address, found.elements, found.dtype) == (t.data_ptr(), 6, ARRAY_DTYPES[name])


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4"])
def test_other_small_types_are_refused(name):
    with pytest.raises(InvalidArgument, match="not supported"):
        buffer_of(np.zeros(4, dtype=getattr(ml_dtypes, name)), "x")


@pytest.mark.parametrize("dtype", ["complex64", "bool", "int16", "M8[s]", "V3", "f4,i4", "S4"])
def test_unsupported_numpy_types(dtype):
    with pytest.raises(InvalidArgument, match=r"x has elements of type .* not supported"):
        buffer_of(np.zeros(4, dtype=dtype), "x")


def test_unsupported_torch_type():
    with pytest.raises(InvalidArgument, match="x has elements of type int16"):
        buffer_of(torch.zeros(4, dtype=torch.int16), "x")


def test_buffer_protocol():
    assert buffer_of(bytearray(8), "x")[1:4] == (8, DType.UINT8, True)
    assert buffer_of(bytes(8), "x")[1:4] == (8, DType.UINT8, False)
    assert buffer_of(memoryview(bytearray(8)), "x").writable
    assert buffer_of(memoryview(bytearray(8)).toreadonly(), "x").writable is False
    assert buffer_of(array.array("d", [1.0, 2.0]), "x")[1:3] == (2, DType.FLOAT64)
    assert buffer_of((ctypes.c_float * 3)(), "x")[1:3] == (3, DType.FLOAT32)
    with mmap.mmap(-1, 4096) as pages:
        found = buffer_of(pages, "x", "float32")
        assert found.elements == 1024
        del found


def test_a_bytearray_in_use_cannot_be_resized():
    x = bytearray(8)
    found = buffer_of(x, "x")
    with pytest.raises(BufferError):
        x.append(1)
    del found
    x.append(1)


def test_array_interface():
    class Wrapped:
        def __init__(self, inner):
            self.__array_interface__ = inner.__array_interface__
            self.inner = inner

    x = np.arange(6, dtype=np.int32)
    assert buffer_of(Wrapped(x), "x")[:3] == (x.ctypes.data, 6, DType.INT32)
    with pytest.raises(InvalidArgument, match="contiguous"):
        buffer_of(Wrapped(x[::2]), "x")


def test_raw_memory_with_a_dtype():
    assert buffer_of(bytearray(8), "x", "bfloat16")[1:3] == (4, DType.BFLOAT16)
    assert buffer_of(bytearray(8), "x", "float8_e4m3")[1:3] == (8, DType.FLOAT8_E4M3)
    assert buffer_of(np.zeros(4, np.uint16), "x", "bfloat16")[1:3] == (4, DType.BFLOAT16)
    assert buffer_of(np.zeros(4, "V2"), "x", torch.bfloat16)[1:3] == (4, DType.BFLOAT16)
    assert buffer_of(np.zeros(4, bool), "x", "uint8")[1:3] == (4, DType.UINT8)
    assert buffer_of(np.zeros(4, np.float32), "x", np.float32)[1:3] == (4, DType.FLOAT32)
    with pytest.raises(InvalidArgument, match="only raw memory"):
        buffer_of(np.zeros(4, np.float32), "x", "int32")
    with pytest.raises(InvalidArgument, match="7 bytes, which is not a whole number of float32"):
        buffer_of(bytearray(7), "x", "float32")
    with pytest.raises(InvalidArgument, match="not aligned"):
        buffer_of(memoryview(bytearray(64))[1:9], "x", "float32")


def test_dtype_names():
    assert dtype_of("float8_e4m3fn") is dtype_of("float8_e4m3") is DType.FLOAT8_E4M3
    assert dtype_of(torch.float8_e5m2) is DType.FLOAT8_E5M2
    assert dtype_of(np.dtype("int64")) is dtype_of(np.int64) is dtype_of(DType.INT64)
    assert dtype_of(ml_dtypes.bfloat16) is DType.BFLOAT16
    for wrong in ("float31", "complex64", torch.int16, np.int16, object(), 8):
        with pytest.raises(InvalidArgument, match="use one of int8"):
            dtype_of(wrong)


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: np.zeros((4, 4), np.float32).T, "ascontiguousarray"),
        (lambda: np.zeros(8, np.float32)[::2], "ascontiguousarray"),
        (lambda: torch.zeros(4, 4).t(), r"x\.contiguous\(\)"),
        (lambda: np.zeros(4, ">f4"), "newbyteorder"),
    ],
)
def test_errors_name_the_cure(make, cure):
    with pytest.raises(InvalidArgument, match=cure):
        buffer_of(make(), "x")


@pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, None, "text", object(), np.float32(1), {1}])
def test_not_memory(x):
    with pytest.raises(InvalidType, match="x is a"):
        buffer_of(x, "x")
    with pytest.raises(TypeError):
        buffer_of(x, "x")


def test_torch_elsewhere():
    with pytest.raises(InvalidType, match="meta"):
        buffer_of(torch.zeros(4, device="meta"), "x")
    with pytest.raises(InvalidType, match="to_dense"):
        buffer_of(torch.eye(4).to_sparse(), "x")


def test_a_tensor_that_requires_grad_is_memory():
    assert buffer_of(torch.zeros(4, requires_grad=True), "x").elements == 4


def test_empty_and_scalar_arrays():
    assert buffer_of(np.zeros(0, np.float32), "x").elements == 0
    assert buffer_of(np.zeros((3, 0), np.float32), "x").elements == 0
    assert buffer_of(np.zeros((), np.float32), "x").elements == 1
    assert buffer_of(torch.zeros(0), "x").elements == 0
    assert buffer_of(bytearray(), "x").elements == 0


# ---- sizes and overlap, by kind ----

X = np.zeros(8, np.float32)


def test_all_reduce_arguments():
    given = all_reduce(X, None, None)
    assert given.send == given.recv == X.ctypes.data
    assert given.output is X
    assert all_reduce(X, X, None).send == X.ctypes.data
    for out, message in [
        (np.zeros(7, np.float32), "same size"),
        (np.zeros(8, np.float64), "same type"),
        (bytes(32), "read-only"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            all_reduce(X, out, "float32" if isinstance(out, bytes) else None)
    whole = np.zeros(16, np.float32)
    with pytest.raises(InvalidArgument, match="overlap"):
        all_reduce(whole[:8], whole[4:12], None)
    all_reduce(whole[:8], whole[8:], None)
    with pytest.raises(InvalidArgument, match="read-only"):
        all_reduce(bytes(8), None, None)
    frozen = np.zeros(8, np.float32)
    frozen.flags.writeable = False
    all_reduce(frozen, X, None)
    with pytest.raises(InvalidArgument, match="x is read-only"):
        all_reduce(frozen, None, None)


def test_all_gather_arguments():
    out = np.zeros((4, 8), np.float32)
    assert all_gather(X, out, 1, 4, None).elements == 8
    assert all_gather(out[1], out, 1, 4, None).send == out[1].ctypes.data
    with pytest.raises(InvalidArgument, match="part 1 of out"):
        all_gather(out[2], out, 1, 4, None)
    with pytest.raises(InvalidArgument, match="needs 32"):
        all_gather(X, out[:3], 1, 4, None)
    with pytest.raises(InvalidType, match="out is missing"):
        all_gather(X, None, 1, 4, None)


def test_reduce_scatter_arguments():
    x = np.zeros((4, 2), np.float32)
    assert reduce_scatter(x, np.zeros(2, np.float32), 3, 4, None).elements == 2
    assert reduce_scatter(x, x[3], 3, 4, None).recv == x[3].ctypes.data
    with pytest.raises(InvalidArgument, match="part 3 of x"):
        reduce_scatter(x, x[2], 3, 4, None)
    with pytest.raises(InvalidArgument, match="needs 12"):
        reduce_scatter(x, np.zeros(3, np.float32), 3, 4, None)


def test_reduce_and_broadcast_arguments():
    assert reduce(bytes(8), None, False, None).recv is None
    assert reduce(X, "not looked at", False, None).output is None
    assert reduce(X, None, True, None).recv == X.ctypes.data
    assert broadcast(bytes(8), None, True, None).elements == 8
    with pytest.raises(InvalidArgument, match="read-only"):
        broadcast(bytes(8), None, False, None)
    assert broadcast(None, X, False, None).recv == X.ctypes.data
    assert broadcast(X, np.zeros(8, np.float32), True, None).send == X.ctypes.data


# ---- advice for elements that unjam does not know ----


def numpy_array(own):
    return np.zeros(4, own)


ADVICE = [
    (np.bool_, "pass x.view(np.uint8), with op='max' for \"or\" and op='min' for \"and\""),
    (np.int16, "convert it, such as x.astype(np.int32)"),
    (np.uint16, "convert it, such as x.astype(np.int32); or, if its words are raw, say what they "
                "are, such as dtype='bfloat16'"),
    ("V2", "say what its bytes are, such as dtype='bfloat16' (or 'float16')"),
    ("V1", "say what its bytes are, such as dtype='uint8'"),
    ("V4", "say what its bytes are, such as dtype='float32'"),
    ("V8", "say what its bytes are, such as dtype='float64'"),
    ("V3", "to move them only, pass x.view(np.uint8)"),
    ([("a", "f4"), ("b", "i4")], "pass its fields one by one, or, to move them only, x.view(np."),
    (np.complex64, "x.view(np.float32), which is right for op='sum' and 'avg'"),
    (np.complex128, "x.view(np.float64), which is right for op='sum' and 'avg'"),
    (np.clongdouble, "x.astype(np.complex128) and pass its real and imaginary parts"),
    (np.longdouble, "convert it, such as x.astype(np.float64)"),
    ("M8[s]", "pass x.view(np.int64), with op='min' or 'max'"),
    ("m8[ns]", "pass x.view(np.int64), with op='min' or 'max'"),
    ("U3", "its elements are no numbers"),
    ("S3", "its elements are no numbers"),
    (object, "its elements are no numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "cure"), ADVICE)
def test_advice_for_types_that_are_not_known(own, cure):
    with pytest.raises(InvalidArgument) as raised:
        buffer_of(numpy_array(own), "x")
    assert "which is not supported: " in str(raised.value) and cure in str(raised.value)
    if own not in (np.uint16, "V2"):
        assert "bfloat16'" not in str(raised.value)


def test_advice_for_ml_dtypes_that_are_not_known():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for own, cure in (
        (ml_dtypes.int4, "x.astype(np.int8)"),
        (ml_dtypes.float8_e4m3, "x.astype(np.float32)"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            buffer_of(numpy_array(own), "x")
        assert cure in str(raised.value) and "dtype=" not in str(raised.value)


def test_advice_is_in_the_words_of_what_holds_the_elements():
    class Cuda:
        __cuda_array_interface__ = {
            "shape": (4,), "typestr": "<i2", "data": (4096, False), "version": 3,
        }  # fmt: skip

    for what, cure in (
        (array.array("h", [1, 2]), "np.asarray(x).astype(np.int32)"),
        (memoryview(bytearray(4)).cast("?"), "np.asarray(x).view(np.uint8), with op='max'"),
        ((ctypes.c_bool * 4)(), "np.asarray(x).view(np.uint8), with op='max'"),
        (Cuda(), "x.astype(xp.int32)"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            buffer_of(what, "x")
        assert cure in str(raised.value)


def test_advice_for_tensors():
    torch = pytest.importorskip("torch")
    for own, cure in (
        (torch.bool, "pass x.view(torch.uint8), with op='max'"),
        (torch.int16, "x.to(torch.int32)"),
        (torch.complex64, "torch.view_as_real(x)"),
    ):
        with pytest.raises(InvalidArgument) as raised:
            buffer_of(torch.zeros(4, dtype=own), "x")
        assert cure in str(raised.value)


def test_what_is_advised_gives_right_results(pair):
    _, groups = pair

    def all_reduce(first, second, **settings):
        arrays = [first.copy(), second.copy()]
        unjam.wait_all(
            [group.all_reduce(a, **settings) for group, a in zip(groups, arrays, strict=True)]
        )
        return arrays[0]

    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    as_bytes = [x.view(np.uint8) for x in (a, b)]
    assert np.array_equal(all_reduce(*as_bytes, op="max").view(bool), a | b)
    assert np.array_equal(all_reduce(*as_bytes, op="min").view(bool), a & b)
    small = np.full(4, 200, np.int16)
    assert np.array_equal(all_reduce(*[small.astype(np.int32)] * 2), [400] * 4)
    z = np.array([1 + 2j, 3 - 1j], np.complex64)
    assert np.array_equal(all_reduce(z.view(np.float32), z.view(np.float32)).view(z.dtype), 2 * z)


def test_a_bool_is_no_raw_memory():
    x = np.ones(4, bool)
    assert buffer_of(x, "x", "uint8").dtype is DType.UINT8
    for wanted in ("bfloat16", "int32", "float8_e4m3"):
        with pytest.raises(InvalidArgument, match="can be reinterpreted; pass x.view"):
            buffer_of(x, "x", wanted)
