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

import torch

from megaprec.errors import UserError
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.tokenizer_files import files_beside
from tools.commands.options import add_ema, add_vocab, model_place, new_folder
from tools.commands.text_options import tokenizer_path
from tools.config.resolved_run import resolve_run
from tools.console.progress_bar import bytes_progress
from tools.convert.auto_tokenizer import auto_tokenizer_line
from tools.convert.averaged import averaged
from tools.convert.core.source import Source
from tools.convert.core.target import Target, convert
from tools.convert.formats import TARGETS, WITH_CONFIG, check_vocab, open_intact
from tools.convert.hf.config import config_of, notes_on_older_transformers
from tools.convert.hf.folder import CONFIG, read_config
from tools.convert.hf.vocabulary import (
    begin_note,
    check_tokenizer,
    class_note,
    folder_notes,
    main_file,
)
from tools.convert.hf.write import hf_target, special_ids_of
from tools.convert.megatron.write import MegatronLayout, megatron_target
from tools.convert.native import native_target
from tools.convert.probe import check_config
from tools.convert.verify import compare_logits, require_comparable
from tools.training.machine import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `convert`."""
    parser.description = __doc__
    parser.add_argument(
        "source", metavar="SRC", type=model_place, help="model, in any format: a folder or URL"
    )
    parser.add_argument(
        "destination", metavar="DST", type=new_folder, help="folder to write; it must not exist"
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
    add_ema(parser, "write")
    add_vocab(parser)
    parser.add_argument(
        "--tokenizer",
        type=tokenizer_path,
        metavar="FILE",
        help="tokenizer.json or SentencePiece model for a DST whose SRC has no tokenizer",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RUN.toml",
        help="run file whose [model] says what a distributed SRC that does not say it is",
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
    """Run `megaprec convert`; return the exit code."""
    keep_freed_memory()
    check_vocab(args.vocab, args.source)
    model = resolve_run(args.config).sized_model if args.config else None
    source = open_intact(args.source, args.vocab, args.weights_only, model)
    if args.ema:
        source = averaged(source)
    if args.tokenizer:
        source.tokenizer = _given_tokenizer(args.tokenizer, source)
    format_name = args.to or ("hf" if source.kind == "megaprec" else "megaprec")
    dtype = DTYPES[args.dtype] if args.dtype else None
    layout = _megatron_layout(args, format_name)
    # before the conversion, which takes hours for a large model
    if args.verify:
        require_comparable(source, dtype)
    write_model(source, format_name, args.destination, dtype, layout, verify=not args.no_verify)
    if args.verify:
        print(compare_logits(source.path, args.destination, args.vocab, model, args.ema))
    return 0


def _given_tokenizer(file: Path, source: Source) -> tuple[Path, ...]:
    """Return the file of --tokenizer and what belongs to it beside it. Raises UserError if the
    source has a tokenizer."""
    if main_file(source.tokenizer):
        raise UserError.of("command.tokenizer_twice", file=file, path=source.path)
    # raises for a file that cannot be read, before anything is written
    load_tokenizer(file)
    return file, *files_beside(file)


def _megatron_layout(args: argparse.Namespace, format_name: str) -> MegatronLayout:
    """Return the layout of a Megatron DST. Raises UserError for an option of such a layout if DST
    has another format."""
    for name in ("tp", "pp", "ep", "layers", "grouped_experts"):
        value = getattr(args, name)
        is_given = value is not None and value is not False  # 0 is given, and refused later
        if is_given and format_name != "megatron":
            option = name.replace("_", "-")
            raise UserError.of("command.megatron_option", option=option, format_name=format_name)
    return MegatronLayout(
        tp=1 if args.tp is None else args.tp,
        pp=1 if args.pp is None else args.pp,
        ep=1 if args.ep is None else args.ep,
        fused_norms=args.layers != "local",
        grouped=args.grouped_experts,
    )


def export_run(folder: Path, export_folder: Path, ema: bool) -> None:
    """Write the model of a run to `export_folder` in Hugging Face's format. ema: the moving average
    of its weights."""
    exported = open_intact(folder)
    if ema:
        exported = averaged(exported)
    write_model(exported, "hf", export_folder)


def write_model(
    source: Source,
    format_name: str,
    destination: Path,
    dtype: torch.dtype | None = None,
    layout: MegatronLayout | None = None,
    verify: bool = False,
) -> None:
    """Write `source` to `destination` in a format of TARGETS, with progress on a terminal, and
    print what was written.

    verify: also check that transformers computes the same logits for each config.json that is read
        or written.
    """
    # a broken link is something too
    if os.path.lexists(destination):
        raise UserError.of("command.folder_exists", destination=destination)
    tokenizer_notes = _tokenizer_notes(source, format_name, destination)
    target = _open_target(source, format_name, dtype, layout or MegatronLayout())
    if verify:
        for line in _verify_configs(source, format_name, destination):
            print(line)
    # every byte is written and read back
    names = ", ".join(map(str, source.folders))
    with bytes_progress(f"{names} to {destination}", 2 * target.size) as report:
        damage = convert(source, target, destination, report)
    print(_summary(source, target, destination))
    version_notes = notes_on_older_transformers(source.model) if format_name == "hf" else []
    for note in (*source.facts.notes, *tokenizer_notes, *version_notes):
        print(f"note: {note}")
    for line in damage:
        print(f"warning: {line}")


def _ids_without_text(vocab: int, tokens: int) -> list[str]:
    """Return a note on the ids of a model that its tokenizer does not have, if there are any."""
    if vocab <= tokens:
        return []
    return [
        f"the model has {vocab:,} ids and its tokenizer {tokens:,}: the ids from {tokens:,} on are "
        "no text; `megaprec generate` draws none of them, but another program may"
    ]


def _tokenizer_notes(source: Source, format_name: str, destination: Path) -> list[str]:
    """Check the tokenizer of `source` and return what a user of `destination` must know of it."""
    tokenizer = check_tokenizer(source.tokenizer, source.model.vocab)
    notes = [*folder_notes(source.path, source.tokenizer)]
    if tokenizer is not None:
        notes += tokenizer.notes
        notes += _ids_without_text(source.model.vocab, tokenizer.vocab_size)
    notes += begin_note(source, tokenizer)
    # only a Hugging Face folder names the class of its tokenizer
    if format_name == "hf":
        notes += class_note(source.tokenizer)
    if tokenizer is not None and format_name == "megatron":
        notes.append(
            f"a checkpoint of Megatron has no place for a tokenizer: keep {tokenizer.path}, and "
            "give it with --tokenizer when you convert back"
        )
    if tokenizer is None and format_name != "megatron":
        notes.append(
            f"{source.path} has no tokenizer that is read, and so {destination} has none: convert "
            "with --tokenizer FILE, a tokenizer.json or a SentencePiece model, to have one"
        )
    return notes


def _summary(source: Source, target: Target, destination: Path) -> str:
    """Return the line about what was written, and what of the source was not."""
    summary = (
        f"{destination}: {len(target.dtypes)} tensors, {target.size:,} bytes, each written once "
        "and read back"
    )
    written_kinds = {key.split("/", 1)[0] for key in target.dtypes}  # keys are kind/name
    left_out = [kind for kind in source.kinds if kind not in written_kinds]
    left_out += target.left_out
    if left_out:
        summary += f"; left out: {', '.join(left_out)}"
    if source.facts.unread:
        summary += f"; not read: {source.facts.unread}"
    return summary


def _verify_configs(source: Source, format_name: str, destination: Path) -> Iterator[str]:
    """Compare transformers with megaprec for each config.json that is read or written; yield what
    was found. Raises UserError if logits differ."""
    if source.kind in WITH_CONFIG:
        yield check_config(read_config(source.path), f"{source.path / CONFIG}")
    if format_name != "hf":
        return
    config = config_of(source.model, "float32")
    yield check_config(config, f"{destination / CONFIG}")
    # Users of the folder get their tokens from AutoTokenizer, not from the file itself.
    ids = special_ids_of(source)
    line = auto_tokenizer_line(
        source.tokenizer, config | ids, ids["bos_token_id"], f"{destination}"
    )
    if line:
        yield line


def _open_target(
    source: Source, format_name: str, dtype: torch.dtype | None, layout: MegatronLayout
) -> Target:
    if format_name == "hf":
        return hf_target(source, dtype)
    if format_name == "megaprec":
        return native_target(source, dtype)
    return megatron_target(source, dtype, layout)
