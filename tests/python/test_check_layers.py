"""The layers' lint, on trees with one fault each."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    before = set(sys.modules)
    yield importlib.import_module("check_layers").check
    for name in ("check_layers", "common"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.fixture
def tree(check, tmp_path):
    (tmp_path / "src/plan").mkdir(parents=True)
    shutil.copy(ROOT / "src/plan/registry.h", tmp_path / "src/plan")
    text = (tmp_path / "src/plan/registry.h").read_text().replace("#include", "// include")
    (tmp_path / "src/plan/registry.h").write_text(text)

    def faults(file, line):
        path = tmp_path / "src" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\n{line}\n")
        return check(tmp_path)

    return faults


@pytest.mark.parametrize(
    "line",
    [
        "if (plan.algorithm == Algorithm::kTwoShot) return;",
        "// as of rsag plans",
        "bool chain = false;",
        "// of a double binary tree",
        "int pairwise_steps = 0;",
        "// A ring plan's last primitive.",
        "// one-shot plans send first",
    ],
)
@pytest.mark.parametrize("file", ["engine/a.h", "program/a.h", "plan/lower.cc"])
def test_what_runs_plans_names_no_algorithm(tree, file, line):
    (fault,) = tree(file, line)
    assert fault.startswith(f"src/{file}:2: names an algorithm: ")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("plan/selector.cc", "return Algorithm::kTwoShot;"),
        ("engine/a.h", "void ring(std::uint32_t lane);  // rings a doorbell, directly"),
        ("engine/a.h", "// goes in one direction, and enmeshes nothing"),
    ],
)
def test_planners_and_english_may(tree, file, line):
    assert tree(file, line) == []


def test_includes_point_downwards(tree):
    (fault,) = tree("base/a.h", '#include "plan/registry.h"')
    assert fault == "src/base/a.h:2: includes plan/registry.h: base stands below plan"
