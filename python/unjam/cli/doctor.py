"""doctor: whether unjam works on this machine, a line a part, and the cure where it does not.

A line is ✓ (works), ✗ (does not, with the cure) or · (not there, and nothing needs it). The exit
status is 1 if any line is ✗.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .. import _lib
from .._errors import UnjamError
from .._nccl_library import nccl_library
from .._version import __version__
from ..context import Context, init_all
from ..cuda import driver, gpus
from ..threads import run_ranks
from ._console import print_json

OK, WRONG, ABSENT = "ok", "wrong", "absent"
_MARKS = {OK: "✓", WRONG: "✗", ABSENT: "·"}
_WAIT_S = 30.0
_TORCH = ((2, 11), (2, 15))  # the oldest and the newest that unjam is tried with
_LEAST_SHM = 64 << 20  # what Docker gives by default, in which torch's data loaders fail
_LEAST_FILES = 1024
_FILES_A_RANK = 8  # descriptors: of memory and connections, an upper bound
# Of the text that a libnccl.so.2 without a CUDA part has for who calls it.
WITHOUT_CUDA = b"built without its CUDA part"
_GPU_RANKS = 8  # of the trial on GPUs at most


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        what: the part that was looked at.
        state: OK, WRONG or ABSENT.
        text: what was found.
        cure: what to do, if it is wrong or absent.
    """

    what: str
    state: str
    text: str
    cure: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the findings, each as soon as it is there."""
    found: list[Line] = []
    for look in CHECKS:
        line = look()
        found.append(line)
        if not options.json:
            print(text_of(line), flush=True)
    if options.json:
        print_json([asdict(line) for line in found])
    return int(any(line.state == WRONG for line in found))


def text_of(line: Line) -> str:
    """A finding as it is printed; the cure on a line of its own."""
    text = f"{_MARKS[line.state]:<2} {line.what:<11} {line.text}"
    return f"{text}\n{'':<15}{line.cure}" if line.cure else text


# ---- unjam itself ----


def version_line() -> Line:
    """Package and library, which must be of one version."""
    try:
        text = f"unjam {__version__}, {_lib.library_path()} {_lib.library_version()}"
    except UnjamError as error:
        return Line("version", WRONG, f"unjam {__version__}, no library", str(error))
    return Line("version", OK, text)


def host_line() -> Line:
    """Two ranks that are threads add numbers in memory."""

    def rank(context: Context) -> float:
        data = np.full(1000, context.rank + 1, dtype=np.float32)
        context.group(name="doctor").all_reduce(data, key="doctor").wait(_WAIT_S)
        return float(data.sum())

    start = time.perf_counter()
    try:
        with init_all(2, device="host") as contexts:
            sums = run_ranks(contexts, rank)
    except (UnjamError, TimeoutError) as error:
        return Line("host device", WRONG, str(error), "run `unjam env` and see what is set")
    if sums != [3000.0, 3000.0]:
        return Line("host device", WRONG, f"wrong sums: {sums}", "report this as a bug")
    milliseconds = 1000 * (time.perf_counter() - start)
    return Line("host device", OK, f"an all-reduce of 2 ranks is right, {milliseconds:.0f} ms")


def environment_line() -> Line:
    """Variables that nobody reads. (What they say is looked at by the trials of the devices.)"""
    unknown = [variable for variable in _lib.environment() if variable["read_by"] == "nobody"]
    if unknown:
        return Line("environment", WRONG, "; ".join(variable["doc"] for variable in unknown))
    ours = sorted(name for name in os.environ if name.startswith("UNJAM_"))
    if not ours:
        return Line("environment", OK, "no UNJAM_ variable is set")
    return Line("environment", OK, "set: " + ", ".join(ours))


# ---- GPUs ----


def cuda_part_line() -> Line:
    """libunjam_cuda.so."""
    if gpus.cuda_part():
        return Line("CUDA part", OK, str(_lib.library_path().with_name("libunjam_cuda.so")))
    serves = any(not gpu.too_old for gpu in driver.look().gpus)
    text = "libunjam_cuda.so is not installed: unjam works on CPU tensors only"
    cure = "install the +cu13 wheel, or a checkout by UNJAM_CUDA=ON pip install ."
    return Line("CUDA part", WRONG if serves else ABSENT, text, cure if serves else "")


def driver_line() -> Line:
    """NVIDIA's driver."""
    return driver_finding(driver.look())


def driver_finding(machine: driver.Machine) -> Line:
    """What there is to say of the driver."""
    if not machine.cuda:
        return Line("driver", ABSENT, machine.lacks)
    if machine.cuda < driver.LEAST:
        text = f"the driver knows CUDA {machine.cuda_text}, unjam needs 13.0"
        cure = "install NVIDIA's driver 580 or newer"
        return Line("driver", WRONG if gpus.cuda_part() else ABSENT, text, cure)
    return Line("driver", OK, f"CUDA {machine.cuda_text}")


def gpus_line() -> Line:
    """The GPUs that this process sees."""
    return gpus_finding(driver.look())


def gpus_finding(machine: driver.Machine) -> Line:
    """What there is to say of the GPUs."""
    if not machine.gpus:
        cure = ""
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            cure = "CUDA_VISIBLE_DEVICES is empty: unset it if there are GPUs"
        return Line("GPUs", ABSENT, machine.lacks or "none", cure)
    names = [gpu.name for gpu in machine.gpus]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if old := [gpu for gpu in machine.gpus if gpu.too_old]:
        capability = "{}.{}".format(*old[0].capability)
        cure = f"{old[0].name} has compute capability {capability}, unjam needs 8.0 (A100) or newer"
        return Line("GPUs", WRONG, text, cure)
    if any(gpu.too_new for gpu in machine.gpus):
        text += " (untested: the driver translates kernels made for H100s)"
    return Line("GPUs", OK, text)


def peers_line() -> Line:
    """Whether GPUs reach each other's memory."""
    return peers_finding(driver.look())


def peers_finding(machine: driver.Machine) -> Line:
    """What there is to say of peer access."""
    count = len(machine.gpus)
    if count < 2:
        seen = "one GPU is" if count else "no GPU is"
        return Line("peer access", ABSENT, f"{seen} seen: nothing to reach")
    if not machine.unreachable:
        return Line("peer access", OK, f"between all {count} GPUs")
    a, b = machine.unreachable[0]
    cure = "use GPUs that `nvidia-smi topo -p2p r` shows as OK, by CUDA_VISIBLE_DEVICES"
    text = f"GPU {a} does not reach GPU {b} ({len(machine.unreachable)} such pairs)"
    return Line("peer access", WRONG, text, cure)


def gpu_trial_line() -> Line:
    """All GPUs that are seen meet in a barrier."""
    machine = driver.look()
    if not machine.gpus or not gpus.cuda_part():
        return Line("GPU trial", ABSENT, "not run: it needs a GPU and the CUDA part")
    ranks = min(len(machine.gpus), _GPU_RANKS)

    memory: list[dict[str, Any]] = []

    def rank(context: Context) -> None:
        context.group(name="doctor").barrier(key="doctor").synchronize(_WAIT_S)
        memory.append(context.info()["memory"])

    start = time.perf_counter()
    try:
        with init_all(ranks, device="cuda") as contexts:
            run_ranks(contexts, rank)
    except (UnjamError, TimeoutError) as error:
        return Line("GPU trial", WRONG, "the GPUs do not meet", str(error))
    return gpu_trial_finding(ranks, time.perf_counter() - start, memory[0])


def gpu_trial_finding(ranks: int, seconds: float, memory: dict[str, Any]) -> Line:
    """What there is to say of GPUs that have met.

    Args:
        ranks: so many, one each.
        seconds: from the start to the end.
        memory: a rank's, as Context.info() has it.
    """
    if ranks == 1:
        return Line("GPU trial", OK, f"a barrier of one, {seconds:.1f} s with start and end")
    first = memory["neighbour_first_bytes"] >> 20
    most = memory["neighbour_most_bytes"] >> 20
    text = f"{ranks} met in {seconds:.1f} s; {first:,} to {most:,} MiB of each for a neighbour"
    return Line("GPU trial", OK, text)


# ---- torch ----


def torch_line() -> Line:
    """PyTorch, and the adapter for it."""
    if importlib.util.find_spec("torch") is None:
        return Line("torch", ABSENT, "not installed: nothing here needs it but the torch backend")
    import torch

    text = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    minor = tuple(int(part) for part in numbers if part.isdecimal())
    if not _TORCH[0] <= minor:
        return Line("torch", WRONG, text, "the backend needs torch 2.11 or newer")
    if minor > _TORCH[1]:
        return Line("torch", OK, f"{text} (newer than the 2.15 that unjam is tried with)")
    return Line("torch", OK, text)


def adapter_line() -> Line:
    """The adapter between unjam and the installed torch: ready, or what compiling it takes."""
    if importlib.util.find_spec("torch") is None:
        return Line("adapter", ABSENT, "torch is not installed")
    try:
        from ..torch import _extension
    except (ImportError, OSError) as error:
        return Line("adapter", WRONG, f"torch does not start: {error}", "install torch anew")
    try:
        return adapter_finding(_extension)
    except (RuntimeError, UnjamError) as error:
        return Line("adapter", WRONG, "it cannot be used", str(error))


def adapter_finding(extension: ModuleType | Any) -> Line:
    """What there is to say of the adapter, by ``unjam.torch._extension``."""
    path = extension.library_file()
    if Path(path).exists():
        return Line("adapter", OK, f"ready: {path}")
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    header = Path(extension.target().python_include) / "Python.h"
    lacks = [
        package
        for package, there in (("g++", compiler), ("python3-dev", header.exists()))
        if not there
    ]
    text = "is compiled at the first process group, once: about a minute"
    if lacks:
        cure = f"apt-get install {' '.join(lacks)}, or a wheel that holds it for this torch"
        return Line("adapter", WRONG, "has to be compiled, and cannot be", cure)
    return Line("adapter", OK, text)


# ---- NCCL's interface ----


def nccl_line() -> Line:
    """libnccl.so.2, for programs that call NCCL by name."""
    try:
        path = nccl_library()
    except UnjamError as error:
        return Line("NCCL", ABSENT, "no libnccl.so.2 of unjam's", str(error))
    return nccl_finding(path, cuda=any(not gpu.too_old for gpu in driver.look().gpus))


def nccl_finding(path: Path, cuda: bool) -> Line:
    """What there is to say of the library, which is not loaded for that: it sets variables.

    Args:
        path: the file.
        cuda: whether there are GPUs for it.
    """
    if WITHOUT_CUDA not in path.read_bytes():
        return Line("NCCL", OK, f"with its CUDA part, for unjam run -- PROGRAM: {path}")
    text = f"without its CUDA part, for programs on host memory only: {path}"
    cure = "install the +cu13 wheel, or build where nvcc 13 is found"
    return Line("NCCL", WRONG if cuda else ABSENT, text, cure if cuda else "")


# ---- the system ----


def limits_line() -> Line:
    """/dev/shm, which torch's data loaders need, and descriptors, of which unjam takes some."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limits_finding(shm.free if shm else 0, files)


def limits_finding(shm_free: int, files: int) -> Line:
    """What there is to say of limits.

    Args:
        shm_free: bytes free in /dev/shm.
        files: descriptors that a process may have; -1: any number.
    """
    many = "any number of" if files == resource.RLIM_INFINITY else f"{files:,}"
    text = f"/dev/shm has {shm_free / (1 << 30):.1f} GiB free, {many} open files"
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        ranks = files // _FILES_A_RANK
        return Line("limits", WRONG, text, f"ulimit -n 65536 (now enough for some {ranks} ranks)")
    if shm_free <= _LEAST_SHM:  # no fault of unjam's, and no hindrance
        cure = "torch's data loaders want more: docker run --shm-size=8g"
        return Line("limits", ABSENT, text, cure)
    return Line("limits", OK, text)


CHECKS: tuple[Callable[[], Line], ...] = (
    version_line,
    host_line,
    environment_line,
    cuda_part_line,
    driver_line,
    gpus_line,
    peers_line,
    gpu_trial_line,
    torch_line,
    adapter_line,
    nccl_line,
    limits_line,
)
