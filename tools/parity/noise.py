"""The bounds within which two runs without a fault may differ.

In float64 rounding is measured: one process trains a second time from weights that were each moved
by one unit in the last place. The change shows the effect of rounding: almost nothing for most
numbers, and everything for a gradient that is only rounding error, such as that of a bias of keys,
which softmax cancels. A layout, which sums in another order, may differ by `FLOAT64`, or by
`ROUNDED` times that change if it is more. If this bound exceeds `TELLS`, the quantity proves
nothing and counts as not tried.

In the run's own precision one process differs from one process in float64 by some error. So do
`DRAWS` runs in float64 from weights that were each moved by one unit in the last place of that
precision: one run alone may be lucky, for the first steps of Adam move a weight by the sign of its
gradient, which rounding changes where the gradient is small. A layout may differ by `SLACK` times
the largest of these errors among all layers, or by as many units in the last place of the dtype if
that is more, or as if `SLACK` tokens went to another expert. If the bound does not exclude a factor
of the square root of two, the quantity proves nothing either.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.parity.gather import Record, Tensors

FLOAT64 = 1e-12
SLACK = 4.0
ROUNDED = 100.0
TELLS = 1e-6
DRAWS = 3
COUNTED = 1e-4  # of a gradient norm in low precision: squares may be summed in FP32
COARSE = 0.41  # in another precision: a factor of the square root of two would pass
EXPERTS = ".experts."  # in names of tensors of one expert: rounding decides which tokens it gets
SMALLEST = 1e-300  # an error that is not zero, although the squares of the differences are
FLOOR = 1e-3  # fraction of the average norm that a tensor's norm counts as at least


@dataclass(frozen=True)
class Noise:
    """The effect of rounding on a run.

    shaken: of a run in float64, the same run from weights moved by rounding. truth: of a run in
    another precision, the run in float64 on one process. moved: the same runs from weights moved by
    rounding of that precision. epsilon: of the dtype of products. tokens: tokens of an expert in a
    step, if there are experts: rounding sends a token that is undecided between two experts to the
    other one, and its part of all gradients with it. kept: epsilon of the optimizer's "weights" and
    "moments". exact: True if no bit may differ.
    """

    shaken: Record | None = None
    truth: Record | None = None
    moved: Sequence[Record] = ()
    epsilon: float = 0.0
    tokens: float = math.inf
    kept: Mapping[str, float] = field(default_factory=dict)
    exact: bool = False

    @property
    def of_routing(self) -> float:
        """Return the bound for `SLACK` tokens that go to another expert."""
        return math.sqrt(SLACK / self.tokens)

    def of_number(
        self, theirs: float, shaken: float | None, truth: float | None, moved: Sequence[float] = ()
    ) -> float:
        """Return the bound of a number."""
        if self.exact:
            return 0.0
        if truth is not None:
            return SLACK * max(self.epsilon, *(apart(other, truth) for other in (theirs, *moved)))
        if shaken is not None:
            return max(FLOAT64, ROUNDED * apart(shaken, theirs))
        return FLOAT64

    def of_tensors(
        self,
        theirs: Tensors,
        shaken: Tensors | None,
        truth: Tensors | None,
        scale: Mapping[str, float],
        moved: Sequence[Tensors] = (),
    ) -> dict[str, float]:
        """Return the bound of each tensor, relative to `scale`."""
        if self.exact:
            return dict.fromkeys(theirs, 0.0)
        if truth is None:
            near = shaken or {}
            far = {
                name: error(near[name], t, scale[name])
                for name, t in theirs.items()
                if name in near
            }
            return {name: max(FLOAT64, ROUNDED * far.get(name, 0.0)) for name in theirs}
        common = self.epsilon
        largest = dict[str, float]()
        for some in [theirs, *moved]:
            far = {
                name: error(t, truth[name], scale[name])
                for name, t in some.items()
                if name in truth
            }
            common = max(common, _rms(far.values()))
            for name, one in far.items():
                largest[_kind(name)] = max(one, largest.get(_kind(name), 0.0))
        least = max(SLACK * common, self.of_routing)
        return {name: max(least, SLACK * largest.get(_kind(name), 0.0)) for name in theirs}

    @property
    def of_norm(self) -> float:
        """Return the bound of a gradient norm against the layout's own gradients."""
        return COUNTED if self.truth is not None or self.exact else FLOAT64

    def of_update(self, quantity: str) -> float:
        """Return the bound of "weights" or "moments" against the same update on one process."""
        if self.exact:
            return 0.0
        return SLACK * self.kept[quantity] if self.truth is not None else FLOAT64

    def untold(self, bound: float) -> str:
        """Return the reason why a quantity with this bound proves nothing; empty if it does prove
        something."""
        if bound <= (TELLS if self.truth is None else COARSE):
            return ""
        return f"rounding alone may change it by {bound:.0e}"


def apart(one: float, other: float) -> float:
    """Return the relative error of `one`. NaN equals NaN."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / max(abs(other), 1e-300)


def error(ours: Tensor, theirs: Tensor, scale: float) -> float:
    """Return the norm of the difference over `scale`: 0 if and only if all bits are equal, infinite
    if one is NaN."""
    if torch.equal(ours, theirs):
        return 0.0
    far = (ours - theirs).norm().item() / scale
    return math.inf if math.isnan(far) else max(far, SMALLEST)


def scales(tensors: Tensors) -> dict[str, float]:
    """Return the scale of errors of each tensor: its norm, or a thousandth of the average norm of
    its size."""
    average = average_element(tensors)
    return {
        n: max(t.norm().item(), FLOOR * average * math.sqrt(t.numel())) or 1.0
        for n, t in tensors.items()
    }


def average_element(tensors: Tensors) -> float:
    """Return the root mean square of all elements."""
    elements = sum(t.numel() for t in tensors.values())
    return math.sqrt(sum(t.square().sum().item() for t in tensors.values()) / max(1, elements))


def rounding(theirs: Tensor, shaken: Tensor) -> Tensor:
    """Return a bool tensor of the elements of a float64 gradient that may be only rounding error.

    These are elements that are not far above the changes that rounding causes in their tensor. An
    element that is zero in both runs is a true zero, as of a token that never occurs, unless its
    whole tensor is rounding error.
    """
    limit = ROUNDED * (shaken - theirs).square().mean().sqrt()
    small = theirs.abs() <= limit
    if limit > 0 and small.all():
        return small
    return small & ~((theirs == 0) & (shaken == 0))


def rounded(theirs: Record, shaken: Record) -> dict[str, int]:
    """Return, by tensor, the number of elements whose gradient may be only rounding error in some
    step."""
    masks: dict[str, Tensor] = {}
    for kind, grads in theirs.tensors.items():
        if kind.startswith("gradient/"):
            for name, mask in _masks(grads, shaken.tensors[kind]):
                masks[name] = masks[name] | mask if name in masks else mask
    return {name: count for name, mask in masks.items() if (count := int(mask.sum()))}


def _masks(theirs: Tensors, shaken: Tensors) -> Iterator[tuple[str, Tensor]]:
    return ((name, rounding(t, shaken[name])) for name, t in theirs.items())


def zeros(some: Tensors, theirs: Tensors, shaken: Tensors | None) -> int:
    """Return the number of zeros in `some` without those that may be rounding error in `theirs`."""
    if shaken is None:
        return sum(int((t == 0).sum()) for t in some.values())
    masks = dict(_masks(theirs, shaken))
    return sum(int(((t == 0) & ~masks[name]).sum()) for name, t in some.items() if name in masks)


def _kind(name: str) -> str:
    """Return the kind of the tensor, which is the same in all layers. All tensors of experts are of
    one kind."""
    return EXPERTS if EXPERTS in name else re.sub(r"\d+", "N", name)


def _rms(errors: Iterable[float]) -> float:
    some = list(errors)
    return math.sqrt(sum(e * e for e in some) / max(1, len(some)))
