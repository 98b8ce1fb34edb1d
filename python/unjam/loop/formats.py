"""Numbers as NumPy has them: bf16 is kept as the upper half of a f32."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # np.ndarray, of whichever type

STORED = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "i32": np.dtype(np.int32)}


def to_stored(array: Array, dtype: str) -> Array:
    """As memory has it; to bf16 it is rounded to the nearest, ties to even."""
    if dtype == "i32":
        return np.asarray(array).astype(np.int32)
    wide = np.ascontiguousarray(array, dtype=np.float32)
    if dtype == "f32":
        return wide
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)


def from_stored(array: Array, dtype: str) -> Array:
    """f32 of f32 and bf16; whole numbers stay."""
    if dtype != "bf16":
        return np.array(array)
    return (np.ascontiguousarray(array).astype(np.uint32) << 16).view(np.float32)
