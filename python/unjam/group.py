"""Groups of ranks, and the collective calls on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from . import _arguments
from ._arguments import Arguments
from ._context_handle import ContextHandle
from ._errors import InvalidUsage
from ._kinds import facts_of
from ._lib import check, library
from ._names import algorithm_name, encode
from ._submit import submit
from ._types import Kind, dtype_of, kind_of, op_of
from .collective import Collective
from .options import (
    CallOptions,
    CollectiveOptions,
    Options,
    TransferOptions,
    read,
    spelled_out,
)
from .request import Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    # What a user reads of a group's context is all of it; see test_imports.py.
    from .context import Context

OnComplete = Callable[[Request], object]


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
    * ``options``: the keywords ``key``, ``dtype``, ``priority``, ``callback``, ``stream``,
      ``in_stream`` and ``algorithm``, which :mod:`unjam.options` explains. A barrier moves no data
      and takes no ``dtype``; an ``algorithm`` is for collectives only.

    They raise InvalidArgument (wrong size, type, overlap, read-only output, not contiguous) or its
    subclass InvalidType (not memory), InvalidUsage (closed context) and Resources; then nothing was
    submitted. What goes wrong later is raised by the request: ranks that disagree, for one.
    """

    def __init__(self, context: ContextHandle, ranks: list[int] | None, name: str) -> None:
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
        return cast("Context", self._context)

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

    @spelled_out(CollectiveOptions)
    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """``out[i]`` = op over all ranks of their ``x[i]``; in place if `out` is None.

        Args:
            x: input, any number of elements, the same on all ranks.
            out: output of the same size; None: x receives the result.
            op: "sum", "prod", "min", "max" or "avg".
            options: see the class.
        """
        return self._collective(Kind.ALL_REDUCE, x, out, options, op=op)

    @spelled_out(CollectiveOptions)
    def all_gather(
        self,
        x: Any,
        out: Any,
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """Part r of `out` = rank r's `x`.

        Args:
            x: input, the same number of elements on all ranks. In place: the part of out that
                belongs to this rank, ``out.reshape(size, -1)[rank]``.
            out: output of ``size`` times as many elements.
            options: see the class.
        """
        return self._collective(Kind.ALL_GATHER, x, out, options)

    @spelled_out(CollectiveOptions)
    def reduce_scatter(
        self,
        x: Any,
        out: Any,
        *,
        op: str = "sum",
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """``out[i]`` = op over all ranks of the `rank`-th part of their `x`.

        Args:
            x: input of ``size`` times as many elements as out.
            out: output. In place: the part of x that belongs to this rank,
                ``x.reshape(size, -1)[rank]``.
            op: "sum", "prod", "min", "max" or "avg".
            options: see the class.
        """
        return self._collective(Kind.REDUCE_SCATTER, x, out, options, op=op)

    @spelled_out(CollectiveOptions)
    def reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        op: str = "sum",
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """On root: ``out[i]`` = op over all ranks of their ``x[i]``, in place if `out` is None.

        Args:
            x: input, the same number of elements on all ranks; unchanged away from root.
            out: output of the same size, on root; not looked at elsewhere.
            root: rank in the group.
            op: "sum", "prod", "min", "max" or "avg".
            options: see the class.
        """
        return self._collective(Kind.REDUCE, x, out, options, op=op, root=root)

    @spelled_out(CollectiveOptions)
    def broadcast(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """Every rank gets root's `x`: in its own x, or in `out` if given.

        Args:
            x: on root the input, which may be read-only; elsewhere the output, and not looked at if
                out is given.
            out: output of the same size; on root x is copied there.
            root: rank in the group.
            options: see the class.
        """
        return self._collective(Kind.BROADCAST, x, out, options, root=root)

    @spelled_out(CollectiveOptions)
    def all_to_all(
        self,
        x: Any,
        out: Any,
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """Part r of `out` = rank r's part of `x` for this rank.

        Args:
            x: input of ``size`` equal parts; part r goes to rank r.
            out: output of the same size, apart from x: an all-to-all is never in place.
            options: see the class.
        """
        return self._collective(Kind.ALL_TO_ALL, x, out, options)

    @spelled_out(CollectiveOptions)
    def gather(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """On root: part r of `out` = rank r's `x`.

        Args:
            x: input, the same number of elements on all ranks. In place on root: the part of out
                that belongs to it, ``out.reshape(size, -1)[root]``.
            out: output of ``size`` times as many elements, on root; not looked at elsewhere.
            root: rank in the group.
            options: see the class.
        """
        return self._collective(Kind.GATHER, x, out, options, root=root)

    @spelled_out(CollectiveOptions)
    def scatter(
        self,
        x: Any,
        out: Any,
        *,
        root: int = 0,
        **options: Unpack[CollectiveOptions],
    ) -> Request:
        """`out` = the `rank`-th part of root's `x`.

        Args:
            x: input of ``size`` times as many elements as out, on root; not looked at elsewhere
                (may be None).
            out: output. In place on root: the part of x that belongs to it,
                ``x.reshape(size, -1)[root]``.
            root: rank in the group.
            options: see the class.
        """
        return self._collective(Kind.SCATTER, x, out, options, root=root)

    @spelled_out(CallOptions)
    def barrier(
        self,
        **options: Unpack[CallOptions],
    ) -> Request:
        """Completes on no rank before all ranks have called it. Moves no data.

        It is a use of `key` as any collective: it comes after this rank's earlier uses of that key,
        and does not wait for those of others.

        Args:
            options: see the class.
        """
        what = _arguments.nothing(self._context._place)
        given = read(CallOptions, options, "barrier")
        return self._call("unjamBarrier", "barrier", what, (), given)

    # ---- point to point ----

    @spelled_out(TransferOptions)
    def send(
        self,
        x: Any,
        peer: int,
        **options: Unpack[TransferOptions],
    ) -> Request:
        """Sends `x` to rank `peer`, which calls :meth:`recv`.

        The n-th send to a rank under a key meets that rank's n-th receive from this one under it.
        Only these two ranks take part: sends and receives are independent of the group's
        collectives, of other pairs and of the other direction, whatever the keys. A send may
        complete before it is received; do not rely on that. One to this rank itself never does.

        Args:
            x: input; the receiver gives an output of the same size and type.
            peer: rank in the group; this one, too.
            options: see the class.
        """
        given = read(TransferOptions, options, "send")
        peer = _arguments.check_rank(peer, "peer", self.size)
        what = _arguments.source_only(x, given.dtype)
        arguments = (what.send, what.elements, what.dtype, peer)
        return self._call("unjamSend", f"send to rank {peer}", what, arguments, given)

    @spelled_out(TransferOptions)
    def recv(
        self,
        out: Any,
        peer: int,
        **options: Unpack[TransferOptions],
    ) -> Request:
        """Receives into `out` what rank `peer` sends; see :meth:`send`.

        Args:
            out: output, of the same size and type as the sender's x.
            peer: rank in the group, another one than this.
            options: see the class.
        """
        given = read(TransferOptions, options, "recv")
        peer = _arguments.check_rank(peer, "peer", self.size)
        what = _arguments.target_only(out, "out", given.dtype)
        arguments = (what.recv, what.elements, what.dtype, peer)
        return self._call("unjamRecv", f"recv from rank {peer}", what, arguments, given)

    def probe(self, peer: int, *, key: str = "") -> bool:
        """Whether `peer` has sent what this rank's next :meth:`recv` from it under `key` would get.

        As MPI_Iprobe. Never blocks: a peer in another process is asked, and a later call, some
        milliseconds later, tells what it has answered.

        Raises:
            Peer: the peer is gone.
            InvalidArgument: `peer` is no other rank of the group.
        """
        peer = _arguments.check_rank(peer, "peer", self.size)
        self._check_open()
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
        root = _arguments.check_rank(root, "root", self.size)
        priority = _arguments.integer(priority, "priority")
        self._check_open()
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
        options: CollectiveOptions,
        *,
        op: Any = None,
        root: int = 0,
    ) -> Request:
        """A call of `kind`; `op` and `root` are looked at where it has such."""
        given = read(CollectiveOptions, options, _LABELS[kind])
        facts = facts_of(kind)
        if facts.has_root:
            root = _arguments.check_rank(root, "root", self.size)
        what = _arguments.for_kind(kind, x, out, self._rank, self.size, root, given.dtype)
        arguments: tuple[Any, ...] = (what.send, what.recv, what.elements, what.dtype)
        if facts.reduces:
            arguments += (op_of(op),)
        if facts.has_root:
            arguments += (root,)
        return self._call(facts.function, _LABELS[kind], what, arguments, given)

    def _call(
        self,
        function: str,
        label: str,
        what: Arguments,
        arguments: tuple[Any, ...],
        options: Options,
    ) -> Request:
        """One C call; `arguments` are what stands between key and options in its signature."""
        key = options.key
        encoded = encode(key, "key")
        algorithm = algorithm_name(options.algorithm)
        self._check_open()
        if self._context._tracing:
            self._note_key(key, encoded)
        name = (label, key, self._name)
        arguments = (self._handle, encoded, *arguments)
        return submit(self._context, name, what, options, algorithm, function, arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidUsage(f"{self!r} is closed: make it again, on all of its ranks")

    def _note_key(self, key: str, encoded: bytes) -> None:
        """While tracing: remembers the key's hash, by which events name it."""
        value = ctypes.c_uint64(0)
        with self._context._call() as lib:
            check(lib.unjamKeyHash(self._handle, encoded, ctypes.byref(value)))
        self._context._names[value.value] = (self._name, key)


_LABELS = {kind: kind.label for kind in Kind}
