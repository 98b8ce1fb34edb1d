"""Loop kernels' plans run with NumPy: tokens are torch's in every interleaving."""

import functools
import itertools
import random

import numpy as np
import pytest

from loop_models import CONFIGS, COUNT, DENSE, EXPERTS, PROMPT, make_model, make_plan, torch_tokens
from unjam import InvalidArgument
from unjam.loop import Machine, compile_graph
from unjam.loop.interpret import ORDERS, Interpreter, generate

pytest.importorskip("torch")

plan_of = functools.lru_cache(make_plan)
tokens_of = functools.lru_cache(maxsize=None)(
    lambda kind, seed=1: tuple(map(tuple, torch_tokens(CONFIGS[kind], seed=seed)))
)


def run(kind, ranks, order, seed, sync="counters", steps=1, sms=5):
    model, plan = plan_of(CONFIGS[kind], sms=sms, sync=sync, ranks=ranks)
    interpreter = Interpreter(plan, model.weights, seed, order)
    found = generate(interpreter, PROMPT, COUNT, steps)
    assert tuple(map(tuple, found)) == tokens_of(kind), (kind, ranks, order, seed, sync, steps)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_torchs(kind, ranks, order):
    seed = random.randrange(2**32)
    run(kind, ranks, order, seed, steps=1 + ORDERS.index(order) % 3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_with_grid_barriers_and_other_numbers_of_sms(kind, ranks):
    seed = random.randrange(2**32)
    run(kind, ranks, "random", seed, sync="grid", steps=2)
    for sms in (1, 24):
        run(kind, ranks, "random", seed, sms=sms, steps=2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_thousand_interleavings(kind, ranks):
    first = random.randrange(2**32)
    whole = itertools.cycle(itertools.product(ORDERS, ("counters", "grid"), (1, 3), (3, 5, 16)))
    for seed, (order, sync, steps, sms) in zip(range(first, first + 1000), whole, strict=False):
        run(kind, ranks, order, seed, sync, steps, sms)


def test_a_seed_gives_the_same_run():
    model, plan = plan_of(DENSE, ranks=2)
    events = set()
    for seed in (5, 5, 6):
        interpreter = Interpreter(plan, model.weights, seed)
        chosen = []
        choose = interpreter._choose
        interpreter._choose = lambda *a, c=choose, x=chosen: x.append(c(*a)) or x[-1]
        interpreter.run([1, 2], [0, 0])
        events.add(tuple(chosen))
    assert len(events) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_is_near(ranks):
    """Logits in bf16 differ; all ranks have the same tokens, whatever the interleaving."""
    model, plan = make_plan(DENSE, ranks=ranks, dtype="bf16")
    found = {
        str(generate(Interpreter(plan, model.weights, seed, order), PROMPT, COUNT))
        for seed, order in enumerate(ORDERS)
    }
    assert len(found) == 1


@pytest.mark.parametrize("k", [1, 4])
def test_experts_that_are_equal_or_all(k):
    """Equal scores: the first experts are taken, by all ranks."""
    import dataclasses

    config = dataclasses.replace(EXPERTS, experts_per_token=k)
    for ranks in (1, 2):
        model = make_model(config, ranks=ranks)
        for part in model.weights:
            for name in part:
                if name.endswith("block_sparse_moe.gate.weight"):
                    part[name][:] = 0
        plan = compile_graph(model.graph, Machine(sms=4))
        tokens = generate(Interpreter(plan, model.weights, 1), PROMPT, 3)
        if ranks == 1:
            first = tokens
        assert tokens == first


def test_rows_may_stand_at_different_positions():
    """Row 1 decodes alone what row 0 decoded before it."""
    model, plan = plan_of(DENSE)
    interpreter = Interpreter(plan, model.weights)
    want = tokens_of("dense")[0]
    first = [int(interpreter.run([t, 0], [p, 15])[-1][0]) for p, t in enumerate(PROMPT[0])][-1]
    assert first == want[0]
    last = [0, first]
    for position, token in enumerate(PROMPT[0]):
        got = interpreter.run([last[1], token], [3 + position, position])[-1]
        assert got[0] == want[1 + position]
        last = [int(got[1]), int(got[0])]
    assert last[0] == want[0]


@pytest.mark.parametrize(
    ("tokens", "positions", "steps", "cause"),
    [
        ([1], [0], 1, "1 tokens, and the plan is for a batch of 2"),
        ([1, 2, 3], [0, 0, 0], 1, "3 tokens, and the plan is for a batch of 2"),
        ([1, 2], [0], 1, "1 positions, and the plan is for a batch of 2"),
        ([1, 96], [0, 0], 1, r"tokens\[1\] is 96: the model has 96 tokens"),
        ([-1, 2], [0, 0], 1, r"tokens\[0\] is -1"),
        ([1, 2], [0, 16], 1, r"positions\[1\] is 16: .* beyond the plan's context of 16"),
        ([1, 2], [14, 0], 3, r"positions\[0\] is 14: behind 3 steps"),
        ([1, 2], [0, -1], 1, r"positions\[1\] is -1"),
        ([1.5, 2], [0, 0], 1, r"tokens\[0\] is 1.5: give whole numbers"),
        ([1, 2], [0, 0], 0, "steps=0: give a whole number"),
    ],
)
def test_what_is_beyond_the_plan_is_named(tokens, positions, steps, cause):
    model, plan = plan_of(DENSE)
    interpreter = Interpreter(plan, model.weights)
    with pytest.raises(InvalidArgument, match=cause):
        interpreter.run(tokens, positions, steps)
    assert interpreter.events == 0


def test_weights_that_do_not_fit():
    model, plan = plan_of(DENSE, ranks=2)
    with pytest.raises(InvalidArgument, match="weights of 1 ranks, and the plan is for 2"):
        Interpreter(plan, model.weights[:1])
    lacking = {n: a for n, a in model.weights[1].items() if n != "lm_head.weight"}
    with pytest.raises(InvalidArgument, match="rank 1 has no weight lm_head.weight"):
        Interpreter(plan, [model.weights[0], lacking])
    wrong = model.weights[1] | {"lm_head.weight": np.zeros((1, 1), np.float32)}
    with pytest.raises(InvalidArgument, match=r"lm_head.weight on rank 1 is float32 of shape"):
        Interpreter(plan, [model.weights[0], wrong])
    with pytest.raises(InvalidArgument, match="order='x' is not known"):
        Interpreter(plan, model.weights, order="x")
