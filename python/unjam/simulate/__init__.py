"""The deadlock simulator: how likely does a job hang without unjam?

>>> from unjam.simulate import Parallel, simulate
>>> job = Parallel(tp=4, dp=4, layers=24, ddp_buckets=40).job(disorder=1e-5)
>>> simulate(job, rounds=10_000).exact  # doctest: +SKIP

docs/simulator.md explains the model.
"""

from __future__ import annotations

from .engine import Precision, Result, Simulator, simulate, wilson
from .errors import InputError
from .files import JobFile, read_job
from .job import Group, Job, Parallel

__all__ = [
    "Group",
    "InputError",
    "Job",
    "JobFile",
    "Parallel",
    "Precision",
    "Result",
    "Simulator",
    "read_job",
    "simulate",
    "wilson",
]
