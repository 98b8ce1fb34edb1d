"""Plans of cross-mesh resharding: who sends what when tensors change their mesh or their layout.

The words are those of PyTorch's DTensor; torch is not needed. Nothing here moves data yet
(docs/reshard.md)::

    from unjam.reshard import Layout, Plan, Replicate, Shard

    plan = Plan(
        src=Layout([[0, 1], [2, 3]], [Shard(0), Replicate()]),
        dst=Layout([4, 5, 6, 7], [Shard(1)]),
        tensors={"w": ((4096, 4096), "bfloat16")},
    )
    print(plan)
"""

from .files import parse_request, read_request
from .layout import (
    Layout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    Topology,
    placement_of,
)
from .plan import Comparison, Plan, Port, nine

__all__ = [
    "Comparison",
    "Layout",
    "Placement",
    "Plan",
    "Port",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorSpec",
    "Topology",
    "nine",
    "parse_request",
    "placement_of",
    "read_request",
]
