"""make test, make check and make soak: the stages in order, each timed; fails if any stage failed.

ci.py test | check | soak | STAGE...   (stages: see STAGES below)
A failed stage does not keep those that do not need it from running, so that one run tells all.
Minutes are announced before and measured after. They decide nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import signal
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


# Of tests/python, what `make check` runs: calls and what becomes of them, without torch.
QUICK_FILES = (
    "abi buffers check_commits check_docs check_pages collectives config context dtypes imports "
    "limits memory misuse point_to_point registration requests sequences timeline"
).split()


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


def use_compiler_cache() -> dict[str, str]:
    """Where there is a ccache, all compilers run behind it: what CMake is to be told for that.

    What another checkout has compiled counts, too: ccache hashes paths as seen from this one, and
    leaves out the folder. (CCACHE_DISABLE=1 in the environment turns it off.)
    """
    ccache = shutil.which("ccache")
    if ccache is None:
        return {}
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")
    # A fresh .venv has another date on the same nvcc.
    os.environ.setdefault("CCACHE_COMPILERCHECK", "content")
    # Precompiled headers are cached only so.
    os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
    # It asks the compiler for the files that were read. Reading them beforehand it would see the
    # text for hosts alone, where nvcc compiles for GPUs, too.
    os.environ.setdefault("CCACHE_DEPEND", "1")
    return {f"CMAKE_{language}_COMPILER_LAUNCHER": ccache for language in ("C", "CXX", "CUDA")}


def configure(preset: str, **defines: str) -> None:
    words = [f"-D{name}={value}" for name, value in (use_compiler_cache() | defines).items()]
    run(["cmake", "--preset", preset, *words], stdout=subprocess.DEVNULL)


def compile_targets(preset: str, *targets: str) -> None:
    """Builds what a configured preset has, or only some targets of it."""
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
    # (UCX is not compiled for sanitizers.)
    wheel = next(VENV.glob("lib/python3*/site-packages/libucx/lib/libucp.so.0"), None)
    if wheel is not None and build_dir not in ("asan", "tsan"):
        os.environ.setdefault("UNJAM_TEST_UCX", os.fspath(wheel))
    try:
        run(command)
    finally:
        Tests.add(sorted(results.glob("*.xml")))


def pytest(*words: str, env: dict[str, str] | None = None) -> None:
    """Runs pytest: on the installed package, unless the environment names another."""
    report = BUILD / "pytest.xml"
    report.unlink(missing_ok=True)
    try:
        command = [VENV / "bin" / "pytest", "-q", f"--junitxml={report}", *words]
        run(command, env=environment() if env is None else env)
    finally:
        if report.exists():
            Tests.add([report])


def stage_setup() -> None:
    setup_env.ensure("test")


def stage_lint() -> None:
    lint.lint()


def configure_release(cuda: str, architectures: str, only: str, of_programs: str) -> None:
    """The release build.

    Args:
        cuda: whether with the CUDA part: ON or OFF.
        architectures: of libunjam_cuda.so.
        only: a GPU for which its kernels are compiled, and no more.
        of_programs: of the programs that need GPUs.
    """
    configure(
        "release",
        UNJAM_CUDA=cuda,
        UNJAM_GPU_TESTS=cuda,
        CMAKE_CUDA_ARCHITECTURES=architectures,
        UNJAM_CUDA_COMPILED_ONLY=only,
        UNJAM_GPU_TEST_ARCHITECTURES=of_programs,
    )


# For A100s, and of programs, PTX only, unoptimised: the rest takes minutes of two cores.
OF_TEST = ("90a-real", "80-virtual", "90a-virtual")
# All that is released.
OF_SOAK = ("80-real;90a-real", "", "90a-real")


class Kernels:
    """The CUDA part's build, one file of which takes one core for most of it.

    So it begins when the host's part is there, and other stages run meanwhile. It is politer than
    they are, and takes the time that they leave.
    """

    _process: subprocess.Popen[bytes] | None = None
    _log = BUILD / "cuda.log"

    @classmethod
    def begin(cls) -> None:
        configure_release("ON", *OF_TEST)
        targets = ["unjam_cuda", "gpu_compiled_only", "gpu_tests"]
        command = ["cmake", "--build", BUILD / "release", "-j", str(jobs()), "--target", *targets]
        try:
            with cls._log.open("w") as log:
                cls._process = subprocess.Popen(
                    ["nice", "-n", "10", *command],
                    cwd=ROOT,
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=os.setpgrp,  # to be ended with all that it has started
                )
        except OSError as error:
            raise Failure(f"the build of the CUDA part does not start: {error}") from error

    @classmethod
    def wait(cls) -> None:
        """Until it has ended; begins it first if nobody has."""
        if cls._process is None:
            cls.begin()
        assert cls._process is not None
        code = cls._process.wait()
        print(cls._log.read_text(), end="", flush=True)
        if code != 0:
            raise Failure(f"exit code {code} from the build of the CUDA part")

    @classmethod
    def stop(cls) -> None:
        """Ends it, if it still runs."""
        if cls._process is not None and cls._process.poll() is None:
            os.killpg(cls._process.pid, signal.SIGTERM)
            cls._process.wait()


def stage_release() -> None:
    """Everything for the host; the CUDA part of the same build folder is the stage cuda."""
    configure_release(cuda_toolchain.setting(), *OF_TEST)
    compile_targets("release", "all_host")


def stage_unit() -> None:
    ctest("release", "release")


def stage_asan() -> None:
    configure("asan")
    compile_targets("asan")
    ctest("asan", "asan")


def stage_tsan() -> None:
    configure("tsan")
    compile_targets("tsan")
    ctest("tsan", "tsan")


def stage_cuda() -> None:
    Kernels.wait()
    run([VENV_PYTHON, ROOT / "tools" / "ptxas_report.py", BUILD / "release"])
    run([VENV_PYTHON, ROOT / "tools" / "ptx_check.py", BUILD / "release"])


def stage_soak_cuda() -> None:
    configure_release("ON", *OF_SOAK)
    compile_targets("release", "unjam_cuda", "gpu_tests")
    run([VENV_PYTHON, ROOT / "tools" / "ptxas_report.py", BUILD / "release"])


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
    configure("release")
    compile_targets("release", "all_host")
    ctest("soak", "release")


def stage_soak_pytest() -> None:
    pytest("-m", "soak", "--timeout=3600")


def stage_check_setup() -> None:
    setup_env.ensure("check")


def stage_check_lint() -> None:
    """But for clang-tidy, which takes minutes."""
    lint.lint(tidy=False)


def stage_check_unit() -> None:
    configure("check")
    compile_targets("check")
    ctest("check", "check")


def stage_check_pytest() -> None:
    """Some files, on the checkout: nothing is installed."""
    library = os.fspath(BUILD / "check" / "libunjam.so")
    env = environment(PYTHONPATH=os.fspath(ROOT / "python"), UNJAM_LIBRARY=library)
    files = [f"tests/python/test_{name}.py" for name in QUICK_FILES]
    pytest("-n", str(min(jobs(), 4)), "--dist", "loadfile", *files, env=env)


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
    "check-setup": (stage_check_setup, []),
    "check-lint": (stage_check_lint, ["check-setup"]),
    "check-unit": (stage_check_unit, ["check-setup"]),
    "check-pytest": (stage_check_pytest, ["check-unit"]),
    "soak-cuda": (stage_soak_cuda, ["release"]),
    "soak-unit": (stage_soak_unit, ["setup"]),
    "soak-pytest": (stage_soak_pytest, ["package"]),
}
TEST = ["setup", "lint", "release", "unit", "asan", "tsan", "cuda", "package", "pytest"]
CHECK = ["check-setup", "check-lint", "check-unit", "check-pytest"]
SOAK = ["setup", "release", "soak-cuda", "package", "soak-unit", "soak-pytest"]


# name -> minutes of two idle cores: where ccache and .venv have all, and where they have nothing.
MINUTES: dict[str, tuple[float, float]] = {
    "setup": (0.1, 1.5),
    "lint": (0.2, 3.5),
    "release": (0.3, 6.0),
    "unit": (3.0, 3.0),
    "asan": (2.4, 7.8),
    "tsan": (3.3, 5.3),
    "cuda": (0.5, 6.5),
    "package": (0.1, 0.1),
    "pytest": (9.6, 9.6),
    "check-setup": (0.1, 0.6),
    "check-lint": (0.2, 0.2),
    "check-unit": (0.5, 5.3),
    "check-pytest": (0.3, 0.3),
}


def about(names: list[str]) -> str:
    """The minutes that these stages take, in words; "" where that is not known."""
    known = [MINUTES[name] for name in names if name in MINUTES]
    if len(known) < len(names):
        return ""
    warm, cold = (sum(minutes) for minutes in zip(*known, strict=True))
    words = f"about {warm:.1f} minutes of two idle cores"
    return words if cold < warm + 0.5 else f"{words}, {cold:.1f} if nothing was compiled before"


def used_cpu() -> float:
    """Seconds of a core that this process and those that it has waited for have used."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run_stages(names: list[str]) -> bool:
    """Runs stages in order, prints the table, and says whether all passed."""
    outcome: dict[str, str] = {}
    took: dict[str, tuple[float, float]] = {}  # seconds, and seconds of a core
    for name in names:
        action, needs = STAGES[name]
        # A stage asked for alone trusts that what it needs was done before.
        lacking = [need for need in needs if outcome.get(need, "ok") != "ok"]
        if lacking:
            outcome[name] = f"not run: {lacking[0]} failed"
            continue
        minutes = about([name])
        print(f"\n=== {name}{f': {minutes}' if minutes else ''} ===", flush=True)
        start, cpu = time.monotonic(), used_cpu()
        try:
            action()
            outcome[name] = "ok"
        except Failure as failure:
            print(f"[unjam] error: {failure}", flush=True)
            outcome[name] = "FAILED"
        if name == "release" and outcome[name] == "ok" and "cuda" in names:
            with contextlib.suppress(Failure):  # which the stage will have again, and tell
                Kernels.begin()
        took[name] = (time.monotonic() - start, used_cpu() - cpu)
    print(f"\n{'stage':<14}{'minutes':>8}{'expected':>10}{'of a core':>11}  outcome", flush=True)
    for name in names:
        wall, cpu = took.get(name, (0.0, 0.0))
        expected = "-".join(f"{m:.1f}" for m in MINUTES[name]) if name in MINUTES else ""
        print(f"{name:<14}{wall / 60:>8.1f}{expected:>10}{cpu / 60:>11.1f}  {outcome[name]}")
    wall, cpu = (sum(each) / 60 for each in zip(*took.values(), strict=True))
    known = [MINUTES[name] for name in names if name in MINUTES]
    expected = "-".join(f"{sum(m):.0f}" for m in zip(*known, strict=True))
    print(f"{'all':<14}{wall:>8.1f}{expected:>10}{cpu:>11.1f}", flush=True)
    return all(result == "ok" for result in outcome.values())


def main() -> int:
    os.chdir(ROOT)
    words = sys.argv[1:] or ["test"]
    names = {"test": TEST, "check": CHECK, "soak": SOAK}.get(words[0], words)
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise Failure(
            f"unknown stage {unknown[0]!r}; there are: test, check, soak, {', '.join(STAGES)}"
        )
    # As ctrl-C does: what was started in a group of its own is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    minutes = about(names)
    if minutes:
        print(f"[unjam] {' '.join(words)}: {minutes}", flush=True)
    try:
        passed = run_stages(names)
    finally:
        Kernels.stop()
    if not passed:
        print(f"make {' '.join(words)} FAILED: see the table above", flush=True)
        return 1
    if Tests.passed:
        skipped = f", {Tests.skipped} skipped" if Tests.skipped else ""
        print(f"{Tests.passed} passed, {Tests.failed} failed{skipped}", flush=True)
    return 0


if __name__ == "__main__":
    main_wrapper(main)
