"""device="cuda" where it cannot be: an error that names the cause and the cure, never a crash.

Each case is a copy of libunjam.so with another libunjam_cuda.so beside it: none, one that is no
library, one without what libunjam.so looks for, and the real one without a driver or a GPU.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import unjam
from unjam import _lib

# What is tried, in a process of its own: a crash would be seen. First alone, then as one of two.
PROGRAM = textwrap.dedent(
    """
    import json, threading, unjam
    said = []
    def note(make):
        try:
            made = make()
        except unjam.UnjamError as error:
            said.append([type(error).__name__, str(error)])
        else:
            said.append(["nothing", repr(made)])
    for _ in range(2):
        note(lambda: unjam.init_all(2, device="cuda"))
    uid = unjam.unique_id()
    ranks = [
        threading.Thread(target=note, args=(lambda r=r: unjam.init(2, r, uid, device="cuda"),))
        for r in range(2)
    ]
    for thread in ranks: thread.start()
    for thread in ranks: thread.join()
    with unjam.init_all(2) as contexts:  # the host device works as before
        requests = [c.group().all_reduce(bytearray(8), dtype="int32") for c in contexts]
        unjam.wait_all(requests, 50)
    print(json.dumps(said))
    """
)


@pytest.fixture
def attempt(tmp_path):
    """``attempt(file or None)``: what is said with that file as libunjam_cuda.so."""

    def run(cuda_part, **variables):
        shutil.copy(_lib.library_path(), tmp_path / "libunjam.so")
        if cuda_part is not None:
            shutil.copy(cuda_part, tmp_path / "libunjam_cuda.so")
        environment = dict(os.environ) | variables
        environment["UNJAM_LIBRARY"] = str(tmp_path / "libunjam.so")
        environment["PYTHONPATH"] = str(Path(unjam.__file__).resolve().parents[1])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert len(said) == 4
        # Of two that join one by one the second may hear of it from the first.
        assert [name for name, _ in said].count("System") >= 3, said
        assert {name for name, _ in said} <= {"System", "Peer"}, said
        texts = {text for name, text in said if name == "System"}
        assert len(texts) == 1, "the same cause, the same words"
        text = texts.pop()
        assert all(text in other for _, other in said), "a peer is told why"
        return text

    return run


def cuda_library():
    """The real one, wherever this build has it."""
    path = _lib.library_path().with_name("libunjam_cuda.so")
    return path if path.is_file() else None


def test_no_library(attempt):
    text = attempt(None)
    assert "libunjam_cuda.so beside libunjam.so" in text
    assert "No such file" in text
    assert "Build unjam where nvcc 13 is found" in text


def test_no_library_at_all(attempt, tmp_path):
    file = tmp_path / "text"
    file.write_text("no library")
    assert "libunjam_cuda.so" in attempt(file)


def test_another_library(attempt):
    # One that loads and has nothing of what is looked for.
    text = attempt(_lib.library_path())
    assert "another version" in text
    assert "install both libraries together" in text


@pytest.mark.skipif(cuda_library() is None, reason="built without the CUDA part")
@pytest.mark.parametrize("visible", [None, "", "none"])
def test_no_driver_or_no_device(attempt, visible):
    if visible is None and Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver, and maybe a GPU")
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    text = attempt(cuda_library(), **variables)
    assert "no CUDA device" in text
    assert "cudaGetDeviceCount" in text  # and what CUDA says
    assert "driver" in text
    assert "UNJAM_DEVICE=host" in text
