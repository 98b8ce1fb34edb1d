"""The benchmark behind ``unjam bench``: unjam beside another library, interleaved, on same buffers.

One job a file: `cases` (what is measured), `sweep` (all cases of a run, and their rows), `job` (the
parent: starts ranks, asks them, watches them), `messages` (between parent and ranks), `worker` (one
rank), `libraries` (unjam and its peers behind one interface), `barrier`, `data` (known inputs,
checked outputs), `figures` (medians, spreads, bandwidths).
"""

from .cases import COLLECTIVES, DTYPES, Case, parse_sizes
from .job import BenchError
from .libraries import PEERS
from .sweep import Sweep, run_sweep

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "PEERS",
    "BenchError",
    "Case",
    "Sweep",
    "parse_sizes",
    "run_sweep",
]
