"""Ways to misuse the API, each with the message that it gives: the table in docs/errors.md.

One case a row. A case misuses the library in a way that must never hang, and raises what that
gives. Afterwards a correct collective must work. The page's tables are made from the cases:

    UNJAM_UPDATE_DOCS=1 python -m pytest tests/python/test_misuse.py

writes them; without the variable, code and message of every row are compared with the page.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import unjam
from unjam import _abi, _lib

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
UPDATE = bool(os.environ.get("UNJAM_UPDATE_DOCS"))
PATIENCE_S = 50.0

T = TypeVar("T")


class Job:
    """Two ranks, driven by one thread, with their groups of all ranks."""

    def __init__(self, contexts: unjam.Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts = contexts
        self.groups = [context.group() for context in contexts]
        self.monkeypatch = monkeypatch
        self.group = self.groups[0]
        self.x = np.ones(8, dtype=np.float32)
        self.lib = _lib.library()

    def c(self, function: str, *arguments: Any) -> None:
        """Calls the C API; raises what it returns."""
        _lib.check(getattr(self.lib, "unjam" + function)(*arguments))

    def c_all_reduce(self, send: int | None, recv: int | None, **changes: Any) -> None:
        """unjamAllReduce on rank 0, of 8 float32 if not said otherwise."""
        values = {"count": 8, "dtype": 8, "op": 0, "options": None} | changes
        request = ctypes.c_void_p()
        self.c(
            "AllReduce",
            self.group._handle,
            b"c",
            send,
            recv,
            values["count"],
            values["dtype"],
            values["op"],
            values["options"],
            ctypes.byref(request),
        )

    def pending(self, key: str = "pending") -> unjam.Request:
        """A request of rank 0 that rank 1 has not called."""
        return self.group.all_reduce(np.ones(8, dtype=np.float32), key=key)

    def disagree(self, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
        """The two ranks' calls; both requests must fail alike."""
        requests = [first(self.groups[0]), second(self.groups[1])]
        errors = [request.exception(PATIENCE_S) for request in requests]
        assert str(errors[0]) == str(errors[1])
        assert errors[0] is not None
        raise errors[0]

    def in_callback(self, work: Callable[[], object]) -> None:
        """Runs `work` in a callback of rank 0's context; raises what it raises."""
        errors: list[BaseException] = []
        done = threading.Event()

        def callback(_: unjam.Request) -> None:
            try:
                work()
            except unjam.UnjamError as error:
                errors.append(error)
            done.set()

        requests = [
            g.all_reduce(np.ones(8), key="callback", callback=callback if not g.rank else None)
            for g in self.groups
        ]
        unjam.wait_all(requests, PATIENCE_S)
        assert done.wait(PATIENCE_S)
        if errors:
            raise errors[0]


def prove(groups: list[unjam.Group]) -> None:
    """A correct collective works, by a key of its own."""
    for count in (1, 5000):
        data = [np.full(count, group.rank + 1, dtype=np.int64) for group in groups]
        key = f"proof {count}"
        requests = [g.all_reduce(x, key=key) for g, x in zip(groups, data, strict=True)]
        unjam.wait_all(requests, PATIENCE_S)
        want = sum(range(1, len(groups) + 1))
        assert all((x == want).all() for x in data)


def rank_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Runs each in a thread; what they raised, in the order of `works`."""
    raised: list[BaseException | None] = [None] * len(works)

    def body(i: int, work: Callable[[], object]) -> None:
        try:
            context = work()
            if isinstance(context, unjam.Context):
                context.abort()
                context.close()
        except BaseException as error:
            raised[i] = error

    threads = [threading.Thread(target=body, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # most often in this order
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return [error for error in raised if error is not None]


def in_order(attempt: Callable[[], BaseException], said: str) -> BaseException:
    """What an attempt gave whose ranks came in the order in which the error says `said`."""
    errors = (attempt() for _ in range(50))
    return next(error for error in errors if said in str(error))


def worst(errors: list[BaseException]) -> BaseException:
    """The cause, before what it has led to elsewhere."""
    assert errors, "nothing was refused"
    return next((e for e in errors if not isinstance(e, unjam.Peer)), errors[0])


@dataclass(frozen=True)
class Misuse:
    """A row: the id is the function's name."""

    section: str
    did: str
    cure: str
    run: Callable[[Job], object]
    ends: bool  # the contexts cannot be used afterwards
    config: dict[str, Any]

    @property
    def id(self) -> str:
        return self.run.__name__


CASES: list[Misuse] = []


def misuse(section: str, did: str, cure: str, ends: bool = False, **config: Any) -> Any:
    """A case: what the user did, and what to do instead."""

    def note(run: Callable[[Job], object]) -> Callable[[Job], object]:
        CASES.append(Misuse(section, did, cure, run, ends, config))
        return run

    return note


# ---- joining a job ----

JOIN = "Joining a job"


@misuse(JOIN, "`init_all(0)`, or more ranks than 65,535", "1 to 65,535 ranks a job, on GPUs 64")
def no_ranks(job: Job) -> None:
    unjam.init_all(0)


@misuse(JOIN, "`init(nranks=2, rank=2, …)`", "ranks count from 0")
def rank_outside_job(job: Job) -> None:
    unjam.init(2, 2, unjam.unique_id())


@misuse(JOIN, "a rank given as text", "pass `int(…)` of it")
def rank_as_text(job: Job) -> None:
    unjam.init(2, os.environ.get("NO_SUCH_RANK", "1"), unjam.unique_id())  # type: ignore[arg-type]


@misuse(JOIN, "made up a unique id", "one rank calls `unique_id()` and hands it to the others")
def id_made_up(job: Job) -> None:
    unjam.init(2, 0, bytes(128))


@misuse(JOIN, "cut the unique id when sending it", "send all 128 bytes; it is no text")
def id_truncated(job: Job) -> None:
    unjam.init(2, 0, unjam.unique_id().rstrip(b"\0"))


@misuse(JOIN, "two ranks of the same number", "check what numbers the launcher gives")
def joined_twice(job: Job) -> None:
    job.monkeypatch.setenv("UNJAM_INIT_TIMEOUT_MS", "3000")

    def attempt() -> BaseException:
        uid = unjam.unique_id()
        errors = rank_threads(lambda: unjam.init(2, 0, uid), lambda: unjam.init(2, 0, uid))
        # If the second comes when the first has given up, neither is refused.
        return next((e for e in errors if isinstance(e, unjam.InvalidUsage)), errors[0])

    raise in_order(attempt, "rank 0 has joined this job already")


@misuse(JOIN, "ranks that differ on how many there are", "the same number on all ranks")
def sizes_differ(job: Job) -> None:
    def attempt() -> BaseException:
        uid = unjam.unique_id()
        errors = rank_threads(lambda: unjam.init(2, 0, uid), lambda: unjam.init(3, 1, uid))
        return next(e for e in errors if isinstance(e, unjam.Mismatch))

    raise in_order(attempt, "an earlier one 2")


@misuse(JOIN, "`lanes=2` on one rank only", "the same on all ranks; `unjam env` marks which")
def settings_differ(job: Job) -> None:
    def attempt() -> BaseException:
        uid = unjam.unique_id()
        return worst(
            rank_threads(lambda: unjam.init(2, 0, uid), lambda: unjam.init(2, 1, uid, lanes=2))
        )

    raise in_order(attempt, "rank 0 has UNJAM_LANES=1; rank 1 has")


@misuse(JOIN, "started one rank too few", "start it, or give a slow one more time")
def rank_missing(job: Job) -> None:
    job.monkeypatch.setenv("UNJAM_INIT_TIMEOUT_MS", "200")
    unjam.init(3, 0, unjam.unique_id())


@misuse(JOIN, "`UNJAM_LANES=many`", "see [environment.md](environment.md)")
def variable_without_sense(job: Job) -> None:
    job.monkeypatch.setenv("UNJAM_LANES", "many")
    unjam.init_all(2)


@misuse(JOIN, "`UNJAM_POLICY=fair`", "see [environment.md](environment.md)")
def variable_unknown_name(job: Job) -> None:
    job.monkeypatch.setenv("UNJAM_POLICY", "fair")
    unjam.init_all(2)


@misuse(JOIN, "`init_all(2, max_keys=2)`", "see [environment.md](environment.md)")
def setting_unknown(job: Job) -> None:
    unjam.init_all(2, max_keys=2)


@misuse(JOIN, "`init_all(2, lanes=99)`", "see [environment.md](environment.md)")
def setting_out_of_range(job: Job) -> None:
    unjam.init_all(2, lanes=99)


@misuse(JOIN, "`init_all(2, policy='fair')`", "one of the names")
def setting_unknown_name(job: Job) -> None:
    unjam.init_all(2, policy="fair")


@misuse(JOIN, "C: an `unjamConfig_t` filled with zeros", "start from the initialiser")
def config_without_size(job: Job) -> None:
    config = _abi.Config()
    handles = (ctypes.c_void_p * 2)()
    job.c("InitAll", handles, 2, ctypes.byref(config))


# ---- groups ----

GROUPS = "Groups"


@misuse(GROUPS, "`context.group([0, 0])`", "each rank once")
def group_rank_twice(job: Job) -> None:
    job.contexts[0].group([0, 0])


@misuse(GROUPS, "`context.group([0, 2])` in a job of two", "ranks of the job, from 0")
def group_foreign_rank(job: Job) -> None:
    job.contexts[0].group([0, 2])


@misuse(GROUPS, "rank 0: `context.group([1])`", "let the members make it, and only them")
def group_without_caller(job: Job) -> None:
    job.contexts[0].group([1])


@misuse(GROUPS, "`context.group([0, 0.5])`", "whole numbers")
def group_of_fractions(job: Job) -> None:
    job.contexts[0].group([0, 0.5])  # type: ignore[list-item]


@misuse(GROUPS, "a call on a group after its `close()`", "close groups last")
def group_closed(job: Job) -> None:
    group = job.contexts[0].group(name="short")
    group.close()
    group.all_reduce(job.x)


@misuse(GROUPS, "C: a call on a group after `unjamGroupDestroy`", "destroy groups last")
def group_destroyed(job: Job) -> None:
    address = job.x.ctypes.data
    job.c("GroupDestroy", job.group._handle)
    try:
        job.c_all_reduce(address, address)
    finally:
        job.groups[:] = [context.group(name="another") for context in job.contexts]


@misuse(GROUPS, "`group.close()` with calls pending", "wait for the requests first")
def group_closed_with_pending(job: Job) -> None:
    job.pending("gradients")
    job.group.close()


# ---- keys ----

KEYS = "Keys and registered collectives"


@misuse(KEYS, "`key=7`", "`key=str(7)`")
def key_is_no_text(job: Job) -> None:
    job.group.all_reduce(job.x, key=7)  # type: ignore[arg-type]


@misuse(KEYS, "a key with a NUL in it", "other separators, such as `/`")
def key_with_nul(job: Job) -> None:
    job.group.all_reduce(job.x, key="layer\0weight")


@misuse(KEYS, "registered the same key twice", "keep the first, or `close()` it before")
def registered_twice(job: Job) -> None:
    job.group.register_all_reduce("grad", "float32")
    job.group.register_all_reduce("grad", "float32")


@misuse(KEYS, "a plain call under a registered key", "`collective.run(…)`")
def plain_call_on_registered_key(job: Job) -> None:
    job.group.register_all_reduce("grad", "float32")
    job.group.all_reduce(job.x, key="grad")


@misuse(KEYS, "`run` after `close()` of the collective", "close it when it is done")
def run_deregistered(job: Job) -> None:
    collective = job.group.register_all_reduce("grad", "float32")
    collective.close()
    collective.run(job.x)


@misuse(KEYS, "`close()` of a collective with runs pending", "wait for the requests first")
def deregister_with_pending(job: Job) -> None:
    collective = job.group.register_all_reduce("grad", "float32")
    collective.run(job.x)
    collective.close()


@misuse(
    KEYS,
    "more keys under way than `max_active_keys` (here 3)",
    "wait for some, or a larger limit on all ranks",
    max_active_keys=3,
)
def too_many_active_keys(job: Job) -> None:
    requests = []
    try:
        for i in range(4):
            requests.append(job.pending(f"k{i}"))
    finally:
        for i in range(3):  # nothing is lost: those under way complete
            job.groups[1].all_reduce(np.ones(8, dtype=np.float32), key=f"k{i}").wait(PATIENCE_S)
        # On both ranks: that rank 1 has its result does not mean that rank 0's key is free again.
        unjam.wait_all(requests, PATIENCE_S)


@misuse(
    KEYS,
    "data of too many keys not taken yet (here 6)",
    "let the peers call, or a larger limit on all ranks",
    max_active_keys=3,
)
def too_much_undelivered(job: Job) -> None:
    try:
        for i in range(7):
            job.group.broadcast(job.x, key=f"k{i}").wait(PATIENCE_S)
    finally:
        for i in range(6):
            job.groups[1].broadcast(np.ones(8, dtype=np.float32), key=f"k{i}").wait(PATIENCE_S)


@misuse(KEYS, "used a key again after a call under it had failed", "another key")
def key_out_of_use(job: Job) -> None:
    with pytest.raises(unjam.Mismatch):
        job.disagree(
            lambda g: g.all_reduce(np.ones(8), key="k"), lambda g: g.all_reduce(np.ones(9), key="k")
        )
    job.group.all_reduce(np.ones(8), key="k")


# ---- buffers ----

BUFFERS = "Buffers"


@misuse(BUFFERS, "C: `send` is NULL", "only what the rank's part does not use may be NULL")
def null_buffer(job: Job) -> None:
    job.c_all_reduce(None, job.x.ctypes.data)


@misuse(BUFFERS, "C: a float32 buffer at an odd address", "allocate it as its type")
def misaligned_pointer(job: Job) -> None:
    memory = np.zeros(64, dtype=np.uint8)
    job.c_all_reduce(memory.ctypes.data + 1, memory.ctypes.data + 1)


@misuse(BUFFERS, "a view into bytes at an odd offset", "copy it to fresh memory")
def misaligned_array(job: Job) -> None:
    memory = np.zeros(4096 * 2, dtype=np.uint8)
    start = -memory.ctypes.data % 4096 + 1  # the message shows the address
    job.group.all_reduce(memory[start : start + 32].view(np.float32))


@misuse(BUFFERS, "`all_reduce(x[:6], x[2:])`", "separate buffers, or in place")
def overlap(job: Job) -> None:
    job.group.all_reduce(job.x[:6], job.x[2:])


@misuse(BUFFERS, "in place, at another rank's part", "`out.reshape(size, -1)[rank]`")
def in_place_at_wrong_offset(job: Job) -> None:
    job.group.all_gather(job.x[4:], job.x)


@misuse(BUFFERS, "C: buffers that overlap", "separate buffers, or in place")
def overlap_in_c(job: Job) -> None:
    memory = np.zeros(64, dtype=np.float32)
    job.c_all_reduce(memory.ctypes.data, memory.ctypes.data + 4)


@misuse(BUFFERS, "an all-to-all in place", "an out of its own")
def all_to_all_in_place(job: Job) -> None:
    job.group.all_to_all(job.x, job.x)


@misuse(BUFFERS, "C: the same with `unjamAllToAll`", "an output of its own")
def all_to_all_in_place_in_c(job: Job) -> None:
    data = job.x.ctypes.data
    job.c("AllToAll", job.group._handle, b"k", data, data, 4, 8, None, None)


@misuse(BUFFERS, "`all_to_all` of 7 elements between two ranks", "as many elements for each rank")
def all_to_all_odd(job: Job) -> None:
    job.group.all_to_all(job.x[:7], np.zeros(7, dtype=np.float32))


@misuse(BUFFERS, "results into a read-only array", "a writable array; inputs may be read-only")
def read_only(job: Job) -> None:
    job.x.flags.writeable = False
    job.group.all_reduce(job.x)


@misuse(BUFFERS, "`all_reduce(matrix[:, 0])`", "rows, or a contiguous copy")
def not_contiguous(job: Job) -> None:
    job.group.all_reduce(np.ones((4, 4), dtype=np.float32)[:, 0])


@misuse(BUFFERS, "float64 into float32", "the same type; convert with `astype`")
def types_differ(job: Job) -> None:
    job.group.all_reduce(np.ones(8), job.x)


@misuse(BUFFERS, "complex numbers", "a type of the list; a complex array as `view(np.float32)`")
def type_unsupported(job: Job) -> None:
    job.group.all_reduce(np.ones(8, dtype=np.complex64))


@misuse(BUFFERS, "an output that is too small", "all-gather: ranks times the input")
def too_small(job: Job) -> None:
    job.group.all_gather(job.x, np.zeros(12, dtype=np.float32))


@misuse(BUFFERS, "another machine's byte order", "convert")
def foreign_byte_order(job: Job) -> None:
    job.group.all_reduce(np.ones(8, dtype=">f4"))


@misuse(BUFFERS, "a list of numbers", "an array: the result needs memory to go to")
def no_memory(job: Job) -> None:
    job.group.all_reduce([1.0, 2.0])


@misuse(
    BUFFERS, "a torch tensor on a device that unjam does not know", "copy it to where unjam works"
)
def tensor_on_a_device(job: Job) -> None:
    torch = pytest.importorskip("torch")
    job.group.all_reduce(torch.ones(8, device="meta"))


@misuse(BUFFERS, "results into a torch parameter", "`parameter.detach()`, or `torch.no_grad()`")
def tensor_requires_grad(job: Job) -> None:
    torch = pytest.importorskip("torch")
    job.group.all_reduce(torch.ones(8, requires_grad=True))


# ---- the heap ----

HEAP = "The heap"
KIB = 1 << 10


def c_alloc(job: Job, nbytes: int) -> int:
    """unjamMemAlloc on rank 0."""
    pointer = ctypes.c_void_p()
    job.c("MemAlloc", job.contexts[0]._handle, nbytes, ctypes.byref(pointer))
    assert pointer.value
    return pointer.value


@misuse(HEAP, "`context.alloc(4096)` in a job without a heap", "`heap_bytes`, or `UNJAM_HEAP`")
def no_heap(job: Job) -> None:
    job.contexts[0].alloc(4096)


@misuse(HEAP, "more memory than there is", "let go of some, or a larger heap", heap_bytes=64 * KIB)
def heap_full(job: Job) -> None:
    blocks = [job.contexts[0].alloc(16 * KIB) for _ in range(4)]
    del blocks[1], blocks[2]
    job.contexts[0].alloc(20 * KIB)


@misuse(HEAP, "`context.alloc(-1)`", "a size")
def alloc_negative(job: Job) -> None:
    job.contexts[0].alloc(-1)


@misuse(HEAP, "C: freed the same memory twice", "once", heap_bytes=64 * KIB)
def freed_twice(job: Job) -> None:
    address = c_alloc(job, 100)
    job.c("MemFree", job.contexts[0]._handle, address)
    job.c("MemFree", job.contexts[0]._handle, address)


@misuse(HEAP, "C: freed what is inside of an allocation", "its beginning", heap_bytes=64 * KIB)
def freed_in_the_middle(job: Job) -> None:
    job.c("MemFree", job.contexts[0]._handle, c_alloc(job, 1000) + 512)


@misuse(HEAP, "C: freed memory of another rank's heap", "with its own context", heap_bytes=KIB)
def freed_what_is_not_of_the_heap(job: Job) -> None:
    job.c("MemFree", job.contexts[1]._handle, c_alloc(job, 100))


@misuse(HEAP, "C: freed memory of `malloc`", "what `unjamMemAlloc` gave", heap_bytes=KIB)
def freed_what_is_of_no_heap(job: Job) -> None:
    job.c("MemFree", None, job.x.ctypes.data)


# ---- registered memory ----

REGISTERED = "Registered memory"


def large() -> Any:
    """An array whose all-reduces go through slots, so that peers may store into it."""
    return np.ones(100_000, np.float32)


@misuse(REGISTERED, "`context.register_memory(x[:0])`", "memory that has bytes")
def registered_nothing(job: Job) -> None:
    job.contexts[0].register_memory(job.x[:0])


@misuse(REGISTERED, "C: registered NULL", "an address")
def registered_null(job: Job) -> None:
    job.c("MemRegister", job.contexts[0]._handle, None, 4096)


@misuse(REGISTERED, "C: a size of -1 bytes", "a size in bytes; unsigned")
def registered_minus_one(job: Job) -> None:
    job.c("MemRegister", job.contexts[0]._handle, job.x.ctypes.data, 2**64 - 1)


@misuse(REGISTERED, "registered the same memory twice", "once; or `close()` first")
def memory_registered_twice(job: Job) -> None:
    job.contexts[0].register_memory(job.x)
    job.contexts[0].register_memory(job.x)


@misuse(REGISTERED, "registered a part of what is registered", "the whole is enough")
def registered_a_part(job: Job) -> None:
    job.contexts[0].register_memory(job.x)
    job.contexts[0].register_memory(job.x[4:])


@misuse(REGISTERED, "registered memory of the heap", "nothing: it needs none", heap_bytes=64 * KIB)
def registered_the_heap(job: Job) -> None:
    job.contexts[0].register_memory(job.contexts[0].alloc(4096))


@misuse(REGISTERED, "65 registrations of one rank", "few large ones")
def too_many_windows(job: Job) -> None:
    memory = np.zeros(65 * 16, np.uint8)
    for i in range(65):
        job.contexts[0].register_memory(memory[16 * i : 16 * i + 16])


@misuse(REGISTERED, "results into a read-only array", "a writable array")
def registered_read_only(job: Job) -> None:
    job.contexts[0].register_memory(bytes(64))


@misuse(REGISTERED, "`close()` of a registration with calls pending", "wait for the calls first")
def deregistered_with_pending(job: Job) -> None:
    x = np.ones(8, dtype=np.float32)
    registration = job.contexts[0].register_memory(x)
    job.group.all_reduce(x, key="pending")
    registration.close()


@misuse(REGISTERED, "C: deregistered twice", "once")
def deregistered_twice(job: Job) -> None:
    job.c("MemRegister", job.contexts[0]._handle, job.x.ctypes.data, job.x.nbytes)
    job.c("MemDeregister", job.contexts[0]._handle, job.x.ctypes.data)
    job.c("MemDeregister", job.contexts[0]._handle, job.x.ctypes.data)


@misuse(REGISTERED, "C: deregistered from the middle of it on", "the pointer that was registered")
def deregistered_in_the_middle(job: Job) -> None:
    job.c("MemRegister", job.contexts[0]._handle, job.x.ctypes.data, job.x.nbytes)
    job.c("MemDeregister", job.contexts[0]._handle, job.x.ctypes.data + 4)


@misuse(
    REGISTERED,
    "`close()` of a registration after a call into it has failed",
    "free it when all ranks have ended the call",
)
def deregistered_after_a_failure(job: Job) -> None:
    x = large()
    registration = job.contexts[0].register_memory(x)
    failed = job.group.all_reduce(x, key="k")
    job.groups[1].all_reduce(np.ones(9, np.float32), key="k").exception(PATIENCE_S)
    failed.exception(PATIENCE_S)
    registration.close()


# ---- values ----

VALUES = "Values"


@misuse(VALUES, "C: a count of bytes gone wrong, such as -1", "elements, not bytes; unsigned")
def count_overflow(job: Job) -> None:
    job.c_all_reduce(job.x.ctypes.data, job.x.ctypes.data, count=2**64 - 1)


@misuse(VALUES, "C: an unknown data type", "a value of `unjamDataType_t`")
def unknown_type_number(job: Job) -> None:
    job.c_all_reduce(job.x.ctypes.data, job.x.ctypes.data, dtype=12)


@misuse(VALUES, "C: an unknown operator", "a value of `unjamOp_t`")
def unknown_op_number(job: Job) -> None:
    job.c_all_reduce(job.x.ctypes.data, job.x.ctypes.data, op=-1)


@misuse(VALUES, "C: an unknown kind", "a value of `unjamKind_t`")
def unknown_kind_number(job: Job) -> None:
    handle = ctypes.c_void_p()
    job.c("Register", job.group._handle, b"k", 10, 8, 0, 0, 0, ctypes.byref(handle))


@misuse(VALUES, "`op='mean'`", "`op='avg'`")
def unknown_op(job: Job) -> None:
    job.group.all_reduce(job.x, op="mean")


@misuse(VALUES, "`dtype='half'`", "a name of the list, NumPy's or torch's type")
def unknown_type(job: Job) -> None:
    job.group.register_all_reduce("k", "half")


@misuse(VALUES, "`root=2` in a group of two", "a rank in the group, not in the job")
def root_outside(job: Job) -> None:
    job.group.broadcast(job.x, root=2)


@misuse(VALUES, "`recv(x, 2)` in a group of two", "a rank in the group, not in the job")
def peer_outside(job: Job) -> None:
    job.group.recv(job.x, 2)


@misuse(VALUES, "registered a barrier, or a send", "call it each time")
def barrier_registered(job: Job) -> None:
    job.group.register("barrier", "k", "float32")


@misuse(VALUES, "a priority that is NaN", "an integer; higher first")
def priority_nan(job: Job) -> None:
    job.group.all_reduce(job.x, priority=float("nan"))  # type: ignore[arg-type]


@misuse(VALUES, "a priority beyond 32 bits, such as a time in ns", "smaller numbers")
def priority_too_large(job: Job) -> None:
    job.group.all_reduce(job.x, priority=2**31)


@misuse(VALUES, "a callback that cannot be called", "pass the function, do not call it")
def callback_is_none_such(job: Job) -> None:
    job.group.all_reduce(job.x, callback=job.x.sum())  # type: ignore[arg-type]


@misuse(VALUES, "C: `unjamCallOptions_t` without the initialiser", "start from the initialiser")
def options_without_size(job: Job) -> None:
    options = _abi.CallOptions()
    job.c_all_reduce(job.x.ctypes.data, job.x.ctypes.data, options=ctypes.byref(options))


@misuse(VALUES, "C: a NULL handle", "check what the call that makes it returned")
def null_handle(job: Job) -> None:
    job.c("GroupSize", None, ctypes.byref(ctypes.c_int()))


@misuse(VALUES, "C: a buffer that a text does not fit in", "ask for the size with `bytes` 0")
def text_does_not_fit(job: Job) -> None:
    text = ctypes.create_string_buffer(10)
    job.c("Info", job.contexts[0]._handle, text, 10, None)


@misuse(VALUES, "C: `unjamStats_t` without its size", "set `.size` first")
def stats_without_size(job: Job) -> None:
    stats = _abi.Stats()
    job.c("GetStats", job.contexts[0]._handle, ctypes.byref(stats))


# ---- disagreement ----

AGREE = "Ranks that disagree"


@misuse(AGREE, "different counts", "the same count on all ranks: pad, or agree on it first")
def counts_differ(job: Job) -> None:
    job.disagree(
        lambda g: g.all_reduce(np.ones(8), key="k"), lambda g: g.all_reduce(np.ones(9), key="k")
    )


@misuse(AGREE, "different types", "convert before the call")
def dtypes_differ(job: Job) -> None:
    job.disagree(
        lambda g: g.all_reduce(np.ones(8), key="k"),
        lambda g: g.all_reduce(np.ones(8, dtype=np.int64), key="k"),
    )


@misuse(AGREE, "different operators", "the same operator")
def ops_differ(job: Job) -> None:
    job.disagree(
        lambda g: g.all_reduce(np.ones(8), key="k"),
        lambda g: g.all_reduce(np.ones(8), key="k", op="max"),
    )


@misuse(AGREE, "different roots", "the same root: a rank in the group")
def roots_differ(job: Job) -> None:
    job.disagree(
        lambda g: g.reduce(np.ones(8), np.ones(8), key="k", root=0),
        lambda g: g.reduce(np.ones(8), np.ones(8), key="k", root=1),
    )


@misuse(AGREE, "different kinds: two collectives share a key", "a key for each")
def kinds_differ(job: Job) -> None:
    job.disagree(
        lambda g: g.all_reduce(np.ones(8), key="k"),
        lambda g: g.all_gather(np.ones(8), np.ones(16), key="k"),
    )


@misuse(AGREE, "a barrier on one rank, a collective on another", "a key of its own for barriers")
def barrier_meets_another(job: Job) -> None:
    job.disagree(lambda g: g.barrier(key="k"), lambda g: g.all_reduce(np.ones(8), key="k"))


@misuse(
    AGREE, "a receive of another size than what is sent", "the same count and type at both ends"
)
def receive_of_another_size(job: Job) -> None:
    job.disagree(
        lambda g: g.recv(np.ones(9), 1, key="tag 3"), lambda g: g.send(np.ones(8), 0, key="tag 3")
    )


@misuse(AGREE, "sent itself something else than it receives", "the same count and type")
def message_to_itself_differs(job: Job) -> None:
    requests = [job.group.send(np.ones(8), 0, key="k"), job.group.recv(np.ones(9), 0, key="k")]
    errors = [request.exception(PATIENCE_S) for request in requests]
    assert str(errors[0]) == str(errors[1])
    assert errors[0] is not None
    raise errors[0]


@misuse(AGREE, "different orders under one key", "one order a key, or a key for each")
def orders_differ(job: Job) -> None:
    def calls(first: int, second: int) -> Callable[[Any], Any]:
        return lambda g: [g.all_reduce(np.ones(n)) for n in (first, second)][0]

    job.disagree(calls(8, 9), calls(9, 8))


# ---- waiting ----

WAIT = "Waiting"


@misuse(WAIT, "a peer that never calls", "ask `explain()` who has not called; wait longer")
def peer_never_calls(job: Job) -> None:
    job.pending("gradients").wait(0.1)


@misuse(WAIT, "C: the same", "ask `unjamExplain`; wait longer")
def peer_never_calls_c(job: Job) -> None:
    job.c("Wait", job.pending("gradients")._handle, 100000)


@misuse(
    WAIT,
    "equal members in different orders: two groups that never meet",
    "the same list on all ranks; `explain()` shows who has not called",
)
def group_orders_differ(job: Job) -> None:
    groups = [job.contexts[0].group([0, 1]), job.contexts[1].group([1, 0])]
    requests = [group.all_reduce(np.ones(8), key="k") for group in groups]
    pending = job.contexts[0].explain()["ranks"][0]["pending"]
    assert [call["not_called_by"] for call in pending] == [[1]]
    requests[0].wait(0.1)


@misuse(
    WAIT,
    "sent to itself, and waited, before it received",
    "call both, then wait; a copy needs no message",
)
def send_to_itself(job: Job) -> None:
    job.group.send(job.x, 0, key="k").wait(0.1)


@misuse(WAIT, "`wait(timeout=nan)`", "seconds, or None")
def timeout_nan(job: Job) -> None:
    job.pending("gradients").wait(float("nan"))


@misuse(WAIT, "waited in a callback", "go on in the other request's callback")
def wait_in_callback(job: Job) -> None:
    request = job.groups[1].all_reduce(job.x, key="other")
    job.in_callback(request.wait)


@misuse(WAIT, "C: waited in a callback", "go on in the other request's callback")
def wait_in_callback_c(job: Job) -> None:
    request = job.groups[1].all_reduce(job.x, key="other")
    job.in_callback(lambda: job.c("Wait", request._handle, -1))


@misuse(WAIT, "the application waits in a circle, with `timeout`", "wait after both calls")
def circle(job: Job) -> None:
    errors = rank_threads(
        lambda: job.groups[0].all_reduce(np.ones(8), key="A").wait(0.2),
        lambda: job.groups[1].all_reduce(np.ones(8), key="B").wait(0.2),
    )
    job.groups[1].all_reduce(np.ones(8), key="A").wait(PATIENCE_S)  # and it goes on
    job.groups[0].all_reduce(np.ones(8), key="B").wait(PATIENCE_S)
    raise errors[0]


# ---- the end ----

END = "The end of contexts and processes"


@misuse(END, "`close()` with calls pending", "wait for them, or `abort()`")
def close_with_pending(job: Job) -> None:
    job.pending("gradients")
    job.contexts[0].close()


@misuse(END, "closed the context in its own callback", "in another thread")
def close_in_callback(job: Job) -> None:
    job.in_callback(job.contexts[0].close)


@misuse(END, "C: destroyed the context in its own callback", "in another thread")
def destroy_in_callback_c(job: Job) -> None:
    job.in_callback(lambda: job.c("Destroy", job.contexts[0]._handle))


@misuse(END, "a call after `abort()`", "join a new job", ends=True)
def call_after_abort(job: Job) -> None:
    job.contexts[0].abort()
    job.group.all_reduce(job.x)


@misuse(END, "a wait for a call that `abort()` has ended", "nothing: that is what it is for", True)
def wait_after_abort(job: Job) -> None:
    request = job.pending()
    job.contexts[0].abort()
    request.wait(PATIENCE_S)


@misuse(END, "a peer was aborted", "groups without it go on; `group.shrink()`", ends=True)
def peer_aborted(job: Job) -> None:
    request = job.pending()
    job.contexts[1].abort()
    request.wait(PATIENCE_S)


@misuse(END, "a peer left without calling", "call the same number of times on all ranks", ends=True)
def peer_left(job: Job) -> None:
    request = job.pending("gradients")
    job.contexts[1].close()
    request.wait(PATIENCE_S)


@misuse(END, "a call on a closed context", "make calls before the end of `with`", ends=True)
def call_on_closed_context(job: Job) -> None:
    job.contexts[0].close()
    job.group.all_reduce(job.x)


@misuse(END, "a wait for a request whose context has gone", "wait before", ends=True)
def wait_on_closed_context(job: Job) -> None:
    request = job.pending("gradients")
    job.contexts[0].abort()
    job.contexts[0].close()
    request.wait(PATIENCE_S)


@misuse(END, "`fork()` after `init`, and a call in the child", "`init` in the child, or spawn")
def fork_after_init(job: Job) -> None:
    # Every call of the child that touches what is the parent's must be refused: it sends the texts.
    request = job.pending("before the fork")
    collective = job.group.register_all_reduce("registered", "float32")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            os.close(read)
            texts = forked_calls(job, request, collective)
            os.write(write, "\n".join(texts).encode())
            atexit_in_child()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        texts = pipe.read().split("\n")
    deadline = time.monotonic() + PATIENCE_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        assert time.monotonic() < deadline, "the child hangs at its end"
        time.sleep(0.01)
    # The parent goes on as if nothing had happened.
    job.groups[1].all_reduce(np.ones(8, dtype=np.float32), key="before the fork").wait(PATIENCE_S)
    request.wait(PATIENCE_S)
    runs = [g.register_all_reduce("registered", "float32") for g in job.groups[1:]] + [collective]
    unjam.wait_all([run.run(np.ones(8, dtype=np.float32)) for run in runs], PATIENCE_S)
    assert texts[-1] == "child's own job: 3.0", texts
    assert len(texts) > 20
    assert len(set(texts[:-1])) == 1, texts
    raise unjam.InvalidUsage(texts[0])


def forked_calls(job: Job, request: unjam.Request, collective: unjam.Collective) -> list[str]:
    """In a child: what each call says; last, a job of its own."""
    context, group = job.contexts[0], job.group
    number, size = ctypes.c_int(), ctypes.c_uint64()
    handle = ctypes.c_void_p()
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(job.x),
        lambda: collective.run(job.x),
        collective.close,
        request.test,
        request.wait,
        request.result,
        lambda: request.add_done_callback(print),
        context.group,
        group.close,
        context.abort,
        context.close,
        context.device_synchronize,
        context.stats,
        context.info,
        context.explain,
        context.trace,
        context.async_error,
        context.absent,
        lambda: group.register_all_reduce("k", "float32"),
        lambda: job.c("Wait", request._handle, -1),
        lambda: job.c("RequestFree", request._handle),
        lambda: job.c("OnComplete", request._handle, None, None),
        lambda: job.c("ContextRank", context._handle, ctypes.byref(number)),
        lambda: job.c("ContextSize", context._handle, ctypes.byref(number)),
        lambda: job.c("GroupRank", group._handle, ctypes.byref(number)),
        lambda: job.c("GroupSize", group._handle, ctypes.byref(number)),
        lambda: job.c("KeyHash", group._handle, b"k", ctypes.byref(size)),
        lambda: job.c("GroupShrink", group._handle, b"k", ctypes.byref(handle)),
        lambda: context.alloc(1),
        lambda: job.c("MemAlloc", context._handle, 1, ctypes.byref(handle)),
        lambda: job.c("MemFree", context._handle, None),
    ]
    texts = []
    for i, call in enumerate(calls):
        try:
            call()
            texts.append(f"call {i} was not refused")
        except unjam.InvalidUsage as error:
            texts.append(str(error))
    assert job.lib.unjamRequestError(request._handle) == b""
    with context:  # ends without a word: it is for the parent to end it
        pass

    def own(context: unjam.Context) -> float:
        x = np.full(4, context.rank + 1.0)
        context.group().all_reduce(x).wait(PATIENCE_S)
        return float(x[3])

    return [*texts, f"child's own job: {unjam.launch(2, own)[0]}"]


def atexit_in_child() -> None:
    """What Python does at the end of a process that does not use os._exit."""
    from unjam import context

    context._end_all()


# ---- the tests ----


@pytest.fixture
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job that may end with anything pending."""
    config = {"stall_ms": 50} | request.param
    with unjam.init_all(2, **config) as contexts:
        try:
            yield Job(contexts, monkeypatch)
        finally:
            contexts.abort()


RESULTS: dict[str, tuple[str, str]] = {}


@pytest.mark.parametrize(
    ("case", "job"),
    [pytest.param(case, case.config, id=case.id) for case in CASES],
    indirect=["job"],
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_misuse(case: Misuse, job: Job) -> None:
    with pytest.raises(unjam.UnjamError) as caught:
        case.run(job)
    error = caught.value
    code, message = type(error).__name__, normal(str(error))
    if case.ends:
        with unjam.init_all(2) as contexts:
            prove([context.group() for context in contexts])
    else:
        prove(job.groups)
    if UPDATE:
        RESULTS[case.id] = (code, message)
        return
    rows = page_rows()
    assert case.id in rows, f"no row: {__doc__}"
    assert (code, message) == rows[case.id][:2], f"the page differs: {__doc__}"


def test_page_is_made_of_the_cases() -> None:
    if UPDATE:
        write_page()
    rows = page_rows()
    assert list(rows) == [case.id for case in CASES], __doc__
    for case in CASES:
        assert rows[case.id][2:] == (case.did, case.cure), __doc__


# ---- the page ----

_VARIABLE = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x7f3a5c001001"),
    (re.compile(r"process \(?\d+\)?"), "process 4711"),
    (re.compile(r"text has \d+ bytes"), "text has 1234 bytes"),
    (re.compile(r"this library knows \d+"), "this library knows 112"),
)


def normal(message: str) -> str:
    """The message with what differs from run to run as the page shows it."""
    for pattern, example in _VARIABLE:
        message = pattern.sub(example, message)
    return message


def cell(text: str) -> str:
    """A code span that may stand in a table."""
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text.replace('|', chr(92) + '|')}{pad}{fence}"


def page_rows() -> dict[str, tuple[str, str, str, str]]:
    """id → code, message, what was done, cure; as the page has them."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith('| <a id="'):
            fields = re.split(r"(?<!\\) \| ", line.strip("| ").replace("\\|", "\0"))
            name = re.findall(r'<a id="(\w+)"></a>', fields[0])[0]
            did = fields[0].split("</a>", 1)[1]
            code = fields[1].strip("`")
            message = re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", fields[2])
            rows[name] = (code, message.replace("\0", "|"), did, fields[3].replace("\0", "|"))
    return rows


def write_page() -> None:
    """Puts the tables between the page's markers."""
    missing = [case.id for case in CASES if case.id not in RESULTS]
    assert not missing, f"run all cases to write the page: {missing}"
    lines = []
    for section in dict.fromkeys(case.section for case in CASES):
        lines += [
            f"### {section}",
            "",
            "| done | error | message | do |",
            "| --- | --- | --- | --- |",
        ]
        for case in CASES:
            if case.section == section:
                code, message = RESULTS[case.id]
                done = f'<a id="{case.id}"></a>{case.did}'
                lines.append(f"| {done} | `{code}` | {cell(message)} | {case.cure} |")
        lines.append("")
    begin, end = "<!-- from tests/python/test_misuse.py -->", "<!-- end -->"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(before + begin + "\n" + "\n".join(lines) + end + rest.split(end)[1])
