"""`megaprec inspect PATH`: print the contents of a model folder of any format: model, progress,
layout, dtypes, digests.
"""

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from textwrap import fill
from typing import Any

from rich.table import Table
from torch import Tensor

from megaprec.checkpoint.digests import tensor_bytes
from megaprec.checkpoint.keeping import best_made_here, describe_evaluations
from megaprec.checkpoint.reader import Store
from models.config import ModelConfig
from tools.commands.options import add_vocab, model_place
from tools.console.json_output import add_json, print_result
from tools.console.progress_bar import bytes_progress
from tools.console.tables import print_table
from tools.console.wrapped import INDENT
from tools.convert.core.source import Source
from tools.convert.formats import FORMATS, check_vocab, open_intact
from tools.convert.hf.vocabulary import folder_notes
from tools.saved.save_record import odd_saves
from tools.saved.train_state import kept_evaluations

ALWAYS_SHOWN = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "ffn",
    "vocab",
    "max_positions",
    "norm",
    "tied",
)
WIDTH = 100  # columns that a line takes at most, unless it is one long word
# paths and digests stay whole, to be copied
WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `inspect`."""
    parser.description = __doc__
    parser.add_argument(
        "path", metavar="PATH", type=model_place, help="model, in any format: a folder or URL"
    )
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor with its shape, dtype and SHA-256"
    )
    add_vocab(parser)
    add_json(parser)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec inspect`; return the exit code."""
    check_vocab(args.vocab, args.path)
    source = open_intact(args.path, args.vocab)
    # before the tensors are read, which may take minutes
    if not args.json:
        print(describe(source))
        if source.kind == "megaprec":
            store = Store(source.path)
            print(_checksum_line(store))
            print(*_best_line(store), sep="", end="")
    total = sum(_nbytes(source, key) for key in source.shapes)
    with bytes_progress(f"reading {source.path}", total) as report:
        tensors, digests = _digests(source, report)
    return print_result(
        args,
        lambda: _document(source, tensors, digests),
        lambda: _show(tensors if args.tensors else [], digests),
    )


@dataclass(frozen=True)
class _TensorEntry:
    tensor: str
    shape: list[int]
    dtype: str
    sha256: str


def _show(tensors: Sequence[_TensorEntry], digests: Mapping[str, str]) -> None:
    """Print a table of the tensors, if there are any, and the digests of all kinds."""
    if tensors:
        table = Table("tensor", "shape", "dtype", "SHA-256")
        for entry in tensors:
            table.add_row(entry.tensor, str(entry.shape), entry.dtype, entry.sha256)
        print_table(table)
    for kind, digest in digests.items():
        print(f"digest     {digest}  ({kind}: SHA-256)")


def _document(
    source: Source, tensors: Sequence[_TensorEntry], digests: Mapping[str, str]
) -> dict[str, Any]:
    """Return the contents of the folder for programs."""
    facts = source.facts
    return {
        "folder": str(source.path),
        "format": FORMATS[source.kind].name,
        "model": json.loads(source.model.model_dump_json()),
        "progress": facts.progress,
        "layout": facts.layout,
        "precision": facts.precision,
        "scaler": facts.scaler,
        "notes": _notes(source),
        "tokenizer": [file.name for file in source.tokenizer],
        "digests": digests,
        "tensors": [asdict(entry) for entry in tensors],
    }


def _notes(source: Source) -> list[str]:
    notes = [*source.facts.notes, *folder_notes(source.path, source.tokenizer)]
    if source.kind == "megaprec" and (note := odd_saves(source.path.parent)):
        notes.append(note)
    return notes


def describe(source: Source) -> str:
    """Return a summary of the folder that needs no tensor to be read, in lines."""
    model = source.model
    facts = source.facts
    lines = [
        f"folder     {source.path}",
        f"format     {FORMATS[source.kind].name}",
        f"model      {model.family}: {_pairs(shown_keys(model))}",
        *(_kind_line(source, kind) for kind in source.kinds),
    ]
    if facts.progress:
        tokens = facts.progress.get("tokens", 0)
        steps = facts.progress["step"]
        lines.append(
            f"trained    {steps} steps, {facts.steps} of them applied, {tokens:,} tokens seen"
        )
    if facts.layout:
        lines.append(f"layout     {_pairs(facts.layout)}")
    if facts.precision:
        lines.append(f"precision  {_pairs(facts.precision)}")
    if facts.scaler:
        lines.append(f"scaler     {_pairs(facts.scaler)}")
    if facts.unread:
        lines.append(f"not read   {facts.unread}")
    lines += [f"note       {note}" for note in _notes(source)]
    lines.append(f"tokenizer  {', '.join(file.name for file in source.tokenizer) or 'none'}")
    indent = " " * INDENT
    filled = [fill(line, WIDTH, subsequent_indent=indent, **WHOLE_WORDS) for line in lines]
    return "\n".join(filled)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _kind_line(source: Source, kind: str) -> str:
    """Return the line about one kind of tensors, such as weights: number, elements, bytes and
    dtypes."""
    keys = list(source.keys(kind))
    dtypes = Counter(str(source.dtype(key)).removeprefix("torch.") for key in keys)
    elements = sum(prod(source.shapes[key]) for key in keys)
    nbytes = sum(_nbytes(source, key) for key in keys)
    by_dtype = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    counts = f"{elements:,} elements in {len(keys)} tensors, {nbytes:,} bytes ({by_dtype})"
    return f"{kind:{INDENT}}{counts}"


def shown_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that are always shown, and all others that differ from their defaults."""
    values = dict(model)
    # tables within the model without the keys that have their default
    dumped = model.model_dump(mode="json", exclude_defaults=True)
    shown = {key: values[key] for key in ALWAYS_SHOWN}
    for key, field in ModelConfig.model_fields.items():
        if key == "family" or key in ALWAYS_SHOWN:
            continue
        # some defaults follow from other keys
        default = field.get_default(call_default_factory=True, validated_data=values)
        if values[key] != default:
            shown[key] = dumped.get(key, values[key])
    return shown


def _checksum_line(store: Store) -> str:
    """Return a line on the checksums of the files, which `open_intact` has compared."""
    if not store.digests:
        return "files      not checked: the version that saved them recorded no digest"
    return f"files      {len(store.digests) + 1}, with the bytes that were saved (SHA-256)"


def _best_line(store: Store) -> Iterator[str]:
    """Yield a line on the best checkpoint of the folder, if the run of this one keeps it."""
    evaluations = kept_evaluations(store)
    best = best_made_here(store.path.parent, evaluations)
    if best is not None:
        name = "this one" if best.path == store.path else best.path.name
        lowest = describe_evaluations(evaluations)
        yield f"best       {name}, with the lowest {lowest} here, {best.loss:.4f}\n"


def _digests(source: Source, report: Any) -> tuple[list[_TensorEntry], dict[str, str]]:
    """Return all tensors, and the digest of each kind of tensors, equal for equal models in any
    format."""
    tensors = list[_TensorEntry]()
    digest_of = dict[str, str]()
    # one tensor is in memory at a time
    for key in source.shapes:
        values = source.read(key)
        digest_of[key] = _digest(values)
        dtype = str(values.dtype).removeprefix("torch.")
        tensors.append(_TensorEntry(key, list(values.shape), dtype, digest_of[key]))
        report(values.nbytes, f"reading {key}")
    by_kind = dict[str, str]()
    for kind in sorted(source.kinds, reverse=True):  # weights first
        # in the order of keys, for the order of tensors depends on the format
        keys = sorted(source.keys(kind))
        lines = "".join(f"{key} {digest_of[key]}\n" for key in keys)
        by_kind[kind] = hashlib.sha256(lines.encode()).hexdigest()
    return tensors, by_kind


def _digest(values: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and values."""
    sha256 = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}\n".encode())
    # the bytes as they are in memory, whatever the format of the file
    sha256.update(tensor_bytes(values))
    return sha256.hexdigest()


def _nbytes(source: Source, key: str) -> int:
    return prod(source.shapes[key]) * source.dtype(key).itemsize
