"""Orders of unjam.pipeline in training: on unjam's own executor, or on torch's pipeline runtime.

    from unjam.torch.pipeline import Edge, Pipeline, Stage

    stages = {rank: Stage(module, inputs=("x",), outputs=("x",))}
    edges = [Edge(0, 1), Edge(1, 2), Edge(0, 2, {"x": "skip"})]
    pipeline = Pipeline(stages, edges, "1f1b", microbatches=32, split=True, loss_fn=loss)
    losses = pipeline.step({"x": batch})

``Eager1F1B`` and ``Ordered`` are for torch's PipelineStage, with any backend of torch.distributed.
`import unjam.torch` does not import it, for it needs torch.distributed.pipelining.
"""

from .executor import Pipeline, StepError
from .schedules import Eager1F1B, Ordered
from .stages import Edge, Spec, Stage

__all__ = ["Eager1F1B", "Edge", "Ordered", "Pipeline", "Spec", "Stage", "StepError"]
