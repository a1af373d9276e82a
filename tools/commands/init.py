"""`megaprec init [FOLDER_OF_TEXT] [--preset NAME] [-o run.toml]`: write a run file to start from.

The run trains as it is, in minutes, on one process of a laptop. Its sizes follow from the text: part of it is read, and
a tokenizer is learned from that, so that vocabulary, sequence length and number of steps are possible. Every key that
is written has a comment, the first clause of its help.
"""

import argparse
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from megaprec.data.text import Source, left_out_words, open_source
from megaprec.data.tokenizer import load_tokenizer
from megaprec.data.training import ImpossibleVocabulary, train_sentencepiece
from megaprec.errors import UserError
from models.presets import PRESETS
from tools.config.key_help import key_tables
from tools.config.run_file import load_run
from tools.console.toml import toml

LOOKED_AT = 1_000_000  # characters of the text from which the sizes are estimated
VOCABULARIES = ((LOOKED_AT, 4096), (100_000, 2048), (0, 1024))  # from so many characters on
LENGTHS = (256, 128, 64, 32, 16, 8)
BATCHES = (16, 8, 4, 2)
PASSES = 3  # over a small text
MOST_STEPS, LEAST_STEPS = 300, 20
SMALL = 300_000  # tokens; for fewer the demo's model is too large
SMALLER = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384}
DEMO = "llama-demo"
WIDTH = 100  # columns of a comment
HEADER = "# Written by megaprec init. Train with: megaprec train {file}\n# `megaprec keys` explains all keys."


@dataclass(frozen=True)
class Found:
    """The sizes of a text. tokens: estimated unless all of it was looked at. begins: the beginning of a line."""

    chars: int
    vocab_size: int
    tokens: int
    begins: str


def add_parser(subparsers: Any) -> None:
    """Add `init` to the commands."""
    parser = subparsers.add_parser("init", help="write a run file to start from", description=__doc__)
    parser.add_argument(
        "source", nargs="?", default="python", metavar="TEXT", help="folder or file of text (default: python's sources)"
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), metavar="NAME", help=f"known model (default: {DEMO})")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field or column that holds the text")
    parser.add_argument("-o", "--output", type=Path, default=Path("run.toml"), metavar="FILE", help="run file to write")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec init`. Raises UserError if the text cannot be read or trained on, or the file exists."""
    if os.path.lexists(args.output):
        raise UserError(f"{args.output} exists already: give the run file another name with -o, or remove it")
    source = open_source(args.source, text_field=args.text_field)
    found = _look_at(source)
    content = _run_file(args, found)
    with open(args.output, "x", encoding="utf-8") as file:
        file.write(content)
    config = load_run(args.output)
    size = f"{found.chars:,} characters, about {found.tokens:,} tokens"
    left_out = f"; left out {', '.join(left_out_words(source.left_out))}" if source.left_out else ""
    print(f"text       {args.source}: {size}{left_out}")
    print(f"model      {config.sized_model.num_parameters:,} parameters, {config.train.steps} steps of ", end="")
    print(f"{config.tokens_per_step:,} tokens")
    print(f"written    {args.output}; next: megaprec train {args.output}")
    return 0


def _look_at(source: Source) -> Found:
    """Return the sizes of a text. Raises UserError if it cannot be read, or is too short to train on."""
    pieces = [text for _, text in replace(source, max_chars=LOOKED_AT)]
    chars = sum(map(len, pieces))
    with tempfile.TemporaryDirectory(prefix="megaprec_init_") as folder:
        model = _learned(pieces, Path(folder) / "tried")
        tokenizer = load_tokenizer(model)
        tokens = sum(len(tokenizer.encode(text)) for text in pieces)
    whole = max(chars, source.total_chars() or 0) if chars >= LOOKED_AT else chars
    lines = chain.from_iterable(text.splitlines() for text in pieces)
    words = next((line.split() for line in lines if len(line.split()) > 2), [])
    return Found(whole, tokenizer.vocab_size, round(tokens * whole / chars), " ".join(words[:3]))


def _learned(pieces: list[str], prefix: Path) -> Path:
    """Return a tokenizer of a size that suits the length of the text, or else of the nearest possible one."""
    chars = sum(map(len, pieces))
    try:
        return train_sentencepiece(pieces, prefix, next(size for least, size in VOCABULARIES if chars >= least))
    except ImpossibleVocabulary as problem:
        return train_sentencepiece(pieces, prefix, problem.nearest)


def _run_file(args: argparse.Namespace, found: Found) -> str:
    """Return the run file, with a comment for every key. Raises UserError if the text is too short."""
    helps = {key.name: key.help for table in key_tables() for key in table.keys}
    lines, table = [HEADER.format(file=args.output)], ""
    for key, value in _values(args, found).items():
        if key.partition(".")[0] != table:
            table = key.partition(".")[0]
            lines += ["", f"[{table}]"]
        comment = re.split(r"[:;] |\. |\.$", helps[key])[0]
        lines += textwrap.wrap(f"{comment}.", WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"{key.partition('.')[2]} = {toml(value)}")
    return "\n".join(lines) + "\n"


def _values(args: argparse.Namespace, found: Found) -> dict[str, Any]:
    """Return the keys of the run file with their values, which follow from the text."""
    length = next((n for n in LENGTHS if found.tokens >= 100 * n), LENGTHS[-1])
    samples = found.tokens // length
    if samples < 3:
        raise UserError(f"{args.source}: {found.tokens} tokens are too little text to train on; give more")
    batch = next((n for n in BATCHES if samples >= 20 * n), 1)
    steps = min(MOST_STEPS, max(LEAST_STEPS, PASSES * samples // batch))
    small = SMALLER if found.tokens < SMALL and args.preset is None else {}
    field = {"data.text_field": args.text_field} if args.text_field != "text" else {}
    return {
        "model.preset": args.preset or DEMO,
        **{f"model.{key}": value for key, value in small.items()},
        **({"model.vocab": 0} if PRESETS[args.preset or DEMO].get("vocab") else {}),
        "data.source": args.source,
        **field,
        "data.vocab_size": found.vocab_size,
        "data.held_out": 0.05,
        "precision.compute": "fp32",
        "lr.peak": 3e-4 if args.preset else 2e-3,
        "lr.warmup": steps // 10,
        "train.steps": steps,
        "train.global_batch": batch,
        "train.micro_batch": max(1, batch // 4),
        "train.seq_length": length,
        "train.eval_every": max(1, steps // 4),
        "train.folder": _folder(args.source),
        "checkpoint.every": max(1, steps // 4),
        "log.sample": found.begins,
    }


def _folder(source: str) -> str:
    """Return a new folder for the run that is no part of the text."""
    path = Path(source).expanduser()
    name = path.resolve().stem if source != "python" else source
    inside = path.is_dir() and path.resolve() in (Path.cwd(), *Path.cwd().parents)
    made = Path(path, "..", f"{name}-runs") if inside else Path("runs")
    free = (made / (name if number == 1 else f"{name}-{number}") for number in range(1, 1000))
    return str(next(folder for folder in free if not folder.exists()))
