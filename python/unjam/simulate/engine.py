"""Runs rounds: intervals, progress, stopping early, interruption."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import _abi, _lib
from .. import _limits as limits
from .._closing import ClosesAtEnd
from .errors import InputError
from .job import MODELS, MOST_ROUNDS, ORDERS, SEMANTICS, Job, whole

_NONE = 2**64 - 1
Z95 = 1.959963984540054


def wilson(hits: int, rounds: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a ratio; 95 % unless said otherwise. All of 0 to 1 for no rounds."""
    if rounds == 0:
        return 0.0, 1.0
    p = hits / rounds
    spread = z * math.sqrt(p * (1 - p) / rounds + z * z / (4 * rounds * rounds))
    center = p + z * z / (2 * rounds)
    scale = 1 + z * z / rounds
    low = 0.0 if hits == 0 else (center - spread) / scale
    high = 1.0 if hits == rounds else (center + spread) / scale
    return low, high


@dataclass(frozen=True)
class Precision:
    """When enough is known: half the width of the 95 % interval, absolute or of the ratio."""

    value: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Precision:
        """``0.001`` (absolute) or ``10%`` (of the ratio)."""
        relative = text.endswith("%")
        try:
            value = float(text.rstrip("%")) / (100 if relative else 1)
        except ValueError:
            value = math.nan
        if not 0 < value < 1:
            raise InputError("precision", f"{text!r}: write 0.001 or 10%")
        return cls(value, relative)

    def reached(self, hits: int, rounds: int) -> bool:
        low, high = wilson(hits, rounds)
        limit = self.value * hits / rounds if self.relative else self.value
        return (high - low) / 2 <= limit


@dataclass(frozen=True)
class Result:
    """What the rounds gave."""

    job: Job
    semantics: str
    rounds: int
    exact: int
    released: int
    exact_only: int
    released_only: int
    first_exact: int | None
    first_released: int | None
    disorders: int
    syncs: int
    seconds: float
    cpu_seconds: float
    stopped: str = ""  # "", "precise enough" or "interrupted"

    def hits(self, semantics: str) -> int:
        return self.exact if semantics == "exact" else self.released

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("exact", "released") if self.semantics == "both" else (self.semantics,)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        job = self.job
        verdicts = {}
        for kind in self.kinds:
            hits = self.hits(kind)
            low, high = wilson(hits, self.rounds)
            verdicts[kind] = {
                "deadlocks": hits,
                "ratio": hits / self.rounds if self.rounds else None,
                "low": low,
                "high": high,
                "first_round": self.first_exact if kind == "exact" else self.first_released,
            }
        return {
            "name": job.name,
            "model": job.model,
            "order": job.order,
            "gpus": job.gpus,
            "groups": len(job.groups),
            "invocations": job.invocations,
            "disorder": job.disorder,
            "sync": job.sync,
            "seed": job.seed,
            "rounds": self.rounds,
            **verdicts,
            "disorders_per_round": self.disorders / self.rounds if self.rounds else None,
            "syncs_per_round": self.syncs / self.rounds if self.rounds else None,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "stopped": self.stopped,
        }


def memory_limit() -> int:
    """Bytes that a simulation may take: half of what the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def default_threads() -> int:
    return min(len(os.sched_getaffinity(0)), 64)


class Simulator(ClosesAtEnd):
    """A job, ready to be run. Use as a context manager.

    Raises:
        InputError: the job cannot be, or takes more memory than `memory` bytes.
    """

    def __init__(self, job: Job, memory: int | None = None) -> None:
        self.job = job
        arrays = job.arrays()
        limit = memory_limit() if memory is None else whole("memory", memory, 1, 2**64 - 1)
        native = _abi.Simulation(
            size=ctypes.sizeof(_abi.Simulation),
            model=MODELS.index(job.model),
            order=ORDERS.index(job.order),
            gpus=job.gpus,
            groups=len(job.groups),
            sequence_length=len(arrays["sequence"]),
            disorder=job.disorder,
            sync=job.sync,
            seed=job.seed,
            memory_limit=limit,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        self._lib = _lib.library()
        self._handle = ctypes.c_void_p()
        code = self._lib.unjamSimulatorCreate(ctypes.byref(native), ctypes.byref(self._handle))
        if code in (_abi.ERROR_INVALID_ARGUMENT, _abi.ERROR_RESOURCES):
            field, found, reason = _lib.last_error(code).partition(": ")
            if not found:
                field, reason = "job", field
            raise InputError(field, reason)
        _lib.check(code)

    def close(self) -> None:
        """Frees the library's part; harmless twice."""
        if self._handle:
            self._lib.unjamSimulatorDestroy(self._handle)
            self._handle = ctypes.c_void_p()

    def run(
        self,
        rounds: int,
        semantics: str = "exact",
        threads: int | None = None,
        plain: bool = False,
        precision: Precision | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Result:
        """Simulates rounds 0, 1, … The result does not depend on the number of threads.

        Ctrl-C ends it early, with what is known by then.

        Args:
            rounds: at most so many.
            semantics: exact, released or both.
            threads: None: one a CPU that this process may use.
            plain: use the step-by-step engine.
            precision: stop as soon as all wanted ratios are as precise as this.
            progress: called with the rounds just done.
        """
        whole("rounds", rounds, 1, MOST_ROUNDS)
        if threads is not None:
            whole("threads", threads, 1, limits.SIMULATOR_THREADS)
        if semantics not in SEMANTICS:
            raise InputError("semantics", f"{semantics!r} is none of {', '.join(SEMANTICS)}")
        bits = {"exact": _abi.SIM_EXACT, "released": _abi.SIM_RELEASED, "both": 3}[semantics]
        total = dict.fromkeys(_SUMMED, 0)
        firsts: dict[str, int | None] = {"first_exact": None, "first_released": None}
        start, cpu = time.perf_counter(), time.process_time()
        portion = self._portion(plain)
        stopped = ""
        try:
            while total["rounds"] < rounds and not stopped:
                counts = _abi.SimulationCounts()
                done = total["rounds"]
                n = min(portion, rounds - done)
                _lib.check(
                    self._lib.unjamSimulatorRun(
                        self._handle,
                        done,
                        n,
                        default_threads() if threads is None else threads,
                        bits,
                        int(plain),
                        ctypes.byref(counts),
                    )
                )
                for name in _SUMMED:
                    total[name] += getattr(counts, name)
                for name in firsts:
                    if firsts[name] is None and getattr(counts, name) != _NONE:
                        firsts[name] = getattr(counts, name)
                if progress:
                    progress(n)
                kinds = ("exact", "released") if semantics == "both" else (semantics,)
                if precision and all(precision.reached(total[k], total["rounds"]) for k in kinds):
                    stopped = "precise enough"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return Result(
            job=self.job,
            semantics=semantics,
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu,
            stopped=stopped,
            **total,
            **firsts,
        )

    def _portion(self, plain: bool) -> int:
        """Rounds a call into the library: about a tenth of a second's work.

        A function of the job alone, so that stopping early does not depend on the machine.
        """
        job = self.job
        nanoseconds = 100 + job.invocations * (job.disorder * 2000 + job.sync * 400)
        if plain:
            nanoseconds = 1000 + job.invocations * 50
        return int(min(max(1e8 / nanoseconds, 1), 100_000))

    def round(self, number: int, plain: bool = False) -> dict[str, Any]:
        """One round: what happened, and who waited for whom."""
        whole("round", number, 0, 2**64 - 1)
        found: dict[str, Any] = _lib.read_json(
            lambda *text: self._lib.unjamSimulatorRound(self._handle, number, int(plain), *text)
        )
        return found


_SUMMED = (
    "rounds",
    "exact",
    "released",
    "exact_only",
    "released_only",
    "disorders",
    "syncs",
)


def simulate(job: Job, rounds: int = 32_000, **options: Any) -> Result:
    """Simulates a job; options as in :meth:`Simulator.run`."""
    with Simulator(job) as simulator:
        return simulator.run(rounds, **options)
