"""Starts ranks that have imported torch already: that takes a rank three seconds, and as long again
where torch compiles, or DistributedDataParallel is used.

A process of this file imports torch and forks when it is asked to. What it has forked takes on the
streams, environment and program that it was given, and is from then on what ``python -c PROGRAM``
would be: a process and a process group, with one thread, that has loaded nothing of unjam's but
Python. Not for programs whose environment torch or unjam read when they are imported.

The part of the tests is class Nursery.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

MOST_BYTES = 1 << 17  # of a request
ANSWER_S = 200  # it may still be importing torch, on a machine that does much else


class Born:
    """A process of a nursery, as far as subprocess.Popen is used."""

    def __init__(self, pid, stdin, stdout, stderr):
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode = None
        self._ended = threading.Event()

    def ended(self, code):
        self.returncode = code
        self._ended.set()

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=None):
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode


class Nursery:
    """Where the tests ask for processes."""

    def __init__(self, env):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._born = threading.Condition()
        self._pids = []
        self._children = {}
        self._statuses = {}  # of those that ended before they were known here
        self._gone = False
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._end)

    def start(self, program, env, output=None):
        """A process that runs this text. Its streams are pipes, of text; or, where there is a file
        for its output, that and nothing to read."""
        if output is None:
            ends = [os.pipe() for _ in range(3)]
            theirs = [ends[0][0], ends[1][1], ends[2][1]]
            ours = [
                os.fdopen(fd, mode)
                for fd, mode in ((ends[0][1], "w"), (ends[1][0], "r"), (ends[2][0], "r"))
            ]
        else:
            nothing = os.open(os.devnull, os.O_RDONLY)
            theirs = [nothing, os.dup(output.fileno()), os.dup(output.fileno())]
            ours = [None] * 3
        try:
            with self._lock:
                request = json.dumps({"program": program, "env": env}).encode()
                assert len(request) < MOST_BYTES
                socket.send_fds(self._socket, [request], theirs)
                with self._born:
                    self._born.wait_for(lambda: self._pids or self._gone, ANSWER_S)
                    if not self._pids:
                        self._close()  # an answer that came late would be taken for the next one's
                        raise RuntimeError("the nursery has ended, or does not answer")
                    child = Born(self._pids.pop(), *ours)
                    self._children[child.pid] = child
                    if child.pid in self._statuses:
                        child.ended(self._statuses.pop(child.pid))
        except BaseException:
            for end in ours:
                if end is not None:
                    end.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return child

    def _close(self):
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has died
            pass

    def _end(self):
        self._close()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _listen(self):
        try:
            while said := self._socket.recv(1000):
                self._hear(*json.loads(said))
        except OSError:  # it has died with a request that it had not read
            pass
        with self._born:
            self._gone = True
            self._born.notify_all()
            for child in self._children.values():  # nobody will tell of them
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
                child.ended(-signal.SIGKILL)

    def _hear(self, word, pid, status):
        with self._born:
            if word == "born":
                self._pids.append(pid)
                self._born.notify_all()
            elif pid in self._children:
                self._children.pop(pid).ended(status)
            else:
                self._statuses[pid] = status


# ---- the nursery ----


def serve(number):
    """In a process that was forked: its program. Ends with the tests."""
    import numpy  # noqa: F401 - before it is needed
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401
    import torch.distributed  # noqa: F401

    gc.freeze()  # or each process would copy what it merely collects
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a fork would leave the other threads behind"
    asked = socket.socket(fileno=number)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([asked, wake], [], [])
        if wake in ready:
            wake.recv(1000)
            report_ended(asked)
        if asked not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(asked, MOST_BYTES, 3)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for end in (asked, wake, woken):
                end.close()
            return become(json.loads(request), fds)
        own_group(pid)  # here as well: whoever knows of it may kill its group
        for fd in fds:
            os.close(fd)
        asked.send(json.dumps(["born", pid, None]).encode())


def own_group(pid):
    try:
        os.setpgid(pid, 0)
    except (ProcessLookupError, PermissionError):  # it has ended, or made a group of its own
        pass


def report_ended(asked):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        asked.send(json.dumps(["ended", pid, code]).encode())


def become(request, fds):
    """Gives the program."""
    own_group(0)
    for stream, fd in enumerate(fds):
        os.dup2(fd, stream)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c"]
    places = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = ["", *places, *(p for p in sys.path[1:] if p not in places)]
    return request["program"]


if __name__ == "__main__":
    program = compile(serve(int(sys.argv[1])), "<string>", "exec")
    # As an interpreter has it that has done nothing yet.
    for name in [n for n in globals() if not n.startswith("__") and n != "program"]:
        del globals()[name]
    del name, __file__
    exec(program)
