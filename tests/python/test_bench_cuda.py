"""``unjam bench --device cuda`` without a GPU: its arithmetic, its arguments, and its ranks over a
torch.cuda that does everything at once on the host."""

import ctypes
import os
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import unjam
from unjam import _abi
from unjam.bench import COLLECTIVES, Case, GemmSweep, Sweep, cuda_sweep, run_sweep
from unjam.bench import data as host_data
from unjam.bench import sweep as bench_sweep
from unjam.bench.cuda_sweep import calls_in, outstanding_of
from unjam.bench.gemm_sweep import make_rows
from unjam.bench.messages import Gemm
from unjam.bench.rows import PlanUsed, make_row
from unjam.cli import bench as command
from unjam.cli import main
from unjam.cuda import gpus
from unjam.cuda.nccl import hand_over

torch = pytest.importorskip("torch")

from unjam.bench import cuda_data, cuda_libraries, cuda_worker, gemm, gemm_sweep, job  # noqa: E402


def test_calls_of_a_measurement():
    assert calls_in(20e-6, 2, 1.0, 1000) == 1000
    assert calls_in(1e-3, 2, 1.0, 1000) == 100
    assert calls_in(1e-3, 1, 60.0, 1000) == 300  # a measurement stays below 0.3 s
    assert calls_in(5e-3, 2, 0.1, 1000) == 4
    assert calls_in(5e-3, 2, 0.1, 2) == 2
    assert [outstanding_of(n) for n in (1 << 10, 1 << 28, 1 << 30, 1 << 40)] == [64, 64, 16, 1]


def test_in_place_an_all_gathers_input_is_its_block():
    case = Case.of_size("all_gather", "float32", 3, 40000, in_place=True)
    assert not Case.of_size("reduce_scatter", "float32", 3, 40000, in_place=True).in_place
    for rank in range(3):
        buffers = cuda_data.allocate(case, "cpu", rank=rank)
        source, target = buffers
        assert source.data_ptr() == target.data_ptr() + 4 * rank * case.block
        cuda_data.fill(case, rank, buffers)
        assert cuda_data.wrong(case, rank, buffers) != ""
        own = slice(rank * case.block, (rank + 1) * case.block)
        expected = cuda_data._expected(case, own.start, own.stop, "cpu")
        assert torch.equal(target[own].int(), expected)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_data_is_that_of_the_host(collective):
    case = Case.of_size(collective, "float32", 3, 40000)
    for rank in range(3):
        source, target = host_data.allocate(case)
        host_data.fill(case, rank, source, target)
        buffers = cuda_data.allocate(case, "cpu")
        cuda_data.fill(case, rank, buffers)
        assert np.array_equal(source, buffers[0].numpy())
    result = buffers[0] if buffers[1] is None else buffers[1]
    first = 2 * case.block if collective == "reduce_scatter" else 0
    result[:] = cuda_data._expected(case, first, first + result.numel(), "cpu")
    assert cuda_data.wrong(case, 2, buffers) == ""
    result[-1] += 1
    words = f"element {result.numel() - 1} is"
    assert words in cuda_data.wrong(case, 2, buffers) or collective == "reduce"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "device"], "argument --mode: device is for --device cuda"),
        (["--modes", "host,warp"], "'warp' is not one of host, device, async"),
        (["--peer", "nccl"], "argument --peer: nccl works on GPUs"),
        (["--device", "cuda", "--peer", "gloo"], "argument --peer: gloo works in host memory"),
        (["--device", "cuda", "--threads"], "argument --threads"),
        (["--gemm"], "argument --gemm: needs --device cuda"),
        (["--gemm", "--heap"], "argument --heap: --gemm has buffers of its own"),
        (["--registered", "--heap"], "argument --registered: not with --heap"),
        (["--lanes", "0"], "argument --lanes"),
        (["--in-place"], "argument --in-place: is for --device cuda"),
        (["--dma", "on"], "argument --dma: copy engines are GPUs'"),
        (["--dma", "stuck"], "'stuck' is not one of on, off"),
        (["--kinds", "all_reduce,scatter"], "'scatter' is not one of"),
        (["--dtype", "bf17"], "argument --dtype"),
        (["--device", "cuda", "--ranks", "64"], "64 ranks need a GPU each"),
    ],
)
def test_usage_errors(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", *arguments])
    assert error.value.code == 2
    assert words in capsys.readouterr().err


def test_the_issues_command_line(monkeypatch):
    monkeypatch.setattr(command, "lacking", lambda ranks: "")
    seen = []
    monkeypatch.setattr(command, "run_sweep", lambda sweep, *_: seen.append(sweep) or [])
    line = (
        "bench --device cuda --peer nccl --kinds all --ranks 4 --sizes 1K:1G --step 4 "
        "--modes host,device,async --dtype bf16"
    )
    assert main(line.split()) == 0
    (sweep,) = seen
    assert sweep.modes == ("host", "device", "async")
    assert (sweep.device, sweep.dtype, sweep.ranks) == ("cuda", "bfloat16", 4)
    assert len(list(sweep.cases())) == 5 * 11


def test_what_is_lacking(monkeypatch):
    monkeypatch.setattr(gpus, "gpu_count", lambda: 4)
    monkeypatch.setattr(gpus, "cuda_part", lambda: False)
    assert "libunjam_cuda.so is not beside" in gpus.lacking(4)
    assert "torch sees 4" in gpus.lacking(5)
    monkeypatch.setattr(gpus, "cuda_part", lambda: True)
    assert gpus.lacking(4) == ""
    monkeypatch.setattr(gpus, "gpu_count", lambda: 1)
    assert gpus.lacking(2, shared=True) == ""
    monkeypatch.setattr(gpus, "gpu_count", lambda: 0)
    assert "no GPU" in gpus.lacking(2, shared=True)


def test_the_nccl_id_is_handed_over(tmp_path):
    path = tmp_path / "store"
    with pytest.raises(TimeoutError, match="rank 0 gave no NCCL id"):
        hand_over(path, 1, None, 0.05)
    assert hand_over(path, 0, b"secret", 1) == b"secret"
    assert hand_over(path, 1, None, 1) == b"secret"


def test_rows_of_the_matrix_product():
    def answer(factor):
        return [
            gemm.Beside("alone", [1.0, 1.2, 1.1], 0.0),
            gemm.Beside("unjam", [1.3 * factor] * 3, 300.0 * factor),
            gemm.Beside("nccl", [1.4] * 3, 350.0, covered=factor == 1, blocks=4),
        ]

    rows = make_rows(GemmSweep((4,), 2), 4, [answer(1), answer(1.1)])
    assert [row["beside"] for row in rows] == ["alone", "unjam", "nccl"]
    assert [row["slowdown"] for row in rows] == [1.0, 1.3, pytest.approx(1.4 / 1.1, abs=1e-3)]
    assert (rows[1]["busbw"], rows[2]["covered"]) == (300.0, False)
    assert [row["blocks"] for row in rows] == [0, 0, 4]


# ---- ranks over a CUDA that is not there ----


class FakeStream:
    """Work is done when it is queued."""

    cuda_stream = 0

    def __init__(self, device=None):
        self.device = SimpleNamespace(index=0, type="cpu")

    def synchronize(self):
        pass


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3 + 1e-6


class FakeNccl(cuda_libraries.CudaUnjam):
    """A second library: unjam again."""

    def __init__(self, rank, ranks, store, stream, limit_s):
        unique = unjam.unique_id() if rank == 0 else None
        super().__init__(rank, ranks, hand_over(FakeNccl.path, rank, unique, limit_s), stream)


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """The host device in place of CUDA: in-stream calls are waited for at once."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "set_device", lambda device: None)
    monkeypatch.setattr(cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(cuda, "Stream", FakeStream)
    monkeypatch.setattr(cuda, "Event", FakeEvent)
    monkeypatch.setattr(cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(cuda_worker.torch, "device", lambda kind, index: "cpu")
    init = unjam.init

    def init_on_the_host(*arguments, device, device_index, **more):
        return init(*arguments, **more)

    monkeypatch.setattr(unjam, "init", init_on_the_host)
    real = unjam._lib.library()

    def run(collective, send, recv, count, options, request):
        order = options._obj.stream_order
        mine = request if order == _abi.STREAM_ASYNC else ctypes.pointer(ctypes.c_void_p())
        code = real.unjamRun(collective, send, recv, count, None, 0, mine)
        if not code and order == _abi.STREAM_SYNC:
            code = real.unjamWait(mine.contents, 20_000_000)
            real.unjamRequestFree(mine.contents)
        return code

    fake = SimpleNamespace(
        unjamRunWithOptions=run,
        unjamStreamWait=lambda request, stream: real.unjamWait(request, 20_000_000),
        unjamRequestFree=real.unjamRequestFree,
    )
    monkeypatch.setattr(cuda_libraries, "library", lambda: fake)
    FakeNccl.path = tmp_path / "id"
    monkeypatch.setattr(cuda_worker, "CudaNccl", FakeNccl)


@pytest.mark.parametrize("buffers", ["own", "heap", "registered"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ranks_measure_and_check(no_gpu, monkeypatch, collective, buffers):
    used, registered = [], []

    def as_tensor(memory, device):
        used.append(memory._context.info()["heap"])
        return torch.frombuffer(memory, dtype=torch.uint8)

    def register(self, memory):
        made = register_memory(self, memory)
        registered.append(made.nbytes)
        return made

    register_memory = unjam.Context.register_memory
    monkeypatch.setattr(cuda_data.torch, "as_tensor", as_tensor)
    monkeypatch.setattr(unjam.Context, "register_memory", register)
    sweep = Sweep(
        (collective,),
        (1 << 10, 1 << 16),
        2,
        dtype="bfloat16",
        peer="nccl",
        modes=cuda_sweep.MODES,
        seconds=0.01,
        limit_s=100,
        threads=True,
        device="cuda",
        buffers=buffers,
        in_place=buffers == "own",
    )
    rows = run_sweep(sweep, lambda row: None)
    assert {row["buffers"] for row in rows} == {buffers}
    assert bool(used) == (buffers == "heap")
    # As large as is needed if all calls are outstanding that may be.
    most = cuda_sweep.outstanding_of(1 << 16)
    largest = Case.of_size(collective, "bfloat16", 2, 1 << 16).heap_bytes
    assert registered == ([most * largest] * 2 if buffers == "registered" else [])
    if buffers == "heap":
        assert {u["bytes"] for u in used} == {-(-most * largest // 4096) * 4096}
        assert all(u["used"] == u["bytes"] for u in used)
    assert [(row["bytes"], row["mode"]) for row in rows] == [
        (size, mode) for size in (1 << 10, 1 << 16) for mode in ("host", "device", "async")
    ]
    for row in rows:
        assert row["unjam_us"] > 0 and row["ratio"] > 0 and row["peer"] == "nccl"
        assert row["algorithm"] and (row["mode"] == "host" or row["calls"] >= 4)
    # (Slices go straight where the peer has let them in time.)
    direct = [row["protocol"] for row in rows if "direct" in row["protocol"]]
    assert not direct or (buffers != "own" and set(direct) == {"slot, direct"})
    assert rows[1]["issue_us"] > 0 and rows[1]["peer_issue_us"] > 0


def test_the_protocol_says_how_slices_went():
    counts = [0, 0]  # of this case's lanes; a case before may have left some
    moved = {"bytes": 0}
    key = {"group": "bench", "key": "broadcast", "algorithm": "chain", "protocol": "slot"}
    lanes = [{"into_outputs": 7}, {"into_outputs": 0}]
    library = object.__new__(cuda_libraries.CudaUnjam)
    library._context = SimpleNamespace(
        info=lambda: {
            "keys": [key | {"lanes": 32}],
            "lanes": [
                {"into_outputs": lane["into_outputs"] + more, "bytes_sent": 500 + 1000 * more}
                for lane, more in zip(lanes, counts, strict=True)
            ],
            "kernel": {"copy_engines": {"dma_bytes": 10_000 + moved["bytes"]}},
        }
    )
    library._before = cuda_libraries._moved(library._context.info())
    case = Case.of_size("broadcast", "float32", 2, 1 << 20)
    before = library.plan(case)
    assert before == ("chain", "slot", 32, 0.0)
    counts[1] = 3
    assert library.plan(case) == ("chain", "slot, direct", 32, 0.0)
    # One rank that has stored some is enough.
    both = cuda_sweep.plan_of_all([before, library.plan(case)])
    assert both == ("chain", "slot, direct", 32, 0.0)
    assert cuda_sweep.plan_of_all([before, before]) == before
    moved["bytes"] = 1500
    assert library.plan(case) == ("chain", "slot, direct, dma", 32, 0.5)


def test_settings_of_dma_have_a_job_each(monkeypatch, capsys):
    """All rows of each, which say so; the ranks' environment has the setting."""
    made = []

    class Ranks:
        def __init__(self, *arguments):
            made.append(arguments[-1])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def measure(sweep, job, case):
        used = PlanUsed("mesh", "slot, dma", 8, 0.5)
        yield make_row("none", case, "device", used, {"unjam": [1000]})

    monkeypatch.setattr(bench_sweep, "Job", Ranks)
    monkeypatch.setattr(cuda_sweep, "measure", measure)
    monkeypatch.setattr(command, "lacking", lambda ranks: "")
    line = "bench --device cuda --dma on,off --kinds all_reduce --sizes 64M --modes device"
    assert main(line.split()) == 0
    assert made == [{"UNJAM_DMA": "on"}, {"UNJAM_DMA": "off"}]
    text = capsys.readouterr().out
    assert text.count("64 MiB") == 2 and "50%" in text
    assert "all_reduce, UNJAM_DMA=on" in text and "all_reduce, UNJAM_DMA=off" in text
    made.clear()
    assert main(line.replace("--dma on,off ", "").split()) == 0
    assert made == [None]
    assert "UNJAM_DMA" not in capsys.readouterr().out


def test_a_wrong_result_is_an_error(no_gpu, monkeypatch):
    monkeypatch.setattr(cuda_data, "wrong", lambda case, rank, buffers: "element 3 is 4, not 5")
    sweep = Sweep(("all_reduce",), (1024,), 2, threads=True, device="cuda", limit_s=100)
    with pytest.raises(unjam.bench.BenchError, match="wrong result: unjam: all_reduce of 1024"):
        run_sweep(sweep, lambda row: None)


@pytest.mark.parametrize("registered", [False, True], ids=["own", "registered"])
def test_a_product_beside_traffic(no_gpu, monkeypatch, registered):
    monkeypatch.setattr(gemm.torch, "randn", lambda shape, device: torch.ones(shape))
    monkeypatch.setattr(gemm.torch, "zeros", lambda count, dtype, device: np.zeros(count, "f4"))
    stream = FakeStream()
    # Streams are for CUDA: leave them out of the call.
    run = unjam.Collective.run
    in_streams = []

    def run_without(self, x, stream, in_stream=False):
        in_streams.append(in_stream)
        request = run(self, x)
        if in_stream:
            request.wait()
        return request

    monkeypatch.setattr(unjam.Collective, "run", run_without)
    register = unjam.Context.register_memory
    of_the_call = []

    def register_and_note(self, memory):
        of_the_call.append(memory.nbytes)
        return register(self, memory)

    monkeypatch.setattr(unjam.Context, "register_memory", register_and_note)
    # (PyTorch's profiler wants its device.)
    monkeypatch.setattr(gemm, "_blocks", lambda traffic: 32)
    nccl = SimpleNamespace(all_reduce=lambda data, stream: None)
    request = Gemm(unjam.unique_id(), 1, 8, 4096, 2, registered)
    answer = gemm.measure(request, 0, 1, stream, nccl, lambda: None)
    names = ["alone", "unjam", "unjam, in stream", "nccl"]
    names += [f"{name}, waiting" for name in names[1:]]
    assert [(beside.name, len(beside.ms)) for beside in answer] == [(name, 2) for name in names]
    assert len(answer) == GemmSweep((1,), 1).ways == GemmSweep((1,), 1, peer="none").ways + 2
    assert of_the_call == ([2048 * 4] if registered else [])  # (of f4 here)
    assert in_streams.count(True) == in_streams.count(False) > 0
    assert [beside.blocks for beside in answer[:4]] == [0, 0, 32, 32]
    waiting = [beside for beside in answer if beside.name.endswith("waiting")]
    assert {(*beside.ms, beside.busbw) for beside in waiting} == {(0.0, 0.0, 0.0)}


def test_a_product_beside_a_call_that_waits(monkeypatch):
    """All but the last rank call, then measure; the last one calls when they have."""
    events = []

    class Calls(gemm._Traffic):
        def issue(self, calls):
            events.append(f"call {calls}")

        def finish(self):
            events.append("wait")

    def products():
        events.append("product")
        return 1.5

    monkeypatch.setattr(gemm.time, "sleep", lambda seconds: events.append("settle"))
    meet = partial(events.append, "meet")
    assert gemm._waiting(Calls(), products, False, meet) == 1.5
    assert events == ["meet", "call 1", "settle", "product", "meet", "wait"]
    events.clear()
    assert gemm._waiting(Calls(), products, True, meet) == 0.0
    assert events == ["meet", "meet", "call 1", "wait"]


def test_blocks_are_those_of_the_largest_kernel():
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            {"cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "args": {}},
            {"cat": "kernel", "name": "mark", "args": {"grid": [1, 1, 1]}},
            {"cat": "kernel", "name": "call", "args": {"grid": [8, 3, 1]}},
            {"cat": "kernel", "name": "unjam_engine_kernel(...)", "args": {"grid": [64, 1, 1]}},
        ]
    }
    assert gemm.blocks_in(trace) == 24
    assert gemm.blocks_in({"traceEvents": []}) == 0


def test_progress_has_a_part_of_the_call_under_way():
    progress = gemm.Progress()
    for when, done in [(10.0, 1), (11.0, 1), (14.0, 2), (15.0, 4)]:
        progress.note(done, when)
    assert [progress.at(t) for t in (10.0, 11.0, 12.0, 14.0, 14.5, 15.0)] == [
        1.0, 1.25, 1.5, 2.0, 3.0, 4.0,
    ]  # fmt: skip
    assert (progress.at(9.0), progress.at(16.0)) == (1.0, 4.0)


def test_rate_beside_a_product_is_that_of_its_duration(monkeypatch):
    """Calls of 4 ms each; the product begins as the first ends, and takes 30 ms."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    class Calls(gemm._Traffic):
        def issue(self, calls):
            self.calls = calls

        def done(self):
            return min(self.calls, int(now[0] / 4e-3))

        def finish(self):
            now[0] += 1

    def products(meanwhile):
        end = now[0] + 30e-3
        while now[0] < end:
            meanwhile()
            sleep(1e-4)
        return 30 / 16

    monkeypatch.setattr(gemm.time, "sleep", sleep)
    monkeypatch.setattr(gemm.time, "perf_counter", lambda: now[0])
    milliseconds, rate, outlasted = gemm._beside(Calls(), products)
    assert (milliseconds, outlasted) == (30 / 16, True)
    assert rate == pytest.approx(250, rel=0.02)
    monkeypatch.setattr(gemm, "_CALLS", 5)
    now[0] = 0.0
    assert gemm._beside(Calls(), products)[2] is False


def test_ranks_have_what_a_job_says_in_their_environment(monkeypatch):
    found = []

    def no_process(command, env, **others):
        found.append(env)
        raise OSError("none")

    monkeypatch.setattr(job.subprocess, "Popen", no_process)
    with pytest.raises(OSError, match="none"):
        job.Job(2, "none", 1.0, device="cuda", environment={"NCCL_MAX_CTAS": "7"})
    assert found[0]["NCCL_MAX_CTAS"] == "7" and found[0]["PATH"] == os.environ["PATH"]


def test_nccl_has_as_many_channels_as_there_are_lanes(monkeypatch):
    jobs, asked = [], []

    class NoJob:
        def __init__(self, ranks, peer, limit_s, device, environment):
            jobs.append(environment)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def ask(self, request):
            assert jobs[-1]["NCCL_MAX_CTAS"] == jobs[-1]["NCCL_MIN_CTAS"] == str(request.lanes)
            asked.append(request.registered)
            return [[gemm.Beside("alone", [1.0], 0.0)]] * 2

    monkeypatch.setattr(gemm_sweep, "Job", NoJob)
    rows = gemm_sweep.run_gemm(GemmSweep((4, 16), 2), lambda row: None)
    assert [row["lanes"] for row in rows] == [4, 16] and len(jobs) == 2
    assert {row["buffers"] for row in rows} == {"own"}
    rows = gemm_sweep.run_gemm(GemmSweep((4,), 2, registered=True), lambda row: None)
    assert [row["buffers"] for row in rows] == ["registered"] and asked == [False, False, True]
