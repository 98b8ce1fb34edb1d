"""torch.distributed over unjam: ``dist.init_process_group("unjam")``, for CPU and CUDA tensors.

Installed, the backend is known to torch after ``import torch`` (entry point ``torch.backends``);
from a checkout, ``import unjam.torch`` makes it known. Every operation keeps the order that its key
has: calls of one process group and key are matched in their order, as always in torch, and calls of
different groups, or under different keys, may be made in a different order on every rank, from any
thread, with any synchronisation between. A key is given in one of four ways:

    with unjam.key("layer3"):                       # for what is called inside, also by libraries
        dist.all_reduce(grad)
    unjam.all_reduce(grad, key="layer3")            # torch.distributed's functions with key=
    group = unjam.keyed_group(group, "layer3")      # a process group, for whoever takes one
    dist.isend(tensor, dst, tag=3)                  # point to point: the tag

Nothing of an operation blocks on a CUDA device before its ``wait()``.
"""


def _autoload() -> None:
    """What ``import torch`` calls, as its last step: makes the backend known, and nothing else.

    Neither that nor the import of this module may fail, for then torch could not be imported at
    all.
    """
    import warnings

    try:
        from ._register import register

        register()
    except Exception as error:
        warnings.warn(
            f"unjam could not register its torch.distributed backend as asked for: {error}",
            stacklevel=2,
        )


# These come after _autoload, for which importing torch comes back here.
from . import ddp, fsdp  # noqa: E402
from ._register import register  # noqa: E402
from .collectives import (  # noqa: E402
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from .keys import current_key, key, keyed_group  # noqa: E402
from .memory import Registration, empty, memory_pool, register_memory  # noqa: E402
from .order import check_order  # noqa: E402
from .recorder import dump_flight_recorder, flight_record  # noqa: E402
from .report import explain  # noqa: E402
from .reshard import Reshard, ReshardWork, receive, redistribute  # noqa: E402

_autoload()

__all__ = [
    "Registration",
    "Reshard",
    "ReshardWork",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "check_order",
    "current_key",
    "ddp",
    "dump_flight_recorder",
    "empty",
    "explain",
    "flight_record",
    "fsdp",
    "gather",
    "key",
    "keyed_group",
    "memory_pool",
    "receive",
    "redistribute",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register",
    "register_memory",
    "scatter",
]
