"""Texts of users (names of jobs, groups and keys, paths) as they are shown to people."""

from __future__ import annotations

import re

# A terminal acts upon these, and XML forbids them; lines and tabs do no harm.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with control characters as Python writes them: ``\\x1b`` in place of an escape."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
