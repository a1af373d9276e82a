"""`megaprec diff A B`: the differences between two models, tensor by tensor, in any formats.

Tensors are matched by logical name and compared in float64, a block of elements at a time. Keys of
the model that differ, such as the base of its rotary positions, are listed, for equal tensors make
another model with them.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.console.progress_bar import moving
from tools.console.tables import add_json, print_table, put
from tools.console.toml import toml
from tools.convert.core.source import Source
from tools.convert.formats import check_vocab, open_intact

BLOCK = 1 << 22  # elements that are made float64 at once


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor between two models.

    largest, mean: of the absolute differences; inf if one is not finite or the shapes differ. NaN
        differs from all.
    """

    key: str
    largest: float
    mean: float
    size: float  # largest absolute value in the first model; NaN if one is
    note: str = ""


def add_parser(subparsers: Any) -> None:
    """Add `diff` to the commands."""
    parser = subparsers.add_parser(
        "diff", help="compare two models tensor by tensor", description=__doc__
    )
    parser.add_argument(
        "first", metavar="A", type=Path, help="folder of the first model, in any format"
    )
    parser.add_argument(
        "second", metavar="B", type=Path, help="folder of the second model, in any format"
    )
    parser.add_argument(
        "--top",
        type=int,
        default=20,
        metavar="N",
        help="number of tensors to show, the largest differences first (default: 20)",
    )
    parser.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help="vocabulary size without padding, if a Megatron or NeMo folder does not state it",
    )
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec diff`. The exit code is 0 whether the models differ or not."""
    if args.top < 0:
        raise UserError(f"--top {args.top}: give 0 or more")
    check_vocab(args.vocab, args.first, args.second)
    first, second = (open_intact(path, args.vocab) for path in (args.first, args.second))
    notes = [*dict.fromkeys((*first.facts.notes, *second.facts.notes))]
    both = [key for key in first.shapes if key in second.shapes]
    with moving(f"comparing {args.first} and {args.second}", len(both)) as report:
        found = []
        for key in both:
            found.append(compare(key, first.read(key), second.read(key)))
            report(1, key)
    found.sort(key=lambda d: (-d.largest, d.key))
    differing = [d for d in found if d.largest > 0 or d.note]
    return put(
        args,
        lambda: {
            "equal": len(both) - len(differing),
            "differ": len(differing),
            "differences": [asdict(one) for one in differing[: args.top]],
            "model": {
                key: {"a": a, "b": b}
                for key, (a, b) in other_keys(first.model, second.model).items()
            },
            "only_in_a": [key for key in first.shapes if key not in second.shapes],
            "only_in_b": [key for key in second.shapes if key not in first.shapes],
            "notes": notes,
        },
        lambda: _show(
            differing[: args.top],
            len(both),
            len(differing),
            [
                *_other_model(first, second),
                *_only_in(first, second),
                *(f"note: {note}" for note in notes),
            ],
        ),
    )


def _show(shown: list[Difference], compared: int, differ: int, more: list[str]) -> None:
    if shown or differ:
        print_table(_table(shown))
    print(f"{compared - differ} of {compared} tensors are equal, {differ} differ", *more, sep="\n")


def compare(key: str, one: Tensor, other: Tensor) -> Difference:
    """Return the difference of two tensors. NaN differs from everything, NaN included."""
    if one.shape != other.shape:
        return Difference(
            key, float("inf"), float("inf"), 0.0, f"{list(one.shape)} and {list(other.shape)}"
        )
    largest = total = size = 0.0
    for a, b in zip(one.reshape(-1).split(BLOCK), other.reshape(-1).split(BLOCK), strict=True):
        apart = (a.double() - b.double()).abs().nan_to_num(float("inf"), float("inf"))
        apart[a == b] = 0  # two infinities of one sign
        largest = max(largest, apart.max().item())
        total = total + apart.sum().item()
        size = torch.maximum(
            a.double().abs().max(), torch.tensor(size, dtype=torch.float64)
        ).item()  # NaN, if one is
    return Difference(key, largest, total / max(1, one.numel()), size)


def _table(found: list[Difference]) -> Table:
    table = Table("tensor")
    for column in ("largest difference", "mean difference", "largest value in A", "note"):
        table.add_column(column, justify="right" if column != "note" else "left")
    table.columns[0].overflow = "fold"
    for d in found:
        table.add_row(d.key, f"{d.largest:.4g}", f"{d.mean:.4g}", f"{d.size:.4g}", d.note)
    return table


def other_keys(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys of `[model]` in which two models differ, with both values."""
    a, b = (model.model_dump(mode="json") for model in (one, other))
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def _other_model(first: Source, second: Source) -> Iterator[str]:
    for key, (a, b) in other_keys(first.model, second.model).items():
        yield f"model.{key} is {toml(a)} in {first.path} and {toml(b)} in {second.path}"


def _only_in(first: Source, second: Source) -> Iterator[str]:
    for one, other in ((first, second), (second, first)):
        only = [key for key in one.shapes if key not in other.shapes]
        if only:
            kinds = sorted({key.split("/")[0] for key in only})
            yield f"only in {one.path}: {len(only)} tensors ({', '.join(kinds)}), such as {only[0]}"
