"""`megaprec generate CKPT --prompt "def main"`: text from a checkpoint, on one process."""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tools.training.sampling import find_checkpoint, generate, harmless, load_model


def add_parser(subparsers: Any) -> None:
    """Add `generate` to the commands."""
    parser = subparsers.add_parser("generate", help="continue a text with a trained model", description=__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="checkpoint, or a run folder for its newest one")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="largest number of tokens to add (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0: always the most likely token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=40, metavar="K", help="sample from the K most likely tokens (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default: 0)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec generate`."""
    if problems := [*_problems(args)]:
        raise UserError(*problems)
    model, tokenizer = load_model(find_checkpoint(args.checkpoint))
    print(args.prompt, end="", flush=True)
    for text in generate(model, tokenizer, args.prompt, args.tokens, args.temperature, args.top_k, args.seed):
        print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)
    print()
    return 0


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if args.tokens < 0:
        yield f"--tokens {args.tokens}: give 0 or more"
    if not 0 <= args.temperature < math.inf:
        yield f"--temperature {args.temperature:g}: give 0 (always the most likely token) or more"
    if args.top_k < 1:
        yield f"--top-k {args.top_k}: give at least 1"
