"""The checks of one call's buffers, by the names of the calls."""

from unjam._arguments import for_kind
from unjam._types import Kind


def all_reduce(x, out, dtype):
    return for_kind(Kind.ALL_REDUCE, x, out, 0, 2, 0, dtype)


def all_gather(x, out, rank, size, dtype):
    return for_kind(Kind.ALL_GATHER, x, out, rank, size, 0, dtype)


def reduce_scatter(x, out, rank, size, dtype):
    return for_kind(Kind.REDUCE_SCATTER, x, out, rank, size, 0, dtype)


def reduce(x, out, is_root, dtype):
    return for_kind(Kind.REDUCE, x, out, 0 if is_root else 1, 2, 0, dtype)


def broadcast(x, out, is_root, dtype):
    return for_kind(Kind.BROADCAST, x, out, 0 if is_root else 1, 2, 0, dtype)
