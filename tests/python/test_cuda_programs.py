"""The programs on GPUs, as far as they go without one: data, orders, outcomes, arguments."""

import itertools

import pytest

from unjam.cli import _cuda_demo, main
from unjam.cuda import gpus
from unjam.programs import WrongResult

torch = pytest.importorskip("torch")

from unjam.cuda import program  # noqa: E402
from unjam.cuda.program import CudaProgram, Data, outcome, start, turns  # noqa: E402


def test_results_are_checked_bit_by_bit():
    ranks = [Data((256, 4096), 3, rank, "cpu") for rank in range(3)]
    for turn in range(3):
        for data in ranks:
            data.fill(turn)
        for key in range(2):
            total = sum(data.buffers[key] for data in ranks)
            for data in ranks:
                data.buffers[key].copy_(total)
        assert [data.check(turn) for data in ranks] == [2, 2, 2]
    ranks[1].buffers[1][7] += 1
    with pytest.raises(WrongResult, match=r"rank 1, turn 2, all-reduce B \(4 KiB\): 1 of 1024"):
        ranks[1].check(2)


def test_turns_alternate_and_only_random_ones_differ_between_ranks():
    found = list(turns(CudaProgram(4, 5, seed=3)))
    assert [name for name, _ in found] == ["random", "consistent"] * 5
    for name, orders in found:
        assert all(sorted(order) == list(range(8)) for order in orders)
        different = any(one != two for one, two in itertools.pairwise(orders))
        assert different == (name == "random")


def test_the_slowest_rank_counts():
    found = outcome(CudaProgram(2, 2), [([1.0, 2.0, 3.0, 4.0], 32), ([2.0, 1.0, 1.0, 6.0], 32)])
    assert found.seconds == {"random": 5.0, "consistent": 8.0}
    assert (found.results, found.cost_of_disorder) == (64, 0.625)


def test_a_rank_that_fails_is_told(monkeypatch):
    def start_something(module, arguments, variables, log):
        return start("no_such_module", arguments, variables, log)

    monkeypatch.setattr(program, "start", start_something)
    with pytest.raises(RuntimeError, match="ended with status 1; its words:(.|\n)*no_such_module"):
        program.run_processes(CudaProgram(2, 1))


def test_demo_takes_gpus_where_there_are_some(monkeypatch):
    seen = []
    monkeypatch.setattr(_cuda_demo, "run", lambda options: seen.append(options.ranks) or 0)
    monkeypatch.setattr(gpus, "lacking", lambda ranks, shared=False: "")
    assert main(["demo"]) == 0
    assert main(["demo", "--device", "cuda", "--ranks", "2"]) == 0
    assert seen == [None, 2]


@pytest.mark.parametrize(("count", "words"), [(1, "one GPU that 2 ranks share"), (3, "3 GPUs")])
def test_demo_on_whatever_gpus_there_are(count, words, monkeypatch, capsys):
    """On one that ranks share there is a process for each, and no NCCL."""
    ran, tried = [], []
    monkeypatch.setattr(gpus, "gpu_count", lambda: count)
    monkeypatch.setattr(gpus, "cuda_part", lambda: True)
    monkeypatch.setattr(gpus, "describe", lambda: {"gpu": "a GPU"})
    found = program.Outcome({"random": 2.0, "consistent": 1.0}, 16)
    for name in ("run_threads", "run_processes"):
        monkeypatch.setattr(
            program, name, lambda p, name=name: ran.append((name, p.ranks, p.device_sync)) or found
        )
    monkeypatch.setattr(_cuda_demo, "_show_nccl", lambda *_: tried.append(1))
    assert main(["demo", "--device", "cuda", "--quick"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    ways = ["run_processes"] if count == 1 else ["run_threads", "run_processes"]
    assert ran == [(way, max(2, count), sync) for sync in (False, True) for way in ways]
    assert len(tried) == (count > 1)


@pytest.mark.parametrize("command", ["demo", "stress"])
def test_what_is_lacking_is_a_usage_error(command, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "gpu_count", lambda: 0)
    with pytest.raises(SystemExit) as error:
        main([command, "--device", "cuda"])
    assert error.value.code == 2
    assert "ranks need a GPU each" in capsys.readouterr().err
