"""unjam.torch.pipeline by itself: backwards in two parts, and a rank that dies in a step.

What ranks compute together is in pipeline_checks.py, which test_torch_training.py runs.
"""

from datetime import timedelta

import pytest

from processes import workers

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from torch_tools import START_S, make_store  # noqa: E402
from unjam.pipeline import Deadlock, Order, executable, gpipe, one_f_one_b  # noqa: E402
from unjam.pipeline.lower import RECEIVE, SEND  # noqa: E402

LONG_S = 200  # to catch hangs
pytestmark = [pytest.mark.timeout(900, func_only=True), pytest.mark.usefixtures("adapter")]


def rank(number, port, limit_s):
    """Trains a pipeline of four stages, in which rank 1 dies at its third microbatch."""
    import os
    import signal
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn

    import unjam.torch  # noqa: F401 - registers the backend
    from rank_tools import say
    from torch_tools import join_store
    from unjam.torch.pipeline import Edge, Pipeline, Stage

    torch.set_num_threads(1)
    dist.init_process_group(
        "unjam",
        store=dist.PrefixStore("first", join_store(port, 4)),
        rank=number,
        world_size=4,
        timeout=timedelta(seconds=limit_s),
    )

    class Dies(nn.Linear):
        calls = 0

        def forward(self, x):
            if type(x) is torch.Tensor:  # not when shapes are found out
                self.calls += 1
            if number == 1 and self.calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    edges = [Edge(0, 1), Edge(1, 2), Edge(2, 3)]
    pipeline = Pipeline(
        {number: Stage(Dies(4, 4))}, edges, "1f1b", microbatches=6, loss_fn=lambda x: x.mean()
    )
    say("ready")
    begun = time.monotonic()
    try:
        pipeline.step({"x": torch.ones(6, 4)} if number == 0 else None)
        say([None, "", 0])
    except Exception as error:
        say([type(error).__name__, str(error), time.monotonic() - begun])
    dist.destroy_process_group()


def test_a_dead_rank_ends_the_step_on_all_others():
    limit_s = 150
    with workers() as harness:
        store = make_store()
        ranks = [harness.start_with_torch(rank, n, store.port, limit_s) for n in range(4)]
        for process in ranks:
            assert process.said(START_S) == "ready"
        for number in (0, 2, 3):
            kind, words, took = ranks[number].said(LONG_S)
            assert kind == "StepError", (number, kind, words)
            # None waits for its limit: that is far away.
            assert took < limit_s / 2, (number, took, words)
            assert "rank 1" in words or number == 3, (number, words)
            if number == 3:
                assert "edge 2-3" in words and "see rank 2" in words, words


class Twice(nn.Module):
    """All that makes the two parts of a backward hard."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.shared = nn.Linear(6, 6)
        self.own = nn.Linear(6, 6)
        self.three = nn.Linear(6, 18)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.table = nn.Parameter(torch.randn(4, 6))
        self.scale = nn.Parameter(torch.rand(6))
        self.unused = nn.Parameter(torch.rand(6))

    def forward(self, x, skip, spare):
        h = self.shared(self.norm(x)).tanh()
        a, b, c = self.three(h).chunk(3, -1)  # a node with several outputs
        h = self.own(a * b.sigmoid() + skip) + self.frozen(h)
        weight = self.scale / self.scale.norm()  # a weight made of a weight
        h = self.shared(h) * weight + c  # used again, behind itself
        alone = (self.table * 2).sum() + self.scale.sum()  # depends on no input
        return h, alone, skip  # and one that is handed through


@pytest.mark.parametrize("seed", range(3))
def test_two_parts_of_a_backward_give_what_one_does(seed):
    from unjam.torch.pipeline import backward

    def run(split):
        torch.manual_seed(seed)
        module = Twice()
        inputs = [torch.randn(4, 6).requires_grad_(n != 1 or seed != 1) for n in range(3)]
        outputs = module(*inputs)
        pairs = [(x, torch.randn_like(x)) for x in outputs if x.requires_grad]
        roots, grads = [x for x, _ in pairs], [g for _, g in pairs]
        if not split:
            backward.full(roots, grads)
        else:
            rest = backward.of_inputs(roots, grads, inputs)
            delayed = {n for n, p in module.named_parameters() if p.grad is None}
            # These have one use each on the way to an input.
            assert {"own.weight", "own.bias", "three.weight", "norm.weight"} <= delayed
            assert "shared.weight" not in delayed and "table" not in delayed
            first = [None if x.grad is None else x.grad.clone() for x in inputs]
            rest()
            assert all(
                a is b is None or torch.equal(a, b)
                for a, b in zip(first, (x.grad for x in inputs), strict=True)
            ), "the second part changed gradients of inputs"
        leaves = [*inputs, *module.parameters()]
        return [x.grad for x in leaves]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert (ours is None) == (theirs is None), f"seed {seed}"
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_without_inputs_all_comes_in_the_second_part():
    from unjam.torch.pipeline import backward

    module = nn.Linear(3, 3)
    y = module(torch.ones(2, 3))
    rest = backward.of_inputs([y], [torch.ones(2, 3)], [torch.ones(2, 3)])
    assert module.weight.grad is None
    rest()
    assert module.weight.grad.tolist() == [[2.0] * 3] * 3


def test_reshardings_fail_as_messages_do():
    """Or a late rank of another mesh would end a step without its place and cure."""
    import unjam
    from unjam.torch.pipeline.meshes import _Work

    class Request:
        def synchronize(self, limit):
            raise unjam.Timeout(f"after {limit} s")

    with pytest.raises(torch.distributed.DistBackendError, match="after 7.0 s"):
        _Work(Request(), 9.0).wait(timedelta(seconds=7))
    with pytest.raises(RuntimeError, match="after 9.0 s"):
        _Work(Request(), 9.0).wait()


def test_an_executable_order_keeps_its_limits():
    edges = [(0, 1), (1, 2), (0, 2)]
    for row, program in enumerate(executable(gpipe(3, 6), edges, 2, 3)):
        posted = sent = 0
        for step in program:
            mine = step.what[0] == row if isinstance(step.what.microbatch, int) else None
            if step.do == RECEIVE:
                posted += 1
            elif step.do == SEND:
                sent += 1
            elif step.do == "wait":
                sent, posted = (sent - 1, posted) if mine else (sent, posted - 1)
            assert posted <= 2 and sent <= 3, (row, step)
        assert posted == sent == 0, row
    # A stage may be without an edge to the next: then it does not wait for it.
    rows = one_f_one_b(2, 2).rows
    turned = Order([rows[0], rows[1]])
    assert len(executable(turned, [], 1, 1)) == 2
    with pytest.raises(Deadlock, match="rank 0"):
        late = Order([[(0, k, m) for m in range(2) for k in "FB"], gpipe(2, 2).rows[1]])
        executable(late, [(0, 1)], 9, 9)
    with pytest.raises(ValueError, match="receives=1 and sends=1 the ranks wait for each other"):
        executable(one_f_one_b(4, 8), [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)], 1, 1)
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="is no limit"):
            executable(gpipe(2, 2), [], wrong, 1)
    with pytest.raises(ValueError, match="does not lead forward"):
        executable(gpipe(2, 2), [(1, 0)], 1, 1)


def test_messages_must_fit_into_a_ranks_keys(monkeypatch):
    """All forwards first: sends and receives of both sides are under way up to their limits."""
    from unjam.torch.pipeline import under_way

    monkeypatch.delenv("UNJAM_MAX_ACTIVE_KEYS", raising=False)
    programs = executable(gpipe(3, 60), [(0, 1), (1, 2)], 40, 40)
    assert under_way.most_keys(programs[1], lambda message: 1) == 80
    assert under_way.most_keys(programs[1], lambda message: 0) == 0
    under_way.check_keys(programs, lambda message: 5, "cpu")
    with pytest.raises(ValueError, match="row 0 may have 80 keys under way .* a rank has 64"):
        under_way.check_keys(programs, lambda message: 1, "cuda")
    with pytest.raises(ValueError, match=r"560 keys .* has 512: give lower limits \(receives="):
        under_way.check_keys(programs, lambda message: 7, "cpu")
    monkeypatch.setenv("UNJAM_MAX_ACTIVE_KEYS", "79")
    with pytest.raises(ValueError, match="a rank has 79"):
        under_way.check_keys(programs, lambda message: 1, "cpu")


def test_an_edge_of_a_type_that_cannot_be_moved_is_named():
    import numpy as np

    from unjam.torch.pipeline import Edge, Spec
    from unjam.torch.pipeline.meshes import Route

    meshes = np.array([0]), np.array([1, 2])
    with pytest.raises(ValueError, match=r"edge 0-1: 'x': torch.complex128 has elements of 16"):
        Route(Edge(0, 1, ("x",)), {"x": Spec((3,), torch.complex128)}, meshes)
