"""``make lint`` refuses comments that name machines, laboratory notes or what happened once."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    yield importlib.import_module("check_comments")
    for name in ("check_comments", "common"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "comment",
    [
        "// Between two H200s it is faster.",
        "int x;  // see lab/notes",
        "// by a probe that is not in the tree",
        "// (four GPUs hung)",
        "// 7.7 us instead of 8.2",
    ],
)
def test_comments_that_are_refused(module, comment):
    (fault,) = module.faults("base/x.h", f"int y;\n{comment}\n")
    assert fault.startswith("src/base/x.h:2: ")


@pytest.mark.parametrize(
    "line",
    [
        "// A rank that spins takes the time of its peer.",
        'const char* url = "http://lab/H200";',
        'if (name == "H200") {}',
        "// GPUs of compute capability 9.0",
    ],
)
def test_lines_that_are_not(module, line):
    assert module.faults("base/x.h", line) == []


@pytest.mark.parametrize(
    ("lines", "allowed", "fault"),
    [
        (12, None, ""),
        (13, None, "of at most 12"),
        (20, 20, ""),
        (21, 20, "of at most 20"),
        (19, 20, "says 20: say 19"),
        (12, 20, "says 20: leave it out"),
    ],
)
def test_heads_are_short(module, lines, allowed, fault):
    text = "// A line.\n" * lines + "#pragma once\n// Another comment.\n"
    found = module.head_fault("base/x.h", text, allowed)
    assert fault in found
    assert bool(found) == bool(fault)


def test_the_list_of_long_heads_names_files_that_there_are(module, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.h").write_text("// A line.\n" * 14)
    (tmp_path / "tools" / "long_heads.txt").write_text("# Why.\n14 x.h\n13 gone.h\n")
    assert module.check(tmp_path) == ["tools/long_heads.txt: there is no src/gone.h"]


def test_this_repository_has_none(module):
    assert module.check(TOOLS.parent) == []
