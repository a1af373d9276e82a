"""The probable cause of a difference: from its place, from the tensors that differ and from their
ratios.

A fault in the parallel parts of training nearly always multiplies: a tensor is counted twice, a sum
over ranks is missing, a mean is divided twice. The ratio of norms and the set of tensors are
therefore telling. The place of the first difference is observed (`first.py`); its cause is a guess,
and is presented as one.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.config.settings import Parallel
from tools.parity.compare import Difference
from tools.parity.first import HEAD, Origin, Phase, origin
from tools.parity.gather import Record

NEAR = 0.02  # relative distance within which a ratio is named as a factor


@dataclass(frozen=True)
class Case:
    """The differences of the first step in which anything differs; later differences only follow
    from them.

    failed: all that differs. differing: gradients among it, by name, with their ratio, in the order
        of a backward pass.
    whole: tensors that every tp rank holds whole. tied: the tensor that is embedding and head, ""
        if there is none.
    microbatches: of a replica. fixed: True if no step draws random numbers.
    """

    origin: Origin
    failed: Sequence[Difference]
    differing: Mapping[str, float]
    gradients: int
    whole: frozenset[str]
    tied: str
    parallel: Parallel
    microbatches: int
    fixed: bool

    def quantities(self) -> set[str]:
        return {d.quantity for d in self.failed}

    def ratio(self) -> float | None:
        """The common ratio of all gradients that differ, if nearly all have one."""
        ratios = list(self.differing.values())
        if len(ratios) < 0.9 * self.gradients or not ratios:
            return None
        middle = sorted(ratios)[len(ratios) // 2]
        alike = [r for r in ratios if abs(r - middle) <= NEAR * abs(middle)]
        return middle if len(alike) >= 0.9 * len(ratios) else None

    def factors(self) -> dict[str, float]:
        p = self.parallel
        sizes = {
            "dp": p.data,
            "cp": p.context,
            "tp": p.tensor,
            "pp": p.pipeline,
            "micro-batches": self.microbatches,
        }
        return {name: float(size) for name, size in sizes.items() if size > 1}


def case(
    found: Sequence[Difference],
    ours: Record,
    theirs: Record,
    tied: str,
    parallel: Parallel,
    m: int,
    fixed: bool,
) -> Case:
    """Return the case of a layout that differs. found: all differences, in order. m: micro-batches
    of a replica."""
    first = origin(found, theirs)
    early = [d for d in found if d.fails and d.step == first.step]
    return Case(
        first,
        early,
        {d.name: d.ratio for d in early if d.quantity == "gradient"},
        len(theirs.tensors.get(f"gradient/{first.step - 1}", {})),
        frozenset(theirs.names) - ours.cut,
        tied,
        parallel,
        m,
        fixed,
    )


def near(ratio: float, factor: float) -> bool:
    """Return True if a measured ratio equals this factor within NEAR."""
    return abs(ratio - factor) <= NEAR * factor


def said(ratio: float, factors: Mapping[str, float]) -> str:
    """Return a ratio with the name of the factor that it resembles."""
    if not math.isfinite(ratio):
        return ""
    names = [(f"1/{n}", 1 / f) for n, f in factors.items()] + [(n, f) for n, f in factors.items()]
    names += [("2", 2.0), ("1/2", 0.5), ("√2", math.sqrt(2)), ("1/√2", math.sqrt(0.5))]
    like = [name for name, factor in names if near(ratio, factor)]
    return f"{ratio:.6g}" + (f" ({', '.join(like)})" if like else "")


def _tensors(c: Case) -> str | None:
    names = [d.name for d in c.failed if d.quantity == "tensors"]
    layers = sorted({int(m[1]) for n in names if (m := re.match(r"layers\.(\d+)\.", n))})
    if layers:
        which = ", ".join(map(str, layers))
        return (
            f"layer {which} is on no rank, or not all of it: look at how layers are dealt out to "
            "stages"
        )
    return f"{names[0]} is not held as in one process: look at its Layout"


def _samples(c: Case) -> str | None:
    return (
        "the replicas do not take the samples that one process takes: look at the order and the "
        "shares of data"
    )


def _initial(c: Case) -> str | None:
    return (
        "initial weights depend on the layout: draw them by logical name and place "
        "(parallel.layers.parameter)"
    )


def _left_out(c: Case) -> str | None:
    """Return a cause if a layer has weights but no gradient."""
    silent = [name for name, ratio in c.differing.items() if ratio == 0]
    layers = {m[0] if (m := re.match(r"layers\.\d+\.", n)) else n for n in silent}
    if len(layers) == 1:
        return f"no gradient reaches {layers.pop()}*: the layer is left out of the computation"
    if silent:
        return (
            "no gradient reaches "
            f"{silent[0]}{f' and {len(silent) - 1} others' if silent[1:] else ''}"
        )
    return None


def _stale(c: Case) -> str | None:
    """Return a cause if the first step's activations agree and a later step's do not, though the
    updates are right."""
    if c.origin.step > 1 and (c.fixed or c.origin.place == "embedding"):
        return (
            f"step {c.origin.step} is the first whose activations differ, and all updates "
            "before it are right: the "
            f"weights that {c.origin.place} holds are not those that the update made (rounded "
            "into place or collected "
            "late, or not at all)"
        )
    return None


def _between(c: Case) -> str | None:
    place = c.origin.place
    if not place.startswith("between "):
        return None
    if (
        place.count("layers.") == 2
        and c.parallel.pipeline > 1
        and re.search(r"layers\.\d+ and layers\.\d+$", place)
    ):
        return (
            f"{place}: the message from one pipeline stage to the next is another one's, or is "
            "changed on its way"
        )
    return f"{place}: the sum of the residual stream, dropout, or a scale between them"


def _forward(c: Case) -> str | None:
    return (
        f"what {c.origin.place} is given agrees, and what it makes does not: a sum over tp in "
        "its forward pass is "
        "missing, doubled or of something else, a bias is added by every rank, or its share "
        "of a weight is wrong"
    )


def _tokens(c: Case) -> str | None:
    """Return a cause if the loss is larger by about the number of ranks with tokens of their
    own."""
    ratio = c.origin.difference.ratio
    dp = c.parallel.copies
    if dp > 1 and abs(ratio - dp) < 0.2 * dp:
        return (
            f"the loss is about {_of_copies(c.parallel)} times too large: each replica "
            "divides by its own tokens, not "
            "by those of all"
        )
    return None


def _of_copies(parallel: Parallel) -> str:
    if parallel.context == 1:
        return f"dp = {parallel.data}"
    return f"dp x cp = {parallel.copies}"


def _loss(c: Case) -> str | None:
    return (
        "all activations agree and the loss does not: the head, the cross entropy over the "
        "cut vocabulary, which "
        "targets count, or the number that the loss is divided by"
    )


def _scaled(c: Case) -> str | None:
    """Return a cause if all gradients are off by one factor, from the loss on or by a sum over
    ranks."""
    ratio = c.ratio()
    if ratio is None:
        return None
    for name, size in c.factors().items():
        if near(ratio, 1 / size):
            return (
                f"every gradient is 1/{name}: it is averaged over {name} although the loss "
                "already is a mean over all"
            )
        if near(ratio, size):
            return (
                f"every gradient is {name} times too large: the loss is divided by one rank's "
                "own tokens or samples, "
                f"not by those of all, or summed over {name} once too often"
            )
    if abs(ratio - 1) < 0.5:
        return (
            "every gradient is off by one factor: the loss is divided by another number of "
            "tokens than the whole's"
        )
    return "every gradient is off by one factor: look at how the loss is scaled and divided"


def _from_loss(c: Case) -> str | None:
    if c.origin.place != HEAD:
        return None
    return (
        "the loss agrees, and the gradient of what the head is given does not: the backward "
        "pass of the cross entropy "
        "or of the head, whose input's gradient is to be summed over tp once, or what the "
        "loss is multiplied by"
    )


def _backward(c: Case) -> str | None:
    place = c.origin.place
    if c.parallel.recompute != "none":
        again = "; or what is made again for its backward pass is something else"
    else:
        again = ""
    if place.startswith("after "):
        return (
            f"the first gradient that differs is of what {place.removeprefix('after ')} "
            "makes: what is done with that "
            f"(dropout, a scale, the sum of the residual stream) goes another way back{again}"
        )
    return (
        f"the gradient of what {place} makes agrees, and of what it is given does not: in its "
        "backward pass a "
        "sum over tp is missing (the input's gradient of a column-parallel layer), doubled "
        f"or of something else{again}"
    )


def _tied(c: Case) -> str | None:
    if not c.tied or set(c.differing) != {c.tied}:
        return None
    return (
        f"{c.tied} is embedding and head in one: its gradient is the sum of both ends', each "
        "counted once. Here one is "
        "counted twice, or one is left out (Layout.tied, split weight gradients of shared weights)"
    )


def _shares(c: Case) -> str | None:
    """Return a cause if only tensors that all tp ranks hold whole, or copies of them, differ."""
    if c.parallel.tensor == 1 or not c.differing or not set(c.differing) <= c.whole:
        return None
    share = "cut along the sequence" if c.parallel.sequence else "used with its own part"
    return (
        f"only tensors that every tp rank holds whole differ, {next(iter(c.differing))} among "
        "them: where each tp rank "
        f"saw a share ({share}) their gradients are to be summed over tp (Layout.partial), "
        "once; where each saw all, "
        "they are not, and a bias is added once, after the sum"
    )


def _layer(c: Case) -> str | None:
    """Return a cause if all differences are in one layer."""
    layers = {m[0] if (m := re.match(r"layers\.\d+\.", n)) else n for n in c.differing}
    if len(layers) == 1:
        return f"all gradients that differ are of {layers.pop()}*: look there"
    return None


def _unsummed(c: Case) -> str | None:
    """Return a cause if nearly all gradients differ, by different factors, though activations'
    gradients agree."""
    if c.parallel.copies > 1 and len(c.differing) >= 0.9 * c.gradients > 0:
        over = "dp" if c.parallel.context == 1 else "dp and cp"
        return (
            "every activation's gradient agrees and nearly no weight's does: the sum of "
            f"gradients over {over} is "
            "missing, or micro-batches' gradients are lost on the way into it"
        )
    return None


def _accumulated(c: Case) -> str | None:
    ratios = sorted(c.differing.values())
    if c.microbatches > 1 and len(ratios) >= 0.5 * c.gradients > 0 and ratios[len(ratios) // 2] < 1:
        return (
            "every activation's gradient agrees and most weights' are too small, each by "
            "another factor: of "
            f"{c.microbatches} micro-batches some gradients are lost, or overwritten where "
            "they should be added"
        )
    return None


def _gradients(c: Case) -> str | None:
    return (
        f"every activation's gradient agrees, and the gradient of {c.origin.place} does not: "
        "how it is made of them, "
        "added up over micro-batches, or summed over ranks"
    )


def _norm(c: Case) -> str | None:
    """Return a cause if gradients agree, but their norm or their count of zeros does not."""
    if c.origin.difference.ratio < 1:
        return (
            "gradients agree, their norm is too small: a stage, a replica's slice or a tp rank "
            "is left out of it"
        )
    if c.origin.difference.ratio > 1:
        return (
            "gradients agree, their norm is too large: tied or replicated tensors, or replicas, "
            "are counted repeatedly"
        )
    return (
        "gradients agree, their zeros are not counted once each: padding, copies or replicas are "
        "counted, or left out"
    )


def _decision(c: Case) -> str | None:
    return (
        "gradients agree, and what is decided from them does not: found_inf or the loss "
        "scaler is not the same on all "
        "ranks, or is told at another time"
    )


def _update(c: Case) -> str | None:
    return (
        "gradients and their norm agree, and what the update makes of them does not: "
        "clipping, learning rate, weight "
        "decay, rounding of masters, or the slices of ZeRO differ by rank"
    )


def _copies(c: Case) -> str | None:
    return "ranks that hold the same element hold different numbers: a sum over them is missing"


Rule = Callable[[Case], str | None]
RULES: dict[Phase, tuple[Rule, ...]] = {
    "model": (_tensors,),
    "initial weights": (_initial,),
    "data": (_samples,),
    "forward": (_left_out, _stale, _between, _forward),
    "loss": (_tokens, _loss),
    "backward": (_scaled, _from_loss, _between, _backward),
    "gradients": (_left_out, _tied, _scaled, _shares, _layer, _unsummed, _accumulated, _gradients),
    "norm": (_norm,),
    "decision": (_decision,),
    "update": (_update,),
    "copies": (_copies,),
}


def likely(c: Case) -> str:
    """Return the cause of the first rule of the phase that applies."""
    return next(text for rule in RULES[c.origin.phase] if (text := rule(c)))
