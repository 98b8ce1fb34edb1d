"""What a ``with`` block closes at its end."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self  # the typing module has it from Python 3.11 on


class ClosesAtEnd:
    """A context manager whose end is its ``close()``."""

    def close(self) -> None:
        """What the class that has this says."""
        raise NotImplementedError

    def _end_block(self, failed: bool) -> None:
        """The block has ended; `failed`: by an exception, which goes on afterwards."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_block(kind is not None)
