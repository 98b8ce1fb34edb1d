"""The clock: how long a collective takes on a machine, from its plans (docs/guide/clock.md).

``read_machine("hgx-h100")`` reads one of the machines that come with the package, or a TOML file;
``time_plan("all_reduce", machine, ranks=512, nbytes=1 << 20)`` times one case. Times are a model's:
congestion control, adaptive routing, jitter and other jobs are not in it.
"""

from .machine import FIELDS, Constant, Machine, machine_names, read_machine
from .times import algorithms_for, time_plan

__all__ = [
    "FIELDS",
    "Constant",
    "Machine",
    "algorithms_for",
    "machine_names",
    "read_machine",
    "time_plan",
]
