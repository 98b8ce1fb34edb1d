"""This host as a machine: constants fitted to unjam's own runs with 2 and 4 ranks."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..group import Group
from .machine import Constant, Machine
from .times import time_plan

_RANKS = (2, 4)
_SIZES = (64, 4096, 65536, 1 << 20)
_ALGORITHMS = ("ring", "double_binary_tree", "one_shot")
_LEAST_CALLS, _MOST_CALLS, _SECONDS = 7, 200, 0.25
_FITTED = ("slice_us", "wait_us", "peer_us", "engine_gb_per_s", "link_gb_per_s", "base_us")
_BOUNDS = {
    "slice_us": (0.01, 1e3),
    "wait_us": (0.01, 1e3),
    "peer_us": (0.01, 1e3),
    "engine_gb_per_s": (0.01, 1e3),
    "link_gb_per_s": (0.01, 1e3),
    "base_us": (0.01, 1e3),
}


class Measured(NamedTuple):
    """One case, and the median of its times."""

    algorithm: str
    ranks: int
    nbytes: int
    us: float


def calibrate() -> tuple[Machine, list[str]]:
    """Runs all-reduces of host ranks in this process, and fits a machine to their times.

    Returns:
        The machine, and lines that say how well it fits.
    """
    measured = [m for ranks in _RANKS for m in measure(ranks, _SIZES, _ALGORITHMS)]
    values, error = fit(measured)
    machine = host_machine(values, len(measured))
    lines = [
        f"{m.algorithm}, {m.ranks} ranks, {m.nbytes:,} bytes: measured {m.us:,.1f} us, "
        f"clock {time_plan('all_reduce', machine, m.ranks, m.nbytes, m.algorithm)['us']:,.1f} us"
        for m in measured
    ]
    lines.append(f"The clock is off by a factor of {math.exp(error):.2f} (root mean square).")
    return machine, lines


def measure(ranks: int, sizes: tuple[int, ...], algorithms: tuple[str, ...]) -> list[Measured]:
    """Times of all-reduces of float32 among so many ranks of this process.

    Without what the calls take themselves, which is one after another here: as many calls in groups
    of one rank.
    """
    from .. import init_all

    found = []
    with init_all(ranks) as contexts:
        groups = [context.group() for context in contexts]
        alone = [context.group([context.rank]) for context in contexts]
        for algorithm in algorithms:
            for nbytes in sizes:
                data = [np.ones(nbytes // 4, np.float32) for _ in groups]

                def call(
                    members: list[Group], key: str = algorithm, data: list[np.ndarray] = data
                ) -> None:
                    requests = [
                        group.all_reduce(array, key=key, algorithm=key, op="max")
                        for group, array in zip(members, data, strict=True)
                    ]
                    for request in requests:
                        request.wait()

                us = _median_us(lambda: call(groups))  # noqa: B023 (it is called here)
                data = [array[:1] for array in data]
                calls = _median_us(lambda: call(alone, data=data))  # noqa: B023
                found.append(Measured(algorithm, ranks, nbytes, max(us - calls, us / 10)))
    return found


def _median_us(call: Callable[[], None]) -> float:
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST_CALLS or (
        len(times) < _MOST_CALLS and time.perf_counter() - begin < _SECONDS
    ):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def host_machine(values: dict[str, float], runs: int = 0) -> Machine:
    """A node whose ranks share this host's processors."""
    fitted = f"fitted to {runs} all-reduces of 2 and 4 ranks by unjam plan --calibrate"
    inside = "this host: its ranks share memory, so no message has a latency of its own"
    alone = "one node: nothing leaves it"
    constants = {
        "gpus_per_node": Constant(64, "unjam: the most ranks of a job"),
        "nics_per_node": Constant(1, alone),
        "nics_by_lane": Constant(False, alone),
        "nodes_per_leaf": Constant(1, alone),
        "cores": Constant(len(os.sched_getaffinity(0)), "this host: processors that it may use"),
        "device": Constant("host", "unjam: UNJAM_DEVICE"),
        "lanes": Constant(1, "unjam: UNJAM_LANES"),
        "slots": Constant(5, "unjam: UNJAM_GUARANTEED_SLOTS"),
        "slot_bytes": Constant(8192, "unjam: UNJAM_GUARANTEED_SLOT_BYTES"),
        "link_us": Constant(0.0, inside),
        "network_us": Constant(0.0, alone),
        "nic_gb_per_s": Constant(math.inf, alone),
        "leaf_us": Constant(0.0, alone),
        "oversubscription": Constant(1.0, alone),
        **{name: Constant(values[name], fitted) for name in _FITTED},
    }
    return Machine("this-host", "This host, as unjam plan --calibrate found it.", constants)


def fit(measured: list[Measured]) -> tuple[dict[str, float], float]:
    """The constants for which the clock is nearest to the times, by ratios.

    Returns:
        The values, and the root of the mean square of the ratios' logarithms.
    """

    def error(values: dict[str, float]) -> float:
        machine = host_machine(values)
        squares = [
            math.log(time_plan("all_reduce", machine, m.ranks, m.nbytes, m.algorithm)["us"] / m.us)
            ** 2
            for m in measured
        ]
        return math.sqrt(sum(squares) / len(squares))

    values = {
        "slice_us": 2,
        "wait_us": 5,
        "peer_us": 2,
        "engine_gb_per_s": 5,
        "link_gb_per_s": 10,
        "base_us": 5,
    }
    values = {name: float(value) for name, value in values.items()}
    best = error(values)
    factor = 4.0
    while factor > 1.02:  # a pattern search: each constant up and down, by less and less
        improved = False
        for name in _FITTED:
            for step in (factor, 1 / factor):
                low, high = _BOUNDS[name]
                tried = {**values, name: min(high, max(low, values[name] * step))}
                its = error(tried)
                if its < best * (1 - 1e-9):
                    values, best, improved = tried, its, True
        if not improved:
            factor = math.sqrt(factor)
    return values, best
