"""Names of keys, groups and algorithms, as the C API takes them."""

from __future__ import annotations

from ._errors import InvalidArgument, InvalidType


def encode(text: str, what: str) -> bytes:
    """`text` for the C API, which ends strings at a NUL.

    Raises:
        InvalidArgument: it contains a NUL, or what UTF-8 cannot say.
    """
    if not isinstance(text, str):
        raise InvalidType(f"{what} must be a str, not {type(text).__name__} {text!r}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{what} {text!r} has no UTF-8 form (lone surrogates): use other characters"
        ) from None
    if b"\0" in encoded:
        raise InvalidArgument(
            f"{what} {text!r} contains a NUL character, which ends a string in C: leave it out"
        )
    return encoded


def algorithm_name(algorithm: str | None) -> bytes | None:
    """`algorithm` for the C API, which knows the names.

    Raises:
        InvalidType: not a name.
    """
    if algorithm is None:
        return None
    if not isinstance(algorithm, str):
        raise InvalidType(f"algorithm must be a name, not {type(algorithm).__name__} {algorithm!r}")
    return encode(algorithm, "algorithm")
