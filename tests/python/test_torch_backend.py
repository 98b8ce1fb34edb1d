"""torch.distributed on unjam: every operation, and what happens at the edges of a process group."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import SOON_S, environment, workers

pytest.importorskip("torch")

import torch_checks  # noqa: E402
import unjam.torch  # noqa: E402
from torch_tools import START_S, make_store  # noqa: E402
from unjam import _lib  # noqa: E402
from unjam.torch import _extension, _register, order  # noqa: E402

CHECKS = [function.__name__ for function in torch_checks.CHECKS]
ROOT = Path(__file__).resolve().parents[2]
LONG_S = 200  # for one step of a member, or a check: to catch hangs, whatever else the machine does
# Of a test, without its fixtures, of which one compiles the adapter. Behind the limits above.
pytestmark = [pytest.mark.timeout(900, func_only=True), pytest.mark.usefixtures("adapter")]


def checker(*arguments):
    import sys

    import torch_checks

    sys.argv[1:] = map(str, arguments)
    torch_checks.main()


def outcomes(ranks, device="cpu"):
    """check -> per rank what it said; one job runs them all."""
    store = make_store()
    limit = START_S
    with workers() as harness:
        processes = [
            harness.start_with_torch(checker, rank, ranks, store.port, device, UNJAM_HEAP="128M")
            for rank in range(ranks)
        ]
        found = {}
        for process in processes:
            for name in CHECKS:
                try:
                    line = process.said(limit)
                except (AssertionError, ValueError) as error:
                    line = {"check": name, "error": str(error)}
                    limit = 20  # for the others, too, it has been long enough
                found.setdefault(name, []).append(line["error"])
                if line["error"] is not None:
                    break
            else:
                process.ends(LONG_S)
        return found


@pytest.fixture(scope="module")
def of_two():
    return outcomes(2)


@pytest.fixture(scope="module")
def of_four():
    return outcomes(4)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_check(ranks, name, request):
    found = request.getfixturevalue({2: "of_two", 4: "of_four"}[ranks])
    if name not in found:
        pytest.fail("not run: an earlier check failed")
    errors = [f"rank {r}:\n{e}" for r, e in enumerate(found[name]) if e is not None]
    assert not errors and len(found[name]) == ranks, "\n".join(errors) or "a rank did not get here"


# ---- processes that come and go ----


def member(rank, size, port, timeout_s):
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import unjam.torch  # noqa: F401 - registers the backend
    from rank_tools import hear, say
    from torch_tools import join_store, meet

    torch.set_num_threads(1)
    store = join_store(port, size)

    def join(name, rank, size):
        dist.init_process_group(
            "unjam",
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def limit(seconds):
        # What init_process_group's timeout= sets, but for joining, which has its own from that.
        dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = timedelta(
            seconds=seconds
        )

    def attempt(work):
        begun = time.monotonic()
        try:
            value = work()
        except Exception as error:
            return [type(error).__name__, str(error), time.monotonic() - begun]
        return [None, value, time.monotonic() - begun]

    def change_places(**env):
        """Rank 1's jobs of CPU and of CUDA tensors change places, both of them on the host: what
        one of the two ranks calls with CPU tensors the other meets as a call with CUDA tensors."""
        c10d = unjam.torch._extension.extension()
        made = c10d.World

        def changed(rank, size, host, cuda, device, timeout_ms):
            world = made(rank, size, host, cuda, 0, timeout_ms, on_host=True)
            if rank == 1:
                world.change_places()
            return world

        os.environ.update(env)
        c10d.World = changed
        dist.destroy_process_group()
        meet(store, "to change places", size)
        join("changed", rank, size)

    join("first", rank, size)
    scope = dict(locals(), **globals())
    say("ready")
    while (text := hear()) is not None:
        say(attempt(lambda text=text: eval(text, scope)))
    if dist.is_initialized():
        dist.destroy_process_group()


class Members:
    """timeout_s: of their process group; where it is short, `limit(…)` does without a race."""

    def __init__(self, harness, size, timeout_s=LONG_S + 100):
        self.store = make_store()
        self.all = [
            harness.start_with_torch(
                member, rank, size, self.store.port, timeout_s, name=f"rank {rank}"
            )
            for rank in range(size)
        ]
        for process in self.all:
            assert process.said(START_S) == "ready"

    def do(self, text, ranks=None):
        """All at once; what each says: [type of the error or None, value or message, seconds]."""
        chosen = self.all if ranks is None else [self.all[r] for r in ranks]
        for process in chosen:
            process.tell(text)
        return [process.said(LONG_S) for process in chosen]

    def settled(self, text, is_right, ranks=None):
        """As do(), again until each of the outcomes is right, or it has been long enough.

        For errors that say what other ranks answer within a second: who does not is left out.
        """
        end = time.monotonic() + SOON_S
        while True:
            said = self.do(text, ranks)
            if all(map(is_right, said)) or time.monotonic() > end:
                return said

    def end(self, ranks=None):
        for process in self.all if ranks is None else [self.all[r] for r in ranks]:
            process.tell(None)
            process.ends(LONG_S)


ALL_REDUCE = "(x := torch.ones(1000), dist.all_reduce(x), float(x[0]))[2]"


def test_killed_rank_is_named_and_the_survivors_go_on():
    with workers() as harness:
        # The contract is a second; a machine that runs other things gets five times that, and three
        # attempts, as it may keep any of these processes from running for longer.
        for _ in range(3):
            job = Members(harness, 3)
            assert [s[1] for s in job.do(ALL_REDUCE)] == [3.0, 3.0, 3.0]
            for rank in (0, 1):
                job.all[rank].tell(ALL_REDUCE)
            time.sleep(0.3)
            killed = time.monotonic()
            job.all[2].signal(signal.SIGKILL)
            for rank in (0, 1):
                kind, message, _ = job.all[rank].said(LONG_S)
                assert kind == "DistBackendError" and "rank 2" in message, (kind, message)
            took = time.monotonic() - killed
            if took < 5:
                break
        assert took < 5
        kind, message, _ = job.do(ALL_REDUCE, [0])[0]
        assert kind == "DistBackendError" and "rank 2" in message
        for kind, message, _ in job.do("dist.destroy_process_group()", [0, 1]):
            assert kind is None, message
        for kind, message, _ in job.do("join('second', rank, 2)", [0, 1]):
            assert kind is None, message
        assert [s[1] for s in job.do(ALL_REDUCE, [0, 1])] == [2.0, 2.0]
        job.end([0, 1])


def test_missing_call_times_out_on_all_who_wait_and_names_who_has_not_called():
    with workers() as harness:
        job = Members(harness, 3)
        job.do("limit(2)")
        words = "rank 1 has not called it"
        for kind, message, _ in job.settled(ALL_REDUCE, lambda s: words in str(s[1]), [0, 2]):
            assert kind == "DistBackendError" and words in message, message
        job.do("dist.destroy_process_group()")
        job.end()


def test_send_under_another_tag_is_named_as_the_cause():
    with workers() as harness:
        job = Members(harness, 2)
        job.do("limit(2)")
        # Small: it waits for nobody.
        assert job.do("dist.send(torch.ones(3), 1, tag=1)", [0])[0][0] is None
        words = [
            "rank 0 has not called it",
            "rank 0 has called send_recv(count=3, float32, source=0, destination=1), key '#tag 1'",
        ]

        def is_right(said):
            return said[0] == "DistBackendError" and all(w in said[1] for w in words)

        (said,) = job.settled("dist.recv(torch.ones(3), 0, tag=2)", is_right, [1])
        assert is_right(said), said
        # It is there to be taken.
        job.do("limit(100)")
        text = "(x := torch.zeros(3), dist.recv(x, 0, tag=1), float(x[0]))[2]"
        assert job.do(text, [1])[0][1] == 1.0
        job.do("dist.destroy_process_group()")
        job.end()


@contextmanager
def two_with_changed_places(change="change_places()", **settings):
    """Two members, of which one's calls with CPU tensors are the other's with CUDA tensors."""
    with workers() as harness:
        job = Members(harness, 2, **settings)
        assert [s[:2] for s in job.do(change)] == [[None, None]] * 2
        yield job
        job.do("dist.destroy_process_group()")
        job.end()


START_BOTH = "globals().update(w=dist.all_reduce(torch.ones(7), async_op=True))"


def names_cuda_tensors(rank, other, text):
    return (
        f"rank {other} has called all_reduce(count=7, float32, sum) with CUDA tensors, which rank "
        f"{rank} has not. Calls with CPU tensors and calls with CUDA tensors do not meet" in text
    )


def test_call_with_tensors_on_another_device_is_named_as_the_cause():
    with two_with_changed_places() as job:
        job.do("limit(2)")  # of waits; the engine, which has a limit for one of the two, ends none
        assert [s[0] for s in job.do(START_BOTH)] == [None, None]
        named = [  # as rank 0 sees it
            f"rank {rank} has called all_reduce(count=7, float32, sum) with {device} tens"
            for rank, device in enumerate(["CPU", "CUDA"])
        ]
        explain, is_right = "unjam.torch.explain()", lambda s: all(n in s[1] for n in named)
        ((_, told, _),) = job.settled(explain, is_right, [0])
        for rank, words in enumerate(named):
            (line,) = (line for line in told.splitlines() if words in line)
            assert f"; called by: {1 - rank}; not called by: {rank}; {words}" in line, told
        for rank in range(2):

            def is_right(said, rank=rank):
                kind, text, _ = said
                return (
                    kind == "DistBackendError"
                    and f"rank {1 - rank} has not called it" in text
                    and names_cuda_tensors(rank, 1 - rank, text)
                )

            (said,) = job.settled("w.wait()", is_right, [rank])
            assert is_right(said), said


def test_call_with_tensors_on_another_device_is_named_where_the_engine_ends_calls():
    """As it does on GPUs, where streams that wait look at no clock."""
    change = "change_places(UNJAM_TIMEOUT_MS='2000' if rank == 0 else '100000')"
    with two_with_changed_places(change) as job:
        assert job.do(START_BOTH, [1])[0][0] is None  # rank 0's time does not run yet

        def is_right(said):
            return names_cuda_tensors(0, 1, str(said[1]))

        # What is said of a call stays; another one is asked anew.
        ((kind, text, _),) = job.settled(f"({START_BOTH}, w.wait())", is_right, [0])
        assert kind == "DistBackendError" and "UNJAM_TIMEOUT_MS" in text, text
        assert names_cuda_tensors(0, 1, text) and text.count("with CUDA tensors, which") == 1, text
        assert job.do("w.wait()", [0])[0][1] == text, "the same once more"


def test_device_that_a_rank_has_not_joined_with_is_refused():
    """As new_group(device_id=) asks for it."""
    text = (
        "dist.group.WORLD._get_backend(torch.device('cpu'))"
        ".eager_connect_single_device(torch.device('cuda:1'))"
    )
    with two_with_changed_places() as job:
        for rank, (kind, told, _) in enumerate(job.do(text)):
            assert kind == "ValueError", told
            assert f"cuda:1, but rank {rank} joined with cuda:0: call torch.cuda.set_device" in told
            assert "device_id" in told


def test_mismatch_with_a_rank_that_has_left_is_still_found():
    """A root is through with its part, and may leave, before the others have called."""
    text = (
        "(dist.broadcast(torch.ones(3, dtype=torch.int32 if rank == 0 else torch.float32), 0), "
        "dist.destroy_process_group())"
    )
    with workers() as harness:
        job = Members(harness, 2)
        for late in (1.0, 0.0):  # rank 1 calls when rank 0 has left, and while it leaves
            job.all[0].tell(text)
            time.sleep(late)
            job.all[1].tell(text)
            kind, message, _ = job.all[1].said(LONG_S)  # less than the group's limit
            assert kind == "DistBackendError" and "int32" in message, message
            said = job.all[0].said(LONG_S)  # where it has not left yet, it may hear of it
            assert said[0] is None or "float32" in said[1], said
            job.do("dist.is_initialized() and dist.destroy_process_group()")
            job.do("join('again', rank, 2)")
        job.end()


def test_backward_pass_of_ddp_ends_at_the_time_limit_and_names_who_has_not_called():
    """Whoever waits for DDP's futures looks at the clock: the pass's own callback does."""
    with workers() as harness:
        job = Members(harness, 2)
        make = (
            "globals().update(m=torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3)))"
        )
        go = "m(torch.ones(2, 3)).sum().backward()"
        for attempt in range(5):  # who does not answer within a second is not named
            # With the first come imports, which take whole seconds; the limit counts from the call.
            assert [s[:2] for s in job.do(f"({make}, {go}, limit(2))[1]")] == [[None, None]] * 2
            kind, message, _ = job.do(go, [0])[0]
            assert kind == "DistBackendError", message
            job.do("dist.destroy_process_group()")
            if "rank 1 has not called it" in message:
                break
            job.do(f"join('again {attempt}', rank, 2)")
        assert "rank 1 has not called it" in message, message
        job.end()


def test_end_with_operations_pending_returns_and_tells_the_others():
    with workers() as harness:
        job = Members(harness, 2)
        assert job.do("globals().update(w=dist.all_reduce(torch.ones(5), async_op=True))", [0])
        kind, message, _ = job.do("dist.destroy_process_group()", [0])[0]
        assert kind is None, message
        job.all[0].wait_for_stderr("pending")
        kind, message, _ = job.do("w.wait()", [0])[0]
        assert kind == "DistBackendError" and "abort" in message.lower(), message
        kind, message, _ = job.do(ALL_REDUCE, [1])[0]
        assert kind == "DistBackendError" and "rank 0" in message, message
        job.end()


def test_process_that_ends_without_destroying_its_group_is_missed_at_once():
    with workers() as harness:
        job = Members(harness, 2)
        job.all[1].tell(ALL_REDUCE)
        time.sleep(0.2)
        job.all[0].tell("sys.exit")  # a value; the process then ends as its input does
        job.all[0].said(LONG_S)
        job.all[0].tell(
            "__import__('threading').Timer(0.1, lambda: None).start() or exec('raise SystemExit')"
        )
        assert job.all[0].wait(LONG_S) == 0
        kind, message, _ = job.all[1].said(LONG_S)
        assert kind == "DistBackendError" and "rank 0" in message, message


def test_new_group_over_the_same_store_whoever_comes_first():
    with workers() as harness:
        job = Members(harness, 2)
        for round_ in range(3):
            job.do("dist.destroy_process_group()")
            late = job.all[round_ % 2]
            early = job.all[1 - round_ % 2]
            early.tell("join('first', rank, 2)")
            time.sleep(0.5)
            late.tell("join('first', rank, 2)")
            for process in (early, late):
                kind, message, _ = process.said(LONG_S)
                assert kind is None, message
            assert [s[1] for s in job.do(ALL_REDUCE)] == [2.0, 2.0]
        job.end()


def test_group_may_have_a_longer_timeout_than_the_default_one():
    with workers() as harness:
        # Not by `limit(…)`: the job is told of the one that it is joined with, and must not take it
        # for all groups. It limits the joining, too, so it is not short.
        job = Members(harness, 2, timeout_s=6)
        job.do("globals().update(g=dist.new_group(timeout=timedelta(seconds=600)))")
        text = "(x := torch.ones(3), dist.all_reduce(x, group=g), float(x[0]))[2]"
        job.all[0].tell(text)
        time.sleep(8)
        job.all[1].tell(text)
        assert [process.said(LONG_S)[:2] for process in job.all] == [[None, 2.0], [None, 2.0]]
        job.end()


def test_destroy_lets_what_is_under_way_end():
    with workers() as harness:
        job = Members(harness, 2)
        # destroy_process_group() waits for what moves, two seconds for what does not yet: so they
        # call it side by side.
        text = (
            "(dist.barrier(), x := torch.ones(1 << 22), w := dist.all_reduce(x, async_op=True), "
            "dist.destroy_process_group(), w.wait(), float(x[-1]))[5]"
        )
        for attempt in range(3):  # where a rank is kept from running for longer, they are aborted
            said = [s[:2] for s in job.do(text)]
            if not any("abort" in str(value).lower() for _, value in said):
                break
            job.do("dist.is_initialized() and dist.destroy_process_group()")
            job.do(f"join('again {attempt}', rank, 2)")
        assert said == [[None, 2.0], [None, 2.0]]
        job.end()


def test_process_may_end_with_futures_pending():
    def leaver(rank, port):
        import os

        import torch
        import torch.distributed as dist

        import unjam.torch
        from rank_tools import hear, say
        from torch_tools import join_store

        store = join_store(port, 2)
        dist.init_process_group("unjam", store=store, rank=rank, world_size=2)
        say("ready")
        if rank == 1:
            hear()
            os._exit(0)
        futures = []
        for i in range(50):
            work = unjam.torch.all_reduce(torch.ones(1000), async_op=True, key=f"k{i}")
            futures.append(work.get_future().then(lambda f: sum(range(20000))))

    store = make_store()
    with workers() as harness:
        both = [harness.start_with_torch(leaver, rank, store.port) for rank in range(2)]
        for process in both:
            assert process.said(START_S) == "ready"
        both[0].ends(LONG_S)
        both[1].tell()
        both[1].wait(LONG_S)


CHILDREN = """
import json, multiprocessing, os, sys
import torch
import torch.distributed as dist

def rank(number, file, how, first_has_ended, results):
    dist.init_process_group("unjam", init_method=f"file://{file}", rank=number, world_size=2)
    x = torch.full((4,), 9.0 if number == 0 else 0.0)
    if number == 1:
        assert first_has_ended.wait(60)
    dist.send(x, 1) if number == 0 else dist.recv(x, 0)
    y = torch.full((4,), 9.0 if number == 0 else 0.0)
    dist.broadcast(y, 0)
    results.put(x.tolist() + y.tolist())
    if how == "os._exit" and number == 0:
        os._exit(0)

if __name__ == "__main__":
    folder, *methods = sys.argv[1:]
    for method in methods:
        for how in ("return", "os._exit"):
            kind = multiprocessing.get_context(method)
            first_has_ended, results = kind.Event(), kind.SimpleQueue()
            arguments = (f"{folder}/{method} {how}", how, first_has_ended, results)
            ranks = [kind.Process(target=rank, args=(r, *arguments)) for r in range(2)]
            for process in ranks:
                process.start()
            ranks[0].join()
            first_has_ended.set()
            ranks[1].join()
            codes = [process.exitcode for process in ranks]
            if codes == [0, 0]:
                results.get()
                codes.append(results.get())
            print(json.dumps([method, how, codes]), flush=True)
"""


def test_what_a_child_of_multiprocessing_has_sent_outlives_it(tmp_path):
    """Nobody destroys the process group; forked children run no atexit functions, either."""
    file = tmp_path / "children.py"
    file.write_text(CHILDREN)
    methods = ["fork", "spawn"]
    with workers() as harness:
        run = harness.run([sys.executable, str(file), str(tmp_path), *methods])
        for method in methods:
            for how in ("return", "os._exit"):
                assert run.said(START_S) == [method, how, [0, 0, [9.0] * 8]]
        run.ends()


def test_abort_ends_what_is_pending():
    with workers() as harness:
        job = Members(harness, 2)
        job.do("globals().update(w=dist.all_reduce(torch.ones(5), async_op=True))", [0])
        kind, message, _ = job.do("dist.distributed_c10d._abort_process_group()", [0])[0]
        assert kind is None, message
        kind, message, _ = job.do("w.wait()", [0])[0]
        assert kind == "DistBackendError" and "abort" in message.lower()
        # Whoever still holds the old group does not keep a new one from being made.
        job.do("globals().update(old=w)", [0])
        job.do("dist.distributed_c10d._abort_process_group()", [1])
        job.do("join('again', rank, 2)")
        job.do("globals().update(g=dist.new_group())")
        text = "(x := torch.ones(3), dist.all_reduce(x, group=g), float(x[0]))[2]"
        assert [s[:2] for s in job.do(text)] == [[None, 2.0], [None, 2.0]]
        job.end()


def test_child_of_fork_gets_an_error_and_the_parent_goes_on():
    child = (
        "(pid := os.fork()) or os._exit(attempt(lambda: dist.all_reduce(torch.ones(2)))[0] "
        "not in ('DistBackendError', 'ValueError')), os.waitpid(pid, 0)[1]"
    )
    with workers() as harness:
        job = Members(harness, 2)
        job.do(ALL_REDUCE)
        kind, status, _ = job.do(f"({child})[1]", [0])[0]
        assert kind is None and status == 0, status
        assert [s[1] for s in job.do(ALL_REDUCE)] == [2.0, 2.0]
        job.end()


# ---- how it becomes known to torch, and takes others' places ----


def name_and_sum(backend, port, rank, size):
    import os
    import warnings

    warnings.simplefilter("always")
    import torch
    import torch.distributed as dist

    import unjam.torch
    from rank_tools import say
    from torch_tools import join_store

    store = join_store(port, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    x = torch.ones(3)
    dist.all_reduce(x)
    sub = dist.new_group([0, 1], backend=backend)
    dist.all_reduce(x, group=sub)
    device = torch.device("cpu")
    inner = type(dist.group.WORLD._get_backend(device)).__module__
    subs = type(sub._get_backend(device)).__module__
    try:
        unjam.torch.keyed_group(None, "k")
        keyed = ""
    except ValueError as error:
        keyed = str(error)
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    say([dist.get_backend(), inner, dist.get_backend(sub), subs, float(x[0]), keyed, queues])
    dist.destroy_process_group()


def run_pair(backend, **env):
    store = make_store()
    with workers() as harness:
        pair = [harness.start(name_and_sum, backend, store.port, r, 2, **env) for r in range(2)]
        said = [process.said(START_S) for process in pair]
        for process in pair:
            process.ends(LONG_S)
        return said[0], pair[0].stderr


def test_replaces_nccl_where_asked_and_says_so_once(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    said, stderr = run_pair("nccl", UNJAM_TORCH_REPLACE="nccl")
    assert said == ["nccl", "_unjam_c10d", "nccl", "_unjam_c10d", 4.0, "", "32"]
    assert stderr.count("get unjam") == 1, stderr


def test_default_backend_where_asked():
    # (What the program says of CUDA's queues stays.)
    said, _ = run_pair(None, UNJAM_TORCH_DEFAULT="1", CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert said == ["unjam", "_unjam_c10d", "unjam", "_unjam_c10d", 4.0, "", "8"]


def test_default_backend_trains():
    """DistributedDataParallel asks the process group for its default backend."""

    def trainer(rank, port):
        import torch
        import torch.distributed as dist

        import unjam.torch  # noqa: F401 - registers the backend
        from rank_tools import say
        from torch_tools import join_store

        store = join_store(port, 2)
        dist.init_process_group(store=store, rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
        say([dist.get_backend(), model.module.weight.grad.tolist()])
        dist.destroy_process_group()

    store = make_store()
    with workers() as harness:
        pair = [harness.start(trainer, r, store.port, UNJAM_TORCH_DEFAULT="1") for r in range(2)]
        for process in pair:
            assert process.said(START_S) == ["unjam", [[2.0, 2.0]]]
            process.ends(LONG_S)


def test_group_of_unjam_beside_a_default_group_of_gloo():
    def pair(rank, port):
        import torch
        import torch.distributed as dist

        import unjam.torch  # noqa: F401 - registers the backend
        from rank_tools import say
        from torch_tools import join_store

        store = join_store(port, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        groups = [dist.new_group([0, 1], backend="unjam") for _ in range(2)]
        tensors = [torch.ones(3), torch.full((3,), 2.0)]
        calls = list(zip(tensors, groups, strict=True))
        works = [
            dist.all_reduce(t, group=g, async_op=True) for t, g in (calls[::-1] if rank else calls)
        ]
        for work in works:
            work.wait()
        say([dist.get_backend(), dist.get_backend(groups[0]), *(float(t[0]) for t in tensors)])
        dist.barrier()
        dist.destroy_process_group()

    store = make_store()
    with workers() as harness:
        both = [harness.start_with_torch(pair, rank, store.port) for rank in range(2)]
        for process in both:
            assert process.said(START_S) == ["gloo", "unjam", 2.0, 4.0]
            process.ends(LONG_S)


def test_detail_is_explained():
    said, stderr = run_pair("unjam", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert said[5].startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper"), said
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in stderr and "check_order" in stderr, stderr


def test_installed_package_is_known_after_import_of_torch(tmp_path):
    """From a folder where pip has put it, with nothing of this checkout on the path."""
    pytest.importorskip("scikit_build_core")
    place = tmp_path / "site"
    # Without its CMake part, which takes minutes: what that installs lies here already.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(place)]
    pip += ["-C", "wheel.cmake=false", "-C", f"build-dir={tmp_path / 'build'}", str(ROOT)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for source, folder in (
        (_lib.library_path(), "lib"),
        (ROOT / "include" / "unjam" / "unjam.h", "include/unjam"),
    ):
        (place / "unjam" / folder).mkdir(parents=True)
        (place / "unjam" / folder / source.name).symlink_to(source)
    code = """
import sys
import torch
import torch.distributed as dist
names = ("unjam", "_unjam_c10d")
print("UNJAM" in dist.Backend._plugins, *(name in sys.modules for name in names))
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(dist.get_backend(), x.tolist(), sys.modules["unjam"].__file__)
dist.destroy_process_group()
"""
    env = environment(UNJAM_TORCH_DEFAULT=1, PYTHONPATH=place)
    env.pop("UNJAM_LIBRARY", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    # Known, and the package imported for it; its part in C++ not before it is used.
    assert done.stdout.splitlines() == [
        "True True False",
        f"unjam [1.0, 1.0] {place / 'unjam' / '__init__.py'}",
    ], done.stdout + done.stderr


def test_adapter_is_linked_to_no_cuda_library():
    """One build serves machines with and without GPUs, and torch with and without CUDA."""
    _extension.extension()
    if shutil.which("readelf") is None:
        pytest.skip("no readelf here (binutils)")
    told = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(_extension.library_file())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", told)
    assert {"libc10.so", "libtorch_cpu.so"} <= set(needed), told
    wrong = [n for n in needed if re.search(r"cuda|cudart|nccl|nvidia", n)]
    assert not wrong, wrong


# ---- pure parts ----


@pytest.mark.parametrize(
    ("asked", "names", "given"),
    [
        ("nccl", ["nccl"], "unjam"),
        ("gloo", ["nccl"], "gloo"),
        ("cpu:gloo,cuda:nccl", ["nccl"], "cpu:gloo,cuda:unjam"),
        ("cpu:gloo,cuda:nccl", ["nccl", "gloo"], "unjam"),
        ("cuda:nccl", ["nccl"], "unjam"),
    ],
)
def test_names_that_are_replaced(asked, names, given):
    assert _register._renamed(asked, names) == given


def test_a_pool_without_a_heap_is_refused():
    """And the allocator's functions are where torch looks for them."""
    import ctypes

    import torch

    from unjam.torch import _extension, memory

    with pytest.raises(RuntimeError, match="no process group has a heap on cuda:0: set UNJAM_HEAP"):
        unjam.torch.memory_pool("cuda:0")
    with pytest.raises(RuntimeError, match="init_process_group"):
        unjam.torch.empty(3)
    with pytest.raises(ValueError, match="not on meta"):
        unjam.torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="init_process_group"):
        unjam.torch.register_memory(torch.empty(3))
    if hasattr(torch._C, "_cuda_customAllocator"):
        assert memory._allocator().allocator() is not None
    library = ctypes.CDLL(_extension.extension().__file__)
    library.unjam_torch_alloc.restype = ctypes.c_void_p
    assert library.unjam_torch_alloc(ctypes.c_size_t(1000), 0, None) is None
    library.unjam_torch_free(None, ctypes.c_size_t(0), 0, None)


FREE_THE_LAST = """
import ctypes, os, sys, time
os.environ["UNJAM_HEAP"] = "1M"
from unjam.torch import _extension

c10d = _extension.extension()
library = ctypes.CDLL(c10d.__file__)
library.unjam_torch_alloc.restype = ctypes.c_void_p
pointer = ctypes.c_void_p
library.unjam_torch_free.argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, pointer]

def allocated():
    return library.unjam_torch_alloc(ctypes.c_size_t(1000), 0, None)

def free(memory):
    library.unjam_torch_free(memory, 1000, 0, None)

def is_mapped(memory):
    ranges = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return any(int(begin, 16) <= memory < int(end, 16) for begin, end in ranges)

world = c10d.World(0, 1, c10d.new_id(), c10d.new_id(), 0, 1000, on_host=True)
first, last = allocated(), allocated()
again = allocated()
free(again)
assert allocated() == again and again not in (first, last), "what was freed is given again"
del world  # the context is destroyed, and stays for the memory
assert allocated() is None
free(again)
free(first)
assert is_mapped(last)
if sys.argv[1] == "no other thread":
    c10d.shutdown_all()
free(last)
if sys.argv[1] == "no other thread":
    print(is_mapped(last))
else:
    while is_mapped(last):
        time.sleep(0.01)
    print("gone")
"""


@pytest.mark.parametrize(
    ("threads", "told"), [("another thread", "gone"), ("no other thread", "True")]
)
def test_context_does_not_end_inside_of_torchs_allocator(threads, told, python):
    """That waits, under the allocator's lock: another thread does it, and where there is none any
    more, at the end of the process, nobody."""
    done = python("-c", FREE_THE_LAST, threads, timeout=START_S)
    assert done.stdout.split() == [told], done.stdout + done.stderr


def test_crossings_are_pairs_that_two_ranks_called_in_different_orders():
    a, b, c = (("g", key, 0, "all_reduce") for key in "abc")
    assert order.crossings([[a, b, c], [a, b, c]]) == []
    found = order.crossings([[a, b, c], [b, a, c], [c]])
    assert found == [order.Crossing(0, 1, a, b)]
    assert "the other way round" in str(found[0]) and "key 'a'" in json.dumps(str(found[0]))
    assert len(order.crossings([[a, b, c], [c, b, a]], limit=1)) == 1


def test_circles_are_of_calls_that_do_not_cross():
    a, b, c, d, e, x = (("g", key, 0, "all_reduce") for key in "abcdex")
    (found,) = order.found_in([[a, x, b], [b, c], [c, a]])
    assert isinstance(found, order.Cycle)
    assert sorted(found.steps) == [(0, a, b), (1, b, c), (2, c, a)]
    assert str(found).endswith("a circle")
    # Without a circle, through however many ranks; a circle behind another one's crossing.
    assert order.found_in([[a, b], [b, c], [a, c], [c, d]]) == []
    kinds = [type(f) for f in order.found_in([[a, b, d, e], [b, a, e], [e, x], [x, d]])]
    assert kinds == [order.Crossing, order.Cycle]
    assert order.found_in([[a, b], [b, c], [c, a]], limit=0) == []


def test_sends_and_receives_without_a_collective_between_are_one_batch():
    there, back = (("g", "", 0, f"send from rank {i} to rank {1 - i}") for i in range(2))
    total = ("g", "", 0, "all_reduce")
    assert order.found_in([[there, back], [back, there]]) == []
    assert order.found_in([[there, back, total], [back, there, total]]) == []
    assert order.found_in([[there, back, total], [back, total, there]]) == [
        order.Crossing(0, 1, there, total)
    ]


def test_places_that_two_ranks_come_to_in_different_orders():
    def told(*places, key="", rest=""):
        calls = [("g", key, i, "all_reduce") for i in range(len(places))]
        return calls, [(rest + p[1:], "float32 of [2]", p[0]) for p in places]

    def found(*ranks):
        calls, marks = zip(*ranks, strict=True)
        return order.mixed(list(calls), list(marks))

    (one,) = found(told("a", "b", "c"), told("b", "a", "c"))
    assert (one.rank, one.other, [use[0][2] for use in one.uses]) == (0, 1, [0, 1])
    assert "in use 1 rank 0 calls at a" in str(one) and "rank 1 at b" in str(one)
    # Around a circle of three; between each two of three ranks; one of each circle only.
    (one,) = found(told("a", "b", "c"), told("b", "c", "a"))
    assert len(one.uses) == 3
    assert len(found(told("a", "b"), told("b", "a"), told("a", "b"))) == 2
    assert len(found(told(*"ab" * 50), told(*"ba" * 50))) == 1
    # Places of their own; what cannot be taken for each other (another root); another length.
    assert found(told("a", "a"), told("b", "b")) == []
    assert found(told("a0", "b1"), told("b0", "a1")) == []
    assert found(told("a", "b"), told("b")) == []
    assert found(told("a", "b", key="k"), told("b", "a")) == []


SWITCH = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from unjam.torch import _autoload  # as torch does where the package is installed
    _autoload()
import torch.distributed as dist
print(dist.Backend.default_device_backend_map["cpu"], "UNJAM" in dist.Backend._plugins)
print([str(w.message) for w in caught if "unjam" in str(w.message)])
"""


@pytest.mark.parametrize(
    ("value", "backend"),
    [("false", "gloo"), ("Off", "gloo"), ("no", "gloo"), ("0", "gloo"), ("", "gloo")]
    + [("true", "unjam"), ("ON", "unjam"), ("yes", "unjam"), ("1", "unjam"), ("maybe", "gloo")],
)
def test_switches_are_words(value, backend):
    from unjam import _torch_settings

    variable = _torch_settings.DEFAULT
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable.name, value)
        if value == "maybe":
            with pytest.raises(ValueError, match="UNJAM_TORCH_DEFAULT=maybe is not valid: give 0"):
                variable.is_on()
        else:
            assert variable.is_on() == (backend == "unjam")


@pytest.mark.parametrize(
    ("env", "backend", "words"),
    [
        ({"UNJAM_TORCH_DEFAULT": "false"}, "gloo", ""),
        ({"UNJAM_TORCH_DEFAULT": "maybe"}, "gloo", "UNJAM_TORCH_DEFAULT=maybe is not valid"),
        ({"UNJAM_TORCH_REPLACE": "ncl"}, "gloo", "UNJAM_TORCH_REPLACE=ncl is not valid: give nccl"),
    ],
)
def test_nonsense_in_a_variable_is_told_and_stops_no_import(env, backend, words):
    done = subprocess.run(
        [sys.executable, "-c", SWITCH],
        env=environment(**env, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    default, warnings = done.stdout.splitlines()
    assert default == f"{backend} True"
    assert words in warnings and (words or warnings == "[]"), warnings


def test_torch_knows_what_the_backend_serves(recwarn):
    """Without a warning, whichever way the backend is named."""
    import torch.distributed as dist

    config = dist.distributed_c10d.BackendConfig
    for name in ("unjam", "UNJAM"):
        assert config(dist.Backend(name)).get_device_backend_map() == {
            "cpu": "unjam",
            "cuda": "unjam",
        }
    mixed = config(dist.Backend("cpu:unjam,cuda:gloo")).get_device_backend_map()
    assert mixed == {"cpu": "unjam", "cuda": "gloo"}
    assert [str(w.message) for w in recwarn if "unknown" in str(w.message)] == []


@pytest.mark.gpu
def test_checks_on_gpus():
    """All of torch_checks.py on CUDA tensors, a process a GPU, or two on one."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 1:
        pytest.skip("needs a GPU")
    found = outcomes(max(2, min(gpus, 4)), "cuda")
    errors = {name: e for name, errors in found.items() for e in errors if e is not None}
    assert not errors, errors
    assert list(found) == CHECKS
