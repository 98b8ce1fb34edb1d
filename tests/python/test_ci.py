"""The stages of ``make test``, ``make check`` and ``make soak``: what tools/ci.py says of them."""

import importlib
import json
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ci(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    before = set(sys.modules)
    yield importlib.import_module("ci")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == ROOT / "tools":
            del sys.modules[name]


def test_stages_follow_what_they_need(ci):
    for names in (ci.TEST, ci.CHECK, ci.SOAK):
        for i, name in enumerate(names):
            needs = ci.STAGES[name][1]
            assert set(needs) & set(names) <= set(names[:i]), name
    assert {need for _, needs in ci.STAGES.values() for need in needs} <= ci.STAGES.keys()


def test_minutes_are_told_beforehand(ci):
    assert {*ci.TEST, *ci.CHECK} <= ci.MINUTES.keys() <= ci.STAGES.keys()
    assert ci.about(["unit"]) == f"about {ci.MINUTES['unit'][0]:.1f} minutes of two idle cores"
    assert "if nothing was compiled before" in ci.about(ci.TEST)
    assert ci.about(ci.SOAK) == ""  # nobody waits for it


def test_a_table_ends_the_stages_and_a_failure_is_one(ci, monkeypatch, capsys):
    def fails():
        raise ci.Failure("why")

    stages = {"a": (fails, []), "b": (lambda: None, ["a"]), "c": (lambda: None, [])}
    monkeypatch.setattr(ci, "STAGES", stages)
    monkeypatch.setattr(ci, "MINUTES", {"a": (1.0, 2.0)})
    assert not ci.run_stages(["a", "b", "c"])
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["a", "b", "c", "all"]
    assert rows[0][2] == "1.0-2.0" and rows[0][-1] == "FAILED" and rows[2][-1] == "ok"
    assert " ".join(rows[1]).endswith("not run: a failed")
    assert "=== a: about 1.0 minutes" in said and "=== c ===" in said and "error: why" in said


def test_files_of_the_quick_check_are_there(ci):
    for name in ci.QUICK_FILES:
        assert (ROOT / "tests" / "python" / f"test_{name}.py").is_file(), name


def test_compilers_run_behind_ccache_where_it_is(ci, monkeypatch):
    monkeypatch.setattr(ci.os, "environ", {"CCACHE_BASEDIR": "/mine"})
    monkeypatch.setattr(ci, "shutil", types.SimpleNamespace(which=lambda name: None))
    assert ci.use_compiler_cache() == {}
    monkeypatch.setattr(ci, "shutil", types.SimpleNamespace(which=lambda name: f"/bin/{name}"))
    assert ci.use_compiler_cache()["CMAKE_CUDA_COMPILER_LAUNCHER"] == "/bin/ccache"
    assert ci.os.environ["CCACHE_BASEDIR"] == "/mine"


def test_presets_that_stages_use_are_there(ci):
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    for kind in ("configurePresets", "testPresets"):
        assert {"release", "check", "asan", "tsan"} <= {preset["name"] for preset in presets[kind]}
