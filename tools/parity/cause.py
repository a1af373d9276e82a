"""What has probably gone wrong, told from which tensors differ and by which ratio.

A fault in the parallel parts of training nearly always multiplies: a tensor is counted twice, a sum over ranks is
missing, a mean is taken of what was a mean already. So the ratio of norms and the set of tensors say a lot. These are
guesses, and are said as such.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.parity.compare import Difference
from tools.parity.gather import Record
from tools.settings import Parallel

NEAR = 0.02  # how near a ratio must be to a factor to be called by its name


@dataclass(frozen=True)
class Case:
    """What the rules look at, of the first step in which anything differs: later ones only follow from it.

    failed: all that differs. differing: the gradients among it, by name, with their ratio, as a backward pass goes.
    whole: tensors of which every tp rank holds all. tied: the tensor that is embedding and head, "" if none is.
    """

    failed: Sequence[Difference]
    differing: Mapping[str, float]
    gradients: int
    whole: frozenset[str]
    tied: str
    parallel: Parallel
    microbatches: int

    def quantities(self) -> set[str]:
        return {d.quantity for d in self.failed}

    def everywhere(self) -> float | None:
        """The one ratio of all gradients that differ, if nearly all do."""
        ratios = list(self.differing.values())
        if len(ratios) < 0.9 * self.gradients or not ratios:
            return None
        middle = sorted(ratios)[len(ratios) // 2]
        alike = [r for r in ratios if abs(r - middle) <= NEAR * abs(middle)]
        return middle if len(alike) >= 0.9 * len(ratios) else None

    def factors(self) -> dict[str, float]:
        p = self.parallel
        sizes = {"dp": p.data, "tp": p.tensor, "pp": p.pipeline, "micro-batches": self.microbatches}
        return {name: float(size) for name, size in sizes.items() if size > 1}


def case(failed: Sequence[Difference], ours: Record, theirs: Record, tied: str, parallel: Parallel, m: int) -> Case:
    """Of a layout that failed, in order. m: micro-batches of a replica."""
    step = failed[0].step
    early = [d for d in failed if d.step == step]
    return Case(
        early,
        {d.name: d.ratio for d in early if d.quantity == "gradient"},
        len(theirs.tensors.get(f"gradient/{step - 1}", {})),
        frozenset(theirs.names) - ours.cut,
        tied,
        parallel,
        m,
    )


def near(ratio: float, factor: float) -> bool:
    """Whether a measured ratio can be called this factor."""
    return abs(ratio - factor) <= NEAR * factor


def said(ratio: float, factors: Mapping[str, float]) -> str:
    """A ratio, with the name of what it looks like."""
    if not math.isfinite(ratio):
        return ""
    names = [(f"1/{n}", 1 / f) for n, f in factors.items()] + [(n, f) for n, f in factors.items()]
    names += [("2", 2.0), ("1/2", 0.5), ("√2", math.sqrt(2)), ("1/√2", math.sqrt(0.5))]
    like = [name for name, factor in names if near(ratio, factor)]
    return f"{ratio:.6g}" + (f" ({', '.join(like)})" if like else "")


def _tensors(c: Case) -> str | None:
    if "tensors" not in c.quantities():
        return None
    names = [d.name for d in c.failed if d.quantity == "tensors"]
    layers = sorted({int(m[1]) for n in names if (m := re.match(r"layers\.(\d+)\.", n))})
    if layers:
        which = ", ".join(map(str, layers))
        return f"layer {which} is on no rank, or not all of it: look at how layers are dealt out to stages"
    return f"{names[0]} is not held as in one process: look at its Layout"


def _samples(c: Case) -> str | None:
    if "sample ids" in c.quantities():
        return "the replicas do not take the samples that one process takes: look at the order and the shares of data"
    return None


def _initial(c: Case) -> str | None:
    if "initial weights" in c.quantities():
        return "initial weights depend on the layout: draw them by logical name and place (parallel.layers.parameter)"
    return None


def _no_gradient(c: Case) -> str | None:
    silent = [name for name, ratio in c.differing.items() if ratio == 0]
    if not silent:
        return None
    layers = {m[0] for n in silent if (m := re.match(r"layers\.\d+\.", n))}
    if len(layers) == 1:
        return f"no gradient reaches {layers.pop()}*: the layer is left out of the computation"
    return f"no gradient reaches {silent[0]}{f' and {len(silent) - 1} others' if silent[1:] else ''}"


def _tied(c: Case) -> str | None:
    if not c.tied or set(c.differing) != {c.tied}:
        return None
    return (
        f"{c.tied} is embedding and head in one: its gradient is the sum of both ends', each counted once. Here one is "
        "counted twice, or one is left out (Layout.tied, split weight gradients of shared weights)"
    )


def _everywhere(c: Case) -> str | None:
    ratio = c.everywhere()
    if ratio is None:
        return None
    for name, size in c.factors().items():
        if near(ratio, 1 / size):
            return (
                f"every gradient is 1/{name}: it is averaged over {name} although the loss already is a mean over all"
            )
        if near(ratio, size):
            return (
                f"every gradient is {name} times too large: the loss is divided by one rank's own tokens or samples, "
                f"not by those of all, or summed over {name} once too often"
            )
    if abs(ratio - 1) < 0.5:
        return "every gradient is off by one factor: the loss is divided by another number of tokens than the whole's"
    return "every gradient is off by one factor: look at how the loss is scaled and divided"


def _tokens(c: Case) -> str | None:
    """The loss itself is larger by about the number of replicas."""
    ratios = [d.ratio for d in c.failed if d.quantity == "loss"]
    dp = c.parallel.data
    if dp > 1 and ratios and abs(ratios[0] - dp) < 0.2 * dp:
        return (
            f"the loss is about dp = {dp} times too large: each replica divides by its own tokens, not by those of all"
        )
    return None


def _shares(c: Case) -> str | None:
    """Only tensors that all tp ranks hold whole, or copies of them, differ."""
    if c.parallel.tensor == 1 or not c.differing or not set(c.differing) <= c.whole:
        return None
    share = "cut along the sequence" if c.parallel.sequence else "used with its own part"
    return (
        f"only tensors that every tp rank holds whole differ, {next(iter(c.differing))} among them: where each tp rank "
        f"saw a share ({share}) their gradients are to be summed over tp (Layout.partial); where each saw all, a bias "
        "is to be added once, after the sum"
    )


def _layer(c: Case) -> str | None:
    """All that differ lie in one layer."""
    layers = {m[0] if (m := re.match(r"layers\.\d+\.", n)) else n for n in c.differing}
    return f"all gradients that differ are of {layers.pop()}*: look there" if len(layers) == 1 else None


def _norm(c: Case) -> str | None:
    """Gradients are right, and the norm of them is not."""
    wrong = [d for d in c.failed if d.quantity in ("each element counted once", "gradient norm")]
    if c.differing or not wrong:
        return None
    if wrong[0].ratio < 1:
        return "gradients agree, their norm is too small: a stage, a replica's slice or a tp rank is left out of it"
    return "gradients agree, their norm is too large: tied or replicated tensors, or replicas, are counted repeatedly"


def _accumulated(c: Case) -> str | None:
    if c.microbatches > 1 and len(c.differing) >= 0.5 * c.gradients > 0 and "loss" not in c.quantities():
        ratios = sorted(c.differing.values())
        if ratios[len(ratios) // 2] < 1:
            return (
                f"the loss agrees and most gradients are too small, each by another factor: of {c.microbatches} "
                "micro-batches some gradients are lost, or overwritten where they should be added"
            )
    return None


def _forward(c: Case) -> str | None:
    if "loss" in c.quantities():
        return "the loss differs, so the forward pass does: a missing or doubled sum over tp, dropout, a lost layer"
    return None


def _backward(c: Case) -> str | None:
    if c.differing:
        first = next(iter(c.differing))
        return (
            f"the loss agrees, so the backward pass is wrong; on its way from the end {first} is the first that differs"
        )
    return None


def _update(c: Case) -> str | None:
    if c.quantities() & {"weights", "moments"}:
        return "gradients agree and weights do not: clipping, the learning rate or the slices of ZeRO differ by rank"
    return None


def _copies(c: Case) -> str | None:
    if "copies" in c.quantities():
        return "ranks that hold the same element hold different numbers: a sum over them is missing"
    return None


RULES: tuple[Callable[[Case], str | None], ...] = (
    _samples,
    _tensors,
    _initial,
    _no_gradient,
    _tied,
    _tokens,
    _everywhere,
    _shares,
    _layer,
    _norm,
    _accumulated,
    _forward,
    _backward,
    _update,
    _copies,
)


def likely(c: Case) -> str:
    """The first rule that has something to say."""
    return next((text for rule in RULES if (text := rule(c))), "none of the causes that are known here")
