"""Groups of ranks, and the collective calls on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _arguments, _completion
from ._arguments import Arguments
from ._devices import call_options, call_stream, check_place
from ._errors import InvalidUsage
from ._kinds import facts_of
from ._lib import check, library
from ._names import algorithm_name, encode
from ._types import Kind, dtype_of, kind_of, op_of
from .collective import Collective
from .request import Request

if TYPE_CHECKING:
    from .context import Context

OnDone = Callable[[Request], object]

# What calls take beside their data: key, priority, callback, stream, in_stream, algorithm.
_How = tuple[str, int, OnDone | None, Any, bool, str | None]


class Group:
    """An ordered set of ranks. Made by :meth:`unjam.Context.group`.

    Every collective call returns a :class:`~unjam.Request` at once and never blocks on another
    rank (but for one that others have ended already, which waits for their reasons, 5 s at most).
    The arguments that all calls share:

    * ``x``, ``out``: NumPy arrays (also with ml_dtypes' types), torch tensors, or anything with the
      buffer protocol, ``__array_interface__`` or ``__cuda_array_interface__``; C-contiguous, of any
      shape (only the number of elements counts), used without a copy; in host memory or, where the
      context is on a CUDA device, on that device. Read-only ones serve as inputs. On the host ``x``
      must hold its values when the call is made; then it must stay untouched, and ``out`` must not
      be read, until the request is complete. The request keeps both alive.
    * ``key``: the ordering channel. The n-th use of a key in this group is matched with the n-th
      use of it on every other rank; different keys may be used in a different order on every rank.
    * ``dtype``: what raw memory holds, such as "bfloat16" in a bytearray or a uint16 array. Types
      that unjam does not know (bool, int16, complex numbers, …) raise InvalidArgument, which says
      what to pass in their place.
    * ``priority``: higher first, under ``order="priority"``.
    * ``callback``: ``callback(request)`` on completion, from the context's callback thread. It may
      submit, but must not wait for pending collectives of the same context.
    * ``stream`` (CUDA only): a ``torch.cuda.Stream`` or a ``cudaStream_t`` as an int; None is
      torch's current stream of the context's device (without torch: the legacy default stream).
      The collective reads ``x`` after the work queued in the stream so far. The stream itself goes
      on beside it: ``request.wait()`` makes a stream wait for the results.
    * ``in_stream`` (CUDA only): True makes the call stand in the stream as a kernel would: work
      queued in it afterwards sees the results, without a ``wait()``. Buffers are then kept alive by
      the request only, as torch's allocator expects it of a kernel: memory of another stream needs
      ``tensor.record_stream``.
    * ``algorithm`` (of those that move a collective's data): the plan's algorithm for this call,
      by a name that ``UNJAM_ALGORITHM`` takes; None leaves it to the configuration. Ranks must
      agree on it.

    They raise InvalidArgument (wrong size, type, overlap, read-only output, not contiguous) or its
    subclass InvalidType (not memory), InvalidUsage (closed context) and Resources; then nothing was
    submitted. What goes wrong later is raised by the request: ranks that disagree, for one.
    """

    def __init__(self, context: Context, ranks: list[int] | None, name: str) -> None:
        """Made by :meth:`unjam.Context.group`, not by users."""
        self._context = context
        self._name = name
        self._ranks = tuple(range(context.size)) if ranks is None else tuple(ranks)
        self._handle = ctypes.c_void_p()
        self._closed = False
        array = None if ranks is None else (ctypes.c_int * len(ranks))(*ranks)
        size = context.size if ranks is None else len(ranks)
        number = ctypes.c_int(0)
        with context._call() as lib:
            check(
                lib.unjamGroupCreate(
                    context._handle, array, size, encode(name, "name"), ctypes.byref(self._handle)
                )
            )
            check(lib.unjamGroupRank(self._handle, ctypes.byref(number)))
        self._rank = number.value

    def __repr__(self) -> str:
        name = f" {self._name!r}" if self._name else ""
        return f"<unjam.Group{name} rank {self._rank} of {self.size}>"

    @property
    def context(self) -> Context:
        """The context that the group belongs to."""
        return self._context

    @property
    def name(self) -> str:
        """As given to :meth:`unjam.Context.group`."""
        return self._name

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the job, in the group's order."""
        return self._ranks

    def shrink(self, name: str = "") -> Group:
        """A group of those members that are still there (see :meth:`unjam.Context.absent`).

        Local. All survivors make it with the same name. If they do not know of the same absences
        yet, those whose group includes an absent rank get :class:`~unjam.Peer` from it and shrink
        that one again: then all have the same.
        """
        absent = set(self._context.absent())
        return Group(self._context, [rank for rank in self._ranks if rank not in absent], name)

    def close(self) -> None:
        """Destroys the group; closing its context does so too. May be repeated.

        Raises:
            InvalidUsage: invocations are pending.
        """
        if self._closed:
            return
        if self._context._enter():
            try:
                check(library().unjamGroupDestroy(self._handle))
            finally:
                self._context._leave()
        self._closed = True

    # ---- collectives at once ----

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        key: str = "",
        op: str = "sum",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """``out[i]`` = op over all ranks of their ``x[i]``; in place if `out` is None.

        Args:
            x: input, any number of elements, the same on all ranks.
            out: output of the same size; None: x receives the result.
            key: see the class.
            op: "sum", "prod", "min", "max" or "avg".
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.ALL_REDUCE, x, out, dtype, how, op=op)

    def all_gather(
        self,
        x: Any,
        out: Any,
        *,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """Part r of `out` = rank r's `x`.

        Args:
            x: input, the same number of elements on all ranks. In place: the part of out that
                belongs to this rank, ``out.reshape(size, -1)[rank]``.
            out: output of ``size`` times as many elements.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.ALL_GATHER, x, out, dtype, how)

    def reduce_scatter(
        self,
        x: Any,
        out: Any,
        *,
        key: str = "",
        op: str = "sum",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """``out[i]`` = op over all ranks of the `rank`-th part of their `x`.

        Args:
            x: input of ``size`` times as many elements as out.
            out: output. In place: the part of x that belongs to this rank,
                ``x.reshape(size, -1)[rank]``.
            key: see the class.
            op: "sum", "prod", "min", "max" or "avg".
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.REDUCE_SCATTER, x, out, dtype, how, op=op)

    def reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        key: str = "",
        op: str = "sum",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """On root: ``out[i]`` = op over all ranks of their ``x[i]``, in place if `out` is None.

        Args:
            x: input, the same number of elements on all ranks; unchanged away from root.
            out: output of the same size, on root; not looked at elsewhere.
            root: rank in the group.
            key: see the class.
            op: "sum", "prod", "min", "max" or "avg".
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.REDUCE, x, out, dtype, how, op=op, root=root)

    def broadcast(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """Every rank gets root's `x`: in its own x, or in `out` if given.

        Args:
            x: on root the input, which may be read-only; elsewhere the output, and not looked at if
                out is given.
            out: output of the same size; on root x is copied there.
            root: rank in the group.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.BROADCAST, x, out, dtype, how, root=root)

    def all_to_all(
        self,
        x: Any,
        out: Any,
        *,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """Part r of `out` = rank r's part of `x` for this rank.

        Args:
            x: input of ``size`` equal parts; part r goes to rank r.
            out: output of the same size, apart from x: an all-to-all is never in place.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.ALL_TO_ALL, x, out, dtype, how)

    def gather(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """On root: part r of `out` = rank r's `x`.

        Args:
            x: input, the same number of elements on all ranks. In place on root: the part of out
                that belongs to it, ``out.reshape(size, -1)[root]``.
            out: output of ``size`` times as many elements, on root; not looked at elsewhere.
            root: rank in the group.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.GATHER, x, out, dtype, how, root=root)

    def scatter(
        self,
        x: Any,
        out: Any,
        *,
        root: int = 0,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
        algorithm: str | None = None,
    ) -> Request:
        """`out` = the `rank`-th part of root's `x`.

        Args:
            x: input of ``size`` times as many elements as out, on root; not looked at elsewhere
                (may be None).
            out: output. In place on root: the part of x that belongs to it,
                ``x.reshape(size, -1)[root]``.
            root: rank in the group.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
            algorithm: see the class.
        """
        how = (key, priority, callback, stream, in_stream, algorithm)
        return self._collective(Kind.SCATTER, x, out, dtype, how, root=root)

    def barrier(
        self,
        *,
        key: str = "",
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
    ) -> Request:
        """Completes on no rank before all ranks have called it. Moves no data.

        It is a use of `key` as any collective: it comes after this rank's earlier uses of that key,
        and does not wait for those of others.

        Args:
            key: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
        """
        what = _arguments.nothing(self._context._place)
        how = (key, priority, callback, stream, in_stream, None)
        return self._call("unjamBarrier", "barrier", what, (), how)

    # ---- point to point ----

    def send(
        self,
        x: Any,
        peer: int,
        *,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
    ) -> Request:
        """Sends `x` to rank `peer`, which calls :meth:`recv`.

        The n-th send to a rank under a key meets that rank's n-th receive from this one under it.
        Only these two ranks take part: sends and receives are independent of the group's
        collectives, of other pairs and of the other direction, whatever the keys. A send may
        complete before it is received; do not rely on that. One to this rank itself never does.

        Args:
            x: input; the receiver gives an output of the same size and type.
            peer: rank in the group; this one, too.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
        """
        peer = _arguments.check_peer(peer, self.size)
        what = _arguments.source_only(x, dtype)
        arguments = (what.send, what.elements, what.dtype, peer)
        how = (key, priority, callback, stream, in_stream, None)
        return self._call("unjamSend", f"send to rank {peer}", what, arguments, how)

    def recv(
        self,
        out: Any,
        peer: int,
        *,
        key: str = "",
        dtype: Any = None,
        priority: int = 0,
        callback: OnDone | None = None,
        stream: Any = None,
        in_stream: bool = False,
    ) -> Request:
        """Receives into `out` what rank `peer` sends; see :meth:`send`.

        Args:
            out: output, of the same size and type as the sender's x.
            peer: rank in the group, another one than this.
            key: see the class.
            dtype: see the class.
            priority: see the class.
            callback: see the class.
            stream: see the class.
            in_stream: see the class.
        """
        peer = _arguments.check_peer(peer, self.size)
        what = _arguments.target_only(out, "out", dtype)
        arguments = (what.recv, what.elements, what.dtype, peer)
        how = (key, priority, callback, stream, in_stream, None)
        return self._call("unjamRecv", f"recv from rank {peer}", what, arguments, how)

    def probe(self, peer: int, *, key: str = "") -> bool:
        """Whether `peer` has sent what this rank's next :meth:`recv` from it under `key` would get.

        As MPI_Iprobe. Never blocks: a peer in another process is asked, and a later call, some
        milliseconds later, tells what it has answered.

        Raises:
            Peer: the peer is gone.
            InvalidArgument: `peer` is no other rank of the group.
        """
        peer = _arguments.check_peer(peer, self.size)
        if self._closed:
            raise InvalidUsage(f"{self!r} is closed: make it again, on all of its ranks")
        ready = ctypes.c_int(0)
        encoded = encode(key, "key")
        with self._context._call() as lib:
            check(lib.unjamProbe(self._handle, encoded, peer, ctypes.byref(ready)))
        return bool(ready.value)

    # ---- registered collectives ----

    def register_all_reduce(
        self, key: str, dtype: Any, op: str = "sum", *, priority: int = 0
    ) -> Collective:
        """An all-reduce for repeated runs under `key`. Local, at any time; see :meth:`register`."""
        return self.register("all_reduce", key, dtype, op=op, priority=priority)

    def register_all_gather(self, key: str, dtype: Any, *, priority: int = 0) -> Collective:
        """An all-gather for repeated runs under `key`. Local, at any time; see :meth:`register`."""
        return self.register("all_gather", key, dtype, priority=priority)

    def register_reduce_scatter(
        self, key: str, dtype: Any, op: str = "sum", *, priority: int = 0
    ) -> Collective:
        """A reduce-scatter for repeated runs under `key`. Local; see :meth:`register`."""
        return self.register("reduce_scatter", key, dtype, op=op, priority=priority)

    def register_reduce(
        self, key: str, dtype: Any, op: str = "sum", *, root: int = 0, priority: int = 0
    ) -> Collective:
        """A reduce for repeated runs under `key`. Local, at any time; see :meth:`register`."""
        return self.register("reduce", key, dtype, op=op, root=root, priority=priority)

    def register_broadcast(
        self, key: str, dtype: Any, *, root: int = 0, priority: int = 0
    ) -> Collective:
        """A broadcast for repeated runs under `key`. Local, at any time; see :meth:`register`."""
        return self.register("broadcast", key, dtype, root=root, priority=priority)

    def register(
        self,
        kind: str | Kind,
        key: str,
        dtype: Any,
        *,
        op: str = "sum",
        root: int = 0,
        priority: int = 0,
        algorithm: str | None = None,
    ) -> Collective:
        """A collective of fixed kind, type, operator and root, whose plan and key are looked up
        once.

        Local, at any time: waits for nobody. The count and the buffers are given at each run.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "all_to_all",
                "gather" or "scatter".
            key: the ordering channel that its runs use.
            dtype: element type: a name, NumPy dtype or torch dtype.
            op: operator; used by all_reduce, reduce_scatter and reduce only.
            root: rank in the group; used by reduce, broadcast, gather and scatter only.
            priority: higher first, under ``order="priority"``.
            algorithm: of all its runs, by a name that ``UNJAM_ALGORITHM`` takes; None leaves it to
                the configuration. One that is unknown or does not serve the kind is refused at the
                first run.

        Raises:
            InvalidArgument: an unknown kind, type or operator, or a bad root or key; a kind that is
                not registered (barrier, send_recv).
        """
        root = _arguments.check_root(root, self.size)
        priority = _arguments.integer(priority, "priority")
        if self._closed:
            raise InvalidUsage(f"{self!r} is closed: make it again, on all of its ranks")
        return Collective(
            self,
            kind_of(kind),
            key,
            dtype_of(dtype),
            op_of(op),
            root,
            priority,
            algorithm_name(algorithm),
        )

    # ---- inside ----

    def _collective(
        self,
        kind: Kind,
        x: Any,
        out: Any,
        dtype: Any,
        how: _How,
        *,
        op: Any = None,
        root: int = 0,
    ) -> Request:
        """A call of `kind`; `op` and `root` are looked at where it has such."""
        facts = facts_of(kind)
        if facts.has_root:
            root = _arguments.check_root(root, self.size)
        what = _arguments.for_kind(kind, x, out, self._rank, self.size, root, dtype)
        arguments: tuple[Any, ...] = (what.send, what.recv, what.elements, what.dtype)
        if facts.reduces:
            arguments += (op_of(op),)
        if facts.has_root:
            arguments += (root,)
        return self._call(facts.function, _LABELS[kind], what, arguments, how)

    def _call(
        self, function: str, label: str, what: Arguments, arguments: tuple[Any, ...], how: _How
    ) -> Request:
        """One C call; `arguments` are what stands between key and options in its signature."""
        key, priority, callback, stream, in_stream, algorithm = how
        encoded = encode(key, "key")
        chosen = algorithm_name(algorithm)
        context = self._context
        if self._closed:
            raise InvalidUsage(f"{self!r} is closed: make it again, on all of its ranks")
        name = (label, key, self._name)
        check_place(what.place, context._place, context.rank)
        queue, order = call_stream(stream, in_stream, context._place)
        request = Request(context, name, what.output, what.keep, callback, queue, in_stream)
        if type(priority) is not int or not -1 << 31 <= priority < 1 << 31:
            priority = _arguments.integer(priority, "priority")
        number, address = 0, None
        if callback is not None:
            _arguments.check_callback(callback)
            number, address = _completion.register(request), _completion.ADDRESS
        options = None
        if priority or number or order or chosen is not None:
            options = ctypes.byref(call_options(priority, address, number, queue, order, chosen))
        if not context._enter():
            _completion.forget(number)
            raise context._closed_error()
        try:
            code = getattr(library(), function)(
                self._handle,
                encoded,
                *arguments,
                options,
                ctypes.byref(request._handle),
            )
            if code:
                check(code)
            if context._tracing:
                self._note_key(key, encoded)
        except BaseException:
            if not request._handle:
                _completion.forget(number)
            raise
        finally:
            context._leave()
        return request

    def _note_key(self, key: str, encoded: bytes) -> None:
        """While tracing: remembers the key's hash, by which events name it."""
        value = ctypes.c_uint64(0)
        check(library().unjamKeyHash(self._handle, encoded, ctypes.byref(value)))
        self._context._names[value.value] = (self._name, key)


_LABELS = {kind: kind.label for kind in Kind}
