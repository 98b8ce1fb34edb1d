"""For which GPUs a build compiles kernels: one rule, for pip, for make demo and for CMake by hand.

CMake is real; the machine's GPUs and its nvcc are scripts that answer as those do.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

RULE = Path(__file__).resolve().parents[2] / "cmake" / "UnjamCudaChoice.cmake"
CMAKE = shutil.which("cmake")
NVCC = Path("/usr/local/cuda/bin/nvcc")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="there is no cmake")


class Machine:
    def __init__(self, root):
        self._root = root
        self._set = [f"-DUNJAM_NVIDIA_DRIVER={root / 'gpus'}"]
        self._path = root / "bin"
        self._path.mkdir()
        # Away from the checkout, whose .venv may have an nvcc.
        self._rule = root / "cmake" / RULE.name
        self._rule.parent.mkdir()
        shutil.copy(RULE, self._rule)

    def has(self, program, prints):
        file = self._path / program
        file.write_text(f"#!/bin/sh\nprintf '{prints}\\n'\n")
        file.chmod(0o755)

    def has_nvcc(self, release="13.0"):
        self.has("nvcc", f"Cuda compilation tools, release {release}, V{release}.88")

    def has_gpus(self, *capabilities):
        (self._root / "gpus" / "0000:01:00.0").mkdir(parents=True)
        self.has("nvidia-smi", "\\n".join(capabilities))

    def asks(self, architectures):
        self._set.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")

    def chooses(self, wish):
        """The architectures, or None for an error; and the words."""
        done = subprocess.run(
            [CMAKE, f"-DUNJAM_CUDA={wish}", *self._set, "-P", str(self._rule)],
            env={"PATH": str(self._path), "HOME": str(self._root)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        words = " ".join(done.stderr.split())
        return (done.stdout.strip() if done.returncode == 0 else None), words


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("capabilities", "compiled"),
    [
        (["9.0", "9.0"], "90a-real"),
        (["8.6"], "80-real"),
        (["9.0", "8.0"], "80-real;90a-real"),
        (["12.0"], "90-virtual"),
        (["10.3", "9.0"], "90-virtual;90a-real"),
        (["No devices were found"], "80-real;90a-real"),  # a driver's folder names one
    ],
)
@pytest.mark.parametrize("wish", ["AUTO", "ON"])
def test_kernels_are_compiled_for_the_gpus_that_are_there(machine, wish, capabilities, compiled):
    machine.has_nvcc()
    machine.has_gpus(*capabilities)
    architectures, words = machine.chooses(wish)
    assert architectures == compiled
    minutes = 6 * len(compiled.split(";"))
    assert f"about {minutes} minutes of a core; UNJAM_CUDA=OFF skips them" in words


def test_without_a_gpu_none_are_compiled_unless_asked(machine):
    machine.has_nvcc()
    architectures, words = machine.chooses("AUTO")
    assert architectures == ""
    assert "there is no GPU on this machine" in words and "UNJAM_CUDA=ON compiles" in words
    assert machine.chooses("ON")[0] == "80-real;90a-real"
    machine.asks("90a-real")  # of a build folder in which they were compiled once
    assert machine.chooses("AUTO")[0] == ""
    assert machine.chooses("ON")[0] == "90a-real"


def test_a_gpu_that_is_too_old_counts_for_none(machine):
    machine.has_nvcc()
    machine.has_gpus("7.5")
    architectures, words = machine.chooses("AUTO")
    assert architectures == "" and "compute capability 7.5" in words


@pytest.mark.parametrize("wish", ["OFF", "off", "0", "FALSE"])
def test_nothing_is_compiled_where_that_is_asked_for(machine, wish):
    machine.has_nvcc()
    machine.has_gpus("9.0")
    assert machine.chooses(wish) == ("", "host only, as asked by UNJAM_CUDA=OFF")


@pytest.mark.parametrize("release", [None, "12.4"])
def test_what_keeps_kernels_from_being_compiled_is_said(machine, release):
    machine.has_gpus("9.0")
    if release is not None:
        machine.has_nvcc(release)
    elif NVCC.exists():
        pytest.skip("an nvcc that a test cannot hide")
    architectures, words = machine.chooses("AUTO")
    cause = "no nvcc in" if release is None else "nvcc is older than CUDA 13"
    assert architectures == "" and "HOST ONLY" in words and cause in words
    assert machine.chooses("ON")[0] is None
    assert cause in machine.chooses("ON")[1]


def test_a_word_that_is_no_choice_is_refused(machine):
    architectures, words = machine.chooses("maybe")
    assert architectures is None and "it takes AUTO, ON or OFF" in words


@pytest.mark.skipif(
    not (NVCC.exists() and shutil.which("ninja")), reason="there is no nvcc, or no ninja"
)
@pytest.mark.parametrize("launcher", ["", "a-launcher", "a-launcher;--its-option"])
def test_kernels_are_compiled_by_the_log_the_users_launcher_and_nvcc(tmp_path, launcher):
    """Without a launcher, too: an empty word in the command is taken for the program to run."""
    told = subprocess.run(
        [CMAKE, "-G", "Ninja", "-S", str(RULE.parents[1]), "-B", str(tmp_path), "-Wno-dev"]
        + ["-DUNJAM_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a-real", "-DUNJAM_TESTS=OFF"]
        + [f"-DCMAKE_CUDA_COMPILER={NVCC}", f"-DCMAKE_CUDA_COMPILER_LAUNCHER={launcher}"]
        + ["-DUNJAM_EXAMPLES=OFF", "-DCMAKE_CUDA_COMPILER_WORKS=1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr
    commands = {
        line.split(" -forward-unknown")[0].split("nvcc_log.sh ")[1]
        for line in (tmp_path / "CMakeFiles/rules.ninja").read_text().splitlines()
        if "nvcc_log.sh " in line
    }
    assert commands == {" ".join([*filter(None, launcher.split(";")), str(NVCC)])}
