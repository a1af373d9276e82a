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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tools.verify.parity.record import Record, Tensors

# In float64 another order of sums changes a result by some 1e-15; the layers multiply that.
FLOAT64_TOLERANCE = 1e-12
# One measured change is a sample: another order of sums may change a result by more than it.
FLOAT64_SLACK = 100.0
# A fault changes a result by far more than this; a bound above it could hide one.
WIDEST_FLOAT64_BOUND = 1e-6
# As `FLOAT64_SLACK`, for `DRAWS` + 1 measured errors, of which the largest counts.
LOW_PRECISION_SLACK = 4.0
DRAWS = 3
# Of a gradient norm in low precision against its own elements: short rows are summed in FP32.
LOW_PRECISION_NORM_TOLERANCE = 2e-7
# A bound above sqrt(2) - 1 lets a factor of the square root of two pass.
WIDEST_LOW_PRECISION_BOUND = 0.41
# A tensor's norm counts as at least this fraction of the average norm of its size.
MIN_NORM_FRACTION = 1e-3
# The error of tensors that differ, even if the squares of the differences underflow to 0; and what
# an error is divided by where the reference is 0.
SMALLEST_ERROR = 1e-300
# In names of tensors of one expert: rounding decides which tokens it gets.
EXPERTS = ".experts."
Value = TypeVar("Value")


@dataclass(frozen=True)
class ReferenceValues(Generic[Value]):
    """A number, or tensors by name, of several runs on one process.

    reference: of the run that a layout is compared with.
    perturbed, float64, draws, unmoved: of the runs of `Noise`, as far as it has them.
    """

    reference: Value
    perturbed: Value | None = None
    float64: Value | None = None
    draws: Sequence[Value] = ()
    unmoved: Value | None = None

    @property
    def expected(self) -> Value:
        """Return what errors are measured against.

        In low precision the one process errs too, so that is its run in float64.
        """
        return self.reference if self.float64 is None else self.float64

    @property
    def measured_from(self) -> Value:
        """Return what runs from moved weights differ from by rounding alone."""
        return self.expected if self.unmoved is None else self.unmoved


@dataclass(frozen=True)
class Noise:
    """The effect of rounding on a run.

    perturbed_run: of a run in float64, the same run from weights moved by rounding.
    float64_run: of a run in another precision, the run in float64 on one process.
    perturbed_draws: the same runs as `float64_run` from weights moved by rounding of that
        precision.
    epsilon: of the dtype of products.
    expert_tokens: tokens of an expert in a step, if there are experts: rounding sends a token that
        is undecided between two experts to the other one, and its part of all gradients with it.
    state_epsilons: epsilon of the optimizer's "weights" and "moments".
    unmoved_run: the run whose weights were moved for `perturbed_run` and `perturbed_draws`, if it
        is not the one that a layout is compared with: the difference of the two would hide itself.
    exact: True if no bit may differ.
    """

    perturbed_run: Record | None = None
    float64_run: Record | None = None
    perturbed_draws: Sequence[Record] = ()
    epsilon: float = 0.0
    expert_tokens: float = math.inf
    state_epsilons: Mapping[str, float] = field(default_factory=dict)
    unmoved_run: Record | None = None
    exact: bool = False

    @property
    def routing_bound(self) -> float:
        """Return the bound for `LOW_PRECISION_SLACK` tokens that go to another expert."""
        return math.sqrt(LOW_PRECISION_SLACK / self.expert_tokens)

    def values(self, reference: Record, read: Callable[[Record], Value]) -> ReferenceValues[Value]:
        """Return what `read` returns of the reference and of the runs of this noise."""
        return ReferenceValues(
            reference=read(reference),
            perturbed=read(self.perturbed_run) if self.perturbed_run else None,
            float64=read(self.float64_run) if self.float64_run else None,
            draws=[read(perturbed_draw) for perturbed_draw in self.perturbed_draws],
            unmoved=read(self.unmoved_run) if self.unmoved_run else None,
        )

    def number_bound(self, numbers: ReferenceValues[float]) -> float:
        """Return the bound of a number, relative to it."""
        if self.exact:
            return 0.0
        if numbers.float64 is not None:
            errors = [relative_error(numbers.reference, numbers.float64)]
            for draw in numbers.draws:
                errors.append(relative_error(draw, numbers.measured_from))
            largest_error = max(self.epsilon, *errors)
            return LOW_PRECISION_SLACK * largest_error
        if numbers.perturbed is not None:
            error = relative_error(numbers.perturbed, numbers.measured_from)
            return max(FLOAT64_TOLERANCE, FLOAT64_SLACK * error)
        return FLOAT64_TOLERANCE

    def tensor_bounds(
        self, tensors: ReferenceValues[Tensors], scales: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the bound of each tensor, relative to its entry of `scales`."""
        if self.exact:
            return dict.fromkeys(tensors.reference, 0.0)
        if tensors.float64 is not None:
            return self._low_precision_bounds(tensors, tensors.float64, scales)
        errors = _tensor_errors(tensors.measured_from, tensors.perturbed or {}, scales)
        bounds: dict[str, float] = {}
        for tensor_name in tensors.reference:
            error = errors.get(tensor_name, 0.0)
            bounds[tensor_name] = max(FLOAT64_TOLERANCE, FLOAT64_SLACK * error)
        return bounds

    def _low_precision_bounds(
        self, tensors: ReferenceValues[Tensors], float64: Tensors, scales: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the bound of each tensor in low precision, relative to its entry of `scales`.

        It is LOW_PRECISION_SLACK times an error: the largest that a tensor of its kind has in any
        layer, or the typical one of all tensors if that is more.
        """
        common_error = self.epsilon
        largest: dict[str, float] = {}  # of all layers
        # the largest of several errors: one draw may be lucky
        in_low_precision = [(float64, tensors.reference)]
        in_low_precision += [(tensors.measured_from, draw) for draw in tensors.draws]
        for wide, narrow in in_low_precision:
            errors = _tensor_errors(wide, narrow, scales)
            typical_error = _root_mean_square(errors.values())
            common_error = max(common_error, typical_error)
            for tensor_name, error in errors.items():
                tensor_kind = _tensor_kind(tensor_name)
                largest[tensor_kind] = max(error, largest.get(tensor_kind, 0.0))
        least_bound = max(LOW_PRECISION_SLACK * common_error, self.routing_bound)
        bounds: dict[str, float] = {}
        for tensor_name in tensors.reference:
            tensor_kind = _tensor_kind(tensor_name)
            kind_error = largest.get(tensor_kind, 0.0)
            bounds[tensor_name] = max(least_bound, LOW_PRECISION_SLACK * kind_error)
        return bounds

    @property
    def norm_bound(self) -> float:
        """Return the bound of a gradient norm against the layout's own gradients."""
        if self.float64_run is not None or self.exact:
            return LOW_PRECISION_NORM_TOLERANCE
        return FLOAT64_TOLERANCE

    def update_bound(self, quantity: str) -> float:
        """Return the bound of "weights" or "moments" against the same update on one process."""
        if self.exact:
            return 0.0
        if self.float64_run is not None:
            return LOW_PRECISION_SLACK * self.state_epsilons[quantity]
        return FLOAT64_TOLERANCE

    def why_inconclusive(self, bound: float) -> str:
        """Return why a quantity with this bound proves nothing; empty if it proves something."""
        widest = WIDEST_FLOAT64_BOUND if self.float64_run is None else WIDEST_LOW_PRECISION_BOUND
        if bound <= widest:
            return ""
        return f"rounding alone may change it by {bound:.0e}"


def relative_error(candidate: float, reference: float) -> float:
    """Return the error of `candidate` relative to `reference`. NaN equals NaN."""
    if candidate == reference or (math.isnan(candidate) and math.isnan(reference)):
        return 0.0
    difference = abs(candidate - reference)
    size = max(abs(reference), SMALLEST_ERROR)
    return difference / size


def tensor_error(candidate: Tensor, reference: Tensor, scale: float) -> float:
    """Return the norm of the difference over `scale`: 0 if and only if all bits are equal, infinite
    if one is NaN."""
    if torch.equal(candidate, reference):
        return 0.0
    difference = candidate - reference
    error = difference.norm().item() / scale
    return math.inf if math.isnan(error) else max(error, SMALLEST_ERROR)


def _tensor_errors(
    reference: Tensors, candidate: Tensors, scales: Mapping[str, float]
) -> dict[str, float]:
    """Return the error of each tensor of `candidate` that is in `reference`, in its order."""
    errors: dict[str, float] = {}
    for tensor_name, tensor in candidate.items():
        if tensor_name in reference:
            scale = scales[tensor_name]
            errors[tensor_name] = tensor_error(tensor, reference[tensor_name], scale)
    return errors


def error_scales(tensors: Tensors) -> dict[str, float]:
    """Return the scale of errors of each tensor: its norm, or a thousandth of the average norm of
    its size."""
    average = average_element(tensors)
    scales: dict[str, float] = {}
    for tensor_name, tensor in tensors.items():
        least_norm = MIN_NORM_FRACTION * average * math.sqrt(tensor.numel())
        norm = tensor.norm().item()
        # 1 if all tensors are zero, so that an error can be divided by it
        scales[tensor_name] = max(norm, least_norm) or 1.0
    return scales


def average_element(tensors: Tensors) -> float:
    """Return the root mean square of all elements."""
    count = sum(tensor.numel() for tensor in tensors.values())
    squares = sum(tensor.square().sum().item() for tensor in tensors.values())
    return math.sqrt(squares / max(1, count))


def rounding_mask(reference: Tensor, perturbed: Tensor) -> Tensor:
    """Return a bool tensor of the elements of a float64 gradient that may be only rounding error.

    These are elements that are not far above the changes that rounding causes in their tensor. An
    element that is zero in both runs is a true zero, as of a token that never occurs, unless its
    entire tensor is rounding error.
    """
    changes = perturbed - reference
    typical_change = changes.square().mean().sqrt()
    rounding_limit = FLOAT64_SLACK * typical_change
    is_small = reference.abs() <= rounding_limit
    if rounding_limit > 0 and is_small.all():
        return is_small
    is_true_zero = (reference == 0) & (perturbed == 0)
    return is_small & ~is_true_zero


def count_rounding_elements(reference: Record, perturbed_run: Record) -> dict[str, int]:
    """Return, by tensor, the number of elements whose gradient may be only rounding error in some
    step; tensors without such elements are left out."""
    rounding_masks: dict[str, Tensor] = {}
    for tensor_kind, gradients in reference.tensors.items():
        if not tensor_kind.startswith("gradient/"):
            continue
        masks_of_step = _rounding_masks(gradients, perturbed_run.tensors[tensor_kind])
        for tensor_name, mask in masks_of_step.items():
            if tensor_name in rounding_masks:
                rounding_masks[tensor_name] |= mask
            else:
                rounding_masks[tensor_name] = mask
    counts: dict[str, int] = {}
    for tensor_name, mask in rounding_masks.items():
        if mask.any():
            counts[tensor_name] = int(mask.sum())
    return counts


def _rounding_masks(reference: Tensors, perturbed_run: Tensors) -> Tensors:
    """Return the mask of `rounding_mask` of each gradient of a step, by name."""
    return {
        tensor_name: rounding_mask(gradient, perturbed_run[tensor_name])
        for tensor_name, gradient in reference.items()
    }


def undetermined(reference: Record, noise: Noise, step: int) -> Tensors:
    """Return how far elements of weights may be from those of `reference` after `step` (from 0)
    because rounding alone decides where they move; tensors without such elements are left out.

    A rule that takes the sign of a gradient, as Lion's, moves an element whose gradients were
    rounding alone in all steps either way: two right runs may be apart by twice what it moved in
    each. One perturbed run does not measure that, for by chance all of few such elements get the
    same signs. Empty without a perturbed run.
    """
    if noise.perturbed_run is None:
        return {}
    unmoved = noise.unmoved_run or reference
    masks: Tensors = {}
    distances: Tensors = {}
    before = reference.tensors["before/weight"]
    for number in range(step + 1):
        gradients = unmoved.tensors.get(f"gradient/{number}")
        after = reference.tensors.get(f"after/{number}/weight")
        if gradients is None or after is None:  # a skipped step
            continue
        perturbed = noise.perturbed_run.tensors[f"gradient/{number}"]
        masks_of_step = _rounding_masks(gradients, perturbed)
        for tensor_name, mask in masks_of_step.items():
            change = after[tensor_name] - before[tensor_name]
            earlier_distance = distances.get(tensor_name, 0.0)
            masks[tensor_name] = masks.get(tensor_name, mask) & mask
            distances[tensor_name] = earlier_distance + 2 * change.abs()
        before = after
    return {name: distances[name] * mask for name, mask in masks.items() if mask.any()}


def without_undetermined(
    tensors: Tensors, reference: Tensors, distances: Mapping[str, Tensor]
) -> Tensors:
    """Return the tensors with each element moved towards that of `reference` by the element of
    `distances`, at most until both are equal."""
    nearer = dict(tensors)
    for tensor_name in distances.keys() & tensors.keys() & reference.keys():
        difference = tensors[tensor_name] - reference[tensor_name]
        beyond = difference.abs() - distances[tensor_name]
        remaining_difference = difference.sign() * beyond.clamp(min=0)
        is_undetermined = distances[tensor_name] > 0
        moved = reference[tensor_name] + remaining_difference
        # all other elements keep their very bits
        nearer[tensor_name] = torch.where(is_undetermined, moved, tensors[tensor_name])
    return nearer


def count_zeros(gradients: Tensors, reference: Tensors, perturbed_run: Tensors | None) -> int:
    """Return the number of zeros in `gradients`, without those that may be rounding error in
    `reference`."""
    if perturbed_run is None:
        return sum(int((gradient == 0).sum()) for gradient in gradients.values())
    rounding_masks = _rounding_masks(reference, perturbed_run)
    count = 0
    for tensor_name, gradient in gradients.items():
        if tensor_name in rounding_masks:
            is_rounding = rounding_masks[tensor_name]
            is_true_zero = (gradient == 0) & ~is_rounding
            count += int(is_true_zero.sum())
    return count


def _tensor_kind(tensor_name: str) -> str:
    """Return the kind of the tensor, which is the same in all layers. All tensors of experts are of
    one kind."""
    if EXPERTS in tensor_name:
        return EXPERTS
    return re.sub(r"\d+", "N", tensor_name)


def _root_mean_square(errors: Iterable[float]) -> float:
    """Return the root of the mean of the squares; 0 of no errors."""
    squares = [error * error for error in errors]
    return math.sqrt(sum(squares) / max(1, len(squares)))
