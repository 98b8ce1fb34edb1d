"""make test and make soak: the stages in order, each timed; fails if any stage failed.

ci.py test | soak | STAGE...   (stages: see STAGES below)
A failed stage does not keep those that do not need it from running, so that one run tells all.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import cuda_toolchain
import demo
import lint
import setup_env
from common import ROOT, VENV, VENV_PYTHON, Failure, environment, jobs, main_wrapper, run

BUILD = ROOT / "build"


class Tests:
    """Counts of all test runs of this call, from the runners' JUnit files."""

    passed = 0
    failed = 0
    skipped = 0

    @classmethod
    def add(cls, files: list[Path]) -> None:
        for file in files:
            try:
                root = ElementTree.parse(file).getroot()
            except ElementTree.ParseError:  # the test died while it wrote
                cls.failed += 1
                continue
            for case in root.iter("testcase"):
                if case.find("failure") is not None or case.find("error") is not None:
                    cls.failed += 1
                elif case.find("skipped") is not None or case.get("status") == "notrun":
                    cls.skipped += 1
                else:
                    cls.passed += 1


def build(preset: str, *targets: str, **defines: str) -> None:
    """Configures a preset and builds it, or only some targets of it."""
    if preset == "release":
        defines.setdefault("UNJAM_CUDA", cuda_toolchain.setting())
    words = [f"-D{name}={value}" for name, value in defines.items()]
    run(["cmake", "--preset", preset, *words], stdout=subprocess.DEVNULL)
    chosen = ["--target", *targets] if targets else []
    run(["cmake", "--build", BUILD / preset, "-j", str(jobs()), *chosen])


def ctest(preset: str, build_dir: str) -> None:
    """Runs a test preset and counts the single tests in it."""
    results = BUILD / build_dir / "results"
    shutil.rmtree(results, ignore_errors=True)
    # One more than there are cores: some tests wait more than they calculate.
    command = ["ctest", "--preset", preset, "-j", str(jobs() + 1)]
    if build_dir == "tsan":
        # TSan of g++ 12 cannot live with the address randomisation of some newer kernels.
        plain = ["setarch", platform.machine(), "-R"]
        probe = [*plain, "true"]
        if shutil.which("setarch") and subprocess.run(probe, capture_output=True).returncode == 0:
            command = [*plain, *command]
    try:
        run(command)
    finally:
        Tests.add(sorted(results.glob("*.xml")))


def pytest(*words: str) -> None:
    """Runs pytest on the installed package."""
    report = BUILD / "pytest.xml"
    report.unlink(missing_ok=True)
    try:
        run([VENV / "bin" / "pytest", "-q", f"--junitxml={report}", *words])
    finally:
        if report.exists():
            Tests.add([report])


def stage_setup() -> None:
    setup_env.ensure("test")


def stage_lint() -> None:
    lint.lint()


def stage_release() -> None:
    """Everything for the host; the CUDA part of the same build folder is the stage cuda."""
    build("release", "all_host")


def stage_unit() -> None:
    ctest("release", "release")


def stage_asan() -> None:
    build("asan")
    ctest("asan", "asan")


def stage_tsan() -> None:
    build("tsan")
    ctest("tsan", "tsan")


def build_cuda(architectures: str, compiled_only: str, of_programs: str) -> None:
    """libunjam_cuda.so and, only compiled, the programs that need GPUs."""
    build(
        "release",
        "unjam_cuda",
        *(["gpu_compiled_only"] if compiled_only else []),
        "gpu_tests",
        UNJAM_CUDA="ON",
        UNJAM_GPU_TESTS="ON",
        CMAKE_CUDA_ARCHITECTURES=architectures,
        UNJAM_CUDA_COMPILED_ONLY=compiled_only,
        UNJAM_GPU_TEST_ARCHITECTURES=of_programs,
    )
    run([VENV_PYTHON, ROOT / "tools" / "ptxas_report.py", BUILD / "release"])


def stage_cuda() -> None:
    """For A100s, and of programs, PTX only, unoptimised: the rest takes minutes of two cores."""
    build_cuda("90a-real", "80-virtual", "90a-virtual")
    run([VENV_PYTHON, ROOT / "tools" / "ptx_check.py", BUILD / "release"])


def stage_soak_cuda() -> None:
    """All that is released."""
    build_cuda("80-real;90a-real", "", "90a-real")


def stage_package() -> None:
    """The wheel from what stages release and cuda have compiled, installed into .venv."""
    demo.install_package("build/release", "ON", unity="OFF")


def stage_pytest() -> None:
    # The adapter that the tests with torch need is compiled beside the tests that do not, so that
    # no worker waits for it. What is wrong with it, those tests say.
    code = "import unjam.torch._extension as e; e.extension()"
    quiet = subprocess.DEVNULL
    adapter = subprocess.Popen(
        [VENV_PYTHON, "-c", code], cwd=BUILD, env=environment(), stdout=quiet, stderr=quiet
    )
    try:
        # A file's tests share what it has started, so they stay together; tests/python/conftest.py
        # puts the files that take long first. (A worker more than there are cores is no faster:
        # ranks that share cores poll while others need them.)
        pytest("-n", str(min(jobs(), 4)), "--dist", "loadfile", "--no-loadscope-reorder")
    finally:
        adapter.terminate()
        adapter.wait()


def stage_soak_unit() -> None:
    build("release")
    ctest("soak", "release")


def stage_soak_pytest() -> None:
    pytest("-m", "soak", "--timeout=3600")


# name -> (what to do, stages that must have passed)
STAGES: dict[str, tuple[Callable[[], None], list[str]]] = {
    "setup": (stage_setup, []),
    "lint": (stage_lint, ["setup"]),
    "release": (stage_release, ["setup"]),
    "unit": (stage_unit, ["release"]),
    "asan": (stage_asan, ["setup"]),
    "tsan": (stage_tsan, ["setup"]),
    "cuda": (stage_cuda, ["release"]),
    "package": (stage_package, ["cuda"]),
    "pytest": (stage_pytest, ["package"]),
    "soak-cuda": (stage_soak_cuda, ["release"]),
    "soak-unit": (stage_soak_unit, ["setup"]),
    "soak-pytest": (stage_soak_pytest, ["package"]),
}
TEST = ["setup", "lint", "release", "unit", "asan", "tsan", "cuda", "package", "pytest"]
SOAK = ["setup", "release", "soak-cuda", "package", "soak-unit", "soak-pytest"]


def run_stages(names: list[str]) -> bool:
    """Runs stages in order, prints the table, and says whether all passed."""
    outcome: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in names:
        action, needs = STAGES[name]
        # A stage asked for alone trusts that what it needs was done before.
        lacking = [need for need in needs if outcome.get(need, "ok") != "ok"]
        if lacking:
            outcome[name] = f"not run: {lacking[0]} failed"
            continue
        print(f"\n=== {name} ===", flush=True)
        start = time.monotonic()
        try:
            action()
            outcome[name] = "ok"
        except Failure as failure:
            print(f"[unjam] error: {failure}", flush=True)
            outcome[name] = "FAILED"
        seconds[name] = time.monotonic() - start
    print(f"\n{'stage':<14}{'minutes':>8}  outcome", flush=True)
    for name in names:
        print(f"{name:<14}{seconds.get(name, 0) / 60:>8.1f}  {outcome[name]}")
    print(f"{'all':<14}{sum(seconds.values()) / 60:>8.1f}", flush=True)
    return all(result == "ok" for result in outcome.values())


def main() -> int:
    os.chdir(ROOT)
    words = sys.argv[1:] or ["test"]
    names = {"test": TEST, "soak": SOAK}.get(words[0], words)
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise Failure(f"unknown stage {unknown[0]!r}; there are: test, soak, {', '.join(STAGES)}")
    passed = run_stages(names)
    if not passed:
        print("make test FAILED: see the table above", flush=True)
        return 1
    if Tests.passed:
        skipped = f", {Tests.skipped} skipped" if Tests.skipped else ""
        print(f"{Tests.passed} passed, {Tests.failed} failed{skipped}", flush=True)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
