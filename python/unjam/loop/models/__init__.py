"""Builders of models: graphs of one step, and each rank's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._errors import InvalidArgument
from .decoder import SHAPES, DecoderConfig, Model, build, random_state_dict


def llama(
    config: DecoderConfig,
    state_dict: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    batch: int = 1,
    context: int = 1024,
    dtype: str = "bf16",
    splits: int | None = None,
) -> Model:
    """A dense decoder like Llama.

    Args:
        config: its shapes; ``experts`` is 0.
        state_dict: weights of the whole model with Hugging Face's names: tensors of torch, or
            arrays. None: a model to plan with. Without ``lm_head.weight`` the head is the
            embedding's.
        ranks: over which it is split.
        batch: sequences that are decoded at once.
        context: positions for which caches have room.
        dtype: of weights and activations: bf16 or f32.
        splits: parts of the positions that attention looks at side by side; None: by the context.

    Raises:
        InvalidArgument: what does not divide, an unknown or missing name, another shape.
    """
    if config.experts:
        raise InvalidArgument(f"experts={config.experts} is of a mixture: call moe()")
    return build(
        config, state_dict, ranks=ranks, batch=batch, context=context, dtype=dtype, name="llama",
        splits=splits,
    )  # fmt: skip


def moe(
    config: DecoderConfig,
    state_dict: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    batch: int = 1,
    context: int = 1024,
    dtype: str = "bf16",
    splits: int | None = None,
) -> Model:
    """A decoder whose layers have experts, of which each row takes some, as Mixtral's.

    Each rank has a part of every expert. The arguments are those of :func:`llama`.
    """
    if not config.experts:
        raise InvalidArgument("experts=0 is a dense model: call llama()")
    return build(
        config, state_dict, ranks=ranks, batch=batch, context=context, dtype=dtype, name="moe",
        splits=splits,
    )  # fmt: skip


__all__ = ["SHAPES", "DecoderConfig", "Model", "llama", "moe", "random_state_dict"]
