"""unjam.loop: graphs, tasks, places, schedules, and what they refuse."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from loop_models import CONFIGS, DENSE, EXPERTS, make_model, make_plan
from unjam import InvalidArgument
from unjam.loop import SHAPES, Graph, Machine, compile_graph, llama, moe, random_state_dict
from unjam.loop.formats import from_stored, to_stored
from unjam.loop.models.decoder import to_numpy


def test_the_package_is_imported_only_when_asked_for():
    code = "import sys, unjam; print('unjam.loop' in sys.modules, hasattr(unjam, 'loop'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# ---- numbers ----


def test_bf16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(7)
    x = (random.standard_normal(10000) * 10.0 ** random.integers(-30, 30, 10000)).astype(np.float32)
    x[:5] = [0, -0.0, np.inf, -np.inf, np.nan]
    mine = from_stored(to_stored(x, "bf16"), "bf16")
    theirs = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(mine, theirs)


def test_tensors_of_torch_are_taken():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16, requires_grad=True).reshape(2, 3)
    assert to_numpy(tensor).tolist() == [[0, 1, 2], [3, 4, 5]]


# ---- plans ----


@pytest.mark.parametrize("sync", ["counters", "grid"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plan_is_right_and_the_same_each_time(kind, ranks, sync):
    plans = [make_plan(CONFIGS[kind], ranks=ranks, sync=sync, state=False)[1] for _ in range(2)]
    assert plans[0].verdict.is_right and plans[0].number == plans[1].number
    tasks = [task for stream in plans[0].schedule.streams for task in stream]
    assert sorted(tasks) == list(range(len(plans[0].program.tasks)))


def test_plans_that_differ_have_other_numbers():
    base = make_plan(DENSE, state=False)[1]
    others = [
        make_plan(DENSE, state=False, sms=4)[1],
        make_plan(DENSE, state=False, sync="grid")[1],
        make_plan(DENSE, state=False, batch=1)[1],
        make_plan(DENSE, state=False, ranks=2)[1],
        make_plan(replace(DENSE, eps=1e-6), state=False)[1],
        make_plan(DENSE, state=False, dtype="bf16")[1],
    ]
    assert len({plan.number for plan in [base, *others]}) == 7


def test_pages_are_used_again():
    plan = make_plan(replace(DENSE, layers=8), state=False)[1]
    without = compile_graph(plan.graph, plan.machine, reuse=False)
    assert plan.places.page_count * 1024 < plan.places.unshared / 2
    assert without.places.page_count * 1024 == without.places.unshared == plan.places.unshared


def test_a_task_waits_for_what_it_reads_alone():
    """A head's attention does not wait for other heads."""
    plan = make_plan(DENSE, state=False, batch=1)[1]
    program = plan.program
    waits = {program.name(task): task.waits for task in program.tasks}
    assert waits["attn.0[0]"] != waits["attn.0[2]"]
    of_head = program.counters[waits["attn.0[0]"][0].counter]
    assert (of_head.name, of_head.arrivals) == ("rope.0.0", 1)
    # And what is older than what it waits for is not waited for: the residual.
    assert len(waits["down.0[0]"]) == 1


def test_grid_barriers_separate_levels():
    program = make_plan(DENSE, state=False, sync="grid")[1].program
    for task in program.tasks[:-1]:
        assert [wait.counter for wait in task.waits] == ([task.signal - 1] if task.signal else [])


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_models_are_planned(name):
    config = replace(SHAPES[name], layers=2)
    build = moe if config.experts else llama
    plan = compile_graph(build(config, ranks=2, context=2048).graph)
    table = config.vocab_size * config.hidden_size * 2
    assert plan.weight_bytes() > table / 2
    tasks, rules = plan.program.tasks, plan.program.rules
    loads = [
        sum(rules[tasks[n].op].weight_bytes(tasks[n].tile) for n in stream if tasks[n].op >= 0)
        for stream in plan.schedule.streams
    ]
    assert "tiny" in name or max(loads) < 1.25 * sum(loads) / len(loads)


def test_the_model_of_time():
    """Longer on fewer SMs; never below what the weights take; ahead is not later."""
    model = make_model(
        replace(SHAPES["llama-3.2-1b"], layers=2), batch=1, context=1024, state=False
    )
    times = {}
    for sync in ("counters", "grid"):
        plan = compile_graph(model.graph, Machine(), sync)
        spans = plan.timeline()
        times[sync] = max(span.end for row in spans for span in row)
        assert times[sync] > plan.weight_bytes() / plan.machine.bandwidth
        for row in spans:
            assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
    assert times["counters"] < times["grid"]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "how", "cause"),
    [
        ({}, {"ranks": 3}, "kv_heads=4 does not divide by ranks=3"),
        ({"kv_heads": 8, "vocab_size": 97}, {"ranks": 2}, "vocab_size=97 does not divide"),
        (
            {"intermediate_size": 66},
            {"ranks": 4},
            "intermediate_size=66 does not divide by ranks=4",
        ),
        (
            {"heads": 6, "kv_heads": 6, "head_dim": None},
            {},
            "hidden_size=32 does not divide by heads=6",
        ),
        ({"heads": 6, "head_dim": 8}, {}, "heads=6 does not divide by kv_heads=4"),
        ({"head_dim": 7}, {}, "head_dim=7 is odd"),
        ({"layers": 0}, {}, "layers=0: give a whole number"),
        ({"hidden_size": 32.0}, {}, "hidden_size=32.0"),
        ({"frequencies": (1.0,)}, {}, "frequencies has 1 numbers: give head_dim / 2 = 4"),
        ({"experts": 2, "experts_per_token": 3}, {}, "experts_per_token=3 of experts=2"),
        ({}, {"ranks": 0}, "ranks=0 is out of range: give a number from 1 to 72"),
        ({}, {"batch": 17}, "batch=17 is out of range"),
        ({}, {"context": 0}, "context=0 is out of range"),
        ({}, {"splits": 17}, "splits=17 is out of range"),
        ({}, {"dtype": "f16"}, "dtype='f16' is not supported: give bf16 or f32"),
        ({"intermediate_size": 12}, {"dtype": "bf16"}, "have 24 bytes: they must be a multiple"),
    ],
)
def test_what_does_not_fit_is_named(change, how, cause):
    with pytest.raises(InvalidArgument, match=cause):
        make_model(replace(DENSE, **change), state=False, **how)


def test_names_of_a_state_dict():
    weights = random_state_dict(DENSE, 1)
    lacking = dict(weights)
    del lacking["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(InvalidArgument, match="no model.layers.1.mlp.up_proj.weight"):
        llama(DENSE, lacking)
    with pytest.raises(InvalidArgument, match=r"1 names that the model lacks: model.layers.2.x$"):
        llama(DENSE, weights | {"model.layers.2.x": np.zeros(1)})
    wrong = weights | {"model.norm.weight": np.zeros(31)}
    with pytest.raises(InvalidArgument, match=r"model.norm.weight has shape \(31,\)"):
        llama(DENSE, wrong)
    with pytest.raises(InvalidArgument, match=r"model.norm.weight is no array of numbers"):
        llama(DENSE, weights | {"model.norm.weight": "words"})
    with pytest.raises(InvalidArgument, match="call moe"):
        llama(EXPERTS)
    with pytest.raises(InvalidArgument, match="call llama"):
        moe(DENSE)


def test_a_head_may_be_the_embedding():
    weights = random_state_dict(DENSE, 1)
    del weights["lm_head.weight"]
    model = llama(DENSE, weights, ranks=2, dtype="f32")
    table = weights["model.embed_tokens.weight"]
    assert np.array_equal(model.weights[1]["lm_head.weight"], table[48:])


def test_graphs_by_hand():
    graph = Graph(batch=2, context=8, dtype="f32")
    x = graph.embedding(graph.weight("table", (10, 8)))
    w = graph.weight("w", (4, 8))
    with pytest.raises(InvalidArgument, match="the graph gives no tokens: end it"):
        compile_graph(graph)
    with pytest.raises(InvalidArgument, match="there is a value of this name already"):
        graph.weight("w", (4, 8))
    with pytest.raises(InvalidArgument, match=r"\(0, 8\) is no shape"):
        graph.weight("v", (0, 8))
    with pytest.raises(InvalidArgument, match="'f8' is no type"):
        graph.weight("v", (4, 8), "f8")
    with pytest.raises(InvalidArgument, match="x has 4 columns, and w takes 8"):
        graph.linear(graph.linear(x, w), w, name="second")
    with pytest.raises(InvalidArgument, match=r"residual has shape \(2, 8\), and not \(2, 4\)"):
        graph.linear(x, w, residual=x, name="third")
    with pytest.raises(InvalidArgument, match="x is a value of another graph"):
        Graph().all_reduce(x)
    with pytest.raises(InvalidArgument, match="k=5 experts of 2"):
        e = [graph.weight(n, (2, 4, 8)) for n in "ab"]
        graph.moe(x, graph.weight("r", (2, 8)), *e, graph.weight("d", (2, 8, 4)), 5)
    odd = Graph(ranks=2, batch=1)
    table = odd.weight("t", (4, 3))
    with pytest.raises(InvalidArgument, match="no whole words of 4 bytes"):
        odd.all_reduce(odd.embedding(table))
    with pytest.raises(InvalidArgument, match="sync='events' is not known: give counters or grid"):
        compile_graph(graph, sync="events")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"sms": 0}, "sms=0 is out of range"),
        ({"sms": 1.5}, "sms=1.5 is out of range"),
        ({"bandwidth": 0}, "bandwidth must be above 0"),
        ({"wait": float("nan")}, "wait is no time"),
    ],
)
def test_machines(how, cause):
    with pytest.raises(InvalidArgument, match=cause):
        Machine(**how)
