"""id: makes a unique id for a job, to be put into UNJAM_ID on every rank."""

from __future__ import annotations

import argparse

from ..context import unique_id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes none."""


def run(options: argparse.Namespace) -> int:
    """Prints the id in hexadecimal digits."""
    print(unique_id().rstrip(b"\0").hex())
    return 0
