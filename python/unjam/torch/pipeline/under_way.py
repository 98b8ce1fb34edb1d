"""How many keys the messages of a pipeline have under way at a time, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ..._errors import InvalidArgument
from ...pipeline import Message
from ...pipeline.lower import RECEIVE, SEND, WAIT, Step

_KEYS = {"cpu": 512, "cuda": 64}  # of a rank, if UNJAM_MAX_ACTIVE_KEYS says nothing


def most_keys(program: Sequence[Step], keys_of: Callable[[Message], int]) -> int:
    """The largest number of keys under way at a time.

    Args:
        program: of a rank.
        keys_of: how many a message takes; 0 for one that stays on the rank.
    """
    now = most = 0
    for step in program:
        if isinstance(step.what, Message):
            if step.do in (SEND, RECEIVE):
                now += keys_of(step.what)
                most = max(most, now)
            elif step.do == WAIT:
                now -= keys_of(step.what)
    return most


def check_keys(
    programs: Sequence[Sequence[Step]], keys_of: Callable[[Message], int], kind: str
) -> None:
    """Whether the messages of each program fit.

    Args:
        programs: of all rows.
        keys_of: see :func:`most_keys`.
        kind: of device.

    Raises:
        InvalidArgument: they do not; the message says by how many keys, and what to lower.
    """
    said = os.environ.get("UNJAM_MAX_ACTIVE_KEYS", "")
    limit = int(said) if said.isdecimal() else _KEYS.get(kind, _KEYS["cuda"])
    for row, program in enumerate(programs):
        most = most_keys(program, keys_of)
        if most > limit:
            raise InvalidArgument(
                f"the messages of row {row} may have {most} keys under way at a time, and a rank "
                f"has {limit}: give lower limits (receives=, sends=), or raise "
                "UNJAM_MAX_ACTIVE_KEYS on all ranks"
            )
