"""Places and streams: what a call means, and what the errors say. Needs neither GPU nor library."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from argument_tools import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from unjam import DType, InvalidArgument, InvalidType, _abi, _devices
from unjam import request as request_module
from unjam._buffers import buffer_of
from unjam._config import make_config
from unjam._devices import ANY_CUDA, HOST, call_options, call_stream, check_place, choose_index
from unjam.request import Request


class OnDevice:
    """Something with CUDA memory that is not there; `device` None: it does not say where."""

    def __init__(self, count=8, device=None, address=0x7000_0000_0000, **interface):
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        } | interface
        if device is not None:
            self.__dlpack_device__ = lambda: (2, device)


# ---- buffers ----


def test_cuda_array_interface():
    found = buffer_of(OnDevice(device=1), "x")
    assert found[:4] == (0x7000_0000_0000, 8, DType.FLOAT32, True)
    assert found.device == 1
    assert buffer_of(OnDevice(), "x").device == ANY_CUDA
    assert not buffer_of(OnDevice(data=(64, True)), "x").writable
    assert buffer_of(OnDevice(typestr="<V2"), "x", "bfloat16").dtype is DType.BFLOAT16
    assert buffer_of(OnDevice(shape=(2, 3), strides=(12, 4)), "x").elements == 6
    assert buffer_of(OnDevice(shape=(0, 3), strides=(4, 4), data=(0, False)), "x").elements == 0
    with pytest.raises(InvalidArgument, match="not C-contiguous"):
        buffer_of(OnDevice(shape=(2, 3), strides=(4, 8)), "x")
    with pytest.raises(InvalidArgument, match="not aligned"):
        buffer_of(OnDevice(address=2), "x")


def test_places_of_arguments():
    host = np.zeros(8, np.float32)
    one, two = OnDevice(device=0), OnDevice(device=1, address=0x7100_0000_0000)
    assert all_reduce(host, None, None).place == HOST
    assert all_reduce(one, None, None).place == 0
    assert reduce(one, None, False, None).place == 0
    assert broadcast(None, two, False, None).place == 1
    assert all_reduce(OnDevice(address=64), two, None).place == 1
    assert all_gather(one, OnDevice(16, address=64), 0, 2, None).place == 0
    for x, out in [(host, one), (one, host), (one, two), (host, OnDevice())]:
        with pytest.raises(InvalidArgument, match="pass an out beside x"):
            all_reduce(x, out, None)
    with pytest.raises(InvalidArgument, match=r"x is in cuda:0, but out is in host memory"):
        reduce_scatter(OnDevice(16, device=0), host, 0, 2, None)


@pytest.mark.parametrize(
    ("what", "context", "words"),
    [
        (HOST, 0, ["in host memory", "rank 2 works on cuda:0", "x.to('cuda:0')", "device='host'"]),
        (1, 0, ["in cuda:1", "on cuda:0", "x.to('cuda:0')"]),
        (0, HOST, ["in cuda:0", "in host memory", "device='cuda'", "x.cpu()"]),
        (ANY_CUDA, HOST, ["a CUDA device", "device='cuda'"]),
    ],
)
def test_mixed_places_name_cause_and_cure(what, context, words):
    with pytest.raises(InvalidArgument) as error:
        check_place(what, context, 2)
    assert all(word in str(error.value) for word in words)


def test_places_that_fit():
    for what, context in [(HOST, HOST), (3, 3), (ANY_CUDA, 0)]:
        check_place(what, context, 0)


def test_device_memory_on_the_host_device(pair):
    _, groups = pair
    with pytest.raises(InvalidArgument, match="device='cuda'"):
        groups[0].all_reduce(OnDevice())
    with (
        groups[0].register_all_reduce("k", "float32") as collective,
        pytest.raises(InvalidArgument, match="device='cuda'"),
    ):
        collective.run(OnDevice())


# ---- streams ----


def fake_torch(monkeypatch, available=True, current=3):
    cuda = SimpleNamespace(is_available=lambda: available, current_device=lambda: current)
    raw = SimpleNamespace()
    if available:
        raw._cuda_getCurrentRawStream = lambda index: 0x1000 + index
    monkeypatch.setitem(_devices.sys.modules, "torch", SimpleNamespace(cuda=cuda, _C=raw))


def test_streams(monkeypatch):
    fake_torch(monkeypatch)
    assert _devices.stream_of(None, 2) == 0x1002
    assert _devices.stream_of(0, 2) == 0
    assert _devices.stream_of(0x7F00_0000_0000, 2) == 0x7F00_0000_0000
    stream = SimpleNamespace(cuda_stream=77, device=SimpleNamespace(index=2))
    assert _devices.stream_of(stream, 2) == 77
    assert _devices.stream_of(SimpleNamespace(cuda_stream=78), 2) == 78
    with pytest.raises(InvalidArgument, match=r"of cuda:2, but the context works on cuda:0"):
        _devices.stream_of(stream, 0)
    for wrong in (True, 1.5, "stream", object()):
        with pytest.raises(InvalidType, match="must be a torch.cuda.Stream"):
            _devices.stream_of(wrong, 0)
    for wrong in (-1, 1 << 64):
        with pytest.raises(InvalidArgument, match="not a cudaStream_t"):
            _devices.stream_of(wrong, 0)


def test_no_torch_means_the_default_stream(monkeypatch):
    monkeypatch.delitem(_devices.sys.modules, "torch", raising=False)
    assert _devices.stream_of(None, 0) == 0
    fake_torch(monkeypatch, available=False)
    assert _devices.stream_of(None, 0) == 0


def test_order_of_a_call():
    assert call_stream(None, False, HOST) == (None, _abi.STREAM_NONE)
    assert call_stream(5, False, 0) == (5, _abi.STREAM_ASYNC)
    assert call_stream(5, True, 0) == (5, _abi.STREAM_SYNC)
    for stream, in_stream in ((0, False), (None, True)):
        with pytest.raises(InvalidArgument, match="for CUDA, but this context works in host"):
            call_stream(stream, in_stream, HOST)


def test_options():
    options = call_options(7, 0x10, 3, 0x20, _abi.STREAM_SYNC)
    assert (options.size, options.version) == (ctypes.sizeof(_abi.CallOptions), _abi.VERSION)
    assert (options.priority, options.callback, options.user) == (7, 0x10, 3)
    assert (options.stream, options.stream_order) == (0x20, 2)
    assert call_options(0, None, 0, 0, _abi.STREAM_ASYNC).stream is None


def test_the_callers_device_is_chosen(monkeypatch):
    fake_torch(monkeypatch)

    def index(**settings):
        config = make_config(settings)
        choose_index(config)
        return config.device_index

    assert index() == -1
    assert index(device="cuda") == 3
    assert index(device="cuda", device_index=1) == 1
    monkeypatch.setenv("UNJAM_DEVICE", "cuda")
    assert index() == 3
    assert index(device="host") == -1
    monkeypatch.setenv("UNJAM_DEVICE_INDEX", "2")
    assert index() == -1


# ---- requests ----


class FakeContext:
    """A context on cuda:0 that no library knows."""

    rank, closed, inherited, _place = 0, False, False, 0

    def __init__(self):
        self.freed = []

    def _enter(self):
        return True

    def _leave(self):
        pass

    def _free_request(self, handle, keep):
        self.freed.append(keep)


@pytest.fixture
def waits(monkeypatch):
    """The streams given to unjamStreamWait."""
    streams = []

    def stream_wait(handle, stream):
        streams.append(stream)
        return 0

    fake = SimpleNamespace(unjamStreamWait=stream_wait)
    monkeypatch.setattr(request_module, "library", lambda: fake)
    return streams


def make_request(context, stream, in_stream=False):
    request = Request(context, ("all_reduce", "k", ""), None, ("x",), None, stream, in_stream)
    request._handle = ctypes.c_void_p(1)
    return request


def test_wait_lets_a_stream_wait(waits):
    context = FakeContext()
    request = make_request(context, 5)
    request.wait(stream=6)
    request.wait(stream=0)
    assert waits == [6, None]
    del request
    assert context.freed == [("x",)]  # only stream 6 comes after it, and not what frees x


def test_memory_of_an_ordered_call_is_the_streams(waits):
    context = FakeContext()
    request = make_request(context, 5)
    request.wait(stream=5)
    del request
    request = make_request(context, 5, in_stream=True)
    request.wait(stream=5)  # it comes after it anyway
    assert waits == [5]
    request.wait(stream=6)
    assert waits == [5, 6]
    del request
    assert context.freed == [None, None]


def test_a_stream_waits_without_limit(waits):
    with pytest.raises(InvalidArgument, match="cannot be combined with timeout"):
        make_request(FakeContext(), 5).wait(1.0, stream=5)
    assert not waits


def test_streams_are_not_for_the_host_device(launch):
    def rank(context, group):
        assert context.device == "host"
        request = group.all_reduce(np.ones(4, np.float32))
        with pytest.raises(InvalidArgument, match="request is of the host device"):
            request.wait(stream=5)
        request.synchronize(20)
        with pytest.raises(InvalidArgument, match="for CUDA"):
            group.all_reduce(np.ones(4, np.float32), in_stream=True)
        with (
            group.register_all_reduce("k", "float32") as collective,
            pytest.raises(InvalidArgument, match="for CUDA"),
        ):
            collective.run(np.ones(4, np.float32), stream=7)

    launch(2, rank)
