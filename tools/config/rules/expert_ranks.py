"""Rules for experts on ranks of their own: `parallel.expert` and `parallel.expert_tensor`.

Experts of E ranks in X slices are cut over the data x tensor ranks of a stage, so E x X divides
data x tensor, E the number of experts and X the tensor-parallel ranks. What does not know such
ranks is refused by name.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd

from megaprec.comm.experts import describe_misfit
from megaprec.errors import Problem, UserError
from megaprec.optim.ranks import sharing_replicas
from models.config import ModelConfig
from tools.config.tables.precision_settings import FP8
from tools.config.tables.settings import Parallel, Train


def expert_layout(model: ModelConfig, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless the model's experts can be spread over ranks as asked."""
    keys = [key for key in ("expert", "expert_tensor") if _is_changed(parallel, key)]
    expert_keys = [f"parallel.{key} {getattr(parallel, key)}" for key in keys]
    if not expert_keys:
        return
    # a dense model, or one whose layers are not known
    if model.factory or not model.experts:
        reason = "model.experts is 0"
        if model.factory:
            reason = f'model.factory "{model.factory}" has none that are known'
        yield Problem.of(
            "config.experts_missing",
            keys=" and ".join(expert_keys),
            reason=reason,
            pronoun="them" if len(expert_keys) > 1 else "it",
        )
        return
    yield from _spread_problems(model, parallel)


def _spread_problems(model: ModelConfig, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless the ranks of a stage can hold the experts evenly."""
    slices = expert_slices(parallel)
    problem = describe_misfit(parallel.copies, parallel.tensor, parallel.expert, slices)
    if model.experts % parallel.expert:
        yield Problem.of(
            "config.experts_undivided",
            expert=parallel.expert,
            experts=model.experts,
            possible=_possible(model, parallel),
        )
    elif problem:
        yield Problem.of(
            "config.experts_misfit",
            expert=parallel.expert,
            expert_tensor=slices,
            problem=problem,
            possible=_possible(model, parallel),
        )
    elif parallel.zero and parallel.zero_size > 1:
        try:
            sharing_replicas(parallel.tensor, parallel.zero_size, parallel.expert, slices)
        except UserError as error:
            for problem in error.problems:
                yield problem.within(f"parallel.zero_size {parallel.zero_size}: ")


def _possible(model: ModelConfig, parallel: Parallel) -> str:
    """Return the end of a line that names the values of parallel.expert that would fit, "" if there
    are none."""
    slices = expert_slices(parallel)
    possible = list[str]()
    for ranks in range(1, model.experts + 1):
        if model.experts % ranks:
            continue
        if not describe_misfit(parallel.copies, parallel.tensor, ranks, slices):
            possible.append(str(ranks))
    return f": {', '.join(possible)} would" if possible else ""


def expert_numerics(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem if canonical numerics would need experts on ranks of their own."""
    key = _key_of_spread(parallel)
    if key and train.numerics == "canonical":
        yield Problem.of("config.experts_canonical", key=key)


def expert_scales(parallel: Parallel, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting of [fp8] that does not know experts on ranks of their
    own."""
    key = _key_of_spread(parallel)
    if not key:
        return
    if fp8.keeps_history and not fp8.reduce_amax:
        yield Problem.of("config.experts_amaxes", key=key)
    if fp8.kind != "none" and fp8.shadow_every:
        yield Problem.of("config.experts_shadow", key=key, shadow_every=fp8.shadow_every)


def _key_of_spread(parallel: Parallel) -> str:
    """Return the key that puts experts on ranks of their own; "" if they lie as all other weights
    do."""
    if parallel.expert > 1:
        return f"parallel.expert = {parallel.expert}"
    if expert_slices(parallel) != parallel.tensor:
        return f"parallel.expert_tensor = {parallel.expert_tensor}"
    return ""


def expert_slices(parallel: Parallel) -> int:
    """Return the number of slices of each expert."""
    return parallel.expert_tensor or parallel.tensor


def expert_replicas(parallel: Parallel) -> int:
    """Return the number of ranks that hold the same slice of the same expert."""
    return parallel.copies * parallel.tensor // (parallel.expert * expert_slices(parallel))


def replicas_sharing_state(parallel: Parallel) -> int:
    """Return how many replicas of an expert share one copy of its optimizer state."""
    if not parallel.zero or parallel.zero_size == 1:
        return 1
    zero_size = parallel.zero_size or parallel.copies
    return sharing_replicas(parallel.tensor, zero_size, parallel.expert, expert_slices(parallel))


def nearest_expert_keys(parallel: Parallel, tensor: int, copies: int) -> dict[str, int]:
    """Return the keys of experts for other axes: the largest divisors of the run's own that fit.

    copies: the data x context ranks, each of which has all weights of a stage in `tensor` slices.
    """
    # 0 stands for as many slices as tensor-parallel ranks, whatever these become
    expert_tensor = gcd(parallel.expert_tensor, tensor) if parallel.expert_tensor else 0
    slices = expert_tensor or tensor
    # the ranks of a stage over those that share an expert
    ranks_of_experts = copies * tensor // slices
    return {"expert_tensor": expert_tensor, "expert": gcd(parallel.expert, ranks_of_experts)}


def possible_expert_keys(
    parallel: Parallel, experts: int, tensor: int, copies: int
) -> Iterator[dict[str, int]]:
    """Yield the keys of experts that fit other axes: first those of `nearest_expert_keys`, then
    experts in `tensor` slices, and whole ones.

    experts: those of a layer, spread over each number of ranks that divides them; 0: the model has
        none.
    """
    yield nearest_expert_keys(parallel, tensor, copies)
    # 0: in `tensor` slices; 1: whole experts
    divisors = [ranks for ranks in range(1, experts + 1) if experts % ranks == 0]
    for expert, expert_tensor in product(divisors, (0, 1)):
        slices = expert_tensor or tensor
        if not describe_misfit(copies, tensor, expert, slices):
            yield {"expert_tensor": expert_tensor, "expert": expert}


def _is_changed(parallel: Parallel, key: str) -> bool:
    return getattr(parallel, key) != Parallel.model_fields[key].default
