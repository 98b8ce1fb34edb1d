"""The programs with NCCL, as far as they go without a GPU: watching children, the figures."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from unjam.bench import report  # noqa: E402
from unjam.cuda import gpus, nccl_program, program  # noqa: E402
from unjam.programs import SIZES, random_orders  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STAYS = "__import__('time').sleep(60)\n"


def does(*iterations):
    """A child that does them at once."""
    lines = "\n".join(["consistent", "random", *map(str, iterations)])
    return f"print({lines!r}, flush=True)\n"


@pytest.fixture
def fake(monkeypatch):
    """``fake(text…)``: one text of Python in place of each child, in order; gives those started."""

    def replace(*texts):
        started = []

        def start_something(module, arguments, variables, log):
            text = texts[len(started)]
            if isinstance(text, OSError):
                raise text
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-S", "-c", text], stdout=output, stderr=output
                )
            process.arguments = arguments
            started.append(process)
            return process

        monkeypatch.setattr(nccl_program, "start", start_something)
        return started

    return replace


def try_nccl(processes, **given):
    return nccl_program.try_nccl(2, 7, True, 3, processes=processes, **{"limit_s": 0.3} | given)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("end", ["", STAYS])
def test_all_iterations_are_completion(fake, processes, end):
    """Whether the children end then or stay."""
    started = fake(*[does(0, 1, 2) + end] * 2)
    found = try_nccl(processes, limit_s=30.0)
    assert (found.hung, found.iterations) == (False, 3)
    assert all(process.returncode is not None for process in started)
    words = [process.arguments for process in started]
    assert all(word[:4] == ["2", "7", "1", "3"] for word in words)
    assert [word[4:5] for word in words] == ([["0"], ["1"]] if processes else [[]])
    assert len({word[5] for word in words if processes}) == processes  # one file for all


@pytest.mark.parametrize(
    ("texts", "iterations"),
    [
        ([does(0) + STAYS], 1),
        ([does() + STAYS], 0),
        ([does(0, 1) + STAYS, does(0) + STAYS], 1),
        ([does(0, 1, 2), does(0, 1) + STAYS], 2),
    ],
)
def test_a_hang_is_told_with_the_slowest_ranks_iterations(fake, texts, iterations):
    started = fake(*texts)
    found = try_nccl(processes=len(texts) > 1)
    assert (found.hung, found.iterations) == (True, iterations)
    assert found.seconds > 0.3
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["raise SystemExit('no NCCL here')"], "program failed: no NCCL here"),
        ([does(0) + "raise SystemExit('wrong')"], "program failed: (.|\n)*wrong"),
        ([STAYS, "raise SystemExit('no NCCL here')"], "failed, rank 1: no NCCL here"),
        ([does() + STAYS, does(0) + "raise SystemExit('wrong')"], "rank 1: (.|\n)*wrong"),
    ],
)
def test_a_child_that_fails_has_not_hung(fake, texts, words):
    started = fake(*texts)
    with pytest.raises(RuntimeError, match=words):
        try_nccl(processes=len(texts) > 1, limit_s=30.0)
    assert all(process.returncode is not None for process in started)


def test_a_rank_that_does_not_even_run_in_one_order(fake, monkeypatch):
    """Then no time limit of the random orders begins, as they have not."""
    monkeypatch.setattr(nccl_program, "START_S", 0.5)
    started = fake(STAYS, does(0) + STAYS)
    with pytest.raises(RuntimeError, match=r"no random order within 0\.5 s, rank 0"):
        try_nccl(processes=True, limit_s=0.01)
    assert all(process.returncode is not None for process in started)


def test_no_child_is_left_where_another_cannot_be_started(fake):
    started = fake(STAYS, OSError("no more processes"))
    with pytest.raises(OSError, match="no more processes"):
        try_nccl(processes=True)
    assert [process.returncode for process in started] == [-9]


class FakeNccl:
    """Ids that differ, and communicators that say what they were made of."""

    def __init__(self):
        self._made = 0

    def unique_id(self):
        self._made += 1
        return bytes([self._made]) * 128

    def join(self, ranks, rank, unique_id):
        assert len(unique_id) == 128 and len(set(unique_id)) == 1
        return ranks, rank, unique_id[0]


def test_processes_have_a_communicator_for_each_all_reduce(monkeypatch, tmp_path):
    class Member:
        def __init__(self, ranks, rank):
            self.comms = []

    monkeypatch.setattr(nccl_program, "_Rank", Member)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
    for rank in range(2):
        member = nccl_program._join(FakeNccl(), 2, rank, tmp_path / "ids")
        assert member.comms == [(2, rank, 1 + key) for key in range(len(SIZES))]


def test_a_process_runs_its_ranks_orders(monkeypatch, capsys):
    orders = []

    class Member:
        def run(self, nccl, turn, order, device_sync):
            orders.append(order)
            assert device_sync is True

    monkeypatch.setattr(nccl_program, "Nccl", FakeNccl)
    monkeypatch.setattr(nccl_program, "_join", lambda *_: Member())
    monkeypatch.setattr(nccl_program, "START_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["nccl_program", "4", "7", "1", "2", "3", "ids"])
    nccl_program.main()
    assert capsys.readouterr().out.split() == ["consistent", "random", "0", "1"]
    assert orders[-2:] == random_orders(7, 2, 4, len(SIZES))[:, 3].tolist()


# ---- bench/programs_beside_nccl.py ----


@pytest.fixture
def script(monkeypatch):
    """The module, on a machine that seems to have two GPUs."""
    path = ROOT / "bench" / "programs_beside_nccl.py"
    spec = importlib.util.spec_from_file_location("programs_beside_nccl", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(gpus, "gpu_count", lambda: 2)
    monkeypatch.setattr(gpus, "cuda_part", lambda: True)
    monkeypatch.setattr(report, "describe", lambda: {"gpu": "a GPU"})
    return module


def replace_tries(monkeypatch, script, ours, theirs):
    """``ours(seed)`` gives seconds in random order, ``theirs(seed)`` iterations of 10; or raise."""
    ran = []

    def unjam_try(program, processes):
        ran.append(("unjam", program["ranks"], program["device_sync"], processes))
        return {"seconds": {"random": ours(program["seed"]), "consistent": 2.0}, "results": 320}

    def nccl_try(ranks, seed, device_sync, iterations, limit_s, processes):
        ran.append(("nccl", ranks, device_sync, processes))
        done = theirs(seed)
        return nccl_program.NcclTry(done < iterations, done, limit_s)

    monkeypatch.setattr(script, "unjam_try", unjam_try)
    monkeypatch.setattr(nccl_program, "try_nccl", nccl_try)
    return ran


def test_figures_of_both_libraries(script, monkeypatch, tmp_path, capsys):
    ran = replace_tries(monkeypatch, script, float, lambda seed: {4: 1, 5: 10, 6: 3}[seed])
    arguments = ["--iterations", "10", "--tries", "3", "--seed", "4"]
    assert script.main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "seeds 4 to 6; at most 62 min" in out
    assert (
        "program 2, processes: one a rank: unjam completed 3 of 3 tries, 960 results checked, cost "
        "of disorder 2.50 (2.00-3.00); NCCL hung in 2 of 3 tries, after 2 iterations (median)"
    ) in out
    told = json.loads((tmp_path / "found.json").read_text())
    assert (told["seeds"], told["machine"]["gpu"]) == ([4, 5, 6], "a GPU")
    assert told["command"].startswith("python3 bench/programs_beside_nccl.py --iterations 10 ")
    rows = [(row["program"], row["processes"]) for row in told["rows"]]
    assert rows == [(1, "one"), (1, "one a rank"), (2, "one"), (2, "one a rank")]
    assert [one["iterations"] for one in told["rows"][0]["nccl_tries"]] == [1, 10, 3]
    ways = [(sync, processes) for sync in (False, True) for processes in (False, True)]
    assert ran == [(name, 2, *way) for way in ways for name in ["unjam"] * 3 + ["nccl"] * 3]


def test_that_nccl_completes_is_a_result(script, monkeypatch, capsys):
    replace_tries(monkeypatch, script, float, lambda seed: 10)
    assert script.main(["--iterations", "10", "--tries", "1", "--program", "2"]) == 0
    out = capsys.readouterr().out
    assert "NCCL hung in 0 of 1 tries, after - iterations" in out
    assert "program 1" not in out


@pytest.mark.parametrize("library", ["unjam", "NCCL"])
def test_a_failure_is_told_and_the_rest_goes_on(script, monkeypatch, tmp_path, capsys, library):
    def fail(seed):
        if seed == 1:
            raise RuntimeError("its words")
        return 5

    ours, theirs = (fail, lambda _: 0) if library == "unjam" else (float, fail)
    replace_tries(monkeypatch, script, ours, theirs)
    target = tmp_path / "found.json"
    assert script.main(["--tries", "2", "--program", "1", "--json", str(target)]) == 1
    out = capsys.readouterr().out
    assert f"{library} failed in program 1, processes: one, seed 1: RuntimeError: its words" in out
    assert ("completed 1 of 2" in out) == (library == "unjam")
    assert ("hung in 1 of 2 tries, 1 not run, after 5" in out) == (library == "NCCL")
    tries = json.loads(target.read_text())["rows"][1][f"{library.lower()}_tries"]
    assert tries[0] == {"seed": 1, "error": "RuntimeError: its words"}
    assert "error" not in tries[1]


def test_a_command_over_its_time_ends_with_what_it_started(script, tmp_path):
    """As the ranks of a try in several processes do."""
    mark = tmp_path / "mark"
    text = f"(while :; do printf . >>{mark}; sleep 0.01; done) & echo started; wait"
    with pytest.raises(TimeoutError, match=r"not complete after 0\.5 s; its words:\nstarted"):
        script.run_limited(["sh", "-c", text], 0.5)
    written = mark.stat().st_size
    time.sleep(0.1)
    assert mark.stat().st_size == written > 0


def test_a_command_that_fails_has_words(script):
    with pytest.raises(RuntimeError, match="ended with status 1; its words:\nno"):
        script.run_limited([sys.executable, "-S", "-c", "raise SystemExit('no')"], 30)


@pytest.mark.parametrize("processes", [False, True])
def test_a_try_as_a_child_sees_it(script, monkeypatch, capsys, processes):
    ran = []
    found = program.Outcome({"random": 3.0, "consistent": 2.0}, 16)
    for name in ("run_threads", "run_processes"):
        monkeypatch.setattr(program, name, lambda given, n=name: ran.append((n, given)) or found)

    def run_here(command, limit_s):
        assert script.main(command[2:]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(script, "run_limited", run_here)
    given = {"ranks": 2, "iterations": 1, "seed": 5, "device_sync": True}
    told = script.unjam_try(given, processes)
    assert told == {"seconds": {"random": 3.0, "consistent": 2.0}, "results": 16}
    name = "run_processes" if processes else "run_threads"
    assert ran == [(name, program.CudaProgram(2, 1, 5, True))]


def test_a_try_without_so_many_gpus_fails_in_its_child(script):
    with pytest.raises(RuntimeError, match="ended with status 1"):
        script.unjam_try({"ranks": 64, "iterations": 1, "seed": 1, "device_sync": False}, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], "--ranks: 1 is not at least 2"),
        (["--ranks", "3"], "3 ranks need a GPU each"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_arguments(script, arguments, words, capsys):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert words in capsys.readouterr().err
