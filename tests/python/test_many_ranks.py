"""Jobs of more than 64 ranks on the host device.

The long ones: ``pytest -m soak tests/python/test_many_ranks.py``.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kinds_of_all
import unjam
from explanations import settled
from processes import environment
from unjam import programs
from unjam.programs import Program

MANY = 66  # threads
PROCESSES = 72
# Algorithms that serve any number of ranks, and those whose plans end at 64.
ANY_SIZE = ("auto", "ring", "chain", "pairwise", "double_binary_tree", "pat")
TO_64 = ("one_shot", "rsag", "two_shot", "hierarchical")


def all_kinds(ranks, roots=None, **config):
    roots = (0, ranks // 2, ranks - 1) if roots is None else roots
    unjam.launch(ranks, lambda context: kinds_of_all.check(context, roots), lanes=1, **config)


def forked(ranks, what, limit=None, seconds=120, **env):
    """What each rank of such a job says, see forked_job.py."""
    program = Path(__file__).with_name("forked_job.py")
    arguments = json.dumps({"ranks": ranks, "what": what, "limit": limit})
    ran = subprocess.run(
        [sys.executable, program, arguments],
        env=environment(**env),
        stdout=subprocess.PIPE,
        timeout=seconds,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.parametrize("algorithm", ANY_SIZE)
def test_all_kinds(algorithm):
    all_kinds(MANY, **({} if algorithm == "auto" else {"algorithm": algorithm}))


def test_in_place_and_wider_than_a_slot():
    """And several chunks of each part, on two lanes."""
    ranks, count = MANY, 3000

    def rank_main(context):
        world, rank = context.group(), context.rank
        everything = np.zeros(ranks * count, dtype=np.int32)
        own = everything[rank * count : (rank + 1) * count]
        own[:] = rank
        world.all_gather(own, everything).wait(120)
        assert np.array_equal(everything, np.repeat(np.arange(ranks), count))
        got = np.zeros_like(everything)
        world.all_to_all(everything + rank, got).wait(120)
        assert np.array_equal(got, np.repeat(np.arange(ranks) + rank, count))

    unjam.launch(ranks, rank_main, lanes=2)


@pytest.mark.parametrize("algorithm", TO_64)
def test_what_ends_at_64_ranks_says_so(algorithm):
    def rank_main(context):
        with pytest.raises(unjam.InvalidArgument, match=f"at most 64 ranks.* {MANY}"):
            context.group().all_reduce(np.zeros(5, dtype=np.float32))

    unjam.launch(MANY, rank_main, lanes=1, algorithm=algorithm)


def test_cuda_jobs_end_at_72_ranks():
    with pytest.raises(unjam.InvalidArgument, match="serve up to 72: use fewer ranks, or the host"):
        unjam.init_all(73, device="cuda")


@pytest.mark.parametrize("device_sync", [False, True])
def test_programs(device_sync):
    program = Program(ranks=MANY, iterations=1, device_sync=device_sync, sizes=(256, 4096))
    part = programs.run(program)["random"]
    assert part.results == 2 * MANY
    assert part.stats.submitted == part.stats.completed


def test_explanations_name_64_ranks():
    late = MANY - 1
    released = threading.Event()

    def all_called(explanation):
        pending = explanation["ranks"][0]["pending"]
        return pending and pending[0].get("called_by_more") == 1 and explanation.get("ranks_more")

    def rank_main(context):
        if context.rank == late:
            assert released.wait(200)
        request = context.group().all_reduce(np.ones(4, dtype=np.float32), key="late")
        if context.rank == 0:
            explanation = settled(context.explain, all_called)
            call = explanation["ranks"][0]["pending"][0]
            assert call["not_called_by"] == [late]
            assert call["called_by"] == list(range(64))
            # Who is waited for is among those that are named.
            assert len(explanation["ranks"]) == 64 and explanation["ranks_more"] == MANY - 64
            assert explanation["ranks"][-1]["rank"] == late
            words = (", 63, … (1 more); not called by: 65", "(2 more ranks)")
            settled(unjam.explain, lambda text: all(word in text for word in words))
            released.set()
        request.wait(200)

    unjam.launch(MANY, rank_main, lanes=1)


def test_who_did_not_join(monkeypatch):
    monkeypatch.setenv("UNJAM_INIT_TIMEOUT_MS", "300")
    with pytest.raises(unjam.UnjamError) as caught:
        unjam.init(MANY, 1, unjam.unique_id(), lanes=1)
    assert "ranks 0, 2, 3, 4," in str(caught.value)
    assert f"({MANY - 1} in all) did not join within 300 ms" in str(caught.value)


def test_processes():
    assert forked(PROCESSES, "kinds") == [None] * PROCESSES


def check_killed(ranks):
    outcomes = forked(ranks, "killed")
    assert outcomes.pop(5) is None
    for text, _ in outcomes:
        assert "rank 5 is gone: its process" in text and "died" in text
    return max(seconds for _, seconds in outcomes)


def test_a_killed_rank_is_named_by_all_others():
    assert check_killed(PROCESSES) < 40


# ---- limits of the system ----


def test_too_few_files_for_who_keeps_the_rendezvous():
    """It runs out before all have joined; those that come later hear of it, too."""
    limit = {"name": "RLIMIT_NOFILE", "most": 128, "rank": None}
    outcomes = forked(PROCESSES, "start", limit, UNJAM_INIT_TIMEOUT_MS=60000)
    for text in outcomes:
        assert text.startswith("init: ")
        assert "may have 128 files open (RLIMIT_NOFILE)" in text and "`ulimit -n" in text


def test_too_few_files_for_one_rank():
    limit = {"name": "RLIMIT_NOFILE", "most": 100, "rank": 40}
    for text in forked(PROCESSES, "start", limit, UNJAM_INIT_TIMEOUT_MS=60000):
        assert "rank 40 (process" in text and "more files open (RLIMIT_NOFILE), and needs" in text
        assert f"in a job of {PROCESSES} processes" in text and "`ulimit -n" in text


def test_too_few_addresses():
    """Rank 3 maps its own memory, and not that of all others: they hear why at their first call."""
    most = 12 << 30
    limit = {"name": "RLIMIT_AS", "most": most, "rank": 3}
    outcomes = forked(24, "start", limit, UNJAM_INIT_TIMEOUT_MS=60000)
    cause = f"{most} bytes of addresses, RLIMIT_AS: raise it with `ulimit -v unlimited`"
    assert outcomes[3].startswith("init: ") and cause in outcomes[3]
    for text in outcomes[:3] + outcomes[4:]:
        assert "rank 3 is gone: it could not start: cannot map" in text and cause in text


def test_no_more_threads():
    """(The superuser may have any number of threads: the job's processes are nobody's.)"""
    code = (
        "import os, resource, unjam\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (8, 8))\n"
        "try:\n"
        "    unjam.init_all(16, lanes=1)\n"
        "except unjam.UnjamError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", f"import numpy, unjam, unjam._lib; unjam._lib.library()\n{code}"],
        env=environment(OPENBLAS_NUM_THREADS=1),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "RLIMIT_NPROC: raise it with `ulimit -u`" in ran.stdout, ran.stdout + ran.stderr


# ---- long ----


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [65, 128, 256])
@pytest.mark.parametrize("algorithm", ANY_SIZE)
def test_all_kinds_of_many_threads(ranks, algorithm):
    all_kinds(ranks, **({} if algorithm == "auto" else {"algorithm": algorithm}))


@pytest.mark.soak
@pytest.mark.parametrize("device_sync", [False, True])
def test_programs_of_256_threads(device_sync):
    program = Program(ranks=256, iterations=2, device_sync=device_sync, sizes=(256, 4096))
    assert programs.run(program)["random"].results == 2 * 2 * 256


@pytest.mark.soak
def test_128_processes():
    assert forked(128, "kinds", seconds=600) == [None] * 128


@pytest.mark.soak
def test_a_killed_rank_of_128_processes():
    assert check_killed(128) < 40
