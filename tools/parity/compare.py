"""Two records of one run compared, quantity by quantity.

Errors of tensors are relative to the norm of the tensor that is compared with, or to a thousandth of what a tensor of
its size has on average if that is more: some gradients, such as those of a bias of keys, are nothing but rounding.

In float64 an error may be 1e-12: sums are taken in another order in each layout, which costs some units of 2e-16, and
the smallest fault that means anything is larger by ten orders of magnitude. In the run's own precision there is no
such gap, so the bound is measured: the one process in that precision is so far from the one process in float64, and a
layout may be `SLACK` times as far from it, or as many units in the last place of the dtype if that is more. A
factor of the square root of two is far outside of both.

Some things must be equal to the last bit in any precision: sample ids, initial weights, which steps were skipped, the
loss scaler, and all copies of one element.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.parity.gather import Record, Tensors

EXACT, FLOAT64, SLACK, COUNTED = 0.0, 1e-12, 4.0, 1e-6
FLOOR = 1e-3  # of the average: what a tensor's norm counts for at least
NOISE = 1e-9  # of the average: below, a gradient is rounding


@dataclass(frozen=True)
class Difference:
    """One number or tensor of one step (from 1; 0: before the first) in two runs.

    error: relative. ratio: of the norms, or of the numbers, ours over theirs; nan where there is none.
    """

    quantity: str
    name: str
    step: int
    error: float
    bound: float
    ratio: float = math.nan
    note: str = ""

    @property
    def fails(self) -> bool:
        return not self.error <= self.bound


@dataclass(frozen=True)
class Noise:
    """What a precision may cost. truth: the run in float64 on one process; None: the runs are in float64 themselves.

    epsilon: of the dtype of products.
    """

    truth: Record | None = None
    epsilon: float = 0.0


def compare(ours: Record, theirs: Record, noise: Noise, norm: float = 2.0) -> list[Difference]:
    """All that can be compared of a layout and one process, in the order in which it happened.

    norm: which one the runs' gradient norm is.
    """
    found = [*_samples(ours, theirs), *_names(ours, theirs)]
    found += _weights(ours, theirs, "before/weight", "initial weights", 0, Noise(), EXACT)
    for step in range(min(len(ours.steps), len(theirs.steps))):
        found += _of_step(ours, theirs, noise, step, norm)
    last = len(theirs.steps)
    for kind in (kind for kind in theirs.tensors if kind.startswith("after/")):
        quantity = "weights" if kind == "after/weight" else "moments"
        found += _weights(ours, theirs, kind, quantity, last, noise, FLOAT64)
    found += [Difference("copies", name, _step_of(kind), math.inf, EXACT, note=kind) for kind, name in ours.apart]
    found += [Difference("ranks agree", what, 0, math.inf, EXACT) for what in ours.torn]
    return found


def _step_of(kind: str) -> int:
    return int(kind.removeprefix("gradient/")) + 1 if kind.startswith("gradient/") else 0


def _exact(quantity: str, name: str, step: int, ours: object, theirs: object) -> Difference:
    same = str(ours) == str(theirs)  # as text: NaN is NaN
    return Difference(quantity, name, step, 0.0 if same else math.inf, EXACT, note="" if same else f"{ours}, {theirs}")


def _samples(ours: Record, theirs: Record) -> Iterator[Difference]:
    for step, (one, other) in enumerate(zip(ours.samples, theirs.samples, strict=True), 1):
        yield _exact("sample ids", "", step, one, other)


def _names(ours: Record, theirs: Record) -> Iterator[Difference]:
    """Every logical tensor is there, whole and of the same shape, and there is no other."""
    mine, yours = (record.tensors["before/weight"] for record in (ours, theirs))
    for name in dict.fromkeys([*yours, *mine]):
        shapes = [tuple(some[name].shape) if name in some else "missing" for some in (mine, yours)]
        yield _exact("tensors", name, 0, *shapes)
        if shapes[0] == shapes[1] and (lacking := int(mine[name].isnan().sum())):
            yield Difference("tensors", name, 0, math.inf, EXACT, note=f"no rank holds {lacking} of its elements")


def _of_step(ours: Record, theirs: Record, noise: Noise, step: int, norm: float) -> Iterator[Difference]:
    one, other = ours.steps[step], theirs.steps[step]
    for key in ("outcome", "offenders"):
        yield _exact("found_inf", key, step + 1, one[key], other[key])
    truth = noise.truth.steps[step] if noise.truth else None
    yield _number("loss", step + 1, one["loss"], other["loss"], truth and truth["loss"], noise)
    kind = f"gradient/{step}"
    if all(kind in record.tensors for record in (ours, theirs)):
        grads = {name: theirs.tensors[kind][name] for name in reversed(theirs.names)}  # as a backward pass makes them
        true = noise.truth.tensors.get(kind) if noise.truth else None
        yield from _tensors("gradient", step + 1, ours.tensors[kind], grads, noise, true)
        yield _number(
            "gradient norm", step + 1, one["grad_norm"], other["grad_norm"], truth and truth["grad_norm"], noise
        )
        yield from _counted(ours, theirs, noise, step, norm)
    yield _exact("scaler", "", step + 1, one["scaler"], other["scaler"])


def _number(quantity: str, step: int, ours: float, theirs: float, truth: float | None, noise: Noise) -> Difference:
    if truth is None:
        return Difference(quantity, "", step, _apart(ours, theirs), FLOAT64, _over(ours, theirs))
    bound = SLACK * max(_apart(theirs, truth), noise.epsilon)
    return Difference(quantity, "", step, _apart(ours, truth), bound, _over(ours, theirs))


def _apart(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other) / max(abs(other), 1e-300)


def _over(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.nan


def _tensors(
    quantity: str, step: int, ours: Tensors, theirs: Tensors, noise: Noise, truth: Tensors | None
) -> Iterator[Difference]:
    """In the order of `theirs`; those that one side lacks are left to `_names`."""
    both = [name for name in theirs if name in ours and ours[name].shape == theirs[name].shape]
    against = theirs if truth is None else truth
    scale = _scales(against)
    common = SLACK * max(noise.epsilon, _rms(_error(theirs, against, n, scale) for n in both)) if truth else 0.0
    for name in both:
        bound = FLOAT64 if truth is None else max(common, SLACK * _error(theirs, against, name, scale))
        error = _error(ours, against, name, scale)
        ratio = _over(ours[name].norm().item(), theirs[name].norm().item())
        yield Difference(quantity, name, step, error, bound, ratio, _where(ours[name], theirs[name]))


def _scales(tensors: Tensors) -> dict[str, float]:
    """What an error in each tensor is relative to."""
    average = average_element(tensors)
    return {n: max(t.norm().item(), FLOOR * average * math.sqrt(t.numel())) or 1.0 for n, t in tensors.items()}


def average_element(tensors: Tensors) -> float:
    """Root of the mean square over all elements."""
    elements = sum(t.numel() for t in tensors.values())
    return math.sqrt(sum(t.square().sum().item() for t in tensors.values()) / max(1, elements))


def _error(ours: Tensors, against: Tensors, name: str, scale: Mapping[str, float]) -> float:
    error = (ours[name] - against[name]).norm().item() / scale[name]
    return math.inf if math.isnan(error) else error


def _rms(errors: Iterator[float]) -> float:
    some = list(errors)
    return math.sqrt(sum(e * e for e in some) / max(1, len(some)))


def _where(ours: Tensor, theirs: Tensor) -> str:
    """The element that differs most."""
    apart = (ours - theirs).abs().nan_to_num(torch.inf)
    if not apart.numel() or not apart.max():
        return ""
    place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
    return f"{place}: {ours[tuple(place)].item():.6g}, {theirs[tuple(place)].item():.6g}"


def _counted(ours: Record, theirs: Record, noise: Noise, step: int, norm: float) -> Iterator[Difference]:
    """The layout's own norm and zero count speak of each element of its own gradients once; and zeros are those of
    one process, but for tensors whose gradient is rounding."""
    kind, report = f"gradient/{step}", ours.steps[step]
    mine, yours = ours.tensors[kind], theirs.tensors[kind]
    whole = torch.cat([t.flatten() for t in mine.values()])
    own = torch.linalg.vector_norm(whole, norm).item()
    bound = COUNTED if noise.truth else FLOAT64
    yield Difference("each element counted once", "norm", step + 1, _apart(report["grad_norm"], own), bound,
                     _over(report["grad_norm"], own))  # fmt: skip
    zeros = int((whole == 0).sum())
    yield Difference("each element counted once", "zeros", step + 1, _apart(report["num_zeros"], zeros), EXACT,
                     _over(report["num_zeros"], zeros), f"{report['num_zeros']}, {zeros}")  # fmt: skip
    if noise.truth is None:
        alive = [name for name in yours if name in mine and name not in rounding(theirs)]
        counts = [sum(int((some[name] == 0).sum()) for name in alive) for some in (mine, yours)]
        yield Difference(
            "zero count", "", step + 1, _apart(*counts), EXACT, _over(*counts), f"{counts[0]}, {counts[1]}"
        )


def rounding(record: Record) -> set[str]:
    """Tensors whose gradient is nothing but rounding in every step of a run in float64: what AdamW makes of it is
    chance."""
    grads = [tensors for kind, tensors in record.tensors.items() if kind.startswith("gradient/")]

    def is_noise(name: str) -> bool:
        return all(0 < average_element({name: g[name]}) < NOISE * average_element(g) for g in grads)

    return {name for name in record.names if grads and is_noise(name)}


def _weights(
    ours: Record, theirs: Record, kind: str, quantity: str, step: int, noise: Noise, bound: float
) -> Iterator[Difference]:
    truth = noise.truth.tensors[kind] if noise.truth else None
    chance = rounding(noise.truth or theirs) if step else set[str]()
    some = {name: t for name, t in theirs.tensors[kind].items() if name not in chance}
    for d in _tensors(quantity, step, ours.tensors.get(kind, {}), some, noise, truth):
        yield d if truth else Difference(quantity, d.name, step, d.error, bound, d.ratio, d.note)


def worst(differences: Sequence[Difference]) -> Difference:
    """The one that is largest for its bound."""
    return max(differences, key=lambda d: math.inf if d.fails and not d.bound else d.error / (d.bound or 1.0))
