"""Text out of a checkpoint, on one process: `megaprec generate CKPT --prompt "def main"`."""

import argparse
import math
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.atomic import checkpoint_at
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.comm.layout import layout_of
from megaprec.data.tokenizer import Tokenizer, load_tokenizer
from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.own_model import require_builtin
from models.stages import Stage, cuts
from parallel.context import Context
from tools.convert.train_state import read_model, read_tokenizer


def add_parser(subparsers: Any) -> None:
    """Adds `generate`."""
    parser = subparsers.add_parser("generate", help="continue a text with a trained model", description=__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint, or a run directory for its newest")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="how many to add (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="choose among the K likeliest (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs `megaprec generate`."""
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
        yield f"--temperature {args.temperature:g}: give 0 (always the likeliest) or more; 1 is as the model says"
    if args.top_k < 1:
        yield f"--top-k {args.top_k}: give at least 1"


def harmless(text: str) -> str:
    """`text` for a terminal: control characters, with which a young model is generous, are shown as U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def find_checkpoint(path: Path) -> Path:
    """`path`, or the newest checkpoint of the run directory `path`. Raises UserError if there is none."""
    found = checkpoint_at(path)
    if found is None:
        there = "has no checkpoint" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {there}: give a run directory, or one of the folders step_... in its checkpoints")
    return found


def load_model(path: Path) -> tuple[Stage, Tokenizer]:
    """The whole model in FP32 on the CPU, whatever layout and precision it was trained in, and its tokenizer."""
    store = Store(path)
    config = read_model(store)
    require_builtin(config, "megaprec generate")
    if not (tokenizer := read_tokenizer(store)):
        raise UserError(f"{path} was trained on token ids without a tokenizer, so it cannot read a prompt")
    require_intact(store, store.files_of("weight") | {tokenizer.name})
    stage = Stage(config, Context(plan("fp32")), cuts(config, 1, config.max_positions)[0])
    with torch.no_grad():
        for parameter in stage.parameters():
            for part, first, last in layout_of(parameter).spans():
                parameter.view(-1)[first:last] = store.read("weight", part.name).reshape(-1)
    return stage, load_tokenizer(tokenizer)


@torch.no_grad()
def generate(
    model: Stage,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of text that continue `prompt`, up to `tokens` tokens or the end of the document."""
    generator = torch.Generator().manual_seed(seed)
    start = [tokenizer.eos] if tokenizer.eos is not None else []
    ids = start + tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty and the tokenizer has no token to begin a document with: give a prompt")
    said = tokenizer.decode(ids)
    for _ in range(tokens):
        window = torch.tensor(ids[-model.config.max_positions :])
        chosen = _choose(model(window[:, None])[-1, 0], temperature, top_k, generator)
        if chosen == tokenizer.eos:
            return
        ids.append(chosen)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character of several tokens is not complete yet
            yield text[len(said) :]
            said = text


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """logits [vocab]."""
    if temperature == 0:
        return int(logits.argmax())
    best, ids = logits.topk(min(top_k, len(logits)))
    return int(ids[torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)])
