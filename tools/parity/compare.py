"""Two records of one run compared, quantity by quantity.

Errors of tensors are relative to the norm of the tensor that is compared with, or to a thousandth of what a tensor of
its size has on average if that is more: some gradients, such as those of a bias of keys, are nothing but rounding.

In float64 an error may be 1e-12: sums are taken in another order in each layout, which costs some units of 2e-16, and
the smallest fault that means anything is larger by ten orders of magnitude. In the run's own precision there is no
such gap, so the bound is measured: the one process in that precision is so far from the one process in float64, and a
layout may be `SLACK` times as far from it, or as many units in the last place of the dtype if that is more, or as
`SLACK` tokens make that go to another expert. A factor of the square root of two is outside of all of these.
That a norm counts each element of its own gradients once is seen to 1e-4, for squares may be summed in FP32.

Some things must be equal to the last bit in any precision: sample ids, initial weights, which steps were skipped, the
loss scaler, and all copies of one element.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.parity.gather import Record, Tensors

EXACT, FLOAT64, SLACK, COUNTED = 0.0, 1e-12, 4.0, 1e-4
FLOOR = 1e-3  # of the average: what a tensor's norm counts for at least
NOISE = 1e-9  # of the average: below, an element of a gradient may be nothing but rounding
ZERO = 1e-12  # of the average: below, it counts as zero


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

    epsilon: of the dtype of products. tokens: that an expert gets in a step, if there are experts: rounding sends a
        token that is undecided between two to the other one, and with it goes its part of all gradients there.
    """

    truth: Record | None = None
    epsilon: float = 0.0
    tokens: float = math.inf

    @property
    def of_routing(self) -> float:
        """The bound that `SLACK` such tokens make."""
        return math.sqrt(SLACK / self.tokens)


def compare(ours: Record, theirs: Record, noise: Noise, norm: float = 2.0) -> list[Difference]:
    """All that can be compared of a layout and one process, in the order in which it happened.

    norm: which one the runs' gradient norm is.
    """
    found = [*_samples(ours, theirs), *_names(ours, theirs)]
    found += _weights(ours, theirs, "before/weight", "initial weights", 0, Noise(), None)
    for step in range(min(len(ours.steps), len(theirs.steps))):
        found += _of_step(ours, theirs, noise, step, norm)
    masks = meant(noise.truth or theirs)
    for kind in (kind for kind in theirs.tensors if kind.startswith("after/")):
        quantity = "weights" if kind.endswith("/weight") else "moments"
        found += _weights(ours, theirs, kind, quantity, _step_of(kind), noise, masks)
    for kind, name in ours.apart:
        note = f"{kind.split('/')[-1] if kind.startswith('after/') else kind.split('/')[0]} differs between ranks"
        found.append(Difference("copies", name, _step_of(kind), math.inf, EXACT, note=note))
    found += [Difference("ranks agree", what, step, math.inf, EXACT) for step, what in ours.torn]
    return sorted(found, key=lambda d: d.step)


def _step_of(kind: str) -> int:
    """From 1; 0 for what was before the first step."""
    when, step, *_ = kind.split("/")
    return 0 if when == "before" else int(step) + 1


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
    yield _number("loss", step + 1, one["loss"], other["loss"], truth["loss"] if truth else None, noise)
    kind = f"gradient/{step}"
    if all(kind in record.tensors for record in (ours, theirs)):
        grads = {name: theirs.tensors[kind][name] for name in reversed(theirs.names)}  # as a backward pass makes them
        true = noise.truth.tensors.get(kind) if noise.truth else None
        yield from _tensors("gradient", step + 1, ours.tensors[kind], grads, noise, true)
        true_norm = truth["grad_norm"] if truth else None
        yield _number("gradient norm", step + 1, one["grad_norm"], other["grad_norm"], true_norm, noise)
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
    usual = max(noise.epsilon, _rms(_error(theirs, against, n, scale) for n in both))
    common = max(SLACK * usual, noise.of_routing)
    for name in both:
        bound = FLOAT64
        if truth is not None:
            bound = max(common, SLACK * _error(theirs, against, name, scale))
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
    """The layout's own norm and zero count speak of each element of its own gradients once; and in float64 as many
    elements are zero, or rounding, as in one process."""
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
        limit = ZERO * average_element(yours)
        counts = [sum(int((t.abs() <= limit).sum()) for t in some.values()) for some in (mine, yours)]
        yield Difference(
            "zero count", "", step + 1, _apart(*counts), EXACT, _over(*counts), f"{counts[0]}, {counts[1]}"
        )


def meant(record: Record) -> dict[str, Tensor]:
    """Of a run in float64, by name: the elements whose gradient is not rounding in every step.

    Softmax does not see a bias of the keys, for example. What AdamW makes of rounding is chance.
    """
    masks = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in record.tensors["before/weight"].items()}
    for kind, grads in record.tensors.items():
        if kind.startswith("gradient/"):
            limit = NOISE * average_element(grads)
            masks = {name: mask | (grads[name].abs() >= limit) | (grads[name] == 0) for name, mask in masks.items()}
    return masks


def _weights(
    ours: Record, theirs: Record, kind: str, quantity: str, step: int, noise: Noise, masks: Mapping[str, Tensor] | None
) -> Iterator[Difference]:
    """masks: the elements that are compared; None for all, which then must be equal."""

    def some(record: Record) -> Tensors:
        tensors = record.tensors.get(kind, {})
        return {n: t if masks is None or n not in masks else torch.where(masks[n], t, 0) for n, t in tensors.items()}

    truth = some(noise.truth) if noise.truth else None
    for d in _tensors(quantity, step, some(ours), some(theirs), noise, truth):
        yield replace(d, bound=EXACT) if masks is None else d


def worst(differences: Sequence[Difference]) -> Difference:
    """The one that is largest for its bound; what must be equal says less, and comes after."""
    measured = [d for d in differences if d.bound and math.isfinite(d.error)]
    return max(measured or differences, key=lambda d: d.error / (d.bound or 1.0))
