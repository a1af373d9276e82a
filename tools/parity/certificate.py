"""What is left of a comparison: one plain value, from which the table, the JSON file and the page are drawn."""

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from tools.parity.cause import Case, case, likely, said
from tools.parity.compare import Difference, meant, worst
from tools.parity.gather import Record
from tools.parity.layouts import Layout
from tools.run import RunConfig
from tools.toml import toml

FORMAT = "megaprec parity 1"
SHOWN = 24  # of all that differs in a layout, the first
Certificate = dict[str, Any]


def entry(
    layout: Layout, precision: str, config: RunConfig, found: Sequence[Difference], ours: Record, theirs: Record
) -> dict[str, Any]:
    """What a layout came to. config: the run in this layout."""
    failed = [d for d in found if d.fails]
    about = {"layout": layout.name, "ranks": layout.ranks, "precision": precision, "left_out": list(layout.left_out)}
    quantities = {}
    for quantity in dict.fromkeys(d.quantity for d in found):
        some = [d for d in found if d.quantity == quantity]
        top = worst(some)
        quantities[quantity] = {"compared": len(some), "failed": sum(d.fails for d in some), **_told(top)}
    made = {**about, "verdict": "same" if not failed else "different", "quantities": quantities}
    if failed:
        tied = _tied(config)
        c = case(failed, ours, theirs, tied, layout.parallel, config.num_microbatches)
        numbers = c.factors()
        made |= {
            "first": _told(failed[0], numbers),
            "worst": _told(worst(failed), numbers),
            "likely_cause": likely(c),
            "differing": [_told(d, numbers) for d in failed[:SHOWN]],
            "num_differing": len(failed),
        }
    return made


def not_run(layout: Layout, precision: str, code: int) -> dict[str, Any]:
    """The entry of a layout whose ranks did not finish."""
    return {
        "layout": layout.name,
        "ranks": layout.ranks,
        "precision": precision,
        "verdict": "did not run",
        "likely_cause": f"its ranks, or those of a layout before it, ended with code {code}: see above",
        "quantities": {},
    }


def _tied(config: RunConfig) -> str:
    return "embedding.weight" if config.model.tied else ""


def _told(d: Difference, factors: Case | dict[str, float] | None = None) -> dict[str, Any]:
    """A difference in JSON. Infinite errors are of things that must be equal and are not."""
    told: dict[str, Any] = {"quantity": d.quantity, "name": d.name, "step": d.step}
    told |= {"error": _finite(d.error), "bound": d.bound, "ratio": _finite(d.ratio)}
    if isinstance(factors, dict):
        told["ratio_looks_like"] = said(d.ratio, factors)
    return told | ({"note": d.note} if d.note else {})


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def certificate(
    file: str, config: RunConfig, compared: RunConfig, changes: dict[str, tuple[Any, Any]], steps: int, truth: Record
) -> Certificate:
    """All but the layouts. config: the user's run. compared: on one process, as it was run; changes: between them.

    truth: one process in float64.
    """
    return {
        "format": FORMAT,
        "verdict": "",
        "versions": {
            "megaprec": _version("megaprec"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "byteorder": sys.byteorder,
        },
        "configuration": {
            "file": file,
            "sha256": _digest(config),
            "sha256_as_compared": _digest(compared),
            "model": f"{config.model.factory or config.model.family}, {config.model.layers} layers",
        },
        "changes": {key: [toml(one), toml(other)] for key, (one, other) in changes.items()},
        "steps": steps,
        "applied": len(truth.applied),
        "clipped": _clipped(compared, truth),
        "tensors": len(truth.names),
        "elements": sum(t.numel() for t in truth.tensors["before/weight"].values()),
        "not_compared": {name: n for name, mask in meant(truth).items() if (n := int((~mask).sum()))},
        "layouts": [],
    }


def _clipped(config: RunConfig, truth: Record) -> int:
    """How many applied steps were."""
    return sum(0 < config.optimizer.clip < truth.steps[n]["grad_norm"] for n in truth.applied)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _digest(config: RunConfig) -> str:
    """Of every key of the run; where its files lie is no part of it."""
    tables = config.model_dump(mode="json")
    for table, key in (("train", "folder"), ("data", "source"), ("data", "cache")):
        del tables[table][key]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def write(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Writes files, by name; each is whole or as before. Raises UserError if it cannot."""
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
