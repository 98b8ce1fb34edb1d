"""What the tests read from ``Context.explain()``."""

import time

from processes import SOON_S


def pending(explanation, rank, key):
    """The entries of a rank's pending calls of a key; none if it has not answered in time."""
    ranks = [r for r in explanation["ranks"] if r["rank"] == rank]
    return [call for r in ranks for call in r["pending"] if call["key"] == key]


def settled(ask, condition, seconds=SOON_S):
    """An explanation for which the condition holds."""
    end = time.monotonic() + seconds
    while True:
        explanation = ask()
        if condition(explanation):
            return explanation
        assert time.monotonic() < end, explanation
        time.sleep(0.05)


def waits(explanation, rank, key):
    """What the engine waits for, by pending use of the key."""
    return [
        tuple(call["engines"][0].get(k) for k in ("waits_for", "rank", "n"))
        for call in pending(explanation, rank, key)
    ]
