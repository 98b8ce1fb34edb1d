# torch.distributed's signatures with a key: no type checker can read them off the wrapper that
# collectives.py makes at run time. tests/python/test_types.py compares them with torch's.
# A call gives None without async_op, and on a rank that is not in the group.

from typing import TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

Group: TypeAlias = ProcessGroup | None
Op: TypeAlias = ReduceOp | ReduceOp.RedOpType

def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Group = ...,
    async_op: bool = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = ...,
    async_op: bool = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def all_reduce(
    tensor: Tensor, op: Op = ..., group: Group = ..., async_op: bool = ..., *, key: str = ...
) -> Work | None: ...
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = ...,
    async_op: bool = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = ...,
    input_split_sizes: list[int] | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def barrier(
    group: Group = ..., async_op: bool = ..., device_ids: list[int] | None = ..., *, key: str = ...
) -> Work | None: ...
def broadcast(
    tensor: Tensor,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def reduce(
    tensor: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
    *,
    key: str = ...,
) -> Work | None: ...
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
    *,
    key: str = ...,
) -> Work | None: ...
