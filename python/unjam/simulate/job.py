"""What is to be simulated: GPUs, groups, collectives, probabilities."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InputError

MODELS = ("single-queue", "synchronization")
ORDERS = ("interleaved", "concatenated", "explicit")
SEMANTICS = ("exact", "released", "both")

MOST_GPUS = 1 << 24
MOST_ROUNDS = 2**62
MOST_MEMBERSHIPS = 1 << 27


@dataclass(frozen=True)
class Group:
    """A group and how many collectives it has in a round."""

    gpus: Sequence[int]
    collectives: int
    name: str = ""


@dataclass(frozen=True)
class Job:
    """A job for the simulator. docs/simulator.md says what each field means."""

    gpus: int
    groups: Sequence[Group]
    model: str = "single-queue"
    order: str = "interleaved"
    disorder: float = 0.0
    sync: float = 0.0
    seed: int = 0
    sequence: Sequence[int] = ()
    name: str = ""

    def __post_init__(self) -> None:
        _choice("model", self.model, MODELS)
        _choice("order", self.order, ORDERS)
        probability("disorder", self.disorder)
        probability("sync", self.sync)
        if self.model == "single-queue" and self.sync:
            raise InputError("sync", "means nothing in the single-queue model; use synchronization")
        if self.sync > 0.999:
            raise InputError("sync", "must be at most 0.999: GPUs would only synchronise")
        whole("seed", self.seed, 0, 2**64 - 1)
        whole("gpus", self.gpus, 1, MOST_GPUS)
        if not self.groups:
            raise InputError("groups", "there are none")
        for place, group in enumerate(self.groups):
            check_group(f"groups[{place}]", group, self.gpus)
        last = len(self.groups) - 1
        for place, number in enumerate(self.sequence):
            if type(number) is not int or not 0 <= number <= last:
                whole(f"sequence[{place}]", number, 0, last)

    @property
    def invocations(self) -> int:
        """Collectives that GPUs invoke in a round, all together."""
        return sum(len(group.gpus) * group.collectives for group in self.groups)

    @property
    def overlap(self) -> float:
        """Groups that a GPU is in, on average over GPUs that are in any."""
        used = {gpu for group in self.groups for gpu in group.gpus}
        return sum(len(group.gpus) for group in self.groups) / len(used)

    def replace(self, **changes: Any) -> Job:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The groups as the C API takes them."""
        sizes = np.array([len(group.gpus) for group in self.groups], dtype=np.uint64)
        begin = np.zeros(len(sizes) + 1, dtype=np.uint64)
        np.cumsum(sizes, out=begin[1:])
        return {
            "group_begin": begin,
            "members": np.concatenate([np.asarray(g.gpus, np.uint32) for g in self.groups]),
            "counts": np.array([group.collectives for group in self.groups], dtype=np.uint32),
            "sequence": np.asarray(self.sequence, dtype=np.uint32),
        }


def _choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(name, f"{value!r} is none of {', '.join(choices)}")


def probability(name: str, value: Any) -> float:
    """Checks a probability: 0, or 1e-12 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(name, f"{value!r} is not a number")
    if not 0 <= value <= 1:
        raise InputError(name, f"{value!r} is no probability (0 to 1)")
    if 0 < value < 1e-12:
        raise InputError(name, f"{value!r} is too small: 0, or at least 1e-12")
    return float(value)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Checks a whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(name, f"{value!r} is not a whole number")
    value = operator.index(value)
    if not least <= value <= most:
        raise InputError(name, f"{value} is not in {least} to {most}")
    return int(value)


def check_group(name: str, group: Group, gpus: int) -> None:
    """Checks members and count."""
    members = group.gpus
    if len(members) == 0:
        raise InputError(f"{name}.gpus", "the group is empty")
    if isinstance(members, range):  # as our own are, with very many members: its ends tell
        members = [members[0], members[-1]][: len(members)]
    whole(f"{name}.collectives", group.collectives, 1, 2**30)
    seen: set[int] = set()
    for gpu in members:
        if isinstance(gpu, bool) or not isinstance(gpu, int):
            raise InputError(f"{name}.gpus", f"{gpu!r} is not a GPU number")
        if not 0 <= gpu < gpus:
            raise InputError(f"{name}.gpus", f"GPU {gpu} is unknown (there are 0 to {gpus - 1})")
        if gpu in seen:
            raise InputError(f"{name}.gpus", f"GPU {gpu} is there twice")
        seen.add(gpu)


@dataclass(frozen=True)
class Parallel:
    """A training job as users describe it. Collectives are those of one round (one iteration).

    Ranks are numbered as Megatron does: TP fastest, then CP, then DP, then PP. EP divides DP.
    Counts that are None follow from layers, micro_batches, ddp_buckets and fsdp_units.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    world: int | None = None
    layers: int | None = None
    micro_batches: int = 1
    ddp_buckets: int | None = None
    fsdp_units: int | None = None
    tp_collectives: int | None = None
    cp_collectives: int | None = None
    ep_collectives: int | None = None
    dp_collectives: int | None = None
    pp_collectives: int = 0
    _counts: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp", "cp", "ep"):
            whole(f"parallel.{name}", getattr(self, name), 1, MOST_GPUS)
        for name in ("layers", "ddp_buckets", "fsdp_units", "micro_batches", *_COUNTS):
            value = getattr(self, name)
            if value is not None:
                whole(f"parallel.{name}", value, 0 if name == "pp_collectives" else 1, 2**30)
        size = self.tp * self.dp * self.pp * self.cp
        if self.world is not None and self.world != size:
            raise InputError(
                "parallel.world",
                f"{self.world} is not tp x cp x dp x pp = "
                f"{self.tp} x {self.cp} x {self.dp} x {self.pp} = {size}",
            )
        if size > MOST_GPUS:
            raise InputError(
                "parallel",
                f"{size:,} GPUs would take about {size * 512 >> 30:,} GiB; at most {MOST_GPUS:,}",
            )
        if self.dp % self.ep:
            raise InputError("parallel.ep", f"{self.ep} does not divide dp = {self.dp}")
        if self.ddp_buckets is not None and self.fsdp_units is not None:
            raise InputError("parallel.fsdp_units", "is given beside ddp_buckets: one or the other")
        self._counts.update(self._derive())

    def _derive(self) -> dict[str, int]:
        """Collectives of each kind of group a round."""
        stage_layers = None if self.layers is None else -(-self.layers // self.pp)
        # Each layer: attention and MLP, forwards and backwards; a key-value exchange each way; an
        # exchange of tokens to and from the experts each way.
        per_layer = {"tp": 4, "cp": 2, "ep": 4}
        counts: dict[str, int] = {}
        for kind, times in per_layer.items():
            given = getattr(self, f"{kind}_collectives")
            if getattr(self, kind) == 1:
                continue
            if given is None and stage_layers is None:
                raise InputError(
                    "parallel.layers", f"is needed (or {kind}_collectives), as {kind} is over 1"
                )
            if given is None:
                assert stage_layers is not None
                given = times * stage_layers * self.micro_batches
            counts[kind] = given
        if self.dp * self.cp > 1:
            if self.dp_collectives is not None:
                counts["dp"] = self.dp_collectives
            elif self.ddp_buckets is not None:
                counts["dp"] = self.ddp_buckets
            elif self.fsdp_units is not None:
                # Gathered forwards and backwards, then gradients scattered.
                counts["dp"] = 3 * self.fsdp_units
            else:
                raise InputError(
                    "parallel.ddp_buckets",
                    "is needed (or fsdp_units, or dp_collectives), as dp is over 1",
                )
        if self.pp > 1 and self.pp_collectives:
            counts["pp"] = self.pp_collectives
        return counts

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def groups(self) -> list[Group]:
        """Stage after stage: TP, CP, EP, then DP groups; then pairs of neighbouring stages."""
        tp, cp, dp = self.tp, self.cp, self.dp
        stage_size = tp * cp * dp
        groups: list[Group] = []

        def add(kind: str, gpus: range) -> None:
            if kind in self._counts:
                groups.append(Group(gpus, self._counts[kind], kind))

        for stage in range(self.pp):
            base = stage * stage_size
            for first in range(base, base + stage_size, tp):
                add("tp", range(first, first + tp))
            for d in range(dp):
                for t in range(tp):
                    first = base + d * tp * cp + t
                    add("cp", range(first, first + tp * cp, tp))
            for part in range(dp // self.ep):
                for inner in range(tp * cp):
                    first = base + part * self.ep * tp * cp + inner
                    add("ep", range(first, first + self.ep * tp * cp, tp * cp))
            # Gradients are shared by all that hold the same weights: CP ranks too.
            for t in range(tp):
                add("dp", range(base + t, base + stage_size, tp))
        for stage in range(self.pp - 1):
            for i in range(stage_size):
                first = stage * stage_size + i
                add("pp", range(first, first + stage_size + 1, stage_size))
        if not groups:
            raise InputError("parallel", "one GPU alone has no collectives: make tp or dp over 1")
        return groups

    def job(self, **settings: Any) -> Job:
        """The job, with the settings of :class:`Job`."""
        return Job(gpus=self.gpus, groups=self.groups(), **settings)


_COUNTS = (
    "tp_collectives",
    "cp_collectives",
    "ep_collectives",
    "dp_collectives",
    "pp_collectives",
)
