"""The certificate of a comparison: one plain value, from which the table, the JSON file and the
page are made."""

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaprec.durable import put_text
from megaprec.errors import UserError
from megaprec.tested_versions import installed_version
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.verify.parity.borders import BACKWARD, FORWARD
from tools.verify.parity.cause import (
    PHASE_OF,
    describe_ratio,
    likely_cause,
    likely_cause_beside_oracle,
    make_case,
)
from tools.verify.parity.compare import COUNTED_ONCE, Difference, worst
from tools.verify.parity.layouts import ComparedLayout
from tools.verify.parity.noise import count_rounding_elements
from tools.verify.parity.ranks import Failure
from tools.verify.parity.record import Plan, Record

FORMAT = "megaprec parity 2"
SHOWN = 24  # number of differences of a layout that are listed
PROVEN = "proven"
WRONG = "wrong"
NOT_TRIED = "not tried"
NEEDED = ("loss", "gradient", "weights")  # quantities without which a layout is not proven
Certificate = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """A layout compared with one process, or with an oracle. run: in this layout. differences: from
    `compare` or `compare_with_oracle`."""

    layout: ComparedLayout
    precision: str
    run: RunConfig
    differences: Sequence[Difference]
    ours: Record
    theirs: Record
    is_oracle: bool = False


def entry(compared: Compared) -> dict[str, Any]:
    """Return the entry of a layout."""
    failed = [difference for difference in compared.differences if difference.fails]
    failed_quantities = {difference.quantity for difference in failed}
    quantities: dict[str, dict[str, Any]] = {}
    for quantity in PHASE_OF:
        # what a layout must show, whether compared or not, and whatever else failed
        if quantity not in ("copies", "ranks agree") or quantity in failed_quantities:
            quantities[quantity] = _quantity_fields(compared, quantity)
    verdict = _verdict(failed, quantities)
    fields = {
        **_layout_fields(compared.layout, compared.precision),
        "verdict": verdict,
        "quantities": quantities,
    }
    if verdict == PROVEN:
        # a norm added another way is another one in its last bits
        between_runs = [item for item in compared.differences if item.quantity != COUNTED_ONCE]
        fields["equal_bits"] = not any(item.error for item in between_runs)
    if verdict == NOT_TRIED:
        fields["why"] = _reasons_not_tried(quantities)
    if failed:
        fields |= _failure_fields(compared, failed)
    return fields


def _reasons_not_tried(quantities: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why quantities that a layout must show were not compared."""
    reasons: list[str] = []
    for quantity in NEEDED:
        if quantities[quantity]["verdict"] == NOT_TRIED:
            reasons.append(f"{quantity}: {quantities[quantity]['why']}")
    return "; ".join(reasons)


def _failure_fields(compared: Compared, failed: Sequence[Difference]) -> dict[str, Any]:
    """Return the fields of a layout that differs: where the difference arises, and what follows."""
    model = compared.run.model
    cause_of = likely_cause_beside_oracle if compared.is_oracle else likely_cause
    case = make_case(
        compared.differences,
        compared.ours,
        compared.theirs,
        tied="embedding.weight" if model.tied else "",
        parallel=compared.layout.parallel,
        microbatches=compared.run.num_microbatches,
        fixed=not (model.dropout or model.attention_dropout),
    )
    factors = case.factors()
    origin = case.origin
    return {
        "first": {
            "phase": origin.phase,
            "place": origin.location,
            **_difference_fields(origin.difference, factors),
        },
        "worst": _difference_fields(worst(failed), factors),
        "likely_cause": cause_of(case),
        "way": list(_stations(compared.differences, origin.step)),
        "differing": [_difference_fields(difference, factors) for difference in failed[:SHOWN]],
        "num_differing": len(failed),
    }


def _layout_fields(layout: ComparedLayout, precision: str) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "ranks": layout.ranks,
        "precision": precision,
        "left_out": list(layout.left_out),
    }


def _verdict(failed: Sequence[Difference], quantities: Mapping[str, Mapping[str, Any]]) -> str:
    if failed:
        return WRONG
    if any(quantities[quantity]["verdict"] == NOT_TRIED for quantity in NEEDED):
        return NOT_TRIED
    return PROVEN


def _quantity_fields(compared: Compared, quantity: str) -> dict[str, Any]:
    """Return the results of one quantity: numbers of compared and differing values and the worst
    one, or why none was compared.
    """
    differences = [item for item in compared.differences if item.quantity == quantity]
    if not differences:
        return {"verdict": NOT_TRIED, "why": _why_not_compared(compared, quantity)}
    # compared, but with a bound that rounding alone may reach
    inconclusive = [item for item in differences if item.inconclusive]
    num_failed = sum(item.fails for item in differences)
    if num_failed:
        verdict = WRONG
    elif len(inconclusive) == len(differences):
        verdict = NOT_TRIED
    else:
        verdict = PROVEN
    fields = {
        "verdict": verdict,
        "compared": len(differences) - len(inconclusive),
        "failed": num_failed,
        **_difference_fields(worst(differences)),
    }
    if inconclusive:
        fields |= {"untold": len(inconclusive), "why": inconclusive[0].inconclusive}
    return fields


def _why_not_compared(compared: Compared, quantity: str) -> str:
    """Return the reason why a quantity was not compared."""
    if compared.is_oracle and quantity not in NEEDED:
        return "the oracle has none"
    if quantity in (FORWARD, BACKWARD):
        return "no module with parameters is passed by a tensor [s, b, hidden]"
    if quantity == "zero count":
        return "in this precision rounding decides which elements are zero"
    if quantity == "moments" and any(item.quantity == "weights" for item in compared.differences):
        return "the optimizer keeps no averages"
    if quantity in ("weights", "moments"):
        return (
            "its gradients are not those of a whole model, so no update could be made again of them"
        )
    return "no step was applied"


def not_run(layout: ComparedLayout, precision: str, failure: Failure) -> dict[str, Any]:
    """Return the entry of a layout whose ranks did not finish: they hung or failed."""
    is_hang = bool(failure.where)
    if is_hang:
        likely_reason = (
            "ranks do not enter the same collectives in the same order: look at who waits for what"
        )
    else:
        likely_reason = "the layout cannot be trained: its ranks fail"
    first = {
        "phase": "hang" if is_hang else "failure",
        "place": "; ".join(failure.where),
        "note": failure.why,
    }
    return {
        **_layout_fields(layout, precision),
        "verdict": WRONG,
        "quantities": {},
        "first": first,
        "likely_cause": likely_reason,
        "ranks_at": list(failure.where),
    }


def not_tried(layout: ComparedLayout, precision: str, why: str) -> dict[str, Any]:
    """Return the entry of a layout that was not run."""
    return {**_layout_fields(layout, precision), "verdict": NOT_TRIED, "why": why, "quantities": {}}


def _stations(differences: Sequence[Difference], step: int) -> Iterator[dict[str, Any]]:
    """Yield the stations of one step, each border, the loss and the later quantities, and whether
    each agrees."""
    of_step: dict[str, list[Difference]] = {}
    for difference in differences:
        if difference.step != step:
            continue
        of_step.setdefault(difference.quantity, []).append(difference)
        if difference.quantity in (FORWARD, "loss", BACKWARD):
            yield _station(difference, difference.name or difference.quantity)
    for quantity in ("gradient", COUNTED_ONCE, "gradient norm", "weights", "moments"):
        of_quantity = of_step.get(quantity)
        if of_quantity:
            failed = [difference for difference in of_quantity if difference.fails]
            quantity_name = "gradients" if quantity == "gradient" else quantity
            yield _station(worst(failed or of_quantity), quantity_name)


def _station(difference: Difference, quantity_name: str) -> dict[str, Any]:
    """Return the entry of a quantity in a certificate, at one station of a step."""
    if difference.inconclusive:
        verdict = NOT_TRIED
    elif difference.fails:
        verdict = WRONG
    else:
        verdict = PROVEN
    return {
        "phase": PHASE_OF[difference.quantity],
        "name": quantity_name,
        "verdict": verdict,
        "error": _finite(difference.error),
    }


def _difference_fields(
    difference: Difference, factors: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return a difference for JSON. Infinite errors are of values that must be equal and are
    not.

    factors: by which a fault of the layout may multiply gradients, by name; the ratio is then
        described by those that it is near. None: it is not described.
    """
    fields: dict[str, Any] = {
        "quantity": difference.quantity,
        "name": difference.name,
        "step": difference.step,
        "error": _finite(difference.error),
        "bound": difference.bound,
        "ratio": _finite(difference.ratio),
    }
    if factors is not None:
        fields["ratio_looks_like"] = describe_ratio(difference.ratio, factors)
    if difference.ranks:
        fields["ranks"] = list(difference.ranks)
    if difference.note:
        fields["note"] = difference.note
    return fields


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def certificate(
    file: str,
    config: RunConfig,
    compared: RunConfig,
    changes: dict[str, tuple[Any, Any]],
    plan: Plan,
    float64_record: Record,
    shaken: Record,
    by_oracle: bool = False,
) -> Certificate:
    """Return the certificate without its layouts.

    config: the user's run. compared: the run on one process. changes: the keys that differ between
    them. float64_record: one process in float64. shaken: the same from weights moved by rounding.
    by_oracle: the layouts are compared with an oracle.
    """
    return {
        "format": FORMAT,
        "verdict": "",
        "versions": versions(),
        "configuration": {
            "file": file,
            "sha256": run_digest(config),
            "sha256_as_compared": run_digest(compared),
            "model": f"{config.model.factory or config.model.family}, {config.model.layers} layers",
        },
        "changes": {key: [toml(old), toml(new)] for key, (old, new) in changes.items()},
        "steps": plan.steps,
        "applied": len(float64_record.applied),
        "clipped": _count_clipped(compared, float64_record),
        "tensors": len(float64_record.names),
        "elements": sum(map(torch.numel, float64_record.tensors["before/weight"].values())),
        "rounding": count_rounding_elements(float64_record, shaken),
        "not_tried": [*map(list, _uncovered(config, compared, plan, by_oracle))],
        "layouts": [],
    }


def _uncovered(
    config: RunConfig, compared: RunConfig, plan: Plan, by_oracle: bool
) -> Iterator[tuple[str, str]]:
    """Yield (part, reason) of everything in the run that the comparison does not cover."""
    if by_oracle:
        yield "a skipped step", "the oracle skips none"
    elif plan.planted < 0:
        yield (
            "a skipped step",
            f'precision.on_nonfinite = "{config.precision.on_nonfinite}": none is skipped',
        )
    yield from _uncovered_sizes(config, compared)
    if compared.optimizer.clip == 0:
        yield "clipping", "optimizer.clip = 0"
    if config.plan.fp8:
        yield "products in FP8 in float64", "float64 has none; --precision configured has them"
    if config.train.device == "cuda":
        yield "GPUs and NCCL", "ranks are processes on CPUs, over gloo"


def _uncovered_sizes(config: RunConfig, compared: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (part, reason) of the batches and lengths that no compared step has."""
    steps_have = "the steps that are compared have"
    count = len(config.batches.sizes)
    tried = len(compared.batches.sizes)
    if tried < count:
        yield "other batches of train.batch_schedule", f"{steps_have} {tried} of {count}"
    count = len(config.lengths.lengths)
    tried = len(compared.lengths.lengths)
    if tried < count:
        yield "other lengths of train.seq_schedule", f"{steps_have} {tried} of {count}"


def _count_clipped(config: RunConfig, float64_record: Record) -> int:
    """Return the number of applied steps that were clipped."""
    clip = config.optimizer.clip
    return sum(
        0 < clip < float64_record.steps[step]["grad_norm"] for step in float64_record.applied
    )


def versions() -> dict[str, str]:
    """Return the versions of everything that computes."""
    return {
        "megaprec": installed_version("megaprec") or "not installed",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "byteorder": sys.byteorder,
    }


def run_digest(config: RunConfig) -> str:
    """Return the SHA-256 of every key of the run, except the paths of its files."""
    # as JSON: the digest must not depend on Python's types
    run_tables = config.model_dump(mode="json")
    for table, key in (("train", "folder"), ("data", "source"), ("data", "cache")):
        del run_tables[table][key]  # the same run in another folder is the same
    return hashlib.sha256(json.dumps(run_tables, sort_keys=True).encode()).hexdigest()


def write(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write files by name, each completely or not at all; return their paths. Raises UserError if
    that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, text in texts.items():
            # renamed when complete: a reader never sees half a file
            unfinished = folder / f"{file_name}.tmp"
            put_text(unfinished, text)
            os.replace(unfinished, folder / file_name)
    except OSError as error:
        raise UserError.of(
            "parity.certificate_not_written", folder=folder, reason=error.strerror
        ) from error
    return [folder / file_name for file_name in texts]
