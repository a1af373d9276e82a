"""How far two runs without a fault may be apart.

In float64 rounding is measured: one process trains a second time from weights that were each moved by one unit in the
last place. What that changes is what rounding is worth there: next to nothing where numbers are what they seem, and
all there is where a gradient is nothing but rounding, such as that of a bias of keys, which softmax does not see. A
layout, which takes sums in another order, may be `FLOAT64` away, or `ROUNDED` times what the move has changed if that
is more. Where this would be more than `TELLS` nothing is told of the quantity: it was not tried.

In the run's own precision one process is so far from one process in float64, and a layout may be `SLACK` times as far
from it, or as many units in the last place of the dtype if that is more, or as `SLACK` tokens make that go to another
expert. Where the bound does not exclude a factor of the square root of two, nothing is told either.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tools.parity.gather import Record, Tensors

FLOAT64, SLACK, ROUNDED, TELLS = 1e-12, 4.0, 100.0, 1e-6
COARSE = 0.41  # of another precision: a factor of the square root of two could not be told
EXPERTS = ".experts."  # in names of tensors that one expert has: which tokens it gets is chance, for each of them alike
FLOOR = 1e-3  # of the average: what a tensor's norm counts for at least


@dataclass(frozen=True)
class Noise:
    """What rounding may cost.

    shaken: of a run in float64, the same from weights moved by rounding. truth: of a run in another precision, the one
        in float64 on one process.
    epsilon: of the dtype of products. tokens: that an expert gets in a step, if there are experts: rounding sends a
        token that is undecided between two to the other one, and with it goes its part of all gradients there.
    kept: epsilon of what the optimizer keeps: "weights", and "moments".
    """

    shaken: Record | None = None
    truth: Record | None = None
    epsilon: float = 0.0
    tokens: float = math.inf
    kept: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_routing(self) -> float:
        """The bound that `SLACK` such tokens make."""
        return math.sqrt(SLACK / self.tokens)

    def of_number(self, theirs: float, shaken: float | None, truth: float | None) -> float:
        """The bound of a number."""
        if truth is not None:
            return SLACK * max(apart(theirs, truth), self.epsilon)
        return max(FLOAT64, ROUNDED * apart(shaken, theirs)) if shaken is not None else FLOAT64

    def of_tensors(
        self, theirs: Tensors, shaken: Tensors | None, truth: Tensors | None, scale: Mapping[str, float]
    ) -> dict[str, float]:
        """The bound of each tensor, relative to `scale`."""
        if truth is None:
            moved = shaken or {}
            far = {name: error(moved[name], t, scale[name]) for name, t in theirs.items() if name in moved}
            return {name: max(FLOAT64, ROUNDED * far.get(name, 0.0)) for name in theirs}
        own = {name: error(t, truth[name], scale[name]) for name, t in theirs.items() if name in truth}
        common = max(SLACK * max(self.epsilon, _rms(own.values())), self.of_routing)
        routed = max((far for name, far in own.items() if EXPERTS in name), default=0.0)
        return {n: max(common, SLACK * (routed if EXPERTS in n else own.get(n, 0.0))) for n in theirs}

    def untold(self, bound: float) -> str:
        """Why a quantity with this bound tells nothing; empty if it does."""
        if bound <= (TELLS if self.truth is None else COARSE):
            return ""
        return f"rounding alone may change it by {bound:.0e}"


def apart(one: float, other: float) -> float:
    """The relative error of `one`."""
    return 0.0 if one == other else abs(one - other) / max(abs(other), 1e-300)


def error(ours: Tensor, theirs: Tensor, scale: float) -> float:
    """Norm of the difference over `scale`; infinite if something is not a number."""
    far = (ours - theirs).norm().item() / scale
    return math.inf if math.isnan(far) else far


def scales(tensors: Tensors) -> dict[str, float]:
    """What an error in each tensor is relative to: its norm, or a thousandth of what a tensor of its size has."""
    average = average_element(tensors)
    return {n: max(t.norm().item(), FLOOR * average * math.sqrt(t.numel())) or 1.0 for n, t in tensors.items()}


def average_element(tensors: Tensors) -> float:
    """Root of the mean square over all elements."""
    elements = sum(t.numel() for t in tensors.values())
    return math.sqrt(sum(t.square().sum().item() for t in tensors.values()) / max(1, elements))


def rounding(theirs: Tensor, shaken: Tensor) -> Tensor:
    """bool: the elements of a gradient in float64 that may be nothing but rounding.

    An element is, if it is not far above what rounding changes in its tensor. One that is zero both times is zero for a
    reason, as for a token that never occurs, unless its whole tensor is rounding.
    """
    limit = ROUNDED * (shaken - theirs).square().mean().sqrt()
    small = theirs.abs() <= limit
    if limit > 0 and small.all():
        return small
    return small & ~((theirs == 0) & (shaken == 0))


def rounded(theirs: Record, shaken: Record) -> dict[str, int]:
    """By tensor, how many elements' gradients may be nothing but rounding in some step."""
    masks: dict[str, Tensor] = {}
    for kind, grads in theirs.tensors.items():
        if kind.startswith("gradient/"):
            for name, mask in _masks(grads, shaken.tensors[kind]):
                masks[name] = masks[name] | mask if name in masks else mask
    return {name: count for name, mask in masks.items() if (count := int(mask.sum()))}


def _masks(theirs: Tensors, shaken: Tensors) -> Iterator[tuple[str, Tensor]]:
    return ((name, rounding(t, shaken[name])) for name, t in theirs.items())


def zeros(some: Tensors, theirs: Tensors, shaken: Tensors | None) -> int:
    """Elements of `some` that are zero, but for those that may be rounding in `theirs`."""
    if shaken is None:
        return sum(int((t == 0).sum()) for t in some.values())
    masks = dict(_masks(theirs, shaken))
    return sum(int(((t == 0) & ~masks[name]).sum()) for name, t in some.items() if name in masks)


def _rms(errors: Iterable[float]) -> float:
    some = list(errors)
    return math.sqrt(sum(e * e for e in some) / max(1, len(some)))
