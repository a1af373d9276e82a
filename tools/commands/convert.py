"""`megaprec convert SRC DST`: convert a model from one format into another and verify it.

SRC is a Hugging Face folder, a checkpoint or run folder of megaprec, or a checkpoint of
Megatron-LM, InternEvo, NxD, NeMo or Colossal-AI; its format is recognized by its files. DST is
written in the format of --to: Hugging Face, megaprec or Megatron-LM.

The conversion works offline, on the CPU, and holds about one tensor in memory. If it is
interrupted, the same command resumes it. DST appears when it is complete.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaprec.data.tokenizer import load_tokenizer
from megaprec.data.tokenizer_files import settings_of
from megaprec.errors import UserError
from tools.config.run_file import load_run
from tools.console.progress_bar import moving
from tools.convert.auto_tokenizer import auto_tokenizer_line
from tools.convert.core.source import Source
from tools.convert.core.target import Target, convert
from tools.convert.formats import TARGETS, WITH_CONFIG, check_vocab, open_intact
from tools.convert.hf.folder import CONFIG, hf_target, read_config, special_ids_of
from tools.convert.hf.vocabulary import (
    begin_note,
    check_tokenizer,
    class_note,
    folder_notes,
    main_file,
)
from tools.convert.hf.write_config import newer_only, to_hugging_face
from tools.convert.megatron.write import MegatronLayout, megatron_target
from tools.convert.native import native_target
from tools.convert.probe import check_config
from tools.convert.verify import compare_logits, require_comparable
from tools.training.allocator import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_parser(subparsers: Any) -> None:
    """Add `convert` to the commands."""
    parser = subparsers.add_parser(
        "convert", help="convert models between formats", description=__doc__
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="folder of a model, in any format")
    parser.add_argument(
        "destination", metavar="DST", type=Path, help="folder to write; it must not exist"
    )
    parser.add_argument(
        "--to",
        choices=TARGETS,
        help="format of DST (default: hf for a megaprec SRC, otherwise megaprec)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights in DST (default: that of SRC)"
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel ranks of a Megatron DST (default: 1)"
    )
    parser.add_argument(
        "--pp", type=int, metavar="N", help="pipeline stages of a Megatron DST (default: 1)"
    )
    parser.add_argument(
        "--ep", type=int, metavar="N", help="expert-parallel ranks of a Megatron DST (default: 1)"
    )
    parser.add_argument(
        "--layers",
        choices=("te", "local"),
        help=(
            "layer implementation whose tensor names a Megatron DST has: te (Transformer Engine; "
            "default) or local"
        ),
    )
    parser.add_argument(
        "--grouped-experts",
        action="store_true",
        help="name the experts of a Megatron DST as --moe-grouped-gemm does",
    )
    parser.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help="vocabulary size without padding, if a Megatron or NeMo SRC does not state it",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json or SentencePiece model for a DST whose SRC has no tokenizer",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RUN.toml",
        help="run file whose [model] says what a distributed Megatron SRC without args is",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="do not read the optimizer state of a Megatron SRC",
    )
    parser.add_argument(
        "--verify",
        choices=("logits",),
        help="also compare the FP32 logits of both models, which are then both in memory",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="skip the comparison with transformers of a small model of config.json",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec convert`."""
    keep_freed_memory()
    check_vocab(args.vocab, args.source)
    model = load_run(args.config).sized_model if args.config else None
    source = open_intact(args.source, args.vocab, args.weights_only, model)
    if args.tokenizer:
        source.tokenizer = _tokenizer(args.tokenizer, source)
    to = args.to or ("hf" if source.kind == "megaprec" else "megaprec")
    dtype = DTYPES[args.dtype] if args.dtype else None
    layout = _layout(args, to)
    if args.verify:
        require_comparable(source, dtype)
    write_model(source, to, args.destination, dtype, layout, verify=not args.no_verify)
    if args.verify:
        print(compare_logits(source.path, args.destination, args.vocab, model))
    return 0


def _tokenizer(file: Path, source: Source) -> tuple[Path, ...]:
    """Return the file of --tokenizer and the settings beside it. Raises UserError if the source has
    a tokenizer."""
    if main_file(source.tokenizer):
        raise UserError(
            f"--tokenizer {file}: {source.path} has a tokenizer of its own: leave it out"
        )
    load_tokenizer(file)
    return file, *settings_of(file)


def _layout(args: argparse.Namespace, to: str) -> MegatronLayout:
    """Return the layout of a Megatron DST. Raises UserError for a part of one if DST has another
    format."""
    names = ("tp", "pp", "ep", "layers", "grouped_experts")
    given = [
        name
        for name in names
        if getattr(args, name) is not None and getattr(args, name) is not False
    ]
    if given and to != "megatron":
        flag = given[0].replace("_", "-")
        raise UserError(
            f"--{flag} is for --to megatron, and DST is to have the format {to}: leave it out"
        )
    tp, pp, ep = (1 if size is None else size for size in (args.tp, args.pp, args.ep))
    return MegatronLayout(tp, pp, ep, args.layers != "local", args.grouped_experts)


def write_model(
    source: Source,
    to: str,
    destination: Path,
    dtype: torch.dtype | None = None,
    layout: MegatronLayout | None = None,
    verify: bool = False,
) -> None:
    """Write `source` to `destination` in the format `to`, with progress on a terminal, and print
    what was written.

    verify: also check that transformers computes the same logits for each config.json that is read
        or written.
    """
    if os.path.lexists(destination):
        raise UserError(f"{destination} exists already: give another folder, or remove it")
    tokenizer = check_tokenizer(source.tokenizer, source.model.vocab)
    tokenizer_notes = [
        *folder_notes(source.path, source.tokenizer),
        *(tokenizer.notes if tokenizer else ()),
    ]
    tokenizer_notes += begin_note(source, tokenizer)
    tokenizer_notes += class_note(source.tokenizer) if to == "hf" else []
    if tokenizer is not None and to == "megatron":
        tokenizer_notes.append(
            f"a checkpoint of Megatron has no place for a tokenizer: keep {tokenizer.path}, and "
            "give it with --tokenizer when you convert back"
        )
    if tokenizer is None and to != "megatron":
        tokenizer_notes.append(
            f"{source.path} has no tokenizer that is read, and so {destination} has none: convert "
            "with --tokenizer FILE, a tokenizer.json or a SentencePiece model, to have one"
        )
    target = _target(source, to, dtype, layout or MegatronLayout())
    for line in _verified(source, to, destination) if verify else ():
        print(line)
    with moving(f"{source.path} to {destination}", 2 * target.size) as report:
        damage = convert(source, target, destination, report)
    left = [
        kind
        for kind in source.kinds
        if not any(key.startswith(f"{kind}/") for key in target.dtypes)
    ]
    left += target.left_out
    print(
        (
            f"{destination}: {len(target.dtypes)} tensors, {target.size:,} bytes, each written "
            "once and read back"
        )
        + (f"; left out: {', '.join(left)}" if left else "")
        + (f"; not read: {source.facts.unread}" if source.facts.unread else "")
    )
    needs = newer_only(source.model) if to == "hf" else []
    for note in (*source.facts.notes, *tokenizer_notes, *needs):
        print(f"note: {note}")
    for line in damage:
        print(f"warning: {line}")


def _verified(source: Source, to: str, destination: Path) -> Iterator[str]:
    if source.kind in WITH_CONFIG:
        yield check_config(read_config(source.path), f"{source.path / CONFIG}")
    if to == "hf":
        config = to_hugging_face(source.model, "float32")
        yield check_config(config, f"{destination / CONFIG}")
        ids = special_ids_of(source)
        if line := auto_tokenizer_line(
            source.tokenizer, config | ids, ids["bos_token_id"], f"{destination}"
        ):
            yield line


def _target(source: Source, to: str, dtype: torch.dtype | None, layout: MegatronLayout) -> Target:
    if to == "hf":
        return hf_target(source, dtype)
    if to == "megaprec":
        return native_target(source, dtype)
    return megatron_target(source, dtype, layout)
