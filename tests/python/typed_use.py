"""A user's file: test_types.py has mypy read it, strictly. It is never run.

A line that ends with "mistake" and an error's code must have that error, and no other line any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import unjam

if TYPE_CHECKING:
    from typing_extensions import Unpack, assert_type

    from unjam.options import CollectiveOptions


def calls(context: unjam.Context) -> None:
    group = context.group([0, 1], name="pair")
    assert_type(group, unjam.Group)
    assert_type(group.context, unjam.Context)
    x = np.ones(4, dtype=np.float32)
    request = group.all_reduce(x, key="x", op="max", priority=3, callback=lambda done: done.test())
    assert_type(request, unjam.Request)
    assert_type(request.context.explain(), dict[str, Any])
    request.wait(1.5)
    group.barrier(key="x", priority=1).synchronize()
    group.send(x, 1, dtype="float32")
    assert_type(group.probe(1), bool)
    unjam.wait_all([group.broadcast(x, root=1, algorithm="ring", in_stream=False)])

    group.all_reduce(x, priorty=3)  # mistake call-arg
    group.all_reduce(x, key=3)  # mistake arg-type
    group.all_gather(x)  # mistake call-arg
    group.barrier(algorithm="ring")  # mistake call-arg
    group.send(x, 1, algorithm="ring")  # mistake call-arg
    group.all_reduce(x, callback=lambda: None)  # mistake arg-type,misc
    request.wait("soon")  # mistake arg-type


def registered(group: unjam.Group) -> None:
    with group.register_all_reduce("k", "float32", priority=1) as collective:
        assert_type(collective, unjam.Collective)
        assert_type(collective.group, unjam.Group)
        assert_type(collective.run(bytearray(8), stream=None), unjam.Request)
        collective.run(bytearray(8), key="other")  # mistake call-arg


def sum_of(group: unjam.Group, x: Any, **options: Unpack[CollectiveOptions]) -> unjam.Request:
    return group.all_reduce(x, **options)


def wrapped(group: unjam.Group) -> None:
    sum_of(group, bytearray(4), key="w", dtype="int32")
    sum_of(group, bytearray(4), root=1)  # mistake call-arg


def jobs() -> None:
    with unjam.init_all(2, device="host") as contexts:
        assert_type(contexts, unjam.Contexts)
        assert_type(contexts[0], unjam.Context)
        assert_type(contexts[0].stats().pending, int)
        with contexts[0].alloc(16) as memory, contexts[0].register_memory(bytearray(16)) as given:
            assert_type(memory, unjam.Memory)
            assert_type(given, unjam.Registration)
            memory.ptr.bit_length()
    print(contexts[0].rnk)  # mistake attr-defined


def of_torch(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    assert_type(unjam.all_reduce(x, group=group, async_op=True, key="x"), dist.Work | None)
    unjam.reduce(x, 0, dist.ReduceOp.MAX, key="y")
    unjam.broadcast(x, src=0)
    with unjam.key("z"):
        unjam.barrier()
    assert_type(unjam.keyed_group(group, "k"), dist.ProcessGroup)

    unjam.all_reduce(x, key=3)  # mistake arg-type
    unjam.all_reduce(x, kye="x")  # mistake call-arg
    unjam.all_gather_into_tensor(x)  # mistake call-arg
    unjam.broadcast([x])  # mistake arg-type
