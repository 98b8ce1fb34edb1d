"""One rank of a program as a process: ``python -m unjam.cuda.program_worker PROGRAM``.

The rank's place comes from UNJAM_RANK, UNJAM_RANKS and UNJAM_ID; its GPU is that of its number (of
n GPUs, modulo n). The last line printed is JSON: seconds of each turn, and results checked.
"""

from __future__ import annotations

import json
import os
import sys

import unjam

from .gpus import gpu_count
from .program import CudaProgram, run_rank


def main() -> None:
    """Runs the rank."""
    given = json.loads(sys.argv[1])
    program = CudaProgram(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    index = int(os.environ["UNJAM_RANK"]) % gpu_count()
    with unjam.init_from_environment(device="cuda", device_index=index) as context:
        everybody = context.group(name="meet")
        flag = _flag(context.device)

        def meet() -> None:
            everybody.all_reduce(flag, key="meet").synchronize(program.timeout)

        answer = run_rank(program, context, meet)
        meet()  # nobody leaves while others are at work
    print(json.dumps(answer), flush=True)


def _flag(device: str) -> object:
    import torch

    return torch.zeros(1, device=device)


if __name__ == "__main__":
    main()
