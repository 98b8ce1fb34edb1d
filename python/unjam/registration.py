"""Memory of the user's that peers may store results into."""

from __future__ import annotations

from typing import Any

from . import _abi
from ._arguments import integer
from ._buffers import buffer_of, check_writable
from ._closing import ClosesAtEnd
from ._context_handle import ContextHandle
from ._devices import check_place
from ._errors import InvalidArgument, UnjamError
from ._lib import check

# Memory that peers may still store into, because a call into it has failed. It is kept to the end
# of the process: freed, it could be another object's when they store.
_stored_into: list[Any] = []


class Registration(ClosesAtEnd):
    """Memory that is registered with a context. Made by :meth:`Context.register_memory`.

    It lasts until :meth:`close`, also as a context manager, or until the context is closed; the
    context keeps it, and the array or tensor that was given, until then.
    """

    def __init__(self, context: ContextHandle, memory: Any) -> None:
        """For :meth:`Context.register_memory`."""
        self._context = context
        self._memory: Any = memory
        if isinstance(memory, tuple):
            if len(memory) != 2:
                raise InvalidArgument(
                    f"memory is a tuple of {len(memory)}: give (address, bytes), or an array or a "
                    "tensor"
                )
            address = integer(memory[0], "address", bits=64)
            nbytes = integer(memory[1], "bytes", bits=64)
            for value, name in ((address, "address"), (nbytes, "bytes")):
                if value < 0:
                    raise InvalidArgument(f"{name} is {value}: it is not negative")
        else:
            buffer = buffer_of(memory, "memory")
            check_writable(buffer, "memory")
            check_place(buffer.device, context._place, context.rank)
            address, nbytes = buffer.address, buffer.nbytes
            self._memory = buffer.keep
        self._address = address
        self._bytes = nbytes
        self._open = False
        with context._call() as lib:
            check(lib.unjamMemRegister(context._handle, address, nbytes))
        self._open = True
        context._registrations[self] = None

    def __repr__(self) -> str:
        state = f"{self._bytes} bytes" if self._open else "closed"
        return f"<unjam.Registration of rank {self._context.rank}, {state}>"

    @property
    def ptr(self) -> int:
        """The memory's address."""
        return self._address

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._bytes

    @property
    def closed(self) -> bool:
        """Whether peers are no longer let store there."""
        return not self._open

    def close(self) -> None:
        """Ends it; may be repeated. On a GPU the memory may be freed then.

        Raises:
            InvalidUsage: calls with outputs there are pending; the message names them and nothing
                has changed: wait for them first.
            Mismatch, Peer, Timeout, Aborted: a call with its output there has failed. It is ended,
                but peers that have yet to end that call may still store there: what was registered
                is kept to the end of the process, but where it was given as (address, bytes).
        """
        if not self._open or self._context.closed or self._context.inherited:
            self._end()
            return
        try:
            with self._context._call() as lib:
                code = lib.unjamMemDeregister(self._context._handle, self._address)
                if code not in (_abi.ERROR_INVALID_USAGE, _abi.SUCCESS):
                    _stored_into.append(self._memory)
                if code != _abi.ERROR_INVALID_USAGE:
                    self._end()
                check(code)
        except UnjamError:
            # Another thread has closed the context meanwhile.
            if not self._context.closed:
                raise
            self._end()

    def _end(self) -> None:
        self._open = False
        self._memory = None
        self._context._registrations.pop(self, None)

    def _keep(self) -> None:
        """The context ends, and peers may be storing there."""
        _stored_into.append(self._memory)

    def _end_block(self, failed: bool) -> None:
        if not failed:
            self.close()
            return
        # What has gone wrong in the block says more than what follows from it.
        try:
            self.close()
        except UnjamError:
            return
