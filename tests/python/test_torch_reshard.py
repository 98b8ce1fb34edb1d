"""What moves tensors from mesh to mesh: DTensors and state_dicts, pipelines whose stages have
several ranks, and batches of copies.

The ranks' part is in reshard_checks.py, meshes_checks.py and doors_checks.py.
"""

import importlib.util

import pytest

from torch_tools import RUN_S, run

if importlib.util.find_spec("torch") is None:
    pytest.skip("no torch here", allow_module_level=True)

pytestmark = pytest.mark.timeout(RUN_S + 200, func_only=True)

JOBS = [
    ("unjam", "reshard_pairs"),
    ("unjam", "reshard_types"),
    ("unjam", "reshard_state_dict"),
    ("unjam", "reshard_described"),
    ("unjam", "reshard_refuses"),
    ("unjam", "reshard_crossed"),
    ("unjam", "reshard_parts"),
    ("gloo", "reshard_own_job"),
    ("unjam", "meshes_steps"),
    ("unjam", "meshes_more"),
    ("unjam", "meshes_parts"),
    ("unjam", "meshes_fails"),
    ("unjam", "meshes_refuses"),
    ("unjam", "meshes_unet"),
    ("unjam", "meshes_dtensor"),
    ("unjam", "doors_copies"),
    ("unjam", "doors_multicast"),
    ("unjam", "doors_refuse"),
    ("unjam", "doors_megatron"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(4, JOBS, tmp_path_factory.mktemp("reshard"))


@pytest.mark.parametrize("backend, check", JOBS, ids=[check for _, check in JOBS])
def test_on_four_ranks(results, backend, check):
    assert all(results[backend, check]), results[backend, check]
