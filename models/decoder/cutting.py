"""The cut of a model into stages, and the stages that a rank holds.

The cut is chosen by cost, so that the slowest rank is as fast as possible. The cost of a layer are
the FLOPs of both of its passes, per token; what only the first or the last stage does (embedding,
head, modules of multi-token prediction) is an extra cost of that stage.
"""

from collections.abc import Callable, Mapping, Sequence

from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context


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
    # Forward, and twice as much backward.
    head_cost = 3 * config.head_flops()
    layer_counts = layers or best_cut(
        layer_costs(config, seq_length, recompute),
        rank_of_stage or range(stages),
        first_extra=config.embedding_flops(),
        last_extra=head_cost + mtp_cost(config, seq_length, recompute),
    )
    fits = len(layer_counts) == stages and sum(layer_counts) == config.layers
    if not fits or min(layer_counts) <= 0:
        raise ValueError(
            f"{config.layers} layers are not cut into {stages} stages by {[*layer_counts]}"
        )
    stage_cuts = []
    start = 0
    for stage, count in enumerate(layer_counts):
        numbers = range(start, start + count)
        stage_cuts.append(Cut(stage, numbers, first=stage == 0, last=stage == stages - 1))
        start += count
    return stage_cuts


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
    """Return the stages that pipeline rank `pp_rank` holds, by number.

    A model that reads its embedding in the last stage too, for a tied head or for modules of
    multi-token prediction, has a tied copy of it there, unless first and last stage are on one
    rank.
    make: builds each stage.
    separate_head: there is a copy in that case too, so that its gradients are summed apart from the
        embedding's, as in a longer pipeline.
    """
    last_stage = len(rank_of_stage) - 1
    first_rank = rank_of_stage[0]
    last_rank = rank_of_stage[-1]
    uses_embedding_twice = config.tied or config.mtp_layers > 0
    has_copy = uses_embedding_twice and (separate_head or first_rank != last_rank)
    tied_ranks = (first_rank, last_rank) if has_copy else ()
    stages = {
        cut.stage: make(config, context, cut, tied_ranks)
        for cut in all_cuts
        if rank_of_stage[cut.stage] == pp_rank
    }
    shares_parameter = uses_embedding_twice and not has_copy and last_stage > 0
    if shares_parameter and pp_rank == first_rank:
        _share_embedding(stages[0], stages[last_stage])
    return stages


def _share_embedding(first: Stage, last: Stage) -> None:
    """Make the weight of the first stage's embedding also that of the last stage's tied head, and
    of the embedding that its modules of multi-token prediction read."""
    # One parameter, so that autograd sums the gradients of both uses.
    if last.config.tied:
        last.head = first.embedding.weight
    if last.config.mtp_layers:
        last.embedding.weight = first.embedding.weight


def layer_costs(
    config: ModelConfig,
    seq_length: int,
    recompute: Recompute,
) -> list[float]:
    """Return the cost of each layer: the FLOPs of both of its passes, per token."""
    # all layers of a kind cost the same
    by_kind: dict[object, float] = {}
    costs: list[float] = []
    for number, kind in enumerate(config.kind_keys(range(config.layers))):
        if kind not in by_kind:
            layer = config.kind_of_layer(number)
            by_kind[kind] = _layer_cost(layer, seq_length, recompute)
        costs.append(by_kind[kind])
    return costs


def mtp_cost(
    config: ModelConfig,
    seq_length: int,
    recompute: Recompute,
) -> float:
    """Return the FLOPs of both passes of the modules of multi-token prediction, with their heads,
    per token.

    Their layers are recomputed as a whole if all layers are.
    """
    last_layer = config.kind_of_layer(config.layers - 1)
    module_recompute = recompute if recompute.fraction == 1 else Recompute(recompute.modules)
    layer_cost = _layer_cost(last_layer, seq_length, module_recompute)
    recomputed_flops = layer_cost - 3 * last_layer.layer_flops(seq_length)
    return 3 * config.mtp_flops(seq_length) + config.mtp_layers * recomputed_flops


def _layer_cost(
    config: ModelConfig,
    seq_length: int,
    recompute: Recompute,
) -> float:
    """Return the FLOPs of both passes of a layer, per token: three times the forward pass, plus the
    recomputation.

    If a fraction of a stage's layers is recomputed, each layer bears this fraction. A fixed number
    of recomputed layers is the same in every stage, so it does not affect the cut and is left out.
    """
    fraction = 0.0 if recompute.layers else recompute.fraction
    # A backward pass has twice the products of a forward pass.
    cost = 3 * config.layer_flops(seq_length) + fraction * config.recomputed_layer_flops(seq_length)
    if "attention" in recompute.modules:
        cost += config.recomputed_attention_flops(seq_length)
    return cost


def best_cut(
    costs: Sequence[float],
    rank_of_stage: Sequence[int],
    first_extra: float = 0,
    last_extra: float = 0,
) -> list[int]:
    """Return the number of layers of each stage, at least one, that gives the busiest rank the
    least work.

    If layers cost differently and a rank has several stages, it is the busiest stage that gets the
    least work. Among equals, early stages get more layers: they run first and wait longest.

    costs: of each layer.
    first_extra, last_extra: extra costs of the first and the last stage.
    """
    layers = len(costs)
    stages = len(rank_of_stage)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    if len(set(costs)) > 1:
        return _uneven_cut(costs, stages, first_extra, last_extra)
    return _even_cut(layers, costs[0], rank_of_stage, first_extra, last_extra)


def _even_cut(
    layers: int,
    cost: float,
    rank_of_stage: Sequence[int],
    first_extra: float,
    last_extra: float,
) -> list[int]:
    """Return the number of layers of each stage, of layers of equal cost: each further layer goes
    to the least busy rank, and there to its smallest stage.

    No other assignment makes the busiest rank less busy, because one more layer costs every rank
    the same.
    """
    stages = len(rank_of_stage)
    # Each stage has one layer to begin with.
    counts = [1] * stages
    work = [cost] * stages
    work[0] += first_extra
    work[-1] += last_extra
    work_of_rank = dict.fromkeys(rank_of_stage, 0.0)
    for stage, rank in enumerate(rank_of_stage):
        work_of_rank[rank] += work[stage]

    def busyness(stage: int) -> tuple[float, float]:
        return work_of_rank[rank_of_stage[stage]], work[stage]

    # The first of equals, so that early stages get more layers.
    for _ in range(layers - stages):
        stage = min(range(stages), key=busyness)
        counts[stage] += 1
        work[stage] += cost
        work_of_rank[rank_of_stage[stage]] += cost
    return counts


def _uneven_cut(
    costs: Sequence[float],
    stages: int,
    first_extra: float,
    last_extra: float,
) -> list[int]:
    """Return the number of layers of each stage, of layers of different costs, such that the
    busiest stage has the least work: the least limit of a stage's work with which all layers fit,
    found by bisection."""
    # Filling stages one after the other fits all layers from that limit on, and fails below it: a
    # stage that is filled as far as the limit allows leaves the fewest layers to the others.
    low = 0.0
    high = sum(costs) + first_extra + last_extra
    while True:
        middle = (low + high) / 2
        # until no number of floating point lies between the two, so that the cut is exact
        if not low < middle < high:
            break
        if _fill_stages(costs, stages, first_extra, last_extra, middle):
            high = middle
        else:
            low = middle
    return _fill_stages(costs, stages, first_extra, last_extra, high)


def _fill_stages(
    costs: Sequence[float],
    stages: int,
    first_extra: float,
    last_extra: float,
    limit: float,
) -> list[int]:
    """Return the number of layers of each stage, if the stages are filled from the first on, each
    with work up to `limit`; empty if a stage gets no layer, or layers are left."""
    counts = list[int]()
    start = 0
    for stage in range(stages):
        work = 0.0
        # a stage may be the first and the last one
        if stage == 0:
            work += first_extra
        if stage == stages - 1:
            work += last_extra
        end = start
        later_stages = stages - 1 - stage
        latest_end = len(costs) - later_stages  # so that each later stage has a layer
        while end < latest_end and work + costs[end] <= limit:
            work += costs[end]
            end += 1
        if end == start:
            return []
        counts.append(end - start)
        start = end
    return counts if start == len(costs) else []
