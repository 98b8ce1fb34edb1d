"""bench/async_ring without GPUs: the model's formulas, the report, and the script.

tests/fixtures/async_ring was written by the program itself on a stand-in for CUDA, whose times mean
nothing. The rings' steps are tested in tests/unit/async_ring_test.cc.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")

from rich.console import Console  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "async_ring"
RECORDED = ROOT / "tests" / "fixtures" / "async_ring"
MIB = 1 << 20


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


model = _load("model")
report = _load("report")
Line, Model = model.Line, model.Model


def make_model(ranks=2, step=0.0, **lines):
    """All lines are nothing but for those given."""
    nothing = {
        name: Line(0, 0) for name in ("copy_local", "copy_peer", "add", "allocate", "send_receive")
    }
    return Model(ranks=ranks, step=step, synchronize=0.0, **(nothing | lines))


# ---- the model ----


def test_a_line_is_found_again():
    points = [(size, 3 + 0.002 * size) for size in (1 << 10, 1 << 14, 1 << 20, 1 << 28)]
    line = model.fit_line(points)
    assert line.alpha == pytest.approx(3, rel=1e-6)
    assert line.beta == pytest.approx(0.002, rel=1e-6)
    assert line.rate == pytest.approx(0.5)


def test_errors_count_relative_to_the_time():
    """A latency is found although a large time is off by far more than it."""
    points = [(1024, 5.0), (2048, 5.0), (1 << 30, 3000.0), (1 << 30, 2900.0)]
    assert model.fit_line(points).alpha == pytest.approx(5, rel=0.02)


def test_neither_part_is_negative():
    falling = model.fit_line([(1000, 20.0), (100000, 10.0)])
    assert falling.beta == 0 and 10 <= falling.alpha <= 20
    steep = model.fit_line([(1000, 1.0), (2000, 3.0)])
    assert steep.alpha == 0 and 0.001 <= steep.beta <= 0.0015


@pytest.mark.parametrize("points", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)], [(8, 1.0), (9, 0.0)]])
def test_what_no_line_goes_through(points):
    with pytest.raises(ValueError, match="two sizes"):
        model.fit_line(points)


def test_classic_has_nothing_beside_anything():
    four = make_model(
        ranks=4,
        copy_local=Line(1, 0.001),
        send_receive=Line(10, 0.01),
        add=Line(2, 0.002),
        allocate=Line(100, 0),
    )
    # Chunks of 1000: the copy 5; three times (two sends of 20, an addition of 4).
    assert four.classic_us(4000, kept=True) == pytest.approx(5 + 3 * (2 * 20 + 4))
    assert four.classic_us(4000, kept=False) == pytest.approx(137 + 100)
    assert make_model(send_receive=None).classic_us(4000, kept=True) is None


def test_async_adds_beside_transfers():
    # Two ranks, four batches, chunks of 500: a transfer takes 10, an addition 4.
    two = make_model(copy_peer=Line(5, 0.01), add=Line(0, 0.008), allocate=Line(50, 0))
    assert two.async_us(4000, 4, kept=True) == pytest.approx(8 * 10)
    assert two.async_us(4000, 4, kept=False) == pytest.approx(80 + 2 * 50)
    # Where additions take longer, 25 each, they set the pace of the first half.
    slow = make_model(copy_peer=Line(5, 0.01), add=Line(0, 0.05))
    assert slow.async_us(4000, 4, kept=True) == pytest.approx(5 * 10 + 3 * 25)
    # The last addition of all, 50, is behind the third of the four transfers left.
    slower = make_model(copy_peer=Line(5, 0.01), add=Line(0, 0.1))
    assert slower.async_us(4000, 4, kept=True) == pytest.approx(2 * 10 + 4 * 50)


def test_async_is_no_faster_than_its_hosts():
    assert make_model(step=30.0).async_us(4000, 8, kept=True) == pytest.approx(16 * 30)


def async_by_schedule(ranks: int, batches: int, pull: float, add: float) -> float:
    """What a rank needs whose peers do as it does: a transfer and an addition go on at a time, each
    stream in order, and a transfer waits for the addition that made its chunk."""
    rounds = (ranks - 1) * batches
    engine = kernels = 0.0
    ends: list[float] = []
    stream = [0.0, 0.0]  # when it is done
    for step in range(2 * rounds):
        begin = max(
            engine,
            stream[step % 2 if step < rounds else 0],
            ends[step - batches] if step >= batches else 0.0,  # its chunk
        )
        engine = begin + pull
        if step < rounds:
            kernels = max(engine, kernels) + add
        ends.append(kernels if step < rounds else engine)
        stream[step % 2 if step < rounds else 0] = ends[-1]
    return ends[-1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("batches", [2, 4, 8])
@pytest.mark.parametrize("add", [0.0, 2.0, 7.0, 8.0, 11.0, 40.0])
def test_the_formula_is_the_schedules_time(ranks, batches, add):
    made = make_model(ranks=ranks, copy_peer=Line(7, 0), add=Line(add, 0))
    expected = async_by_schedule(ranks, batches, 7.0, add)
    assert made.async_us(64 * MIB, batches, kept=True) == pytest.approx(expected)


def test_columns_of_the_table():
    made = make_model(send_receive=Line(1, 0), copy_peer=Line(3, 0), allocate=Line(50, 0))
    assert made.column_us("classic_kept", MIB) == made.classic_us(MIB, kept=True)
    assert made.column_us("async_8", MIB) == made.async_us(MIB, 8, kept=False)
    assert made.column_us("nccl", MIB) is None
    assert made.column_us("unjam_dma", MIB) is None


def test_a_probe_that_is_missing_is_named():
    data = json.loads((RECORDED / "async-ring.json").read_text())
    assert model.fit_model(2, data["probes"]).send_receive is not None
    without = [p for p in data["probes"] if p["kind"] != "send_receive"]
    assert model.fit_model(2, without).send_receive is None
    for kind in ("step", "copy_peer"):
        with pytest.raises(ValueError, match=kind):
            model.fit_model(2, [p for p in data["probes"] if p["kind"] != kind])


# ---- the report ----


@pytest.fixture
def recorded(tmp_path):
    """A folder as run.sh leaves it, and its figures to change."""
    for name in (report.FIGURES, report.TIMELINE):
        (tmp_path / name).write_text((RECORDED / name).read_text())
    return tmp_path, json.loads((RECORDED / report.FIGURES).read_text())


def write(folder: Path) -> tuple[str, str]:
    """report.markdown, and what the terminal shows."""
    console = Console(file=io.StringIO(), width=250)
    report.write_report(folder, folder / "out", console)
    return (folder / "out" / "report.markdown").read_text(), console.file.getvalue()


def test_report_of_what_the_program_wrote(recorded):
    folder, data = recorded
    text, shown = write(folder)
    assert "All were right." in text
    for cell in data["cells"]:
        assert report._round(cell["us_median"]) in text
    for column in data["columns"]:
        assert column["label"] in text and column["name"] in shown
    for overlap in data["overlaps"]:
        assert f"{overlap['share'] * 100:.0f} %" in text
    for name in ("bandwidth.png", "model.png", "timeline.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in text
    assert "| 1 MiB | async ring, 8 batches |" in text  # of the model


def test_rates_are_bytes_over_time(recorded):
    folder, data = recorded
    for cell in data["cells"]:
        if cell["column"] == "nccl" and cell["bytes"] == MIB:
            cell["us_median"], cell["issue_us_median"] = 2000.0, 4.0
    (folder / report.FIGURES).write_text(json.dumps(data))
    figures = report.read_figures(folder / report.FIGURES)
    assert figures.gbps("nccl", MIB) == pytest.approx(0.524288)
    # As if issuing were all: what the seed's table has.
    assert figures.gbps("nccl", MIB, "issue_us_median") == pytest.approx(262.144)
    assert report.stream_rows(figures)[1][-1][-1] == "262"


def test_ratios_are_to_the_classic_ring(recorded):
    folder, data = recorded
    for cell in data["cells"]:
        cell["us_median"] = {"classic": 30.0, "async_8": 20.0}.get(cell["column"], 60.0)
    (folder / report.FIGURES).write_text(json.dumps(data))
    head, rows = report.ratio_rows(report.read_figures(folder / report.FIGURES), brief=True)
    assert {row[head.index("async_8")] for row in rows} == {"1.50"}
    assert {row[head.index("nccl")] for row in rows} == {"0.50"}


def test_wrong_results_are_no_figures(recorded):
    folder, data = recorded
    changed = copy.deepcopy(data)
    for cell in changed["cells"]:
        if cell["column"] == "async_2":
            cell["wrong"] = 3
    changed["overlaps"][0]["wrong"] = 1
    (folder / report.FIGURES).write_text(json.dumps(changed))
    text, _ = write(folder)
    assert (
        "Wrong ones: async_2." in text
        and text.count("WRONG") == len({c["bytes"] for c in changed["cells"]}) + 1
    )
    assert report.read_figures(folder / report.FIGURES).us("async_2", MIB) is None


def test_a_column_that_was_not_measured_is_named(recorded):
    folder, data = recorded
    data["cells"] = [c for c in data["cells"] if c["column"] != "unjam_dma"]
    data["columns"][-1]["not_measured"] = "the library does not know UNJAM_DMA=1"
    (folder / report.FIGURES).write_text(json.dumps(data))
    text, shown = write(folder)
    assert "Not measured: unjam by copy engines: the library does not know UNJAM_DMA=1." in text
    assert "unjam_dma" not in shown


def test_without_probes_there_is_no_model(recorded):
    folder, data = recorded
    data["probes"] = []
    (folder / report.FIGURES).write_text(json.dumps(data))
    (folder / report.TIMELINE).unlink()
    text, shown = write(folder)
    assert "## Model" not in text and "no model" in shown
    assert not (folder / "out" / "timeline.png").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Run run.sh first"),
        ("{", "not what async_ring writes"),
        ('{"program": "gate"}', "another program"),
        ('{"program": "async_ring"}', "not what async_ring writes"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, words, monkeypatch, capsys):
    if content is not None:
        (tmp_path / report.FIGURES).write_text(content)
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    assert report.main() == 1
    assert words in capsys.readouterr().err


def test_the_command(recorded):
    folder, _ = recorded
    result = subprocess.run(
        [sys.executable, FOLDER / "report.py", folder, "--out", folder / "out"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert (folder / "out" / "report.markdown").is_file()


# ---- the script ----

PROGRAM = """#!/bin/sh
echo "nvls $NCCL_NVLS_ENABLE"
for word in "$@"; do echo "word $word"; done
[ -z "$HANG" ] || exec sleep 100
exit ${EXIT:-0}
"""


def run_script(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = folder / "async_ring"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return subprocess.run(
        [FOLDER / "run.sh", *words],
        env=os.environ | {"ASYNC_RING": str(program), "OUT": str(folder / "out")} | environment,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )


def test_the_script_starts_the_program(tmp_path):
    result = run_script(tmp_path, "--largest", "1M", NCCL="/x/libnccl.so.2", EXIT="0")
    assert result.returncode == 0, result.stdout + result.stderr
    log = (tmp_path / "out" / "async-ring.log").read_text()
    words = [line.removeprefix("word ") for line in log.splitlines() if line.startswith("word ")]
    out = str(tmp_path / "out")
    assert words == [
        *("--nccl", "/x/libnccl.so.2"),
        *("--json", f"{out}/async-ring.json", "--trace-json", f"{out}/async-ring-timeline.json"),
        *("--largest", "1M"),
    ]
    assert "nvls 0" in log


def test_the_script_says_what_went_wrong(tmp_path):
    result = run_script(tmp_path, str(tmp_path / "there"), EXIT="1")
    assert result.returncode == 1
    assert "async_ring ended with 1" in (tmp_path / "there" / "async-ring.log").read_text()
    result = run_script(tmp_path, ASYNC_RING="/nowhere/async_ring")
    assert result.returncode == 2 and "gpu_async_ring" in result.stderr


def test_a_program_that_hangs_is_ended(tmp_path):
    result = run_script(tmp_path, HANG="1", SECONDS_MOST="1", NCCL="/x")
    assert result.returncode == 124 and "async_ring ended with 124" in result.stdout
