"""Mistakes planted in kernels: tests/simt/planted_mistakes.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "simt" / "planted_mistakes.py"


def test_each_mistake_can_still_be_planted() -> None:
    listed = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) >= 20


@pytest.mark.soak
def test_planted_mistakes_are_found() -> None:
    subprocess.run([sys.executable, SCRIPT], check=True)
