"""unjam loop plan: what it prints, draws and refuses."""

import json
import re

import pytest

from unjam import InvalidArgument
from unjam.cli import main
from unjam.loop import SHAPES, compile_graph, llama
from unjam.loop.nvrtc import find_library
from unjam.loop.picture import _KINDS, draw
from unjam.loop.tasks import FINISH

PLAN = ["loop", "plan", "--model", "tiny", "--sms", "8"]


def outcome(capsys, *words):
    try:
        status = main([*PLAN, *words])
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_it_prints_what_the_plan_has(capsys):
    status, out, err = outcome(capsys, "--ranks", "2", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    plan = compile_graph(llama(SHAPES["tiny"], ranks=2, context=4096).graph)
    assert found["ranks"] == 2 and found["faults"] == [] and found["sms"] == 8
    assert found["tasks"] == sum(row["tasks"] for row in found["operators"])
    assert found["read_bytes"] == sum(row["read_bytes"] for row in found["operators"])
    assert sum(row["busy"] for row in found["operators"]) == pytest.approx(1)
    assert {row["kind"] for row in found["operators"]} == {
        FINISH, *(op.kind for op in plan.graph.operators)
    }  # fmt: skip
    status, out, _ = outcome(capsys, "--ranks", "2")
    assert f"{found['tasks']:,} tasks on 8 SMs" in out and found["number"] in out
    assert "which is not measured" in out and "No GPU has run such a program yet." in out


def test_options_reach_the_plan(capsys):
    found = json.loads(
        outcome(capsys, "--layers", "3", "--batch", "2", "--context", "64", "--dtype", "f32",
                "--sync", "grid", "--bandwidth", "0.001", "--json")[1]
    )  # fmt: skip
    assert (found["batch"], found["context"], found["dtype"]) == (2, 64, "f32")
    assert found["sync"] == "grid" and found["counters"] == 3 * 7 + 4
    assert found["model_us"] > found["read_bytes"] / 1000


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--model", "x"], "--model x is not known: give one of llama-3.2-1b, "),
        (["--ranks", "3"], "kv_heads=2 does not divide by ranks=3"),
        (["--ranks", "73"], "73 is not a number of ranks from 1 to 72"),
        (["--batch", "0"], "0 is not a batch from 1 to 16"),
        (["--bandwidth", "0"], "0 is not a bandwidth above 0"),
        (["--sync", "grids"], "invalid choice: 'grids'"),
        (["--compile", "sm_9"], "invalid choice: 'sm_9'"),
        (["--picture", "x.txt"], "the ending must be one of .png, .svg, .pdf"),
        (["--picture", "/proc/self/x.png"], "--picture"),
    ],
)
def test_what_it_refuses(capsys, words, cause):
    status, out, err = outcome(capsys, *words)
    assert (status, out) == (2, "") and cause in err


@pytest.mark.parametrize("name", ["a.svg", "b.png", "c.pdf"])
def test_it_draws(capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    status, _, err = outcome(capsys, "--ranks", "2", "--picture", str(tmp_path / name))
    assert status == 0 and f"drawn: {tmp_path / name}" in err
    assert (tmp_path / name).stat().st_size > 5000
    if name.endswith("svg"):
        text = (tmp_path / name).read_text()
        for words in ("not measured", "SM", "send", "attention", "tiny, counters"):
            assert words in text


def test_a_picture_says_what_it_cannot(capsys, tmp_path, monkeypatch):
    plan = compile_graph(llama(SHAPES["tiny"]).graph)
    with pytest.raises(InvalidArgument, match="the ending must be one of .png, .svg, .pdf"):
        draw(plan, tmp_path / "x.txt")

    def full(*_):
        raise OSError("full")

    monkeypatch.setattr("unjam.loop.picture.draw", full)
    status, out, err = outcome(capsys, "--picture", str(tmp_path / "x.svg"))
    assert status == 1 and len(out.splitlines()) > 5
    assert re.search(r"argument --picture: .*x.svg cannot be written: full", err)


def test_every_kind_has_a_colour():
    from unjam.loop.ops import RULES

    assert set(_KINDS) == {*RULES, FINISH}


@pytest.mark.skipif(find_library() is None, reason="there is no NVRTC")
@pytest.mark.soak
def test_it_compiles(capsys):
    status, out, _ = outcome(capsys, "--compile", "sm_80")
    assert status == 0 and re.search(r"NVRTC, sm_80: \d+ registers, 0 bytes spilled", out)


def test_a_compiler_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("unjam.loop.nvrtc.find_library", lambda: None)
    status, out, err = outcome(capsys, "--compile", "sm_80")
    assert (status, out) == (1, "")
    assert "libnvrtc was not found: pip install nvidia-cuda-nvrtc" in err
