"""env: lists every UNJAM_ environment variable; of one that is named, all there is to say."""

from __future__ import annotations

import argparse
import difflib
import os
from dataclasses import dataclass
from typing import Any

from .. import _lib, _torch_settings
from .._errors import UnjamError
from ..context import init_all
from ._console import make_console, make_table, print_block, print_json
from ._streams import complain

_LONGEST_VALUE = 9  # in the list

# A few words for the list; the whole text is the library's, or the backend's.
SHORT = {
    "UNJAM_DEVICE": "where engines run: host or cuda",
    "UNJAM_DEVICE_INDEX": "which GPU; -1: the current one",
    "UNJAM_POLICY": "when an engine preempts",
    "UNJAM_ORDER": "order of the task queue",
    "UNJAM_LANES": "blocks a rank; on CUDA 32",
    "UNJAM_BLOCK_THREADS": "threads a block; on CUDA 512",
    "UNJAM_MAX_ACTIVE_KEYS": "keys under way at a time",
    "UNJAM_IDLE_KEYS": "idle keys that are kept in full",
    "UNJAM_FIRST_CONNECTORS": "a neighbour's at first; 0: all",
    "UNJAM_GUARANTEED_SLOTS": "guaranteed slots of a connector",
    "UNJAM_GUARANTEED_SLOT_BYTES": "bytes of a guaranteed slot",
    "UNJAM_POOL_SLOTS": "larger slots that keys share",
    "UNJAM_POOL_SLOT_BYTES": "bytes of a larger slot; 0: by rule",
    "UNJAM_SPIN_HEAD": "polls of the queue's head; 0: auto",
    "UNJAM_SPIN_BASE": "polls granted at least; 0: auto",
    "UNJAM_SPIN_BOOST": "factor of polls after a success",
    "UNJAM_SPIN_CAP": "polls granted at most; 0: auto",
    "UNJAM_QUANTUM_SLICES": "slices in a row while others wait",
    "UNJAM_RESIDENCY_US": "longest stay of an unneeded engine",
    "UNJAM_ORDER_AFTER_US": "silence after which order is common",
    "UNJAM_HELP": "callers' threads run the engine",
    "UNJAM_IN_STREAM": "CUDA: calls without the engine",
    "UNJAM_LINES": "CUDA: packets as lines; -1: auto",
    "UNJAM_WHOLE_LINES": "CUDA: lines arrive whole; -1: auto",
    "UNJAM_IN_STREAM_PATIENCE_US": "CUDA: wait before the engine's turn",
    "UNJAM_IN_STREAM_OVERLAP": "CUDA: calls in a stream overlap",
    "UNJAM_DMA": "CUDA: copy engines send large slices",
    "UNJAM_DMA_FROM": "CUDA: bytes of a vector for these",
    "UNJAM_DMA_LANES": "CUDA: blocks of such a plan",
    "UNJAM_DMA_FLIGHT": "CUDA: bytes of these under way",
    "UNJAM_TRACE_EVENTS": "trace events kept a lane; 0: none",
    "UNJAM_STALL_MS": "age from which peers are compared",
    "UNJAM_ALGORITHM": "how plans move the data",
    "UNJAM_OVERLAP": "chunks of rsag plans at a time",
    "UNJAM_DELAY_SEED": "tests: random delays; 0: none",
    "UNJAM_DELAY_MAX_US": "tests: the longest delay",
    "UNJAM_HOST_ID": "as which host it counts",
    "UNJAM_ROOT": "hosts: where rank 0 is met",
    "UNJAM_NET": "hosts: what carries slices",
    "UNJAM_NET_PLUGIN": "hosts: the network plugin",
    "UNJAM_NET_UCX": "hosts: the libucp to load",
    "UNJAM_NET_WINDOW": "hosts: bytes under way",
    "UNJAM_PEER_TIMEOUT_MS": "hosts: silence that counts as loss",
    "UNJAM_INIT_TIMEOUT_MS": "how long ranks wait to meet",
    "UNJAM_REPORT_MS": "age from which calls are reported",
    "UNJAM_TIMEOUT_MS": "age at which calls end; 0: never",
    "UNJAM_EXPLAIN_SIGNAL": "signal that prints who waits",
    "UNJAM_HEAP": "bytes that unjamMemAlloc has",
    "UNJAM_LOG": "what is said: warn, info or debug",
    "UNJAM_LOG_FILE": "file of the log, instead of stderr",
    "UNJAM_RANK": "this process's rank",
    "UNJAM_RANKS": "ranks of the job",
    "UNJAM_ID": "name of the job: see unjam id",
    "UNJAM_LIBRARY": "Python: the libunjam.so to load",
    "UNJAM_COMMIT": "bench: the commit in its file",
    "UNJAM_TORCH_DEFAULT": "torch: unjam is the default backend",
    "UNJAM_TORCH_REPLACE": "torch: backends to stand in for",
    "UNJAM_TORCH_CUDA": "torch: groups join with their GPU",
    "UNJAM_TORCH_BUILD": "torch: folder of the adapter",
    "UNJAM_TORCH_STACKS": "torch: dumps have call stacks",
    "UNJAM_PYTHON_INCLUDE": "torch: folder of Python.h",
}
_PYTHON = (
    (
        "UNJAM_LIBRARY",
        "path",
        "Python: the libunjam.so to load instead of the one beside the package.",
    ),
    (
        "UNJAM_COMMIT",
        "text",
        "Python: the commit that unjam bench writes into its file, instead of the checkout's.",
    ),
)


@dataclass(frozen=True)
class _Variable:
    """One of them.

    Attributes:
        name: of the variable.
        values: what it takes.
        default: where it is not set.
        value: what it is set to; None: it is not.
        doc: its meaning.
        agreed: all ranks must have the same.
    """

    name: str
    values: str
    default: str
    value: str | None
    doc: str
    agreed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one variable: its whole meaning")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the list, or one variable; 2 if there is none of that name."""
    known = _lib.environment()
    variables = {variable.name: variable for variable in _variables(known)}
    if options.name is not None:
        name = options.name.partition("=")[0].strip().upper()
        name = name if name.startswith("UNJAM_") else f"UNJAM_{name}"
        if any(other["name"] == name and other["read_by"] == "others" for other in known) and (
            name not in variables
        ):
            options.parser.error(f"{name} is of the build or the tests: docs/develop/build.md")
        if name not in variables:
            # What all names begin with makes none of them near.
            own = {other.removeprefix("UNJAM_"): other for other in variables}
            near = difflib.get_close_matches(name.removeprefix("UNJAM_"), own, 1)
            meant = f"; did you mean {own[near[0]]}?" if near else ""
            options.parser.error(f"there is no variable {options.name!r}{meant}")
        known = [variable for variable in known if variable["name"] == name]
    if options.json:
        print_json(known)
    elif options.name is not None:
        _show(variables[name])
    else:
        _list(list(variables.values()))
        for variable in known:
            if variable["read_by"] == "nobody":
                complain(variable["doc"])
    return 0


def _variables(known: list[dict[str, Any]]) -> list[_Variable]:
    """The library's, then those that the Python side alone looks at."""
    found = [
        _Variable(
            of_library["name"],
            _values(of_library),
            str(of_library["default"]),
            of_library["value"],
            of_library["doc"],
            bool(of_library.get("agreed")),
        )
        for of_library in known
        if of_library["read_by"] == "library"
    ]
    found += [
        _Variable(name, values, "", os.environ.get(name), doc) for name, values, doc in _PYTHON
    ]
    found += [
        _Variable(
            of_torch.name,
            of_torch.values,
            of_torch.default,
            os.environ.get(of_torch.name),
            of_torch.doc,
        )
        for of_torch in _torch_settings.ALL
    ]
    return found


def _values(of_library: dict[str, Any]) -> str:
    values = str(of_library["type"])
    if values in ("integer", "bytes") and "min" in of_library:
        suffixes = ", or with K, M, G, T" if values == "bytes" else ""
        return f"{of_library['min']} to {of_library['max']}{suffixes}"
    return values.replace("|", ", ")


def _list(variables: list[_Variable]) -> None:
    table = make_table("", ["variable", "value", "meaning"], box=None)
    for variable in variables:
        value = variable.value if variable.value is not None else variable.default or "-"
        table.add_row(
            variable.name + (" *" if variable.agreed else ""),
            value if len(value) <= _LONGEST_VALUE else "(below)",
            SHORT.get(variable.name, variable.doc),
            style=None if variable.value is None else "bold",
        )
    console = make_console()
    console.print(table)
    console.print(
        "\n* must be equal on all ranks. -: no default. A value that is not set is the host\n"
        "device's default. `unjam env NAME` prints the whole meaning of one."
    )
    are_set = [variable for variable in variables if variable.value is not None]
    if are_set:
        console.print("Set here:")
    for variable in are_set:
        console.print(f"  {variable.name}={variable.value}", soft_wrap=True)


def _show(variable: _Variable) -> None:
    console = make_console()
    console.print(variable.name, style="bold")
    doc = variable.doc + " Must be equal on all ranks." * variable.agreed
    print_block(console, doc, indent=2)
    facts = {
        "takes": variable.values,
        "default": variable.default or "none",
        "set to": "(not set)" if variable.value is None else variable.value,
    }
    if variable.value and (refusal := _refusal(variable)):
        facts["refused"] = refusal
    for what, text in facts.items():
        console.print(f"  {what + ':':<9}{text}", soft_wrap=True)


def _refusal(variable: _Variable) -> str:
    """What the library says of the value as a context begins; "" if it takes it, or does not look.

    As in `unjam doctor`, but without the other variables, whose errors would come first.
    """
    if variable.values in ("text", "path"):
        return ""  # which have no wrong values, and may be of a file
    before = dict(os.environ)
    for name in before:
        if name.startswith("UNJAM_") and name not in (variable.name, "UNJAM_LIBRARY"):
            del os.environ[name]
    try:
        init_all(1, device="host")[0].close()
    except UnjamError as error:
        return str(error) if f"{variable.name}=" in str(error) else ""
    finally:
        os.environ.update(before)
    return ""
