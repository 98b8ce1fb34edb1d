"""Machines as TOML files: every constant stands there with its source."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._config import present_algorithm
from .._errors import InvalidArgument
from .._toml import parse_toml, read_toml

FOLDER = Path(__file__).parent / "machines"
_BIGGEST_FILE = 1 << 20

_MOST = 1 << 20
# Whole numbers, and what they may be.
_WHOLE = {
    "gpus_per_node": (1, _MOST),
    "nics_per_node": (1, _MOST),
    "nodes_per_leaf": (1, _MOST),
    "cores": (0, 1024),
    "lanes": (1, 32),
    "slots": (1, 1024),
    "slot_bytes": (64, 1 << 26),
}
_TIMES = ("link_us", "network_us", "leaf_us", "slice_us", "wait_us", "peer_us", "base_us")
_RATES = ("link_gb_per_s", "nic_gb_per_s", "engine_gb_per_s")
_DEVICES = {"host": 0, "cuda": 1}

FIELDS = (
    "gpus_per_node",
    "nics_per_node",
    "nics_by_lane",
    "nodes_per_leaf",
    "cores",
    "device",
    "lanes",
    "slots",
    "slot_bytes",
    "link_us",
    "link_gb_per_s",
    "network_us",
    "nic_gb_per_s",
    "leaf_us",
    "oversubscription",
    "slice_us",
    "wait_us",
    "peer_us",
    "engine_gb_per_s",
    "base_us",
)
"""Of a machine; ``unjamMachine_t`` says what they mean."""

_BY_ALGORITHM = (*_TIMES, *_RATES)  # what may differ there


@dataclass(frozen=True)
class Constant:
    """A number of a machine, and where it comes from."""

    value: float | bool | str
    source: str


@dataclass(frozen=True)
class Machine:
    """A machine as its file has it.

    Attributes:
        name: the file's.
        about: a sentence.
        constants: of each of :data:`FIELDS`.
        by_algorithm: times and rates that an algorithm has of its own.
    """

    name: str
    about: str
    constants: dict[str, Constant]
    by_algorithm: dict[str, dict[str, Constant]] = field(default_factory=dict)

    def values(self, algorithm: str = "") -> dict[str, Any]:
        """The numbers, as `algorithm` has them."""
        found = {**self.constants, **self.by_algorithm.get(algorithm, {})}
        return {name: constant.value for name, constant in found.items()}


def machine_names() -> list[str]:
    """The machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_machine(name: str | Path) -> Machine:
    """A machine by its name, or from a file that ends in ``.toml``.

    Raises:
        InvalidArgument: there is none, or what it says makes no sense; the message names the field.
    """
    path = Path(name)
    if path.suffix != ".toml":
        known = machine_names()
        if str(name) not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InvalidArgument(
                f"there is no machine {str(name)!r}: {meant}give {', '.join(known)}, or a file "
                "that ends in .toml"
            )
        path = FOLDER / f"{name}.toml"
    return read_toml(path, _BIGGEST_FILE, parse_machine)


def parse_machine(text: str) -> Machine:
    """A machine from a file's text.

    Raises:
        InvalidArgument: as :func:`read_machine`.
    """
    data = parse_toml(text)
    names = {}
    for name in ("name", "about"):
        names[name] = data.pop(name, None)
        if not isinstance(names[name], str) or not names[name]:
            raise InvalidArgument(f"{name} is missing: give a text")
    algorithms = data.pop("algorithm", {})
    if not isinstance(algorithms, dict):
        raise InvalidArgument("algorithm is no table: write [algorithm.ring]")
    constants = {name: _constant(name, name, data.pop(name, None)) for name in FIELDS}
    if data:
        raise InvalidArgument(_unknown("", next(iter(data)), FIELDS))
    by_algorithm = {}
    for algorithm, table in algorithms.items():
        if not isinstance(table, dict):
            raise InvalidArgument(f"algorithm.{algorithm} is no table")
        for name in table:
            if name not in _BY_ALGORITHM:
                raise InvalidArgument(_unknown(f"algorithm.{algorithm}.", name, _BY_ALGORITHM))
        by_algorithm[present_algorithm(algorithm)] = {
            name: _constant(name, f"algorithm.{algorithm}.{name}", value)
            for name, value in table.items()
        }
    return Machine(names["name"], names["about"], constants, by_algorithm)


def _unknown(prefix: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else f": give {', '.join(known)}"
    return f"{prefix}{name} is no field{meant}"


def _constant(name: str, place: str, given: object) -> Constant:
    if given is None:
        raise InvalidArgument(f'{place} is missing: write {place} = {{ value = …, source = "…" }}')
    if not isinstance(given, Mapping) or set(given) != {"value", "source"}:
        raise InvalidArgument(f'{place}: write it as {{ value = …, source = "…" }}')
    value, source = given["value"], given["source"]
    if not isinstance(source, str) or not source.strip():
        raise InvalidArgument(f"{place}.source is empty: say where the number comes from")
    problem = _fault(name, value)
    if problem:
        raise InvalidArgument(f"{place} is {value!r}: give {problem}")
    return Constant(value, source)


_MOST_OF_ANYTHING = 1 << 40


def _fault(name: str, value: object) -> str:
    """What the field must be, if `value` is not."""
    if name == "nics_by_lane":
        return "" if isinstance(value, bool) else "true or false"
    if name == "device":
        known = isinstance(value, str) and value in _DEVICES
        return "" if known else '"host" or "cuda"'
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    if value != value or abs(value) > _MOST_OF_ANYTHING and value != math.inf:
        return "a number of moderate size"
    if name in _WHOLE:
        least, most = _WHOLE[name]
        fits = isinstance(value, int) and least <= value <= most
        return "" if fits else f"a whole number from {least} to {most}"
    if name in _TIMES:
        return "" if 0 <= value <= 1e6 else "microseconds, 0 to 1000000"
    if name in _RATES:
        return "" if value >= 0.001 else "10^9 bytes a second, 0.001 or more, or inf"
    return "" if 0.001 <= value <= 1000 else "a ratio from 0.001 to 1000"  # oversubscription


def device_number(name: str) -> int:
    """As ``unjamDevice_t``."""
    return _DEVICES[name]


def write_machine(machine: Machine) -> str:
    """The machine as its file's text."""
    lines = [f"name = {_toml(machine.name)}", f"about = {_toml(machine.about)}", ""]
    lines += [_line(name, machine.constants[name]) for name in FIELDS]
    for algorithm, constants in machine.by_algorithm.items():
        lines += ["", f"[algorithm.{algorithm}]"]
        lines += [_line(name, constant) for name, constant in constants.items()]
    return "\n".join(lines) + "\n"


def _line(name: str, constant: Constant) -> str:
    return f"{name} = {{ value = {_toml(constant.value)}, source = {_toml(constant.source)} }}"


def _toml(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
