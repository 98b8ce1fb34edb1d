"""What the parent asks a rank, and what a rank answers. Pickled, from process to process."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Case


@dataclass(frozen=True)
class Start:
    """The first thing that a worker is told.

    Attributes:
        rank: its own.
        ranks: how many.
        unique_id: of the unjam job.
        peer: the other library, or "none".
        store: path of a file through which the peer's ranks meet.
        limit_s: the longest that anything may take.
        device: "host" or "cuda".
        block_bytes: of the one block that all buffers are cut from; None: there is none.
        registered: the block is memory of its own, which is registered; else it is of unjam's heap.
    """

    rank: int
    ranks: int
    unique_id: bytes
    peer: str
    store: str
    limit_s: float
    device: str = "host"
    block_bytes: int | None = None
    registered: bool = False

    @property
    def heap_bytes(self) -> int | None:
        """Of unjam's heap; None: what the environment says."""
        return None if self.registered else self.block_bytes


@dataclass(frozen=True)
class Prepare:
    """Make the buffers of a case, and check its result once. Answer: the libraries that have it."""

    case: Case


@dataclass(frozen=True)
class Repeat:
    """Run the case this often, libraries in turn. Answer: nanoseconds, by library."""

    times: int


@dataclass(frozen=True)
class Queue:
    """CUDA: this often, queue so many calls in the stream, libraries in turn.

    Answer: by library, (nanoseconds a call between events, nanoseconds to issue one).
    """

    times: int
    calls: int


@dataclass(frozen=True)
class Burst:
    """CUDA: this often, so many calls outstanding at once, libraries in turn.

    Answer: nanoseconds a call, by library.
    """

    times: int
    outstanding: int


@dataclass(frozen=True)
class Plan:
    """CUDA: what unjam has used for the case, see CudaUnjam.plan(). Answer: that."""


@dataclass(frozen=True)
class Gemm:
    """CUDA: a matrix product alone and beside back-to-back all-reduces.

    Answer: a ``gemm.Answer``.

    Attributes:
        unique_id: of a new unjam job.
        lanes: of unjam.
        size: rows and columns of the product.
        nbytes: of an all-reduce.
        times: measurements of each kind.
        registered: what is reduced lies in memory that is registered with unjam.
    """

    unique_id: bytes
    lanes: int
    size: int
    nbytes: int
    times: int
    registered: bool = False


@dataclass(frozen=True)
class Check:
    """Check the case's result once more, and drop its buffers. Answer: nothing."""


@dataclass(frozen=True)
class Failure:
    """The answer if something went wrong.

    Attributes:
        text: what, in a line.
        details: the traceback.
        wrong: a wrong result, rather than an error.
    """

    text: str
    details: str = ""
    wrong: bool = False
