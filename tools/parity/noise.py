"""The bounds within which two runs without a fault may differ.

In float64 rounding is measured: one process trains a second time from weights that were each moved
by one unit in the last place. The change shows the effect of rounding: almost nothing for most
numbers, and everything for a gradient that is only rounding error, such as that of a bias of keys,
which softmax cancels. A layout, which sums in another order, may differ by
`FLOAT64_TOLERANCE`, or by `FLOAT64_SLACK` times that change if it is more. If this bound exceeds
`WIDEST_FLOAT64_BOUND`, the quantity proves nothing and counts as not tried.

In the run's own precision one process differs from one process in float64 by some error. So do
`DRAWS` runs in float64 from weights that were each moved by one unit in the last place of that
precision: one run alone may be lucky, for the first steps of Adam move a weight by the sign of its
gradient, which rounding changes where the gradient is small. A layout may differ by
`LOW_PRECISION_SLACK` times the largest of these errors among all layers, or by as many units in the
last place of the dtype if that is more, or as if as many tokens went to another expert. If the
bound does not exclude a factor of the square root of two, the quantity proves nothing either.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.parity.record import Record, Tensors

# In float64 another order of sums changes a result by some 1e-15; the layers multiply that.
FLOAT64_TOLERANCE = 1e-12
# One measured change is a sample: another order of sums may change a result by more than it.
FLOAT64_SLACK = 100.0
# A fault changes a result by far more than this; a bound above it could hide one.
WIDEST_FLOAT64_BOUND = 1e-6
# As `FLOAT64_SLACK`, for `DRAWS` + 1 measured errors, of which the largest counts.
LOW_PRECISION_SLACK = 4.0
DRAWS = 3
# Of a gradient norm in low precision against its own elements: squares may be summed in FP32.
LOW_PRECISION_NORM_TOLERANCE = 1e-4
# A bound above sqrt(2) - 1 lets a factor of the square root of two pass.
WIDEST_LOW_PRECISION_BOUND = 0.41
# A tensor's norm counts as at least this fraction of the average norm of its size.
MIN_NORM_FRACTION = 1e-3
# The error of tensors that differ, even if the squares of the differences underflow to 0.
SMALLEST_ERROR = 1e-300
# In names of tensors of one expert: rounding decides which tokens it gets.
EXPERTS = ".experts."


@dataclass(frozen=True)
class Noise:
    """The effect of rounding on a run.

    shaken: of a run in float64, the same run from weights moved by rounding.
    truth: of a run in another precision, the run in float64 on one process.
    draws: the same runs as `truth` from weights moved by rounding of that precision.
    epsilon: of the dtype of products.
    expert_tokens: tokens of an expert in a step, if there are experts: rounding sends a token that
        is undecided between two experts to the other one, and its part of all gradients with it.
    state_epsilons: epsilon of the optimizer's "weights" and "moments".
    exact: True if no bit may differ.
    """

    shaken: Record | None = None
    truth: Record | None = None
    draws: Sequence[Record] = ()
    epsilon: float = 0.0
    expert_tokens: float = math.inf
    state_epsilons: Mapping[str, float] = field(default_factory=dict)
    exact: bool = False

    @property
    def routing_bound(self) -> float:
        """Return the bound for `LOW_PRECISION_SLACK` tokens that go to another expert."""
        return math.sqrt(LOW_PRECISION_SLACK / self.expert_tokens)

    def number_bound(
        self, theirs: float, shaken: float | None, truth: float | None, draws: Sequence[float] = ()
    ) -> float:
        """Return the bound of a number."""
        if self.exact:
            return 0.0
        if truth is not None:
            errors = [relative_error(number, truth) for number in (theirs, *draws)]
            return LOW_PRECISION_SLACK * max(self.epsilon, *errors)
        if shaken is not None:
            return max(FLOAT64_TOLERANCE, FLOAT64_SLACK * relative_error(shaken, theirs))
        return FLOAT64_TOLERANCE

    def tensor_bounds(
        self,
        theirs: Tensors,
        shaken: Tensors | None,
        truth: Tensors | None,
        scales: Mapping[str, float],
        draws: Sequence[Tensors] = (),
    ) -> dict[str, float]:
        """Return the bound of each tensor, relative to its entry of `scales`."""
        if self.exact:
            return dict.fromkeys(theirs, 0.0)
        if truth is None:
            errors = _tensor_errors(theirs, shaken or {}, scales)
            return {
                name: max(FLOAT64_TOLERANCE, FLOAT64_SLACK * errors.get(name, 0.0))
                for name in theirs
            }
        common = self.epsilon
        largest: dict[str, float] = {}  # of all layers
        for tensors in [theirs, *draws]:
            errors = _tensor_errors(truth, tensors, scales)
            common = max(common, _root_mean_square(errors.values()))
            for name, error in errors.items():
                kind = _tensor_kind(name)
                largest[kind] = max(error, largest.get(kind, 0.0))
        least = max(LOW_PRECISION_SLACK * common, self.routing_bound)
        return {
            name: max(least, LOW_PRECISION_SLACK * largest.get(_tensor_kind(name), 0.0))
            for name in theirs
        }

    @property
    def norm_bound(self) -> float:
        """Return the bound of a gradient norm against the layout's own gradients."""
        if self.truth is not None or self.exact:
            return LOW_PRECISION_NORM_TOLERANCE
        return FLOAT64_TOLERANCE

    def update_bound(self, quantity: str) -> float:
        """Return the bound of "weights" or "moments" against the same update on one process."""
        if self.exact:
            return 0.0
        if self.truth is not None:
            return LOW_PRECISION_SLACK * self.state_epsilons[quantity]
        return FLOAT64_TOLERANCE

    def why_inconclusive(self, bound: float) -> str:
        """Return why a quantity with this bound proves nothing; empty if it proves something."""
        widest = WIDEST_FLOAT64_BOUND if self.truth is None else WIDEST_LOW_PRECISION_BOUND
        if bound <= widest:
            return ""
        return f"rounding alone may change it by {bound:.0e}"


def relative_error(ours: float, theirs: float) -> float:
    """Return the error of `ours` relative to `theirs`. NaN equals NaN."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    return abs(ours - theirs) / max(abs(theirs), 1e-300)


def tensor_error(ours: Tensor, theirs: Tensor, scale: float) -> float:
    """Return the norm of the difference over `scale`: 0 if and only if all bits are equal, infinite
    if one is NaN."""
    if torch.equal(ours, theirs):
        return 0.0
    error = (ours - theirs).norm().item() / scale
    return math.inf if math.isnan(error) else max(error, SMALLEST_ERROR)


def _tensor_errors(theirs: Tensors, ours: Tensors, scales: Mapping[str, float]) -> dict[str, float]:
    """Return the error of each tensor of `ours` that is in `theirs`, in the order of `ours`."""
    return {
        name: tensor_error(tensor, theirs[name], scales[name])
        for name, tensor in ours.items()
        if name in theirs
    }


def error_scales(tensors: Tensors) -> dict[str, float]:
    """Return the scale of errors of each tensor: its norm, or a thousandth of the average norm of
    its size."""
    average = average_element(tensors)
    scales: dict[str, float] = {}
    for name, tensor in tensors.items():
        least = MIN_NORM_FRACTION * average * math.sqrt(tensor.numel())
        # 1 if all tensors are zero, so that an error can be divided by it
        scales[name] = max(tensor.norm().item(), least) or 1.0
    return scales


def average_element(tensors: Tensors) -> float:
    """Return the root mean square of all elements."""
    count = sum(tensor.numel() for tensor in tensors.values())
    squares = sum(tensor.square().sum().item() for tensor in tensors.values())
    return math.sqrt(squares / max(1, count))


def rounding_mask(theirs: Tensor, shaken: Tensor) -> Tensor:
    """Return a bool tensor of the elements of a float64 gradient that may be only rounding error.

    These are elements that are not far above the changes that rounding causes in their tensor. An
    element that is zero in both runs is a true zero, as of a token that never occurs, unless its
    entire tensor is rounding error.
    """
    limit = FLOAT64_SLACK * (shaken - theirs).square().mean().sqrt()
    small = theirs.abs() <= limit
    if limit > 0 and small.all():
        return small
    return small & ~((theirs == 0) & (shaken == 0))


def count_rounding_elements(theirs: Record, shaken: Record) -> dict[str, int]:
    """Return, by tensor, the number of elements whose gradient may be only rounding error in some
    step; tensors without such elements are left out."""
    masks: dict[str, Tensor] = {}
    for kind, gradients in theirs.tensors.items():
        if not kind.startswith("gradient/"):
            continue
        for name, mask in _rounding_masks(gradients, shaken.tensors[kind]).items():
            masks[name] = masks[name] | mask if name in masks else mask
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    return {name: count for name, count in counts.items() if count}


def _rounding_masks(theirs: Tensors, shaken: Tensors) -> Tensors:
    return {name: rounding_mask(gradient, shaken[name]) for name, gradient in theirs.items()}


def count_zeros(gradients: Tensors, theirs: Tensors, shaken: Tensors | None) -> int:
    """Return the number of zeros in `gradients`, without those that may be rounding error in
    `theirs`."""
    if shaken is None:
        return sum(int((gradient == 0).sum()) for gradient in gradients.values())
    masks = _rounding_masks(theirs, shaken)
    count = 0
    for name, gradient in gradients.items():
        if name in masks:
            count += int(((gradient == 0) & ~masks[name]).sum())
    return count


def _tensor_kind(name: str) -> str:
    """Return the kind of the tensor, which is the same in all layers. All tensors of experts are of
    one kind."""
    return EXPERTS if EXPERTS in name else re.sub(r"\d+", "N", name)


def _root_mean_square(errors: Iterable[float]) -> float:
    listed = list(errors)
    return math.sqrt(sum(error * error for error in listed) / max(1, len(listed)))
