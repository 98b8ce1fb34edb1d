"""Ranks as processes: workers written as functions of a test file, run as scripts of their own.

A worker is a function whose source is sent to a new interpreter, so it sees only its arguments and
what the prelude gives it: unjam, np, some modules, and what is in rank_tools.py, as ``say(value)``
and ``hear()`` to talk with the test. Whatever happens in the test, no worker outlives it; if it
fails, what the workers wrote to stderr is shown.
"""

import functools
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import unjam
from nursery import Nursery
from rank_tools import puppet_main

# For whatever should be done at once: generous, since the machine may be shared.
SOON_S = 40

PRELUDE = """
import json, os, threading, time
import numpy as np
import unjam
from rank_tools import error_of, hear, puppet_main, run_all, say
"""

PLACES = ("UNJAM_LIBRARY", "UNJAM_TORCH_BUILD", "UNJAM_PYTHON_INCLUDE")

# What launchers leave in the environment: a test sets its own.
LAUNCH_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_RESTART_COUNT PMI_RANK PMI_SIZE PMI_JOBID MPI_LOCALNRANKS PMIX_NAMESPACE "
    "OMPI_MCA_ess_base_jobid"
).split()


def environment(**changes):
    """This process's, without what unjam reads (but where its parts lie), and with `changes`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (name in PLACES or not name.startswith("UNJAM_"))
        and not name.startswith(("SLURM_", "OMPI_COMM_"))
        and name not in LAUNCH_VARIABLES
    }
    here = Path(__file__).resolve().parent
    paths = [str(Path(unjam.__file__).resolve().parents[1]), str(here), kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    kept["OMP_NUM_THREADS"] = "1"
    kept.update({name: str(value) for name, value in changes.items()})
    return kept


def script(worker, *arguments):
    """The worker's program."""
    source = textwrap.dedent(inspect.getsource(worker))
    call = f"{worker.__name__}(*json.loads({json.dumps(arguments)!r}))"
    return f"{PRELUDE}\n{source}\n{call}\n"


def started(command, env, output=None):
    """The command as a process. `output`: the file that its output goes to; else its streams are
    pipes."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE if output is None else subprocess.DEVNULL,
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.PIPE if output is None else output,
        text=True,
        start_new_session=True,  # what it starts is killed with it
    )


@functools.cache
def nursery():
    """This test process's own."""
    # (Where there is Triton, torch would start compilers, and threads, when it is imported.)
    return Nursery(environment(TORCH_WARM_POOL="0"))


def started_with_torch(program, env, output=None):
    """The same of a Python program: forked from a process that has imported torch, and so seconds
    sooner. Where there are GPUs a fresh interpreter: the tests hung there on 2 H200s, before a rank
    said a word, and what torch does with GPUs when it is imported is not to be shared."""
    if Path("/proc/driver/nvidia").exists():
        return started([sys.executable, "-c", program], env, output)
    return nursery().start(program, env, output)


class Process:
    """A worker that runs."""

    def __init__(self, process, name):
        self.name = name
        self.stderr = ""
        self._said = queue.Queue()
        self._process = process
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self):
        return self._process.pid

    def _read_out(self):
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put(None)

    def _read_err(self):
        for line in self._process.stderr:
            self.stderr += line

    def said(self, seconds=SOON_S):
        """The next value that it says."""
        try:
            line = self._said.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"{self.name} says nothing for {seconds} s") from None
        assert line is not None, f"{self.name} ended without a word:\n{self.stderr}"
        return json.loads(line)

    def has_said(self):
        """Whether said() would not wait."""
        return not self._said.empty()

    def tell(self, value=None):
        """What its next hear() gives."""
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def wait(self, seconds=SOON_S):
        """Its exit status."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end within {seconds} s") from None
        for reader in self._readers:
            reader.join(seconds)
        return code

    def ends(self, seconds=SOON_S):
        """It ends in good order."""
        code = self.wait(seconds)
        assert code == 0, f"{self.name} ended with {code}:\n{self.stderr}"

    def wait_for_stderr(self, text, seconds=SOON_S):
        """Waits until it has written this to stderr; gives all that it wrote."""
        end = time.monotonic() + seconds
        while text not in self.stderr:
            assert time.monotonic() < end, f"no {text!r} on stderr of {self.name}:\n{self.stderr}"
            time.sleep(0.02)
        return self.stderr

    def signal(self, number):
        os.kill(self.pid, number)

    def stop(self, seconds=SOON_S):
        """SIGSTOP, and waits until each of its threads stands."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + seconds
        tasks = Path(f"/proc/{self.pid}/task")

        def states():
            try:
                return {t.read_text().rpartition(")")[2].split()[0] for t in tasks.glob("*/stat")}
            except OSError:  # a thread has ended meanwhile
                return set()

        while states() != {"T"}:
            assert time.monotonic() < end, f"{self.name} does not stop"
            time.sleep(0.01)

    def kill(self):
        """And all that it started."""
        if self._process.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()
        for reader in self._readers:
            reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            try:
                pipe.close()
            except BrokenPipeError:
                pass


class Harness:
    """Starts workers; made by workers()."""

    def __init__(self):
        self.all = []

    def start(self, worker, *arguments, command=(), name=None, **env):
        """One process; `command`: what starts it, such as mpirun."""
        words = [*command, sys.executable, "-c", script(worker, *arguments)]
        return self._add(started(words, environment(**env)), name)

    def start_with_torch(self, worker, *arguments, name=None, **env):
        """As start(); see started_with_torch()."""
        program = script(worker, *arguments)
        return self._add(started_with_torch(program, environment(**env)), name)

    def _add(self, process, name):
        self.all.append(Process(process, name or f"process {len(self.all)}"))
        return self.all[-1]

    def run(self, command, **env):
        """Any command."""
        return self._add(started(command, environment(**env)), command[0])

    def job(self, ranks, worker, *arguments, **env):
        """A process for each rank, in a job of their own."""
        unique = unjam.unique_id().rstrip(b"\0").hex()
        return [
            self.start(
                worker,
                *arguments,
                name=f"rank {rank}",
                **{"UNJAM_ID": unique, "UNJAM_RANK": rank, "UNJAM_RANKS": ranks, **env},
            )
            for rank in range(ranks)
        ]


@contextmanager
def workers():
    """Gives a Harness."""
    harness = Harness()
    failed = True
    try:
        yield harness
        failed = False
    finally:
        for process in harness.all:
            process.kill()
        if failed:
            for process in harness.all:
                print(f"---- stderr of {process.name} (pid {process.pid}):\n{process.stderr}")


class Puppet:
    """One of puppets()."""

    def __init__(self, process):
        self.process = process

    def outcome(self, text):
        """[None, value] or [type of the error, message]."""
        self.process.tell(text)
        return self.process.said()

    def do(self, text):
        """The value."""
        kind, value = self.outcome(text)
        assert kind is None, f"{self.process.name}: {text} raised {kind}: {value}"
        return value

    def fails(self, text):
        """The error's type and message."""
        kind, value = self.outcome(text)
        assert kind is not None, f"{self.process.name}: {text} gave {value}, and no error"
        return kind, value

    def end(self):
        self.process.tell(None)
        self.process.ends()


def tell_all(ranks, text):
    """As Puppet.do() of each, but all begin before the first has answered."""
    for rank in ranks:
        rank.process.tell(text)
    for rank in ranks:
        kind, value = rank.process.said()
        assert kind is None, f"{rank.process.name}: {text} raised {kind}: {value}"


def puppets(harness, ranks, config=None, **env):
    """A job of puppets, ready."""
    processes = harness.job(ranks, puppet_main, config or {}, **env)
    for process in processes:
        assert process.said() == "ready"
    return [Puppet(process) for process in processes]
