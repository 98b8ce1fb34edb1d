"""Memory that unjam has allocated: pieces of a rank's heap, into which its peers can store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ._closing import ClosesAtEnd
from ._context_handle import ContextHandle
from ._devices import HOST
from ._lib import check, library


class Memory(ClosesAtEnd):
    """A piece of a rank's heap, in its device's memory. Made by :meth:`Context.alloc`.

    A buffer of bytes: in host memory it has the buffer protocol (``numpy.frombuffer(memory,
    "float32")``, ``torch.frombuffer(memory, dtype=torch.float32)``), on a GPU
    ``__cuda_array_interface__`` (``torch.as_tensor(memory, device="cuda").view(torch.float32)``);
    arrays and tensors made so keep it alive. It is given back when nothing uses it any more, or at
    once by :meth:`close`, after which what was made of it must not be used. It may outlive its
    context, of which it then keeps the memory.
    """

    _context: ContextHandle
    _address = 0
    _bytes = 0
    _free: Callable[[None, int], int]  # kept here: at the end of Python modules go first

    @staticmethod
    def _allocate(context: ContextHandle, nbytes: int, place: int) -> Memory:
        """For :meth:`Context.alloc`."""
        pointer = ctypes.c_void_p()
        with context._call() as lib:
            check(lib.unjamMemAlloc(context._handle, nbytes, ctypes.byref(pointer)))
        address = pointer.value or 0
        memory: Memory
        if place == HOST:
            # Only types of C, and of ctypes, can have the buffer protocol: so this is one of them.
            kind: Any = ctypes.c_ubyte * nbytes
            kind = type(kind)("HostMemory", (Memory, kind), {"__module__": __name__})
            memory = kind.from_address(address) if nbytes else kind()
        else:
            memory = _CudaMemory()
        memory._context = context
        memory._address = address
        memory._bytes = nbytes
        memory._free = library().unjamMemFree
        return memory

    def __repr__(self) -> str:
        state = f"{self._bytes} bytes" if self._address or not self._bytes else "closed"
        return f"<unjam.Memory of rank {self._context.rank}, {state}>"

    @property
    def ptr(self) -> int:
        """The address, aligned to 512; 0 of no bytes, and after :meth:`close`."""
        return self._address

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._bytes

    def close(self) -> None:
        """Gives it back; may be repeated. No call that uses it may be pending."""
        address, self._address = self._address, 0
        # In a child of fork() the address is another heap's, if it is any.
        if address and not self._context.inherited:
            check(self._free(None, address))

    def __del__(self) -> None:
        if self._address:
            self.close()


class _CudaMemory(Memory):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
        }
