"""`megaprec inspect PATH`: print the contents of a model folder of any format: model, progress,
layout, dtypes, digests.
"""

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.table import Table
from torch import Tensor

from megaprec.checkpoint.digests import raw
from megaprec.checkpoint.reader import Store
from models.config import ModelConfig
from tools.console.progress_bar import moving
from tools.console.tables import add_json, print_table, put
from tools.convert.core.source import Source
from tools.convert.formats import FORMATS, check_vocab, open_intact
from tools.convert.hf.vocabulary import folder_notes

SHOWN = (
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
UNBROKEN: Any = {"break_long_words": False, "break_on_hyphens": False}


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to the commands."""
    parser = subparsers.add_parser(
        "inspect", help="print the contents of a model folder", description=__doc__
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="folder of a model, in any format")
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor with its shape, dtype and SHA-256"
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
    """Run `megaprec inspect`."""
    check_vocab(args.vocab, args.path)
    source = open_intact(args.path, args.vocab)
    if not args.json:
        print(describe(source))
        if source.kind == "megaprec":
            print(_checked(Store(source.path)))
    with moving(
        f"reading {source.path}", sum(_nbytes(source, key) for key in source.shapes)
    ) as report:
        found, wholes = _digests(source, report)
    return put(
        args,
        lambda: _document(source, found, wholes),
        lambda: _show(found if args.tensors else [], wholes),
    )


@dataclass(frozen=True)
class _Tensor:
    tensor: str
    shape: list[int]
    dtype: str
    sha256: str


def _show(found: Sequence[_Tensor], wholes: Mapping[str, str]) -> None:
    if found:
        table = Table("tensor", "shape", "dtype", "SHA-256")
        for one in found:
            table.add_row(one.tensor, str(one.shape), one.dtype, one.sha256)
        print_table(table)
    for kind, whole in wholes.items():
        print(f"digest     {whole}  ({kind}: SHA-256)")


def _document(
    source: Source, found: Sequence[_Tensor], wholes: Mapping[str, str]
) -> dict[str, Any]:
    facts = source.facts
    return {
        "folder": str(source.path),
        "format": FORMATS[source.kind].name,
        "model": json.loads(source.model.model_dump_json()),
        "progress": facts.progress,
        "layout": facts.layout,
        "precision": facts.precision,
        "scaler": facts.scaler,
        "notes": [*facts.notes, *folder_notes(source.path, source.tokenizer)],
        "tokenizer": [file.name for file in source.tokenizer],
        "digests": wholes,
        "tensors": [asdict(one) for one in found],
    }


def describe(source: Source) -> str:
    """Return a summary of the folder that needs no tensor to be read, in lines."""
    model = source.model
    facts = source.facts
    lines = [
        f"folder     {source.path}",
        f"format     {FORMATS[source.kind].name}",
        (
            f"model      {model.family}: "
            f"{', '.join(f'{key} {value}' for key, value in told_keys(model).items())}"
        ),
    ]
    for kind in source.kinds:
        keys = list(source.keys(kind))
        dtypes = Counter(str(source.dtype(key)).removeprefix("torch.") for key in keys)
        elements = sum(prod(source.shapes[k]) for k in keys)
        size = sum(_nbytes(source, k) for k in keys)
        said = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
        lines.append(
            f"{kind:11}{elements:,} elements in {len(keys)} tensors, {size:,} bytes ({said})"
        )
    if facts.progress:
        tokens = facts.progress.get("tokens", 0)
        steps = facts.progress["step"]
        lines.append(
            f"trained    {steps} steps, {facts.steps} of them applied, {tokens:,} tokens seen"
        )
    for name, said in (
        ("layout", facts.layout),
        ("precision", facts.precision),
        ("scaler", facts.scaler),
    ):
        if said:
            lines.append(f"{name:11}{', '.join(f'{key} {value}' for key, value in said.items())}")
    lines += [f"not read   {facts.unread}"] if facts.unread else []
    lines += [
        f"note       {note}"
        for note in (*facts.notes, *folder_notes(source.path, source.tokenizer))
    ]
    lines.append(f"tokenizer  {', '.join(file.name for file in source.tokenizer) or 'none'}")
    return "\n".join(fill(line, WIDTH, subsequent_indent=" " * 11, **UNBROKEN) for line in lines)


def told_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that are always told, and all others that differ from their defaults."""
    said = model.model_dump(mode="json", exclude_defaults=True)
    given = dict(model)
    others = {
        key: said.get(key, given[key])
        for key, field in ModelConfig.model_fields.items()
        if key not in ("family", *SHOWN)
        and given[key] != field.get_default(call_default_factory=True, validated_data=given)
    }
    return {key: given[key] for key in SHOWN} | others


def _checked(store: Store) -> str:
    """Return a line on the checksums of the files, which `open_intact` has compared."""
    if not store.digests:
        return "files      not checked: the version that saved them recorded no digest"
    return f"files      {len(store.digests) + 1}, with the bytes that were saved (SHA-256)"


def _digests(source: Source, report: Any) -> tuple[list[_Tensor], dict[str, str]]:
    """Return all tensors, and the digest of each kind of tensors, equal for equal models in any
    format."""
    tensors = list[_Tensor]()
    found = dict[str, str]()
    for key in source.shapes:
        values = source.read(key)
        found[key] = _digest(values)
        tensors.append(
            _Tensor(key, list(values.shape), str(values.dtype).removeprefix("torch."), found[key])
        )
        report(values.nbytes, f"reading {key}")
    wholes = {
        kind: "".join(f"{key} {found[key]}\n" for key in sorted(source.keys(kind)))
        for kind in source.kinds
    }
    return tensors, {
        kind: hashlib.sha256(lines.encode()).hexdigest()
        for kind, lines in sorted(wholes.items())[::-1]
    }


def _digest(values: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and values."""
    made = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}\n".encode())
    made.update(raw(values))
    return made.hexdigest()


def _nbytes(source: Source, key: str) -> int:
    return prod(source.shapes[key]) * source.dtype(key).itemsize
