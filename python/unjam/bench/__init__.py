"""The benchmark behind ``unjam bench``: unjam beside another library, interleaved, on same buffers.

One job a file: `cases` (what is measured), `sweep` (all cases of a run, and their rows), `job` (the
parent: starts ranks, asks them, watches them), `messages` (between parent and ranks), `worker` (one
rank), `libraries` (unjam and its peers behind one interface), `barrier`, `data` (known inputs,
checked outputs), `figures` (medians, spreads, bandwidths), `rows` (what comes out),
`estimate` (how long it takes).

On GPUs, beside NCCL: `cuda_sweep` (modes), `cuda_worker` (one rank), `cuda_libraries`,
`cuda_data`, and `gemm` with `gemm_sweep` (a matrix product beside all-reduces). What a rank runs
needs torch.
"""

from .cases import COLLECTIVES, DTYPES, Case, parse_sizes
from .cuda_sweep import MODES
from .gemm_sweep import GemmSweep, run_gemm
from .job import BenchError
from .libraries import PEERS
from .sweep import Sweep, run_sweep

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "PEERS",
    "MODES",
    "BenchError",
    "Case",
    "GemmSweep",
    "Sweep",
    "parse_sizes",
    "run_gemm",
    "run_sweep",
]
