"""Requests as TOML files, for ``unjam reshard plan``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._errors import InvalidArgument
from .._toml import parse_toml, read_toml
from .layout import Layout, TensorSpec, Topology
from .plan import Plan

_BIGGEST_FILE = 16 << 20
_TABLES = ("source", "destination", "tensors", "topology", "options")
_SIDE = ("mesh", "first", "ranks", "placements")
_TENSOR = ("shape", "dtype", "dst_dtype", "source", "destination", "copies")
_TOPOLOGY = ("ranks_per_host", "nics_per_host")
_OPTIONS = ("max_bytes", "window", "stripes")
_MOST_COPIES = 100_000
_MOST_RANKS = 1 << 24


def read_request(path: Path) -> Plan:
    """The plan that a file asks for (docs/reshard.md has one).

    Raises:
        InvalidArgument: it cannot be read, or makes no sense; the message names file and field.
    """
    return read_toml(path, _BIGGEST_FILE, parse_request)


def parse_request(text: str) -> Plan:
    """The plan that a file's text asks for.

    Raises:
        InvalidArgument: as :func:`read_request`.
    """
    data = parse_toml(text)
    _check_names("", data, _TABLES)
    for name in ("source", "destination", "tensors"):
        if name not in data:
            raise InvalidArgument(f"[{name}] is missing")
    src, after = _layout("source", data["source"], 0)
    dst, after = _layout("destination", data["destination"], after)
    tensors: dict[str, TensorSpec] = {}
    _check_table("tensors", data["tensors"])
    for name, table in data["tensors"].items():
        tensors.update(_tensors(name, table))
    options = data.get("options", {})
    _check_names("options.", options, _OPTIONS)
    for name, value in options.items():
        _whole(f"options.{name}", value, 1, 2**62)
    return Plan(src, dst, tensors, _topology(data.get("topology"), src, dst), **options)


def _layout(name: str, table: Any, next_rank: int) -> tuple[Layout, int]:
    """The layout, and the rank after its highest one."""
    _check_names(f"{name}.", table, _SIDE)
    for needed in ("mesh", "placements"):
        if not isinstance(table.get(needed), list):
            raise InvalidArgument(f"{name}.{needed} is missing: give a list")
    size = 1
    for dim in table["mesh"]:
        _whole(f"{name}.mesh", dim, 1, _MOST_RANKS)
        size *= dim
    _whole(f"{name}.mesh's ranks", size, 1, _MOST_RANKS)
    if "ranks" in table:
        if "first" in table:
            raise InvalidArgument(f"{name}.first and {name}.ranks: give one of them")
        ranks = table["ranks"]
        if not isinstance(ranks, list) or len(ranks) != size:
            raise InvalidArgument(f"{name}.ranks: give a list of {size} ranks")
        for rank in ranks:
            _whole(f"{name}.ranks", rank, 0, _MOST_RANKS)
    else:
        first = table.get("first", next_rank)
        _whole(f"{name}.first", first, 0, _MOST_RANKS)
        ranks = list(range(first, first + size))
    return (
        _named(name, lambda: Layout(np.reshape(ranks, table["mesh"]), table["placements"])),
        max(ranks) + 1,
    )


def _tensors(name: str, table: Any) -> dict[str, TensorSpec]:
    place = f"tensors.{name}"
    _check_names(f"{place}.", table, _TENSOR)
    for needed in ("shape", "dtype"):
        if needed not in table:
            raise InvalidArgument(f"{place}.{needed} is missing")
    if not isinstance(table["shape"], list):
        raise InvalidArgument(f"{place}.shape: give a list of whole numbers")
    for size in table["shape"]:
        _whole(f"{place}.shape", size, 0, 2**60 - 1)
    copies = table.get("copies", 1)
    _whole(f"{place}.copies", copies, 1, _MOST_COPIES)
    for side in ("source", "destination"):
        if side in table and not isinstance(table[side], list):
            raise InvalidArgument(f"{place}.{side}: give a list of placements")
    spec = TensorSpec(
        table["shape"],
        table["dtype"],
        table.get("dst_dtype"),
        table.get("source"),
        table.get("destination"),
    )
    if "copies" not in table:
        return {name: spec}
    return {f"{name}.{i}": spec for i in range(copies)}


def _topology(table: Any, src: Layout, dst: Layout) -> Topology | None:
    if table is None:
        return None
    _check_names("topology.", table, _TOPOLOGY)
    if "ranks_per_host" not in table:
        raise InvalidArgument("topology.ranks_per_host is missing")
    per_host, nics = table["ranks_per_host"], table.get("nics_per_host", 1)
    _whole("topology.ranks_per_host", per_host, 1, _MOST_RANKS)
    _whole("topology.nics_per_host", nics, 1, per_host)
    ranks = 1 + max(int(src.ranks.max()), int(dst.ranks.max()))
    return Topology.equal(ranks, per_host, nics)


def _named(name: str, make: Callable[[], Layout]) -> Layout:
    try:
        return make()
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"{name}: {value!r} is no whole number from {least} to {most}")


def _check_table(name: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise InvalidArgument(f"{name} is no table: write [{name}]")


def _check_names(prefix: str, table: Any, known: Sequence[str]) -> None:
    _check_table(prefix.rstrip("."), table)
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else f": give {', '.join(known)}"
            raise InvalidArgument(f"{prefix}{name} is no field{meant}")
