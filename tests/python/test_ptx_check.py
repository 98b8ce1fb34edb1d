"""tools/ptx_check.py: what it makes of what ptxas says. (`make test` runs it on the real PTX.)"""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PTX = ".version 9.0\n.target sm_80\n.func f() { ret; }\n"  # three lines; the planted one is next

PLANTED = "ptxas x.ptx, line 4; error   : Unknown symbol '%planted'"
CLUSTERS = (
    "ptxas x.ptx, line 3; error   : Feature '%cluster_nctaid' requires .target sm_90 or higher"
)


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    yield importlib.import_module("ptx_check")
    for name in ("ptx_check", "cuda_toolchain", "common"):  # as common as names can be
        sys.modules.pop(name, None)


@pytest.fixture
def ptxas(tmp_path):
    def make(*lines, code=255):
        path = tmp_path / "ptxas"
        said = "".join(f'echo "{line}"\n' for line in lines)
        # What it was given must be as it says.
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -arch=sm_80 ] || exit 7\n'
            f'sed -n 4p "$3" | grep -q planted || exit 8\n{said}exit {code}\n'
        )
        path.chmod(0o755)
        return path

    return make


def test_of_the_planted_line_alone_it_says_nothing(check, ptxas):
    assert check.errors_of(ptxas(PLANTED), PTX) == []
    assert check.errors_of(ptxas(PLANTED), PTX.rstrip("\n")) == []


def test_all_other_errors_are_told(check, ptxas):
    errors = check.errors_of(ptxas(CLUSTERS, PLANTED), PTX)
    assert errors == ["line 3: Feature '%cluster_nctaid' requires .target sm_90 or higher"]


@pytest.mark.parametrize(("lines", "code"), [((CLUSTERS,), 255), ((), 0), ((PLANTED,), 0)])
def test_who_has_not_read_to_the_end_fails(check, ptxas, lines, code):
    with pytest.raises(check.Failure, match="did not find what was planted in line 4"):
        check.errors_of(ptxas(*lines, code=code), PTX)


def test_what_is_no_ptx_fails(check, ptxas):
    with pytest.raises(check.Failure, match=r"names no \.target"):
        check.errors_of(ptxas(PLANTED), "ELF")
