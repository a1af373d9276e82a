"""`megaprec diff A B`: the differences between two models, tensor by tensor, in any formats.

Tensors are matched by logical name and compared in float64, a block of elements at a time. Keys of
the model that differ, such as the base of its rotary positions, are listed, for equal tensors make
another model with them.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.commands.options import add_vocab, model_place
from tools.console.json_output import add_json, print_result
from tools.console.progress_bar import bytes_progress
from tools.console.tables import print_table
from tools.console.toml import toml
from tools.convert.core.source import Source
from tools.convert.formats import check_vocab, open_intact

BLOCK = 1 << 22  # elements that become float64 at once


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor between two models.

    largest, mean: of the absolute differences; inf if one is not finite or the shapes differ. NaN
        differs from all.
    """

    key: str
    largest: float
    mean: float
    size: float  # largest absolute value in the first model; NaN if one is
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.largest > 0 or bool(self.note)


@dataclass(frozen=True)
class Comparison:
    """Two models, compared. differing: tensors with a difference, the largest first. equal: the
    number of the others that both have."""

    first: Source
    second: Source
    differing: list[TensorDifference]
    equal: int
    notes: list[str]

    @property
    def only_in_first(self) -> list[str]:
        return [key for key in self.first.shapes if key not in self.second.shapes]

    @property
    def only_in_second(self) -> list[str]:
        return [key for key in self.second.shapes if key not in self.first.shapes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    parser.description = __doc__
    parser.add_argument(
        "first", metavar="A", type=model_place, help="folder of the first model, in any format"
    )
    parser.add_argument(
        "second", metavar="B", type=model_place, help="folder of the second model, in any format"
    )
    parser.add_argument(
        "--top",
        type=int,
        default=20,
        metavar="N",
        help="number of tensors to show, the largest differences first (default: 20)",
    )
    add_vocab(parser)
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec diff`. The exit code is 0 whether the models differ or not."""
    if args.top < 0:
        raise UserError.of("command.top", top=args.top)
    check_vocab(args.vocab, args.first, args.second)
    # both are opened, and their checksums compared, before tensors are read
    first = open_intact(args.first, args.vocab)
    second = open_intact(args.second, args.vocab)
    comparison = compare_models(first, second, f"comparing {args.first} and {args.second}")
    return print_result(
        args,
        lambda: _document(comparison, args.top),
        lambda: _show(comparison, args.top),
    )


def compare_models(first: Source, second: Source, title: str) -> Comparison:
    """Compare all tensors that both models have, with progress on a terminal. title: of the
    progress."""
    shared = [key for key in first.shapes if key in second.shapes]
    differences = list[TensorDifference]()
    with bytes_progress(title, len(shared)) as report:
        for key in shared:
            difference = compare(key, first.read(key), second.read(key))
            differences.append(difference)
            report(1, key)
    # of equally large differences by name, so that the output is the same each time
    differences.sort(key=lambda difference: (-difference.largest, difference.key))
    differing = [difference for difference in differences if difference.differs]
    notes = dict.fromkeys((*first.facts.notes, *second.facts.notes))
    return Comparison(first, second, differing, len(shared) - len(differing), [*notes])


def _document(comparison: Comparison, top: int) -> dict[str, Any]:
    """Return the comparison for programs, with the `top` largest differences."""
    keys = other_keys(comparison.first.model, comparison.second.model)
    return {
        "equal": comparison.equal,
        "differ": len(comparison.differing),
        "differences": [asdict(difference) for difference in comparison.differing[:top]],
        "model": {key: {"a": ours, "b": theirs} for key, (ours, theirs) in keys.items()},
        "only_in_a": comparison.only_in_first,
        "only_in_b": comparison.only_in_second,
        "notes": comparison.notes,
    }


def _show(comparison: Comparison, top: int) -> None:
    """Print the `top` largest differences as a table, then what differs besides tensors."""
    first = comparison.first
    second = comparison.second
    differ = len(comparison.differing)
    if differ:
        print_table(_table(comparison.differing[:top]))
    print(f"{comparison.equal} of {comparison.equal + differ} tensors are equal, {differ} differ")
    for key, (ours, theirs) in other_keys(first.model, second.model).items():
        print(f"model.{key} is {toml(ours)} in {first.path} and {toml(theirs)} in {second.path}")
    _print_only_in(first.path, comparison.only_in_first)
    _print_only_in(second.path, comparison.only_in_second)
    for note in comparison.notes:
        print(f"note: {note}")


def _print_only_in(path: Path, keys: list[str]) -> None:
    """Say which tensors one of the models has alone, if any."""
    if keys:
        kinds = sorted({key.split("/")[0] for key in keys})
        print(f"only in {path}: {len(keys)} tensors ({', '.join(kinds)}), such as {keys[0]}")


def compare(key: str, first: Tensor, second: Tensor) -> TensorDifference:
    """Return the difference of two tensors. NaN differs from everything, NaN included."""
    if first.shape != second.shape:
        # nothing can be compared element by element
        shapes = f"{list(first.shape)} and {list(second.shape)}"
        return TensorDifference(key, math.inf, math.inf, 0.0, shapes)
    largest = 0.0
    total = 0.0
    magnitude = torch.zeros((), dtype=torch.float64)
    first_blocks = first.reshape(-1).split(BLOCK)
    second_blocks = second.reshape(-1).split(BLOCK)
    # Float64 of a whole embedding would take eight bytes an element, twice
    for ours, theirs in zip(first_blocks, second_blocks, strict=True):
        differences = (ours.double() - theirs.double()).abs()
        differences = differences.nan_to_num(nan=math.inf, posinf=math.inf)
        differences[ours == theirs] = 0  # two infinities of one sign
        largest = max(largest, differences.max().item())
        total += differences.sum().item()
        # not Python's max, which loses NaN
        magnitude = torch.maximum(magnitude, ours.double().abs().max())
    mean = total / max(1, first.numel())
    return TensorDifference(key, largest, mean, magnitude.item())


def _table(differences: list[TensorDifference]) -> Table:
    """Return a table with a row per tensor."""
    table = Table("tensor")
    for column in ("largest difference", "mean difference", "largest value in A"):
        table.add_column(column, justify="right")
    table.add_column("note")
    for difference in differences:
        table.add_row(
            difference.key,
            f"{difference.largest:.4g}",
            f"{difference.mean:.4g}",
            f"{difference.size:.4g}",
            difference.note,
        )
    return table


def other_keys(first: ModelConfig, second: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys of `[model]` in which two models differ, with both values."""
    ours = first.model_dump(mode="json")
    theirs = second.model_dump(mode="json")
    return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}
