"""`megaprec convert SRC DST`: a model from one format into another, verified.

SRC: a Hugging Face folder, a checkpoint or run directory of megaprec, a checkpoint of Megatron-LM, InternEvo, NxD, NeMo
or Colossal-AI; which, is seen from its files. What DST becomes, says --to: the first three are written.

Works offline, on the CPU, and holds about one tensor in memory; killed, it goes on where it was when the same command
is given again. DST is there when it is whole.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from tools.console.progress_bar import moving
from tools.convert.core.source import Source
from tools.convert.core.target import Target, convert
from tools.convert.formats import TARGETS, open_intact
from tools.convert.hf.folder import CONFIG, hf_target, read_json
from tools.convert.hf.vocabulary import check_tokenizer
from tools.convert.hf.write_config import to_hugging_face
from tools.convert.megatron.write import MegatronLayout, megatron_target
from tools.convert.native import native_target
from tools.convert.probe import check_config
from tools.convert.verify import compare_logits
from tools.training.allocator import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_parser(subparsers: Any) -> None:
    """Adds `convert`."""
    parser = subparsers.add_parser("convert", help="models of other systems to ours and back", description=__doc__)
    parser.add_argument("source", metavar="SRC", type=Path, help="a folder of any format that is read")
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder that is not there yet")
    parser.add_argument("--to", choices=TARGETS, help="format of DST; default: hf for ours, ours for others")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks of a Megatron DST")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages of a Megatron DST")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel ranks of a Megatron DST")
    parser.add_argument(
        "--layers", choices=("te", "local"), default="te", help="whose names a Megatron DST has: Transformer Engine's"
    )
    parser.add_argument(
        "--grouped-experts", action="store_true", help="a Megatron DST names experts as --moe-grouped-gemm wants them"
    )
    parser.add_argument(
        "--vocab", type=int, metavar="N", help="tokens without padding, if a Megatron or NeMo SRC does not say"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave a Megatron SRC's optimizer state unread")
    parser.add_argument("--verify", choices=("logits",), help="compare the models' FP32 logits too; holds both models")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare a small model of config.json with that of transformers"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs `megaprec convert`."""
    keep_freed_memory()
    source = open_intact(args.source, args.vocab, args.weights_only)
    to = args.to or ("hf" if source.kind == "megaprec" else "megaprec")
    dtype = DTYPES[args.dtype] if args.dtype else None
    layout = MegatronLayout(args.tp, args.pp, args.ep, args.layers == "te", args.grouped_experts)
    write_model(source, to, args.destination, dtype, layout, verify=not args.no_verify)
    if args.verify:
        print(compare_logits(source.path, args.destination, args.vocab))
    return 0


def write_model(
    source: Source,
    to: str,
    destination: Path,
    dtype: torch.dtype | None = None,
    layout: MegatronLayout | None = None,
    verify: bool = False,
) -> None:
    """Writes `source` to `destination` in the format `to`, with progress on a terminal, and says what was written.

    verify: every config.json in this, read or written, is proven to be understood as transformers does.
    """
    if destination.exists():
        raise UserError(f"{destination} is there already: give another folder, or remove it")
    check_tokenizer(source.tokenizer, source.model.vocab)
    target = _target(source, to, dtype, layout or MegatronLayout())
    for line in _verified(source, to, destination) if verify else ():
        print(line)
    with moving(f"{source.path} to {destination}", 2 * target.size) as report:
        convert(source, target, destination, report)
    left = [kind for kind in source.kinds if not any(key.startswith(f"{kind}/") for key in target.dtypes)]
    left += target.left_out
    for note in source.facts.notes:
        print(f"note: {note}")
    print(
        f"{destination}: {len(target.dtypes)} tensors, {target.size:,} bytes, each written once and read back"
        + (f"; left out: {', '.join(left)}" if left else "")
        + (f"; not read: {source.facts.unread}" if source.facts.unread else "")
    )
    for note in source.facts.notes:
        print(f"note: {note}")


def _verified(source: Source, to: str, destination: Path) -> Iterator[str]:
    if source.kind == "hf":
        yield check_config(read_json(source.path / CONFIG), f"{source.path / CONFIG}")
    if to == "hf":
        yield check_config(to_hugging_face(source.model, "float32"), f"{destination / CONFIG}")


def _target(source: Source, to: str, dtype: torch.dtype | None, layout: MegatronLayout) -> Target:
    if to == "hf":
        return hf_target(source, dtype)
    return native_target(source, dtype) if to == "megaprec" else megatron_target(source, dtype, layout)
