"""vLLM's weight transfer over unjam: an engine for its workers, and one for the trainer.

::

    from unjam.torch.doors.vllm import UnjamTrainerEngine, UnjamTrainerInit, register

    register()  # in the workers' processes, and the trainer's
    engine = UnjamTrainerEngine.trainer_init(
        config, UnjamTrainerInit(workers=8, rank=rank), client=client, source=ModuleSource(model)
    )
    engine.send_weights()  # each step

They keep the interface of vLLM at commit 02f250b03f38822ccdb63f27a3005d10ca81f385,
vllm/distributed/weight_transfer/base.py. They have not been run with vLLM itself.

The trainer's rank 0 and all workers are a job of unjam's own, on one machine. Weights go in a
chain, so the trainer sends one copy however many workers there are. They travel through host
memory. A worker whose collectives of inference are under way may receive meanwhile: nothing has to
be quiet, and no order is agreed on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import context as _context
from ..._errors import Aborted, InvalidArgument, InvalidUsage, Peer, Timeout
from ...group import Group
from ...reshard import Layout, Plan, Replicate
from .._reshard_specs import name_of, raw_of

try:
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
except ImportError as error:
    raise ImportError(
        "unjam.torch.doors.vllm needs vllm.distributed.weight_transfer, which is not here: install "
        "a vLLM that has trainer engines, or use unjam.torch.Reshard, which needs none"
    ) from error

BACKEND = "unjam"
CHUNK_BYTES = 1 << 30  # of weights in host memory at once, beside the staging
_ENDS_S = 60.0  # until workers have noticed that the trainer's block has failed


def register() -> None:
    """Makes both engines known to vLLM by the name "unjam"; a second call does nothing."""
    for factory, engine in (
        (WeightTransferEngineFactory, UnjamEngine),
        (WeightTransferTrainerFactory, UnjamTrainerEngine),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, engine)


@dataclass
class UnjamInit(WeightTransferInitInfo):  # type: ignore[misc]  # whose types are not known here
    """How a worker joins: what the trainer's rank 0 tells all of them.

    Attributes:
        job: the job's name, ``unjam.unique_id().hex()``.
        ranks: of the job: the trainer's rank 0 and all workers.
    """

    job: str
    ranks: int


@dataclass
class UnjamUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What comes: all tensors, in the trainer's order.

    Attributes:
        names: of the tensors, as in checkpoints.
        dtype_names: their types, as ``bfloat16``.
        shapes: their sizes.
        chunk_bytes: how many bytes of them are in host memory at once.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        counts = {len(self.names), len(self.dtype_names), len(self.shapes)}
        if len(counts) > 1:
            raise InvalidArgument(
                f"{len(self.names)} names, {len(self.dtype_names)} dtype_names and "
                f"{len(self.shapes)} shapes: give one of each for each tensor"
            )
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InvalidArgument(f"tensor {twice!r} is there twice: give each name once")
        for name, dtype in zip(self.names, self.dtype_names, strict=True):
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise InvalidArgument(f"tensor {name!r}: torch has no type {dtype!r}")


@dataclass
class UnjamTrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """How the trainer begins, beside ``rank``, this process's among the trainer's.

    Attributes:
        workers: how many receive: tensor times pipeline times data parallel sizes.
        chunk_bytes: of weights in host memory at once.
    """

    workers: int
    chunk_bytes: int = CHUNK_BYTES


class _Job:
    """The job of the trainer and the workers: rank 0 sends."""

    def __init__(self, ranks: int, rank: int, name: str) -> None:
        try:
            unique = bytes.fromhex(name)
        except ValueError as error:
            raise InvalidArgument(f"job={name!r} is no job of unjam's: {error}") from error
        self._context = _context.init(ranks, rank, unique, device="host")
        self._group: Group = self._context.group(name="weights")
        self._plans: dict[Any, Plan] = {}

    def begin(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, torch.dtype]
    ) -> Callable[[], None]:
        """Sends them from rank 0, and writes them elsewhere; gives what waits for that."""
        shapes = tuple((name, tuple(x.shape), types[name]) for name, x in tensors.items())
        plan = self._plans.get(shapes)
        if plan is None:
            plan = self._plans[shapes] = Plan(
                Layout([0], [Replicate()]),
                Layout(list(range(1, self._group.size)), [Replicate()]),
                {name: (shape, name_of(raw_of(dtype))) for name, shape, dtype in shapes},
            )
        parts = {name: x.view(raw_of(x.dtype)) for name, x in tensors.items()}
        side = {"src": parts} if self._group.rank == 0 else {"dst": parts}
        return plan.run(self._group, key="weights", **side).synchronize

    def stop(self) -> None:
        """Ends what is under way, on all ranks, from any thread: none waits for one that failed."""
        self._context.abort()

    def abort(self) -> None:
        """The same, and leaves the job."""
        self.stop()
        self._context.close()

    def close(self) -> None:
        try:
            self._context.close()
        except InvalidUsage:  # something is pending
            self.abort()


def chunks(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Numbers of tensors that go together: at most so many bytes, but one at least."""
    first, total = 0, 0
    for number, size in enumerate(sizes):
        if number > first and total + size > most:
            yield range(first, number)
            first, total = number, 0
        total += size
    if first < len(sizes):
        yield range(first, len(sizes))


class UnjamEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives weights in a worker of vLLM's, and loads them with ``model.load_weights``."""

    init_info_cls = UnjamInit
    update_info_cls = UnjamUpdate

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """As vLLM makes it."""
        super().__init__(config, vllm_config, device, model)
        self._job: _Job | None = None

    def init_transfer_engine(self, init_info: UnjamInit) -> None:
        """Joins the trainer's job, and leaves an earlier one; returns when all workers have."""
        self.shutdown()
        where = self.parallel_config
        worker = where.data_parallel_index * where.world_size + where.rank
        self._job = _Job(init_info.ranks, 1 + worker, init_info.job)

    def start_weight_update(self) -> None:
        """Does nothing: weights are loaded as they come."""

    def receive_weights(self, update_info: UnjamUpdate) -> None:
        """Receives all tensors and loads them, a chunk at a time.

        If it fails here, it does so on the trainer and on all workers, which leave the job.
        """
        if self._job is None:
            raise InvalidUsage(
                "no job was joined, or a transfer has failed: call init_transfer_engine first"
            )
        try:
            self._receive(self._job, update_info)
        except BaseException:
            job, self._job = self._job, None
            job.abort()
            raise

    def _receive(self, job: _Job, update_info: UnjamUpdate) -> None:
        types = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(update_info.shapes, types, strict=True)
        ]
        for numbers in chunks(sizes, update_info.chunk_bytes):
            tensors = {
                update_info.names[n]: torch.empty(tuple(update_info.shapes[n]), dtype=types[n])
                for n in numbers
            }
            job.begin(tensors, {name: x.dtype for name, x in tensors.items()})()
            self.model.load_weights([(name, x.to(self.device)) for name, x in tensors.items()])

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Leaves the job."""
        if self._job is not None:
            self._job.close()
            self._job = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Is not there: it has no place for the job.

        Raises:
            InvalidUsage: always.
        """
        raise InvalidUsage(
            "the unjam engine has no trainer_send_weights: make a UnjamTrainerEngine with "
            "trainer_init, and call its send_weights"
        )


class UnjamTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends a source's weights to all workers; all ranks of the trainer make it and call it."""

    init_info_cls = UnjamTrainerInit
    config_cls = object

    def __init__(
        self,
        config: Any,
        *,
        client: Any,
        source: Any,
        is_sender: bool = True,
        job: _Job | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Made by :meth:`trainer_init`."""
        super().__init__(config, client=client, source=source, is_sender=is_sender)
        self._job = job
        self._chunk_bytes = chunk_bytes

    @classmethod
    def trainer_init(
        cls, config: Any, init_info: UnjamTrainerInit, *, client: Any, source: Any
    ) -> UnjamTrainerEngine:
        """Rank 0 makes the job and lets all workers join it; the other ranks do nothing.

        Raises:
            InvalidArgument: a number of workers below 1.
            Timeout: a worker has not joined.
        """
        if type(init_info.workers) is not int or init_info.workers < 1:
            raise InvalidArgument(f"workers={init_info.workers!r}: give how many receive")
        job = None
        if init_info.is_sender:
            name, ranks = _context.unique_id().hex(), 1 + init_info.workers
            # The client's call returns when its workers have joined, for which they need rank 0.
            try:
                with _Beside(client.init_weight_transfer_engine, {"job": name, "ranks": ranks}):
                    job = _Job(ranks, 0, name)
            except BaseException:
                if job is not None:
                    job.abort()
                raise
        return cls(
            config,
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            job=job,
            chunk_bytes=init_info.chunk_bytes,
        )

    def send_weights(self) -> None:
        """Sends all that the source gives now, and waits until the workers have loaded it.

        If it fails, it does so on the workers, too, and the engine is out of use.

        Raises:
            InvalidArgument: the source gives other tensors than its metadata says.
            UnjamError: a worker is gone.
        """
        if not self.is_sender:
            for _ in self.source:  # its collectives
                pass
            return
        if self._job is None:
            raise InvalidUsage(
                "the engine was shut down, or a transfer has failed: make another with trainer_init"
            )
        known = list(self.source.metadata())
        self.client.start_weight_update()
        update = {
            "names": [each.name for each in known],
            "dtype_names": [name_of(each.dtype) for each in known],
            "shapes": [list(each.shape) for each in known],
            "chunk_bytes": self._chunk_bytes,
        }
        sizes = [torch.Size(each.shape).numel() * each.dtype.itemsize for each in known]
        job = self._job
        try:
            # The client's call returns when its workers have all of it.
            with _Beside(self.client.update_weights, update, failed=job.stop):
                given = _checked(self.source, known)
                for numbers in chunks(sizes, self._chunk_bytes):
                    tensors = dict(itertools.islice(given, len(numbers)))
                    job.begin(tensors, {known[n].name: known[n].dtype for n in numbers})()
                for _ in given:  # none: it looks whether there are more
                    pass
        except BaseException:
            self._job = None
            job.abort()
            raise
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leaves the job."""
        if self._job is not None:
            self._job.close()
            self._job = None


def _next(given: Iterator[tuple[str, torch.Tensor]], known: Any) -> tuple[str, torch.Tensor]:
    """The next tensor of a source, on the host, as its metadata says it is."""
    name, tensor = next(given, ("", None))
    if tensor is None or name != known.name or tuple(tensor.shape) != tuple(known.shape):
        shown = "nothing" if tensor is None else f"{name!r} {tuple(tensor.shape)}"
        raise InvalidArgument(
            f"the source gives {shown}, and its metadata say {known.name!r} {tuple(known.shape)}: "
            "let it give all tensors in the order of its metadata"
        )
    return name, tensor.detach().to("cpu", known.dtype)


def _checked(source: Any, known: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A source's tensors. It looks for more of them before it gives the last one."""
    given = iter(source)
    for each in known[:-1]:
        yield _next(given, each)
    last = [_next(given, each) for each in known[-1:]]
    more = next(given, None)
    if more is not None:
        raise InvalidArgument(
            f"the source gives {more[0]!r}, too, which is not in its metadata of {len(known)} "
            "tensors: let both have the same"
        )
    yield from last


class _Beside:
    """A call in a thread of its own while the block runs; what it raises comes out behind that.

    If the block raises, `failed` is called, which lets the call come to its end; likewise the other
    way round. Both errors come out, one as the cause of the other.
    """

    def __init__(
        self, call: Callable[..., Any], *arguments: Any, failed: Callable[[], None] | None = None
    ) -> None:
        self._error: BaseException | None = None
        self._failed = failed

        def run() -> None:
            try:
                call(*arguments)
            except BaseException as error:
                self._error = error
                if failed is not None:
                    failed()

        self._thread = threading.Thread(target=run, name="unjam vllm", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is None:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return
        if not isinstance(error, Exception):  # such as Ctrl-C, which must not wait
            return
        if self._failed is not None:
            self._failed()
        self._thread.join(_ENDS_S)
        if self._error is None:
            return
        if isinstance(error, (Peer, Aborted, Timeout)):  # of which the call says why
            raise self._error from error
        error.__cause__ = error.__cause__ or self._error
