"""libnccl.so.2 of unjam: what it exports, who finds it, and a program of two processes on it."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from processes import SOON_S, environment
from unjam._errors import LibraryError
from unjam._nccl_library import environment_with, nccl_library
from unjam.cli import doctor, main

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "nccl"


def _listed(name):
    return set((FIXTURES / name).read_text().split())


def _symbols(path, *options):
    printed = subprocess.run(
        ["nm", "-D", *options, str(path)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].partition("@")[0] for line in printed.stdout.splitlines()}


def test_exports_are_those_of_nccl_and_no_others():
    # As readelf and nm show them of NVIDIA's 2.28.9, and what torch 2.11.0 takes of them.
    expected = _listed("exports-2.28.9.txt") | _listed("imports-torch-2.11.0.txt")
    assert _symbols(nccl_library(), "--defined-only") == expected


def test_the_lists_are_of_the_libraries_that_are_here():
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations) if spec else []
    theirs = [p for f in folders if (p := Path(f) / "nccl" / "lib" / "libnccl.so.2").is_file()]
    if not theirs:
        pytest.skip("NVIDIA's NCCL is not installed")
    found = {name for name in _symbols(theirs[0], "--defined-only") if "nccl" in name}
    if found != _listed("exports-2.28.9.txt"):
        assert "2.28.9" not in str(list(Path(folders[0]).parent.glob("nvidia_nccl*")))
    torch = importlib.util.find_spec("torch")
    cuda = Path(torch.origin).parent / "lib" / "libtorch_cuda.so" if torch else None
    if cuda is not None and cuda.is_file():
        wanted = {n for n in _symbols(cuda, "--undefined-only") if n.startswith("nccl")}
        assert wanted <= _listed("exports-2.28.9.txt")


def test_the_page_has_a_row_for_each_function():
    page = (ROOT / "docs" / "nccl.md").read_text()
    rows = re.findall(r"^\| `(nccl\w+)` \| (?:served|refused) \|", page, re.MULTILINE)
    exported = {n for n in _listed("exports-2.28.9.txt") if not n.startswith("pnccl")}
    assert len(rows) == len(set(rows))
    # (The last is of NVIDIA's own parts.)
    assert set(rows) == exported - {"ncclResetDebugInitInternal"}


def test_types_are_those_of_the_header():
    spec = importlib.util.find_spec("nvidia")
    folder = Path(next(iter(spec.submodule_search_locations))) if spec else None
    compiler = shutil.which("g++")
    if folder is None or compiler is None or not (folder / "nccl/include/nccl.h").is_file():
        pytest.skip("nccl.h is not here")
    includes = [folder / "nccl" / "include", *folder.glob("cu1*/include"), ROOT / "src"]
    if not any((path / "cuda_runtime.h").is_file() for path in includes):
        pytest.skip("CUDA's headers are not here")
    command = [compiler, "-std=c++20", "-fsyntax-only", *(f"-I{path}" for path in includes)]
    source = ROOT / "tests" / "nccl" / "abi_check.cc"
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- programs ----

PROGRAM = """
import ctypes, json, os, sys, time
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_void_p

nccl = ctypes.CDLL("libnccl.so.2")  # whose it is decides who starts this


class Id(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


nccl.ncclCommInitRank.argtypes = [POINTER(c_void_p), c_int, Id, c_int]
nccl.ncclAllReduce.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
nccl.ncclCommSplit.argtypes = [c_void_p, c_int, c_int, POINTER(c_void_p), c_void_p]
nccl.ncclCommFinalize.argtypes = nccl.ncclCommDestroy.argtypes = [c_void_p]
nccl.ncclGetLastError.restype = c_char_p


def check(code):
    if code:
        raise SystemExit(f"code {code}: {nccl.ncclGetLastError(None).decode()}")


rank, place = int(sys.argv[1]), sys.argv[2]
unique = Id()
if rank == 0:
    check(nccl.ncclGetUniqueId(byref(unique)))
    with open(place + ".new", "wb") as file:
        file.write(bytes(unique))
    os.rename(place + ".new", place)
while not os.path.exists(place):
    time.sleep(0.01)
with open(place, "rb") as file:
    unique = Id.from_buffer_copy(file.read())
comm, part = c_void_p(), c_void_p()
check(nccl.ncclCommInitRank(byref(comm), 2, unique, rank))
x = (c_float * 3)(1, 2, rank)
check(nccl.ncclAllReduce(x, x, 3, 7, 0, comm, None))
check(nccl.ncclCommFinalize(comm))
print(json.dumps({"sum": list(x)}))
check(nccl.ncclCommDestroy(comm))
"""


def _start(words, **changes):
    return subprocess.Popen(
        words,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_program_of_two_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [
        _start(
            [sys.executable, "-m", "unjam", "run", "--", sys.executable, str(program), str(rank),
             str(tmp_path / "id")],
            UNJAM_DEVICE="host",
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=SOON_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in enumerate(said):
        assert ranks[rank].returncode == 0, err
        assert json.loads(out)["sum"] == [2.0, 4.0, 1.0]
        assert f"unjam run: {nccl_library()} is loaded in front of NCCL" in err
        # Once, of the first rank.
        assert err.count("answers this program's NCCL calls") == (1 if rank == 0 else 0)


def test_torch_starts_with_it():
    torch = importlib.util.find_spec("torch")
    if torch is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").is_file():
        pytest.skip("torch for CUDA is not installed")
    code = """
        import ctypes, torch
        class Info(ctypes.Structure):
            _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                        ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]
        everything, info = ctypes.CDLL(None), Info()
        function = ctypes.cast(everything.ncclAllReduce, ctypes.c_void_p)
        everything.dladdr(function, ctypes.byref(info))
        print(info.file.decode(), torch.cuda.nccl.version())
    """
    changes = environment_with(nccl_library(), environment())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=changes, capture_output=True, text=True, timeout=4 * SOON_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == [str(nccl_library()), "(2, 28, 9)\n"]


# ---- unjam run ----


def test_run_without_a_program_prints_help(capsys):
    assert main(["run"]) == 0
    assert "PROGRAM" in capsys.readouterr().out


def test_run_of_no_program(capsys):
    assert main(["run", "--", "no-such-program-anywhere"]) == 127
    assert "no such program" in capsys.readouterr().err


def test_what_a_program_gets():
    library = Path("/some/where/libnccl.so.2")
    changed = environment_with(library, {"LD_PRELOAD": "/a.so /b.so", "X": "y"})
    assert changed["LD_PRELOAD"] == "/some/where/libnccl.so.2:/a.so:/b.so"
    assert changed["X"] == "y" and changed["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment_with(library, changed) == changed
    kept = environment_with(library, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert kept["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    with pytest.raises(LibraryError, match="spaces"):
        environment_with(Path("/some where/libnccl.so.2"), {})


def test_the_doctor_says_where_it_is_and_what_is_in_it(monkeypatch, tmp_path):
    assert str(nccl_library()) in doctor.nccl_line().text
    without = tmp_path / "without.so"
    without.write_bytes(b"\x7fELF ... built without its CUDA part: ...")
    line = doctor.nccl_finding(without, cuda=True)
    assert line.state == doctor.WRONG and "+cu13 wheel" in line.cure
    line = doctor.nccl_finding(without, cuda=False)
    assert line.state == doctor.ABSENT and "host memory" in line.text
    whole = tmp_path / "whole.so"
    whole.write_bytes(b"\x7fELF ...")
    assert doctor.nccl_finding(whole, cuda=True).state == doctor.OK
    # The words by which it is known are those of the library that is built without.
    words = (ROOT / "src" / "api" / "nccl" / "no_cuda_calls.cc").read_bytes()
    assert doctor.WITHOUT_CUDA in words

    def missing():
        raise LibraryError("it is not there")

    monkeypatch.setattr(doctor, "nccl_library", missing)
    assert doctor.nccl_line().state == doctor.ABSENT
