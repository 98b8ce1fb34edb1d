"""Program 1 with PyTorch's gloo on the host: how long in one order, and what becomes of disorder.

Run in a child process, ``python -m unjam.gloo_program RANKS SEED ITERATIONS FOLDER``, because gloo
ends the process that it finds a mismatch in. Ranks are threads with one process group, as unjam's
have one group. It prints "consistent", how many results were right and the seconds of the
iterations in one order on all ranks. Then, after each iteration in which every rank has an order of
its own, it prints "random", or "wrong" if a result is.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .programs import SIZES, Orders, consistent_orders, random_orders

_WARM_UP = 3  # iterations in one order that are not timed
_BATCH = 5  # iterations between two meetings of the ranks, as of programs.Program
_RANDOM = 3  # iterations at most
START_S = 120.0
"""The longest to wait for the child to import torch and to run the iterations in one order."""
_START_RANKS = 16  # up to which that is enough: each rank connects to all others
_SLOW = 10.0  # how much longer than in one order disorder may take before it counts as a hang
_EXIT_S = 10.0  # from the end of the child's output to its own
_TAIL = 400  # characters of what a child that failed wrote


@dataclass(frozen=True)
class GlooTry:
    """What gloo did.

    Attributes:
        iterations: in one order; all results were right.
        results: that were checked.
        seconds: of these iterations.
        end: of disorder: "broke" (gloo ended its process), "hung", "wrong", "completed" or "failed"
            (its process ended for another reason).
        words: gloo's own, if it broke; how the process ended, if it failed.
        limit_s: after which it counts as hung.
    """

    iterations: int
    results: int
    seconds: float
    end: str
    words: str = ""
    limit_s: float = 10.0

    @property
    def ms_per_iteration(self) -> float:
        """Milliseconds of an iteration in one order."""
        return 1e3 * self.seconds / self.iterations


def lacking() -> str:
    """Why gloo cannot be shown, and the cure; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch, which has gloo, is not installed here: pip install torch"
    return ""


def try_gloo(ranks: int, seed: int, iterations: int, limit_s: float = 10.0) -> GlooTry:
    """Runs the program in a child process.

    Args:
        ranks: threads of the child.
        seed: of the call orders.
        iterations: in one order.
        limit_s: for those in disorder; more if those in one order are slow.

    Raises:
        RuntimeError: the child failed before it came to disorder.
    """
    start_s = START_S * max(1.0, ranks / _START_RANKS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    package = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in (environment.get("PYTHONPATH", ""), package) if path
    )
    # This process has the folder, for gloo ends the child without a chance to tidy up.
    with (
        tempfile.TemporaryDirectory(prefix="unjam-gloo-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as log,
    ):
        words = [str(word) for word in (ranks, seed, iterations, start_s, folder)]
        child = subprocess.Popen(
            [sys.executable, "-m", "unjam.gloo_program", *words],
            env=environment,
            stdin=subprocess.PIPE,  # whose end tells the child that nobody waits for it any more
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        lines: list[str] = []
        came = threading.Condition()

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                with came:
                    lines.append(line)
                    came.notify()
            with came:
                lines.append("")
                came.notify()

        def is_over() -> bool:
            return bool(lines) and lines[-1] in ("", "wrong\n")

        reader = threading.Thread(target=read, name="unjam-gloo")
        reader.start()
        try:
            with came:
                came.wait_for(lambda: _sound(lines) or is_over(), start_s)
                if sound := _sound(lines):
                    limit_s = max(limit_s, _SLOW * _RANDOM * sound[1] / iterations)
                    came.wait_for(is_over, limit_s)
                hung = not is_over()
            if lines[-1:] == [""]:
                with suppress(subprocess.TimeoutExpired):  # it is killed then
                    child.wait(_EXIT_S)
        finally:
            child.kill()
            reader.join()
            status = child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        log.seek(0)
        said = log.read()
    if not sound:
        wrote = ("".join(lines) + said).strip()[-_TAIL:] or "silence"
        limit = f" in {start_s:g} s" if hung else ""
        raise RuntimeError(f"gloo could not be run in one order{limit}: {wrote}")
    end, of_gloo = _end_of(lines, hung, status, said)
    return GlooTry(iterations, sound[0], sound[1], end, of_gloo, limit_s)


def _end_of(lines: list[str], hung: bool, status: int, said: str) -> tuple[str, str]:
    """How the calls in disorder ended, and what gloo said of it."""
    of_gloo = gloo_words(said)
    if "wrong\n" in lines:
        return "wrong", of_gloo
    if lines.count("random\n") == _RANDOM:
        return "completed", of_gloo
    if hung:
        return "hung", of_gloo
    if of_gloo or status == -signal.SIGABRT:
        return "broke", of_gloo
    return "failed", f"status {status}; {said.strip()[-_TAIL:] or 'silence'}"


def _sound(lines: list[str]) -> tuple[int, float] | None:
    """How many results were right in one order, and the seconds, once the child has told."""
    for line in lines:
        name, *numbers = line.split() or [""]
        if name == "consistent" and len(numbers) == 2:
            return int(numbers[0]), float(numbers[1])
    return None


def gloo_words(log: str) -> str:
    """Of what gloo writes as it ends its process, or as an error, the sentence."""
    found = re.search(r"\[(?:enforce fail at [^\]]*|\S*/gloo/\S+:\d+)\] *(.*)", log)
    return found[1].strip() if found else ""


# ---- the child ----


def main(words: Sequence[str]) -> None:
    """Is the child."""
    ranks, seed, iterations = (int(word) for word in words[:3])
    start_s, folder = float(words[3]), words[4]
    # This comes before torch, whose import takes seconds.
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    import torch
    import torch.distributed as dist

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its end is no crash to be looked into
    torch.set_num_threads(1)
    store = str(Path(folder) / "store")
    orders = consistent_orders(seed, _WARM_UP + iterations, ranks, len(SIZES))
    mixed = random_orders(seed, _RANDOM, ranks, len(SIZES))
    meet = threading.Barrier(ranks)
    wrong = [0] * ranks

    def rank(number: int) -> None:
        limit = datetime.timedelta(seconds=start_s)
        group = dist.ProcessGroupGloo(  # type: ignore[attr-defined]
            dist.FileStore(store, ranks), number, ranks, limit
        )
        buffers = [[torch.ones(size // 4) for size in SIZES] for _ in range(_BATCH)]
        _stretch(group, buffers, orders[:_WARM_UP, number], meet, start_s)
        seconds = 0.0
        for first in range(_WARM_UP, _WARM_UP + iterations, _BATCH):
            batch = orders[first : first + _BATCH, number]
            for of_iteration in buffers[: len(batch)]:
                for tensor in of_iteration:
                    tensor.fill_(number + 1)
            seconds += _stretch(group, buffers, batch, meet, start_s)
            wrong[number] += _wrong(buffers[: len(batch)], ranks)
        meet.wait(start_s)
        if number == 0:
            if any(wrong):
                raise RuntimeError("wrong results in one order")
            print("consistent", iterations * ranks * len(SIZES), seconds, flush=True)
        for place in range(_RANDOM):
            for tensor in buffers[0]:
                tensor.fill_(number + 1)
            _stretch(group, buffers, mixed[place : place + 1, number], meet, start_s)
            wrong[number] = _wrong(buffers[:1], ranks)
            meet.wait(start_s)
            if number == 0:
                print("wrong" if any(wrong) else "random", flush=True)

    def watched(number: int) -> None:
        try:
            rank(number)
        except BaseException:
            meet.abort()
            raise

    threads = [threading.Thread(target=watched, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_with_parent(folder: str) -> None:
    """The parent holds the other end of stdin, and says nothing; the folder was its to remove."""
    while os.read(0, 1):  # sys.stdin has a lock, which the interpreter's end would not get
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _stretch(
    group: Any, buffers: list[list[Any]], orders: Orders, meet: threading.Barrier, start_s: float
) -> float:
    """Iterations of one rank; the seconds until all ranks have done them."""
    meet.wait(start_s)
    start = time.perf_counter()
    for tensors, order in zip(buffers, orders, strict=False):
        works = [group.allreduce(tensors[key]) for key in order]
        for work in works:
            work.wait()
    meet.wait(start_s)
    return time.perf_counter() - start


def _wrong(buffers: list[list[Any]], ranks: int) -> int:
    total = ranks * (ranks + 1) // 2
    return sum(not bool((tensor == total).all()) for tensors in buffers for tensor in tensors)


if __name__ == "__main__":
    main(sys.argv[1:])
