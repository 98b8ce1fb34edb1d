"""env: lists every UNJAM_ environment variable with its meaning, default and value."""

from __future__ import annotations

import argparse
import os

from .. import _lib, _torch_settings
from ._console import cell, make_console, make_table, print_json
from ._streams import complain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    known = _lib.environment()
    if options.json:
        print_json(known)
        return 0
    variables = [variable for variable in known if variable["read_by"] == "library"]
    table = make_table(
        "Environment variables", ["variable", "values", "default", "set to", "meaning"]
    )
    for variable in variables:
        doc = variable["doc"]
        if variable.get("agreed"):
            doc += " (Must be equal on all ranks.)"
        values = str(variable["type"])
        if values in ("integer", "bytes") and "min" in variable:
            suffixes = ", or with K, M, G, T" if values == "bytes" else ""
            values = f"{variable['min']} to {variable['max']}{suffixes}"
        table.add_row(
            variable["name"], values, str(variable["default"]), cell(variable["value"]), doc
        )
    # What the Python side alone looks at.
    table.add_row(
        "UNJAM_LIBRARY",
        "path",
        "",
        cell(os.environ.get("UNJAM_LIBRARY")),
        "Python: the libunjam.so to load instead of the one beside the package.",
    )
    table.add_row(
        "UNJAM_COMMIT",
        "text",
        "",
        cell(os.environ.get("UNJAM_COMMIT")),
        "Python: the commit that unjam bench writes into its file, instead of the checkout's.",
    )
    for of_torch in _torch_settings.ALL:
        table.add_row(
            of_torch.name,
            of_torch.values,
            of_torch.default,
            cell(os.environ.get(of_torch.name)),
            of_torch.doc,
        )
    make_console().print(table)
    for variable in known:
        if variable["read_by"] == "nobody":
            complain(variable["doc"])
    return 0
