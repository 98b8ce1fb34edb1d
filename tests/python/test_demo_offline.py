"""``make demo`` where .venv cannot be made or filled: other tools do, or it says what lacks.

Nothing is built and nothing is fetched: tools/demo.py runs in an empty folder, and finds a cmake
and a python3 that only pretend.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

NO_VENV = """#!/bin/sh
# As Debian's python3 without the package python3-venv.
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"
  echo "ensurepip is not available."
  exit 1
fi
exec {python} "$@"
"""

# A .venv that is there, in which nothing can be installed.
NO_INDEX = """#!/bin/sh
if [ "$2 $3" = "pip install" ]; then
  echo "No matching distribution found" >&2
  exit 1
fi
exec {python} "$@"
"""

CMAKE = """#!/bin/sh
[ "$1" = --version ] && exec echo "cmake version {version}"
case "$*" in *" -P "*) exec echo {architectures};; esac
echo "$@" >>{calls}
"""

# What .venv/bin/unjam is to run.
CLI = """
import os, sys
def main():
    print("ran", *sys.argv[1:], os.environ["UNJAM_LIBRARY"])
    return 7
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """tools/demo.py in a folder of its own, on a machine that has all but a .venv that works."""

    def __init__(self, root, patch, capfd):
        self.root, self._patch, self._capfd = root, patch, capfd
        patch.syspath_prepend(TOOLS)
        self.setup_env = importlib.import_module("setup_env")
        self.demo = importlib.import_module("demo")
        for module in (self.setup_env, self.demo):
            patch.setattr(module, "ROOT", root)
            patch.setattr(module, "VENV", root / ".venv")
            patch.setattr(module, "VENV_PYTHON", root / ".venv/bin/python")
        patch.setattr(self.demo, "PROGRAM", root / ".venv/bin/unjam")
        patch.setattr(importlib.import_module("common"), "STAMPS", root / ".venv/stamps")
        self.lacks()
        pyproject = (TOOLS.parent / "pyproject.toml").read_text()
        (root / "pyproject.toml").write_text(pyproject)
        # A package, so that it comes before one that is installed.
        script(root / "python/unjam/__init__.py", "")
        script(root / "python/unjam/cli.py", CLI)
        self.cmake_calls = root / "calls"
        self.set_cmake("3.31.10")
        script(root / "tools/c++", "#!/bin/sh\n")
        patch.setenv("PATH", f"{root / 'tools'}:/usr/bin:/bin")
        for name in ("CXX", "UNJAM_CUDA"):
            patch.delenv(name, raising=False)

    def set_cmake(self, version, architectures=""):
        text = CMAKE.format(version=version, calls=self.cmake_calls, architectures=architectures)
        script(self.root / "tools/cmake", text)

    def lacks(self, *modules):
        """Of the Python packages, the machine has all but these."""
        util = SimpleNamespace(find_spec=lambda name: None if name in modules else name)
        self._patch.setattr(self.demo, "importlib", SimpleNamespace(util=util))

    def without_venv(self):
        script(self.root / "tools/python3", NO_VENV.format(python=sys.executable))
        self._patch.setattr(sys, "executable", str(self.root / "tools/python3"))

    def without_index(self):
        script(self.root / ".venv/bin/python", NO_INDEX.format(python=sys.executable))

    def make_demo(self, *arguments):
        """The exit code, and what it said."""
        self._patch.setattr(sys, "argv", ["demo.py", *arguments])
        code = self.demo.main()
        return code, self._capfd.readouterr().out

    def failure(self):
        with pytest.raises(self.setup_env.Failure) as caught:
            self.demo.main()
        assert not self.cmake_calls.exists()
        return str(caught.value)


@pytest.fixture
def machine(tmp_path, monkeypatch, capfd):
    yield Machine(tmp_path, monkeypatch, capfd)
    for name in ("demo", "setup_env", "cuda_toolchain", "common"):  # as common as names can be
        sys.modules.pop(name, None)


@pytest.mark.parametrize("way", ["without_venv", "without_index"])
def test_the_machines_own_tools_do(machine, way):
    getattr(machine, way)()
    code, said = machine.make_demo("--seed", "3")
    library = machine.root / "build/offline/libunjam.so"
    assert code == 7 and f"ran demo --seed 3 {library}\n" in said
    assert "the machine's own cmake and python3 do the work" in said
    configured, built = machine.cmake_calls.read_text().splitlines()
    assert "-DUNJAM_CUDA=AUTO" in configured and "--target unjam_package" in built
    # Again, where a .venv with the script in it stands already.
    assert machine.make_demo()[0] == 7


@pytest.mark.parametrize(
    ("wish", "architectures"), [("AUTO", ""), ("AUTO", "90a-real"), ("ON", "80-real"), ("OFF", "")]
)
def test_the_build_decides_about_the_cuda_part(machine, monkeypatch, wish, architectures):
    """What the environment says goes on to it, and that kernels take long is said beforehand."""
    machine.without_venv()
    if wish != "AUTO":
        monkeypatch.setenv("UNJAM_CUDA", wish)
    machine.set_cmake("3.31.10", architectures)
    code, said = machine.make_demo()
    configured = machine.cmake_calls.read_text().splitlines()[0]
    assert code == 7 and f"-DUNJAM_CUDA={wish}" in configured
    assert ("with the kernels" in said) is bool(architectures)


def test_the_cause_is_said(machine):
    machine.without_venv()
    said = machine.make_demo()[1]
    assert "ensurepip is not available" in said and "apt-get install python3-venv" in said


def test_the_index_is_said(machine):
    machine.without_index()
    said = machine.make_demo()[1]
    assert "No matching distribution found" in said and "PIP_INDEX_URL" in said


@pytest.mark.parametrize(
    ("way", "cause"), [("without_venv", "python3-venv"), ("without_index", "PIP_INDEX_URL")]
)
def test_what_lacks_is_named_with_the_cure(machine, way, cause):
    """All at once, and beside why there is no .venv: to mend one of the two is enough."""
    getattr(machine, way)()
    machine.lacks("rich")
    said = machine.failure()
    assert cause in said and "which lack: rich\n" in said
    assert "apt-get install python3-rich\n" in said and f"{sys.executable} is asked" in said

    machine.lacks()
    machine.set_cmake("3.22.1")
    said = machine.failure()
    assert cause in said and "which lack: cmake 3.25 or newer\n" in said
    assert said.endswith("apt-get install cmake (3.25 or newer)")

    machine.lacks("numpy", "rich")
    said = machine.failure()
    assert "which lack: numpy, rich, cmake 3.25 or newer\n" in said
    assert "apt-get install python3-numpy python3-rich cmake (3.25 or newer)\n" in said


def test_a_compiler_lacks(machine, monkeypatch):
    machine.without_venv()
    monkeypatch.setenv("CXX", os.fspath(machine.root / "none"))
    said = machine.failure()
    assert "which lack: a C++ compiler\n" in said and "apt-get install g++ (12 or newer)" in said
