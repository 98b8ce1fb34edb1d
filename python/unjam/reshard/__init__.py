"""Cross-mesh resharding: tensors change their mesh or their layout, by a plan of who sends what.

The words are those of PyTorch's DTensor; torch is not needed (docs/reshard.md)::

    from unjam.reshard import Layout, Plan, Replicate, Shard

    plan = Plan(
        src=Layout([[0, 1], [2, 3]], [Shard(0), Replicate()]),
        dst=Layout([4, 5, 6, 7], [Shard(1)]),
        tensors={"w": ((4096, 4096), "bfloat16")},
    )
    print(plan)
    plan.run(group, src={"w": mine}, key="weights").wait()  # dst= on ranks 4 to 7
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
from .run import ReshardRequest

__all__ = [
    "Comparison",
    "Layout",
    "Placement",
    "Plan",
    "Port",
    "Replicate",
    "ReshardRequest",
    "Shard",
    "StridedShard",
    "TensorSpec",
    "Topology",
    "nine",
    "parse_request",
    "placement_of",
    "read_request",
]
