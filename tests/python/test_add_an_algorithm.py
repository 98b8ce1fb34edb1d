"""docs/develop/add-an-algorithm.md, done: in a copy of the sources, with the code of the page.

Two files and two lines make an algorithm: it is planned, proved, listed, and moves data. Without
its row it is nowhere.

The copy is configured and built with CMake as any checkout. Its compiler is a stand-in which
takes from build/release what would come out alike, so that nothing is compiled but what includes
the registry. UNJAM_TEST_BUILD: another folder that the same sources were built in.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unjam

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/develop/add-an-algorithm.md"
BUILD = Path(os.environ.get("UNJAM_TEST_BUILD", ROOT / "build" / "release"))
REGISTRY = "src/plan/registry.h"
TESTS = ("plan_correct_test", "plan_mistakes_test", "plan_golden_test")

# Runs the compiler's words, in the copy's build folder. An object that alike/ knows is taken from
# the other build; alike/ has what it depends on.
COMPILE = """#!/bin/sh
for word; do
  [ "$last" = -o ] && object=$word
  [ "$last" = -MF ] && depends=$word
  last=$word
done
if [ -n "$object" ] && [ -f "{place}/alike/$object" ]; then
  cp "{build}/$object" "$object" && cp "{place}/alike/$object" "$depends"
  exit
fi
[ -n "$object" ] && echo "$object" >> "{place}/compiled"
exec {ccache} "$@"
"""


def code() -> tuple[dict[str, str], str, str]:
    """Of the page: the files that it shows whole, by their paths; the row, and the include."""
    page = PAGE.read_text()
    block = r":\n\n```cpp\n(.*?)```"
    files = re.findall(r"the whole of `(\S+)`" + block, page, flags=re.S)
    last_row = rf"the last row of `kAlgorithms` in `{REGISTRY}`"
    ((row,), (include,)) = (
        re.findall(sentence + block, page, flags=re.S)
        for sentence in (last_row, "Include its header there")
    )
    return dict(files), row, include


def included_by_objects() -> dict[str, list[Path]]:
    """Of the build's objects, the files that they were made from."""
    said = subprocess.run(
        ["ninja", "-C", BUILD, "-t", "deps"], capture_output=True, text=True, check=True
    ).stdout
    made_from: dict[str, list[Path]] = {}
    for line in said.splitlines():
        name, found, _ = line.partition(": #deps")
        if found:
            made_from[name] = files = []
        elif line:
            files.append((BUILD / line.strip()).resolve())
    return {name: files for name, files in made_from.items() if (BUILD / name).exists()}


class Checkout:
    """A copy of the sources, and its build."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.build = place / "build"
        tests = ("tests/unit", "tests/support", "tests/net", "tests/fixtures")
        for part in ("cmake", "include", "src", *tests):
            shutil.copytree(ROOT / part, place / part)
        shutil.copy2(ROOT / "CMakeLists.txt", place)
        if (ROOT / ".venv").exists():
            (place / ".venv").symlink_to(ROOT / ".venv")  # GoogleTest may lie there
        launcher = place / "compile"
        ccache = shutil.which("ccache") or ""
        launcher.write_text(COMPILE.format(place=place, build=BUILD, ccache=ccache))
        launcher.chmod(0o755)
        self.made_from = included_by_objects()
        self.run(
            *("cmake", "-S", place, "-B", self.build, "-G", "Ninja", "-DUNJAM_TESTS=ON"),
            *("-DUNJAM_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release", "-DUNJAM_WERROR=ON"),
            # To compile takes longer than to run.
            *("-DCMAKE_CXX_FLAGS_RELEASE=-O0", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"),
        )

    def run(self, *words: object, fails: bool = False, **variables: str) -> str:
        """What a command prints; it sees no other variable of unjam's."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("UNJAM_")}
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.place,
            env=clean | {"CCACHE_BASEDIR": str(self.place), "CCACHE_NOHASHDIR": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def make(self, *targets: str) -> set[str]:
        """Builds them; gives the names of the files that were compiled."""
        shutil.rmtree(self.place / "alike", ignore_errors=True)
        for name, files in self.made_from.items():
            made = (BUILD / name).stat().st_mtime
            if all(self.is_alike(file) and file.stat().st_mtime <= made for file in files):
                depends = self.place / "alike" / name
                depends.parent.mkdir(parents=True, exist_ok=True)
                depends.write_text(f"{name}: {' '.join(map(str, map(self.copy_of, files)))}\n")
        compiled = self.place / "compiled"
        compiled.write_text("")
        self.run("ninja", "-C", self.build, *targets)
        return {Path(line).stem for line in compiled.read_text().splitlines()}

    def copy_of(self, file: Path) -> Path:
        return self.place / file.relative_to(ROOT) if ROOT in file.parents else file

    def is_alike(self, file: Path) -> bool:
        copy = self.copy_of(file)
        if copy is file:
            return True  # the system's
        return copy.is_file() and filecmp.cmp(copy, file, shallow=False)

    def python(self, *words: str, fails: bool = False, **variables: str) -> str:
        """What Python prints with this copy's library."""
        variables["UNJAM_LIBRARY"] = str(self.build / "libunjam.so")
        variables["PYTHONPATH"] = str(Path(unjam.__file__).resolve().parents[1])
        return self.run(sys.executable, *words, fails=fails, **variables)

    def algorithms(self) -> list[str]:
        """What UNJAM_ALGORITHM takes."""
        said = self.python("-m", "unjam", "env", "UNJAM_ALGORITHM")
        (choices,) = re.findall(r"takes: +(.*)", said)
        return choices.split(", ")


PLAN = ("-m", "unjam", "plan", "--check", "broadcast", "--ranks", "7", "--algorithm", "tree")
DATA = """
import numpy, unjam

def rank(context):
    group = context.group()
    for root in range(context.size):
        for count in (1, 1000, 300_001):
            x = numpy.arange(count, dtype=numpy.float64) + 7 * context.rank
            group.broadcast(x, root=root, key=f"{root} {count}").result(60)
            assert (x == numpy.arange(count) + 7 * root).all(), (root, count)
    return {key["algorithm"] for key in context.info()["keys"]}

print(unjam.launch(6, rank, algorithm="tree"))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    if not (BUILD / ".ninja_deps").exists() or not shutil.which("cmake"):
        pytest.skip(f"there is no build by ninja in {BUILD}")
    return Checkout(tmp_path_factory.mktemp("checkout"))


def check_it_is_nowhere(checkout: Checkout) -> None:
    assert "tree" not in checkout.algorithms()
    assert "--algorithm tree: choose one of auto, ring" in checkout.python(*PLAN, fails=True)
    refused = checkout.python("-c", DATA, fails=True)
    assert "InvalidArgument: algorithm='tree': use one of auto, ring" in refused


def check_it_works(checkout: Checkout) -> None:
    assert checkout.algorithms()[-1] == "tree"
    plan = json.loads(checkout.python(*PLAN, "--list", "--json"))
    assert (plan["ok"], plan["algorithm"], plan["slots_needed"]) == (True, "tree", 1)
    steps = [program["primitives"] for program in plan["programs"]]
    assert [step["text"] for step in steps[0]] == ["copy_send_several part 0 to 1, 2"]
    assert [step["text"] for step in steps[1]] == [
        "recv_copy_send_several part 0 from 0 to 3, 4",
    ]
    assert [step["text"] for step in steps[6]] == ["recv_copy part 0 from 2"]
    assert (steps[1][0]["recv_peers"], steps[1][0]["send_peers"]) == ([0], [3, 4])
    assert checkout.python("-c", DATA).strip() == str([{"tree"}] * 6)

    # The checker proves it, and finds mistakes planted in it.
    checker, mistakes, golden = (checkout.build / "tests" / name for name in TESTS)
    proofs = "*AllKinds*:*FewestSlots*:PlanCost*:PlanSelector*"
    checkout.run(checker, f"--gtest_filter={proofs}")
    checkout.run(mistakes)

    # Its plans are new ones, and no other has changed.
    checkout.run(golden, UNJAM_TEST_GOLDEN="update")
    old, new = (
        set((folder / "tests/fixtures/golden_plans.txt").read_text().splitlines())
        for folder in (ROOT, checkout.place)
    )
    assert old < new
    assert all(line.startswith("broadcast tree ") for line in new - old)


@pytest.mark.timeout(600, func_only=True)
def test_two_files_and_a_row_make_an_algorithm(checkout: Checkout) -> None:
    files, row, include = code()
    assert sorted(files) == ["src/plan/algorithms/tree.cc", "src/plan/algorithms/tree.h"]

    # The files alone: they are compiled, and nothing else knows.
    for name, text in files.items():
        (checkout.place / name).write_text(text)
    assert checkout.make("libunjam.so") == {"tree.cc"}
    check_it_is_nowhere(checkout)

    # The row: it is everywhere.
    registry = checkout.place / REGISTRY
    without = registry.read_text()
    rows = without.index("kAlgorithms[] = {")
    end = without.index("};", rows)
    registry.write_text(without[:end] + row + without[end:])
    first = '#include "plan/algorithms/'
    registry.write_text(registry.read_text().replace(first, include + first, 1))
    compiled = checkout.make("libunjam.so", *TESTS)
    assert {"selector.cc", "plan_golden_test.cc"} < compiled
    assert compiled & {"tree.cc", "ring.cc", "context.cc", "world.cc"} == set()
    check_it_works(checkout)

    # Without the row it is gone again.
    registry.write_text(without)
    checkout.make("libunjam.so")
    check_it_is_nowhere(checkout)
