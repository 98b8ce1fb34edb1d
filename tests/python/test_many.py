"""Many keys in overlapping groups, all pending at once, in another order on every rank."""

import numpy as np
import pytest

import unjam

# 12 groups of 2 to 8 ranks; each rank is in one to five of them.
GROUPS = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [0, 1],
    [1, 2],
    [2, 3],
    [3, 4, 5],
    [5, 4],
    [6, 5],
    [0, 2, 4],
    [4, 2],
    [0, 1, 3],
    [3, 0],
    [5, 6, 1],
]
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast"]
LARGE = 1 << 20  # elements of 8 bytes: more than all slots of a connector together


class Call:
    """One key: its group, kind and size are the same on all ranks."""

    def __init__(self, number, generator):
        self.key = f"key {number}"
        self.group = number % len(GROUPS)
        self.kind = KINDS[int(generator.integers(len(KINDS)))]
        self.root = int(generator.integers(len(GROUPS[self.group])))
        self.count = int(generator.choice([0, 1, 5, 33, 100, 1000, 5000, 20_000]))
        if number % 250 == 7:
            self.count = LARGE
        self.size = len(GROUPS[self.group])

    def start(self, collective, rank, use):
        """Runs it with fresh buffers; gives the request and what must come out."""
        total = sum(self.value(r, use) for r in range(self.size))
        base = np.arange(self.count, dtype=np.int64)
        mine = base + self.value(rank, use)
        if self.kind == "all_reduce":
            return collective.run(mine), mine, base * self.size + total
        if self.kind == "all_gather":
            out = np.full(self.size * self.count, -1)
            want = np.concatenate([base + self.value(r, use) for r in range(self.size)])
            return collective.run(mine, out), out, want
        if self.kind == "reduce_scatter":
            out = np.full(self.count, -1)
            want = base * self.size + total
            return collective.run(np.tile(mine, self.size), out), out, want
        if self.kind == "reduce":
            want = base * self.size + total if rank == self.root else mine.copy()
            return collective.run(mine), mine, want
        return collective.run(mine), mine, base + self.value(self.root, use)

    def value(self, rank, use):
        return 1000 * rank + 7 * use + self.group


def run(keys, pending, rounds, **config):
    generator = np.random.default_rng(keys)
    calls = [Call(number, generator) for number in range(keys)]
    chosen = [generator.permutation(keys)[:pending] for _ in range(rounds)]

    def rank(context):
        own = np.random.default_rng([7, context.rank])
        groups = {
            place: context.group(ranks, f"group {place}")
            for place, ranks in enumerate(GROUPS)
            if context.rank in ranks
        }
        registered = {
            number: groups[call.group].register(
                call.kind, call.key, "int64", root=call.root, priority=number % 3
            )
            for number, call in enumerate(calls)
            if call.group in groups
        }
        uses = [0] * keys
        for numbers in chosen:
            mine = own.permutation([number for number in numbers if number in registered])
            started = []
            for number in mine:
                group = groups[calls[number].group]
                args = (registered[number], group.rank, uses[number])
                started.append((number, *calls[number].start(*args)))
                uses[number] += 1
            for place in own.permutation(len(started)):
                number, request, out, want = started[place]
                request.wait(100)
                np.testing.assert_array_equal(out, want, err_msg=str(vars(calls[number])))
        return len(registered)

    assert sum(unjam.launch(8, rank, **config)) > keys


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"order": "priority", "lanes": 2},
        {"delay_seed": 3, "delay_max_us": 100},
        {"policy": "fixed", "block_threads": 2},
    ],
    ids=str,
)
def test_many_keys(config):
    run(keys=1000, pending=500, rounds=2, **config)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lanes", [1, 3])
def test_soak_many_keys(lanes):
    run(keys=1000, pending=500, rounds=50, lanes=lanes, delay_seed=lanes, delay_max_us=200)
