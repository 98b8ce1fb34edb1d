"""Pipelines whose stages have several ranks; the ranks' part is in meshes_checks.py."""

import importlib.util

import pytest

from torch_tools import RUN_S, run

if importlib.util.find_spec("torch") is None:
    pytest.skip("no torch here", allow_module_level=True)

pytestmark = pytest.mark.timeout(RUN_S + 200, func_only=True)

CHECKS = ["meshes_steps", "meshes_more", "meshes_parts", "meshes_fails", "meshes_refuses", "meshes_unet"]
JOBS = [("unjam", check) for check in CHECKS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(4, JOBS, tmp_path_factory.mktemp("meshes"))


@pytest.mark.parametrize("backend, check", JOBS, ids=[check for _, check in JOBS])
def test_on_four_ranks(results, backend, check):
    assert all(results[backend, check]), results[backend, check]
