"""What the ranks of test_torch_reshard.py run of pipelines whose stages have several ranks.

The models are in two halves, of which one process computes both and a mesh of two ranks one each.
Sums have two terms, so the bits do not depend on who adds: losses and gradients must be those of
one process.
"""

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from pipeline_checks import PARTS, SCHEDULES, Sometimes, error_of, placed
from unjam.pipeline import Costs, auto, make_order, split_backward
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
            if not self.into_parts:  # of each copy this rank uses a half
                skips = [Copied.apply(skip, self.group) for skip in skips]
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
    ([[1], [3], [0, 2]], (0, 1, 2, 2)),
    ([[0, 1], [2, 3]], (0, 0, 1, 1)),
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


def meshes_more(here):
    """Low limits, a second step, a byte in place of each message, and an order that is chosen."""
    given = model()
    expected = alone(*given)
    order = make_order("1f1b", 4, PARTS)
    pipeline, modules = made(given, *PLACES[0], order, name="few", receives=3, sends=3)
    for _ in range(2):
        for module in modules.values():
            module.zero_grad()
        assert_as_alone(stepped(pipeline, modules, given), modules, expected, "few")
    pipeline, modules = made(given, *PLACES[1], order, name="signal", transfers="signal")
    losses = stepped(pipeline, modules, given)
    assert len(losses) == (PARTS if 3 in modules else 0)
    for transfer in (0.25, 1.0):
        stages, edges = chain()
        mine = {row: stages[row] for row, ranks in enumerate(CHAIN) if here.rank in ranks}
        pipeline = Pipeline(
            mine,
            edges,
            "auto",
            microbatches=PARTS,
            costs=Costs(transfer=transfer),
            meshes=CHAIN,
            loss_fn=lambda x: x.square().mean(),
            name=f"auto {transfer}",
        )
        chosen = auto(3, PARTS, Costs(transfer=transfer)).order
        assert pipeline.order.rows == chosen.rows
        x = torch.ones(2 * PARTS, 6)
        losses = pipeline.step({"x": x} if 0 in mine else None)
        alone_losses = [
            stages[2].module(stages[1].module(stages[0].module(part))).square().mean()
            for part in x.chunk(PARTS)
        ]
        if 2 in mine:
            assert [a.item() for a in losses] == [b.item() for b in alone_losses]
    return [True]


CHAIN = [[0], [1, 2], [3]]


def chain():
    torch.manual_seed(6)
    return [Stage(nn.Linear(6, 6)) for _ in range(3)], [Edge(0, 1), Edge(1, 2)]


def meshes_parts(here):
    """Tensors of other types and uneven parts travel as they should, there and back."""

    class Cut(nn.Module):
        """This rank's columns, and what the test looks at."""

        def forward(self, x, mask):
            seen.append((x.detach().clone(), mask))
            return x * 3

    seen = []
    whole = torch.arange(5 * 2 * PARTS, dtype=torch.float64).reshape(2 * PARTS, 5)

    class Begin(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            return x * self.scale, x > 7

    meshes = [[3], [0, 1], [2]]
    specs = {"x": Spec((2, 5), torch.float64)}
    edges = [
        Edge(0, 1, ("x", "mask"), layouts={"x": (["R"], ["S(1)"]), "mask": (["R"], ["S(0)"])}),
        Edge(1, 2, ("x",), specs, layouts={"x": (["S(1)"], ["R"])}),
    ]
    stages = [
        Stage(Begin(), ("x",), ("x", "mask")),
        Stage(Cut(), ("x", "mask"), ("x",)),
        Stage(nn.Identity(), ("x",), ("x",)),
    ]
    row = next(n for n, ranks in enumerate(meshes) if here.rank in ranks)
    pipeline = Pipeline(
        {row: stages[row]},
        edges,
        "1f1b",
        microbatches=PARTS,
        loss_fn=lambda x: (x * torch.arange(5)).sum(),
        meshes=meshes,
        name="parts",
        scale_grads=False,
    )
    losses = pipeline.step({"x": whole} if row == 0 else None)
    if row == 1:
        for k, (x, mask) in enumerate(seen):
            part = whole[2 * k : 2 * k + 2]
            assert torch.equal(x, part.chunk(2, 1)[here.rank]), (k, x)
            assert mask.dtype is torch.bool
            assert torch.equal(mask, (part > 7).chunk(2, 0)[here.rank]), (k, mask)
        assert len(seen) == PARTS
    if row == 2:
        wanted = (whole * 3 * torch.arange(5)).reshape(PARTS, -1).sum(1)
        assert [x.item() for x in losses] == wanted.tolist()
    if row == 0:
        scale = stages[0].module.scale
        assert torch.equal(scale.grad, (whole * 3 * torch.arange(5)).sum(0)), scale.grad
    return [True]


def meshes_fails(here):
    """What goes wrong on one rank of a stage ends the step on all that need it."""
    for wrong in (0, 1, 3):
        stages, edges = chain()
        row = next(n for n, ranks in enumerate(CHAIN) if here.rank in ranks)
        if here.rank == wrong:
            stages[row] = Stage(Sometimes(stages[row].module, 2, divided))
        pipeline = Pipeline(
            {row: stages[row]},
            edges,
            "1f1b",
            microbatches=PARTS,
            meshes=CHAIN,
            loss_fn=lambda x: x.mean(),
            name=f"fails {wrong}",
        )
        kind, words = error_of(
            lambda pipeline=pipeline, row=row: pipeline.step(
                {"x": torch.ones(2 * PARTS, 6)} if row == 0 else None
            )
        )
        assert kind == "StepError" and "microbatch" in words, (wrong, kind, words)
        if here.rank == wrong:
            assert "planted" in words, words
        if wrong == 1 and here.rank == 3:
            assert "edge 1-2" in words and "see ranks 1, 2" in words, words
    # A message that cannot be begun: its other ends need not wait for it.
    stages, edges = chain()
    row = next(n for n, ranks in enumerate(CHAIN) if here.rank in ranks)
    pipeline = Pipeline(
        {row: stages[row]},
        edges,
        "1f1b",
        microbatches=PARTS,
        meshes=CHAIN,
        loss_fn=lambda x: x.mean(),
        name="unposted",
    )
    post = pipeline._routes.post

    def unposted(edge, key, is_gradient, sends, tensors, byte=""):
        if here.rank == 2 and key == "unposted/1-2/f/1" and not byte:
            raise ValueError("planted")
        return post(edge, key, is_gradient, sends, tensors, byte)

    pipeline._routes.post = unposted
    kind, words = error_of(
        lambda: pipeline.step({"x": torch.ones(2 * PARTS, 6)} if row == 0 else None)
    )
    assert kind == "StepError", (kind, words)
    assert ("planted" if here.rank == 2 else "different plans") in words, words
    # What only DTensors know is not sent.
    if here.rank == 1:
        from unjam.torch.pipeline.shapes import named_outputs

        x = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [1], _init_backend=False))
        kind, words = error_of(lambda: named_outputs(Stage(nn.Identity()), 1, x))
        assert kind == "InvalidArgument" and "stage 1 gives a DTensor" in words, words
    return [True]


def divided(found):
    raise ArithmeticError("planted")


def meshes_refuses(here):
    """What fits no mesh is refused before anything is sent."""
    stages, edges = chain()
    row = next(n for n, ranks in enumerate(CHAIN) if here.rank in ranks)
    mine = {row: stages[row]}

    def tried(meshes, given=edges, **options):
        return lambda: Pipeline(
            mine, given, "1f1b", microbatches=2, loss_fn=print, meshes=meshes, **options
        )

    def crowded():
        limits = {"receives": 60, "sends": 60}
        Pipeline(mine, edges, "gpipe", microbatches=60, loss_fn=print, meshes=CHAIN, **limits)

    shard = {"x": (["S(1)"], ["R"])}
    two = {"x": (["R"], ["R", "R"])}
    back = {"x": (["R"], ["S(1)"])}
    for wrong, said in (
        (tried([[0], [1, 2]]), "rank 3 of the group is in no mesh"),
        (tried([[0], [1, 2], [3, 1]]), "rank 1 is in meshes[1] and again in meshes[2]"),
        (tried([[0], [1, 1], [2, 3]]), "rank 1 is in meshes[1] and again in meshes[1]"),
        (tried([[0], [1, 2], [4]]), "meshes[2] has rank 4, and the group has ranks 0 to 3"),
        (tried([[0], [1, 2], "3"]), "meshes[2]"),
        (tried([[0], [[1], [2, 3]]]), "meshes[1]"),
        (tried(5), "a list with a mesh"),
        (tried(CHAIN, [edges[0], Edge(1, 2, layouts=shard)]), "leaves stage 1 in parts"),
        (tried(CHAIN, [Edge(0, 1, layouts=two), edges[1]]), "'x' at stage 1: 2 placements on"),
        (tried(CHAIN, device="cuda"), "for tensors on the CPU so far"),
        (lambda: Edge(0, 1, layouts={"y": (["R"], ["R"])}), "layouts have 'y'"),
        (lambda: Edge(0, 1, layouts={"x": ["R"]}), "give placements on the source's mesh"),
        (lambda: Edge(0, 1, layouts={"x": (["P"], ["R"])}), "placement 'P'"),
        (lambda: Edge(0, 1, layouts={"x": ([Partial()], ["R"])}), "a sum that is not made yet"),
        (tried(CHAIN, costs=Costs()), "leave them out"),
        (crowded, "600 keys under way at a time, and a rank has 512: give lower limits"),
    ):
        kind, words = error_of(wrong)
        assert kind == "InvalidArgument" and said in words, (kind, words, said)
    # On one mesh a layout stays; and with "auto" all must be there.
    order = placed(make_order("1f1b", 3, 2), (0, 1, 1))
    both = [[0, 3], [1, 2]]
    here_too = {s: stages[s] for s in range(3) if here.rank in both[(0, 1, 1)[s]]}
    kind, words = error_of(
        lambda: Pipeline(
            here_too, [edges[0], Edge(1, 2, layouts=back)], order, loss_fn=print, meshes=both
        )
    )
    assert "would change its layout on one mesh" in words, words
    for options, said in (
        ({}, "needs costs"),
        ({"costs": Costs(), "split": True}, "leave them out"),
    ):
        kind, words = error_of(
            lambda options=options: Pipeline(
                mine, edges, "auto", microbatches=2, loss_fn=print, meshes=CHAIN, **options
            )
        )
        assert kind == "InvalidArgument" and said in words, words
    # Only all ranks together see that they differ; and a dimension that is not there.
    for number, given in enumerate(
        (
            [Edge(0, 1, layouts=back), edges[1]] if here.rank == 2 else edges,
            [Edge(0, 1, layouts={"x": (["R"], ["S(2)"])}), edges[1]],
        )
    ):
        pipeline = tried(CHAIN, given, name=f"differ{number}")()
        kind, words = error_of(
            lambda pipeline=pipeline: pipeline.step(
                {"x": torch.ones(4, 6)} if here.rank == 0 else None
            )
        )
        assert kind == "InvalidArgument", (kind, words)
        said = ("have different pipelines", "edge 0-1: ")[number]
        assert said in words, words
    return [True]


def meshes_unet(here):
    """The example's gradients on one rank and a pair are those of one process, bit by bit."""
    import unet_pipeline as example

    group = dist.new_group([0, 1, 2])
    rows = [[0], [1, 2]]
    if here.rank == 3:
        return [True]
    picture, clean = example.batch(0)
    parts = list(
        zip(picture.chunk(example.MICROBATCHES), clean.chunk(example.MICROBATCHES), strict=True)
    )
    modules = [stage.module for stage in example.unet(3)]
    for x, wanted in parts:
        h, outer = modules[0](x)
        found = modules[3](modules[2](*modules[1](h)), outer)
        (functional.mse_loss(found, wanted) / len(parts)).backward()
    row = int(here.rank > 0)
    mine = {s: stage for s, stage in enumerate(example.unet(3)) if s % 2 == row}
    if row == 1:
        half = example.Half(dist.new_group(rows[1], use_local_synchronization=True))
        for stage in mine.values():
            stage.module.half = half
    order = example.order(SimpleNamespace(schedule="eager_1f1b", split=True), 2)
    pipeline = Pipeline(
        mine,
        example.edges(True),
        order,
        loss_fn=functional.mse_loss,
        meshes=rows,
        group=group,
        name="unet",
    )
    pipeline.step({"picture": picture} if row == 0 else None, clean if row == 1 else None)
    done = 0
    for s, stage in mine.items():
        for (name, ours), theirs in zip(
            stage.module.named_parameters(), modules[s].parameters(), strict=True
        ):
            if ours.grad is not None:
                assert torch.equal(ours.grad, theirs.grad), (s, name)
                done += 1
    return [done == sum(len(list(m.parameters())) for m in modules[row::2]) // (1 + row)]


def meshes_dtensor(here):
    """A stage that torch's tensor parallelism has cut, on DeviceMeshes."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in CHAIN]
    row = next(n for n, ranks in enumerate(CHAIN) if here.rank in ranks)

    def stages():
        torch.manual_seed(7)
        block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        return [nn.Linear(6, 6), block, nn.Linear(6, 6)]

    alone_modules = stages()
    x = torch.randn(2 * PARTS, 6)
    for part in x.chunk(PARTS):
        h = part
        for module in alone_modules:
            h = module(h)
        (h.square().mean() / PARTS).backward()
    module = stages()[row]
    if row == 1:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module = parallelize_module(module, meshes[1], plan)
    pipeline = Pipeline(
        {row: Stage(module)},
        [Edge(0, 1), Edge(1, 2)],
        "1f1b",
        microbatches=PARTS,
        split=True,
        loss_fn=lambda x: x.square().mean(),
        meshes=meshes,
        name="dtensor",
    )
    pipeline.step({"x": x} if row == 0 else None)
    for (name, ours), theirs in zip(
        module.named_parameters(), alone_modules[row].parameters(), strict=True
    ):
        grad = ours.grad.full_tensor() if row == 1 else ours.grad
        torch.testing.assert_close(grad, theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
    return [True]
