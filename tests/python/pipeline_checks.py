"""What the ranks of test_torch_training.py run of unjam.torch.pipeline.Pipeline.

The models have four stages, on two to four ranks. Alone, one process runs the same modules one
after the other and leaves gradients to autograd: losses and gradients must have the same bits.
"""

import copy
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from unjam.pipeline import Action, Message, Order, make_order, simulate, split_backward
from unjam.torch.pipeline import Edge, Pipeline, Spec, Stage, StepError

PARTS = 5  # microbatches
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b")


# ---- models ----


class Block(nn.Module):
    """Of a GPT, with a weight that it uses twice; the mask comes from the first stage."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        b, t, w = x.shape
        parts = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.out(functional.gelu(self.before(x)))


class First(nn.Module):
    def __init__(self, words=11, width=16, length=6):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width))
        self.register_buffer("mask", torch.ones(length, length).tril().bool())
        self.block = Block(width)

    def forward(self, tokens):
        return self.block(self.words(tokens) + self.places, self.mask), self.mask


class Last(nn.Module):
    def __init__(self, words=11, width=16):
        super().__init__()
        self.block = Block(width)
        self.head = nn.Linear(width, words)

    def forward(self, x, mask):
        return self.head(self.block(x, mask)).flatten(0, 1)


def gpt():
    """Stages, edges, loss, batch, target."""
    torch.manual_seed(11)
    middle = {"inputs": ("x", "mask"), "outputs": ("x",)}
    stages = [
        Stage(First(), ("tokens",), ("x", "mask")),
        Stage(Block(), **middle),
        Stage(Block(), **middle),
        Stage(Last(), **middle),
    ]
    edges = [
        Edge(0, 1, ("x", "mask")),
        Edge(1, 2),
        Edge(2, 3),
        Edge(0, 2, ("mask",)),
        Edge(0, 3, ("mask",)),
    ]
    tokens = torch.randint(11, (2 * PARTS, 7))
    targets = [part.flatten() for part in tokens[:, 1:].chunk(PARTS)]
    return stages, edges, functional.cross_entropy, {"tokens": tokens[:, :-1]}, targets


class Down(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.norm = nn.BatchNorm2d(into)
        self.conv = nn.Conv2d(into, out, 3, padding=1)

    def forward(self, x):
        y = functional.silu(self.conv(self.norm(x)))
        return functional.avg_pool2d(y, 2), y


class Up(nn.Module):
    """Uses one input in a place where no gradient goes, and one not at all."""

    def __init__(self, into, skip, out):
        super().__init__()
        self.up = nn.ConvTranspose2d(into, out, 2, stride=2)
        self.conv = nn.Conv2d(out + skip, out, 3, padding=1)

    def forward(self, x, skip, *more):
        y = self.conv(torch.cat([self.up(x), skip], 1))
        return y if not more else y * more[0].detach().mean().sigmoid()


def unet():
    """A U: down, down, up, up; what goes across skips two stages, and one."""
    torch.manual_seed(12)
    stages = [
        Stage(Down(1, 4), ("picture",), ("x", "wide")),
        Stage(Down(4, 6), ("x",), ("x", "middle")),
        Stage(Up(6, 6, 4), ("x", "middle", "hint"), ("x",)),
        Stage(Up(4, 4, 1), ("x", "wide", "middle"), ("x",)),
    ]
    edges = [
        Edge(0, 1),
        Edge(1, 2, ("x", "middle")),
        Edge(2, 3),
        Edge(0, 3, ("wide",)),
        Edge(0, 2, {"wide": "hint"}),
        Edge(1, 3, ("middle",)),
    ]
    pictures = torch.randn(2 * PARTS, 1, 8, 8)
    return stages, edges, functional.mse_loss, {"picture": pictures}, pictures.flip(-1)


def alone(model, scale=1 / PARTS, steps=1):
    """One process: the last step's losses, and its modules with gradients."""
    stages, edges, loss_fn, batch, target = model
    modules = [copy.deepcopy(stage.module) for stage in stages]
    targets = target if isinstance(target, list) else target.chunk(PARTS)
    losses = []
    for k in list(range(PARTS)) * steps:
        taken = {(0, name): x.chunk(PARTS)[k] for name, x in batch.items()}
        for number, stage in enumerate(stages):
            found = modules[number](*(taken[number, name] for name in stage.inputs))
            found = found if isinstance(found, tuple) else (found,)
            given = dict(zip(stage.outputs, found, strict=True))
            for edge in edges:
                for output, name in edge.pairs if edge.source == number else ():
                    taken[edge.target, name] = given[output]
        loss = loss_fn(*found, targets[k])
        (loss * scale).backward()
        losses.append(loss.detach())
    return losses[-PARTS:], modules


def placed(order, where):
    """The order of a stage a rank, with stage s on rank where[s]: by when actions would run."""
    spans = [span for row in simulate(order).spans for span in row]
    spans.sort(key=lambda span: (span.start, span.action.is_forward, span.action))
    rows = [[] for _ in range(1 + max(where))]
    for span in spans:
        rows[where[span.action.stage]].append(span.action)
    return Order(rows)


def made(model, order, group=None, **options):
    """The pipeline of this rank, with modules of its own."""
    stages, edges, loss_fn, _, _ = model
    rank = dist.get_rank(group)
    mine = {
        s: Stage(copy.deepcopy(stages[s].module), stages[s].inputs, stages[s].outputs)
        for s, where in enumerate(order.rank_of)
        if where == rank
    }
    pipeline = Pipeline(mine, edges, order, loss_fn=loss_fn, group=group, **options)
    return pipeline, {s: stage.module for s, stage in mine.items()}


def stepped(pipeline, modules, model):
    """A step with what this rank has to give."""
    _, _, _, batch, target = model
    return pipeline.step(batch if 0 in modules else None, target if 3 in modules else None)


def assert_as_alone(losses, modules, expected, what):
    if 3 in modules:
        assert [x.item() for x in losses] == [x.item() for x in expected[0]], what
    else:
        assert losses == [], what
    for s, module in modules.items():
        for (name, ours), theirs in zip(
            module.named_parameters(), expected[1][s].parameters(), strict=True
        ):
            theirs = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            assert torch.equal(ours.grad, theirs), (what, s, name, (ours.grad - theirs).abs().max())
        for ours, theirs in zip(module.buffers(), expected[1][s].buffers(), strict=True):
            assert torch.equal(ours, theirs), (what, s)


def orders():
    for name in SCHEDULES:
        whole = make_order(name, 4, PARTS)
        yield name, whole
        yield f"{name}, I/W", split_backward(whole)
        yield f"{name}, I/W later", split_backward(whole, [0, 1, 2, 3])


def _with_places(places, group=None):
    for model in (gpt(), unet()):
        expected = alone(model)
        for what, order in orders():
            for where in places:
                pipeline, modules = made(model, placed(order, where), group, name=f"{what}{where}")
                losses = stepped(pipeline, modules, model)
                assert_as_alone(losses, modules, expected, (what, where))
    # Sums in place of means, a second step that adds to them, and low limits.
    expected = alone(model, 1.0, steps=2)
    pipeline, modules = made(
        model, placed(order, where), group, scale_grads=False, receives=5, sends=6, name="twice"
    )
    stepped(pipeline, modules, model)
    assert_as_alone(stepped(pipeline, modules, model), modules, expected, "sums")
    return []


# ---- checks ----


def pipeline_own(here):
    """Losses and gradients with a stage a rank, or two: on 4 ranks; on 2."""
    if here.ranks == 2:
        return _with_places([(0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0)])
    return _with_places([(0, 1, 2, 3)])


def pipeline_own_three(here):
    """On three of four ranks, of which one has two stages."""
    group = dist.new_group([3, 0, 1], use_local_synchronization=False)
    if here.rank != 2:
        _with_places([(0, 1, 2, 2), (2, 1, 0, 1)], group)
    return []


class Late(nn.Module):
    """Takes a while before each forward and in each backward."""

    def __init__(self, module, seed):
        super().__init__()
        self.module = module
        self.late = random.Random(seed)

    def forward(self, *inputs):
        found = self.module(*inputs)
        self.sleep()
        several = found if isinstance(found, tuple) else (found,)
        for x in several:
            if x.requires_grad:
                x.register_hook(self.sleep)
        return found

    def sleep(self, _=None):
        time.sleep(self.late.choice([0, 0, 0.002, 0.01]))


def pipeline_own_late(here):
    """Ranks that are late at random, each in its way."""
    model = unet()
    expected = alone(model)
    for seed in range(3):
        for name in SCHEDULES:
            order = split_backward(make_order(name, 4, PARTS), seed)
            pipeline, modules = made(model, order, name=f"{name}{seed}")
            for s, stage in pipeline._stages.items():
                late = Late(modules[s], 100 * seed + here.rank)
                pipeline._stages[s] = Stage(late, stage.inputs, stage.outputs)
            losses = stepped(pipeline, modules, model)
            assert_as_alone(losses, modules, expected, (name, "seed", seed))
    return []


def pipeline_own_early(here):
    """Messages arrive in an order in which no rank waits for them: none stands behind another.

    Stage 1 does not go on before stage 3 has what stage 0 sends it of the third microbatch. Stage 3
    waits for that of the first one first, by way of stages 1 and 2.
    """
    from unjam.torch.pipeline.messages import Mail

    store = dist.PrefixStore("early", dist.distributed_c10d._get_default_store())
    model = unet()
    expected = alone(model)
    pipeline, modules = made(model, make_order("eager_1f1b", 4, PARTS))
    pipeline.prepare(model[3] if here.rank == 0 else None)
    if here.rank == 1:
        modules[1].register_forward_pre_hook(lambda *_: store.wait(["seen"]) and None)
    elif here.rank == 3:
        wait = Mail.wait

        def first(mail, message):
            if store.add("waits", 1) == 1:
                for early in (Message(0, 3, 2), Message(0, 3, 0)):
                    for work in mail._under_way[early][0]:
                        work.wait()
                store.set("seen", "")
            return wait(mail, message)

        Mail.wait = first
    try:
        assert_as_alone(stepped(pipeline, modules, model), modules, expected, "early")
    finally:
        if here.rank == 3:
            Mail.wait = wait
    return []


def pipeline_own_shuffled(here):
    """Each stage has an order of microbatches of its own, so what an edge carries is crossed."""
    model = unet()
    losses, alone_modules = alone(model)
    for seed in range(4):
        pick = random.Random(seed)
        rows = []
        for s in range(4):
            forwards, backwards = (pick.sample(range(PARTS), PARTS) for _ in range(2))
            row = [Action(s, "F", k) for k in forwards] + [Action(s, "I", k) for k in backwards]
            rows.append(row + [Action(s, "W", k) for k in pick.sample(range(PARTS), PARTS)])
        pipeline, modules = made(model, Order(rows), name=f"shuffled{seed}")
        found = stepped(pipeline, modules, model)
        if here.rank == 3:
            assert [x.item() for x in found] == [x.item() for x in losses], ("seed", seed)
        for ours, theirs in zip(
            modules[here.rank].parameters(), alone_modules[here.rank].parameters(), strict=True
        ):
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=lambda m, s=seed: f"seed {s}: {m}"
            )
    return []


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


class Sometimes(nn.Module):
    """Goes wrong at one forward."""

    def __init__(self, module, at, wrong):
        super().__init__()
        self.module, self.at, self.wrong, self.calls = module, at, wrong, -1

    def forward(self, *inputs):
        found = self.module(*inputs)
        self.calls += 1
        return self.wrong(found) if self.calls == self.at else found


def pipeline_own_fails(here):
    """What goes wrong on one rank ends the step on all that need it; another pipeline is right."""
    model = unet()
    stages, edges, loss_fn, batch, target = model
    first, last = here.rank == 0, here.rank == 3

    def stepped_with(name, at=None, wrong=None):
        pipeline, modules = made(model, split_backward(make_order("1f1b", 4, PARTS), 1), name=name)
        pipeline.prepare(batch if first else None)
        if at is not None:
            stage = pipeline._stages[here.rank]
            broken = Stage(Sometimes(stage.module, at, wrong), stage.inputs, stage.outputs)
            pipeline._stages[here.rank] = broken
        return pipeline, error_of(lambda: stepped(pipeline, modules, model))

    def divided(found):
        raise ArithmeticError("planted")

    # The module of stage 2 raises; the others wait for it.
    pipeline, (kind, words) = stepped_with("a", *((2, divided) if here.rank == 2 else ()))
    assert kind == "StepError" and "microbatch" in words, (kind, words)
    if here.rank == 2:
        assert "stage 2, microbatch 2 (2F2): planted" in words, words
    elif here.rank == 3:
        assert "edge 2-3, microbatch 2" in words and "see rank 2" in words, words
    kind, words = error_of(lambda: pipeline.step(batch if first else None))
    assert kind == "InvalidUsage" and "out of use" in words and "another name" in words, words
    # Another shape in the fourth microbatch.
    wrong = (3, lambda x: (x[0][:1], x[1])) if here.rank == 1 else ()
    pipeline, (kind, words) = stepped_with("b", *wrong)
    if here.rank == 1:
        assert kind == "InvalidArgument", (kind, words)
        for said in (
            "stage 1, microbatch 3",
            "edge 1-2",
            "'x' is float32[1, 6, 2, 2]",
            "one shape",
        ):
            assert said in words, words
    else:
        assert kind == "StepError", (kind, words)
    # A loss that is none, which only the last stage sees.
    pipeline, modules = made(
        (stages, edges, lambda x, y: x, batch, target), pipeline.order, name="c"
    )
    kind, words = error_of(lambda: stepped(pipeline, modules, model))
    assert "loss_fn gave no tensor of one element" in words or here.rank != 3, words
    assert kind == ("InvalidArgument" if last else "StepError"), (kind, words)
    # A batch that is none is refused where it is given: the others wait for one that is right.
    pipeline, modules = made(model, pipeline.order, name="d")
    pipeline.prepare(batch if first else None)
    for wrong, said in (
        ({"picture": batch["picture"][:7]}, "7 rows, which are not 5 microbatches of one size"),
        ({"picture": batch["picture"][:, :, :4]}, "was float32[2, 1, 8, 8]"),
        ({"pictures": batch["picture"]}, "takes 'picture', which no edge brings"),
        ({}, "takes 'picture'"),
        (None, "takes 'picture'"),
        ({**batch, "y": batch["picture"]}, "has 'y', which no stage of rank 0 takes"),
        (
            {"picture": [*batch["picture"].chunk(5)[:4], torch.ones(1)]},
            "microbatch 4 is float32[1]",
        ),
        (batch["picture"], "a batch is a mapping"),
    ):
        if first:
            kind, words = error_of(lambda wrong=wrong: pipeline.step(wrong))
            assert kind in ("InvalidArgument", "InvalidType") and said in words, words
    if last:
        kind, words = error_of(lambda: pipeline.step(None, target[:6]))
        assert kind == "InvalidArgument" and "target has 6 rows" in words, (kind, words)
    assert_as_alone(stepped(pipeline, modules, model), modules, alone(model), "behind errors")
    return []


def pipeline_own_refuses(here):
    """What fits no pipeline is refused before anything is sent."""
    stages, edges, loss_fn, batch, target = gpt()
    mine = {here.rank: stages[here.rank]}
    good = {"microbatches": PARTS, "loss_fn": loss_fn}
    order = make_order("1f1b", 4, PARTS)
    crossed = Order(_crossed())
    for wrong, said in (
        (lambda: Pipeline(mine, edges, "1f1b", **{**good, "microbatches": 0}), "microbatches=0"),
        (lambda: Pipeline(mine, edges, "1f1b", loss_fn=loss_fn), "needs microbatches"),
        (lambda: Pipeline(mine, edges, "1f2b", **good), "did you mean 1f1b?"),
        (lambda: Pipeline(mine, edges, crossed, loss_fn=loss_fn), "deadlocks"),
        (lambda: Pipeline(mine, edges, order, split=True, loss_fn=loss_fn), "an Order has its own"),
        (lambda: Pipeline(mine, edges, make_order("1f1b", 3, 2), loss_fn=loss_fn), "of 3 ranks"),
        (lambda: Pipeline(mine, edges, 5, **good), "schedule=5 is no order"),
        (lambda: Pipeline(mine, edges, "1f1b", delay=1, **good), "give split=True, too"),
        (lambda: Pipeline({5: stages[0]}, edges, "1f1b", **good), "has stages [5]"),
        (lambda: Pipeline({here.rank: 3}, edges, "1f1b", **good), "is no Stage"),
        (lambda: Pipeline(mine, [*edges, Edge(1, 4)], "1f1b", **good), "there are stages 0 to 3"),
        (lambda: Pipeline(mine, [*edges, Edge(0, 1)], "1f1b", **good), "edge 0-1 is there twice"),
        (lambda: Pipeline(mine, [*edges, Edge(0, 3)], "1f1b", **good), "edge 0-3 is there twice"),
        (lambda: Pipeline(mine, edges, "1f1b", transfers="none", **good), "data or signal"),
        (lambda: Pipeline(mine, edges, "1f1b", receives=0, **good), "receives=0 is no limit"),
        (lambda: Pipeline(mine, edges, "1f1b", name="", **good), "is no name"),
        (lambda: Edge(2, 1), "edge 2-1 does not lead forward: give Edge(1, 2)"),
        (lambda: Edge(1, 1), "leave it out"),
        (lambda: Edge(0, 1, "x"), "such as ('x',)"),
        (lambda: Edge(0, 1, ()), "has no tensors"),
        (lambda: Edge(0, 1, ("x", "x")), "has a name twice"),
        (lambda: Edge(0, 1, ("x",), {"y": Spec((2,))}), "give a Spec for each"),
        (lambda: Spec((2, -1)), "is no shape"),
        (lambda: Spec((2,), torch.int64), "give grad=False"),
        (lambda: Stage(3), "a torch.nn.Module"),
    ):
        kind, words = error_of(wrong)
        assert kind in ("InvalidArgument", "Deadlock") and said in words, (kind, words, said)
    both = [*edges[:3], Edge(0, 2, {"x": "x"})]
    kind, words = error_of(lambda: Pipeline(mine, both, "1f1b", **good))
    assert "edges 1-2 and 0-2 both bring 'x'" in words, words
    if here.rank == 1:
        odd = [Edge(0, 1, ("x", "masks")), *edges[1:]]
        assert "did you mean 'mask'?" in error_of(lambda: Pipeline(mine, odd, "1f1b", **good))[1]
    if here.rank == 3:
        assert "give loss_fn" in error_of(lambda: Pipeline(mine, edges, "1f1b", microbatches=2))[1]
    # What only all ranks together see: all have the error.
    one = Pipeline(mine, edges, "gpipe" if here.rank == 2 else "1f1b", **good, name="differ")
    kind, words = error_of(lambda: one.step(batch if here.rank == 0 else None))
    assert kind == "InvalidArgument" and "ranks 0 and 2 have different pipelines" in words, words
    one = Pipeline(mine, edges, "1f1b", **good, name="short")
    short = {"tokens": batch["tokens"][:7]}
    kind, words = error_of(lambda: one.step(short if here.rank == 0 else None))
    assert kind == "InvalidArgument" and "7 rows" in words, words
    few = [Edge(0, 1, ("x",)), *edges[1:]] if here.rank != 1 else edges
    one = Pipeline(mine, few, "1f1b", **good, name="few")
    kind, words = error_of(lambda: one.step(batch if here.rank == 0 else None))
    assert kind == "InvalidArgument" and "ranks 0 and 1 have different" in words, words
    # One that the module refuses.
    long = {"tokens": torch.zeros(2 * PARTS, 9, dtype=torch.int64)}
    one = Pipeline(mine, edges, "1f1b", **good, name="long")
    kind, words = error_of(lambda: one.step(long if here.rank == 0 else None))
    assert kind == "InvalidArgument" and "stage 0 does not run with tokens int64[2, 9]" in words
    return []


def _crossed():
    """Rank 0 wants a gradient before it gives what that depends on."""
    rows = [list(row) for row in make_order("1f1b", 4, 2).rows]
    rows[0] = [Action(0, k, m) for m in range(2) for k in "FB"]
    rows[3] = [Action(3, "F", 1), Action(3, "F", 0), Action(3, "B", 1), Action(3, "B", 0)]
    return rows


def pipeline_own_signal(here):
    """A byte in place of each message; specs that are given; None and other kinds of gradients."""
    model = stages, edges, loss_fn, batch, target = unet()
    order = split_backward(make_order("1f1b", 4, PARTS))
    pipeline, modules = made(model, order, transfers="signal")
    losses = stepped(pipeline, modules, model)
    assert len(losses) == (PARTS if here.rank == 3 else 0)
    assert all(
        p.grad is not None and p.grad.shape == p.shape for p in modules[here.rank].parameters()
    )
    given = [
        Edge(0, 1, ("x",), {"x": Spec((2, 4, 4, 4))}),
        Edge(1, 2, ("x", "middle"), {"x": Spec((2, 6, 2, 2)), "middle": Spec((2, 6, 4, 4))}),
        Edge(2, 3, ("x",), {"x": Spec((2, 4, 4, 4))}),
        Edge(0, 3, ("wide",), {"wide": Spec((2, 4, 8, 8))}),
        Edge(0, 2, {"wide": "hint"}, {"wide": Spec((2, 4, 8, 8))}),
        Edge(1, 3, ("middle",), {"middle": Spec((2, 6, 4, 4))}),
    ]
    told = (stages, given, loss_fn, batch, target)
    pipeline, modules = made(told, order, name="given")
    pipeline.prepare()  # needs no batch
    assert_as_alone(stepped(pipeline, modules, told), modules, alone(model), "given")
    # One that is wrong is found at the first forward; the step ends on all.
    wrong = [Edge(0, 1, ("x",), {"x": Spec((2, 4, 4, 5))}), *given[1:]]
    pipeline, modules = made((stages, wrong, loss_fn, batch, target), order, name="wrong")
    kind, words = error_of(lambda: stepped(pipeline, modules, told))
    if here.rank == 0:
        assert "edge 0-1: 'x' is float32[2, 4, 4, 4], and its spec float32[2, 4, 4, 5]" in words
    else:
        assert kind == StepError.__name__, (kind, words)
    return []
