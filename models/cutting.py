"""The cut of a model into stages, and the stages that a rank holds.

The cut is chosen by cost, including the head and the modules of multi-token prediction, so that the
slowest rank is as fast as possible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from models.best_cut import best_cut, layer_costs, modules_cost
from models.config import ModelConfig
from models.stages import Cut, Stage
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.leaves import PLAIN, Leaves


@dataclass(frozen=True)
class EngineOptions:
    """The settings of an engine, besides the precision plan and the sizes of the mesh: the cut of
    the model into stages, their layout and the way in which they are computed.

    micro_batch: samples of a micro-batch.
    seq_length: tokens of a sequence, before it is cut over ranks of cp.
    sequence: activations between blocks are sharded over tp along the sequence (sequence
        parallelism).
    canonical_shards: the number of virtual tensor-parallel ranks, so that all sums are the same
        bits on any number of processes (`models.virtual_stage`); 0: as many as there are processes,
        and sums as they are fastest.
    layers: the number of layers of each stage; empty: decided by cost.
    recompute: the activations that the backward pass recomputes.
    expert: the number of ranks over which the experts of each layer are spread, of the dp x tp
        ranks of a stage.
    expert_tensor: the number of slices of each expert; 0: as many as there are tp ranks.
    ring: keys and values go round the ranks of cp (`models.context_attention`); False: each rank
        gathers those of a whole sequence.
    seed: seed of initial weights and dropout.
    blank: initial weights are not drawn; the caller loads others before the first pass.
    trace: a skipped step is run again to find the micro-batch and the samples that broke it.
    leaves: the form in which norms, rotations, gates, dropout and losses are computed.
    """

    micro_batch: int
    seq_length: int
    sequence: bool = False
    canonical_shards: int = 0
    layers: tuple[int, ...] = ()
    recompute: Recompute = KEEP
    expert: int = 1
    expert_tensor: int = 0
    ring: bool = True
    seed: int = 0
    blank: bool = False
    trace: bool = True
    leaves: Leaves = field(default=PLAIN, compare=False)


def cuts(
    config: ModelConfig,
    stages: int,
    seq_length: int,
    layers: Sequence[int] = (),
    rank_of_stage: Sequence[int] = (),
    recompute: Recompute = KEEP,
) -> list[Cut]:
    """Return the cut of a model into `stages` stages that gives the busiest rank the least work in
    both passes.

    Each stage gets at least one layer.
    layers: the number of layers of each stage; empty: decided by cost.
    rank_of_stage: the rank of each stage; empty: each stage has its own rank.
    recompute: the activations that the backward pass recomputes.
    Raises ValueError if `layers` does not fit.
    """
    counts = layers or best_cut(
        layer_costs(config, seq_length, recompute),
        rank_of_stage or range(stages),
        config.embedding_flops(),
        # forward, and twice as much backward
        3 * config.head_flops() + modules_cost(config, seq_length, recompute),
    )
    if len(counts) != stages or sum(counts) != config.layers or min(counts) <= 0:
        raise ValueError(f"{config.layers} layers are not cut into {stages} stages by {[*counts]}")
    return [
        Cut(stage, range(end - count, end), stage == 0, stage == stages - 1)
        for stage, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
    ]


MakeStage = Callable[[ModelConfig, Context, Cut, tuple[int, ...]], Stage]
"""A function that builds one stage, or any module with a Stage's `forward` and `losses`.

Its last argument is the pipeline ranks that both have the embedding: for a tied head, or for
modules of multi-token prediction. It is empty if only one has it, or if both ends of the model are
on one rank and share one parameter.
"""


def build(
    config: ModelConfig,
    context: Context,
    all_cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    pp_rank: int,
    make: MakeStage = Stage,
    separate_head: bool = False,
) -> Mapping[int, Stage]:
    """Return the stages that pipeline rank `pp_rank` holds, by number. A tied head on another rank
    is a tied copy.

    separate_head: a tied head is a copy on the same rank too, so that its gradients are summed
        apart from the embedding's, as in a longer pipeline.
    """
    end_ranks = (rank_of_stage[0], rank_of_stage[-1])
    used_twice = config.tied or config.mtp_layers > 0
    tied = end_ranks if used_twice and (separate_head or end_ranks[0] != end_ranks[1]) else ()
    stages = {
        cut.stage: make(config, context, cut, tied)
        for cut in all_cuts
        if rank_of_stage[cut.stage] == pp_rank
    }
    if used_twice and not tied and len(all_cuts) > 1 and pp_rank == end_ranks[0]:
        _share_embedding(stages[0], stages[len(all_cuts) - 1])
    return stages


def _share_embedding(first: Stage, last: Stage) -> None:
    """Make the first stage's embedding that of the last one, for a tied head and for modules."""
    if last.config.tied:
        last.head = first.embedding.weight
    if last.config.mtp_layers:
        last.embedding.weight = first.embedding.weight
