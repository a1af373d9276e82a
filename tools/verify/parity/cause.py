"""The place of the first difference between two runs, and its probable cause.

A step goes forward through the modules to the loss, back through them to the gradients of weights,
and on to their norm and the update. The first difference is caused where it arises: in a module
whose input agrees and whose output does not; in a module whose output's gradient agrees and whose
input's does not; or, if all of these agree, in the handling of gradients outside of the model.

A fault in the parallel parts of training nearly always multiplies: a tensor is counted twice, a sum
over ranks is missing, a mean is divided twice. The ratio of norms and the set of tensors that
differ are therefore telling. The place is observed; its cause is a guess, and is presented as one.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tools.config.tables.settings import Parallel
from tools.verify.parity.borders import BACKWARD, FORWARD
from tools.verify.parity.compare import COUNTED_ONCE, Difference
from tools.verify.parity.record import Record

NEAR = 0.02  # relative distance within which a ratio is named as a factor

Phase = Literal[
    "model",
    "initial weights",
    "data",
    "forward",
    "loss",
    "backward",
    "gradients",
    "norm",
    "decision",
    "update",
    "copies",
]
PHASE_OF: dict[str, Phase] = {
    "tensors": "model",
    "initial weights": "initial weights",
    "sample ids": "data",
    FORWARD: "forward",
    "loss": "loss",
    BACKWARD: "backward",
    "gradient": "gradients",
    COUNTED_ONCE: "norm",
    "zero count": "norm",
    "gradient norm": "norm",
    "found_inf": "decision",
    "scaler": "decision",
    "ranks agree": "decision",
    "learning rate": "update",
    "weights": "update",
    "moments": "update",
    "copies": "copies",
}
HEAD = "head and loss"  # everything after the last module, up to the loss


@dataclass(frozen=True)
class DifferenceOrigin:
    """The place of the first difference. phase: part of a step.

    location: the module, or the tensors by pattern ("layers.*.mlp.down.bias"), "all" if they are
    nearly all. step: from 1, 0 before the first. difference: the first one.
    """

    phase: Phase
    location: str
    step: int
    difference: Difference


def origin(differences: Sequence[Difference], reference: Record) -> DifferenceOrigin:
    """Return the origin of the first failing difference that `compare` found."""
    first = next(difference for difference in differences if difference.fails)
    same_quantity = [
        difference
        for difference in differences
        if difference.step == first.step and difference.quantity == first.quantity
    ]
    phase = PHASE_OF[first.quantity]
    if phase == "forward":
        location = _locate_forward(first, same_quantity, reference)
    elif phase == "backward":
        location = _locate_backward(first, same_quantity, reference)
    elif phase == "loss":
        location = HEAD
    elif phase in ("norm", "decision", "data"):
        location = first.name
    else:
        failing = [difference.name for difference in same_quantity if difference.fails]
        location = pattern(failing, len(same_quantity))
    return DifferenceOrigin(phase, location, first.step, first)


def module_of(border_name: str) -> str:
    """Return the module of a border."""
    return border_name.rpartition(">")[0]


def _locate_forward(first: Difference, borders: Sequence[Difference], reference: Record) -> str:
    """Return the module whose output is wrong; if its input is wrong too, the place between it and
    the module before.
    """
    if ">in" not in first.name:
        return module_of(first.name)
    before = [difference.name for difference in borders[: borders.index(first)]]
    if not before:
        return module_of(first.name)
    # the border at which the same tensor was seen; otherwise the one just before
    alias = reference.aliases.get(first.name)
    previous = alias if alias in before else before[-1]
    return f"between {module_of(previous)} and {module_of(first.name)}"


def _locate_backward(first: Difference, borders: Sequence[Difference], reference: Record) -> str:
    """Return the module whose output's gradient is right and whose input's is not."""
    agreeing = {difference.name for difference in borders if not difference.fails}
    tensor = reference.aliases.get(first.name, first.name)
    consumers: list[str] = []
    for difference in borders:
        border = difference.name
        if reference.aliases.get(border, border) != tensor:
            continue  # the run on one process saw another tensor there
        # One tensor there, two in this layout: what lies between, such as a message, changed it.
        if border in agreeing:
            return f"between {module_of(first.name)} and {module_of(border)}"
        if ">in" in border and border.replace(">in", ">out") in agreeing:
            consumers.append(module_of(border))
    if consumers:
        return max(consumers, key=len)  # the innermost of nested modules
    if first is borders[0]:
        return HEAD
    return f"after {module_of(first.name)}"


def pattern(names: Sequence[str], total: int) -> str:
    """Return names as a short pattern: "all" if they are nearly all of `total`, otherwise without
    the numbers of several layers.
    """
    if total > 1 and len(names) >= 0.9 * total:
        return "all"
    names_by_pattern: dict[str, list[str]] = {}
    for name in names:
        without_number = re.sub(r"\.\d+\.", ".*.", name)
        names_by_pattern.setdefault(without_number, []).append(name)
    patterns = [
        layer_pattern if len(matching) > 1 else matching[0]
        for layer_pattern, matching in names_by_pattern.items()
    ]
    listed = ", ".join(patterns[:3])
    if len(patterns) > 3:
        return f"{listed} and {len(patterns) - 3} more"
    return listed


@dataclass(frozen=True)
class Case:
    """The differences of the first step in which anything differs; later differences only follow
    from them.

    failed: all that differs. gradient_ratios: of gradients among it, by name, in the order of a
        backward pass. num_gradients: of the model.
    replicated: tensors of which every tp rank holds all elements. tied: the tensor that is
        embedding and head, "" if there is none.
    microbatches: of a replica. fixed: True if no step draws random numbers.
    """

    origin: DifferenceOrigin
    failed: Sequence[Difference]
    gradient_ratios: Mapping[str, float]
    num_gradients: int
    replicated: frozenset[str]
    tied: str
    parallel: Parallel
    microbatches: int
    fixed: bool

    def common_ratio(self) -> float | None:
        """Return the ratio of all gradients that differ, if nearly all gradients do, and by one."""
        ratios = list(self.gradient_ratios.values())
        if len(ratios) < 0.9 * self.num_gradients or not ratios:
            return None
        median_ratio = sorted(ratios)[len(ratios) // 2]
        tolerance = NEAR * abs(median_ratio)
        num_near = sum(abs(ratio - median_ratio) <= tolerance for ratio in ratios)
        return median_ratio if num_near >= 0.9 * len(ratios) else None

    def factors(self) -> dict[str, float]:
        """Return the numbers that a gradient may be multiplied or divided by, by name."""
        parallel = self.parallel
        sizes = {
            "dp": parallel.data,
            "cp": parallel.context,
            "tp": parallel.tensor,
            "pp": parallel.pipeline,
            "micro-batches": self.microbatches,
        }
        return {name: float(size) for name, size in sizes.items() if size > 1}


def make_case(
    differences: Sequence[Difference],
    candidate: Record,
    reference: Record,
    tied: str,
    parallel: Parallel,
    microbatches: int,
    fixed: bool,
) -> Case:
    """Return the case of a layout that differs. differences: all, in order. microbatches: of a
    replica."""
    first = origin(differences, reference)
    failed: list[Difference] = []
    gradient_ratios: dict[str, float] = {}
    for difference in differences:
        if difference.fails and difference.step == first.step:
            failed.append(difference)
            if difference.quantity == "gradient":
                gradient_ratios[difference.name] = difference.ratio
    return Case(
        origin=first,
        failed=failed,
        gradient_ratios=gradient_ratios,
        num_gradients=len(reference.tensors.get(f"gradient/{first.step - 1}", {})),
        replicated=frozenset(reference.names) - candidate.tp_sliced,
        tied=tied,
        parallel=parallel,
        microbatches=microbatches,
        fixed=fixed,
    )


def near(ratio: float, expected_factor: float) -> bool:
    """Return True if a measured ratio equals this factor within NEAR."""
    return abs(ratio - expected_factor) <= NEAR * expected_factor


def describe_ratio(ratio: float, factors: Mapping[str, float]) -> str:
    """Return a ratio with the names of the factors that it resembles; empty if it is not finite."""
    if not math.isfinite(ratio):
        return ""
    candidates = [(f"1/{name}", 1 / factor) for name, factor in factors.items()]
    candidates += factors.items()
    # of what is counted twice, and of the norm of twice as many elements
    candidates += [("2", 2.0), ("1/2", 0.5), ("√2", math.sqrt(2)), ("1/√2", math.sqrt(0.5))]
    matches = [name for name, factor in candidates if near(ratio, factor)]
    if matches:
        return f"{ratio:.6g} ({', '.join(matches)})"
    return f"{ratio:.6g}"


def _layer_of(tensor_name: str) -> str | None:
    """Return the prefix of a tensor of a layer, "layers.3."; None if it belongs to none."""
    layer_match = re.match(r"layers\.\d+\.", tensor_name)
    return layer_match[0] if layer_match else None


def _missing_tensors(case: Case) -> str | None:
    """Return a cause if logical tensors are missing, incomplete or of another shape."""
    missing = [difference for difference in case.failed if difference.quantity == "tensors"]
    tensor_names = [difference.name for difference in missing]
    layers = {_layer_of(tensor_name) for tensor_name in tensor_names}
    layer_numbers = {int(layer.split(".")[1]) for layer in layers if layer}
    if layer_numbers:
        numbers = ", ".join(map(str, sorted(layer_numbers)))
        return (
            f"layer {numbers} is on no rank, or not all of it: look at how layers are dealt out to "
            "stages"
        )
    return f"{tensor_names[0]} is not held as in one process: look at its Layout"


def _without_gradient(case: Case) -> str | None:
    """Return a cause if a layer has weights but no gradient."""
    without_gradient = [
        tensor_name for tensor_name, ratio in case.gradient_ratios.items() if ratio == 0
    ]
    layers = {_layer_of(tensor_name) or tensor_name for tensor_name in without_gradient}
    if len(layers) == 1:
        return f"no gradient reaches {layers.pop()}*: the layer is left out of the computation"
    if without_gradient:
        others = f" and {len(without_gradient) - 1} more" if len(without_gradient) > 1 else ""
        return f"no gradient reaches {without_gradient[0]}{others}"
    return None


def _stale_weights(case: Case) -> str | None:
    """Return a cause if the first step's activations agree and a later step's do not, though the
    updates are right."""
    if case.origin.step > 1 and (case.fixed or case.origin.location == "embedding"):
        return (
            f"step {case.origin.step} is the first whose activations differ, and all updates "
            f"before it are right: the weights that {case.origin.location} holds are not those "
            "that the update made (rounded into place or collected late, or not at all)"
        )
    return None


def _between_modules(case: Case) -> str | None:
    """Return a cause if what one module makes agrees, and what the next is given does not."""
    module_path = case.origin.location
    if not module_path.startswith("between "):
        return None
    # two layers as such, not two modules of layers
    are_layers = re.fullmatch(r"between layers\.\d+ and layers\.\d+", module_path)
    if are_layers and case.parallel.pipeline > 1:
        return (
            f"{module_path}: the message from one pipeline stage to the next is another one's, or "
            "is changed on its way"
        )
    return f"{module_path}: the sum of the residual stream, dropout, or a scale between them"


def _divided_by_local_tokens(case: Case) -> str | None:
    """Return a cause if the loss is larger by about the number of ranks with tokens of their
    own."""
    ratio = case.origin.difference.ratio
    num_copies = case.parallel.copies
    # replicas have about as many tokens as each other, not just as many
    if num_copies > 1 and abs(ratio - num_copies) < 0.2 * num_copies:
        return (
            f"the loss is about {_name_copies(case.parallel)} times too large: each replica "
            "divides by its own tokens, not by those of all"
        )
    return None


def _name_copies(parallel: Parallel) -> str:
    if parallel.context == 1:
        return f"dp = {parallel.data}"
    return f"dp x cp = {parallel.copies}"


def _scaled_gradients(case: Case) -> str | None:
    """Return a cause if all gradients are off by one factor, from the loss on or by a sum over
    ranks."""
    ratio = case.common_ratio()
    if ratio is None:
        return None
    for factor_name, factor in case.factors().items():
        if near(ratio, 1 / factor):
            return (
                f"every gradient is 1/{factor_name}: it is averaged over {factor_name} although "
                "the loss already is a mean over all"
            )
        if near(ratio, factor):
            return (
                f"every gradient is {factor_name} times too large: the loss is divided by one "
                "rank's own tokens or samples, not by those of all, or summed over "
                f"{factor_name} once too often"
            )
    if abs(ratio - 1) < 0.5:
        return (
            "every gradient is off by one factor: the loss is divided by another number of tokens "
            "than the whole's"
        )
    return "every gradient is off by one factor: look at how the loss is scaled and divided"


def _wrong_head_gradient(case: Case) -> str | None:
    """Return a cause if the loss agrees and the gradient of the head's input does not."""
    if case.origin.location != HEAD:
        return None
    return (
        "the loss agrees, and the gradient of what the head is given does not: the backward pass "
        "of the cross entropy or of the head, whose input's gradient is to be summed over tp once, "
        "or what the loss is multiplied by"
    )


def _wrong_backward(case: Case) -> str | None:
    """Return the general cause of a gradient that first differs at a module."""
    module_path = case.origin.location
    if case.parallel.recompute != "none":
        recomputed_note = "; or what is made again for its backward pass is something else"
    else:
        recomputed_note = ""
    if module_path.startswith("after "):
        return (
            f"the first gradient that differs is of what {module_path.removeprefix('after ')} "
            "makes: what is done with that (dropout, a scale, the sum of the residual stream) goes "
            f"another way back{recomputed_note}"
        )
    return (
        f"the gradient of what {module_path} makes agrees, and of what it is given does not: in "
        "its backward pass a sum over tp is missing (the input's gradient of a column-parallel "
        f"layer), doubled or of something else{recomputed_note}"
    )


def _tied_gradient(case: Case) -> str | None:
    """Return a cause if the gradient of the tied embedding and head alone differs."""
    if not case.tied or set(case.gradient_ratios) != {case.tied}:
        return None
    return (
        f"{case.tied} is embedding and head in one: its gradient is the sum of both ends', each "
        "counted once. Here one is counted twice, or one is left out (Layout.tied, split weight "
        "gradients of shared weights)"
    )


def _unsummed_over_tp(case: Case) -> str | None:
    """Return a cause if only tensors that all tp ranks hold whole, or copies of them, differ."""
    differing = set(case.gradient_ratios)
    if case.parallel.tensor == 1 or not differing or not differing <= case.replicated:
        return None
    share = "cut along the sequence" if case.parallel.sequence else "used with its own part"
    return (
        f"only tensors that every tp rank holds whole differ, {next(iter(case.gradient_ratios))} "
        f"among them: where each tp rank saw a share ({share}) their gradients are to be summed "
        "over tp (Layout.partial), once; where each saw all, they are not, and a bias is added "
        "once, after the sum"
    )


def _single_layer(case: Case) -> str | None:
    """Return a cause if all differences are in one layer."""
    layers = {_layer_of(tensor_name) or tensor_name for tensor_name in case.gradient_ratios}
    if len(layers) == 1:
        return f"all gradients that differ are of {layers.pop()}*: look there"
    return None


def _unsummed_over_replicas(case: Case) -> str | None:
    """Return a cause if nearly all gradients differ, by different factors, though activations'
    gradients agree."""
    if case.parallel.copies > 1 and len(case.gradient_ratios) >= 0.9 * case.num_gradients > 0:
        over = "dp" if case.parallel.context == 1 else "dp and cp"
        return (
            "every activation's gradient agrees and nearly no weight's does: the sum of gradients "
            f"over {over} is missing, or micro-batches' gradients are lost on the way into it"
        )
    return None


def _lost_microbatches(case: Case) -> str | None:
    """Return a cause if most gradients are too small."""
    ratios = sorted(case.gradient_ratios.values())
    most_differ = len(ratios) >= 0.5 * case.num_gradients > 0
    if case.microbatches > 1 and most_differ and ratios[len(ratios) // 2] < 1:
        return (
            "every activation's gradient agrees and most weights' are too small, each by another "
            f"factor: of {case.microbatches} micro-batches some gradients are lost, or overwritten "
            "where they should be added"
        )
    return None


def _wrong_norm(case: Case) -> str | None:
    """Return a cause if gradients agree, but their norm or their count of zeros does not."""
    if case.origin.difference.ratio < 1:
        return (
            "gradients agree, their norm is too small: a stage, a replica's slice or a tp rank is "
            "left out of it"
        )
    if case.origin.difference.ratio > 1:
        return (
            "gradients agree, their norm is too large: tied or replicated tensors, or replicas, "
            "are counted repeatedly"
        )
    return (
        "gradients agree, their zeros are not counted once each: padding, copies or replicas are "
        "counted, or left out"
    )


# What is said if no rule applies. {place}: where the difference arises.
OTHERWISE: dict[Phase, str] = {
    "initial weights": (
        "initial weights depend on the layout: draw them by logical name and place "
        "(parallel.layers.parameter)"
    ),
    "data": (
        "the replicas do not take the samples that one process takes: look at the order and the "
        "shares of data"
    ),
    "forward": (
        "what {place} is given agrees, and what it makes does not: a sum over tp in "
        "its forward pass is missing, doubled or of something else, a bias is added by every rank, "
        "or its share of a weight is wrong"
    ),
    "loss": (
        "all activations agree and the loss does not: the head, the cross entropy over the cut "
        "vocabulary, which targets count, or the number that the loss is divided by"
    ),
    "gradients": (
        "every activation's gradient agrees, and the gradient of {place} does not: how it is made "
        "of them, added up over micro-batches, or summed over ranks"
    ),
    "decision": (
        "gradients agree, and what is decided from them does not: found_inf or the loss scaler is "
        "not the same on all ranks, or is told at another time"
    ),
    "update": (
        "gradients and their norm agree, and what the update makes of them does not: clipping, "
        "learning rate, weight decay, rounding of masters, or the slices of ZeRO differ by rank"
    ),
    "copies": "ranks that hold the same element hold different numbers: a sum over them is missing",
}

Rule = Callable[[Case], str | None]
# the more particular rules of a phase come first
RULES: dict[Phase, tuple[Rule, ...]] = {
    "model": (_missing_tensors,),
    "forward": (_without_gradient, _stale_weights, _between_modules),
    "loss": (_divided_by_local_tokens,),
    "backward": (_scaled_gradients, _wrong_head_gradient, _between_modules, _wrong_backward),
    "gradients": (
        _without_gradient,
        _tied_gradient,
        _scaled_gradients,
        _unsummed_over_tp,
        _single_layer,
        _unsummed_over_replicas,
        _lost_microbatches,
    ),
    "norm": (_wrong_norm,),
}


def likely_cause(case: Case) -> str:
    """Return the cause of the first rule of the phase that applies."""
    phase = case.origin.phase
    for rule in RULES.get(phase, ()):
        cause = rule(case)
        if cause:
            return cause
    return OTHERWISE[phase].format(place=case.origin.location)


# beside an oracle, where no activations are compared
_SHARED = (
    "if one process differs too, all layouts share it; if not, compare without --oracle, which "
    "names the module"
)
BESIDE_ORACLE: dict[str, str] = {
    "loss": (
        "the forward pass, the targets, which of them count, or the number that the loss is "
        f"divided by: {_SHARED}"
    ),
    "gradients": f"the loss agrees, and the gradient of {{place}} does not: {_SHARED}",
    "norm": f"gradients agree, and their norm does not: {_SHARED}",
    "update": (
        "gradients and their norm agree, and {place} after the update does not: clipping, learning "
        f"rate, weight decay, moments or the average of the weights: {_SHARED}"
    ),
}


def likely_cause_beside_oracle(case: Case) -> str:
    """Return the cause of a difference from an oracle."""
    phase = case.origin.phase
    text = BESIDE_ORACLE.get(phase, OTHERWISE.get(phase, _SHARED))
    return text.format(place=case.origin.location or "what differs")
