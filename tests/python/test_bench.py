"""``unjam bench``: the command, its rows, its errors; and the pieces that it is made of."""

import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import threading

import numpy as np
import pytest

import unjam
from unjam.bench import COLLECTIVES, DTYPES, BenchError, Case, Sweep, parse_sizes, run_sweep, worker
from unjam.bench import data as bench_data
from unjam.bench import report as reports
from unjam.bench.barrier import SharedBarrier
from unjam.bench.block import Block
from unjam.bench.cases import HEAP_PIECE, parse_size, size_text
from unjam.bench.estimate import Trial, seconds_of
from unjam.bench.figures import bandwidth, figure, quantile, slowest
from unjam.bench.job import Job
from unjam.bench.messages import Check, Prepare, Repeat
from unjam.bench.rows import is_unsure, verdict
from unjam.cli import main
from unjam.cli._console import make_console
from unjam.cli.bench import show_rows

HAS_TORCH = importlib.util.find_spec("torch") is not None

SECONDS = "0.0005"
ROW = {
    "collective": str,
    "dtype": str,
    "bytes": int,
    "ranks": int,
    "mode": str,
    "protocol": str,
    "unjam_us": float,
    "unjam_busbw": float,
    "spread": float,
}
PEER_ROW = {"peer": str, "peer_us": float, "peer_busbw": float, "ratio": float}


def bench(python, *arguments):
    # So short that every row has the fewest repetitions: beside other programs each of the ranks'
    # meetings takes a turn of the scheduler's, which the estimate of how many fit cannot know.
    finished = python("-m", "unjam", "bench", "--seconds", SECONDS, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def check_rows(report, collectives, sizes, peer):
    rows = report["rows"]
    assert [(r["collective"], r["bytes"]) for r in rows] == [
        (c, s) for c in collectives for s in sizes
    ]
    for row in rows:
        for name, kind in ROW.items():
            assert isinstance(row[name], kind), (name, row)
        assert row["unjam_us"] > 0 and row["unjam_busbw"] >= 0
        assert row["repetitions"] >= 7
        for name, kind in PEER_ROW.items():
            if peer is None:
                assert row[name] is None
            else:
                assert isinstance(row[name], kind), (name, row)
        if peer is not None:
            assert row["peer"] == peer
            assert row["ratio"] == pytest.approx(row["peer_us"] / row["unjam_us"], rel=0.01)


@pytest.mark.parametrize("extra", [["--threads"], [], ["--heap"], ["--registered", "--threads"]])
def test_command_without_a_peer(python, tmp_path, extra):
    path = tmp_path / "rows.json"
    arguments = ["--ranks", "3", "--sizes", "1K:96K", "--step", "8", "--collective", "all"]
    finished = bench(python, *arguments, *extra, "--json", str(path))
    report = json.loads(path.read_text())
    assert set(report) == {"command", "date", "commit", "machine", "versions", "rows"}
    assert report["command"].startswith(f"unjam bench --seconds {SECONDS} --ranks 3")
    assert report["machine"]["cores"] >= 1 and report["machine"]["cpu"]
    assert report["versions"]["unjam"] == unjam.__version__
    assert [row["collective"] for row in report["rows"][::3]] == list(COLLECTIVES)
    assert all(row["ranks"] == 3 and row["dtype"] == "float32" for row in report["rows"])
    for row in report["rows"]:
        for name, kind in ROW.items():
            assert isinstance(row[name], kind), (name, row)
        assert row["ratio"] is None and row["bytes"] <= 64 * 1024
        assert row["buffers"] == (extra[0][2:] if extra[:1] not in ([], ["--threads"]) else "own")
    assert "all_gather" in finished.stdout and "gloo" not in finished.stdout
    told = {"--heap": "in unjam's heap", "--registered": "registered with unjam"}
    for option, words in told.items():
        assert (f"buffers: {words}\n" in finished.stdout) == (option in extra)
    assert re.search(r"^This takes about \d+ (s|min)\.$", finished.stdout, re.M)
    assert "ratio" not in finished.stdout and "busbw: bus bandwidth" in finished.stdout
    assert not finished.stderr  # no progress where that is no terminal


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize("extra", [["--threads"], [], ["--heap"]])
def test_command_beside_gloo(python, tmp_path, extra):
    path = tmp_path / "rows.json"
    collectives = ("all_reduce", "all_gather", "broadcast", "reduce")
    if extra:  # where ranks and buffers are is nothing to the kinds: all four once, without these
        collectives = ("all_reduce", "reduce")
    arguments = [word for name in collectives for word in ("--collective", name)]
    finished = bench(
        python, "--peer", "gloo", "--sizes", "1K,64K", *arguments, *extra, "--json", str(path)
    )
    check_rows(json.loads(path.read_text()), collectives, (1024, 65536), "gloo")
    out = finished.stdout
    assert re.search(r"^ +unjam +busbw +gloo +busbw *$", out, re.M)
    assert "ratio: gloo's time over unjam's. Above 1 unjam is faster." in out
    assert "bus bandwidth as nccl-tests counts it" in out and "spread (unjam's/gloo's)" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--registered"], "--registered"),
        (["--registered", "--threads", "--heap"], "--registered"),
        (["--sizes", "1X"], "--sizes"),
        (["--sizes", "4K:1K"], "--sizes"),
        (["--sizes", "0"], "--sizes"),
        (["--sizes", ""], "--sizes"),
        (["--step", "1"], "--step"),
        (["--peer", "mpi"], "--peer"),
        (["--ranks", "0"], "--ranks"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "soon"], "--seconds"),
        (["--timeout", "nan"], "--timeout"),
        (["--collective", "all_to_all"], "--collective"),
        (["--dtype", "float8_e5m2"], "--dtype"),
        (["--mode", "warp"], "--mode"),
        (["--device", "abacus"], "--device"),
        (["--json", "/no/such/folder/rows.json"], "--json"),
    ],
)
def test_usage_errors(arguments, option, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", *arguments])
    assert error.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[0]


def test_gloo_without_torch(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        main(["bench", "--peer", "gloo"])
    assert error.value.code == 2
    assert "pip install torch" in capsys.readouterr().err


# ---- what goes wrong in a rank ----


def test_a_wrong_result_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(
        bench_data, "wrong", lambda case, rank, *_: "element 3 is 4, not 5" if rank == 1 else ""
    )
    assert main(["bench", "--threads", "--sizes", "1K", "--seconds", "0.01"]) == 1
    assert "rank 1 has a wrong result: unjam: all_reduce of 1024 bytes" in capsys.readouterr().err


def test_a_dead_rank_is_named():
    with (
        pytest.raises(BenchError, match="rank 1 was killed by signal 9"),
        Job(2, "none", limit_s=20) as job,
    ):
        os.kill(job._processes[1].pid, signal.SIGKILL)
        job.ask(Prepare(Case.of_size("all_reduce", "float32", 2, 1024)))


def test_a_hung_rank_is_named():
    with pytest.raises(BenchError, match="rank (0, )?1 "), Job(2, "none", 8.0) as job:
        job.ask(Prepare(Case.of_size("all_reduce", "float32", 2, 1024)))
        os.kill(job._processes[1].pid, signal.SIGSTOP)
        job.ask(Repeat(10))
    assert all(process.poll() is not None for process in job._processes)


def test_a_job_is_gone_when_it_is_done():
    with Job(2, "none", limit_s=20) as job:
        assert job.ask(Prepare(Case.of_size("broadcast", "int32", 2, 4096))) == [["unjam"]] * 2
        times = job.ask(Repeat(9))
        assert [len(answer["unjam"]) for answer in times] == [9, 9]
        job.ask(Check())
    assert [process.returncode for process in job._processes] == [0, 0]
    assert not os.path.exists(job._folder.name)


def test_a_rank_leaves_a_parent_that_has_not_read_its_answer(monkeypatch):
    class Answers:
        closed = False

        def answer(self, request):
            return request

        def close(self):
            self.closed = True

    rank = Answers()
    monkeypatch.setattr(worker, "_make_rank", lambda start, barrier: rank)
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=worker.serve, args=(theirs, None))
    thread.start()
    ours.send("start")
    assert ours.recv() is None
    ours.send("a request")
    assert ours.poll(60)
    ours.close()
    thread.join(60)
    assert not thread.is_alive() and rank.closed


# ---- what the tables say ----


def row(ours, spread, theirs=None, their_spread=None):
    return {
        "collective": "all_reduce", "bytes": 1024, "mode": "host", "algorithm": "ring",
        "protocol": "slot", "unjam_us": ours, "unjam_busbw": 1.0, "spread": spread,
        "peer": theirs and "gloo", "peer_us": theirs, "peer_busbw": theirs and 0.5,
        "peer_spread": their_spread, "ratio": theirs and theirs / ours,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "word", "unsure"),
    [
        (row(100, 0.1), "", False),
        (row(100, 0.31), "", True),
        (row(100, 0.1, 120, 0.1), "wins", False),
        (row(100, 0.1, 110, 0.1), "", False),
        (row(120, 0.1, 100, 0.1), "loses", False),
        (row(100, 0.6, 120, 0.1), "", True),
        (row(100, 0.1, 300, 0.9), "", True),
        (row(100, 0.0, 100, 0.0), "", False),
    ],
)
def test_rows_that_win_or_lose_beyond_the_spread(one, word, unsure):
    assert (verdict(one), is_unsure(one)) == (word, unsure)


def test_tables_mark_rows_and_explain_their_words(capsys):
    rows = [row(100, 0.1, 130, 0.1), row(130, 0.2, 100, 0.1), row(100, 0.84, 120, 0.1)]
    rows.append(row(100, 0.1) | {"collective": "reduce_scatter"})  # gloo has none
    show_rows(make_console(), rows, Sweep(("all_reduce",), (1024,), 2, peer="gloo"))
    out = capsys.readouterr().out
    assert re.search(r" 1\.30 wins +10/10% +ring, slot", out)
    assert re.search(r" 0\.77 loses +20/10% +ring, slot", out)
    assert re.search(r" 1\.20 +84/10%! ring, slot", out)
    assert re.search(r"^reduce_scatter$", out, re.M) and re.search(r" - +- +- +10% +ring", out)
    text = " ".join(out.split())
    assert "unjam wins 1, loses 1 of 3 rows." in text and "!: over 30%" in text


def test_wide_rows_of_gpus_fit(capsys):
    wide = row(123456.0, 1.25, 234567.0, 1.25) | {"mode": "device", "unjam_busbw": 1234.5}
    wide |= {"bytes": 1000, "algorithm": "pairwise", "protocol": "packet, direct"}
    rows = [wide, wide | {"mode": "async"}]
    show_rows(make_console(), rows, Sweep(("all_reduce",), (1024,), 2, peer="gloo", device="cuda"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for word in ("123,456", "234,567", "1234.5", "125/125%!", "device"):
        assert any(word in line for line in lines), word


def test_the_estimate_is_the_sum_over_cases():
    sweep = Sweep(("all_reduce",), (1 << 10, 1 << 20, 2 << 20), 2, seconds=1.0)
    cases = list(sweep.cases())
    small = Trial(1 << 10, call_s=1e-3, turn_s=2e-3, around_s=0.5)
    large = Trial(2 << 20, call_s=1.0, turn_s=2.0, around_s=0.5)
    # 1,000 turns of the small; of the others 7, the fewest; three to warm up; 0.5 s around each.
    middle_s = 2e-3 + ((1 << 20) - (1 << 10)) / ((2 << 20) - (1 << 10)) * (2 - 2e-3)
    expected = 1003 * 2e-3 + 10 * middle_s + 10 * 2.0 + 1.5
    assert seconds_of(sweep, cases, small, large) == pytest.approx(expected, rel=0.01)


def test_the_estimate_is_told_before_the_first_row():
    told = []
    sweep = Sweep(("all_reduce", "reduce"), (1024, 65536), 2, seconds=0.02, threads=True)
    rows = run_sweep(sweep, lambda row: told.append("row"), lambda s: told.append(s))
    assert len(rows) == 4 and told[1:] == ["row"] * 4
    assert 0 < told[0] < 60
    told.clear()
    few = Sweep(("all_reduce",), (1024, 65536), 2, seconds=0.02, threads=True)
    run_sweep(few, lambda row: None, lambda s: told.append(s))
    assert told == []


# ---- the pieces ----


def test_sizes():
    assert parse_sizes("1K:8K") == [1024, 2048, 4096, 8192]
    assert parse_sizes("1K:64M", 4)[-1] == 64 << 20
    assert parse_sizes("1K:3K") == [1024, 2048]
    assert parse_sizes("1M, 1k,100") == [100, 1024, 1 << 20]
    assert parse_size("2GiB") == 2 << 30
    for text in ("", "K", "-1", "1.5K", "1K:", ":1K", "1T", "0K"):
        with pytest.raises(ValueError, match="size"):
            parse_sizes(text)
    assert [size_text(n) for n in (1000, 1024, 1536, 1 << 26)] == [
        "1,000 B",
        "1 KiB",
        "1,536 B",
        "64 MiB",
    ]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_librarys_checkout(tmp_path, monkeypatch):
    """Or nothing, and never an error; but what UNJAM_COMMIT says goes first."""
    header = tmp_path / "checkout" / "include" / "unjam" / "unjam.h"
    library = tmp_path / "checkout" / "build" / "libunjam.so"
    for file in (header, library):
        file.parent.mkdir(parents=True)
        file.write_text("")
    monkeypatch.setattr(reports._lib, "library_path", lambda: library)
    monkeypatch.delenv("UNJAM_COMMIT", raising=False)
    assert reports.commit() is None

    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        told = subprocess.run(
            ["git", "-C", header.parents[2], *who, *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout.strip()

    git("init")
    assert reports.commit() is None  # without a commit
    git("add", "include")
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag")
    commit = git("rev-parse", "--short=7", "HEAD")
    assert reports.commit() == commit  # the library is not tracked
    header.write_text("changed")
    assert reports.commit() == f"{commit}-dirty"
    with monkeypatch.context() as patched:
        patched.setenv("UNJAM_COMMIT", "abc1234")
        assert reports.commit() == "abc1234"
    header.unlink()  # a checkout of something else, in which unjam is installed
    assert reports.commit() is None
    header.write_text("")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        assert reports.commit() is None  # without git

    def no_library():
        raise unjam.LibraryError("there is none")

    monkeypatch.setattr(reports._lib, "library_path", no_library)
    assert reports.commit() is None


def test_cases_count_as_nccl_tests_do():
    gather = Case.of_size("all_gather", "float32", 3, 1024)
    assert (gather.elements, gather.block, gather.count, gather.nbytes) == (255, 85, 85, 1020)
    assert gather.bus_factor == pytest.approx(2 / 3)
    reduce = Case.of_size("all_reduce", "float16", 4, 1024)
    assert (reduce.elements, reduce.count, reduce.bus_factor) == (512, 512, 1.5)
    assert Case.of_size("reduce_scatter", "float64", 64, 8).elements == 64
    assert Case.of_size("broadcast", "int8", 2, 5).bus_factor == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_heap_is_as_large_as_the_buffers(dtype, collective):
    case = Case.of_size(collective, dtype, 3, 1000)
    whole = np.ones(case.heap_bytes, np.uint8)
    block = Block(whole)
    own = bench_data.allocate(case)
    for _ in range(2):  # the next case begins again, whoever has the last one's buffers still
        buffers = bench_data.allocate(case, block)
        for here, there in zip(buffers, own, strict=True):
            assert (here is None) == (there is None)
            if here is not None:
                assert (here.dtype, here.shape) == (there.dtype, there.shape)
                assert (here.ctypes.data - whole.ctypes.data) % HEAP_PIECE == 0
                assert not here.any()
        with pytest.raises(MemoryError, match="1 bytes of the block are wanted and 0 left"):
            block.cut(1)
        block.restart()


def test_figures():
    assert slowest([[1, 5, 2], [3, 4, 1]]) == [3, 5, 2]
    assert figure([1000, 2000, 3000, 4000, 5000]) == (3.0, pytest.approx(2 / 3))
    assert quantile([1, 2], 0.5) == 1.5
    assert quantile([7], 0.9) == 7
    assert bandwidth(1 << 20, 1.5, 100.0) == pytest.approx(1.5 * 10.48576)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_data_is_checked_in_every_type(dtype, collective):
    sweep = Sweep((collective,), (4096,), 3, dtype=dtype, seconds=0.001, threads=True)
    assert len(run_sweep(sweep, lambda row: None)) == 1


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_wrong_element_is_found(collective):
    case = Case.of_size(collective, "float32", 3, 3 << 20)
    buffers = bench_data.allocate(case)
    bench_data.fill(case, 0, *buffers)
    assert bench_data.wrong(case, 0, *buffers) or collective == "broadcast"
    result = buffers[0] if buffers[1] is None else buffers[1]
    first = 0
    for start in range(0, result.size, 1 << 18):
        stop = min(start + (1 << 18), result.size)
        result[start:stop] = bench_data._expected(case, first + start, first + stop)
    assert bench_data.wrong(case, 0, *buffers) == ""
    result[-1] += 1
    assert f"element {result.size - 1} is" in bench_data.wrong(case, 0, *buffers)


def test_ranks_and_places_have_different_data():
    case = Case.of_size("all_reduce", "int32", 4, 1 << 16)
    rows = []
    for rank in range(4):
        source, _ = bench_data.allocate(case)
        bench_data.fill(case, rank, source, None)
        rows.append(source)
        assert set(np.unique(source)) == {0, 1, 2, 3}
        for shift in (1, 64, 1024, 2048, 8192):  # a slice at a wrong place is noticed
            assert np.mean(source[shift:] != source[:-shift]) > 0.3
    assert np.mean(rows[0] != rows[1]) > 0.3


def test_barrier():
    descriptor = SharedBarrier.make(3)
    order = []

    def rank(number):
        barrier = SharedBarrier(descriptor, number, 3, 20.0)
        for turn in range(50):
            order.append(turn)
            barrier.wait()

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    assert order == sorted(order)


def test_barrier_names_who_is_missing():
    descriptor = SharedBarrier.make(2)
    barrier = SharedBarrier(descriptor, 0, 2, 0.05)
    os.close(descriptor)
    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        barrier.wait()
