"""`megaprec data`: tokenize text into a data set, inspect one, verify data, train a tokenizer, and
say what a run will read."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from megaprec.errors import Problem, UserError
from megaprec.resources import cores, most_processes
from megaprec.text.build import BuildResult, prepare
from megaprec.text.readers import FOLDER_ENDINGS
from megaprec.text.sources import TextSource, open_source
from megaprec.text.text_files import left_out_words
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import learn_characters, train_hugging_face, train_sentencepiece
from megaprec.tokens.copies import file_here, is_there
from megaprec.tokens.files import exclusive_lock
from megaprec.tokens.index_check import CHUNK
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.intact import DataSetContents, check_vocabulary, contents_of
from megaprec.tokens.places import is_remote, path_of
from megaprec.tokens.samples import Pack
from megaprec.url_secrets import masked
from tools.commands import data_plan as planning
from tools.commands import data_truncations
from tools.commands import data_verify as verification
from tools.commands.options import add_overrides
from tools.commands.text_options import (
    add_chat_template,
    add_skip_bad,
    add_text_options,
    text_options,
    tokenizer_path,
)
from tools.config.tables.table import MAX_SIZE
from tools.console.build_progress import build_progress, skipped_words, tell_left_out
from tools.console.json_output import add_json, print_result
from tools.console.tables import print_table
from tools.console.units import counted

MAX_TOKENS_SHOWN = 64  # of each sample document

SubParsers = argparse._SubParsersAction  # argparse has no public name for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `data`."""
    parser.description = __doc__
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    _add_build(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_tokenizer(commands)
    _add_plan(commands)


def _add_plan(commands: SubParsers) -> None:
    parser = commands.add_parser(
        "plan",
        help="say what a run will read of each of its data sets",
        description=planning.__doc__,
    )
    parser.add_argument("file", metavar="RUN.toml", help="run file")
    add_overrides(parser)
    add_json(parser)
    parser.set_defaults(run=planning.plan)


def _add_verify(commands: SubParsers) -> None:
    parser = commands.add_parser(
        "verify",
        help="check a data set or a text from end to end",
        description=verification.__doc__,
    )
    parser.add_argument(
        "path", metavar="PATH", help="data set, without .bin, or any source of `data build`"
    )
    parser.add_argument(
        "--tokenizer",
        type=tokenizer_path,
        metavar="FILE",
        help="tokenizer of the token ids (default: PREFIX.model), or of --chat-template",
    )
    add_text_options(parser)
    add_chat_template(parser)
    add_json(parser)
    parser.set_defaults(run=verification.verify)


def _add_tokenizer(commands: SubParsers) -> None:
    parser = commands.add_parser("tokenizer", help="train a tokenizer on a text")
    _add_source(parser, "Not of conversations: a tokenizer is learned from text.")
    parser.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="NAME.model: SentencePiece; NAME.json: Hugging Face tokenizer.json",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary size, in tokens")
    size.add_argument(
        "--characters",
        action="store_true",
        help="each character of the text is a token; FILE may have either ending",
    )
    parser.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="further special token of a tokenizer.json, such as '<|im_start|>'; may be given "
        "several times",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing tokenizer of this name"
    )
    parser.set_defaults(run=train_tokenizer)


def _add_source(parser: argparse.ArgumentParser, conversations: str) -> None:
    """Add the text to read. conversations: a sentence on rows that are conversations."""
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="'python' (the standard library); a text file; a file of rows or samples: .arrow, "
        ".tar (WebDataset), .mds, and those of folders; a folder of "
        f"{' '.join(FOLDER_ENDINGS)} (all but .parquet also with .gz or .zst); a data set that "
        "Hugging Face's datasets has saved, or a folder of MDS; a pattern such as "
        "'texts/**/*.md'; a URL (s3://, gs://, hf://, https://) of any of these; several are read "
        "one after the other. "
        f"{conversations}",
    )
    add_text_options(parser)
    add_skip_bad(parser)
    parser.add_argument(
        "--max-chars", type=int, metavar="N", help="use only the first N characters"
    )


def _add_build(commands: SubParsers) -> None:
    parser = commands.add_parser("build", help="tokenize a text into PREFIX.bin and PREFIX.idx")
    _add_source(parser, "Rows may be conversations: --chat-template.")
    add_chat_template(parser)
    parser.add_argument(
        "prefix", metavar="PREFIX", type=Path, help="data set to write, without .bin"
    )
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--tokenizer",
        type=tokenizer_path,
        metavar="FILE",
        help="SentencePiece .model or tokenizer.json",
    )
    tokenizer.add_argument(
        "--vocab-size", type=int, metavar="N", help="train a SentencePiece model as PREFIX.model"
    )
    tokenizer.add_argument(
        "--characters",
        action="store_true",
        help="each character of the text is a token; the tokenizer is written as PREFIX.model",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=cores(),
        metavar="N",
        help="number of processes that tokenize (default: one per core)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing data set of this name"
    )
    parser.set_defaults(run=build)


def _add_inspect(commands: SubParsers) -> None:
    parser = commands.add_parser("inspect", help="print counts and decoded samples of a data set")
    parser.add_argument("prefix", metavar="PREFIX", help="data set, without .bin, or its URL")
    parser.add_argument(
        "--tokenizer",
        type=tokenizer_path,
        metavar="FILE",
        help="tokenizer that decodes the samples (default: PREFIX.model)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=3,
        metavar="N",
        help="number of documents to show (default: 3)",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="say what samples of N tokens do to documents: how many are cut",
    )
    parser.add_argument(
        "--pack",
        choices=[way for way in get_args(Pack) if way != "none"],
        help="say it of samples of packed documents too (data.pack)",
    )
    add_json(parser)
    parser.set_defaults(run=inspect)


def build(args: argparse.Namespace) -> int:
    """Run `megaprec data build`. Raises UserError on bad input, before anything is written.

    One process at a time builds a prefix; others wait, and reuse its result if they were to build
    the same.
    """
    _check_build(args)
    source = _open(args, args.chat_template)
    if source.options.chats is not None:
        _print_lines(source.options.chats.notes)
    if args.tokenizer:
        _print_notes(load_tokenizer(args.tokenizer))  # refused before there is a lock
    # beside the data set, so that all hosts of a shared folder see it
    lock = args.prefix.with_name(f".{args.prefix.name}.lock")
    start = time.perf_counter()
    with (
        exclusive_lock(lock, partial(_print_waiting, args.prefix), leave_none=True),
        build_progress(
            source.name, source.total_chars(), left_out_words(source.left_out)
        ) as on_progress,
    ):
        result = prepare(
            source,
            args.prefix,
            tokenizer=args.tokenizer,
            vocab_size=args.vocab_size,
            characters=args.characters,
            workers=args.workers,
            overwrite=args.overwrite,
            on_progress=on_progress,
        )
    print(_summary(source, result))
    # a speed of work that was not done says nothing
    if not result.reused:
        seconds = time.perf_counter() - start
        tokens_per_second = result.tokens / seconds
        megachars_per_second = result.chars / seconds / 1e6
        print(
            f"{seconds:,.1f} s, {tokens_per_second:,.0f} tokens/s, {megachars_per_second:,.1f} M "
            "characters/s"
        )
    return 0


def _open(args: argparse.Namespace, chat_template: str = "") -> TextSource:
    """Open the text that `_add_source` names. Raises UserError."""
    options = text_options(
        args, max_chars=args.max_chars, skip_bad=args.skip_bad, chat_template=chat_template
    )
    return open_source(args.source, options)


def _check_build(args: argparse.Namespace) -> None:
    """Raise UserError for options of `data build` that cannot be."""
    if args.workers < 1:
        raise UserError.of("command.workers", workers=args.workers)
    if args.workers > most_processes():
        raise UserError.of(
            "command.workers_beyond_cores",
            workers=args.workers,
            cores=cores(),
            most_processes=most_processes(),
        )
    if args.prefix.name in ("", ".."):
        raise UserError.of("command.data_set_name", prefix=args.prefix)
    # who completes the name by Tab gives one of the two files
    if args.prefix.suffix in (".bin", ".idx"):
        raise UserError.of(
            "command.data_set_prefix", prefix=args.prefix, common_prefix=args.prefix.with_suffix("")
        )


def _print_notes(tokenizer: Tokenizer) -> None:
    _print_lines(tokenizer.notes)


def _print_lines(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def _print_waiting(prefix: Path) -> None:
    print(f"waiting for another process, which builds {prefix}", file=sys.stderr, flush=True)


def train_tokenizer(args: argparse.Namespace) -> int:
    """Run `megaprec data tokenizer`. Raises UserError on bad input, before anything is written."""
    path: Path = args.path
    if args.special and (path.suffix != ".json" or args.characters):
        raise UserError.of("command.special_tokens", path=path)
    if path.suffix not in (".json", ".model"):
        raise UserError.of("command.tokenizer_suffix", path=path)
    source = _open(args)
    # `build_progress` does it for a data set
    tell_left_out(source.name, left_out_words(source.left_out))
    skipped: list[Problem] = []
    texts = (text for _, text in source.reading(skipped.append))
    if args.characters:
        learn_characters(texts, path, args.overwrite)
    elif path.suffix == ".json":
        train_hugging_face(texts, path, args.vocab_size, args.overwrite, args.special)
    else:
        train_sentencepiece(texts, path.with_suffix(""), args.vocab_size, args.overwrite)
    size = load_tokenizer(path).vocab_size
    print(f"{path}: {size:,} tokens, learned from {masked(source.name)}")
    for problem in skipped:
        print(f"skipped    {problem}", file=sys.stderr)
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Run `megaprec data inspect`. Raises UserError if the data set is missing or corrupt."""
    _require_inspect_options(args)
    prefix = path_of(args.prefix)
    dataset = IndexedDataset(prefix)
    # a file that was named must be there; one beside the data set may be
    tokenizer = None
    if args.tokenizer or is_there(prefix, ".model"):
        tokenizer = load_tokenizer(args.tokenizer or file_here(prefix, ".model"))
    contents = contents_of(dataset)
    for note in dataset.notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    if tokenizer:
        _print_notes(tokenizer)
        check_vocabulary(dataset, contents, tokenizer.vocab_size)
    shown_documents = _spaced_documents(dataset.num_documents, args.samples)
    truncations = data_truncations.by_way(dataset, args.seq_length, args.pack)

    def document() -> dict[str, Any]:
        counts = _document(dataset, contents, shown_documents, tokenizer)
        if truncations:
            counts["truncations"] = {way: counted._asdict() for way, counted in truncations.items()}
        return counts

    def show() -> None:
        _show(dataset, contents, shown_documents, tokenizer)
        if truncations:
            print()
            print_table(data_truncations.table(args.seq_length, truncations))

    return print_result(args, document, show)


def _require_inspect_options(args: argparse.Namespace) -> None:
    """Raise UserError for options of `data inspect` that are out of their range."""
    if args.samples < 0:
        raise UserError.of("command.samples", samples=args.samples)
    if args.pack and args.seq_length is None:
        raise UserError.of("command.pack_without_length", pack=args.pack)
    if args.seq_length is not None and not 1 <= args.seq_length <= MAX_SIZE:
        raise UserError.of("command.inspected_length", length=args.seq_length, most=MAX_SIZE)


def _show(
    dataset: IndexedDataset,
    contents: DataSetContents,
    shown_documents: Sequence[int],
    tokenizer: Tokenizer | None,
) -> None:
    """Print the counts of a data set and the beginnings of some documents."""
    for name, value in _counts(dataset, contents).items():
        text = str(value)
        if name == "counted share":
            text = f"{value:.1%} of the tokens count in the loss"
        elif isinstance(value, float):
            text = f"{value:,.1f}"
        elif isinstance(value, int):
            text = f"{value:,}"
        unit = " tokens" if name.endswith(" document") else ""
        print(f"{name:<18} {text}{unit}")
    if dataset.has_mask and shown_documents:
        print("\nTokens after + count in the loss, those after - do not.")
    for index in shown_documents:
        print(f"\n--- document {index}: {_excerpt(dataset, index, tokenizer)}")


def _document(
    dataset: IndexedDataset,
    contents: DataSetContents,
    shown_documents: Sequence[int],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return counts and excerpts of a data set for programs."""
    document = dict[str, Any]()
    # names without dots and blanks: bin_bytes, mean_document
    for name, value in _counts(dataset, contents).items():
        document[name.removeprefix(".").replace(" ", "_")] = value
    document["samples"] = [
        {"document": index, "excerpt": _excerpt(dataset, index, tokenizer)}
        for index in shown_documents
    ]
    return document


def _summary(source: TextSource, result: BuildResult) -> str:
    """Return the line about a data set that was built or reused."""
    state = "already there, unchanged" if result.reused else "built"
    summary = (
        f"{result.prefix}: {state} from {masked(source.name)}: "
        f"{counted(result.documents, 'document')}, {counted(result.chars, 'character')}, "
        f"{result.tokens:,} tokens, vocabulary {result.vocab_size:,}"
    )
    if result.unknown:
        summary += f"; {result.unknown:,} tokens stand for text that the tokenizer does not know"
    if result.counted is not None:
        summary += f"; {result.counted:,} of the tokens are answers, which count in the loss"
    if result.unanswered:
        summary += f"; {counted(result.unanswered, 'document')} without an answer"
    if result.skipped:
        summary += f"; {skipped_words(result)}"
    if result.eos is None and source.options.chats is None:
        summary += "; the tokenizer has no end-of-document token, so none was written"
    return summary


def _counts(dataset: IndexedDataset, contents: DataSetContents) -> dict[str, int | float | str]:
    """Return the counts to print by name, in their order."""
    lengths = dataset.document_lengths()
    counts: dict[str, int | float | str] = {
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        ".bin bytes": dataset.stored_bytes,
        ".idx bytes": dataset.idx_file.stat().st_size,
    }
    if dataset.has_mask:
        num_counted = _count_counted(dataset)
        counts["counted tokens"] = num_counted
        counts["counted share"] = num_counted / max(1, dataset.num_tokens)
    # An empty set has no mean, and no largest id.
    if len(lengths):
        counts["shortest document"] = int(lengths.min())
        counts["mean document"] = float(lengths.mean())
        counts["longest document"] = int(lengths.max())
        # of a large set at a URL, of what was read of it
        is_here = not is_remote(dataset.prefix)
        counts["largest id"] = int(dataset.max_token()) if is_here else contents.high
    return counts


def _spaced_documents(total: int, wanted: int) -> list[int]:
    """Return at most `wanted` document numbers, evenly spaced from the first to the last."""
    count = max(0, min(wanted, total))
    spaced = np.linspace(0, total - 1, count)
    return sorted({int(index) for index in spaced})


def _excerpt(dataset: IndexedDataset, index: int, tokenizer: Tokenizer | None) -> str:
    """Return the beginning of a document, as text if there is a tokenizer, otherwise as token ids.

    With a loss mask each span of tokens that count, or do not, stands on lines of its own.
    """
    document = dataset.document(index)
    # a document may be longer than a terminal
    ids = document[:MAX_TOKENS_SHOWN].tolist()
    extent = f"first {len(ids)} of " if len(document) > len(ids) else ""
    head = f"{extent}{len(document):,} tokens"
    if not dataset.has_mask:
        return f"{head}\n{_text(ids, tokenizer)}"
    begin = int(dataset.document_lengths()[:index].sum())
    loss_mask = dataset.counted(begin, len(document))
    lines = [f"{head}, {loss_mask.sum():,} count"]
    # not strict: the ids are the first of the document
    counted_and_id = zip(loss_mask.tolist(), ids, strict=False)
    for is_counted, span in groupby(counted_and_id, key=itemgetter(0)):
        sign = "+" if is_counted else "-"
        text = _text([token for _, token in span], tokenizer)
        lines += [f"{sign} {line}" for line in text.splitlines() or [""]]
    return "\n".join(lines)


def _text(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Return tokens as text if there is a tokenizer, otherwise as ids."""
    return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))


def _count_counted(dataset: IndexedDataset) -> int:
    """Return the number of tokens that count in the loss."""
    starts = range(0, dataset.num_tokens, CHUNK)
    chunks = (dataset.counted(start, min(CHUNK, dataset.num_tokens - start)) for start in starts)
    return sum(int(chunk.sum()) for chunk in chunks)
