"""Orders of unjam.pipeline on torch's pipeline runtime, with any backend of torch.distributed.

    from torch.distributed.pipelining import PipelineStage
    from unjam.torch.pipeline import Eager1F1B

    stage = PipelineStage(module, rank, ranks, device)
    schedule = Eager1F1B(stage, n_microbatches=32, loss_fn=loss)

`import unjam.torch` does not import it, for it needs torch.distributed.pipelining.
"""

from .schedules import Eager1F1B, Ordered

__all__ = ["Eager1F1B", "Ordered"]
