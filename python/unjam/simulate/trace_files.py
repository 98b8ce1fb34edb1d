"""Reads one rank's trace: a flight-recorder dump, or a profile.

Dumps are pickles, loaded without running anything in them, or their JSON form; profiles are Chrome
JSON. Both may be packed with gzip.
"""

from __future__ import annotations

import ast
import codecs
import gzip
import io
import json
import math
import pickle
import re
import reprlib
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError

_BIGGEST_FILE = 1 << 30
# CUDA calls that wait for the whole GPU, or may.
_SYNCHRONIZING = {
    "cudaDeviceSynchronize",
    "cudaFree",
    "cudaFreeHost",
    "cudaHostAlloc",
    "cudaHostUnregister",
    "cudaMalloc",
    "cudaMallocHost",
    "cuCtxSynchronize",
    "hipDeviceSynchronize",
    "hipFree",
    "hipMalloc",
}


@dataclass(frozen=True)
class Call:
    """A collective as one rank called it."""

    group: str
    seq: int
    op: str
    time: float


@dataclass
class RankTrace:
    """One rank's calls, in its order."""

    rank: int
    file: Path
    calls: list[Call] = field(default_factory=list)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of groups, where known
    names: dict[str, str] = field(default_factory=dict)
    syncs: int | None = None  # None: this kind of trace does not tell
    # Whether the rank had not called, when the trace was taken, what would follow its last calls.
    # A profile is a window: the rank went on.
    ends: bool = True
    # Whether all that the rank ever called is here: no ring buffer has overwritten its oldest.
    whole: bool = True
    # Group -> the last number that the rank had called, of groups whose entries are lost.
    called: dict[str, int] = field(default_factory=dict)
    transfers: set[str] = field(default_factory=set)  # groups with point-to-point entries


class _DataUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists and dicts; refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise InputError("", f"is no flight-recorder dump: it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise InputError("", "is no flight-recorder dump: it refers to other objects")


# What other programs pack files into, by the first bytes.
_PACKED = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
# UTF-32 before UTF-16, whose mark its own begins with.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_PICKLE = b"\x80"  # how pickles begin since protocol 2, and no text


def read_rank(path: Path) -> RankTrace:
    content = _parse(_unpacked(path))
    if isinstance(content, list):  # Chrome's short form: the events alone
        content = {"traceEvents": content}
    if not isinstance(content, dict):
        raise InputError("", "is neither a flight-recorder dump nor a profiler trace")
    if "traceEvents" in content:
        return _read_profile(path, content)
    if "entries" in content:
        return _read_recorder(path, content)
    raise InputError("entries", "is missing: neither a flight-recorder dump nor a profiler trace")


def _unpacked(path: Path) -> bytes:
    """What is in the file, or in the gzip file."""
    try:
        if path.stat().st_size > _BIGGEST_FILE:
            raise InputError("", f"is larger than {_BIGGEST_FILE >> 30} GiB")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
                data = stream.read(_BIGGEST_FILE + 1)
            if len(data) > _BIGGEST_FILE:
                raise InputError("", f"unpacks to more than {_BIGGEST_FILE >> 30} GiB")
    except EOFError as error:
        raise InputError("", f"is truncated and cannot be read: {error}") from error
    except (OSError, ValueError, zlib.error) as error:
        raise InputError("", f"cannot be read: {error}") from error
    for beginning, program in _PACKED.items():
        if data.startswith(beginning):
            raise InputError("", f"is packed by {program}: unpack it first, or pack it with gzip")
    return data


def _parse(data: bytes) -> Any:
    """JSON, or a pickle.

    JSON may begin with a byte order mark and white space, as torch's own profiles do.
    """
    encoding = "utf-8"
    for mark, its_encoding in _MARKS:
        if data.startswith(mark):
            data, encoding = data[len(mark) :], its_encoding
            break
    # Names of kernels and annotations may be no UTF-8, and hold control characters.
    text = data.decode(encoding, "replace") if not data.startswith(_PICKLE) else ""
    beginning = re.match(r"[ \t\r\n]*(.?)", text)
    if beginning and beginning[1] and beginning[1] in "{[":
        try:
            return json.loads(text, strict=False)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise InputError("", f"is truncated or no JSON: {error}", line) from error
    if beginning and not beginning[1] and not data.startswith(_PICKLE):
        raise InputError("", "is empty: truncated, or never written")
    try:
        return _DataUnpickler(io.BytesIO(data)).load()
    except InputError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise InputError(
            "", f"is truncated, or neither JSON nor a pickle: {str(error) or type(error).__name__}"
        ) from error


def _rank_in_name(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name.split(".")[0])
    if not numbers:
        raise InputError("rank", "the file's name must end in the rank, such as trace_rank_3")
    return int(numbers[-1])


def _get(table: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(table, dict):
        raise InputError(where, "is no table")
    if name not in table:
        raise InputError(f"{where}.{name}", "is missing")
    if not isinstance(table[name], kind):
        raise InputError(f"{where}.{name}", f"{reprlib.repr(table[name])} is of the wrong type")
    return table[name]


def _time(table: Any, name: str, where: str) -> float:
    value = _get(table, name, (int, float), where)
    try:
        time = float(value)
    except OverflowError:
        time = math.inf
    if not math.isfinite(time):
        raise InputError(f"{where}.{name}", f"{reprlib.repr(value)} is no time")
    return time


def _rank_list(value: Any, where: str) -> tuple[int, ...]:
    """Ranks as a list, or as the text of one."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value) if value.strip() else []
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise InputError(where, f"{reprlib.repr(value)} is no list of ranks") from error
    if not isinstance(value, list) or not all(isinstance(rank, int) for rank in value):
        raise InputError(where, f"{reprlib.repr(value)} is no list of ranks")
    return tuple(sorted(value))


def _read_recorder(path: Path, content: dict[str, Any]) -> RankTrace:
    trace = RankTrace(_rank_in_name(path), path)
    configuration = content.get("pg_config", {})
    if not isinstance(configuration, dict):
        raise InputError("pg_config", "is no table")
    for key, group in configuration.items():
        where = f"pg_config[{key}]"
        ranks = _rank_list(_get(group, "ranks", (str, list), where), f"{where}.ranks")
        if ranks:  # gloo leaves them out
            trace.members[str(group.get("name", key))] = ranks
    entries = _get(content, "entries", list, "dump")
    seen: set[tuple[str, int]] = set()
    for place, entry in enumerate(entries):
        where = f"entries[{place}]"
        transfer = _get(entry, "is_p2p", bool, where)
        if transfer and "process_group" not in entry:
            continue
        names = _get(entry, "process_group", (tuple, list), where)
        if len(names) != 2 or not all(isinstance(name, (str, int)) for name in names):
            raise InputError(
                f"{where}.process_group", f"{reprlib.repr(names)} is not (name, description)"
            )
        group = str(names[0])
        if transfer:
            trace.transfers.add(group)
            continue
        seq = _get(entry, "collective_seq_id", int, where)
        if (group, seq) in seen:  # parts of one coalesced collective
            continue
        seen.add((group, seq))
        trace.names[group] = str(names[1])
        op = _get(entry, "profiling_name", str, where).rpartition(":")[2]
        trace.calls.append(Call(group, seq, op, _time(entry, "time_created_ns", where)))
    trace.whole = _is_whole(entries, trace.calls)
    trace.called = _last_called(content, entries, list(trace.members))
    return trace


def _is_whole(entries: list[dict[str, Any]], calls: list[Call]) -> bool:
    """Whether a dump has all records since the rank began, transfers' among them.

    Records are numbered from 0 over all groups. A ring buffer that has wrapped begins with another
    number; a dump of active records alone has gaps. (Where records have no numbers: every group's
    first call is here, which is number 0 or 1.)
    """
    records = [entry.get("record_id") for entry in entries]
    if all(isinstance(record, int) for record in records):
        return records == list(range(len(records)))
    first: dict[str, int] = {}
    for call in calls:
        first[call.group] = min(call.seq, first.get(call.group, call.seq))
    return all(seq <= 1 for seq in first.values())


def _last_called(
    content: dict[str, Any], entries: list[dict[str, Any]], names: list[str]
) -> dict[str, int]:
    """Group -> the number of its last call, from "pg_status", where that can be told.

    Its keys are not the groups' names but count a process's groups in the order of their making,
    as their names do where these are numbers. Entries have both, which is how that is checked.
    """
    status = content.get("pg_status")
    if not isinstance(status, dict) or len(status) != len(names):
        return {}
    if not all(str(one).isdecimal() for one in (*names, *status)):
        return {}
    ids = sorted(status, key=int)
    name_of = dict(zip(map(int, ids), sorted(names, key=int), strict=True))
    for entry in entries:
        if name_of.get(entry.get("pg_id", -1)) != str(entry["process_group"][0]):
            return {}
    last: dict[str, int] = {}
    for one in ids:
        number = status[one].get("last_enqueued_collective") if isinstance(status[one], dict) else 0
        if isinstance(number, int):
            last[name_of[int(one)]] = number
    return last


def _read_profile(path: Path, content: dict[str, Any]) -> RankTrace:
    information = content.get("distributedInfo", {})
    if not isinstance(information, dict):
        raise InputError("distributedInfo", "is no table")
    rank = information.get("rank", None)
    number = rank if isinstance(rank, int) else _rank_in_name(path)
    trace = RankTrace(number, path, syncs=0, ends=False, whole=False)
    configuration = information.get("pg_config", [])
    if not isinstance(configuration, list):
        raise InputError("distributedInfo.pg_config", "is no list")
    for place, group in enumerate(configuration):
        where = f"distributedInfo.pg_config[{place}]"
        name = str(_get(group, "pg_name", (str, int), where))
        trace.members[name] = _rank_list(_get(group, "ranks", (str, list), where), where)
        trace.names[name] = str(group.get("pg_desc", ""))
    events = _get(content, "traceEvents", list, "trace")
    counted: dict[str, int] = {}
    calls, nameless = [], 0
    for place, event in enumerate(events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        where = f"traceEvents[{place}]"
        name = str(event.get("name", ""))
        if name in _SYNCHRONIZING:
            assert trace.syncs is not None
            trace.syncs += 1
        arguments = event.get("args", {})
        if name != "record_param_comms" or not isinstance(arguments, dict):
            nameless += name.startswith(("nccl:", "gloo:"))
            continue
        op = str(arguments.get("Collective name", ""))
        if not op or op in ("wait", "init") or op.startswith(("send", "recv")):
            continue
        group = str(_get(arguments, "Process Group Name", (str, int), f"{where}.args"))
        if group not in trace.members and "Process Group Ranks" in arguments:
            text = str(arguments["Process Group Ranks"])
            if "..." not in text:
                trace.members[group] = _rank_list(text, f"{where}.args.Process Group Ranks")
        trace.names.setdefault(group, str(arguments.get("Process Group Description", "")))
        calls.append((_time(event, "ts", where), group, op))
    # The n-th call in a group is its n-th on every rank: "Seq" is not in every version's traces.
    for time, group, op in sorted(calls, key=lambda call: call[0]):
        seq = counted[group] = counted.get(group, 0) + 1
        trace.calls.append(Call(group, seq, op, time * 1000))
    if not calls and nameless:
        raise InputError(
            "traceEvents",
            "has collectives without their groups (gloo's profiles do): use flight-recorder dumps",
        )
    return trace
