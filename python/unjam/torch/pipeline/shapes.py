"""What the edges carry, found out without computing: torch's fake tensors have shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ..._errors import InvalidArgument
from .stages import Spec, Stage


def outputs_of(
    stage: Stage, number: int, inputs: Mapping[str, Spec], device: torch.device
) -> dict[str, Spec]:
    """The stage's outputs, by a pass over fake tensors: no weight, buffer or seed changes.

    Raises:
        InvalidArgument: the module refuses these inputs, or cannot run so.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
            own = {
                name: mode.from_tensor(x)
                for named in (stage.module.named_parameters, stage.module.named_buffers)
                for name, x in named()
            }
            given = [
                torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.grad)
                for spec in (inputs[name] for name in stage.inputs)
            ]
            found = torch.func.functional_call(stage.module, own, tuple(given))
            return {n: Spec.of(x) for n, x in named_outputs(stage, number, found).items()}
    except InvalidArgument:
        raise
    except Exception as error:
        shown = ", ".join(f"{name} {spec}" for name, spec in inputs.items())
        raise InvalidArgument(
            f"stage {number} does not run with {shown or 'no inputs'}, when shapes are found out: "
            f"{error}. Cure: give it what it takes; or, if it looks at values, give specs for all "
            "edges"
        ) from error


def named_outputs(stage: Stage, number: int, found: Any) -> dict[str, torch.Tensor]:
    """What the module gave, by name.

    Raises:
        InvalidArgument: it is not what the stage says.
    """
    for x in found if isinstance(found, (tuple, list)) else (found,):
        if isinstance(x, DTensor):
            raise InvalidArgument(
                f"stage {number} gives a DTensor, and edges carry a rank's own parts: let it give "
                "x.to_local() (use_local_output=True, in torch's tensor parallelism)"
            )
    several = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if len(several) != len(stage.outputs) or not all(isinstance(x, torch.Tensor) for x in several):
        kinds = ", ".join(type(x).__name__ for x in several)
        raise InvalidArgument(
            f"stage {number} gives {kinds}, and its outputs are {', '.join(stage.outputs)}: let it "
            "give a tensor for each"
        )
    return dict(zip(stage.outputs, several, strict=True))


def arrived(x: torch.Tensor) -> torch.Tensor:
    """The tensor when its collective has ended, where torch has left that to the first use."""
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x
