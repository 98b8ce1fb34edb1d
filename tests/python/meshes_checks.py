"""What the ranks of test_torch_meshes.py run of pipelines whose stages have several ranks.

The models are in two halves, of which one process computes both and a mesh of two ranks one each.
Sums have two terms, so the bits do not depend on who adds: losses and gradients must be those of
one process.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipeline_checks import PARTS, SCHEDULES, placed
from unjam.pipeline import make_order, split_backward
from unjam.torch.pipeline import Edge, Pipeline, Spec, Stage

WIDTH = 8


class Copied(torch.autograd.Function):
    """What all ranks have; back, the sum of their gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return added(grad, ctx.group), None


class Added(torch.autograd.Function):
    """The sum over ranks; back, what all have."""

    @staticmethod
    def forward(ctx, x, group):
        return added(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def added(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


class Halves(nn.Module):
    """Two layers, the first one cut by outputs, the second one by inputs, and a whole one."""

    def __init__(self, into_parts=False, out_parts=False):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.skip = nn.ModuleList(nn.Linear(WIDTH // 2, WIDTH) for _ in range(2))
        self.mine = None  # of this rank; None: both
        self.group = None
        self.into_parts, self.out_parts = into_parts, out_parts

    def share(self, half, group):
        self.mine, self.group = half, group
        return self

    def forward(self, x, *skips):
        parts = []
        if self.mine is not None and self.group is not None:
            x = Copied.apply(x, self.group)
        for half in (0, 1) if self.mine is None else (self.mine,):
            h = self.up[half](x)
            for skip in skips:  # in halves: this rank's, or both
                own = skip if self.into_parts and self.mine is not None else skip.chunk(2, -1)[half]
                h = h + self.skip[half](own)
            parts.append(self.down[half](functional.gelu(h)))
        y = parts[0] + parts[1] if self.mine is None else parts[0]
        if self.mine is not None and self.group is not None:
            y = Added.apply(y, self.group)
        if not self.out_parts:
            return y
        own = y
        if self.mine is not None:
            whole = Copied.apply(y, self.group) if self.group is not None else y
            own = whole.chunk(2, -1)[self.mine]
        return own, own * 2


def model():
    """Four stages; what is in halves leaves stage 1, and stage 3 takes it from 0 and from 1."""
    torch.manual_seed(5)
    stages = [
        Stage(First(), ("x",), ("x", "wide")),
        Stage(Halves(out_parts=True), ("x",), ("x", "half")),
        Stage(Halves(), ("x", "half"), ("x",)),
        Stage(Halves(into_parts=True), ("x", "wide"), ("x",)),
    ]
    batch = torch.randn(3 * PARTS, WIDTH)
    return stages, batch, batch.roll(1, 0)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.one(x).tanh()
        return y, y.square()


def edges_of(wide="S(1)"):
    half = {"x": Spec((3, WIDTH)), "half": Spec((3, WIDTH))}
    return [
        Edge(0, 1, ("x",)),
        Edge(1, 2, ("x", "half"), half, layouts=dict.fromkeys(("x", "half"), (["S(1)"], ["R"]))),
        Edge(2, 3, ("x",)),
        Edge(0, 3, ("wide",), layouts={"wide": (["R"], [wide])}),
    ]


def alone(stages, batch, target):
    modules = [copy.deepcopy(stage.module) for stage in stages]
    losses = []
    for x, y in zip(batch.chunk(PARTS), target.chunk(PARTS), strict=True):
        h, wide = modules[0](x)
        h, half = modules[1](h)
        loss = functional.mse_loss(modules[3](modules[2](h, half), wide), y)
        (loss / PARTS).backward()
        losses.append(loss.detach())
    return losses, modules


PLACES = [  # ranks of rows; rows of stages
    ([[0], [1, 2], [3]], (0, 1, 2, 2)),
    ([[0, 3], [1, 2]], (0, 1, 0, 1)),
    ([[3], [2, 0], [1]], (0, 1, 2, 1)),
    ([[1, 3], [0], [2]], (1, 0, 2, 0)),
    ([[1], [3], [0, 2]], (0, 1, 0, 2)),
]


def made(given, meshes, where, order, **options):
    """The pipeline of this rank, and its modules."""
    stages, _, _ = given
    rank = dist.get_rank()
    mine = {}
    groups = [dist.new_group(mesh) if len(mesh) == 2 else None for mesh in meshes]
    for s, row in enumerate(where):
        if rank in meshes[row]:
            module = copy.deepcopy(stages[s].module)
            if len(meshes[row]) == 2 and isinstance(module, Halves):
                module.share(meshes[row].index(rank), groups[row])
            mine[s] = Stage(module, stages[s].inputs, stages[s].outputs)
    options = {"edges": edges_of(), "loss_fn": functional.mse_loss, **options}
    pipeline = Pipeline(mine, options.pop("edges"), placed(order, where), meshes=meshes, **options)
    return pipeline, {s: stage.module for s, stage in mine.items()}


def stepped(pipeline, modules, given):
    _, batch, target = given
    return pipeline.step({"x": batch} if 0 in modules else None, target if 3 in modules else None)


def assert_as_alone(losses, modules, expected, what):
    if 3 in modules:
        assert [x.item() for x in losses] == [x.item() for x in expected[0]], what
    for s, module in modules.items():
        half = getattr(module, "mine", None)
        for (name, ours), theirs in zip(
            module.named_parameters(), expected[1][s].parameters(), strict=True
        ):
            if half is not None and f".{1 - half}." in name:
                assert ours.grad is None, (what, s, name)
            elif theirs.grad is None:
                assert ours.grad is None, (what, s, name)
            else:
                assert torch.equal(ours.grad, theirs.grad), (what, s, name)


def meshes_steps(here):
    """Stages on one rank and on two, in all schedules."""
    given = model()
    expected = alone(*given)
    done = 0
    for number, (meshes, where) in enumerate(PLACES):
        name = SCHEDULES[number % 3]
        order = make_order(name, 4, PARTS)
        for how, each in (("B", order), ("I/W", split_backward(order, [0, 1, 2, 3]))):
            what = f"{meshes} {where} {name} {how}"
            pipeline, modules = made(given, meshes, where, each, name=what)
            assert_as_alone(stepped(pipeline, modules, given), modules, expected, what)
            done += 1
    return done
