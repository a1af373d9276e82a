"""Rules for experts on ranks of their own: `parallel.expert` and `parallel.expert_tensor`.

Experts of E ranks in X slices are cut over the data x tensor ranks of a stage, so E x X divides
data x tensor, E the number of experts and X the tensor-parallel ranks. What does not know such
ranks is refused by name.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd

from megaprec.comm.experts import misfit
from megaprec.errors import UserError
from megaprec.optim.replicas import sharing_replicas
from models.config import ModelConfig
from tools.config.precision_settings import FP8
from tools.config.settings import Parallel, Train


def expert_layout(model: ModelConfig, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless the model's experts can be spread over ranks as asked."""
    p = parallel
    said = [
        f"parallel.{key} {getattr(p, key)}" for key in ("expert", "expert_tensor") if _given(p, key)
    ]
    if not said:
        return
    if model.factory or not model.experts:
        if model.factory:
            why = f'model.factory "{model.factory}" has none that are known'
        else:
            why = "model.experts is 0"
        yield (
            f"{' and '.join(said)} spread a model's experts over ranks, but {why}: remove "
            f"{_them(said)}"
        )
        return
    problem = misfit(p.copies, p.tensor, p.expert, slices(p))
    able = [
        n
        for n in range(1, model.experts + 1)
        if not model.experts % n and not misfit(p.copies, p.tensor, n, slices(p))
    ]
    would = f": {', '.join(map(str, able))} would" if able else ""
    if model.experts % p.expert:
        yield f"parallel.expert {p.expert} does not divide model.experts {model.experts}{would}"
    elif problem:
        yield f"parallel.expert {p.expert} and parallel.expert_tensor {slices(p)}: {problem}{would}"
    elif p.zero and p.zero_size > 1:
        try:
            sharing_replicas(p.tensor, p.zero_size, p.expert, slices(p))
        except UserError as error:
            yield from (f"parallel.zero_size {p.zero_size}: {why}" for why in error.problems)


def expert_neighbours(train: Train, parallel: Parallel, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting that does not know experts on ranks of their own."""
    p = parallel
    if p.expert == 1 and slices(p) == p.tensor:
        return
    if p.expert > 1:
        key = f"parallel.expert = {p.expert}"
    else:
        key = f"parallel.expert_tensor = {p.expert_tensor}"
    if train.numerics == "canonical":
        yield (
            f'{key} and train.numerics = "canonical": sums over experts\' ranks are not '
            "canonical; remove one of them"
        )
    if fp8.kind == "delayed" and not fp8.reduce_amax:
        yield (
            f"{key} and fp8.reduce_amax = false: replicas hold different experts; set "
            "fp8.reduce_amax = true"
        )
    if fp8.kind != "none" and fp8.shadow_every:
        yield (
            f"{key} and fp8.shadow_every = {fp8.shadow_every}: replicas hold different experts; "
            "set it to 0"
        )


def slices(parallel: Parallel) -> int:
    """Return the number of slices of each expert."""
    return parallel.expert_tensor or parallel.tensor


def replicas(parallel: Parallel) -> int:
    """Return the number of ranks that hold the same slice of the same expert."""
    return parallel.copies * parallel.tensor // (parallel.expert * slices(parallel))


def sharing(parallel: Parallel) -> int:
    """Return how many replicas of an expert share one copy of its optimizer state."""
    p = parallel
    if not p.zero or p.zero_size == 1:
        return 1
    return sharing_replicas(p.tensor, p.zero_size or p.copies, p.expert, slices(p))


def nearest(own: Parallel, tensor: int, copies: int) -> dict[str, int]:
    """Return the keys of experts for other axes: the largest divisors of the run's own that fit.

    copies: the data x context ranks, each of which has all weights of a stage in `tensor` slices.
    """
    in_slices = gcd(own.expert_tensor, tensor) if own.expert_tensor else 0
    return {
        "expert_tensor": in_slices,
        "expert": gcd(own.expert, copies * tensor // (in_slices or tensor)),
    }


def every_cut(own: Parallel, experts: int, tensor: int, copies: int) -> Iterator[dict[str, int]]:
    """Yield the keys of experts that fit other axes: first `nearest`, then experts in `tensor`
    slices, and whole ones.

    experts: those of a layer, spread over each number of ranks that divides them; 0: the model has
        none.
    """
    yield nearest(own, tensor, copies)
    for expert, in_slices in product(range(1, experts + 1), (0, 1)):
        if not experts % expert and not misfit(copies, tensor, expert, in_slices or tensor):
            yield {"expert_tensor": in_slices, "expert": expert}


def _given(parallel: Parallel, key: str) -> bool:
    return getattr(parallel, key) != Parallel.model_fields[key].default


def _them(said: list[str]) -> str:
    return "them" if len(said) > 1 else "it"
