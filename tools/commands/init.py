"""`megaprec init [TEXT] [--preset NAME | --recipe NAME] [-o run.toml]`: write a run file.

The run trains as it is, in minutes, on one process of a laptop. Its sizes follow from the text: a
tokenizer is learned from it as `train` will do it, and a million characters from all over it are
counted in its tokens, so that vocabulary, sequence length and number of steps are possible. With
--characters each character is a token, and no tokenizer is learned. Of a text beyond 256 million
characters, those are all that is read. Every key that is written has a comment, the first clause of
its help.

With --recipe the run file has published settings, and is written as it is (docs/recipes.md); TEXT
takes the place of its text.
"""

import argparse
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from megaprec.text.characters import CHARACTERS, distinct_characters
from megaprec.text.readers import TextOptions
from megaprec.text.sources import TextSource, open_source
from megaprec.text.text_files import left_out_words
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import ImpossibleVocabulary, sample_lines, train_sentencepiece
from megaprec.tokens.files import write_whole
from megaprec.tokens.places import STANDARD_LIBRARY, is_url, without_query
from megaprec.url_secrets import masked
from models.parameter_counts import num_parameters
from models.presets import PRESETS
from tools.commands.init_recipe import add_recipe, write_recipe
from tools.commands.text_options import add_skip_bad, add_text_options, text_options
from tools.config.key_help import key_tables, keys_of
from tools.config.run_file import load_run
from tools.console.toml import toml

SAMPLED_CHARS = 1_000_000  # characters of a long text from which the sizes are estimated
# characters: of a longer text, the tokenizer that is tried is learned from SAMPLED_CHARS alone
MAX_READ_CHARS = 1 << 28
MAX_FILES = 100  # of a folder with more, those that are looked at
VOCABULARY_SIZES = ((1_000_000, 4096), (100_000, 2048), (0, 1024))  # from so many characters on
SEQUENCE_LENGTHS = (256, 128, 64, 32, 16, 8)
BATCH_SIZES = (16, 8, 4, 2)
EPOCHS = 3  # over a small text
MAX_STEPS = 300
MIN_STEPS = 20
HELD_OUT = 0.05
EVAL_SAMPLES = 64  # at most, of the held-out text
SMALL_TEXT = 300_000  # tokens; for fewer the demo's model is too large
SMALL_MODEL = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384}
DEMO_PRESET = "llama-demo"
COMMENT_WIDTH = 100  # columns of a comment
HEADER = """# Written by megaprec init. Train with: megaprec train {file}
# `megaprec keys` explains all keys."""


@dataclass(frozen=True)
class TextSizes:
    """The sizes of a text, and the beginning of one of its lines (begins).

    looked_at: number of characters whose tokens were counted. chars: those of the whole text. Of a
        text that is too long to be read they are estimated by the sizes of its files, and None
        where these do not tell: of packed files, and files with fields.
    tokens: of `chars` characters, or of `looked_at` if `chars` is None. vocab_size: of the
        tokenizer that is trained; None if none is.
    """

    looked_at: int
    chars: int | None
    vocab_size: int | None
    tokens: int
    begins: str

    def __str__(self) -> str:
        if self.chars == self.looked_at:
            return f"{self.chars:,} characters, about {self.tokens:,} tokens"
        basis = f"the sizes follow from {self.looked_at:,} of them, from all over the text"
        if self.chars is None:
            return (
                f"more than {self.looked_at:,} characters, more than about {self.tokens:,} "
                f"tokens; {basis}"
            )
        return f"about {self.chars:,} characters, about {self.tokens:,} tokens; {basis}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    parser.description = __doc__
    parser.add_argument(
        "source",
        nargs="?",
        metavar="TEXT",
        help="folder or file of text, or a pattern such as 'texts/**/*.md' (default: python's "
        "sources, with --recipe the recipe's text)",
    )
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="NAME",
        help=f"known model (default: {DEMO_PRESET})",
    )
    add_recipe(parser)
    parser.add_argument(
        "--characters",
        action="store_true",
        help="each character of the text is a token (default: a tokenizer is learned from it)",
    )
    add_text_options(parser)
    add_skip_bad(parser)
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
        raise UserError.of("command.run_file_exists", output=args.output)
    if args.recipe:
        return write_recipe(args)
    if args.source is None:
        args.source = STANDARD_LIBRARY
    source = open_source(args.source, text_options(args, skip_bad=args.skip_bad))
    sizes = _measure_text(source, args.characters)
    content = _run_file(args, sizes)
    write_whole(args.output, content.encode())
    # read as `train` will read it: what is wrong shows at once
    config = load_run(args.output)
    left_out = ""
    if source.left_out:
        left_out = f"; left out {', '.join(left_out_words(source.left_out))}"
    parameters = num_parameters(config.sized_model)
    print(f"text       {masked(args.source)}: {sizes}{left_out}")
    print(
        f"model      {parameters:,} parameters, {config.train.steps} steps of "
        f"{config.tokens_per_step:,} tokens"
    )
    print(f"written    {args.output}; next: megaprec train {args.output}")
    return 0


def _measure_text(source: TextSource, of_characters: bool) -> TextSizes:
    """Return the sizes of a text. of_characters: these are its tokens. Raises UserError if it
    cannot be read, or is too short to train on."""
    # of a text that can be read whole, its bad files and rows are told at once
    lines, counted_chars = _tokenizer_lines(source)
    total_chars = source.total_chars() if counted_chars is None else counted_chars
    pieces, complete = _sample_pieces(source, total_chars)
    sampled_chars = sum(map(len, pieces))
    if counted_chars:
        chars = counted_chars
    elif complete:
        chars = sampled_chars
    else:
        chars = _estimate_chars(source, pieces)
    least_chars = chars or sampled_chars
    begins = _first_words(pieces)
    if of_characters:
        # raises UserError for what is no character
        distinct_characters(lines or pieces)
        return TextSizes(sampled_chars, chars, None, least_chars, begins)
    vocab_size = next(size for least, size in VOCABULARY_SIZES if least_chars >= least)
    with scratch_folder("init") as folder:
        path = _train_tokenizer(lines or pieces, vocab_size, Path(folder) / "tried")
        tokenizer = load_tokenizer(path)
        sampled_tokens = sum(len(tokenizer.encode(text)) for text in pieces)
    # as many tokens a character in the whole text as in the sample
    tokens = round(sampled_tokens * least_chars / max(1, sampled_chars))
    return TextSizes(
        looked_at=sampled_chars,
        chars=chars,
        vocab_size=tokenizer.vocab_size,
        tokens=tokens,
        begins=begins,
    )


def _first_words(pieces: list[str]) -> str:
    """Return the beginning of the first line that has at least three words."""
    for text in pieces:
        for line in text.splitlines():
            words = line.split()
            if len(words) > 2:
                return " ".join(words[:3])
    return ""


def _tokenizer_lines(source: TextSource) -> tuple[list[str], int | None]:
    """Return the lines that `train` will learn a tokenizer from, and the characters of the whole
    text.

    Of a text that is too long to be read here: no lines, and None.
    """
    total = source.total_chars()
    if total is not None and total > MAX_READ_CHARS:
        return [], None
    chars = 0

    def texts() -> Iterator[str]:
        nonlocal chars
        for _, text in source:
            chars += len(text)
            if chars > MAX_READ_CHARS:
                return
            yield text

    lines = sample_lines(texts())
    if chars > MAX_READ_CHARS:
        return [], None
    return lines, chars


def _sample_pieces(source: TextSource, total: int | None) -> tuple[list[str], bool]:
    """Return pieces of a text, about `SAMPLED_CHARS` characters from all over its files, and if
    they are all of it.

    total: the characters of the text, if they are known.
    """
    files = source.files
    if total is not None and total <= SAMPLED_CHARS:
        return [text for _, text in source], True
    sampled_files = files
    if len(files) > MAX_FILES:
        # evenly spaced over the list
        sampled_files = [files[n * len(files) // MAX_FILES] for n in range(MAX_FILES)]
    share = SAMPLED_CHARS // len(sampled_files)
    complete = len(sampled_files) == len(files)
    pieces = list[str]()
    sampled_options = replace(source.options, max_chars=share)
    for file in sampled_files:
        file_source = replace(source, files=(file,), options=sampled_options)
        file_pieces = [text for _, text in file_source]
        # a file that fills its share may be longer
        if sum(map(len, file_pieces)) >= share:
            complete = False
        pieces += file_pieces
    return pieces, complete


def _estimate_chars(source: TextSource, pieces: list[str]) -> int | None:
    """Return the characters of a text of which `pieces` are a part, or None if the sizes of its
    files do not tell."""
    total = source.total_chars()
    if total is None:
        return None
    # the sizes of files are bytes, of which all have as many characters as the pieces
    chars = sum(map(len, pieces))
    nbytes = sum(len(text.encode(errors="surrogatepass")) for text in pieces)
    return max(chars, round(total * chars / max(1, nbytes)))


def _train_tokenizer(texts: list[str], size: int, prefix: Path) -> Path:
    """Return a tokenizer of `size` pieces, or of the nearest possible size.

    The rest of a long text may have more characters than `texts`: where these need a larger one, it
    is larger still.
    """
    try:
        return train_sentencepiece(texts, prefix, size)
    except ImpossibleVocabulary as problem:
        margin = problem.nearest // 4 if problem.nearest > size else 0
        return _train_tokenizer(texts, problem.nearest + margin, prefix)


def _run_file(args: argparse.Namespace, sizes: TextSizes) -> str:
    """Return the run file, with a comment for every key. Raises UserError if the text is too
    short."""
    help_of = {key.name: key.help for key in keys_of(key_tables())}
    lines = [HEADER.format(file=args.output)]
    current_table = ""
    for key, value in _key_values(args, sizes).items():
        table, _, name = key.partition(".")
        if table != current_table:
            current_table = table
            lines += ["", f"[{table}]"]
        first_clause = re.split(r"[:;] |\. |\.$", help_of[key])[0]
        lines += textwrap.wrap(
            f"{first_clause}.", COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        lines.append(f"{name} = {toml(value)}")
    return "\n".join(lines) + "\n"


def _key_values(args: argparse.Namespace, sizes: TextSizes) -> dict[str, Any]:
    """Return the keys of the run file with their values, which follow from the text."""
    tokens = sizes.tokens
    # a hundred samples at least, if sequences can be so short
    shortest = SEQUENCE_LENGTHS[-1]
    length = next((length for length in SEQUENCE_LENGTHS if tokens >= 100 * length), shortest)
    samples = tokens // length
    if samples < 3:
        raise UserError.of("command.too_little_text", source=args.source, tokens=tokens)
    # the largest batch of which the text has twenty
    batch = next((size for size in BATCH_SIZES if samples >= 20 * size), 1)
    steps = min(MAX_STEPS, max(MIN_STEPS, EPOCHS * samples // batch))
    # a tenth fewer than held out, for the tokens of the text are estimated
    surely_held_out = int(0.9 * HELD_OUT * samples)
    return _model_and_text_keys(args, sizes) | {
        "data.held_out": HELD_OUT,
        "precision.compute": "fp32",
        "lr.peak": 3e-4 if args.preset else 2e-3,
        "lr.warmup": 0.1,  # a part of the schedule, so that train.steps alone can be changed
        "train.steps": steps,
        "train.global_batch": batch,
        "train.micro_batch": max(1, batch // 4),
        "train.seq_length": length,
        "train.eval_every": max(1, steps // 10),
        "train.eval_samples": max(1, min(EVAL_SAMPLES, surely_held_out)),
        "train.folder": _new_run_folder(args.source),
        "checkpoint.every": max(1, steps // 4),
        "log.sample": sizes.begins,
    }


def _model_and_text_keys(args: argparse.Namespace, sizes: TextSizes) -> dict[str, Any]:
    """Return the keys of the model, which is the demo's or smaller unless --preset names another,
    of the text, and of its tokenizer."""
    preset = args.preset or DEMO_PRESET
    values: dict[str, Any] = {"model.preset": preset}
    if sizes.tokens < SMALL_TEXT and args.preset is None:
        values |= {f"model.{key}": value for key, value in SMALL_MODEL.items()}
    if PRESETS[preset].get("vocab"):
        values["model.vocab"] = 0  # the tokenizer decides, not the preset
    values["data.source"] = args.source
    values |= _given_text_options(args)
    if sizes.vocab_size is None:
        values["data.tokenizer"] = CHARACTERS
    else:
        values["data.vocab_size"] = sizes.vocab_size
    return values


def _given_text_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of how the text is read that are not the defaults."""
    options = text_options(args, skip_bad=args.skip_bad)
    defaults = TextOptions()
    values: dict[str, Any] = {}
    if options.field != defaults.field:
        values["data.text_field"] = options.field
    if options.encoding != defaults.encoding:
        values["data.encoding"] = options.encoding
    if options.exclude:
        values["data.exclude"] = list(options.exclude)
    if options.skip_bad:
        values["data.skip_bad"] = options.skip_bad
    return values


def _new_run_folder(source: str) -> str:
    """Return a folder for the run that does not exist yet, outside of the folder of the text."""
    if is_url(source):
        source = without_query(source)
    path = Path(source).expanduser()
    if has_magic(source) and not path.exists():
        # the folder in which the pattern begins
        path = next(parent for parent in path.parents if not has_magic(str(parent)))
    name = path.resolve().stem if source != STANDARD_LIBRARY else source
    # a text around the working directory would have "runs" inside it
    contains_cwd = path.is_dir() and path.resolve() in (Path.cwd(), *Path.cwd().parents)
    parent = Path("runs")
    if contains_cwd:
        parent = Path(path, "..", f"{name}-runs")
    folder = parent / name
    number = 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return str(folder)
