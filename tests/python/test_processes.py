"""Ranks as processes: how they are started, what they compute, and what they say when it fails."""

import importlib.util
import itertools
import os
import re
import shutil
import socket
import sys
import time

import numpy as np
import pytest

import unjam
from processes import SOON_S, environment, puppets, script, workers
from rank_tools import error_of, run_all, say


@pytest.fixture
def harness():
    with workers() as harness:
        yield harness


@pytest.fixture(scope="module")
def trio():
    """Three processes for tests that leave them as they are. Each uses keys of its own."""
    with workers() as harness:
        yield puppets(harness, 3)


# ---- how they are started ----


def hello():
    with unjam.init_from_environment() as context:
        x = np.full(1000, context.rank + 1, dtype=np.int64)
        context.group().all_reduce(x).wait(30)
        say([context.rank, context.size, int(x[0]), int(x[-1])])


def hellos(*processes, each=1):
    return sorted(p.said() for p in processes for _ in range(each))


def expected(ranks):
    total = ranks * (ranks + 1) // 2
    return [[rank, ranks, total, total] for rank in range(ranks)]


LOOP = """
export UNJAM_ID=$("$PYTHON" -m unjam id) UNJAM_RANKS=3
for r in 0 1 2; do UNJAM_RANK=$r "$PYTHON" "$WORKER" & done
wait
"""


@pytest.fixture
def hello_file(tmp_path):
    path = tmp_path / "hello.py"
    path.write_text(script(hello))
    return str(path)


def test_shell_loop(harness, hello_file):
    loop = harness.run(["bash", "-c", LOOP], PYTHON=sys.executable, WORKER=hello_file)
    assert hellos(loop, each=3) == expected(3)
    loop.ends()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")
def test_torchrun(harness, hello_file):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    run = harness.run([*launcher, f"--master-port={port}", hello_file])
    assert sorted(run.said(100) for _ in range(3)) == expected(3)
    run.ends()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
def test_mpirun(harness, hello_file):
    # Root and few cores: so it is in containers.
    run = harness.run(
        ["mpirun", "-n", "3", sys.executable, hello_file],
        OMPI_ALLOW_RUN_AS_ROOT=1,
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1,
        OMPI_MCA_rmaps_base_oversubscribe=1,
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    assert hellos(run, each=3) == expected(3)
    run.ends()


def as_launched(launcher, rank, ranks, name):
    """The environment that a launcher makes."""
    return {
        "unjam": {"UNJAM_RANK": rank, "UNJAM_RANKS": ranks, "MASTER_PORT": name},
        "torchrun": {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": name,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": 0,
        },
        "openmpi": {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": ranks,
            "OMPI_COMM_WORLD_LOCAL_SIZE": ranks,
            "PMIX_NAMESPACE": f"{name}@1",
        },
        "mpich": {
            "PMI_RANK": rank,
            "PMI_SIZE": ranks,
            "MPI_LOCALNRANKS": ranks,
            "PMI_JOBID": name,
        },
        "srun": {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": ranks,
            "SLURM_NNODES": 1,
            "SLURM_JOB_ID": name,
            "SLURM_STEP_ID": 0,
        },
    }[launcher]


LAUNCHERS = ["unjam", "torchrun", "openmpi", "mpich", "srun"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_variables_of_launchers(harness, launcher):
    name = f"{os.getpid()}{time.monotonic_ns() % 10**6}"
    ranks = [harness.start(hello, **as_launched(launcher, r, 2, name)) for r in range(2)]
    assert hellos(*ranks) == expected(2)
    for rank in ranks:
        rank.ends()


def test_jobs_beside_each_other(harness):
    """Told apart by their ports only, as two torchruns are."""
    jobs = [
        [harness.start(hello, **as_launched("torchrun", r, ranks, port)) for r in range(ranks)]
        for ranks, port in [(2, 29511), (3, 29512)]
    ]
    assert hellos(*jobs[0]) == expected(2)
    assert hellos(*jobs[1]) == expected(3)


def test_one_id_for_job_after_job(harness):
    def again():
        for i in range(5):
            with unjam.init_from_environment() as context:
                x = np.full(10, i * (context.rank + 1))
                context.group().all_reduce(x).wait(30)
                say([context.rank, i, int(x[0])])
            if context.rank == i % 2:
                time.sleep(0.05)

    ranks = harness.job(2, again)
    for i, rank in itertools.product(range(5), range(2)):
        assert ranks[rank].said() == [rank, i, 3 * i]
    for rank in ranks:
        rank.ends()


@pytest.fixture
def variables(monkeypatch):
    """Sets this process's environment, for unjam.init_from_environment()."""

    def change(**changes):
        clean = environment(**changes)
        for name in list(os.environ):
            if name not in clean:
                monkeypatch.delenv(name)
        for name, value in clean.items():
            monkeypatch.setenv(name, value)

    return change


ONE_OF_TWO = {"UNJAM_RANK": 0, "UNJAM_RANKS": 2}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "the environment names no rank.*torchrun.*UNJAM_RANK"),
        ({"UNJAM_RANK": 0}, "UNJAM_RANK is set, UNJAM_RANKS is not"),
        ({"RANK": 0}, "RANK is set, WORLD_SIZE is not"),
        (ONE_OF_TWO, "names this job: set UNJAM_ID"),
        ({**ONE_OF_TWO, "UNJAM_ID": "12"}, "UNJAM_ID is no unique id"),
        ({**ONE_OF_TWO, "UNJAM_ID": "zz" * 64}, "UNJAM_ID is no unique id"),
        ({**ONE_OF_TWO, "UNJAM_ID": "00" * 40}, "UNJAM_ID is no unique id"),
        ({"UNJAM_RANK": 2, "UNJAM_RANKS": 2}, "UNJAM_RANK=2 and UNJAM_RANKS=2"),
        ({"UNJAM_RANK": "x", "UNJAM_RANKS": 2}, "UNJAM_RANK=x is not valid"),
        ({"UNJAM_RANK": -1, "UNJAM_RANKS": 2}, "UNJAM_RANK=-1 is not valid"),
        ({"UNJAM_RANK": 0, "UNJAM_RANKS": 65}, "1 to 64 ranks"),
        ({"UNJAM_RANK": 0, "UNJAM_RANKS": 0}, "1 to 64 ranks"),
        ({**as_launched("torchrun", 0, 4, 1), "LOCAL_WORLD_SIZE": 2}, "on one machine"),
        ({**as_launched("openmpi", 0, 4, 1), "OMPI_COMM_WORLD_LOCAL_SIZE": 2}, "on one machine"),
        ({**as_launched("mpich", 0, 4, 1), "MPI_LOCALNRANKS": 3}, "on one machine"),
        ({**as_launched("srun", 0, 4, 1), "SLURM_NNODES": 2}, "on one machine"),
    ],
)
def test_environment_that_does_not_do(variables, changes, message):
    variables(**changes)
    with pytest.raises(unjam.InvalidUsage, match=message):
        unjam.init_from_environment()


def test_one_rank_needs_no_id(variables):
    variables(UNJAM_RANK=0, UNJAM_RANKS=1)
    with unjam.init_from_environment() as context:
        assert (context.rank, context.size) == (0, 1)


def try_to_join():
    say(error_of(unjam.init_from_environment))


def test_wrong_id(harness):
    first, second = (
        harness.start(
            try_to_join,
            UNJAM_ID=unjam.unique_id().rstrip(b"\0").hex(),
            UNJAM_RANK=rank,
            UNJAM_RANKS=2,
            UNJAM_INIT_TIMEOUT_MS=700,
        )
        for rank in range(2)
    )
    for process, missing in [(first, 1), (second, 0)]:
        kind, message = process.said()
        assert kind == "Timeout"
        assert f"rank {missing} did not join within 700 ms" in message


def first_said(*processes):
    """The next value that any of them says."""
    end = time.monotonic() + SOON_S
    for process in itertools.cycle(processes):
        assert time.monotonic() < end, "nobody says anything"
        if process.has_said():
            return process.said()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "second, kind, message",
    [
        ({"UNJAM_RANK": 0}, "InvalidUsage", "rank 0 has joined this job already"),
        ({"UNJAM_RANKS": 3}, "Mismatch", "says that the job has .* ranks"),
        ({"UNJAM_LANES": 2}, "Mismatch", "settings differ: rank .*UNJAM_LANES=.*UNJAM_LANES="),
    ],
)
def test_ranks_that_do_not_fit_together(harness, second, kind, message):
    job = {
        "UNJAM_ID": unjam.unique_id().rstrip(b"\0").hex(),
        "UNJAM_RANKS": 2,
    }
    a = harness.start(try_to_join, UNJAM_RANK=0, **job)
    b = harness.start(try_to_join, **{"UNJAM_RANK": 1, **job, **second})
    # Whoever comes second is told; the other may go on waiting.
    error = first_said(a, b)
    if error[0] != kind:
        assert error[0] == "Peer"
        error = first_said(a, b)
    assert error[0] == kind
    assert re.search(message, error[1]), error


# ---- what they compute ----


def storm(seed, shares):
    """Every collective, many times, on this process's ranks; each rank and thread in its order."""
    nranks = sum(len(share) for share in shares)
    unique = bytes.fromhex(os.environ["UNJAM_ID"]).ljust(128, b"\0")
    dtypes = ["int8", "uint8", "int32", "int64", "uint32", "uint64", "float16", "float32"]
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast"]
    plan = np.random.default_rng(seed)  # the same on all ranks
    calls = [
        (
            i,
            kinds[i % len(kinds)],
            dtypes[plan.integers(len(dtypes))],
            int(plan.choice([0, 1, 7, 1000, 30000])),
            int(plan.integers(nranks)),
            ["sum", "min", "max"][plan.integers(3)],
        )
        for i in range(60)
    ]

    def values(i, rank, count, dtype):
        # Small, so that no sum rounds or overflows.
        base = np.arange(count, dtype=np.int64)
        return ((base * 7 + 3 * i + 5 * rank) % 11).astype(dtype)

    def check(call, rank, out):
        i, kind, dtype, count, root, op = call
        n = nranks if kind == "reduce_scatter" else 1
        inputs = [values(i, r, count * n, dtype) for r in range(nranks)]
        function = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
        if kind == "all_gather":
            want = np.concatenate(inputs)
        elif kind == "broadcast":
            want = inputs[root]
        else:
            want = function.reduce(inputs).astype(dtype)
        if kind == "reduce_scatter":
            want = want.reshape(nranks, -1)[rank]
        if kind == "reduce" and rank != root:
            want = inputs[rank]
        np.testing.assert_array_equal(out, want, err_msg=repr(call))

    def rank_main(rank):
        with unjam.init(nranks, rank, unique) as context:
            group = context.group()
            order = np.random.default_rng([seed, rank]).permutation(len(calls))

            def part(mine):
                started = []
                for c in mine:
                    i, kind, dtype, count, root, op = calls[c]
                    n = nranks if kind == "reduce_scatter" else 1
                    x = values(i, rank, count * n, dtype)
                    out, more = x, {}
                    if kind in ("all_gather", "reduce_scatter"):
                        size = count * nranks if kind == "all_gather" else count
                        out = more["out"] = np.zeros(size, dtype=dtype)
                    if kind in ("reduce", "broadcast"):
                        more["root"] = root
                    if kind not in ("all_gather", "broadcast"):
                        more["op"] = op
                    request = getattr(group, kind)(x, key=f"call {i}", **more)
                    started.append((request, calls[c], out))
                for request, call, out in reversed(started):
                    request.wait(60)
                    check(call, rank, out)

            run_all([lambda m=order[t::3]: part(m) for t in range(3)])

    run_all([lambda r=rank: rank_main(r) for rank in shares[int(os.environ["PLACE"])]])
    say("done")


@pytest.mark.parametrize(
    "shares",
    [
        [[0], [1]],
        [[0], [1], [2]],
        [[0], [1], [2], [3], [4]],
        [[0, 2], [1], [3]],
        [[0, 1, 2], [3, 4, 5]],
    ],
    ids=["2", "3", "5", "threads and processes", "two of three threads"],
)
def test_collectives(harness, shares):
    unique = unjam.unique_id().rstrip(b"\0").hex()
    processes = [
        harness.start(storm, 7 * len(shares), shares, UNJAM_ID=unique, PLACE=place)
        for place in range(len(shares))
    ]
    for process in processes:
        assert process.said(100) == "done"
        process.ends()
