"""What runs on a torch.distributed backend: training, DTensor, checkpoints, compiled programs.

Each check of training_checks.py runs with gloo and with the backend under test, in one launch of 2
and one of 4 processes; what it returns, loss curves above all, must be the same. To the bit, unless
TOLERANCE names it: there more than two numbers are added, and the orders of addition differ.

TORCH_TEST_BACKEND=gloo compares gloo with itself.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from processes import environment
from torch_tools import EXAMPLES, ROOT, RUN_S, build_adapter, run

if importlib.util.find_spec("torch") is None:
    pytest.skip("no torch here", allow_module_level=True)

BACKEND = os.environ.get("TORCH_TEST_BACKEND", "unjam")
# Of a test, without its fixtures. Behind the limits of torch_tools and of the examples, which say
# more where they are reached.
pytestmark = pytest.mark.timeout(RUN_S + 200, func_only=True)

CHECKS = {
    2: [
        "collectives",
        "point_to_point",
        "objects",
        "differentiable",
        "redistribute",
        "tensor_parallel",
        "loss_parallel",
        "dtensor_program",
        "ddp",
        "ddp_options",
        "ddp_passes",
        "ddp_pass_fails",
        "ddp_keyed",
        "ddp_keyed_joined",
        "zero_optimizer",
        "fsdp",
        "fsdp_keyed",
        "fsdp_first",
        "local_sgd",
        "pipeline",
        "pipeline_interleaved",
        "pipeline_orders",
        "checkpoint",
        "functional",
        "functional_autograd",
        "compiled",
    ],
    4: [
        "collectives",
        "point_to_point",
        "objects",
        "redistribute",
        "redistribute_2d",
        "tensor_parallel",
        "ddp",
        "ddp_passes",
        "ddp_keyed",
        "ddp_keyed_joined",
        "fsdp",
        "fsdp_hybrid",
        "local_sgd",
        "pipeline",
        "pipeline_orders",
        "checkpoint",
        "functional",
        "compiled",
    ],
}
# These check their own numbers, and only unjam can run all of them.
ALONE = {
    2: [
        "beyond_gloo",
        "keys",
        "ddp_inner_pass_goes_on",
        "pipeline_v",
        "pipeline_orders_of_two",
        "pipeline_own",
        "recipe_two_threads",
        "recipe_local_wait",
        "recipe_local_wait_one_group",
        "recipe_expert_order",
    ],
    4: [
        "beyond_gloo",
        "keys",
        "pipeline_own",
        "pipeline_own_three",
        "pipeline_own_late",
        "pipeline_own_early",
        "pipeline_own_fails",
        "pipeline_own_refuses",
        "pipeline_own_signal",
        "pipeline_own_shuffled",
        "recipe_random_grad_order",
        "recipe_three_groups",
        "recipe_local_wait",
        "recipe_expert_order",
        "recipe_sync_beside_training",
        "recipe_big_refit",
    ],
}
WITHOUT_KEYS = ["recipe_two_threads", "recipe_local_wait", "recipe_three_groups"]

# Relative: float32 sums of 4 numbers, and training steps that carry their last bits on.
TOLERANCE = {
    (4, "ddp"): 1e-5,
    (4, "ddp_passes"): 1e-5,
    (4, "ddp_keyed"): 1e-5,
    (4, "ddp_keyed_joined"): 1e-5,
    (4, "fsdp"): 1e-5,
    (4, "local_sgd"): 1e-6,
}


def jobs(ranks):
    both = [(b, check) for check in CHECKS[ranks] for b in dict.fromkeys(("gloo", BACKEND))]
    own = [r for r in ALONE[ranks] if BACKEND == "unjam" or r in WITHOUT_KEYS]
    return both + [(BACKEND, recipe) for recipe in own]


@pytest.fixture(scope="module")
def adapter():
    """Compiled before a test's own time begins."""
    if BACKEND == "unjam":
        build_adapter()


@pytest.fixture(scope="module")
def results(tmp_path_factory, adapter):
    """results(ranks): what a launch found, made when first asked for."""
    made = {}

    def of(ranks):
        if ranks not in made:
            made[ranks] = run(ranks, jobs(ranks), tmp_path_factory.mktemp(f"ranks{ranks}"))
            if os.environ.get("TORCH_TEST_SECONDS"):
                for job, seconds in made[ranks].seconds.items():
                    print(f"{ranks} ranks, {job[1]} with {job[0]}: {seconds:.2f} s")
        return made[ranks]

    return of


def assert_same(found, expected, tolerance, where=""):
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(expected, float) and tolerance:
        assert math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance), (
            f"{where}: {found!r}, gloo {expected!r}"
        )
    else:
        assert found == expected, f"{where}: {found!r}, gloo {expected!r}"


@pytest.mark.parametrize(("ranks", "check"), [(n, c) for n in CHECKS for c in CHECKS[n]])
def test_as_gloo(results, ranks, check):
    found = results(ranks)
    expected = found["gloo", check]
    assert_same(found[BACKEND, check], expected, TOLERANCE.get((ranks, check), 0))


@pytest.mark.parametrize(
    ("ranks", "check"), [(n, r) for n in ALONE for r in ALONE[n] if (BACKEND, r) in jobs(n)]
)
def test_alone(results, ranks, check):
    assert len(results(ranks)[BACKEND, check]) == ranks


def example(path, *words, limit=200):
    """An example as a user starts it, and the JSON that it printed."""
    result = subprocess.run(
        [sys.executable, str(path), "--json", "--limit", str(limit), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,  # behind the harness's own START_S and limit
    )
    shown = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert shown, result.stdout + result.stderr
    return json.loads(shown[-1])


@pytest.mark.parametrize(
    "name, words",
    [
        ("pipeline", ()),
        ("unet_pipeline", ()),
        ("unet_pipeline", ("--ranks", "3", "--wide")),
        ("weight_sync", ()),
    ],
)
def test_example_by_itself(adapter, name, words):
    """Started by plain python, with ranks of its own."""
    if name != "pipeline" and BACKEND == "gloo":
        pytest.skip("it is for unjam alone")
    found = example(EXAMPLES / f"{name}.py", "--backend", BACKEND, "--steps", "3", *words)
    assert found["outcome"] == "right" and len(found["losses"]) == 3, found


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(p.stem for p in (EXAMPLES / "recipes").glob("*.py")))
def test_recipe_beside_gloo(name, capsys, adapter):
    """With unjam right; gloo's outcome is shown, never asked for: timing may decide it."""
    path = EXAMPLES / "recipes" / f"{name}.py"
    more = ["--groups", "1"] if name == "local_wait" else []
    gloo = example(path, "--backend", "gloo", *more, limit=30)
    with capsys.disabled():
        print(f"\n{name} with gloo: {gloo['outcome']}")
    if BACKEND == "unjam":
        found = example(path, "--backend", "unjam", *more)
        assert found["outcome"] == "right", found


@pytest.mark.soak
@pytest.mark.skipif(BACKEND != "unjam", reason="gloo mixes up what comes in another order")
def test_weights_go_beside_training_in_a_thousand_rounds(adapter):
    """In each of them on each rank in an order of its own."""
    path = EXAMPLES / "recipes" / "sync_beside_training.py"
    found = example(path, "--backend", "unjam", "--ranks", "4", "--steps", "1000")
    assert found["outcome"] == "right" and len(found["losses"]) == 1000, found["outcome"]


@pytest.mark.soak
def test_example_with_torchrun(adapter):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        + ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        + [str(EXAMPLES / "ddp_cnn.py"), "--backend", BACKEND, "--steps", "3", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert '"outcome": "right"' in result.stdout, result.stdout + result.stderr


@pytest.mark.soak
def test_compiled_ddp(tmp_path, adapter):
    found = run(2, [(b, "compiled_ddp") for b in dict.fromkeys(("gloo", BACKEND))], tmp_path)
    assert_same(found[BACKEND, "compiled_ddp"], found["gloo", "compiled_ddp"], 0)


def test_page_names_every_program():
    """docs/torch-recipes.md shows a command for each, which names a file and options that exist."""
    page = (ROOT / "docs" / "torch-recipes.md").read_text()
    shown = {word for line in page.splitlines() for word in line.split() if word.endswith(".py")}
    there = {
        str(p.relative_to(ROOT))
        for p in (*EXAMPLES.glob("*.py"), *(EXAMPLES / "recipes").glob("*.py"))
        if p.name != "harness.py"
    }
    assert there == {word for word in shown if word.startswith("examples/")}
