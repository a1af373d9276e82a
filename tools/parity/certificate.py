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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.parity.borders import BACKWARD, FORWARD
from tools.parity.cause import case, likely, said
from tools.parity.compare import Difference, worst
from tools.parity.first import OF
from tools.parity.gather import Record
from tools.parity.layouts import Layout
from tools.parity.noise import rounded
from tools.parity.ranks import Failure
from tools.parity.record import Plan

FORMAT = "megaprec parity 2"
SHOWN = 24  # number of differences of a layout that are listed
PROVEN = "proven"
WRONG = "wrong"
NOT_TRIED = "not tried"
# compares a layout's norm with its own gradients, added another way
WITHIN = "each element counted once"
NEEDED = ("loss", "gradient", "weights")  # quantities without which a layout is not proven
Certificate = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """A layout compared with one process. run: in this layout. found: the result of `compare`."""

    layout: Layout
    precision: str
    run: RunConfig
    found: Sequence[Difference]
    ours: Record
    theirs: Record


def entry(c: Compared) -> dict[str, Any]:
    """Return the entry of a layout."""
    failed = [d for d in c.found if d.fails]
    quantities = {
        quantity: _quantity(c, quantity)
        for quantity in OF
        if quantity not in ("copies", "ranks agree")
    }
    quantities |= {
        quantity: _quantity(c, quantity) for quantity in dict.fromkeys(d.quantity for d in failed)
    }
    made = {
        **_about(c.layout, c.precision),
        "verdict": _verdict(failed, quantities),
        "quantities": quantities,
    }
    if made["verdict"] == PROVEN:
        made["equal_bits"] = not any(d.error for d in c.found if d.quantity != WITHIN)
    if made["verdict"] == NOT_TRIED:
        made["why"] = "; ".join(
            f"{q}: {quantities[q]['why']}" for q in NEEDED if quantities[q]["verdict"] == NOT_TRIED
        )
    if failed:
        fixed = not (c.run.model.dropout or c.run.model.attention_dropout)
        tied = "embedding.weight" if c.run.model.tied else ""
        about = case(
            c.found, c.ours, c.theirs, tied, c.layout.parallel, c.run.num_microbatches, fixed
        )
        numbers = about.factors()
        first = about.origin
        made |= {
            "first": {
                "phase": first.phase,
                "place": first.place,
                **_told(first.difference, numbers),
            },
            "worst": _told(worst(failed), numbers),
            "likely_cause": likely(about),
            "way": list(_way(c.found, first.step)),
            "differing": [_told(d, numbers) for d in failed[:SHOWN]],
            "num_differing": len(failed),
        }
    return made


def _about(layout: Layout, precision: str) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "ranks": layout.ranks,
        "precision": precision,
        "left_out": list(layout.left_out),
    }


def _verdict(failed: Sequence[Difference], quantities: Mapping[str, Mapping[str, Any]]) -> str:
    if failed:
        return WRONG
    if any(quantities[q]["verdict"] == NOT_TRIED for q in NEEDED):
        return NOT_TRIED
    return PROVEN


def _quantity(c: Compared, quantity: str) -> dict[str, Any]:
    """Return the results of one quantity: numbers of compared and differing values and the worst
    one, or why none was compared.
    """
    some = [d for d in c.found if d.quantity == quantity]
    if not some:
        return {"verdict": NOT_TRIED, "why": _untold(c, quantity)}
    untold = [d for d in some if d.untold]
    failed = sum(d.fails for d in some)
    if failed:
        verdict = WRONG
    elif len(untold) == len(some):
        verdict = NOT_TRIED
    else:
        verdict = PROVEN
    made = {
        "verdict": verdict,
        "compared": len(some) - len(untold),
        "failed": failed,
        **_told(worst(some)),
    }
    if untold:
        made |= {"untold": len(untold), "why": untold[0].untold}
    return made


def _untold(c: Compared, quantity: str) -> str:
    """Return the reason why a quantity was not compared."""
    if quantity in (FORWARD, BACKWARD):
        return "no module with parameters is passed by a tensor [s, b, hidden]"
    if quantity == "zero count":
        return "in this precision rounding decides which elements are zero"
    if quantity == "moments" and any(d.quantity == "weights" for d in c.found):
        return "the optimizer keeps no averages"
    if quantity in ("weights", "moments"):
        return (
            "its gradients are not those of a whole model, so no update could be made again of them"
        )
    return "no step was applied"


def not_run(layout: Layout, precision: str, failure: Failure) -> dict[str, Any]:
    """Return the entry of a layout whose ranks did not finish: they hung, failed or were
    stopped."""
    if failure.stopped:
        return not_tried(layout, precision, failure.why)
    hangs = bool(failure.where)
    if hangs:
        cause = (
            "ranks do not enter the same collectives in the same order: look at who waits for what"
        )
    else:
        cause = "the layout cannot be trained: its ranks fail"
    first = {
        "phase": "hang" if hangs else "failure",
        "place": "; ".join(failure.where),
        "note": failure.why,
    }
    made = {
        **_about(layout, precision),
        "verdict": WRONG,
        "quantities": {},
        "first": first,
        "likely_cause": cause,
    }
    return made | {"ranks_at": list(failure.where)}


def not_tried(layout: Layout, precision: str, why: str) -> dict[str, Any]:
    """Return the entry of a layout that was not run."""
    return {**_about(layout, precision), "verdict": NOT_TRIED, "why": why, "quantities": {}}


def _way(found: Sequence[Difference], step: int) -> Iterator[dict[str, Any]]:
    """Return the stations of one step, each border, the loss and the later quantities, and whether
    each agrees."""
    some = [d for d in found if d.step == step]
    for d in some:
        if d.quantity in (FORWARD, "loss", BACKWARD):
            yield {
                "phase": OF[d.quantity],
                "name": d.name or d.quantity,
                "verdict": _of(d),
                "error": _finite(d.error),
            }
    for quantity in ("gradient", WITHIN, "gradient norm", "weights", "moments"):
        alike = [d for d in some if d.quantity == quantity]
        if alike:
            name = f"{quantity}s" if quantity == "gradient" else quantity
            top = worst([d for d in alike if d.fails] or alike)
            yield {
                "phase": OF[quantity],
                "name": name,
                "verdict": _of(top),
                "error": _finite(top.error),
            }


def _of(d: Difference) -> str:
    if d.untold:
        return NOT_TRIED
    if d.fails:
        return WRONG
    return PROVEN


def _told(d: Difference, factors: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return a difference for JSON. Infinite errors are of values that must be equal and are
    not."""
    told: dict[str, Any] = {"quantity": d.quantity, "name": d.name, "step": d.step}
    told |= {"error": _finite(d.error), "bound": d.bound, "ratio": _finite(d.ratio)}
    if factors is not None:
        told["ratio_looks_like"] = said(d.ratio, factors)
    if d.ranks:
        told["ranks"] = list(d.ranks)
    return told | ({"note": d.note} if d.note else {})


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def certificate(
    file: str,
    config: RunConfig,
    compared: RunConfig,
    changes: dict[str, tuple[Any, Any]],
    plan: Plan,
    truth: Record,
    shaken: Record,
) -> Certificate:
    """Return the certificate without its layouts.

    config: the user's run. compared: the run on one process. changes: the keys that differ between
    them. truth: one process in float64. shaken: the same from weights moved by rounding.
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
        "changes": {key: [toml(one), toml(other)] for key, (one, other) in changes.items()},
        "steps": plan.steps,
        "applied": len(truth.applied),
        "clipped": _clipped(compared, truth),
        "tensors": len(truth.names),
        "elements": sum(t.numel() for t in truth.tensors["before/weight"].values()),
        "rounding": rounded(truth, shaken),
        "not_tried": [list(one) for one in _left_aside(config, compared, plan)],
        "layouts": [],
    }


def _left_aside(config: RunConfig, compared: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (what, why) of everything in the run that the comparison does not cover."""
    if plan.planted < 0:
        yield (
            "a skipped step",
            f'precision.on_nonfinite = "{config.precision.on_nonfinite}": none is skipped',
        )
    if compared.optimizer.clip == 0:
        yield "clipping", "optimizer.clip = 0"
    if config.optimizer.validation == "after":
        yield 'optimizer.validation = "after"', 'it is compared as "before"'
    if config.plan.fp8:
        yield "products in FP8 in float64", "float64 has none; --precision configured has them"
    if config.train.device == "cuda":
        yield "GPUs and NCCL", "ranks are processes on CPUs, over gloo"


def _clipped(config: RunConfig, truth: Record) -> int:
    """Return the number of applied steps that were clipped."""
    return sum(0 < config.optimizer.clip < truth.steps[n]["grad_norm"] for n in truth.applied)


def versions() -> dict[str, str]:
    """Return the versions of everything that computes."""
    return {
        "megaprec": _version("megaprec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "byteorder": sys.byteorder,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def run_digest(config: RunConfig) -> str:
    """Return the SHA-256 of every key of the run, except the paths of its files."""
    tables = config.model_dump(mode="json")
    for table, key in (("train", "folder"), ("data", "source"), ("data", "cache")):
        del tables[table][key]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def write(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write files by name, each completely or not at all. Raises UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            unfinished = folder / f"{name}.tmp"
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, folder / name)
    except OSError as error:
        raise UserError(
            f'train.folder = "{folder}": the certificate cannot be written there ({error.strerror})'
        ) from error
    return [folder / name for name in texts]
