"""The wheel with torch's adapter inside, in an environment of its own without a compiler."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
LIMIT_S = 900  # what takes half a minute on an idle machine
COMPILERS = ["c++", "cc", "clang", "clang++", "cmake", "g++", "gcc", "ld", "ninja", "nvcc"]

pytestmark = pytest.mark.timeout(4 * LIMIT_S)


@pytest.fixture(scope="module")
def wheel(adapter, tmp_path_factory):
    """Of what lies compiled in build/release, with the adapter that these tests use."""
    if not (BUILD / "CMakeCache.txt").exists():
        pytest.skip(f"there is no build in {BUILD}")
    if "UNJAM_LIBRARY" in os.environ:
        pytest.skip("UNJAM_LIBRARY names another library than the package's")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, ROOT / "tools" / "wheels.py", "--as-built", BUILD, "--into", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    assert f"adapter for torch {torch.__version__.partition('+')[0]}" in done.stdout
    return made


class Machine:
    """One without a compiler, a home that was used, or unjam's sources."""

    def __init__(self, root, wheel):
        self.root = root
        self.compiled = root / "compiled"
        self.site = self._environment(wheel)
        path = root / "bin"
        path.mkdir()
        for name in COMPILERS:
            (path / name).write_text(f'#!/bin/sh\necho "$0 $*" >>{self.compiled}\nexit 1\n')
            (path / name).chmod(0o755)
        self.env = {"PATH": str(path), "OMP_NUM_THREADS": "1"}
        for variable, name in (("HOME", "home"), ("TMPDIR", "tmp")):
            (root / name).mkdir()
            self.env[variable] = str(root / name)

    def _environment(self, wheel):
        venv = self.root / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install"]
        words = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
        done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        (site,) = venv.glob("lib/python3*/site-packages")
        # torch, NumPy and rich are these tests' own: behind what is installed here.
        places = [Path(torch.__file__).resolve().parents[1]]
        places += [Path(p) for p in sys.path if p.endswith("site-packages")]
        (site / "others.pth").write_text("".join(f"{place}\n" for place in places))
        return site

    def python(self, *words):
        done = subprocess.run(
            [self.root / "venv" / "bin" / "python", *words],
            cwd=self.root,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def machine(wheel, tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"), wheel)


def test_it_trains_without_a_compiler(machine):
    example = ROOT / "examples" / "torch" / "ddp_cnn.py"
    done = machine.python(
        example, "--backend", "unjam", "--steps", "3", "--limit", str(LIMIT_S), "--json"
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["outcome"] == "right", done.stdout + done.stderr
    assert len(said["losses"]) == 3 and all(map(math.isfinite, said["losses"]))
    assert not machine.compiled.exists(), machine.compiled.read_text()
    assert "compiling" not in done.stderr
    kept = [p for name in ("home", "tmp") for p in (machine.root / name).rglob("*unjam_c10d*")]
    assert kept == []


NONE_INSIDE = """
from pathlib import Path
from unjam.torch import _adapter, _extension
_adapter.PREBUILT = Path("/nonexistent")
try:
    _extension.extension()
except _extension.BuildError as error:
    print(error)
"""


def test_without_it_a_compiler_is_run(machine):
    """So the test above would notice."""
    assert "does not compile" in machine.python("-c", NONE_INSIDE).stdout
    assert "g++" in machine.compiled.read_text()
    machine.compiled.unlink()


def test_the_adapter_inside_is_the_one_that_is_used(machine):
    told = machine.python("-m", "unjam", "torch", "build").stdout
    assert "was there already" in told
    place = re.search(r": (/.*\.so) ", told)
    assert place is not None and Path(place[1]).is_relative_to(
        machine.site / "unjam/torch/prebuilt"
    )


def test_what_the_wheel_says_of_itself(wheel):
    assert re.fullmatch(r"unjam-[\d.]+-py3-none-(manylinux_\d+_\d+_\w+\.?)+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert "unjam/lib/libunjam.so.0" in names and "unjam/lib/libunjam_cuda.so" not in names
    assert "unjam/lib/nccl/libnccl.so.2" in names
    assert not [name for name in names if name.startswith("unjam.libs/")]  # nothing is there twice
    # Shown by an index, where a link into the repository leads nowhere.
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets and all(target.startswith(("https://", "#")) for target in targets), targets
    for field in ("Project-URL: Repository", "Author: ", "License-Expression: ", "Classifier: "):
        assert f"\n{field}" in text, field


@pytest.fixture
def tool(monkeypatch):
    """tools/wheels.py."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    yield importlib.import_module("wheels")
    for name in ("wheels", "setup_env", "cuda_toolchain", "common"):  # as common as names can be
        sys.modules.pop(name, None)


def test_the_cuda_wheel_has_a_version_of_its_own(wheel, tool, tmp_path):
    (plain,) = (tool.BUILD / "raw").glob("*.whl")
    made = tool.assemble(plain, [], True, tmp_path)
    version = wheel.name.split("-")[1]
    assert made.name == wheel.name.replace(f"-{version}-", f"-{version}+cu13-")
    with zipfile.ZipFile(plain) as before, zipfile.ZipFile(made) as after:
        metadata = after.read(f"unjam-{version}+cu13.dist-info/METADATA").decode()
        assert f"\nVersion: {version}+cu13\n" in metadata
        cuda_part = "unjam/lib/libunjam_cuda.so"
        assert (cuda_part in after.namelist()) is (cuda_part in before.namelist())
        assert after.testzip() is None


def test_releases_of_torch_are_chosen_by_their_beginnings(tool):
    assert tool.choose_torch([]) == tool.TORCH
    assert tool.choose_torch(["2.12"]) == ["2.12.0", "2.12.1"]
    assert tool.choose_torch(["2.12.1", "2.11"]) == ["2.11.0", "2.12.1"]
    with pytest.raises(tool.Failure, match=r"no torch 2\.1 here"):
        tool.choose_torch(["2.1"])


def test_pythons_are_those_at_hand_with_headers(tool):
    found = tool.find_pythons([])
    assert len({python.minor for python in found}) == len(found)
    assert all((Path(python.include) / "Python.h").is_file() for python in found)
    with pytest.raises(tool.Failure, match=r"Python 3\.99 with its headers is not at hand"):
        tool.find_pythons(["3.99"])


def test_a_release_that_is_not_for_a_python_is_left_out(tool, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch-9.9.9.dist-info").mkdir()
    metadata = tmp_path / "torch-9.9.9.dist-info" / "METADATA"
    for said, serves in {">=3.11": False, ">= 3.10": True, ">=3.9": True}.items():
        metadata.write_text(f"Name: torch\nRequires-Python: {said}\n")
        assert tool.serves(tmp_path / "torch", tool.Python(10, "cpython-310", "")) is serves


@pytest.mark.parametrize("differs", [None, "c10/core/Device.h", "torch/headeronly/version.h"])
def test_patch_releases_with_the_same_headers_share_an_adapter(
    tool, tmp_path, monkeypatch, differs
):
    compiled = []

    def compile_adapter(target, path):
        compiled.append(target.version)
        path.write_text(target.version)

    monkeypatch.setattr(tool.adapter, "compile_adapter", compile_adapter)
    monkeypatch.setattr(tool, "check_symbols", lambda file, torch: None)
    made = []
    for version in ("9.9.0", "9.9.1"):
        torch = tmp_path / version / "torch"
        for name in ("c10/core/Device.h", "torch/headeronly/version.h"):
            (torch / "include" / name).parent.mkdir(parents=True)
            (torch / "include" / name).write_text(version if name == differs else "same")
        target = tool.adapter.Target(version, "cpython-311-x", True, torch, "")
        folder = tmp_path / "adapters" / target.folder()
        folder.mkdir(parents=True)
        tool.make_adapter(folder, target)
        made.append((folder / "_unjam_c10d.so").read_text())
    alike = differs != "c10/core/Device.h"
    assert made == (["9.9.0", "9.9.0"] if alike else ["9.9.0", "9.9.1"])
    assert compiled == (["9.9.0"] if alike else ["9.9.0", "9.9.1"])
