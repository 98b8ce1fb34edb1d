"""The paper's programs 1 and 2 on GPUs: random call orders, real device synchronisations.

As in ``unjam.programs``, but buffers are torch tensors, a rank has a GPU and one stream, and
program 2 calls cudaDeviceSynchronize between the calls. Ranks are threads of this process (one
process drives all GPUs) or a process each. All data are small integers, so that sums are exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import unjam

from ..context import Context, init_all, unique_id
from ..programs import (
    SIZES,
    WrongResult,
    consistent_orders,
    key_names,
    random_orders,
    size_text,
)
from ..request import Request
from ..threads import run_ranks
from . import gpus, nccl

ORDERS = {"random": random_orders, "consistent": consistent_orders}
_START_S = 120.0  # for processes to import torch and to join


@dataclass(frozen=True)
class CudaProgram:
    """What to run.

    Attributes:
        ranks: ranks, a GPU each; of several processes they may share GPUs.
        iterations: how often each of the `orders` runs all collectives.
        seed: of call orders.
        device_sync: cudaDeviceSynchronize between the calls (program 2).
        orders: see ``programs.Program``; they alternate, iteration by iteration.
        sizes: bytes of each all-reduce of float32.
        timeout: seconds that one wait may take.
    """

    ranks: int = 4
    iterations: int = 200
    seed: int = 0
    device_sync: bool = False
    orders: tuple[str, ...] = ("random", "consistent")
    sizes: tuple[int, ...] = SIZES
    timeout: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a program gave; every result was right.

    Attributes:
        seconds: order → seconds of the calls and waits, the slowest rank's of each iteration.
        results: results checked, over all ranks.
    """

    seconds: dict[str, float]
    results: int

    @property
    def cost_of_disorder(self) -> float:
        """Time in random order over time in one order."""
        return self.seconds["random"] / self.seconds["consistent"]


class Data:
    """The buffers of one rank: integers below 2048, so that sums of 64 ranks are exact."""

    def __init__(self, sizes: tuple[int, ...], ranks: int, rank: int, device: Any) -> None:
        """Allocates them on `device`."""
        self._ranks, self._rank = ranks, rank
        self._sizes = sizes
        self._base = [
            (torch.arange(size // 4, device=device) % 1021).to(torch.float32) for size in sizes
        ]
        self.buffers = [torch.empty_like(base) for base in self._base]

    def fill(self, turn: int) -> None:
        """Writes the rank's values of one turn, in the current stream."""
        for key, base in enumerate(self._base):
            torch.add(base, self._offset(self._rank, turn, key), out=self.buffers[key])

    def check(self, turn: int) -> int:
        """Compares all results, bit by bit; how many. Waits for the current stream.

        Raises:
            WrongResult: one is wrong.
        """
        for key, base in enumerate(self._base):
            total = sum(self._offset(rank, turn, key) for rank in range(self._ranks))
            want, got = base * self._ranks + total, self.buffers[key]
            if not torch.equal(got, want):
                wrong = (got != want).nonzero().flatten()
                first = int(wrong[0])
                raise WrongResult(
                    f"rank {self._rank}, turn {turn}, all-reduce {key_names(len(self._sizes))[key]}"
                    f" ({size_text(self._sizes[key])}): {wrong.numel()} of {got.numel()} elements "
                    f"are wrong, the first is [{first}]: {got[first].item()} instead of "
                    f"{want[first].item()}"
                )
        return len(self._base)

    @staticmethod
    def _offset(rank: int, turn: int, key: int) -> int:
        return 1 + (131 * rank + 31 * turn + 17 * key) % 1021


def turns(program: CudaProgram) -> Iterator[tuple[str, list[list[int]]]]:
    """(order, call order of each rank) of every turn."""
    shape = (program.seed, program.iterations, program.ranks, len(program.sizes))
    made = {name: ORDERS[name](*shape) for name in program.orders}
    for iteration in range(program.iterations):
        for name in program.orders:
            yield name, made[name][iteration].tolist()


def run_rank(
    program: CudaProgram, context: Context, meet: Callable[[], object]
) -> tuple[list[float], int]:
    """What one rank does, on its context's device: seconds of each turn, and results checked.

    Every other turn waits in its stream (``Request.wait``), the others in the thread.

    Args:
        program: what to run.
        context: of the rank.
        meet: returns when all ranks are here; outside of the timed part.
    """
    device = torch.device(context.device)
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    group, keys = context.group(name="program"), key_names(len(program.sizes))
    seconds, results = [], 0
    with torch.cuda.stream(stream):
        data = Data(program.sizes, program.ranks, context.rank, device)
        for turn, (_, orders) in enumerate(turns(program)):
            data.fill(turn)
            stream.synchronize()
            meet()
            begin = time.perf_counter()
            requests: list[Request] = []
            for key in orders[context.rank]:
                if program.device_sync and requests:
                    torch.cuda.synchronize(device)
                requests.append(group.all_reduce(data.buffers[key], key=keys[key]))
            try:
                if turn % 2:
                    for request in requests:
                        request.wait()
                    _finish(stream, program.timeout)
                unjam.wait_all(requests, program.timeout)
            except TimeoutError as error:
                raise TimeoutError(f"{error}; unjam says: {context.explain()}") from error
            seconds.append(time.perf_counter() - begin)
            results += data.check(turn)
    return seconds, results


def run_threads(program: CudaProgram, **config: Any) -> Outcome:
    """Runs a program with one process that drives all GPUs, a thread each.

    Args:
        program: what to run.
        config: as for :func:`unjam.init_all`.

    Raises:
        WrongResult: a result is wrong.
        TimeoutError: a wait took longer than the program allows.
    """
    barrier = threading.Barrier(program.ranks, timeout=program.timeout)

    def rank(context: Context) -> tuple[list[float], int]:
        try:
            return run_rank(program, context, barrier.wait)
        except threading.BrokenBarrierError:
            raise unjam.Aborted("another rank failed") from None
        except BaseException:
            barrier.abort()
            raise

    with init_all(program.ranks, device="cuda", **config) as contexts:
        return outcome(program, run_ranks(contexts, rank))


def run_processes(program: CudaProgram, one_gpu_each: bool = False, **environment: str) -> Outcome:
    """Runs a program with a process for each rank.

    Args:
        program: what to run.
        one_gpu_each: a process sees no GPU but its rank's, as Slurm, Ray and Kubernetes start
            them; else all that this one sees.
        environment: of the processes, besides this one's; settings as UNJAM_… variables.

    Raises:
        RuntimeError: a process failed; the message holds its last words.
        TimeoutError: they took longer than all waits of the program may.
    """
    limit_s = _START_S + program.timeout + 0.5 * program.iterations * len(program.orders)
    with tempfile.TemporaryDirectory(prefix="unjam-program-") as folder:
        job = unique_id().hex()
        started = []
        try:
            for rank in range(program.ranks):
                variables = environment | {
                    "UNJAM_ID": job,
                    "UNJAM_RANK": str(rank),
                    "UNJAM_RANKS": str(program.ranks),
                }
                if one_gpu_each:
                    variables["CUDA_VISIBLE_DEVICES"] = gpus.visible_as_one(rank)
                log = Path(folder) / f"rank{rank}.log"
                words = [json.dumps(asdict(program))]
                started.append((start("program_worker", words, variables, log), log))
            return outcome(program, _answers(started, limit_s))
        finally:
            for process, _ in started:
                process.kill()
                process.wait()


def outcome(program: CudaProgram, answers: list[tuple[list[float], int]]) -> Outcome:
    """From what every rank gave."""
    slowest = [max(turn) for turn in zip(*(seconds for seconds, _ in answers), strict=True)]
    step = len(program.orders)
    seconds = {name: sum(slowest[place::step]) for place, name in enumerate(program.orders)}
    return Outcome(seconds, sum(results for _, results in answers))


def start(
    module: str, arguments: list[str], variables: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """A process that runs a module of this package; its output goes to `log`."""
    environment = os.environ | nccl.ENVIRONMENT | variables
    paths = [str(Path(unjam.__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"unjam.cuda.{module}", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _answers(
    started: list[tuple[subprocess.Popen[bytes], Path]], limit_s: float
) -> list[tuple[list[float], int]]:
    deadline = time.monotonic() + limit_s
    waiting = dict(enumerate(started))
    while waiting:
        for rank, (process, log) in list(waiting.items()):
            status = process.poll()
            if status:
                words = log.read_text(errors="replace").strip()[-2000:]
                raise RuntimeError(f"rank {rank} ended with status {status}; its words:\n{words}")
            if status == 0:
                del waiting[rank]
        if time.monotonic() > deadline:
            names = ", ".join(map(str, waiting))
            raise TimeoutError(f"rank {names} did not end within {limit_s:.0f} s")
        time.sleep(0.02)
    last = [log.read_text().strip().splitlines()[-1] for _, log in started]
    return [(seconds, results) for seconds, results in map(json.loads, last)]


def _finish(stream: Any, timeout: float) -> None:
    """Waits for a stream, but not for ever."""
    event = torch.cuda.Event()
    event.record(stream)
    deadline = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stream has not finished after {timeout:g} s")
        time.sleep(0)
