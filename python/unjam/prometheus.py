"""Counters of this process's ranks for Prometheus, by the package prometheus-client (optional).

    unjam.write_prometheus("/var/lib/node_exporter/unjam.prom")  # a file, for its collector
    prometheus_client.REGISTRY.register(unjam.prometheus.Collector())  # or beside one's own

Whatever ranks are open when somebody asks are told, those of torch's process groups among them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._errors import InvalidUsage
from .context import open_contexts
from .stats import Stats

_ADAPTER = "_unjam_c10d"  # as unjam.torch calls it, which is not to be imported for this
# world: which of the process's jobs, from 0, in the order in which they were first seen; "torch" is
# torch's. pid: of this process, for a machine may have several jobs.
_LABELS = ("rank", "device", "world", "pid")
_lock = threading.Lock()
_numbers: dict[object, int] = {}  # by what contexts of one job share
# Metric -> (the field of Stats, what it is).
_COUNTERS = {
    "calls_submitted": ("submitted", "Calls that were made, sends and receives among them"),
    "calls_completed": ("completed", "Calls that ended, in error too"),
    "sent_bytes": ("bytes_sent", "Payload sent to peers"),
    "slices": ("slices", "Executions of a primitive that moved data"),
    "preemptions": ("preemptions", "Times that a collective gave way because a wait was too long"),
    "quantum_switches": ("quantum_switches", "Times that a collective gave way after its turn"),
    "failed_polls": ("spins", "Polls that found nothing: time spent in waiting"),
    "context_loads": ("context_loads", "Contexts of calls loaded into an engine"),
    "context_saves": ("context_saves", "Contexts of calls saved"),
    "borrowed_slices": ("borrowed", "Slices that went through a pool slot"),
    "engine_starts": ("starts", "Engine starts"),
    "engine_quits": ("quits", "Voluntary quits of an engine"),
    "engine_idle_quits": ("idle_quits", "Quits because nothing was pending"),
    "engine_stuck_quits": ("stuck_quits", "Quits because nothing of what was pending could move"),
}


@dataclass(frozen=True)
class _Rank:
    """A context of this process."""

    world: str
    info: dict[str, Any]
    stats: Stats
    failed: bool

    @property
    def labels(self) -> list[str]:
        return [str(self.info["rank"]), str(self.info["device"]), self.world, str(os.getpid())]


class Collector:
    """What a registry of prometheus_client asks for metrics.

    Args:
        keys: also the counters of each key, labelled with group and key. Each key is a time series
            of its own: not for programs that make up keys as they go.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
    """

    def __init__(self, keys: bool = False) -> None:
        _client()
        self._keys = keys

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus_client's own kinds of them."""
        core = _client().core
        ranks = _ranks()
        for name, (field, text) in _COUNTERS.items():
            counter = core.CounterMetricFamily(f"unjam_{name}", text, labels=_LABELS)
            for rank in ranks:
                counter.add_metric(rank.labels, getattr(rank.stats, field))
            yield counter
        gauges = {
            "calls_pending": "Calls that have not ended",
            "ranks": "Ranks of the job",
            "failed": "1 where the context is out of use since an error, else 0",
            "keys": "Keys that the rank holds connectors for",
            "memory_bytes": "Memory of the rank's arena that has been touched",
            "heap_used_bytes": "Memory given out of the heap",
        }
        for name, text in gauges.items():
            gauge = core.GaugeMetricFamily(f"unjam_{name}", text, labels=_LABELS)
            for rank in ranks:
                gauge.add_metric(rank.labels, _gauge(rank, name))
            yield gauge
        if self._keys:
            yield from _of_keys(core, ranks)


def write_prometheus(path: str | os.PathLike[str], keys: bool = False) -> None:
    """Writes the counters of this process's open ranks to a file, in one step.

    For the textfile collector of Prometheus' node exporter. Each process needs a file of its own.

    Args:
        path: the file; collectors take names that end in ".prom".
        keys: see :class:`Collector`.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed.
        OSError: the file cannot be written.
    """
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(Collector(keys))
    client.write_to_textfile(os.fspath(path), registry)


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics need the package prometheus_client: pip install prometheus-client"
        ) from error
    return prometheus_client


def _number_of(job: object) -> str:
    """Of a job, for as long as the process lives: counters of another one never go on under it."""
    with _lock:
        return str(_numbers.setdefault(job, len(_numbers)))


def _ranks() -> list[_Rank]:
    """The open contexts of this process, and those of torch's process groups."""
    ranks = []
    for one in open_contexts():
        world = _number_of(one._job)
        try:
            ranks.append(_Rank(world, one.info(), one.stats(), one.async_error() is not None))
        except InvalidUsage:  # closed meanwhile
            continue
    adapter = sys.modules.get(_ADAPTER)
    for place, job in enumerate(adapter.worlds() if adapter is not None else ()):
        number = f"torch{place or ''}"
        # A world that is closed meanwhile tells less with each question.
        for text, struct, failed in zip(job.info(), job.stats(), job.failed(), strict=False):
            stats = Stats.from_struct(_abi.Stats.from_buffer_copy(struct))
            ranks.append(_Rank(number, json.loads(text), stats, failed))
    return ranks


def _gauge(rank: _Rank, name: str) -> float:
    info = rank.info
    return {
        "calls_pending": rank.stats.pending,
        "ranks": info["ranks"],
        "failed": int(rank.failed),
        "keys": sum(info["held"][f"keys_{state}"] for state in ("busy", "lingering", "idle")),
        "memory_bytes": info["memory"]["arena_bytes_committed"],
        "heap_used_bytes": info["heap"]["used"],
    }[name]


def _of_keys(core: Any, ranks: list[_Rank]) -> Iterator[Any]:
    labels = (*_LABELS, "group", "key")
    families = {
        "submitted": core.CounterMetricFamily(
            "unjam_key_calls_submitted", "Calls made under the key", labels=labels
        ),
        "completed": core.CounterMetricFamily(
            "unjam_key_calls_completed", "Calls under the key that ended", labels=labels
        ),
        "preemptions": core.CounterMetricFamily(
            "unjam_key_preemptions", "Times that calls under the key gave way", labels=labels
        ),
        "time_ms": core.CounterMetricFamily(
            "unjam_key_seconds", "Time from calls to their ends, summed", labels=labels
        ),
    }
    for field, family in families.items():
        values: dict[tuple[str, ...], float] = {}  # groups may be alike in name
        for rank in ranks:
            for key in rank.info["keys"]:
                place = (*rank.labels, key["group"], key["key"])
                value = key[field] / 1000 if field == "time_ms" else key[field]
                values[place] = values.get(place, 0) + value
        for place, value in values.items():
            family.add_metric(place, value)
        yield family
