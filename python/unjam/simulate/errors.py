"""What is wrong with an input, and where."""

from __future__ import annotations


class InputError(ValueError):
    """An input that cannot be simulated.

    Attributes:
        field: what is wrong, such as ``groups[3].gpus``.
        line: where it stands in the file; None if it came from elsewhere.
    """

    def __init__(self, field: str, message: str, line: int | None = None, file: str = "") -> None:
        self.field = field
        self.reason = message
        self.line = line
        self.file = file
        super().__init__(message)

    def __str__(self) -> str:
        place = self.file
        if self.line is not None:
            place += f":{self.line}" if place else f"line {self.line}"
        parts = [part for part in (place, self.field, self.reason) if part]
        return ": ".join(parts)
