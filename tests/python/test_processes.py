"""Ranks as processes: how they are started, what they compute, and what they say when it fails."""

import importlib.util
import itertools
import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest

import unjam
from explanations import settled
from processes import SOON_S, environment, puppets, script, tell_all, workers
from rank_tools import error_of, hear, run_all, say


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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    run = harness.run([*launcher, "--standalone", hello_file])
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


def job_name():
    """A number that no other job of this machine has: not of a test run beside this one, either."""
    return f"{os.getpid()}{time.monotonic_ns() % 10**6}"


LAUNCHERS = ["unjam", "torchrun", "openmpi", "mpich", "srun"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_variables_of_launchers(harness, launcher):
    name = job_name()
    ranks = [harness.start(hello, **as_launched(launcher, r, 2, name)) for r in range(2)]
    assert hellos(*ranks) == expected(2)
    for rank in ranks:
        rank.ends()


def test_jobs_beside_each_other(harness):
    """Told apart by their ports only, as two torchruns are."""
    jobs = [
        [harness.start(hello, **as_launched("torchrun", r, ranks, port)) for r in range(ranks)]
        for ranks, port in [(2, job_name()), (3, job_name())]
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
        ({"UNJAM_RANK": 0, "UNJAM_RANKS": 65536}, "1 to 65535 ranks"),
        ({"UNJAM_RANK": 0, "UNJAM_RANKS": 0}, "1 to 65535 ranks"),
        ({**as_launched("torchrun", 0, 4, 1), "LOCAL_WORLD_SIZE": 2}, "set UNJAM_ROOT"),
        ({**as_launched("openmpi", 0, 4, 1), "OMPI_COMM_WORLD_LOCAL_SIZE": 2}, "set UNJAM_ROOT"),
        ({**as_launched("mpich", 0, 4, 1), "MPI_LOCALNRANKS": 3}, "set UNJAM_ROOT"),
        ({**as_launched("srun", 0, 4, 1), "SLURM_NNODES": 2}, "set UNJAM_ROOT"),
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


def first_to_say(*processes):
    """Whoever of them says something, or ends, first."""
    end = time.monotonic() + SOON_S
    for process in itertools.cycle(processes):
        assert time.monotonic() < end, "nobody says anything"
        if process.has_said():
            return process
        time.sleep(0.01)


@pytest.mark.parametrize(
    "second, kind, message",
    [
        ({"UNJAM_RANK": 0}, "InvalidUsage", "rank 0 has joined this job already"),
        ({"UNJAM_RANKS": 3}, "Mismatch", "says that the job has .* ranks"),
        ({"UNJAM_LANES": 2}, "Mismatch", "settings differ: rank .*UNJAM_LANES=.*UNJAM_LANES="),
        ({"UNJAM_HOST_ID": "b"}, "Mismatch", "rank 1 has UNJAM_HOST_ID=b, rank 0 has none: set it"),
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
    first = first_to_say(a, b)
    error = first.said()
    if error[0] != kind:
        assert error[0] == "Peer"
        error = (b if first is a else a).said()
    assert error[0] == kind
    assert re.search(message, error[1]), error


def on_hosts():
    with unjam.init_from_environment() as context:
        group = context.group()
        x = np.full(1000, context.rank + 1, dtype=np.int64)
        group.all_reduce(x, key="h", algorithm="hierarchical").wait(30)
        own = np.array([context.rank], dtype=np.int32)
        blocks = np.empty(context.size, dtype=np.int32)
        group.all_gather(own, blocks, key="p", algorithm="pat").wait(30)
        say([int(x[0]), int(x[-1]), blocks.tolist(), context.info()["hosts"]])


def test_hosts(harness):
    """Two hosts of two ranks, which are not one after the other."""
    unique = unjam.unique_id().rstrip(b"\0").hex()
    hosts = ["a", "b", "b", "a"]
    ranks = [
        harness.start(
            on_hosts, UNJAM_ID=unique, UNJAM_RANK=rank, UNJAM_RANKS=4, UNJAM_HOST_ID=hosts[rank]
        )
        for rank in range(4)
    ]
    for rank in ranks:
        assert rank.said() == [10, 10, [0, 1, 2, 3], hosts]
        rank.ends()


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


# ---- ranks that disagree ----


def summed(ranks, key, seconds=40):
    return [rank.do(f"end({key!r}, {seconds})") for rank in ranks]


# What two ranks call, what the third one calls, and their signatures.
DISAGREEMENTS = {
    "count": (
        "call('all_reduce', KEY, count=1000)",
        "call('all_reduce', KEY, count=999)",
        ["all_reduce(count=1000, float32, sum)", "all_reduce(count=999, float32, sum)"],
    ),
    "dtype": (
        "call('all_gather', KEY, dtype='int32')",
        "call('all_gather', KEY, dtype='int64')",
        ["all_gather(count=4, int32)", "all_gather(count=4, int64)"],
    ),
    "op": (
        "call('reduce_scatter', KEY, count=6, op='sum')",
        "call('reduce_scatter', KEY, count=6, op='max')",
        ["reduce_scatter(count=2, float32, sum)", "reduce_scatter(count=2, float32, max)"],
    ),
    "kind": (
        "call('all_reduce', KEY)",
        "call('all_gather', KEY)",
        ["all_reduce(count=4, float32, sum)", "all_gather(count=4, float32)"],
    ),
}


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(trio, what, odd):
    """All are told who said what, soon, in whatever order they call; other keys go on."""
    most, other, texts = DISAGREEMENTS[what]
    key = f"{what} {odd}"
    others = [rank for rank in range(3) if rank != odd]
    for order in ([odd, *others], [*others, odd], [others[0], odd, others[1]]):
        name = f"{key} {order}"
        began = time.monotonic()
        for rank in order:
            text = other if rank == odd else most
            trio[rank].do(text.replace("KEY", repr(name)))
        for rank in trio:
            kind, message = rank.fails(f"end({name!r})")
            assert kind == "Mismatch", message
            assert texts[0] in message and texts[1] in message, message
            assert re.search(rf"\brank {odd} called {re.escape(texts[1])}", message), message
            assert f"key '{name}'" in message
        assert time.monotonic() - began < SOON_S
        for rank in trio:
            rank.do("call('all_reduce', 'beside disagreements')")
        assert summed(trio, "beside disagreements") == [24.0] * 3


def test_rank_that_disagrees_late(trio):
    """It is told at once, and so are calls after it."""
    trio[0].do("call('all_reduce', 'late', count=10)")
    trio[1].do("call('all_reduce', 'late', count=20)")
    for rank in trio[:2]:
        kind, message = rank.fails("end('late')")
        assert kind == "Mismatch"
        assert "rank 0 called all_reduce(count=10" in message
        assert "rank 1 called all_reduce(count=20" in message
    time.sleep(0.3)
    kind, message = trio[2].fails("call('all_reduce', 'late', count=30), end('late')")
    assert kind == "Mismatch"
    assert "rank 0 called all_reduce(count=10" in message
    assert "rank 1 called all_reduce(count=20" in message
    for rank in trio:
        kind, message = rank.fails("call('all_reduce', 'late', count=10)")
        assert kind == "Mismatch"
        assert "out of use" in message


def test_roots_that_differ(harness):
    """Who only sends may be done before; all learn of it by their asynchronous error at least.

    That is a context's first one, so these processes have no other.
    """
    ranks = puppets(harness, 3)
    for rank, root in zip(ranks, [0, 0, 1], strict=True):
        rank.do(f"call('broadcast', 'roots', root={root})")
    ended = [rank.outcome("end('roots')") for rank in ranks]
    assert any(kind == "Mismatch" for kind, _ in ended)
    for rank, (kind, message) in zip(ranks, ended, strict=True):
        if kind is None:
            rank.do("until(context.async_error)")
            message = rank.do("str(context.async_error())")
        assert "ranks disagree" in message and "key 'roots'" in message, message
        kind, message = rank.fails("call('broadcast', 'roots')")
        assert kind == "Mismatch" and "out of use" in message, message


# ---- ranks that never call ----


def test_rank_that_never_calls_is_reported(harness):
    ranks = puppets(harness, 3, UNJAM_REPORT_MS=300)
    for rank in ranks[:2]:
        rank.do("call('all_reduce', 'lost', count=17)")
    for rank in ranks[:2]:
        # (The first report may be older than the second call, or than rank 2's answer.)
        told = "rank 2 has not called it; ranks 0, 1 have called it"
        report = rank.process.wait_for_stderr(told)
        line = next(x for x in report.splitlines() if told in x)
        assert "key 'lost'" in line
        assert "all_reduce(count=17, float32, sum)" in line
        assert re.search(r"pending for \d+\.\d s", line)
    # It comes again, and is no error: the call goes on.
    end = time.monotonic() + SOON_S
    while ranks[0].process.stderr.count("key 'lost'") < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "lost" not in ranks[2].process.stderr
    ranks[2].do("call('all_reduce', 'lost', count=17)")
    assert summed(ranks, "lost") == [6.0 * 17] * 3


def test_no_report_if_none_is_wanted(harness):
    ranks = puppets(harness, 2, UNJAM_REPORT_MS=0, UNJAM_STALL_MS=20)
    ranks[0].do("call('all_reduce', 'lost')")
    time.sleep(1)
    assert ranks[0].process.stderr == ""
    ranks[1].do("call('all_reduce', 'lost')")
    summed(ranks, "lost")


def test_rank_that_never_calls_times_out(harness):
    ranks = puppets(harness, 3, UNJAM_TIMEOUT_MS=8000)  # all call within that
    for attempt in range(5):  # who does not answer within a second is not named
        key = f"lost {attempt}"
        call, end = f"call('all_reduce', {key!r}, count=17)", f"end({key!r})"
        tell_all(ranks[:2], call)
        told = [rank.fails(end) for rank in ranks[:2]]
        if not any("not answer" in message for _, message in told):
            break
    for kind, message in told:
        assert kind == "Timeout"
        assert f"key '{key}'" in message and "UNJAM_TIMEOUT_MS" in message
        assert "rank 2 has not called it" in message
        assert "ranks 0, 1 have called it" in message
    # Late, and told why.
    kind, message = ranks[2].fails(f"{call}, {end}")
    assert kind == "Timeout"
    assert "rank 2 has not called it" in message
    for rank in ranks:
        kind, message = rank.fails(f"{call}, {end}")
        assert (kind, "out of use" in message) == ("Timeout", True)
    tell_all(ranks, "call('all_reduce', 'other')")
    assert summed(ranks, "other") == [24.0] * 3


# ---- ranks that go ----


def test_rank_that_leaves_without_calling(harness):
    ranks = puppets(harness, 3, UNJAM_STALL_MS=100)
    for rank in ranks:
        rank.do("call('all_reduce', 'before')")
    assert summed(ranks, "before") == [24.0] * 3
    for rank in ranks[:2]:
        rank.do("call('all_reduce', 'lost')")
    ranks[2].do("context.close()")
    for rank in ranks[:2]:
        kind, message = rank.fails("end('lost')")
        assert kind == "Peer"
        assert "rank 2 left the job without calling key 'lost'" in message
        assert rank.do("context.absent()") == [2]
    ranks[2].end()
    # What it left behind works on.
    for rank in ranks[:2]:
        rank.do("rest = group.shrink('rest')")
        rank.do("call('all_reduce', 'k', on=rest)")
    assert summed(ranks[:2], "k") == [12.0] * 2


def test_rank_that_leaves_after_its_part(harness):
    """A broadcast's root is done early: its data stays where the others find it."""
    ranks = puppets(harness, 3)
    ranks[0].do("call('broadcast', 'b', count=50, value=9, root=0), end('b')")
    ranks[0].do("context.close()")
    ranks[0].end()
    for rank in ranks[1:]:
        rank.do("call('broadcast', 'b', count=50, root=0)")
    assert summed(ranks[1:], "b") == [450.0] * 2


def test_abort(harness):
    ranks = puppets(harness, 3)
    for rank in ranks[:2]:
        rank.do("call('all_reduce', 'k')")
        rank.do("later(\"end('k')\")")
    pair = "pair = context.group([1, 2], 'pair')"
    for rank in ranks[1:]:
        rank.do(pair)
        rank.do("call('all_reduce', 'p', on=pair)")
    # By another thread than the one that waits.
    ranks[0].do("context.abort()")
    kind, message = ranks[0].do("outcome(\"end('k')\")")
    assert kind == "Aborted"
    kind, message = ranks[1].do("outcome(\"end('k')\")")
    assert kind == "Peer"
    assert "rank 0 is gone" in message
    # Groups without it go on.
    assert summed(ranks[1:], "p") == [20.0] * 2
    for rank in ranks[1:]:
        kind, message = rank.outcome("call('all_reduce', 'k2')")
        if kind is None:  # in front of the news, which each process hears by itself
            kind, message = rank.fails("end('k2')")
        assert kind == "Peer"
        assert "rank 0 is gone" in message
    assert ranks[0].fails("call('all_reduce', 'k2')")[0] == "Aborted"
    ranks[0].do("context.abort()")
    ranks[0].do("context.close()")


def test_close_with_work_pending_is_an_error(harness):
    ranks = puppets(harness, 2)
    ranks[0].do("call('all_reduce', 'k')")
    kind, message = ranks[0].fails("context.close()")
    assert kind == "InvalidUsage"
    assert "pending" in message and "'k'" in message
    ranks[1].do("call('all_reduce', 'k')")
    assert summed(ranks, "k") == [12.0] * 2
    for rank in ranks:
        rank.do("context.close()")
        rank.end()


def test_killed_process(harness):
    """The others are told who died, shrink their groups, and run on; twice."""
    ranks = puppets(harness, 4)
    left = list(range(4))
    for rank in ranks:
        rank.do("rest = group")
    for round_number, victim in enumerate([2, 0]):
        key = f"round {round_number}"
        left.remove(victim)
        for r in left:
            ranks[r].do(f"call('all_reduce', {key!r}, count=100000, on=rest)")
        ranks[victim].process.signal(signal.SIGKILL)
        for r in left:
            kind, message = ranks[r].fails(f"end({key!r})")
            assert kind == "Peer"
            assert (
                f"rank {victim} is gone: its process ({ranks[victim].process.pid}) died" in message
            )
            kind, message = ranks[r].fails("call('all_reduce', 'next', on=rest)")
            assert kind == "Peer"
            assert victim in ranks[r].do("context.absent()")
        for r in left:
            ranks[r].do(f"rest = rest.shrink('rest {round_number}')")
            assert ranks[r].do("list(rest.ranks)") == left
            ranks[r].do("call('all_reduce', 'again', count=100000, on=rest)")
        total = sum(r + 1 for r in left) * 1e5
        assert summed([ranks[r] for r in left], "again") == [total] * len(left)
    assert ranks[1].do("context.absent()") == [0, 2]


def test_process_that_dies_in_the_middle(harness):
    """With large calls on the way everywhere."""
    ranks = puppets(harness, 3)
    for rank in ranks:
        for key in "abc":
            rank.do(f"call('all_reduce', {key!r}, count=3000000)")
    os.kill(ranks[1].process.pid, signal.SIGKILL)
    for r in (0, 2):
        for key in "abc":
            kind, message = ranks[r].outcome(f"end({key!r})")
            assert kind in (None, "Peer"), message
    for r in (0, 2):
        # All may have been complete before it was killed: then nobody has heard of that yet.
        ranks[r].do("until(lambda: context.absent() == [1])")
        ranks[r].do("rest = group.shrink()")
        ranks[r].do("call('all_reduce', 'rest', on=rest)")
    assert summed([ranks[0], ranks[2]], "rest") == [16.0] * 2


def test_process_that_just_ends(harness):
    """sys.exit in the middle: what is open is aborted, the others are told."""
    ranks = puppets(harness, 2)
    ranks[0].do("call('all_reduce', 'k')")
    ranks[1].do("call('all_reduce', 'other')")
    ranks[1].process.tell(None)
    ranks[1].process.ends()
    kind, message = ranks[0].fails("end('k')")
    assert kind == "Peer"
    assert "rank 1 is gone" in message


def two_ranks(unique):
    """Ranks 1 and 2 of three, in one process."""
    contexts = {}

    def join(rank):
        contexts[rank] = unjam.init(3, rank, bytes.fromhex(unique))

    run_all([lambda r=rank: join(r) for rank in (1, 2)])
    requests = [contexts[rank].group().all_reduce(np.ones(3), key="all of them") for rank in (1, 2)]
    say("called")
    unjam.wait_all(requests, 30)
    say(requests[0].result().tolist())
    hear()


def test_killed_process_of_two_ranks(harness):
    """Both are named, once each."""
    unique = unjam.unique_id().hex()
    two = harness.start(two_ranks, unique)
    with unjam.init(3, 0, bytes.fromhex(unique)) as context:
        group = context.group()
        assert two.said() == "called"
        settled(
            context.explain, lambda e: [len(rank["pending"]) for rank in e["ranks"]] == [0, 1, 1]
        )
        x = np.ones(3)
        group.all_reduce(x, key="all of them").wait(SOON_S)
        assert two.said() == x.tolist() == [3.0] * 3
        request = group.all_reduce(x, key="again")
        two.kill()
        with pytest.raises(unjam.Peer, match=rf"rank [12] is gone: its process \({two.pid}\) died"):
            request.wait(SOON_S)
        end = time.monotonic() + SOON_S
        while context.absent() != [1, 2] and time.monotonic() < end:
            time.sleep(0.01)
        assert context.absent() == [1, 2]
        alone = group.shrink()
        alone.all_reduce(x, key="alone").wait(SOON_S)
        assert alone.ranks == (0,)


def test_rank_of_another_process_is_refused_once_the_job_runs(harness):
    """And its memory stays as it is here."""
    unique = unjam.unique_id().hex()
    two = harness.start(two_ranks, unique)
    with unjam.init(3, 0, bytes.fromhex(unique)) as context:
        with pytest.raises(unjam.InvalidUsage, match=rf"joined this job already .*{two.pid}"):
            unjam.init(3, 1, bytes.fromhex(unique))
        x = np.ones(3)
        context.group().all_reduce(x, key="all of them").wait(SOON_S)
        assert two.said() == "called"
        assert two.said() == x.tolist() == [3.0] * 3
        two.kill()


# ---- how they end ----

ENDING = """
import json, multiprocessing, os, signal, sys, time
import numpy as np
import unjam

def end(how):
    if how == "sys.exit":
        sys.exit(0)
    if how == "an exception":
        raise ValueError("as is meant")
    if how == "os._exit":
        os._exit(0)
    if how == "exec":
        os.execv("/bin/true", ["true"])
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))

def rank(number, unique, how, results):
    context = unjam.init(2, number, unique)
    group = context.group()
    x = np.full(4, 9.0 if number == 0 else 0.0)
    if number == 0:
        group.send(x, 1, key="sent").wait(40)
        group.broadcast(x, root=0, key="broadcast").wait(40)
        # Not waited for: it needs nobody either.
        request = group.send(x, 1, key="no wait")
        while not request.test():
            pass
        end(how)
        return
    while context.absent() != [0]:
        time.sleep(0.001)
    found = []
    for call in ("sent", "broadcast", "no wait"):
        x[:] = 0
        if call == "broadcast":
            group.broadcast(x, root=0, key=call).wait(40)
        else:
            group.recv(x, 0, key=call).wait(40)
        found.append(x.tolist())
    try:
        group.recv(x, 0, key="sent").wait(40)
    except unjam.Peer as error:
        found.append(str(error))
    results.put([how, found])
    context.close()

if __name__ == "__main__":
    method, *ways = sys.argv[1:]
    kind = multiprocessing.get_context(method)
    for how in ways:
        results, unique = kind.SimpleQueue(), unjam.unique_id()
        ranks = [kind.Process(target=rank, args=(r, unique, how, results)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            process.kill()
        print(json.dumps(results.get() if not results.empty() else [how, None]), flush=True)
"""
BY_ITSELF, DIED = "ended without close()", "died"
WAYS = {
    "return": BY_ITSELF,
    "sys.exit": BY_ITSELF,
    "an exception": BY_ITSELF,
    "os._exit": DIED,
    "SIGTERM": DIED,
    "SIGKILL": DIED,
    "SIGSEGV": DIED,
    "exec": "",  # what came in its place may have ended by then, or not
}


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_what_a_process_has_sent_outlives_it(harness, tmp_path, method):
    """Children of multiprocessing, however they end; of what they have not sent the error tells."""
    file = tmp_path / "ending.py"
    file.write_text(ENDING)
    run = harness.run([sys.executable, str(file), method, *WAYS])
    for how, told in WAYS.items():
        name, found = run.said(60)
        assert name == how
        assert found is not None, how
        assert found[:3] == [[9.0] * 4] * 3, how
        assert "rank 0 is gone: its process (" in found[3] and told in found[3], how
    run.ends()


def ends_with_a_call_pending(how):
    """Rank 0: ends the interpreter while its part of an all-reduce is pending."""
    context = unjam.init_from_environment()
    group = context.group()
    given = unjam._ending.patience_us
    unjam._ending.patience_us = lambda: 40_000_000 if given() < 0 else given()
    if context.rank == 0:
        group.send(np.full(4, 9.0), 1, key="sent").wait(40)
        request = group.all_reduce(np.ones(4), key="late")  # noqa: F841
        say("called")
        if how == "in a daemon thread":
            threading.Thread(target=request.wait, daemon=True).start()  # noqa: F821 (the prelude)
        if how == "an exception":
            raise ValueError("as is meant")
        return
    hear()
    x = np.ones(4)
    found = []
    try:
        group.all_reduce(x, key="late").wait(40)
        found.append(x.tolist())
    except unjam.Peer as error:
        found.append(str(error))
    group.recv(x, 0, key="sent").wait(40)
    say([*found, x.tolist()])
    context.close()


@pytest.mark.parametrize("how", ["the end", "in a daemon thread", "an exception"])
def test_process_that_ends_with_a_call_pending(harness, how):
    """The peer may still come, if it comes soon; but who fails waits for nobody."""
    ranks = harness.job(2, ends_with_a_call_pending, how)
    assert ranks[0].said() == "called"
    fails = how == "an exception"
    if fails:
        assert ranks[0].wait() == 1
        assert "ended without close()" in ranks[0].stderr and "'late'" in ranks[0].stderr
    ranks[1].tell("come")
    all_reduced, received = ranks[1].said()
    assert received == [9.0] * 4
    if fails:
        assert "rank 0 is gone" in all_reduced and "'late'" in all_reduced
    else:
        assert all_reduced == [2.0] * 4
        assert ranks[0].wait() == 0
    ranks[1].ends()
