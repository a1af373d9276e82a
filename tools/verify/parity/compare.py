"""Comparison of two records of one run, quantity by quantity, in the order in which a step produces
them.

The quantities are activations between modules, the loss, gradients of activations, gradients of
weights, their norm, and the updated weights and moments. The first difference shows the fault, for
later ones follow from it.

Errors of tensors are relative to the norm of the tensor in the reference, or to a thousandth of the
average norm of a tensor of its size if that is more. `noise.py` defines how large they may be. That
a norm counts each element of the gradients once is checked to 2e-7 in the run's own precision, for
short rows of squares are summed in FP32.

Weights and moments are compared with the result of one process for the layout's own gradients
(`repeated_updates`). Some values must be equal to the last bit in any precision: sample ids,
initial weights, skipped steps, the loss scale, and all copies of one element.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.feed_forward.router import is_correction
from tools.verify.parity.borders import BACKWARD, FORWARD, BorderValues
from tools.verify.parity.noise import (
    Noise,
    count_zeros,
    error_scales,
    relative_error,
    tensor_error,
    without_undetermined,
)
from tools.verify.parity.record import Record, Tensors

EXACT = 0.0  # the bound of values that must have the same bits
# the quantity that compares a layout's norm and zeros with its own gradients, added another way
COUNTED_ONCE = "each element counted once"


@dataclass(frozen=True)
class Difference:
    """The comparison of one number or tensor of one step (from 1; 0: before the first) in two runs.

    error: relative. ratio: ours over theirs, of the norms or the numbers; NaN where there is none.
    ranks: that it was seen on, if not on all. inconclusive: reason why the comparison proves
    nothing, however small the error is.
    """

    quantity: str
    name: str
    step: int
    error: float
    bound: float
    ratio: float = math.nan
    note: str = ""
    ranks: tuple[int, ...] = ()
    inconclusive: str = ""

    @property
    def fails(self) -> bool:
        # written so that an error of NaN fails
        return not self.inconclusive and not self.error <= self.bound


def compare(
    candidate: Record,
    reference: Record,
    noise: Noise,
    norm_order: float = 2.0,
    repeated: Mapping[str, Tensors] | None = None,
) -> list[Difference]:
    """Return all comparisons of a layout with one process, in the order of a step.

    norm_order: of the runs' gradient norm.
    repeated: the updates repeated from the gradients of `candidate` (`repeated_updates.updates`).
    """
    differences = [
        *compare_shapes(candidate, reference),
        *compare_initial_weights(candidate, reference),
        *compare_copies(candidate, "before/"),
    ]
    # the reports of a step; one run may have ended early
    for step_index, reports in enumerate(zip(candidate.steps, reference.steps, strict=False)):
        number = step_index + 1
        comparison = StepComparison(candidate, reference, noise, step_index)
        differences += _compare_step(comparison, norm_order)
        differences += _compare_updates(candidate, repeated or {}, noise, step_index)
        differences += compare_copies(candidate, f"after/{step_index}/")
        scalers = [report["scaler"] for report in reports]
        differences.append(compare_exactly("scaler", "", number, *scalers))
        for conflict_step, quantity in candidate.rank_conflicts:
            if conflict_step == number:
                differences.append(_failure("ranks agree", quantity, number))
    return differences


def compare_exactly(
    quantity: str, tensor_name: str, step_number: int, candidate: object, reference: object
) -> Difference:
    """Compare values that must be equal, as their texts."""
    if str(candidate) == str(reference):  # as text: NaN is NaN
        return Difference(quantity, tensor_name, step_number, 0.0, EXACT)
    return _failure(quantity, tensor_name, step_number, f"{candidate}, {reference}")


def _failure(quantity: str, tensor_name: str, step_number: int, note: str = "") -> Difference:
    """Return a difference of values that must be equal and are not."""
    return Difference(quantity, tensor_name, step_number, math.inf, EXACT, note=note)


def compare_shapes(candidate: Record, reference: Record) -> Iterator[Difference]:
    """Yield the differences of the sets of logical tensors: each is present, complete and of the
    same shape, and there are no others."""
    our_weights = candidate.tensors["before/weight"]
    their_weights = reference.tensors["before/weight"]
    for tensor_name in dict.fromkeys([*their_weights, *our_weights]):
        our_shape = _shape_of(our_weights, tensor_name)
        their_shape = _shape_of(their_weights, tensor_name)
        yield compare_exactly("tensors", tensor_name, 0, our_shape, their_shape)
        if our_shape == their_shape:
            missing = int(our_weights[tensor_name].isnan().sum())
            if missing:
                yield _failure(
                    "tensors", tensor_name, 0, f"no rank holds {missing} of its elements"
                )


def _shape_of(tensors: Tensors, tensor_name: str) -> tuple[int, ...] | str:
    return tuple(tensors[tensor_name].shape) if tensor_name in tensors else "missing"


def _common_tensors(candidate: Tensors, reference: Tensors) -> list[str]:
    """Return the names of tensors that both sides have in one shape, in the order of `reference`.

    `compare_shapes` reports the others.
    """
    return [
        tensor_name
        for tensor_name, tensor in reference.items()
        if tensor_name in candidate and candidate[tensor_name].shape == tensor.shape
    ]


def compare_initial_weights(candidate: Record, reference: Record) -> Iterator[Difference]:
    """Yield the differences of the weights before the first step, of which no bit may differ."""
    our_weights = candidate.tensors["before/weight"]
    their_weights = reference.tensors["before/weight"]
    for tensor_name in _common_tensors(our_weights, their_weights):
        ours = our_weights[tensor_name]
        theirs = their_weights[tensor_name]
        # scaled by itself alone: the error must be 0, so only its size in the report depends on it
        scales = error_scales({tensor_name: theirs})
        yield Difference(
            "initial weights",
            tensor_name,
            step=0,
            error=tensor_error(ours, theirs, scales[tensor_name]),
            bound=EXACT,
            ratio=_norm_ratio(ours, theirs),
            note=_describe_largest(ours, theirs),
        )


def compare_copies(candidate: Record, prefix: str) -> Iterator[Difference]:
    """Yield a failure for each tensor, of the kinds that start with `prefix`, of which ranks hold
    copies that differ."""
    for tensor_kind, tensor_name in candidate.copy_conflicts:
        if tensor_kind.startswith(prefix):
            # "before/weight", "gradient/STEP" or "after/STEP/KIND"
            phase, step, *_ = tensor_kind.split("/")
            label = phase if phase == "gradient" else tensor_kind.split("/")[-1]
            number = 0 if phase == "before" else int(step) + 1
            yield _failure("copies", tensor_name, number, f"{label} differs between ranks")


@dataclass(frozen=True)
class StepComparison:
    """The comparison of one step (from 0) of two runs."""

    candidate: Record
    reference: Record
    noise: Noise
    step: int

    def number(self, quantity: str, report_key: str) -> Difference:
        """Return the difference of a number that both runs report."""

        def read(run_record: Record) -> float:
            return run_record.steps[self.step][report_key]

        candidate = read(self.candidate)
        numbers = self.noise.values(self.reference, read)
        error = relative_error(candidate, numbers.expected)
        bound = self.noise.number_bound(numbers)
        ratio = candidate / numbers.reference if numbers.reference else math.nan
        difference = Difference(quantity, "", self.step + 1, error, bound, ratio)
        return self.judge(difference)

    def tensors(
        self,
        quantity: str,
        tensor_kind: str,
        names: Sequence[str],
        least_bound: float = 0.0,
        undetermined: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Difference]:
        """Yield the differences of the tensors of a kind, in the order of `names`; `compare_shapes`
        reports those that one side lacks.

        least_bound: of each of them, whatever the noise is.
        undetermined: how far each element may be from the reference's without an error, by tensor;
            of tensors that are not in it no element may be.
        """
        candidate = self.candidate.tensors.get(tensor_kind)
        if candidate is None or tensor_kind not in self.reference.tensors:
            return
        references = self.noise.values(
            self.reference, lambda run_record: run_record.tensors.get(tensor_kind, {})
        )
        if undetermined:
            candidate = without_undetermined(candidate, references.expected, undetermined)
            perturbed = without_undetermined(
                references.perturbed or {}, references.measured_from, undetermined
            )
            references = replace(references, perturbed=perturbed)
        # a run in float64 that skipped this step has no such tensors: no noise is measured with it
        references = replace(references, float64=references.float64 or None)
        reference = references.reference
        expected = references.expected
        scales = error_scales(expected)
        bounds = self.noise.tensor_bounds(references, scales)
        common = set(_common_tensors(candidate, reference))
        for tensor_name in names:
            if tensor_name not in common:
                continue
            ours = candidate[tensor_name]
            theirs = reference[tensor_name]
            difference = Difference(
                quantity,
                tensor_name,
                step=self.step + 1,
                error=tensor_error(ours, expected[tensor_name], scales[tensor_name]),
                bound=max(bounds[tensor_name], least_bound),
                ratio=_norm_ratio(ours, theirs),
                note=_describe_largest(ours, theirs),
            )
            yield self.judge(difference)

    def borders(self, kind: str) -> Iterator[Difference]:
        """Compare the values of every rank at each common border, in the order in which the one
        process passed them.

        Yield one difference for each border: its error is the largest of any rank's, and infinite
        if a rank that passes the border in other steps did not pass it in this one.
        """
        references = self.noise.values(
            self.reference, lambda run_record: _values_by_border(run_record, kind, self.step)
        )
        scales = error_scales(references.expected)
        bounds = self.noise.tensor_bounds(references, scales)
        for border, full_values in references.expected.items():
            ranks = {values.rank for values in self.candidate.borders.get((kind, border), [])}
            if not ranks:
                continue
            rank_values = self.candidate.borders_at((kind, border), self.step)
            # The error of a rank's part is relative to the full values' norm, scaled to as many
            # elements as the part has: its own norm may be small by chance.
            element_scale = scales[border] / math.sqrt(full_values.numel())
            (reference_values,) = self.reference.borders_at((kind, border), self.step)
            ranks_in_step = {values.rank for values in rank_values}
            failing = sorted(ranks - ranks_in_step)
            errors = [math.inf for _ in failing]
            ratio = math.nan  # of the first rank that fails
            for border_values in rank_values:
                expected_part = _select_part(border_values, reference_values, full_values)
                scale = element_scale * math.sqrt(expected_part.numel()) or 1.0
                error = tensor_error(border_values.values, expected_part, scale)
                errors.append(error)
                if not error <= bounds[border]:
                    if not failing:
                        ratio = _norm_ratio(border_values.values, expected_part)
                    failing.append(border_values.rank)
            difference = Difference(
                kind,
                border,
                step=self.step + 1,
                error=max(errors),
                bound=bounds[border],
                ratio=ratio,
                ranks=tuple(failing),
            )
            yield self.judge(difference)

    def judge(self, difference: Difference) -> Difference:
        """Return the difference, marked if its bound is too wide to prove anything."""
        return replace(difference, inconclusive=self.noise.why_inconclusive(difference.bound))


def _values_by_border(run_record: Record, tensor_kind: str, step_index: int) -> Tensors:
    """Return the values that one process saw by border: [samples, positions]."""
    by_border: Tensors = {}
    for border_kind, border in run_record.borders:
        of_step = run_record.borders_at((border_kind, border), step_index)
        if border_kind == tensor_kind and of_step:
            by_border[border] = of_step[0].values
    return by_border


def _select_part(
    border_values: BorderValues, reference: BorderValues, full_values: Tensor
) -> Tensor:
    """Return the part of one process's values that this rank saw: [samples, positions].

    It is NaN if one of the rank's samples is not in the reference.
    """
    if not set(border_values.samples) <= set(reference.samples):
        return full_values.new_full(
            (len(border_values.samples), len(border_values.positions)), torch.nan
        )
    # One process sees all samples of the step, so the number of a sample is its row.
    columns = [reference.positions.index(position) for position in border_values.positions]
    return full_values[border_values.samples][:, columns]


def _compare_step(comparison: StepComparison, norm_order: float) -> Iterator[Difference]:
    """Yield the differences of what a step computes before its update, in the order of the
    computation."""
    number = comparison.step + 1
    candidate = comparison.candidate
    reference = comparison.reference
    samples = (candidate.samples[comparison.step], reference.samples[comparison.step])
    yield compare_exactly("sample ids", "", number, *samples)
    yield from comparison.borders(FORWARD)
    yield comparison.number("loss", "loss")
    yield from comparison.borders(BACKWARD)
    tensor_kind = f"gradient/{comparison.step}"
    # the last layer's gradients arise first
    backward_order = reference.names[::-1]
    yield from comparison.tensors("gradient", tensor_kind, backward_order)
    yield from compare_copies(candidate, tensor_kind)
    # neither has gradients of a step that was skipped
    if tensor_kind in candidate.tensors and tensor_kind in reference.tensors:
        yield from _compare_counts(comparison, norm_order)
        yield comparison.number("gradient norm", "grad_norm")
    our_report = candidate.steps[comparison.step]
    their_report = reference.steps[comparison.step]
    for report_key in ("outcome", "offenders"):
        yield compare_exactly(
            "found_inf", report_key, number, our_report[report_key], their_report[report_key]
        )
    yield comparison.number("learning rate", "lr")


def _compare_updates(
    candidate: Record, repeated: Mapping[str, Tensors], noise: Noise, step_index: int
) -> Iterator[Difference]:
    """Yield the differences of weights and moments from those that one process computes with the
    same gradients.

    `compare_shapes` reports those that one side lacks.
    """
    for tensor_kind, expected in repeated.items():
        if not tensor_kind.startswith(f"after/{step_index}/"):
            continue
        quantity = "weights" if tensor_kind.split("/")[-1] == "weight" else "moments"
        bound = noise.update_bound(quantity)
        scales = error_scales(expected)
        tensors = candidate.tensors.get(tensor_kind, {})
        for tensor_name in _common_tensors(tensors, expected):
            ours = tensors[tensor_name]
            theirs = expected[tensor_name]
            yield Difference(
                quantity,
                tensor_name,
                step=step_index + 1,
                error=tensor_error(ours, theirs, scales[tensor_name]),
                bound=bound,
                ratio=_norm_ratio(ours, theirs),
                note=_describe_largest(ours, theirs),
            )


def _norm_ratio(candidate: Tensor, reference: Tensor) -> float:
    their_norm = reference.norm().item()
    return candidate.norm().item() / their_norm if their_norm else math.nan


def _describe_largest(candidate: Tensor, reference: Tensor) -> str:
    """Return index and values of the element that differs most; empty if none differs."""
    errors = (candidate - reference).abs().nan_to_num(torch.inf)
    if not errors.numel() or not errors.max():
        return ""
    coordinates = torch.unravel_index(errors.argmax(), errors.shape)
    index = [int(coordinate) for coordinate in coordinates]
    our_value = candidate[tuple(index)].item()
    their_value = reference[tuple(index)].item()
    return f"{index}: {our_value:.6g}, {their_value:.6g}"


def _compare_counts(comparison: StepComparison, norm_order: float) -> Iterator[Difference]:
    """Check that norm and zero count of the layout cover each element of its own gradients once,
    and in float64 that as many elements as in one process are zero other than by rounding.
    """
    tensor_kind = f"gradient/{comparison.step}"
    number = comparison.step + 1
    noise = comparison.noise
    report = comparison.candidate.steps[comparison.step]
    candidate = _without_corrections(comparison.candidate.tensors[tensor_kind])
    reference = _without_corrections(comparison.reference.tensors[tensor_kind])

    # the layout's own gradients, put together: each element is there once
    elements = torch.cat([gradient.flatten() for gradient in candidate.values()])
    expected = torch.linalg.vector_norm(elements, norm_order).item()
    reported = report["grad_norm"]
    error = relative_error(reported, expected)
    ratio = reported / expected if expected else math.nan
    yield Difference(COUNTED_ONCE, "norm", number, error, noise.norm_bound, ratio)

    num_zeros = int((elements == 0).sum())
    yield compare_exactly(COUNTED_ONCE, "zeros", number, report["num_zeros"], num_zeros)
    if noise.float64_run is None and not noise.exact:
        perturbed = noise.perturbed_run.tensors[tensor_kind] if noise.perturbed_run else None
        our_zeros = count_zeros(candidate, reference, perturbed)
        their_zeros = count_zeros(reference, reference, perturbed)
        yield compare_exactly("zero count", "", number, our_zeros, their_zeros)


def _without_corrections(gradients: Tensors) -> Tensors:
    """Leave out the routers' corrections: their "gradients" are counts of loads."""
    return {
        tensor_name: tensor
        for tensor_name, tensor in gradients.items()
        if not is_correction(tensor_name)
    }


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is largest relative to its bound; values that must be equal come
    last."""
    # a bound that proves nothing would hide one that is nearly reached
    conclusive = [difference for difference in differences if not difference.inconclusive]
    candidates = conclusive or differences
    measured = [
        difference
        for difference in candidates
        if difference.bound and math.isfinite(difference.error)
    ]

    def share_of_bound(difference: Difference) -> float:
        # values that must be equal have a bound of 0
        return difference.error / (difference.bound or 1.0)

    return max(measured or candidates, key=share_of_bound)
