"""Where values lie: activations in pages that are used again, mail and state in rooms of their own.

A page is given to another value only if counters say that all who used the former one have ended
before anybody writes the new one. That holds for every schedule on every number of SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Value
from .tasks import Program, counters_before

PAGE_BYTES = 1024


@dataclass
class Places:
    """Offsets in bytes, by numbers of values.

    Attributes:
        pages: of activations.
        page_count: how many pages they take.
        unshared: bytes that they would take without reuse.
        state: of tokens, positions and caches.
        state_bytes: all of them.
        mail: of what peers send, in one half of the mail's room; the halves serve steps in turn.
        mail_bytes: of one half.
    """

    pages: dict[int, int]
    page_count: int
    unshared: int
    state: dict[int, int]
    state_bytes: int
    mail: dict[int, int]
    mail_bytes: int


def place(program: Program, reuse: bool = True) -> Places:
    """Gives every value its place, first fit.

    Args:
        program: with its counters.
        reuse: False: every value has pages of its own.
    """
    graph = program.graph
    before = counters_before(program, program.tasks)
    users: dict[int, int] = {}  # of each value: counters of who reads or writes it
    first: dict[int, int] = {}  # of each value: what is full before all who write it
    for task in program.tasks:
        for rect in task.reads + task.writes:
            number = rect.value.number
            users[number] = users.get(number, 0) | 1 << task.signal
        for rect in task.writes:
            number = rect.value.number
            first[number] = first.get(number, -1) & before[task.number]
    pages: list[int] = []  # of each, the counters of who uses it last
    places: dict[int, int] = {}
    unshared = 0
    for op in graph.operators:
        for value in op.outputs.values():
            if value.room != "pages":
                continue
            count = -(-value.bytes // PAGE_BYTES)
            unshared += count * PAGE_BYTES
            known = first[value.number]
            start = _fit(pages, count, known) if reuse else len(pages)
            pages += [0] * (start + count - len(pages))
            pages[start : start + count] = [users[value.number]] * count
            places[value.number] = start * PAGE_BYTES
    state, state_bytes = _in_a_row([v for v in graph.values if v.room == "state"])
    mail, mail_bytes = _in_a_row([v for v in graph.values if v.room == "mail"])
    return Places(places, len(pages), unshared, state, state_bytes, mail, mail_bytes)


def _fit(pages: list[int], count: int, known: int) -> int:
    """The first of so many pages beside each other whose users have all ended."""
    run = 0
    for page, user in enumerate(pages):
        run = run + 1 if user & ~known == 0 else 0
        if run == count:
            return page + 1 - count
    return len(pages) - run


def _in_a_row(values: list[Value]) -> tuple[dict[int, int], int]:
    found, at = {}, 0
    for value in values:
        found[value.number] = at
        at += -(-value.bytes // 256) * 256
    return found, at
