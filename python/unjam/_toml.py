"""TOML files that users write: read, with errors that name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ._errors import InvalidArgument

T = TypeVar("T")


def read_toml(path: Path, biggest: int, parse: Callable[[str], T]) -> T:
    """What ``parse`` makes of the text of a file of at most ``biggest`` bytes, whole MiB.

    Raises:
        InvalidArgument: it cannot be read, or ``parse`` says so; the message names the file.
    """
    try:
        if path.stat().st_size > biggest:
            raise InvalidArgument(f"{path}: is larger than {biggest >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {error}") from error
    try:
        return parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a text.

    Raises:
        InvalidArgument: it is not TOML.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is not TOML: {error}") from error
