"""Assembling the ranks' files of one layout: whole logical tensors, and the places where ranks
disagree."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megaprec.optim.step_report import SKIPPED
from tools.parity.borders import BACKWARD, FORWARD, Notes

Tensors = dict[str, Tensor]  # float64, by logical name
Borders = dict[tuple[str, str], list[Notes]]  # of each rank, by kind and border


@dataclass(frozen=True)
class Record:
    """The record of one layout. steps: a report per step. samples: ids of each step's batch,
    replica after replica.

    names: logical tensors in the model's order. tensors: by kind, then by name; an element that no
        rank holds is NaN.
    apart: (kind, name) of tensors of which two ranks hold the same element with different bits.
    cut: tensors of which tp ranks hold different slices. torn: (step from 1, what) on which ranks
    disagree. borders: values of each rank at each border, by (kind, border). same: borders at which
    the same tensor was seen.
    """

    steps: list[dict[str, Any]]
    samples: list[list[int]]
    names: list[str]
    tensors: dict[str, Tensors]
    apart: list[tuple[str, str]] = field(default_factory=list)
    cut: frozenset[str] = frozenset()
    torn: list[tuple[int, str]] = field(default_factory=list)
    borders: Borders = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    @property
    def applied(self) -> list[int]:
        """Numbers of the steps, from 0, that changed the weights."""
        return [n for n, step in enumerate(self.steps) if step["outcome"] not in SKIPPED]


def gather(folder: Path) -> Record:
    """Read the files that `record` has written to `folder`."""
    files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    values = [load_file(path.with_suffix(".safetensors")) for path in files]
    tensors, apart = _assembled(zip(ranks, values, strict=True))
    return Record(
        steps=ranks[0]["steps"],
        samples=_batches(ranks),
        names=list(dict.fromkeys(name for rank in ranks for name in rank["names"])),
        tensors=tensors,
        apart=apart,
        cut=frozenset(f["name"] for rank in ranks for f in rank["fragments"] if f["cut"]),
        torn=_torn(ranks),
        borders=_borders(ranks, values),
        same={border: other for rank in ranks for border, other in rank["passed"].items() if other},
    )


def _borders(ranks: Sequence[dict[str, Any]], values: Sequence[Tensors]) -> Borders:
    """Return the values of each rank in the order in which borders were passed, shared by all
    borders of one tensor."""
    found: Borders = {}
    for rank, (said, tensors) in enumerate(zip(ranks, values, strict=True)):
        flat = tensors["borders"]
        steps = len(said["steps"])
        first = 0
        noted: dict[tuple[str, str], Notes] = {}
        for kind, border, samples, positions in said["borders"]:
            last = first + steps * len(samples) * len(positions)
            noted[kind, border] = Notes(
                rank, samples, positions, flat[first:last].view(steps, len(samples), len(positions))
            )
            first = last
        for where, some in _ordered(noted, said["passed"]):
            found.setdefault(where, []).append(some)
    return found


def _ordered(
    noted: Mapping[tuple[str, str], Notes], passed: Mapping[str, str]
) -> Iterator[tuple[tuple[str, str], Notes]]:
    """Return values forward in the order of borders, and backward in the order of gradients, at all
    borders of their tensor.
    """
    for border, other in passed.items():
        if (FORWARD, other or border) in noted:
            yield (FORWARD, border), noted[FORWARD, other or border]
    for kind, border in noted:
        if kind == BACKWARD:
            alike = [border, *(alias for alias, other in passed.items() if other == border)]
            yield from (((BACKWARD, one), noted[kind, border]) for one in alike)


def _assembled(
    ranks: Iterable[tuple[dict[str, Any], Tensors]],
) -> tuple[dict[str, Tensors], list[tuple[str, str]]]:
    slices: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}
    whole: dict[str, Tensors] = {}
    apart: dict[tuple[str, str], None] = {}
    for said, values in ranks:
        for number, f in enumerate(said["fragments"]):
            kind = f["kind"]
            name = f["name"]
            offset = tuple(f["offset"])
            new = values[str(number)].double()
            whole.setdefault(kind, {}).setdefault(
                name, torch.full(f["shape"], torch.nan, dtype=torch.float64)
            )
            local = slices.setdefault(
                (kind, name, offset), torch.full(f["local"], torch.nan, dtype=torch.float64)
            )
            place = local.view(-1)[f["first"] : f["first"] + len(new)]
            known = ~place.isnan()
            if not torch.equal(place[known], new[known]):
                apart[kind, name] = None
            place[~known] = new[~known]  # the first rank's, which is the one that counts
    for (kind, name, offset), local in slices.items():
        whole[kind][name][
            tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
        ] = local
    return whole, list(apart)


def _batches(ranks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the ids of each step in the order of the replicas."""
    replicas = {rank["place"][1]: rank["samples"] for rank in ranks}
    return [
        [i for _, step in sorted(replicas.items()) for i in step[n]]
        for n in range(len(ranks[0]["samples"]))
    ]


def _torn(ranks: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return steps and samples on which ranks disagree, though all must agree."""
    found = []
    for number, steps in enumerate(zip(*(rank["steps"] for rank in ranks), strict=True), 1):
        keys = [
            key for key in steps[0] if any(str(step[key]) != str(steps[0][key]) for step in steps)
        ]
        found += [(number, key) for key in keys]
    for rank in ranks:
        if any(r["samples"] != rank["samples"] for r in ranks if r["place"][1] == rank["place"][1]):
            return [(1, "samples of one replica"), *found]
    return found
