"""`megaprec data verify PATH`: check that data is complete and fits its tokenizer, before a run
uses it.

A data set (the prefix of a .bin and .idx pair), a text or a folder is read once from end to end.
Each check prints a
line: `ok`, `note` (it can be trained on) or `bad`. Exit code: 0 if all is ok, 1 if there are notes,
2 if something is bad.
"""

import argparse
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from megaprec.data.files import beside
from megaprec.data.index_check import CHUNK
from megaprec.data.indexed import IndexedDataset
from megaprec.data.intact import place_of, read_record, scan_file
from megaprec.data.text import left_out_words, open_source
from megaprec.data.tokenizer import Tokenizer, has_built, load_tokenizer
from megaprec.errors import UserError
from tools.console.tables import put
from tools.console.units import counted

LEVELS = ("ok", "note", "bad")
OK, NOTE, BAD = range(3)

Finding = tuple[int, str, str]  # level, what was looked at, what was seen


def verify(args: argparse.Namespace) -> int:
    """Run `megaprec data verify`; return the worst level. Raises UserError if the path does not
    exist."""
    found = list[Finding]()
    for level, what, seen in _shown(
        args.path, findings(args.path, args.tokenizer, args.text_field)
    ):
        found.append((level, what, seen))
        if not args.json:
            print(f"{LEVELS[level]:<5} {what:<10} {seen}")
    worst = max(level for level, _, _ in found)
    put(
        args,
        lambda: {"worst": LEVELS[worst], "findings": [_entry(*one) for one in found]},
        lambda: None,
    )
    return worst


def _shown(path: str, each: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings; while one is looked for, say so on a terminal: large files take minutes
    to read."""
    while True:
        with Console(stderr=True).status(f"reading {escape(path)}"):
            found = next(each, None)
        if found is None:
            return
        yield found


def _entry(level: int, what: str, seen: str) -> dict[str, str]:
    return {"level": LEVELS[level], "check": what, "seen": seen}


def findings(path: str, tokenizer: Path | None, text_field: str = "text") -> Iterator[Finding]:
    """Yield the findings on a data set or a text. Raises UserError for an option that only the
    other one has."""
    if path.endswith((".bin", ".idx")):
        path = path[:-4]
    if beside(Path(path), ".idx").exists() or beside(Path(path), ".bin").exists():
        if text_field != "text":
            raise UserError(
                f"--text-field {text_field}: {path} is a data set of tokens, which has no fields"
            )
        yield from _of_data_set(Path(path), tokenizer)
    else:
        if tokenizer:
            raise UserError(
                f"--tokenizer {tokenizer}: {path} is text, which has no ids yet: leave the "
                "option out"
            )
        yield from _of_text(path, text_field)


def _of_text(path: str, text_field: str) -> Iterator[Finding]:
    source = open_source(path, text_field=text_field)
    documents = chars = empty = 0
    try:
        for _, pieces in groupby(source, key=itemgetter(0)):
            length = sum(len(text) for _, text in pieces)
            documents = documents + 1
            chars = chars + length
            empty = empty + (length == 0)
    except UserError as error:
        yield from ((BAD, "text", problem) for problem in error.problems)
        return
    yield (
        OK,
        "text",
        (
            f"{counted(documents, 'document')} in {counted(len(source.files), 'file')}, "
            f"{counted(chars, 'character')}"
        ),
    )
    if source.left_out:
        yield OK, "left out", ", ".join(left_out_words(source.left_out))
    if empty == documents:
        yield BAD, "documents", "there is none with text"
    elif empty:
        yield NOTE, "documents", f"{counted(empty, 'empty one')} left out"


def _of_data_set(prefix: Path, given: Path | None) -> Iterator[Finding]:
    try:
        dataset = IndexedDataset(prefix, again=True)
    except UserError as error:
        yield from ((BAD, "index", problem) for problem in error.problems)
        return
    if not dataset.num_tokens:
        yield BAD, "index", "there is no token"
        return
    shown = (
        (dataset.num_documents, "document"),
        (dataset.num_sequences, "sequence"),
        (dataset.num_tokens, "token"),
    )
    counts = ", ".join(counted(number, what) for number, what in shown)
    yield OK, "index", f"{counts} of {dataset.dtype.name}"
    yield from ((NOTE, "index", note) for note in dataset.notes)
    left = beside(prefix, ".model")
    file = given or (left if left.is_file() else None)
    try:
        tokenizer = load_tokenizer(file) if file else None
        yield from ((NOTE, "tokenizer", note) for note in (tokenizer.notes if tokenizer else ()))
    except UserError as error:
        yield from ((BAD, "tokenizer", problem) for problem in error.problems)
        tokenizer = None
    yield from _of_ids(dataset, tokenizer)
    yield from _of_documents(dataset, tokenizer)
    yield from _of_record(dataset, tokenizer)


def _of_ids(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    try:
        dataset.require_ids()
    except UserError as error:
        yield from ((BAD, "ids", problem) for problem in error.problems)
        return
    whole = scan_file(beside(dataset.prefix, ".bin"), dataset.dtype, again=True)
    seen = f"{whole.low:,} to {whole.high:,}"
    if tokenizer is None and whole.low >= 0:
        yield NOTE, "ids", f"{seen}; no tokenizer to compare with: give --tokenizer"
        return
    size = tokenizer.vocab_size if tokenizer else whole.high + 1
    if (token := dataset.first_outside(size)) is not None:
        if whole.low < 0:
            what = "token ids cannot be negative"
        else:
            what = f"but there are {size:,} tokens: it is another one's data"
        yield (
            BAD,
            "ids",
            (
                f"{seen}: {what}; the first is {dataset.tokens(token, 1)[0]} "
                f"{place_of(dataset, token)}"
            ),
        )
    elif tokenizer:
        yield OK, "ids", f"{seen}, of {tokenizer.vocab_size:,} tokens in {tokenizer.path}"


def _of_documents(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    lengths = dataset.document_lengths()
    if empty := int((lengths == 0).sum()):
        yield NOTE, "documents", f"{empty:,} of {len(lengths):,} are empty"
    else:
        yield OK, "documents", f"{lengths.min():,} to {lengths.max():,} tokens, none is empty"
    if tokenizer is None or tokenizer.eos is None or dataset.dtype.kind == "f":
        return
    ends = np.cumsum(lengths)[lengths > 0] - 1
    open_ended = 0
    for start in range(0, len(ends), CHUNK):
        last = np.array([dataset.tokens(int(end), 1)[0] for end in ends[start : start + CHUNK]])
        open_ended += int((last != tokenizer.eos).sum())
    if open_ended:
        yield (
            NOTE,
            "ends",
            f"{counted(open_ended, 'document')} without the end-of-document token {tokenizer.eos}",
        )
    else:
        yield OK, "ends", f"every document ends with the end-of-document token {tokenizer.eos}"


def _of_record(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    path = beside(dataset.prefix, ".json")
    if not path.is_file():
        yield (
            NOTE,
            "record",
            (
                f"there is no {path.name}: not made by `megaprec data build`, so its checksums "
                "cannot be compared"
            ),
        )
        return
    try:
        record = read_record(dataset.prefix)
    except UserError as error:
        yield from ((BAD, "record", problem) for problem in error.problems)
        return
    assert record is not None
    if unknown := record.get("unknown"):
        yield NOTE, "unknown", f"{unknown:,} tokens stand for text that the tokenizer does not know"
    for suffix in ("bin", "idx"):
        file = beside(dataset.prefix, f".{suffix}")
        ids = dataset.dtype if suffix == "bin" and dataset.dtype.kind != "f" else None
        if (
            scan_file(file, ids, again=suffix == "idx" or ids is None).sha256
            == record[f"{suffix}_sha256"]
        ):
            yield OK, "hash", f"{file.name} is as it was built"
        else:
            yield BAD, "hash", f"{file.name} is not what was built: copy it again or build it again"
    if tokenizer and not has_built(tokenizer, record):
        yield BAD, "tokenizer", f"{tokenizer.path} is not the one that the data set was built with"
    elif tokenizer and record.get("eos", tokenizer.eos) != tokenizer.eos:
        yield (
            NOTE,
            "tokenizer",
            f"the settings beside {tokenizer.path} name another end of documents than at the build",
        )
    elif tokenizer:
        yield OK, "tokenizer", f"{tokenizer.path} is the one that the data set was built with"
