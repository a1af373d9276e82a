"""The cut of a model into stages, and the stages that a rank holds.

The cut is chosen by cost, including the head and the modules of multi-token prediction, so that the
slowest rank is as fast as possible.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from models.best_cut import best_cut, layer_costs, modules_cost
from models.config import ModelConfig
from models.stages import Cut, Stage
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context


def cuts(
    config: ModelConfig,
    stages: int,
    seq_length: int,
    given: Sequence[int] = (),
    rank_of_stage: Sequence[int] = (),
    recompute: Recompute = KEEP,
) -> list[Cut]:
    """Return the cut of a model into `stages` stages that gives the busiest rank the least work in
    both passes.

    Each stage gets at least one layer.
    given: the number of layers of each stage; empty: decided by cost.
    rank_of_stage: the rank of each stage; empty: each stage has its own rank.
    recompute: the activations that the backward pass recomputes.
    Raises ValueError if `given` does not fit.
    """
    ends = (
        config.embedding_flops(),
        3 * config.head_flops() + modules_cost(config, seq_length, recompute),
    )
    counts = given or best_cut(
        layer_costs(config, seq_length, recompute), rank_of_stage or range(stages), *ends
    )
    if (len(counts), sum(counts), min(counts) > 0) != (stages, config.layers, True):
        raise ValueError(f"{config.layers} layers are not cut into {stages} stages by {[*counts]}")
    borders = list(accumulate(counts))
    return [
        Cut(i, range(end - n, end), i == 0, i == stages - 1)
        for i, (n, end) in enumerate(zip(counts, borders, strict=True))
    ]


MakeStage = Callable[[ModelConfig, Context, Cut, tuple[int, ...]], Stage]
"""A function that builds one stage, or any module with a Stage's `forward` and `losses`. Its last argument is the
pipeline ranks that both have the embedding: for a tied head, or for modules of multi-token prediction. It is empty if
only one has it, or if both ends of the model are on one rank and share one parameter."""


def build(
    config: ModelConfig,
    context: Context,
    all_cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    pp_rank: int,
    make: MakeStage = Stage,
    apart: bool = False,
) -> Mapping[int, Stage]:
    """Return the stages that pipeline rank `pp_rank` holds, by number. A tied head on another rank
    is a tied copy.

    apart: a tied head is a copy on the same rank too, so that its gradients are summed apart from
    the embedding's, as in a longer pipeline.
    """
    ends = (rank_of_stage[0], rank_of_stage[-1])
    twice = config.tied or config.mtp_layers > 0
    tied = ends if twice and (apart or ends[0] != ends[1]) else ()
    stages = {
        cut.stage: make(config, context, cut, tied)
        for cut in all_cuts
        if rank_of_stage[cut.stage] == pp_rank
    }
    if twice and not tied and len(all_cuts) > 1 and pp_rank == ends[0]:
        _share_embedding(stages[0], stages[len(all_cuts) - 1])
    return stages


def _share_embedding(first: Stage, last: Stage) -> None:
    """Make the first stage's embedding that of the last one, for a tied head and for modules."""
    if last.config.tied:
        last.head = first.embedding.weight
    if last.config.mtp_layers:
        last.embedding.weight = first.embedding.weight
