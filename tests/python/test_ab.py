"""bench/ab.py: its draws, its verdicts, and what it says of workers that fail.

The worker is a stand-in that answers as bench/gate.cu does, so that no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What it answers depends on the file `figures` beside the library that it is started with.
GATE = """#!{python}
import json, os, sys
from pathlib import Path

folder = Path(os.environ["LD_LIBRARY_PATH"])
figures = json.loads((folder / "figures").read_text())
with open(folder / "started", "a+") as file:  # of a build, which may have two in a draw
    file.write("once\\n")
    file.seek(0)
    number = len(file.readlines())
print("a word on stdout that is no answer", flush=True)
print(json.dumps({{"library": figures.get("library", str(folder / "libunjam.so.0"))}}), flush=True)
for line in sys.stdin:
    line = line.strip()
    if line == "end":
        sys.exit(figures.get("ends", 0))
    with open(folder / "asked", "a") as file:
        file.write(f"{{os.getpid()}} {{line}}\\n")
    if line == "rows":
        answer = {{"rows": ["a/1", "a/2", "b/1"]}}
    elif line == "counts":
        answer = figures.get("counts", {{"calls": 100, "without_engine": 90}})
    elif figures.get("dies") == line:
        sys.exit(7)
    elif figures.get("fails") == line:
        answer = {{"error": "no GPU"}}
    else:
        us = figures["us"].get(line, 10)
        us *= 1 + figures.get("spread", 0) * (number % 2)
        answer = {{"row": line, "us": us, "bits": figures.get("bits", {{}}).get(line, "0")}}
    print(json.dumps(answer), flush=True)
"""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ab", ROOT / "bench/ab.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ab"] = module
    spec.loader.exec_module(module)
    return module


ab = _load()


class Builds:
    """Two folders and the stand-in."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.gate = place / "gate"
        self.gate.write_text(GATE.format(python=sys.executable))
        self.gate.chmod(0o755)
        self.report = place / "report.json"
        self.build("base")
        self.build("head")

    def build(self, name: str, **figures: object) -> None:
        folder = self.place / name
        folder.mkdir(exist_ok=True)
        (folder / "libunjam.so.0").touch()
        (folder / "figures").write_text(json.dumps({"us": {}} | figures))

    def run(self, *options: str) -> int:
        words = [str(self.place / "base"), str(self.place / "head"), *options]
        return ab.main(
            [*words, "--draws", "5", "--gate", str(self.gate), "--json", str(self.report)]
        )

    def verdicts(self) -> dict[str, str]:
        rows = json.loads(self.report.read_text())["rows"]
        return {row["row"]: row["verdict"] for row in rows}


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    monkeypatch.setattr("unjam.bench.report.describe", dict)  # there may be no GPU
    return Builds(tmp_path)


def test_equal_builds_pass(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    assert builds.run() == 0
    assert set(builds.verdicts().values()) == {"equal"}
    told = capsys.readouterr()
    assert "a/1" in told.out and "1.000" in told.out
    assert "without_engine: 90.0% of calls, 90.0% at base: not lower" in told.out
    assert "a word on stdout that is no answer" in told.err


def test_draws_are_processes_and_rounds_alternate(builds: Builds) -> None:
    assert builds.run("a/1") == 0
    asked = [line.split() for line in (builds.place / "base/asked").read_text().splitlines()]
    pids = [pid for pid, row in asked if row == "a/1"]
    assert len(set(pids)) == 2 * 5
    for draw in range(5):
        first, second, *more = pids[8 * draw : 8 * draw + 8]
        assert first != second
        assert more == [second, first, first, second, second, first]


def test_a_slower_row_fails(builds: Builds) -> None:
    builds.build("head", us={"a/2": 10.3, "b/1": 9.0})
    assert builds.run() == 1
    assert builds.verdicts() == {"a/1": "equal", "a/2": "SLOWER", "b/1": "faster"}


def test_what_lies_within_the_spread_of_equal_builds_passes(builds: Builds) -> None:
    builds.build("base", spread=0.1)
    builds.build("head", us={"a/2": 10.9})
    assert builds.run("a/*") == 0
    assert builds.verdicts() == {"a/1": "equal", "a/2": "equal"}


def test_other_bits_fail(builds: Builds) -> None:
    builds.build("head", bits={"b/1": "1"})
    assert builds.run() == 1
    assert builds.verdicts()["b/1"] == "BITS"


def test_fewer_calls_without_the_engine_fail(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    builds.build("head", counts={"calls": 100, "without_engine": 80})
    assert builds.run() == 1
    assert "without_engine: 80.0% of calls, 90.0% at base: LOWER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"dies": "a/2"}, "head ended with status 7 in a/2"),
        ({"fails": "a/2"}, "head: no GPU"),
        ({"ends": 6}, "head ended with status 6 when it closed its job"),
        ({"library": "/usr/lib/libunjam.so.0"}, "head: /usr/lib/libunjam.so.0 is measured, not"),
    ],
)
def test_a_worker_that_fails_is_named(
    builds: Builds, figures: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    builds.build("head", **figures)
    assert builds.run() == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draws", "4"], "at least 5"),
        (["--gate", "/nowhere/gate"], "/nowhere/gate is not built"),
    ],
)
def test_wrong_arguments_are_named(
    builds: Builds, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, head = str(builds.place / "base"), str(builds.place / "head")
    with pytest.raises(SystemExit, match="2"):
        ab.main([base, head, "--gate", str(builds.gate), *options])
    assert words in capsys.readouterr().err


def test_rows_that_there_are_not_are_named(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    assert builds.run("c/*") == 1
    assert "no row c/*; there are: a/1, a/2, b/1" in capsys.readouterr().err


def test_the_script_explains_itself_and_names_what_it_cannot_build(tmp_path: Path) -> None:
    script = str(ROOT / "bench/ab.sh")
    told = subprocess.run([script], capture_output=True, text=True, timeout=60)
    assert told.returncode == 2 and "bench/ab.sh BASE HEAD" in told.stdout
    told = subprocess.run(
        [script, str(tmp_path), "HEAD"], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 1
    assert f"{tmp_path} is neither a folder with libunjam.so.0 nor a commit" in told.stderr
