"""Reads jobs from TOML and JSON files; complaints name the field and its line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from .errors import InputError
from .job import MOST_ROUNDS, SEMANTICS, Group, Job, Parallel, check_group, whole

_BIGGEST_FILE = 256 << 20

# Besides these: [parallel] or [[groups]], and [paper] in the files of Table 1.
_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "model": str,
    "order": str,
    "semantics": str,
    "disorder": (int, float),
    "sync": (int, float),
    "rounds": int,
    "seed": int,
    "gpus": int,
    "sequence": list,
}
_PARALLEL = {f.name for f in dataclasses.fields(Parallel) if not f.name.startswith("_")}
_GROUP = {"gpus", "collectives", "name"}
_PAPER = {"ratio", "why"}


@dataclass(frozen=True)
class JobFile:
    """What a file says; `is_training`: by [parallel], so that a round is an iteration."""

    job: Job
    rounds: int | None = None
    semantics: str | None = None
    paper: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_training: bool = False


def read_job(path: Path, **overrides: Any) -> JobFile:
    """Reads a file; `overrides` replace settings of :class:`Job`.

    Raises:
        InputError: it cannot be read, or says what cannot be.
    """
    try:
        if path.stat().st_size > _BIGGEST_FILE:
            raise InputError("", f"is larger than {_BIGGEST_FILE >> 20} MiB", file=str(path))
        text = path.read_text(encoding="utf-8-sig")  # some editors begin files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("", f"cannot be read: {error}", file=str(path)) from error
    lines: dict[str, int] = {}
    try:
        if path.suffix.lower() == ".json":
            data = _parse_json(text, lines)
        else:
            data = _parse_toml(text, lines)
        return make_job(data, **overrides)
    except InputError as error:
        error.file = str(path)
        if error.line is None:
            error.line = _line_of(error.field, lines)
        raise


def make_job(data: Any, **overrides: Any) -> JobFile:
    """A job from what a file holds (see docs/simulator.md)."""
    if not isinstance(data, dict):
        raise InputError("", "is not a table of settings")
    known = {*_SETTINGS, "parallel", "groups", "paper"}
    _check_names("", data, known)
    for name, kinds in _SETTINGS.items():
        if name in data:
            _check_type(name, data[name], kinds)
    settings = {
        name: data[name]
        for name in ("name", "model", "order", "disorder", "sync", "seed", "sequence")
        if name in data
    }
    settings.update(overrides)
    if "sequence" in data:
        settings.setdefault("order", "explicit")
    if "rounds" in data:
        whole("rounds", data["rounds"], 1, MOST_ROUNDS)
    if "semantics" in data and data["semantics"] not in SEMANTICS:
        raise InputError("semantics", f"{data['semantics']!r} is none of {', '.join(SEMANTICS)}")
    if "parallel" in data and "groups" in data:
        raise InputError("groups", "are given beside [parallel]: one or the other")
    if "parallel" in data:
        table = data["parallel"]
        _check_type("parallel", table, dict)
        _check_names("parallel.", table, _PARALLEL)
        job = Parallel(**table).job(**settings)
        if "gpus" in data and data["gpus"] != job.gpus:
            raise InputError("gpus", f"{data['gpus']} is not what [parallel] makes: {job.gpus}")
    elif "groups" in data:
        job = _free(data, settings)
    else:
        raise InputError("groups", "are missing: give [parallel] or [[groups]]")
    paper = data.get("paper", {})
    _check_type("paper", paper, dict)
    _check_names("paper.", paper, _PAPER)
    return JobFile(job, data.get("rounds"), data.get("semantics"), paper, "parallel" in data)


def _free(data: dict[str, Any], settings: dict[str, Any]) -> Job:
    _check_type("groups", data["groups"], list)
    groups = []
    for place, table in enumerate(data["groups"]):
        name = f"groups[{place}]"
        _check_type(name, table, dict)
        _check_names(f"{name}.", table, _GROUP)
        for needed in ("gpus", "collectives"):
            if needed not in table:
                raise InputError(f"{name}.{needed}", "is missing")
        _check_type(f"{name}.gpus", table["gpus"], list)
        groups.append(Group(table["gpus"], table["collectives"], str(table.get("name", ""))))
    members = [gpu for group in groups for gpu in group.gpus if isinstance(gpu, int)]
    gpus = data.get("gpus", max(members, default=0) + 1)
    whole("gpus", gpus, 1, 1 << 24)
    for place, group in enumerate(groups):
        check_group(f"groups[{place}]", group, gpus)
    return Job(gpus=gpus, groups=groups, **settings)


def _check_names(prefix: str, table: dict[str, Any], known: set[str]) -> None:
    for name in table:
        if name not in known:
            raise InputError(prefix + name, _unknown(prefix, name, known))


def _unknown(prefix: str, name: str, known: set[str]) -> str:
    """That a name is unknown in a table, and what is perhaps meant."""
    plain = name.replace("-", "_")
    if plain not in known:
        if plain in _PARALLEL and prefix != "parallel.":
            return "is unknown here: it belongs under [parallel]"
        if plain in _SETTINGS and prefix:
            return "is unknown here: it belongs at the top, above the first [table]"
        if plain in _GROUP and not prefix.startswith("groups"):
            return "is unknown here: it belongs under [[groups]]"
    near = difflib.get_close_matches(plain, known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"is unknown; {meant}known are {', '.join(sorted(known))}"


def _check_type(name: str, value: Any, kinds: type | tuple[type, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = {str: "a text", int: "a whole number", list: "a list", dict: "a table"}
        raise InputError(name, f"{value!r} is not {wanted.get(kinds, 'a number')}")  # type: ignore[arg-type]


def _line_of(field: str, lines: dict[str, int]) -> int | None:
    """The line of the field, or of what it is part of."""
    while field:
        if field in lines:
            return lines[field]
        field = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", field)
    return None


def _parse_toml(text: str, lines: dict[str, int]) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    prefix = ""
    tables: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line)
        if header:
            name = header[2]
            if header[1] == "[[":
                tables[name] = tables.get(name, -1) + 1
                name += f"[{tables[name]}]"
            prefix = name + "."
            lines.setdefault(name, number)
            continue
        key = re.match(r"\s*([\w-]+)\s*=", line)
        if key:
            lines.setdefault(prefix + key[1], number)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line (\d+)", str(error))
        raise InputError("", f"is not TOML: {error}", int(where[1]) if where else None) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        raise InputError("", f"cannot be read: {error}") from error


def _parse_json(text: str, lines: dict[str, int]) -> Any:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError("", f"is not JSON: {error.msg}", error.lineno) from error
    except ValueError as error:  # a number beyond what Python reads
        raise InputError("", f"cannot be read: {error}") from error
    except RecursionError as error:
        raise InputError("", "is nested too deeply") from error
    try:
        _JsonLines(text, lines).value(0, "")
    except RecursionError as error:
        raise InputError("", "is nested too deeply") from error
    return data


class _JsonLines:
    """Where each member of a correct JSON text stands."""

    _SCALAR = re.compile(r"[^\s,\]}]+")
    _SPACE = re.compile(r"\s*")

    def __init__(self, text: str, lines: dict[str, int]) -> None:
        self._text, self._lines = text, lines
        self._at, self._line = 0, 1  # newlines counted so far

    def _skip(self, at: int) -> int:
        found = self._SPACE.match(self._text, at)
        return found.end() if found else at

    def _note(self, name: str, at: int) -> None:
        self._line += self._text.count("\n", self._at, at)
        self._at = at
        self._lines.setdefault(name, self._line)

    def value(self, at: int, name: str) -> int:
        """Reads one value; gives the position after it."""
        at = self._skip(at)
        opening = self._text[at]
        if opening not in "{[":
            if opening == '"':
                return int(scanstring(self._text, at + 1)[1])
            found = self._SCALAR.match(self._text, at)
            return found.end() if found else at + 1
        at = self._skip(at + 1)
        place = 0
        while self._text[at] not in "}]":
            if opening == "{":
                key, after = scanstring(self._text, at + 1)
                inner = f"{name}.{key}" if name else key
                self._note(inner, at)
                at = self._skip(after) + 1  # the colon
            else:
                inner = f"{name}[{place}]"
                self._note(inner, at)
                place += 1
            at = self._skip(self.value(at, inner))
            if self._text[at] == ",":
                at = self._skip(at + 1)
        return at + 1
