"""Tensor- and sequence-parallel layers, pipelines, and the mesh of ranks that they run on.

The smallest whole use (`examples/pretrain.py` is the complete program):

    with world():  # joins the ranks that torchrun started
        mesh = make_mesh(tp=2, dp=2)
        context = Context(precision, Axis.of(mesh, "tp"))
        styles = {"*.up": "column", "*.down": "row", "embedding": "vocab"}
        model = parallelize(model, context, styles)
        optimizer = ParallelAMPOptimizer([model], precision, mesh, average=False)
        pipeline = Pipeline([model], optimizer, loss_fn, microbatches=4)
        report = pipeline.step(inputs, targets, lr=3e-4)
"""

from typing import TYPE_CHECKING

from megaprec.front_door import front_door

if TYPE_CHECKING:
    from parallel.activation_checkpoint import Recompute
    from parallel.collectives import copy, gather, join, reduce, reduce_scatter, split
    from parallel.context import Context
    from parallel.cut_features import unchecked
    from parallel.dropout import MicrobatchInfo
    from parallel.fp32_marks import compute_marked_in_fp32
    from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from parallel.loss import cross_entropy, vocab_parallel_loss
    from parallel.mesh import make_mesh, world
    from parallel.norms import LayerNorm, RMSNorm
    from parallel.pipeline.loop import Pipeline
    from parallel.plain_modules import parallelize
    from parallel.ready_styles import transformers_styles

__getattr__, __dir__ = front_door(__name__)

__all__ = [
    "ColumnParallelLinear",
    "Context",
    "LayerNorm",
    "MicrobatchInfo",
    "Pipeline",
    "RMSNorm",
    "Recompute",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "compute_marked_in_fp32",
    "copy",
    "cross_entropy",
    "gather",
    "join",
    "make_mesh",
    "parallelize",
    "reduce",
    "reduce_scatter",
    "split",
    "transformers_styles",
    "unchecked",
    "vocab_parallel_loss",
    "world",
]
