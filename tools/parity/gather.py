"""Assembling the ranks' files of one layout: full logical tensors, and where ranks
disagree."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from megaprec.optim.step_report import SKIPPED
from tools.parity.borders import BACKWARD, FORWARD, Border, BorderValues

Tensors = dict[str, Tensor]  # float64, by logical name
BorderTable = dict[Border, list[BorderValues]]  # the values of each rank
RankReport = dict[str, Any]  # a rank's JSON file


@dataclass(frozen=True)
class Record:
    """The record of one layout. steps: a report per step. samples: ids of each step's batch,
    replica after replica.

    names: logical tensors in the model's order. tensors: by kind, then by name; an element that no
        rank holds is NaN.
    copy_conflicts: (kind, name) of tensors of which two ranks hold the same element with different
        bits.
    tp_sliced: tensors of which tp ranks hold different slices.
    rank_conflicts: (step from 1, quantity) of numbers and samples on which ranks disagree.
    borders: values of each rank at each border, by (kind, border).
    aliases: by border, the earlier border at which the same tensor was seen.
    """

    steps: list[dict[str, Any]]
    samples: list[list[int]]
    names: list[str]
    tensors: dict[str, Tensors]
    copy_conflicts: list[tuple[str, str]] = field(default_factory=list)
    tp_sliced: frozenset[str] = frozenset()
    rank_conflicts: list[tuple[int, str]] = field(default_factory=list)
    borders: BorderTable = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def applied(self) -> list[int]:
        """Numbers of the steps, from 0, that changed the weights."""
        return [i for i, step in enumerate(self.steps) if step["outcome"] not in SKIPPED]


class _Assembly(NamedTuple):
    """Full logical tensors by kind, and the (kind, name) of those whose copies differ."""

    tensors: dict[str, Tensors]
    copy_conflicts: list[tuple[str, str]]


def gather(folder: Path) -> Record:
    """Read the files that `record` has written to `folder`."""
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    reports: list[RankReport] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    values = [load_file(path.with_suffix(".safetensors")) for path in paths]
    # files are sorted by rank: where ranks disagree, the first one counts
    assembly = _assemble_tensors(zip(reports, values, strict=True))

    names: dict[str, None] = {}  # in order, each once
    tp_sliced: set[str] = set()
    aliases: dict[str, str] = {}
    for report in reports:
        names.update(dict.fromkeys(report["names"]))
        tp_sliced.update(part["name"] for part in report["fragments"] if part["cut"])
        aliases.update({border: first for border, first in report["passed"].items() if first})

    return Record(
        steps=reports[0]["steps"],
        samples=_order_batches(reports),
        names=list(names),
        tensors=assembly.tensors,
        copy_conflicts=assembly.copy_conflicts,
        tp_sliced=frozenset(tp_sliced),
        rank_conflicts=_find_rank_conflicts(reports),
        borders=_read_borders(reports, values),
        aliases=aliases,
    )


def _read_borders(reports: Sequence[RankReport], values: Sequence[Tensors]) -> BorderTable:
    """Return the values of each rank in the order in which borders were passed, shared by all
    borders of one tensor."""
    table: BorderTable = {}
    for rank, (report, tensors) in enumerate(zip(reports, values, strict=True)):
        # a rank saves the values of all its borders end to end, in the order of its list
        flat = tensors["borders"]
        start = 0
        recorded: dict[Border, BorderValues] = {}
        steps = len(report["steps"])
        for kind, border, samples, positions in report["borders"]:
            shape = (steps, len(samples), len(positions))
            stop = start + math.prod(shape)
            numbers = flat[start:stop].view(shape)
            recorded[kind, border] = BorderValues(rank, samples, positions, numbers)
            start = stop
        for key, border_values in _order_borders(recorded, report["passed"]):
            table.setdefault(key, []).append(border_values)
    return table


def _order_borders(
    recorded: Mapping[Border, BorderValues], passed: Mapping[str, str]
) -> Iterator[tuple[Border, BorderValues]]:
    """Yield forward values in the order of borders, then backward ones in the order of gradients.

    Values are recorded once for each tensor, and yielded for each border that it passes.
    """
    for border, first in passed.items():
        key = (FORWARD, first or border)
        if key in recorded:
            yield (FORWARD, border), recorded[key]
    for (kind, border), values in recorded.items():
        if kind != BACKWARD:
            continue
        # gradients arrive in the order of the backward pass, which is that of `recorded`
        yield (BACKWARD, border), values
        for alias, first in passed.items():
            if first == border:
                yield (BACKWARD, alias), values


def _assemble_tensors(ranks: Iterable[tuple[RankReport, Tensors]]) -> _Assembly:
    """Put the fragments of all ranks together, first to slices, then to full tensors."""
    slices: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}
    full: dict[str, Tensors] = {}
    conflicts: dict[tuple[str, str], None] = {}  # in order, each once
    for report, values in ranks:
        for number, fragment in enumerate(report["fragments"]):
            kind = fragment["kind"]
            name = fragment["name"]
            by_name = full.setdefault(kind, {})
            if name not in by_name:
                by_name[name] = _missing(fragment["shape"])
            key = (kind, name, tuple(fragment["offset"]))
            if key not in slices:
                slices[key] = _missing(fragment["local"])

            new = values[str(number)].double()
            start = fragment["first"]
            span = slices[key].view(-1)[start : start + len(new)]
            filled = ~span.isnan()
            if not torch.equal(span[filled], new[filled]):
                conflicts[kind, name] = None
            span[~filled] = new[~filled]  # of copies that differ, the first rank's counts

    for (kind, name, offset), local in slices.items():
        region = full[kind][name]
        for dim, (start, length) in enumerate(zip(offset, local.shape, strict=True)):
            region = region.narrow(dim, start, length)
        region.copy_(local)
    return _Assembly(full, list(conflicts))


def _missing(shape: Sequence[int]) -> Tensor:
    """Return a float64 tensor of which no rank has given an element yet: NaN."""
    return torch.full(tuple(shape), torch.nan, dtype=torch.float64)


def _replica_of(report: RankReport) -> int:
    """Return the dp rank: a report's "place" is (pp, dp, tp)."""
    return report["place"][1]


def _order_batches(reports: Sequence[RankReport]) -> list[list[int]]:
    """Return the sample ids of each step in the order of the replicas."""
    replicas = {_replica_of(report): report["samples"] for report in reports}
    batches: list[list[int]] = [[] for _ in reports[0]["samples"]]
    for _, steps in sorted(replicas.items()):
        for batch, ids in zip(batches, steps, strict=False):
            batch += ids
    return batches


def _find_rank_conflicts(reports: Sequence[RankReport]) -> list[tuple[int, str]]:
    """Return (step, quantity) of numbers and samples on which ranks disagree, though all must
    agree."""
    conflicts: list[tuple[int, str]] = []
    step_reports = zip(*(report["steps"] for report in reports), strict=True)
    for number, steps in enumerate(step_reports, 1):
        for key, value in steps[0].items():
            # compared as text, in which NaN equals NaN
            if any(str(step[key]) != str(value) for step in steps):
                conflicts.append((number, key))
    samples: dict[int, Any] = {}
    for report in reports:
        if samples.setdefault(_replica_of(report), report["samples"]) != report["samples"]:
            return [(1, "samples of one replica"), *conflicts]
    return conflicts
