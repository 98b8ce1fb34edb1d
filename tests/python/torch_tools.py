"""Ranks that run a list of checks on torch.distributed, for tests of what stands on a backend.

`import torch` costs seconds, so one launch runs many checks: each rank goes through the list, in
fresh process groups, and writes down what each check returned. Between two checks the ranks meet in
a store of their own, not in the backend: who hangs is found there, named with its Python stacks,
and the launch goes on without that check. How long a launch takes is the machine's affair: what is
limited is the time in which nobody gets on.

    results = run(2, [("gloo", "ddp"), ("unjam", "ddp")], folder)
    results["unjam", "ddp"][rank]        # what it returned, or raises Failed

The checks are functions of training_checks.py.
"""

import datetime
import faulthandler
import functools
import json
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from processes import environment, started_with_torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "torch"
# All of them are there to catch hangs, on a machine that is shared: an idle one needs a hundredth.
START_S = 300  # until the ranks have imported torch and met
CHECK_S = 150  # one check on all ranks; and as long for a rank to be missed at its end
STILL_S = 2 * CHECK_S + 50  # a launch in which no report grows: before, the ranks themselves end it
RUN_S = 1200  # all launches of a run together
BUILD_S = 1800
HANGS = 3  # after so many, the rest is not tried


class Failed(AssertionError):
    """What went wrong on the ranks."""


class Results:
    def __init__(self, ranks):
        self.ranks = ranks
        self._found = {}
        self.seconds = {}
        self.problems = {}  # (backend, check) -> words

    def __getitem__(self, job):
        if job in self.problems:
            raise Failed(f"{job[1]} with {job[0]}, {self.ranks} ranks: {self.problems[job]}")
        if job not in self._found:
            raise Failed(f"{job[1]} with {job[0]}, {self.ranks} ranks: not run")
        return self._found[job]

    def add(self, job, reports):
        errors = [f"rank {r}: {w['error']}" for r, w in enumerate(reports) if w["error"]]
        if errors:
            self.problems[job] = "\n".join(errors)
        self._found[job] = [w["value"] for w in reports]
        self.seconds[job] = max(w["seconds"] for w in reports)


def run(ranks, jobs, folder):
    """Runs the jobs, pairs (backend, check), on so many ranks."""
    results = Results(ranks)
    todo = list(jobs)
    if any(backend == "unjam" for backend, _ in todo):
        build_adapter()
    end = time.monotonic() + RUN_S
    for attempt in range(HANGS):
        if not todo or time.monotonic() > end:
            break
        place = folder / f"launch{attempt}"
        place.mkdir()
        words = launch(ranks, todo, place, end)
        done = collect(ranks, place)
        for job, reports in zip(todo, done, strict=False):
            results.add(job, reports)
        todo = todo[len(done) :]
        if todo:  # the next one did not come to its end
            results.problems[todo.pop(0)] = words
    for job in todo:
        results.problems[job] = "not tried, as others before it did not end"
    return results


@functools.cache
def build_adapter():
    """unjam's part in C++ is compiled at the first use: before limits for ranks begin."""
    words = subprocess.run(
        [sys.executable, "-c", "import unjam.torch._extension as e; e.extension()"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    assert words.returncode == 0, words.stderr


def make_store():
    """A store of this process, for ranks that it starts; they get its ``port``.

    The port is bound as long as the store is there. One that was merely found free may be somebody
    else's by the time that a rank has imported torch and binds it.
    """
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_store(port, ranks):
    """In a rank: that store, when all ranks are there and have unjam's adapter loaded.

    They come seconds apart, since torch's import takes long: a process group with a short time
    limit, which counts for joining it too, would not wait for the last.
    """
    import torch.distributed as dist

    from unjam.torch import _extension

    _extension.extension()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds(START_S))
    meet(store, "start", ranks)
    return store


def collect(ranks, place):
    """For each job that all ranks ended: each rank's report."""
    lines = []
    for rank in range(ranks):
        path = place / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines.append([json.loads(x) for x in text.splitlines()])
    return list(zip(*lines, strict=False))


def launch(ranks, jobs, place, end):
    """Starts the ranks and waits for them: "" or what all of them said."""
    (place / "jobs.json").write_text(json.dumps(jobs))
    env = environment(GLOO_SOCKET_IFNAME="lo")
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{EXAMPLES}:{EXAMPLES / 'recipes'}"
    errors = [(place / f"rank{r}.err").open("w+") for r in range(ranks)]
    processes = [
        started_with_torch(
            f"import torch_tools\ntorch_tools.rank_main({str(place)!r}, {rank}, {ranks})\n",
            env,
            errors[rank],
        )
        for rank in range(ranks)
    ]
    try:
        codes = wait(processes, [place / f"rank{r}.jsonl" for r in range(ranks)], end)
        if not any(codes):
            return ""
        said = []
        for rank, (code, error) in enumerate(zip(codes, errors, strict=True)):
            error.seek(0)
            said.append(f"--- rank {rank}, exit status {code} ---\n{error.read()[-6000:]}")
        return "\n".join(["the ranks did not come to an end:", *said])
    finally:
        for process, error in zip(processes, errors, strict=True):
            process.kill()
            process.wait()
            error.close()


def wait(processes, reports, end):
    """Exit statuses; None for those that had to be killed, and wrote their stacks before.

    They have until `end`, as long as their reports grow.
    """
    seen, still = None, 0.0
    while time.monotonic() < min(end, still or end):
        codes = [p.poll() for p in processes]
        if None not in codes:
            return codes
        if any(codes):  # one gave up: the others are of no use
            end = min(end, time.monotonic() + 3)
        sizes = [path.stat().st_size if path.exists() else -1 for path in reports]
        if sizes != seen:  # -1: torch's import, and the first meeting
            seen, still = sizes, time.monotonic() + STILL_S
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    return [p.poll() for p in processes]


# ---- what a rank does ----


def rank_main(place, rank, ranks):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    place = Path(place)
    import torch
    import torch.distributed as dist

    import training_checks
    from harness import backend as use_backend

    torch.set_num_threads(1)
    jobs = json.loads((place / "jobs.json").read_text())
    store = store_of(dist, place, rank, ranks)
    with (place / f"rank{rank}.jsonl").open("w") as out:
        for number, (backend, check) in enumerate(jobs):
            use_backend(backend)
            print(f"{check} with {backend}", file=sys.stderr, flush=True)
            folder = place / f"{number}-{backend}-{check}"
            folder.mkdir(exist_ok=True)
            here = SimpleNamespace(
                rank=rank, ranks=ranks, backend=backend, keyed=backend == "unjam", folder=folder
            )
            report = {"value": None, "error": ""}
            began = time.monotonic()
            try:
                torch.manual_seed(0)
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore(f"job{number}", store),
                    rank=rank,
                    world_size=ranks,
                    timeout=seconds(CHECK_S),
                )
                assert dist.get_backend() == backend
                report["value"] = getattr(training_checks, check)(here)
            except Exception:
                report["error"] = traceback.format_exc(limit=-8)
                print(report["error"], file=sys.stderr, flush=True)
            meet(store, f"the end of {check}, {number}", ranks, CHECK_S)
            try:
                dist.destroy_process_group()
            except Exception:
                report["error"] += traceback.format_exc(limit=-8)
            meet(store, f"destroy_process_group after {check}, {number}", ranks, CHECK_S)
            report["seconds"] = time.monotonic() - began
            out.write(json.dumps(report) + "\n")
            out.flush()
    store.set(f"left{rank}", "")
    if rank == 0:  # the store is here
        store.wait([f"left{r}" for r in range(ranks)], seconds(CHECK_S))


def store_of(dist, place, rank, ranks):
    """Rank 0's, for the parent has not imported torch: it says in a file which port it got."""
    path = place / "port"
    if rank == 0:
        store = make_store()
        draft = place / "port.draft"
        draft.write_text(str(store.port))
        draft.rename(path)
    else:
        end = time.monotonic() + START_S
        while not path.exists():
            if time.monotonic() > end:
                sys.exit("rank 0 has not made the store")
            time.sleep(0.01)
        port = int(path.read_text())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds(START_S))
    meet(store, "start", ranks)
    return store


def seconds(number):
    return datetime.timedelta(seconds=number)


def meet(store, where, ranks, limit=START_S):
    """Waits for the other ranks, without the backend. Once for each `where`."""
    import torch.distributed as dist

    if store.add(where, 1) == ranks:
        store.set(where + "/all", "")
    try:
        store.wait([where + "/all"], seconds(limit))
    except dist.DistStoreError:
        sys.exit(f"{store.add(where, 0)} of {ranks} ranks came to: {where}")
