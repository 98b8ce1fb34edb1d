"""The buffers' place in one block, where a sweep has them in unjam's heap or registered."""

from __future__ import annotations

from typing import Any

from .cases import in_heap


class Block:
    """One allocation for a whole sweep, cut anew for each case.

    A library may let go of a finished case's buffers a while after its last call has returned (the
    threads of gloo do), so what the next case takes must not wait for that.
    """

    def __init__(self, whole: Any) -> None:
        """Nothing is cut yet.

        Args:
            whole: an array or a tensor of bytes; as large as the largest case needs.
        """
        self._whole = whole
        self._used = 0

    def restart(self) -> None:
        """All of it is there to be cut again; nobody uses what was cut before."""
        self._used = 0

    def cut(self, nbytes: int) -> Any:
        """The next so many bytes, aligned as an allocation of their own.

        Raises:
            MemoryError: fewer are left.
        """
        first, left = self._used, len(self._whole) - self._used
        if nbytes > left:
            raise MemoryError(f"{nbytes} bytes of the block are wanted and {left} left")
        self._used += in_heap(nbytes)
        return self._whole[first : first + nbytes]
