"""A second opinion about the clock's contended cases: the same in SimGrid, a simulator of others.

tests/unit/clock_test.cc works five cases out by hand (its tests ByHand.*). This script runs them in
SimGrid, whose links share their rate among messages instead of serving one after the other; the
cases are such that both end at the same time. It prints a line for each case, and fails if one
differs by more than 0.01 us.

It needs SimGrid's Python module, of Debian's package python3-simgrid (3.32), and no part of unjam:

    python3 bench/simgrid_witness.py

Without the module it says so, with status 2. The case of one slot is about room that comes back,
which SimGrid has none of: there a message without bytes brings it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

try:
    import simgrid
    from simgrid import Actor, Engine, Link, LinkInRoute, Mailbox, NetZone, this_actor
except ImportError:
    print("SimGrid's Python module is not there: Debian's package python3-simgrid has it.")
    sys.exit(2)

US = 1e-6
BYTES = 100_000
LINK, NIC = 10e9, 5e9  # bytes/s
SLICE = 1 * US
TOLERANCE_US = 0.01

Program = Callable[[], None]


class Platform:
    """Nodes of four GPUs, and leaves of two nodes, as in the test."""

    def __init__(self, engine: Engine, trunk: float) -> None:
        self.zone: NetZone = NetZone.create_full_zone("zone")
        self.hosts = [self.zone.create_host(f"gpu{r}", 1e9) for r in range(16)]
        self._links: dict[str, Link] = {}
        self._trunk = trunk
        for a in range(16):
            for b in range(16):
                if a != b:
                    self._route(a, b)
        self.zone.seal()

    def _link(self, name: str, rate: float) -> Link:
        if name not in self._links:
            link = self.zone.create_link(name, rate)
            link.set_latency(0)
            self._links[name] = link.seal()
        return self._links[name]

    def _route(self, a: int, b: int) -> None:
        node, other = a // 4, b // 4
        if node == other:
            ports, us = [(f"out{a}", LINK), (f"in{b}", LINK)], 2
        elif node // 2 == other // 2:
            ports, us = [(f"nic_out{node}", NIC), (f"nic_in{other}", NIC)], 5
        else:
            ports = [
                (f"nic_out{node}", NIC),
                (f"up{node // 2}", self._trunk),
                (f"down{other // 2}", self._trunk),
                (f"nic_in{other}", NIC),
            ]
            us = 6
        way = self.zone.create_link(f"way{a}_{b}", 1e18)
        way.set_latency(us * US)
        way.seal()
        links = [LinkInRoute(self._link(name, rate)) for name, rate in ports]
        self.zone.add_route(
            self.hosts[a].netpoint,
            self.hosts[b].netpoint,
            None,
            None,
            [*links, LinkInRoute(way)],
            False,
        )


def box(a: int, b: int) -> Mailbox:
    return Mailbox.by_name(f"{a}>{b}")


def send(a: int, to: list[int], size: int = BYTES) -> None:
    """A slice is ready; the lane does not wait until it is there."""
    this_actor.sleep_for(SLICE)
    for b in to:
        box(a, b).put_init("slice", size).detach()


def receive(origins: list[int], b: int) -> None:
    """A slice from each: the lane waits for all."""
    for comm, _ in [box(a, b).get_async() for a in origins]:
        comm.wait()


def incast() -> dict[int, Program]:
    def gather() -> None:
        receive([1, 2, 3], 0)
        this_actor.sleep_for(SLICE)

    return {0: gather, **{a: lambda a=a: send(a, [0]) for a in (1, 2, 3)}}


def outcast() -> dict[int, Program]:
    def last() -> None:
        receive([0], 3)
        send(3, [1])

    def both() -> None:
        for a in (0, 3):
            receive([a], 1)
            this_actor.sleep_for(SLICE)

    def one() -> None:
        receive([0], 2)
        this_actor.sleep_for(SLICE)

    return {0: lambda: send(0, [1, 2, 3]), 1: both, 2: one, 3: last}


def shared_nic() -> dict[int, Program]:
    def reduce() -> None:
        receive([0, 1], 4)
        send(4, [5])

    def end() -> None:
        receive([4], 5)
        this_actor.sleep_for(SLICE)

    return {0: lambda: send(0, [4]), 1: lambda: send(1, [4]), 4: reduce, 5: end}


def trunk() -> dict[int, Program]:
    def take(a: int, b: int) -> None:
        receive([a], b)
        this_actor.sleep_for(SLICE)

    return {
        0: lambda: send(0, [8]),
        4: lambda: send(4, [12]),
        8: lambda: take(0, 8),
        12: lambda: take(4, 12),
    }


def one_slot() -> dict[int, Program]:
    wait = 0.5 * US

    def sender() -> None:
        for k in range(5):
            if k > 0:
                receive([1], 0)
                this_actor.sleep_for(wait)
            send(0, [1])

    def receiver() -> None:
        for _ in range(5):
            receive([0], 1)
            this_actor.sleep_for(SLICE + wait)
            box(1, 0).put_init("room", 0).detach()

    return {0: sender, 1: receiver}


# Name, what runs, the trunk's rate, and what the test has, in us.
CASES = {
    "Incast": (incast, 10e9, 34.0),
    "Outcast": (outcast, 10e9, 47.0),
    "SharedNic": (shared_nic, 10e9, 60.0),
    "Trunk": (trunk, 2.5e9, 88.0),
    "OneSlot": (one_slot, 10e9, 82.5),
}


def run(name: str) -> float:
    """When the last rank of a case is done, in us. A process can have one engine only."""
    engine = Engine(
        [
            "witness",
            "--cfg=network/model:CM02",
            "--cfg=network/TCP-gamma:0",
            "--cfg=network/crosstraffic:0",
            "--cfg=network/bandwidth-factor:1",
            "--cfg=network/latency-factor:1",
            "--cfg=network/weight-S:0",
            "--cfg=surf/precision:1e-12",
            "--log=root.thres:warning",
        ]
    )
    make, rate, _ = CASES[name]
    platform = Platform(engine, rate)
    ends = []

    def until_done(program: Program) -> None:
        program()
        ends.append(Engine.clock)

    for rank, program in make().items():
        Actor.create(f"rank{rank}", platform.hosts[rank], until_done, program)
    engine.run()
    return max(ends) / US


def main() -> int:
    if len(sys.argv) == 2:
        print(run(sys.argv[1]))
        return 0
    import subprocess

    failed = False
    print(f"SimGrid {simgrid.simgrid_version}")
    for name, (_, _, by_hand) in CASES.items():
        words = [sys.executable, __file__, name]
        out = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        if out.returncode != 0:
            print(out.stderr)
            return 1
        us = float(out.stdout.split()[-1])
        differs = abs(us - by_hand) > TOLERANCE_US
        failed |= differs
        print(f"{name}: SimGrid {us:.3f} us, by hand {by_hand:.3f} us{' DIFFERS' * differs}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
