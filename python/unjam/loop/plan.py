"""A plan: a graph cut into tasks, with places and a schedule, checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from .._errors import InvalidArgument
from .check import Verdict, check
from .graph import Graph
from .ops import rules_of
from .pages import PAGE_BYTES, Places, place
from .schedule import Machine, Schedule, Span, make_schedule, timeline
from .tasks import SYNCS, Program, Sync, make_program


@dataclass
class Plan:
    """What :func:`compile_graph` makes; the same on all ranks.

    Attributes:
        program: tasks and counters.
        places: where values lie.
        schedule: tasks of each SM, in order.
        machine: the model by which it was made.
        verdict: what the checker says.
    """

    program: Program
    places: Places
    schedule: Schedule
    machine: Machine
    verdict: Verdict

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.program.graph

    @property
    def number(self) -> int:
        """Of 64 bits: two plans that differ in anything that ranks must agree on differ here."""
        text = repr(
            (
                [(op.kind, op.name, sorted(op.settings.items())) for op in self.graph.operators],
                [(v.name, v.shape, v.dtype, v.room) for v in self.graph.values],
                self.graph.ranks,
                [(t.op, t.tile, t.waits, t.signal) for t in self.program.tasks],
                sorted(self.places.mail.items()),
                self.schedule.streams,
            )
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def timeline(self) -> list[list[Span]]:
        """When each task runs on the modelled machine, by SMs."""
        return timeline(self.program, self.schedule, self.machine)

    def weight_bytes(self) -> int:
        """That a step reads on one rank, of tasks that load weights; with full caches."""
        return sum(
            self.program.rules[task.op].weight_bytes(task.tile)
            for task in self.program.tasks
            if task.op >= 0
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        spans = self.timeline()
        return {
            "graph": self.graph.name,
            "ranks": self.graph.ranks,
            "batch": self.graph.batch,
            "context": self.graph.context,
            "dtype": self.graph.dtype,
            "sync": self.program.sync,
            "sms": self.machine.sms,
            "number": f"{self.number:016x}",
            "operators": len(self.graph.operators),
            "tasks": len(self.program.tasks),
            "counters": len(self.program.counters),
            "page_bytes": self.places.page_count * PAGE_BYTES,
            "page_bytes_without_reuse": self.places.unshared,
            "state_bytes": self.places.state_bytes,
            "mail_bytes": 2 * self.places.mail_bytes,
            "read_bytes": self.weight_bytes(),
            "model_us": max((span.end for row in spans for span in row), default=0.0),
            "check_seconds": self.verdict.seconds,
            "faults": [fault.text for fault in self.verdict.faults],
        }


def compile_graph(
    graph: Graph, machine: Machine | None = None, sync: Sync = "counters", reuse: bool = True
) -> Plan:
    """Cuts, places, schedules and checks a graph.

    Args:
        graph: which ends with :meth:`~unjam.loop.Graph.head_argmax`.
        machine: the model to schedule for; None: 131 SMs of an H100.
        sync: counters: tasks wait for what they need. grid: for all of the level in front, as in
            ARK's loop kernel.
        reuse: whether activations may use pages again.

    Raises:
        InvalidArgument: the graph is not complete, or the checker found a fault.
    """
    if sync not in SYNCS:
        raise InvalidArgument(f"sync={sync!r} is not known: give {' or '.join(SYNCS)}")
    if not graph.is_complete:
        raise InvalidArgument("the graph gives no tokens: end it with head_argmax()")
    machine = machine or Machine()
    program = make_program(graph, rules_of(graph, machine.sms), sync)
    places = place(program, reuse)
    schedule = make_schedule(program, machine)
    verdict = check(program, places, schedule)
    verdict.require()
    return Plan(program, places, schedule, machine, verdict)
