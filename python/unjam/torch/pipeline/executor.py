"""An executor of pipelines: computes in a given order, while unjam carries what is between."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..._errors import InvalidArgument, InvalidUsage, UnjamError
from ...pipeline import Action, Costs, Message, Order, executable
from ...pipeline.lower import RECEIVE, SEND, Step
from ..keys import key, unjam_backend
from . import backward
from .batch import Batch, cut, microbatches_of
from .meshes import KEYS, Mesh, Routes, check_layouts, meshes_of, row_of
from .messages import Mail
from .order import order_of
from .shapes import arrived, named_outputs, outputs_of
from .stages import Edge, Spec, Stage, check
from .under_way import check_keys

TRANSFERS = ("data", "signal")
_LIMITS = {"cpu": 64, "cuda": 16}  # a rank has 512 keys under way at most, and 64 on CUDA
_OF_MESHES = 32  # a message between meshes takes several of them, see KEYS


class StepError(UnjamError, RuntimeError):
    """A step has failed on this rank; the message names stage, edge and microbatch."""


class Pipeline:
    """Stages of a model on the ranks of a process group of unjam's, and a step that trains them.

    Edges may skip stages. Each message has a key of its own, "<name>/<edge>/f|b/<microbatch>": no
    order of sends and receives has to be agreed on, and none waits behind another. Receives are
    posted at the start of a step, for what is used first, and waited for before they are used.

    Gradients are added to ``.grad``, in the order in which this rank's backwards come. An input
    whose gradient a module does not give sends zeros back.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        edges: Sequence[Edge],
        schedule: Order | str,
        *,
        microbatches: int | None = None,
        split: bool = False,
        delay: int | Sequence[int] = 0,
        loss_fn: Any = None,
        group: dist.ProcessGroup | None = None,
        scale_grads: bool = True,
        transfers: str = "data",
        receives: int | None = None,
        sends: int | None = None,
        device: torch.device | str | None = None,
        name: str = "pipeline",
        meshes: Sequence[Any] | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Checks all that this rank can check; sends nothing.

        Args:
            stages: this rank's, by number; all ranks' together count from 0.
            edges: those of the whole pipeline, the same on all ranks.
            schedule: an order for the ranks of the group, or the name of one with a stage a rank:
                "gpipe", "1f1b", "eager_1f1b", or "auto", which looks at ``costs``.
            microbatches: into how many a batch is cut; with a name only.
            split: whether backwards come in two parts; with a name only.
            delay: how many actions stand between them; one number, or one for each stage.
            loss_fn: of the last stage: called with its outputs and, if a step has one, the target.
            group: whose ranks have the order's rows; None: the default one.
            scale_grads: whether gradients are those of the mean over microbatches, or of the sum.
            transfers: "data"; or "signal", which sends a byte in place of each message: for
                measurements of what transfers cost, since all results are meaningless.
            receives: how many receives of this rank are under way at most; None: 64, on CUDA 16,
                between meshes 32.
            sends: how many sends. Of a rank's 512 keys, 64 on CUDA, each message takes one, and
                between meshes five.
            device: of all tensors; None: that of the first weight.
            name: in front of all keys; another one for each pipeline of a group.
            meshes: of each row of the order, the ranks that compute its stages together: a
                DeviceMesh, or a (nested) list of the group's ranks. Modules get and give their
                rank's parts, as the edges' ``layouts`` say. None: row r is rank r.
            costs: what actions and transfers take, in any unit; with "auto" only.

        Raises:
            InvalidArgument: what is given does not fit together; the message says what.
            Deadlock: ranks would wait for each other in this order.
        """
        self._group = dist.distributed_c10d._get_default_group() if group is None else group
        unjam_backend(self._group)
        self._rank = dist.get_rank(self._group)
        if transfers not in TRANSFERS:
            raise InvalidArgument(f"transfers={transfers!r}: give {' or '.join(TRANSFERS)}")
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"name={name!r} is no name: give a text")
        self._meshes = meshes_of(meshes, self._group)
        self._row = row_of(self._meshes, self._rank)
        self.order = order_of(schedule, len(self._meshes), microbatches, split, delay, costs)
        self._stages = dict(stages)
        self._check_stages()
        check(self._stages, edges, self.order.stages)
        self.edges = tuple(edges)
        self._loss_fn = loss_fn
        if self._has_loss and not callable(loss_fn):
            raise InvalidArgument("the last stage is here: give loss_fn, what it is trained for")
        self._device = torch.device(device) if device is not None else self._device_of_stages()
        check_layouts(self.edges, self._meshes, self.order.rank_of, self._device.type)
        limit = _LIMITS.get(self._device.type, 16)
        if any(mesh.size > 1 for mesh in self._meshes):
            limit = min(limit, _OF_MESHES)
        limits = (limit if receives is None else receives, limit if sends is None else sends)
        programs = executable(
            self.order, [(edge.source, edge.target) for edge in self.edges], *limits
        )
        check_keys(programs, self._keys_of, self._device.type)
        self._program = programs[self._row]
        self._routes = Routes(name, self._group)
        self._edge = {(edge.source, edge.target): edge for edge in self.edges}
        self._taken = {
            (edge.target, taken): (edge, output)
            for edge in self.edges
            for output, taken in edge.pairs
        }
        self._scale = 1 / self.order.microbatches if scale_grads else 1.0
        self._transfers = transfers
        self._name = name
        given = [
            (str(edge), edge.pairs, sorted((edge.specs or {}).items()), str(edge.layouts))
            for edge in self.edges
        ]
        shown = [mesh.tolist() for mesh in self._meshes]
        about = (self.order.rows, shown, given, limits, transfers, scale_grads)
        self._digest = hashlib.sha256(repr(about).encode()).hexdigest()
        self._specs: dict[Edge, dict[str, Spec]] | None = None
        self._batch: dict[tuple[int, str], Spec] = {}
        self._broken = ""

    def prepare(self, batch: Batch | None = None) -> None:
        """Finds out what the edges carry; all ranks call it. The first step does, if nobody has.

        Args:
            batch: as of step().

        Raises:
            InvalidArgument: on all ranks: what one of them gave does not fit, or they differ.
        """
        words = ""
        parts: dict[str, list[torch.Tensor]] = {}
        try:
            if batch is not None or any(edge.specs is None for edge in self.edges):
                parts = self._cut(batch)
        except InvalidArgument as error:
            words = str(error)
        told: list[Any] = [None] * self._group.size()
        with key(f"{self._name}/agreed"):
            dist.all_gather_object(told, (words, self._digest), group=self._group)
        for rank, (wrong, digest) in enumerate(told):
            if wrong:
                raise InvalidArgument(wrong if rank == self._rank else f"rank {rank}: {wrong}")
            if digest != told[0][1]:
                raise InvalidArgument(
                    f"ranks 0 and {rank} have different pipelines: give all ranks the same edges, "
                    "order, meshes, limits, transfers and scale_grads"
                )
        found: dict[Edge, dict[str, Spec]] = {}
        for number in range(self.order.stages):
            leaving = [edge for edge in self.edges if edge.source == number]
            if all(edge.specs is not None for edge in leaving):
                found.update((edge, dict(edge.specs or {})) for edge in leaving)
            else:
                found.update(self._inferred(number, leaving, found, parts))
            for edge in leaving:
                ends = self._meshes_of(edge)
                if any(mesh.size > 1 for mesh in ends):
                    self._routes.add(edge, found[edge], ends)
        self._specs = found
        self._batch = {
            (number, name): Spec.of(parts[name][0])
            for number, stage in self._stages.items()
            for name in stage.inputs
            if name in parts
        }

    def step(self, batch: Batch | None = None, target: Any = None) -> list[torch.Tensor]:
        """Forwards and backwards of one batch; all ranks call it.

        If it fails on one rank, it does so on all that still need something of it. There the
        pipeline is out of use then: make another one on all ranks, with another name.

        Args:
            batch: by name, what this rank's stages take that no edge brings: tensors to be cut into
                microbatches along their first dimension, or a sequence of one for each.
            target: on the last stage's rank, for the loss: likewise.

        Returns:
            The microbatches' losses on the last stage's rank; elsewhere nothing.

        Raises:
            InvalidArgument: what this rank gave does not fit. If it is the batch or the target,
                nothing was sent: the others wait, and this rank may give the right one.
            StepError: something failed here, or at a rank that this one waits for.
        """
        if self._broken:
            raise InvalidUsage(
                f"the pipeline is out of use, since {self._broken}. Cure: make another on all "
                "ranks, with another name"
            )
        if self._specs is None:
            self.prepare(batch or {})
        run = _Run(self, batch, target)
        self._broken = "a step was interrupted"
        losses = run.all()
        self._broken = "" if run.error is None else f"a step has failed: {run.error}"
        if run.error is not None:
            raise run.error
        return losses

    # ---- inside ----

    @property
    def _has_loss(self) -> bool:
        return self.order.stages - 1 in self._stages

    def _check_stages(self) -> None:
        for number, stage in self._stages.items():
            if not isinstance(stage, Stage):
                raise InvalidArgument(f"stage {number!r} is no Stage: give Stage(module, …)")
        due = {s for s, row in enumerate(self.order.rank_of) if row == self._row}
        if due != set(self._stages):
            raise InvalidArgument(
                f"rank {self._rank} has stages {sorted(self._stages)}, and in the order "
                f"{sorted(due)}: give the stages that the order gives it"
            )

    def _meshes_of(self, edge: Edge) -> tuple[Mesh, Mesh]:
        rank_of = self.order.rank_of
        return self._meshes[rank_of[edge.source]], self._meshes[rank_of[edge.target]]

    def _keys_of(self, message: Message) -> int:
        """How many keys it takes at most."""
        rows = [self.order.rank_of[stage] for stage in message[:2]]
        if rows[0] == rows[1]:
            return 0
        return 1 if all(self._meshes[row].size == 1 for row in rows) else KEYS

    def _parts_of(self, edge: Edge, side: str) -> dict[str, Spec]:
        """What this rank has of the edge's outputs, as "src" or "dst" of them."""
        assert self._specs is not None
        return self._routes.parts(edge, side) if self._routes.has(edge) else self._specs[edge]

    def _device_of_stages(self) -> torch.device:
        for stage in self._stages.values():
            for weight in stage.module.parameters():
                return weight.device
        return torch.device("cpu")

    def _cut(self, batch: Batch | None) -> dict[str, list[torch.Tensor]]:
        """The batch's microbatches, by name."""
        due = {
            name: number
            for number, stage in self._stages.items()
            for name in stage.inputs
            if (number, name) not in self._taken
        }
        return cut(batch, due, self._rank, self.order.microbatches)

    def _inferred(
        self,
        number: int,
        leaving: Sequence[Edge],
        known: Mapping[Edge, Mapping[str, Spec]],
        parts: Mapping[str, Sequence[torch.Tensor]],
    ) -> dict[Edge, dict[str, Spec]]:
        """What leaves a stage: its rank finds out and tells the others."""
        owner = int(self._meshes[self.order.rank_of[number]].flat[0])
        told: list[Any] = [None]
        if owner == self._rank:
            try:
                told[0] = self._dry(number, leaving, known, parts)
            except InvalidArgument as error:
                told[0] = str(error)
        with key(f"{self._name}/shapes"):
            dist.broadcast_object_list(told, group=self._group, group_src=owner)
        if isinstance(told[0], str):
            raise InvalidArgument(told[0])
        return {edge: dict(edge.specs or told[0][edge.target]) for edge in leaving}

    def _dry(
        self,
        number: int,
        leaving: Sequence[Edge],
        known: Mapping[Edge, Mapping[str, Spec]],
        parts: Mapping[str, Sequence[torch.Tensor]],
    ) -> dict[int, dict[str, Spec]]:
        stage = self._stages[number]
        inputs = {}
        for name in stage.inputs:
            edge, output = self._taken.get((number, name), (None, ""))
            if edge is None:
                inputs[name] = Spec.of(parts[name][0])
            elif self._routes.has(edge):
                inputs[name] = self._routes.parts(edge, "dst")[output]
            else:
                inputs[name] = known[edge][output]
        found = outputs_of(stage, number, inputs, self._device)
        return {edge.target: {name: found[name] for name, _ in edge.pairs} for edge in leaving}


class _Kept:
    """What a stage keeps of a microbatch, from its forward to its backward's end."""

    def __init__(self, inputs: dict[str, torch.Tensor], roots: dict[str, torch.Tensor]) -> None:
        self.inputs = inputs
        self.roots = roots
        self.rest: backward.Rest | None = None


class _Run:
    """One step.

    What fails ends the computing, and not the program: the messages that are left go on with sizes
    that nobody expects, so that their other ends fail, too, in place of waiting.
    """

    def __init__(self, pipeline: Pipeline, batch: Batch | None, target: Any) -> None:
        self.error: UnjamError | None = None
        self._p = pipeline
        self._mail = Mail(
            pipeline._name,
            pipeline._group,
            pipeline._routes,
            pipeline._device,
            pipeline._transfers == "signal",
        )
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._local: dict[Message, list[torch.Tensor]] = {}
        self._arrived: dict[Message, list[torch.Tensor]] = {}
        self._given: dict[Message, list[torch.Tensor]] = {}
        self._losses: list[torch.Tensor | None] = [None] * pipeline.order.microbatches
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._targets: list[Any] | None = None
        self._take(batch, target)

    def all(self) -> list[torch.Tensor]:
        """Runs the program; the losses."""
        for step in self._p._program:
            if self.error is None:
                try:
                    self._do(step)
                except Exception as error:
                    self._fail(self._told(step, error))
                    if step.do in (SEND, RECEIVE) and not self._mail.is_posted(step.what):
                        self._end(step)  # or its other end would wait for it
            else:
                self._end(step)
        self._mail.settle()
        return [loss for loss in self._losses if loss is not None]

    def _take(self, batch: Batch | None, target: Any) -> None:
        p = self._p
        self._parts = p._cut(batch)
        for (number, name), spec in p._batch.items():
            now = Spec.of(self._parts[name][0])
            if (now.shape, now.dtype) != (spec.shape, spec.dtype):
                raise InvalidArgument(
                    f"stage {number}: {name!r} is {now} a microbatch, and was {spec} in the first "
                    "step: give the same, or let all ranks call prepare(batch) before"
                )
        if target is not None:
            if not p._has_loss:
                raise InvalidArgument(
                    f"rank {p._rank} does not have the last stage: give the target there alone"
                )
            self._targets = microbatches_of("target", target, p.order.microbatches)

    def _fail(self, error: UnjamError) -> None:
        self.error = error
        limit = self._p._group._get_backend(self._p._device).options._timeout
        self._mail.hurry(limit if isinstance(limit, timedelta) else timedelta(seconds=60))

    # ---- the program ----

    def _do(self, step: Step) -> None:
        what = step.what
        if isinstance(what, Action):
            self._compute(what)
        elif self._is_local(what):
            if step.do == SEND:
                self._local[what] = self._given.pop(what)
            elif step.do != RECEIVE:
                self._arrived[what] = self._local.pop(what)
        elif step.do == SEND:
            given = self._given.pop(what)
            self._mail.send(self._edge(what), what, self._other(what), self._specs(what), given)
        elif step.do == RECEIVE:
            self._mail.receive(self._edge(what), what, self._other(what), self._specs(what))
        else:
            self._wait(what)

    def _wait(self, message: Message) -> None:
        boxes = self._mail.wait(message)
        if not self._sends(message):
            self._arrived[message] = boxes

    def _end(self, step: Step) -> None:
        """In place of _do(), once something has failed."""
        what = step.what
        if isinstance(what, Action) or self._is_local(what):
            return
        # What is wrong here is so since the first error, which is told.
        with contextlib.suppress(Exception):
            if step.do in (SEND, RECEIVE):
                self._mail.refuse(
                    self._edge(what), what, self._other(what), self._specs(what), step.do == SEND
                )
            else:
                self._mail.wait(what)

    # ---- computing ----

    def _compute(self, action: Action) -> None:
        stage, kind, microbatch = action
        if kind == "F":
            self._forward(stage, microbatch)
            return
        kept = self._kept[stage, microbatch]
        if kind == "W":
            assert kept.rest is not None
            kept.rest()
        else:
            self._backward(stage, microbatch, kept, kind == "I")
        if kind in ("B", "W"):
            del self._kept[stage, microbatch]

    def _forward(self, number: int, microbatch: int) -> None:
        stage = self._p._stages[number]
        inputs: dict[str, torch.Tensor] = {}
        taken: dict[str, torch.Tensor] = {}  # by edges
        for edge in self._p.edges:
            if edge.target != number:
                continue
            boxes = self._arrived.pop(Message(edge.source, number, microbatch))
            for (output, name), box in zip(edge.pairs, boxes, strict=True):
                if self._spec(edge)[output].grad:
                    box.requires_grad_()
                taken[name] = box
        for name in stage.inputs:
            inputs[name] = taken[name] if name in taken else self._parts[name][microbatch]
        with torch.enable_grad():
            outputs = named_outputs(stage, number, stage.module(*inputs.values()))
            self._check_outputs(number, microbatch, outputs)
            roots = outputs
            if number == self._p.order.stages - 1:
                roots = {"loss": self._loss(number, microbatch, outputs)}
        self._kept[number, microbatch] = _Kept(taken, roots)
        for edge in self._p.edges:
            if edge.source == number:
                self._given[Message(number, edge.target, microbatch)] = [
                    arrived(outputs[name].detach()) for name, _ in edge.pairs
                ]

    def _loss(
        self, number: int, microbatch: int, outputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        more = () if self._targets is None else (self._targets[microbatch],)
        loss = self._p._loss_fn(*outputs.values(), *more)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidArgument("loss_fn gave no tensor of one element: let it give the loss")
        self._losses[microbatch] = loss.detach()
        return loss

    def _check_outputs(
        self, number: int, microbatch: int, outputs: Mapping[str, torch.Tensor]
    ) -> None:
        for edge in self._p.edges:
            specs = self._p._parts_of(edge, "src") if edge.source == number else {}
            for name, spec in specs.items():
                x = outputs[name]
                wrong = (tuple(x.shape), x.dtype) != (spec.shape, spec.dtype)
                # In evaluation of frozen weights one may be without: its zeros are not needed.
                if wrong or (x.requires_grad and not spec.grad):
                    raise InvalidArgument(
                        f"edge {edge}: {name!r} is {Spec.of(x)}, and its spec {spec}: give all "
                        "microbatches one shape, or let all ranks call prepare(batch) before"
                    )

    def _backward(self, number: int, microbatch: int, kept: _Kept, is_split: bool) -> None:
        grads: dict[str, torch.Tensor] = {}
        for edge in self._p.edges:
            if edge.source != number:
                continue
            boxes = self._arrived.pop(Message(edge.target, number, microbatch))
            names = [name for name, spec in self._ordered(edge) if spec.grad]
            for name, box in zip(names, boxes, strict=True):
                grads[name] = grads[name] + box if name in grads else box
        if "loss" in kept.roots and number == self._p.order.stages - 1:
            grads = {"loss": torch.full_like(kept.roots["loss"], self._p._scale)}
        pairs = [(x, grads[n]) for n, x in kept.roots.items() if n in grads and x.requires_grad]
        roots, given = [x for x, _ in pairs], [g for _, g in pairs]
        kept.roots = {}
        if is_split:
            kept.rest = backward.of_inputs(roots, given, kept.inputs.values())
        else:
            backward.full(roots, given)
        for edge in self._p.edges:
            if edge.target == number:
                self._given[Message(number, edge.source, microbatch)] = [
                    arrived(_grad_of(kept.inputs[taken]))
                    for (_, taken), (_, spec) in zip(edge.pairs, self._ordered(edge), strict=True)
                    if spec.grad
                ]
        kept.inputs = {}

    # ---- looking up ----

    def _edge(self, message: Message) -> Edge:
        return self._p._edge[min(message[:2]), max(message[:2])]

    def _spec(self, edge: Edge) -> dict[str, Spec]:
        assert self._p._specs is not None
        return self._p._specs[edge]

    def _ordered(self, edge: Edge) -> list[tuple[str, Spec]]:
        return [(name, self._spec(edge)[name]) for name, _ in edge.pairs]

    def _specs(self, message: Message) -> list[Spec]:
        """Of its tensors as this rank has them: gradients come of those alone that have some."""
        edge = self._edge(message)
        of = self._p._parts_of(edge, "src" if edge.source in self._p._stages else "dst")
        specs = [of[name] for name, _ in edge.pairs]
        return [spec for spec in specs if spec.grad or not message.is_gradient]

    def _sends(self, message: Message) -> bool:
        return message.source in self._p._stages

    def _others(self, message: Message) -> list[int]:
        """The ranks at the other end."""
        stage = message.target if self._sends(message) else message.source
        ranks: list[int] = self._p._meshes[self._p.order.rank_of[stage]].ravel().tolist()
        return ranks

    def _other(self, message: Message) -> int:
        return self._others(message)[0]

    def _is_local(self, what: Action | Message) -> bool:
        return (
            isinstance(what, Message)
            and what.source in self._p._stages
            and what.target in self._p._stages
        )

    def _told(self, step: Step, error: Exception) -> UnjamError:
        """The error with its place, and a cure."""
        what = step.what
        if isinstance(what, Action):
            kind = InvalidArgument if isinstance(error, InvalidArgument) else StepError
            found = kind(f"stage {what.stage}, microbatch {what.microbatch} ({what}): {error}")
        else:
            others = self._others(what)
            other = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
            way = "gradient" if what.is_gradient else "activation"
            act = f"sent to stage {what.target}" if self._sends(what) else f"of stage {what.source}"
            stage = what.source if self._sends(what) else what.target
            found = StepError(
                f"stage {stage}, edge {self._edge(what)}, microbatch {what.microbatch}: the {way} "
                f"{act} on {other} did not come through: {error}. Cure: see {other}, which "
                f"{'has' if len(others) == 1 else 'have'} died, or come late, or ended this step "
                "with an error"
            )
        found.__cause__ = error
        return found


def _grad_of(x: torch.Tensor) -> torch.Tensor:
    """Zeros where the module did not use it."""
    grad, x.grad = x.grad, None
    return torch.zeros_like(x) if grad is None else grad
