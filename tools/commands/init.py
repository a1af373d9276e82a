"""`megaprec init [FOLDER_OF_TEXT] [--preset NAME] [-o run.toml]`: write a run file to start from.

The run trains as it is, in minutes, on one process of a laptop. Its sizes follow from the text: a
tokenizer is learned from it as `train` will do it, and a million characters from all over it are
counted in its tokens, so that vocabulary, sequence length and number of steps are possible. Of a
text beyond 256 million characters, those are all that is read. Every key that is written has a
comment, the first clause of its help.
"""

import argparse
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from megaprec.data.text import Source, left_out_words, open_source
from megaprec.data.tokenizer import load_tokenizer
from megaprec.data.training import ImpossibleVocabulary, sample_lines, train_sentencepiece
from megaprec.errors import UserError
from models.presets import PRESETS
from tools.config.key_help import key_tables
from tools.config.run_file import load_run
from tools.console.toml import toml

LOOKED_AT = 1_000_000  # characters of a long text from which the sizes are estimated
# characters: of a longer text, the tokenizer that is tried is learned from LOOKED_AT alone
LEARNED_FROM = 1 << 28
FILES = 100  # of a folder with more, those that are looked at
VOCABULARIES = ((1_000_000, 4096), (100_000, 2048), (0, 1024))  # from so many characters on
LENGTHS = (256, 128, 64, 32, 16, 8)
BATCHES = (16, 8, 4, 2)
PASSES = 3  # over a small text
MOST_STEPS = 300
LEAST_STEPS = 20
SMALL = 300_000  # tokens; for fewer the demo's model is too large
SMALLER = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384}
DEMO = "llama-demo"
WIDTH = 100  # columns of a comment
HEADER = (
    "# Written by megaprec init. Train with: megaprec train {file}\n# `megaprec keys` explains "
    "all keys."
)


@dataclass(frozen=True)
class Found:
    """The sizes of a text. begins: the beginning of a line.

    looked_at: characters whose tokens were counted. chars: of the whole text, estimated if it is
        too long to be read; None if it is and has packed files or files with fields, whose sizes do
        not tell. tokens: of these, or of those that were looked at.
    """

    looked_at: int
    chars: int | None
    vocab_size: int
    tokens: int
    begins: str

    def __str__(self) -> str:
        if self.chars == self.looked_at:
            return f"{self.chars:,} characters, about {self.tokens:,} tokens"
        read = f"the sizes follow from {self.looked_at:,} of them, from all over the text"
        if self.chars is None:
            return (
                f"more than {self.looked_at:,} characters, more than about {self.tokens:,} "
                f"tokens; {read}"
            )
        return f"about {self.chars:,} characters, about {self.tokens:,} tokens; {read}"


def add_parser(subparsers: Any) -> None:
    """Add `init` to the commands."""
    parser = subparsers.add_parser(
        "init", help="write a run file to start from", description=__doc__
    )
    parser.add_argument(
        "source",
        nargs="?",
        default="python",
        metavar="TEXT",
        help="folder or file of text (default: python's sources)",
    )
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), metavar="NAME", help=f"known model (default: {DEMO})"
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field or column that holds the text"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("run.toml"),
        metavar="FILE",
        help="run file to write",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec init`. Raises UserError if the text cannot be read or trained on, or the file
    exists."""
    if os.path.lexists(args.output):
        raise UserError(
            f"{args.output} exists already: give the run file another name with -o, or remove it"
        )
    source = open_source(args.source, text_field=args.text_field)
    found = _look_at(source)
    content = _run_file(args, found)
    with open(args.output, "x", encoding="utf-8") as file:
        file.write(content)
    config = load_run(args.output)
    left_out = f"; left out {', '.join(left_out_words(source.left_out))}" if source.left_out else ""
    print(f"text       {args.source}: {found}{left_out}")
    print(
        (
            f"model      {config.sized_model.num_parameters:,} parameters, {config.train.steps} "
            "steps of "
        ),
        end="",
    )
    print(f"{config.tokens_per_step:,} tokens")
    print(f"written    {args.output}; next: megaprec train {args.output}")
    return 0


def _look_at(source: Source) -> Found:
    """Return the sizes of a text. Raises UserError if it cannot be read, or is too short to train
    on."""
    # of a text that can be read whole, its bad files and rows are told at once
    lines, counted = _lines(source)
    pieces, whole = _spread(source, source.total_chars() if counted is None else counted)
    read = sum(map(len, pieces))
    chars = counted or (read if whole else _estimated(source, pieces))
    with tempfile.TemporaryDirectory(prefix="megaprec_init_") as folder:
        size = next(size for least, size in VOCABULARIES if (chars or read) >= least)
        tokenizer = load_tokenizer(_learned(lines or pieces, size, Path(folder) / "tried"))
        tokens = sum(len(tokenizer.encode(text)) for text in pieces)
    lines = chain.from_iterable(text.splitlines() for text in pieces)
    words = next((line.split() for line in lines if len(line.split()) > 2), [])
    return Found(
        read,
        chars,
        tokenizer.vocab_size,
        round(tokens * (chars or read) / max(1, read)),
        " ".join(words[:3]),
    )


def _lines(source: Source) -> tuple[list[str], int | None]:
    """Return the lines that `train` will learn a tokenizer from, and the characters of the whole
    text.

    Of a text that is too long to be read here: no lines, and None.
    """
    total = source.total_chars()
    if total is not None and total > LEARNED_FROM:
        return [], None
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for _, text in source:
            read += len(text)
            if read > LEARNED_FROM:
                return
            yield text

    lines = sample_lines(texts())
    return ([], None) if read > LEARNED_FROM else (lines, read)


def _spread(source: Source, total: int | None) -> tuple[list[str], bool]:
    """Return pieces of a text, about `LOOKED_AT` characters from all over its files, and if they
    are all of it.

    total: the characters of the text, if they are known.
    """
    files = source.files
    if total is not None and total <= LOOKED_AT:
        return [text for _, text in source], True
    if len(files) > FILES:
        looked_at = [files[n * len(files) // FILES] for n in range(FILES)]
    else:
        looked_at = files
    share = LOOKED_AT // len(looked_at)
    whole = len(looked_at) == len(files)
    pieces = list[str]()
    for file in looked_at:
        read = [text for _, text in replace(source, files=(file,), max_chars=share)]
        whole &= sum(map(len, read)) < share
        pieces += read
    return pieces, whole


def _estimated(source: Source, pieces: list[str]) -> int | None:
    """Return the characters of a text of which `pieces` are a part, or None if the sizes of its
    files do not tell."""
    total = source.total_chars()
    read = sum(map(len, pieces))
    size = sum(len(text.encode(errors="surrogatepass")) for text in pieces)
    return None if total is None else max(read, round(total * read / max(1, size)))


def _learned(texts: list[str], size: int, prefix: Path) -> Path:
    """Return a tokenizer of `size` pieces, or of the nearest possible size.

    The rest of a long text may have more characters than `texts`: where these need a larger one, it
    is larger still.
    """
    try:
        return train_sentencepiece(texts, prefix, size)
    except ImpossibleVocabulary as problem:
        room = problem.nearest // 4 if problem.nearest > size else 0
        return _learned(texts, problem.nearest + room, prefix)


def _run_file(args: argparse.Namespace, found: Found) -> str:
    """Return the run file, with a comment for every key. Raises UserError if the text is too
    short."""
    helps = {key.name: key.help for table in key_tables() for key in table.keys}
    lines = [HEADER.format(file=args.output)]
    table = ""
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
        raise UserError(
            f"{args.source}: {found.tokens} tokens are too little text to train on; give more"
        )
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
