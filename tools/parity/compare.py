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
from tools.parity.borders import BACKWARD, FORWARD, Notes
from tools.parity.gather import Record, Tensors
from tools.parity.noise import Noise, apart, error, scales, zeros

EXACT = 0.0


@dataclass(frozen=True)
class Difference:
    """The comparison of one number or tensor of one step (from 1; 0: before the first) in two runs.

    error: relative. ratio: ours over theirs, of the norms or the numbers; NaN where there is none.
    ranks: that it was seen on, if not on all. untold: reason why the comparison proves nothing,
    however small the error is.
    """

    quantity: str
    name: str
    step: int
    error: float
    bound: float
    ratio: float = math.nan
    note: str = ""
    ranks: tuple[int, ...] = ()
    untold: str = ""

    @property
    def fails(self) -> bool:
        return not self.untold and not self.error <= self.bound


def compare(
    ours: Record,
    theirs: Record,
    noise: Noise,
    norm: float = 2.0,
    again: Mapping[str, Tensors] | None = None,
) -> list[Difference]:
    """Return all comparisons of a layout with one process, in the order of a step.

    norm: order of the runs' gradient norm. again: the updates repeated from the gradients of `ours`
        (`again.updates`).
    """
    found = [*_names(ours, theirs), *_initial(ours, theirs), *_copies(ours, "before/")]
    for step in range(min(len(ours.steps), len(theirs.steps))):
        found += _of_step(_Step(ours, theirs, noise, step), norm)
        found += _updated(ours, again or {}, noise, step)
        found += _copies(ours, f"after/{step}/")
        found.append(
            _exact("scaler", "", step + 1, ours.steps[step]["scaler"], theirs.steps[step]["scaler"])
        )
        found += [
            Difference("ranks agree", what, n, math.inf, EXACT)
            for n, what in ours.torn
            if n == step + 1
        ]
    return found


def _exact(quantity: str, name: str, step: int, ours: object, theirs: object) -> Difference:
    same = str(ours) == str(theirs)  # as text: NaN is NaN
    return Difference(
        quantity,
        name,
        step,
        0.0 if same else math.inf,
        EXACT,
        note="" if same else f"{ours}, {theirs}",
    )


def _names(ours: Record, theirs: Record) -> Iterator[Difference]:
    """Compare the sets of logical tensors: each is present, complete and of the same shape, and
    there are no others."""
    mine, yours = (record.tensors["before/weight"] for record in (ours, theirs))
    for name in dict.fromkeys([*yours, *mine]):
        shapes = [tuple(some[name].shape) if name in some else "missing" for some in (mine, yours)]
        yield _exact("tensors", name, 0, *shapes)
        if shapes[0] == shapes[1] and (lacking := int(mine[name].isnan().sum())):
            yield Difference(
                "tensors", name, 0, math.inf, EXACT, note=f"no rank holds {lacking} of its elements"
            )


def _initial(ours: Record, theirs: Record) -> Iterator[Difference]:
    mine, yours = (record.tensors["before/weight"] for record in (ours, theirs))
    for name, t in yours.items():
        if name in mine and mine[name].shape == t.shape:
            far = error(mine[name], t, scales({name: t})[name])
            yield Difference(
                "initial weights", name, 0, far, EXACT, _ratio(mine[name], t), _where(mine[name], t)
            )


def _copies(ours: Record, begins: str) -> Iterator[Difference]:
    """Compare the copies that ranks hold of tensors of these kinds."""
    for kind, name in ours.apart:
        if kind.startswith(begins):
            when, step, *_ = kind.split("/")
            said = f"{when if when == 'gradient' else kind.split('/')[-1]} differs between ranks"
            yield Difference(
                "copies", name, 0 if when == "before" else int(step) + 1, math.inf, EXACT, note=said
            )


@dataclass(frozen=True)
class _Step:
    """One step (from 0) of two runs."""

    ours: Record
    theirs: Record
    noise: Noise
    step: int

    def number(self, quantity: str, key: str) -> Difference:
        """Compare a number that both runs report."""
        one, other = (record.steps[self.step][key] for record in (self.ours, self.theirs))
        shaken, truth = (
            r.steps[self.step][key] if r else None for r in (self.noise.shaken, self.noise.truth)
        )
        far = apart(one, other if truth is None else truth)
        moved = [record.steps[self.step][key] for record in self.noise.moved]
        bound = self.noise.of_number(other, shaken, truth, moved)
        return self.judged(
            Difference(quantity, "", self.step + 1, far, bound, one / other if other else math.nan)
        )

    def tensors(self, quantity: str, kind: str, names: Sequence[str]) -> Iterator[Difference]:
        """Compare the tensors of a kind, in the order of `names`; `_names` reports those that one
        side lacks."""
        some = (self.ours, self.theirs, self.noise.shaken, self.noise.truth)
        ours, theirs, shaken, truth = (r.tensors.get(kind) if r else None for r in some)
        if ours is None or theirs is None:
            return
        against = truth or theirs
        scale = scales(against)
        bounds = self.noise.of_tensors(
            theirs, shaken, truth, scale, [r.tensors[kind] for r in self.noise.moved]
        )
        for name in (
            n for n in names if n in ours and n in theirs and ours[n].shape == theirs[n].shape
        ):
            one = ours[name]
            other = theirs[name]
            far = error(one, against[name], scale[name])
            note = _where(one, other)
            yield self.judged(
                Difference(
                    quantity, name, self.step + 1, far, bounds[name], _ratio(one, other), note
                )
            )

    def borders(self, kind: str) -> Iterator[Difference]:
        """Compare the values of every rank at each common border, in the order in which the one
        process passed them."""
        some = (self.theirs, self.noise.shaken, self.noise.truth)
        theirs, shaken, truth = (_seen(r, kind, self.step) if r else None for r in some)
        assert theirs is not None
        against = truth or theirs
        scale = scales(against)
        moved = [_seen(record, kind, self.step) for record in self.noise.moved]
        bounds = self.noise.of_tensors(theirs, shaken, truth, scale, moved)
        for border, whole in against.items():
            (other,) = self.theirs.borders[kind, border]
            fragments = [
                (some, _part(some, other, whole))
                for some in self.ours.borders.get((kind, border), [])
            ]
            if not fragments:
                continue
            rest = scale[border] / math.sqrt(whole.numel())
            far = {
                n.rank: error(n.values[self.step], t, rest * math.sqrt(t.numel()) or 1.0)
                for n, t in fragments
            }
            bad = tuple(rank for rank, e in far.items() if not e <= bounds[border])
            ratios = [_ratio(n.values[self.step], t) for n, t in fragments if n.rank in bad]
            top = max(far.values())
            ratio = ratios[0] if ratios else math.nan
            yield self.judged(
                Difference(kind, border, self.step + 1, top, bounds[border], ratio, ranks=bad)
            )

    def judged(self, d: Difference) -> Difference:
        """Return `d`, marked if its bound is too wide to prove anything."""
        return replace(d, untold=self.noise.untold(d.bound))


def _seen(record: Record, kind: str, step: int) -> Tensors:
    """Return the values that one process saw by border: [samples, positions]."""
    return {
        border: some[0].values[step] for (k, border), some in record.borders.items() if k == kind
    }


def _part(some: Notes, other: Notes, whole: Tensor) -> Tensor:
    """Return the part of one process's values that this rank saw; NaN for a sample that is not
    there."""
    if not set(some.samples) <= set(other.samples):
        return whole.new_full((len(some.samples), len(some.positions)), torch.nan)
    return whole[some.samples][:, [other.positions.index(p) for p in some.positions]]


def _of_step(s: _Step, norm: float) -> Iterator[Difference]:
    one = s.ours.steps[s.step]
    other = s.theirs.steps[s.step]
    yield _exact("sample ids", "", s.step + 1, s.ours.samples[s.step], s.theirs.samples[s.step])
    yield from s.borders(FORWARD)
    yield s.number("loss", "loss")
    yield from s.borders(BACKWARD)
    kind = f"gradient/{s.step}"
    both = kind in s.ours.tensors and kind in s.theirs.tensors
    yield from s.tensors("gradient", kind, s.theirs.names[::-1])  # as a backward pass makes them
    yield from _copies(s.ours, kind)
    if both:
        yield from _counted(s, norm)
        yield s.number("gradient norm", "grad_norm")
    for key in ("outcome", "offenders"):
        yield _exact("found_inf", key, s.step + 1, one[key], other[key])


def _updated(
    ours: Record, again: Mapping[str, Tensors], noise: Noise, step: int
) -> Iterator[Difference]:
    """Compare weights and moments with those that one process computes from the same gradients.

    `_names` reports those that one side lacks.
    """
    for kind in (k for k in again if k.startswith(f"after/{step}/")):
        what = kind.split("/")[-1]
        quantity = "weights" if what == "weight" else "moments"
        bound = noise.of_update(quantity)
        scale = scales(again[kind])
        mine = ours.tensors.get(kind, {})
        for name, t in again[kind].items():
            if name in mine and mine[name].shape == t.shape:
                far = error(mine[name], t, scale[name])
                ratio = _ratio(mine[name], t)
                yield Difference(quantity, name, step + 1, far, bound, ratio, _where(mine[name], t))


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    size = theirs.norm().item()
    return ours.norm().item() / size if size else math.nan


def _where(ours: Tensor, theirs: Tensor) -> str:
    """Return the element that differs most."""
    apart = (ours - theirs).abs().nan_to_num(torch.inf)
    if not apart.numel() or not apart.max():
        return ""
    place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
    return f"{place}: {ours[tuple(place)].item():.6g}, {theirs[tuple(place)].item():.6g}"


def _counted(s: _Step, norm: float) -> Iterator[Difference]:
    """Check that norm and zero count of the layout cover each element of its own gradients once,
    and in float64 that as many elements as in one process are zero other than by rounding.
    """
    kind = f"gradient/{s.step}"
    report = s.ours.steps[s.step]
    step = s.step + 1
    mine = s.ours.tensors[kind]
    yours = s.theirs.tensors[kind]
    mine, yours = (
        {name: t for name, t in some.items() if not is_correction(name)} for some in (mine, yours)
    )
    whole = torch.cat([t.flatten() for t in mine.values()])
    own = torch.linalg.vector_norm(whole, norm).item()
    size = report["grad_norm"]
    ratio = size / own if own else math.nan
    yield Difference(
        "each element counted once", "norm", step, apart(size, own), s.noise.of_norm, ratio
    )
    yield _exact(
        "each element counted once", "zeros", step, report["num_zeros"], int((whole == 0).sum())
    )
    if s.noise.truth is None and not s.noise.exact:
        shaken = s.noise.shaken.tensors[kind] if s.noise.shaken else None
        yield _exact(
            "zero count", "", step, *(zeros(some, yours, shaken) for some in (mine, yours))
        )


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is largest relative to its bound; values that must be equal come
    last."""
    told = [d for d in differences if not d.untold] or differences
    measured = [d for d in told if d.bound and math.isfinite(d.error)]
    return max(measured or told, key=lambda d: d.error / (d.bound or 1.0))
