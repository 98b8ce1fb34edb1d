"""Pages that show a command or a table are tested."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import unjam
import unjam._torch_settings
from processes import environment
from unjam._config import algorithms

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced blocks of one language (all of what stands behind the fence), also those
    inside lists."""
    text = re.sub(r"^ +```", "```", page.read_text(), flags=re.M)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def test_readme_example_runs(python: Run) -> None:
    _, example = blocks(ROOT / "README.md", "python")
    result = python("-c", example)
    assert result.returncode == 0, result.stdout + result.stderr


def test_torch_examples_run_under_torchrun(tmp_path: Path) -> None:
    """What README.md and the pages of PyTorch show, and those with an output, in one start: torch
    takes seconds to import."""
    pytest.importorskip("torch")
    programs = shown("python torchrun")
    assert programs
    readme, _ = blocks(ROOT / "README.md", "python")
    (start,) = blocks(DOCS / "torch.md", "python")
    (keys,) = blocks(DOCS / "guide" / "torch" / "keys.md", "python")
    keys = "\n".join(line for line in keys.splitlines() if "isend" not in line)
    (tmp_path / "shown.py").write_text(
        "import unjam.torch\n"  # where the package is not installed
        f"{readme}\n{start}\nimport torch\ngrad = torch.ones(3)\n{keys}\n"
        "assert grad[0] == 8, grad\ndist.destroy_process_group()\n"
        + "\n".join(program for _, program, _ in programs)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, "shown.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    printed = set(result.stdout.splitlines())
    for name, _, output in programs:
        assert set(output.splitlines()) <= printed, name


def test_the_example_of_registered_memory_runs(python: Run) -> None:
    (example,) = blocks(DOCS / "guide" / "memory.md", "python")
    result = python("-c", example + "\nassert all((x == 1).all() for x in xs)")
    assert result.returncode == 0, result.stdout + result.stderr


def test_processes_started_by_a_loop(tmp_path: Path) -> None:
    """docs/guide/processes.md: the program and the loop that starts it, as they stand there."""
    page = DOCS / "guide" / "processes.md"
    (program,) = blocks(page, "python")
    (tmp_path / "rank.py").write_text(program)
    (block,) = blocks(page, "sh")
    loop = "\n".join(line for line in block.splitlines() if "UNJAM" in line)
    for name, words in (("python", ""), ("unjam", "-m unjam")):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        path.chmod(0o755)
    result = subprocess.run(
        ["bash", "-c", loop],
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONUNBUFFERED=""),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert sorted(result.stdout.splitlines()) == [f"rank {r} of 4 has 6.0" for r in range(4)], (
        result.stdout + result.stderr
    )


def shown(language: str) -> list[tuple[str, str, str]]:
    """(page and number, program, output) of blocks that have an output behind them."""
    pattern = rf"^```{language}\n(.*?)^```$(?:(?!^```).)*?^```text output\n(.*?)^```$"
    return [
        (f"{page.relative_to(ROOT)}:{k}", program, output)
        for page in PAGES
        for k, (program, output) in enumerate(
            re.findall(
                pattern,
                re.sub(r"^```(text|sh|console)\n.*?^```$", "", page.read_text(), flags=re.M | re.S),
                flags=re.M | re.S,
            )
        )
    ]


def without_times(text: str) -> str:
    return re.sub(r"\d+\.\d+ s\b", "# s", text)


@pytest.mark.parametrize(
    ("program", "output"), [pytest.param(p, o, id=name) for name, p, o in shown("python")]
)
def test_shown_program_prints_what_is_shown(program: str, output: str, python: Run) -> None:
    result = python("-c", program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert without_times(result.stdout) == without_times(output)


def test_lines_of_c_stand_in_the_example() -> None:
    """docs/tutorials/c.md shows parts of a program that is compiled and run."""
    example = (ROOT / "examples" / "all_reduce.c").read_text()
    lines = {line.strip() for line in example.splitlines()}
    for block in blocks(DOCS / "tutorials" / "c.md", "c"):
        for line in block.splitlines():
            code = re.sub(r"\s*/\*.*\*/$", "", line).strip()
            assert not code or {line.strip(), code} & lines, line


def test_generated_pages_are_what_their_sources_say(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")  # of the same extra as what draws
    monkeypatch.syspath_prepend(ROOT / "tools")
    stale = importlib.import_module("docs_pages").stale()
    assert stale == [], "python3 tools/docs.py --generate brings them up to date"


def test_each_algorithm_has_its_page_and_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = importlib.import_module("docs_pages").ALGORITHM_PAGES
    there = {name.replace("_", "-") for name in algorithms()} - {"auto"}
    assert {page[0].replace("_", "-") for page in pages.values()} == there
    index = (DOCS / "algorithms" / "index.md").read_text()
    assert set(re.findall(r"^\| \[([\w-]+)\]\(\1\.md\)", index, re.MULTILINE)) == there


def test_environment_page_is_complete() -> None:
    lib = ctypes.CDLL(str(library_path()))
    buffer = ctypes.create_string_buffer(1 << 16)
    assert lib.unjamEnvironment(buffer, ctypes.c_size_t(len(buffer)), None) == 0
    page = (ROOT / "docs" / "environment.md").read_text()
    for variable in json.loads(buffer.value):
        if variable["read_by"] != "library":
            continue
        (row,) = [r for r in page.splitlines() if r.startswith(f"| `{variable['name']}` ")]
        cells = [c.strip() for c in row.strip("|").split(" | ")]
        assert cells[2] == str(variable["default"]), row
        assert cells[3] == ("yes" if variable["agreed"] else ""), row
        assert cells[4] == variable["doc"], row


def test_environment_page_has_the_defaults_of_cuda() -> None:
    """Those that are numbers where the library sets them."""
    source = (ROOT / "src" / "runtime" / "settings.cc").read_text()
    body = source.split("Settings device_defaults(")[1].split("\n}\n")[0]
    cuda = dict(re.findall(r"\bs\.(\w+) = (\d+);", body))
    page = (ROOT / "docs" / "environment.md").read_text()
    words = " ".join(page.split())
    spins = "{spin_head}, {spin_base} and {spin_cap}".format(**cuda)
    assert f"On CUDA the spin thresholds are {spins} polls" in words
    assert f"and {cuda['idle_keys']} idle keys have room" in words
    said = re.findall(r"^\| `UNJAM_(\w+)` .*\bon CUDA (\d+) unless said", page, flags=re.M | re.I)
    numbers = {name.lower(): number for name, number in said if name.lower() in cuda}
    assert {"max_active_keys", "guaranteed_slots", "pool_slots"} <= numbers.keys()
    assert numbers.items() <= cuda.items()


def test_environment_page_has_what_the_torch_backend_reads() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    for variable in unjam._torch_settings.ALL:
        words = [variable.values, variable.default, variable.doc.removeprefix("torch: ")]
        assert f"| `{variable.name}` | {' | '.join(words)} |" in page


def test_environment_page_has_what_the_package_reads() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    read = set()
    for file in (ROOT / "python" / "unjam").rglob("*.py"):
        read |= set(re.findall(r'"(UNJAM_[A-Z_]*[A-Z])"', file.read_text()))
    assert {"UNJAM_LIBRARY", "UNJAM_COMMIT"} <= read
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def library_path() -> Path:
    return unjam.library_path()


def test_the_late_ranks_picture(tmp_path: Path) -> None:
    """What draws docs/images/late-rank-gpus.png."""
    pytest.importorskip("matplotlib")
    script = ROOT / "bench" / "late_rank_picture.py"
    spec = importlib.util.spec_from_file_location("late_rank_picture", script)
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    rows = [
        {"policy": "fixed", "rank": rank, "late_rank": "1", "position": place, "latency_us": us}
        for rank, place, us in [
            ("0", "0", "10"),
            ("2", "0", "30"),
            ("0", "1", "5"),
            ("2", "1", "-1"),
            ("1", "0", "7"),
        ]
    ]
    assert picture.means(rows, "latency_us") == {
        ("fixed", False): [20.0, 5.0],
        ("fixed", True): [7.0],
    }
    measured = ROOT / "bench" / "results" / "late-rank-h200-4-gpus.csv"
    picture.draw(measured, tmp_path / "late.png")
    assert (tmp_path / "late.png").read_bytes()[:4] == b"\x89PNG"


def test_acts_of_executors_are_stated_once() -> None:
    page = (ROOT / "docs/internals/executors.md").read_text()
    acts = set(re.findall(r"`(src/[\w/.]+)`: `(\w+)`", page))
    assert len(acts) >= 14
    folders = ["src/device/cuda", "src/transport", "src/engine", "src/program"]
    texts = {
        str(file.relative_to(ROOT)): file.read_text()
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.*h"))
    }
    for file, name in acts:
        begin = "struct " if name[0].isupper() else "(?:inline|static|UNJAM_HD|__device__) [^;=(]*"
        stated = re.compile(rf"^ *{begin}\b{name}\b[^;]*{{", re.MULTILINE)
        where = [path for path, text in texts.items() for _ in stated.findall(text)]
        assert where == [file], f"{name}: stated in {where}"
