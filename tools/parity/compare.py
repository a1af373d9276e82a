"""Comparison of two records of one run, quantity by quantity, in the order in which a step produces
them.

The quantities are activations between modules, the loss, gradients of activations, gradients of
weights, their norm, and the updated weights and moments. The first difference shows the fault, for
later ones follow from it.

Errors of tensors are relative to the norm of the tensor in the reference, or to a thousandth of the
average norm of a tensor of its size if that is more. `noise.py` defines how large they may be. That
a norm counts each element of the gradients once is checked to 1e-4 in the run's own precision, for
squares may be summed in FP32.

Weights and moments are compared with the result of one process for the layout's own gradients
(`again.py`). Some values must be equal to the last bit in any precision: sample ids, initial
weights, skipped steps, the loss scale, and all copies of one element.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.router import is_correction
from tools.parity.borders import BACKWARD, FORWARD, BorderValues
from tools.parity.noise import Noise, count_zeros, error_scales, relative_error, tensor_error
from tools.parity.record import Record, Tensors

EXACT = 0.0  # the bound of values that must have the same bits


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
    ours: Record,
    theirs: Record,
    noise: Noise,
    norm: float = 2.0,
    repeated: Mapping[str, Tensors] | None = None,
) -> list[Difference]:
    """Return all comparisons of a layout with one process, in the order of a step.

    norm: order of the runs' gradient norm.
    repeated: the updates repeated from the gradients of `ours` (`again.updates`).
    """
    differences = [
        *_compare_shapes(ours, theirs),
        *_compare_initial_weights(ours, theirs),
        *_compare_copies(ours, "before/"),
    ]
    # the reports of a step; one run may have ended early
    for step, reports in enumerate(zip(ours.steps, theirs.steps, strict=False)):
        number = step + 1
        differences += _compare_step(_StepComparison(ours, theirs, noise, step), norm)
        differences += _compare_updates(ours, repeated or {}, noise, step)
        differences += _compare_copies(ours, f"after/{step}/")
        scalers = [report["scaler"] for report in reports]
        differences.append(_compare_exactly("scaler", "", number, *scalers))
        for conflict_step, quantity in ours.rank_conflicts:
            if conflict_step == number:
                differences.append(_failure("ranks agree", quantity, number))
    return differences


def _compare_exactly(
    quantity: str, name: str, step: int, ours: object, theirs: object
) -> Difference:
    if str(ours) == str(theirs):  # as text: NaN is NaN
        return Difference(quantity, name, step, 0.0, EXACT)
    return _failure(quantity, name, step, f"{ours}, {theirs}")


def _failure(quantity: str, name: str, step: int, note: str = "") -> Difference:
    """Return a difference of values that must be equal and are not."""
    return Difference(quantity, name, step, math.inf, EXACT, note=note)


def _compare_shapes(ours: Record, theirs: Record) -> Iterator[Difference]:
    """Compare the sets of logical tensors: each is present, complete and of the same shape, and
    there are no others."""
    our_weights = ours.tensors["before/weight"]
    their_weights = theirs.tensors["before/weight"]
    for name in dict.fromkeys([*their_weights, *our_weights]):
        our_shape = _shape_of(our_weights, name)
        their_shape = _shape_of(their_weights, name)
        yield _compare_exactly("tensors", name, 0, our_shape, their_shape)
        if our_shape == their_shape:
            missing = int(our_weights[name].isnan().sum())
            if missing:
                yield _failure("tensors", name, 0, f"no rank holds {missing} of its elements")


def _shape_of(tensors: Tensors, name: str) -> tuple[int, ...] | str:
    return tuple(tensors[name].shape) if name in tensors else "missing"


def _common_tensors(ours: Tensors, theirs: Tensors) -> list[str]:
    """Return the names of tensors that both sides have in one shape, in the order of `theirs`.

    `_compare_shapes` reports the others.
    """
    return [
        name for name, tensor in theirs.items() if name in ours and ours[name].shape == tensor.shape
    ]


def _compare_initial_weights(ours: Record, theirs: Record) -> Iterator[Difference]:
    our_weights = ours.tensors["before/weight"]
    their_weights = theirs.tensors["before/weight"]
    for name in _common_tensors(our_weights, their_weights):
        pair = (our_weights[name], their_weights[name])
        # scaled by itself alone: the error must be 0, so only its size in the report depends on it
        scale = error_scales({name: pair[1]})[name]
        error = tensor_error(*pair, scale)
        yield Difference(
            "initial weights",
            name,
            step=0,
            error=error,
            bound=EXACT,
            ratio=_norm_ratio(*pair),
            note=_describe_largest(*pair),
        )


def _compare_copies(ours: Record, prefix: str) -> Iterator[Difference]:
    """Compare the copies that ranks hold of tensors of the kinds that start with `prefix`."""
    for kind, name in ours.copy_conflicts:
        if kind.startswith(prefix):
            # "before/weight", "gradient/STEP" or "after/STEP/KIND"
            phase, step, *_ = kind.split("/")
            label = phase if phase == "gradient" else kind.split("/")[-1]
            number = 0 if phase == "before" else int(step) + 1
            yield _failure("copies", name, number, f"{label} differs between ranks")


@dataclass(frozen=True)
class _StepComparison:
    """The comparison of one step (from 0) of two runs."""

    ours: Record
    theirs: Record
    noise: Noise
    step: int

    def number(self, quantity: str, key: str) -> Difference:
        """Compare a number that both runs report."""
        ours = self.ours.steps[self.step][key]
        theirs = self.theirs.steps[self.step][key]
        shaken = self.noise.shaken.steps[self.step][key] if self.noise.shaken else None
        truth = self.noise.truth.steps[self.step][key] if self.noise.truth else None
        draws = [record.steps[self.step][key] for record in self.noise.draws]

        error = relative_error(ours, theirs if truth is None else truth)
        bound = self.noise.number_bound(theirs, shaken, truth, draws)
        ratio = ours / theirs if theirs else math.nan
        difference = Difference(quantity, "", self.step + 1, error, bound, ratio)
        return self.judge(difference)

    def tensors(self, quantity: str, kind: str, names: Sequence[str]) -> Iterator[Difference]:
        """Compare the tensors of a kind, in the order of `names`; `_compare_shapes` reports those
        that one side lacks."""
        ours = self.ours.tensors.get(kind)
        theirs = self.theirs.tensors.get(kind)
        if ours is None or theirs is None:
            return
        shaken = self.noise.shaken.tensors.get(kind) if self.noise.shaken else None
        truth = self.noise.truth.tensors.get(kind) if self.noise.truth else None
        draws = [record.tensors[kind] for record in self.noise.draws]
        # in low precision the one process errs too, so both are measured against float64
        expected = truth or theirs
        scales = error_scales(expected)
        bounds = self.noise.tensor_bounds(theirs, shaken, truth, scales, draws)
        common = set(_common_tensors(ours, theirs))
        for name in names:
            if name not in common:
                continue
            error = tensor_error(ours[name], expected[name], scales[name])
            ratio = _norm_ratio(ours[name], theirs[name])
            note = _describe_largest(ours[name], theirs[name])
            difference = Difference(
                quantity,
                name,
                step=self.step + 1,
                error=error,
                bound=bounds[name],
                ratio=ratio,
                note=note,
            )
            yield self.judge(difference)

    def borders(self, kind: str) -> Iterator[Difference]:
        """Compare the values of every rank at each common border, in the order in which the one
        process passed them."""
        theirs = _values_by_border(self.theirs, kind, self.step)
        shaken = truth = None
        if self.noise.shaken:
            shaken = _values_by_border(self.noise.shaken, kind, self.step)
        if self.noise.truth:
            truth = _values_by_border(self.noise.truth, kind, self.step)
        draws = [_values_by_border(record, kind, self.step) for record in self.noise.draws]
        expected = truth or theirs
        scales = error_scales(expected)
        bounds = self.noise.tensor_bounds(theirs, shaken, truth, scales, draws)
        for border, full in expected.items():
            rank_values = self.ours.borders.get((kind, border), [])
            if not rank_values:
                continue
            # A part may be small by chance, so its own norm would be no measure:
            # the scale of a rank's part is that of the full values, for as many elements
            element_scale = scales[border] / math.sqrt(full.numel())
            (reference,) = self.theirs.borders[kind, border]
            errors: list[float] = []
            failing: list[int] = []
            ratio = math.nan  # of the first rank that fails
            for values in rank_values:
                part = _select_part(values, reference, full)
                scale = element_scale * math.sqrt(part.numel()) or 1.0
                error = tensor_error(values.values[self.step], part, scale)
                errors.append(error)
                if not error <= bounds[border]:
                    if not failing:
                        ratio = _norm_ratio(values.values[self.step], part)
                    failing.append(values.rank)
            difference = Difference(
                kind,
                border,
                self.step + 1,
                max(errors),
                bounds[border],
                ratio,
                ranks=tuple(failing),
            )
            yield self.judge(difference)

    def judge(self, difference: Difference) -> Difference:
        """Return the difference, marked if its bound is too wide to prove anything."""
        return replace(difference, inconclusive=self.noise.why_inconclusive(difference.bound))


def _values_by_border(record: Record, kind: str, step: int) -> Tensors:
    """Return the values that one process saw by border: [samples, positions]."""
    return {
        border: values[0].values[step]
        for (border_kind, border), values in record.borders.items()
        if border_kind == kind
    }


def _select_part(values: BorderValues, reference: BorderValues, full: Tensor) -> Tensor:
    """Return the part of one process's values that this rank saw: [samples, positions].

    It is NaN if one of the rank's samples is not in the reference.
    """
    if not set(values.samples) <= set(reference.samples):
        return full.new_full((len(values.samples), len(values.positions)), torch.nan)
    columns = [reference.positions.index(position) for position in values.positions]
    return full[values.samples][:, columns]


def _compare_step(step: _StepComparison, norm: float) -> Iterator[Difference]:
    """Compare what a step computes before its update, in the order of the computation."""
    number = step.step + 1
    ours = step.ours
    theirs = step.theirs
    samples = (ours.samples[step.step], theirs.samples[step.step])
    yield _compare_exactly("sample ids", "", number, *samples)
    yield from step.borders(FORWARD)
    yield step.number("loss", "loss")
    yield from step.borders(BACKWARD)
    kind = f"gradient/{step.step}"
    backward_order = theirs.names[::-1]
    yield from step.tensors("gradient", kind, backward_order)
    yield from _compare_copies(ours, kind)
    if kind in ours.tensors and kind in theirs.tensors:
        yield from _compare_counts(step, norm)
        yield step.number("gradient norm", "grad_norm")
    our_report = ours.steps[step.step]
    their_report = theirs.steps[step.step]
    for key in ("outcome", "offenders"):
        yield _compare_exactly("found_inf", key, number, our_report[key], their_report[key])


def _compare_updates(
    ours: Record, repeated: Mapping[str, Tensors], noise: Noise, step: int
) -> Iterator[Difference]:
    """Compare weights and moments with those that one process computes from the same gradients.

    `_compare_shapes` reports those that one side lacks.
    """
    for kind, expected in repeated.items():
        if not kind.startswith(f"after/{step}/"):
            continue
        quantity = "weights" if kind.split("/")[-1] == "weight" else "moments"
        bound = noise.update_bound(quantity)
        scales = error_scales(expected)
        tensors = ours.tensors.get(kind, {})
        for name in _common_tensors(tensors, expected):
            pair = (tensors[name], expected[name])
            error = tensor_error(*pair, scales[name])
            yield Difference(
                quantity,
                name,
                step=step + 1,
                error=error,
                bound=bound,
                ratio=_norm_ratio(*pair),
                note=_describe_largest(*pair),
            )


def _norm_ratio(ours: Tensor, theirs: Tensor) -> float:
    their_norm = theirs.norm().item()
    return ours.norm().item() / their_norm if their_norm else math.nan


def _describe_largest(ours: Tensor, theirs: Tensor) -> str:
    """Return index and values of the element that differs most; empty if none differs."""
    errors = (ours - theirs).abs().nan_to_num(torch.inf)
    if not errors.numel() or not errors.max():
        return ""
    coordinates = torch.unravel_index(errors.argmax(), errors.shape)
    index = [int(coordinate) for coordinate in coordinates]
    our_value = ours[tuple(index)].item()
    their_value = theirs[tuple(index)].item()
    return f"{index}: {our_value:.6g}, {their_value:.6g}"


def _compare_counts(step: _StepComparison, norm: float) -> Iterator[Difference]:
    """Check that norm and zero count of the layout cover each element of its own gradients once,
    and in float64 that as many elements as in one process are zero other than by rounding.
    """
    kind = f"gradient/{step.step}"
    number = step.step + 1
    noise = step.noise
    report = step.ours.steps[step.step]
    ours = _without_corrections(step.ours.tensors[kind])
    theirs = _without_corrections(step.theirs.tensors[kind])

    elements = torch.cat([gradient.flatten() for gradient in ours.values()])
    expected = torch.linalg.vector_norm(elements, norm).item()
    reported = report["grad_norm"]
    error = relative_error(reported, expected)
    ratio = reported / expected if expected else math.nan
    counted_once = "each element counted once"
    yield Difference(counted_once, "norm", number, error, noise.norm_bound, ratio)

    num_zeros = int((elements == 0).sum())
    yield _compare_exactly(counted_once, "zeros", number, report["num_zeros"], num_zeros)
    if noise.truth is None and not noise.exact:
        shaken = noise.shaken.tensors[kind] if noise.shaken else None
        our_zeros = count_zeros(ours, theirs, shaken)
        their_zeros = count_zeros(theirs, theirs, shaken)
        yield _compare_exactly("zero count", "", number, our_zeros, their_zeros)


def _without_corrections(gradients: Tensors) -> Tensors:
    """Leave out the routers' corrections: their "gradients" are counts of loads."""
    return {name: tensor for name, tensor in gradients.items() if not is_correction(name)}


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is largest relative to its bound; values that must be equal come
    last."""
    conclusive = [difference for difference in differences if not difference.inconclusive]
    candidates = conclusive or differences
    measured = [
        difference
        for difference in candidates
        if difference.bound and math.isfinite(difference.error)
    ]
    return max(
        measured or candidates, key=lambda difference: difference.error / (difference.bound or 1.0)
    )
