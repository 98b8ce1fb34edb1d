"""What the tests share: a job per test whose ranks run as threads, and commands in subprocesses."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import unjam

# What a shell starts in the background ignores SIGINT, and its children would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[2]

# Files that take long, the longest first, so that no worker is left alone with one at the end.
# Those with torch are not the very first: they need an adapter that tools/ci.py has just begun to
# compile.
LONG_FILES = (
    "test_bench",
    "test_cli",
    "test_processes",
    "test_bench_cuda",
    "test_torch_backend",
    "test_torch_training",
    "test_wheel",
    "test_torch_benches",
    "test_docs_commands",
    "test_docs",
    "test_torch_gpus",
    "test_memory",
    "test_simulate",
    "test_explain",
)


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    # What is imported stays. With torch that is so much that each gc.collect() of a rank that is a
    # thread here takes longer than what it measures.
    gc.collect()
    gc.freeze()


@pytest.fixture
def launch():
    """``launch(nranks, function, **config)``: as unjam.launch, with a group of all ranks made."""

    def run(nranks, function, **config):
        return unjam.launch(nranks, lambda context: function(context, context.group()), **config)

    return run


@pytest.fixture
def pair():
    """Two contexts and their groups of all ranks, used by one thread: calls do not block."""
    with unjam.init_all(2) as contexts:
        yield contexts, [context.group() for context in contexts]


@pytest.fixture(scope="session")
def adapter():
    """torch's adapter is compiled: before the time of a test, without its fixtures, begins."""
    from torch_tools import build_adapter

    build_adapter()


@pytest.fixture
def python():
    """``python(code or arguments…)``: runs Python with this package, gives the finished process."""

    def run(*arguments, cwd=None, timeout=280):
        environment = dict(os.environ)
        paths = [str(Path(unjam.__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def header():
    """The text of the C header."""
    path = ROOT / "include" / "unjam" / "unjam.h"
    if not path.is_file():
        pytest.skip("the header is not beside the tests")
    return path.read_text()
