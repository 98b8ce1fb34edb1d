"""Megatron-LM's refit over unjam: a CopyService for ``swap_model_weights``.

::

    from megatron.core.resharding import swap_model_weights
    from unjam.torch.doors.megatron import UnjamCopyService

    service = UnjamCopyService(group)  # a process group of the backend "unjam"
    swap_model_weights(train_model, infer_model, refit_method=service, group=group)

It keeps the interface of Megatron-LM at commit 12dd401117694195f260fd884dab26f0746d7523,
megatron/core/resharding/copy_services/base.py. It has not been run with Megatron itself.

Megatron plans who sends which slice to whom, a copy for each replica. Here a slice that one rank
sends to several goes once, in a chain, if all of them are given the same memory. Of slices that are
not contiguous the caller may make a copy for each; these go one by one. Tensors on GPUs travel
through host memory.
"""

from __future__ import annotations

from typing import Any

import torch

from .copies import PIECE_BYTES, WINDOW, Copies

try:
    from megatron.core.resharding.copy_services.base import CopyService
except ImportError as error:
    raise ImportError(
        "unjam.torch.doors.megatron needs megatron.core.resharding, which is not here: install "
        "Megatron-LM (megatron-core), or use unjam.torch.doors.copies, which needs nothing"
    ) from error


class UnjamCopyService(CopyService):  # type: ignore[misc]  # whose types are not known here
    """Batches of sends and receives over unjam; see :class:`unjam.torch.doors.copies.Copies`.

    Ranks without operations call ``run()``, too.
    """

    requires_process_group_barrier = True
    supports_idle_ranks = True

    def __init__(
        self,
        group: Any = None,
        *,
        key: str = "refit",
        piece_bytes: int = PIECE_BYTES,
        window: int = WINDOW,
    ) -> None:
        """Sends nothing.

        Args:
            group: a process group of unjam's; None: the default one.
            key: the ordering channel; another one for each service of a group.
            piece_bytes: what travels at once at most.
            window: how many of these a rank has under way.
        """
        super().__init__(group)
        self._copies = Copies(group, key=key, piece_bytes=piece_bytes, window=window)

    def submit_send(
        self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None
    ) -> None:
        """Adds a send to the batch; ranks are those of the group."""
        self._copies.send(src_tensor, dest_rank, task_id)

    def submit_recv(
        self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None
    ) -> None:
        """Adds a receive to the batch."""
        self._copies.receive(dest_tensor, src_rank, task_id)

    # Older executors look for these two.

    def submit_send_with_id(self, task_id: int, src_tensor: torch.Tensor, dest_rank: int) -> None:
        """As :meth:`submit_send`."""
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: int, dest_tensor: torch.Tensor, src_rank: int) -> None:
        """As :meth:`submit_recv`."""
        self.submit_recv(dest_tensor, src_rank, task_id)

    def run(self) -> None:
        """Carries out what was submitted, and waits for it; see :meth:`Copies.run`."""
        self._copies.run()

    def close(self) -> None:
        """Ends the service; see :meth:`Copies.close`."""
        super().close()
        self._copies.close()
