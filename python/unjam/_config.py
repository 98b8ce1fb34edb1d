"""Keyword arguments of ``unjam.init`` → the C API's size-versioned configuration struct."""

from __future__ import annotations

import ctypes
import difflib
import functools
import operator
import sys
import warnings
from contextlib import suppress
from typing import Any

from . import _abi
from . import _limits as limits
from ._errors import InvalidArgument, InvalidType, UnjamError
from ._lib import environment


@functools.cache
def algorithms() -> dict[str, int]:
    """Numbers of the library's algorithms by name; -1 is the selector's choice.

    Raises:
        LibraryError: there is no library to ask.
    """
    (variable,) = (v for v in environment() if v["name"] == "UNJAM_ALGORITHM")
    return {name: number for number, name in enumerate(variable["type"].split("|"), -1)}


def present_algorithm(name: str) -> str:
    """What the algorithm is called; with a warning if this was its former name."""
    if name not in _FORMER_ALGORITHMS:
        return name
    _warn_of_name(name, _FORMER_ALGORITHMS[name])
    return _FORMER_ALGORITHMS[name]


def number_of_algorithm(name: str) -> int | None:
    """The number of an algorithm by its name, or, with a warning, a former one; None: no name."""
    return algorithms().get(present_algorithm(name))


# Fields whose values have names. -1 leaves the field to the environment, then to the default.
_NAMED: dict[str, dict[str, int]] = {
    "policy": {"adaptive": 0, "fixed": 1, "hold": 2},
    "order": {"fifo": 0, "priority": 1},
    "device": {"host": 0, "cuda": 1},
}
_HEADER = ("size", "version")
_FIELDS: dict[str, Any] = {
    str(field[0]): field[1] for field in _abi.Config._fields_ if field[0] not in _HEADER
}
# What settings were called, and are.
_FORMER = {
    "escape_slots": "guaranteed_slots",
    "escape_slot_bytes": "guaranteed_slot_bytes",
    "borrow_slots": "pool_slots",
}
_FORMER_ALGORITHMS = {"direct": "one_shot", "mesh": "rsag"}
# Signed fields where -1 means "default".
_SIGNED = ("device_index",)
# Unsigned fields where 0 means "default" and all ones mean "none".
_NONE_ALLOWED = ("pool_slots", "report_ms", "timeout_ms", "heap_bytes")


def field_names() -> tuple[str, ...]:
    """The names that ``unjam.init`` takes as configuration, in the struct's order."""
    return tuple(_FIELDS)


def make_config(settings: dict[str, Any]) -> _abi.Config:
    """The struct for the given settings; what is not given is left to environment and defaults.

    Args:
        settings: field name → value. ``policy``, ``order``, ``algorithm`` and ``device`` take
            names; a value of None is the same as not giving it; ``pool_slots=0`` means none.

    Raises:
        InvalidType: a name that is no field, or a value that is not an integer.
        InvalidArgument: an unknown policy, order, algorithm or device, or a number out of its
            field's range.
    """
    config = _abi.Config()
    config.size = ctypes.sizeof(_abi.Config)
    config.version = _abi.VERSION
    config.policy = config.order = config.algorithm = config.device = config.device_index = -1
    for given, value in settings.items():
        name = _FORMER.get(given, given)
        if name != given:
            if name in settings:
                raise InvalidArgument(f"{given} is now called {name}: leave out the former name")
            _warn_of_name(given, name)
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            cure = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_FIELDS)}"
            raise InvalidType(f"{name!r} is not a setting: {cure}")
        if value is not None:
            setattr(config, name, _value(name, value))
    return config


def _warn_of_name(former: str, name: str) -> None:
    """Python tells of it at the first line outside this package, once a line."""
    frame, level = sys._getframe(), 1
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{former} is now called {name}", DeprecationWarning, stacklevel=level)


def _value(name: str, value: Any) -> int:
    names = algorithms() if name == "algorithm" else _NAMED.get(name)
    if names is not None:
        if isinstance(value, str):
            number = number_of_algorithm(value) if name == "algorithm" else names.get(value)
            if number is None:
                raise InvalidArgument(f"{name}={value!r}: use one of {', '.join(names)}")
            return number
        if value in names.values() and not isinstance(value, bool):
            return int(value)
        raise InvalidArgument(f"{name}={value!r}: use one of {', '.join(names)}")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{name} must be an integer, not {type(value).__name__} {value!r}")
    number = operator.index(value)
    bits = 8 * ctypes.sizeof(_FIELDS[name])
    if name in _NONE_ALLOWED and number in (0, -1):
        return (1 << bits) - 1
    least, most = (-1, (1 << bits - 1) - 1) if name in _SIGNED else (0, (1 << bits) - 1)
    if name in _NONE_ALLOWED:
        most -= 1  # all ones mean "none"
    if name == "delay_seed":
        most = limits.DELAY_SEED
    if not least <= number <= most:
        # The field's own range, which is narrower than its type's, if the library can tell it.
        with suppress(UnjamError):
            least, most = _range(name, least, most)
        raise InvalidArgument(
            f"{name}={number} is out of range: give {least} to {most}, or None for the default"
        )
    return number


def _range(name: str, least: int, most: int) -> tuple[int, int]:
    variable = "UNJAM_HEAP" if name == "heap_bytes" else f"UNJAM_{name.upper()}"
    for known in environment():
        if known["name"] == variable and "min" in known:
            return known["min"], known["max"]
    return least, most
