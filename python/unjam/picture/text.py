"""Users' texts in pictures by matplotlib."""

from __future__ import annotations

from .._texts import printable


def literal(text: str) -> str:
    """`text` as matplotlib draws it just so: what stands between two $ is no formula."""
    return printable(text).replace("$", r"\$")
