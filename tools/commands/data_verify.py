"""`megaprec data verify PATH`: check that data is complete and fits its tokenizer, before a run
uses it.

A data set (the prefix of a .bin and .idx pair), a text or a folder is read once from end to end.
Each check prints a line: `ok`, `note` (it can be trained on) or `bad`. Exit code: 0 if all is ok, 1
if there are notes, 2 if something is bad.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from megaprec.errors import UserError
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.text_files import left_out_words
from megaprec.text.tokenizer import Tokenizer, has_built, load_tokenizer
from megaprec.tokens.copies import file_here, is_there
from megaprec.tokens.files import with_suffix
from megaprec.tokens.index_check import CHUNK
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.intact import MASK_DIGEST, describe_token_place, read_record, scan_file
from megaprec.tokens.loss_mask import SUFFIX as LOSS_MASK
from megaprec.tokens.places import path_of
from tools.commands.text_options import text_options
from tools.console.json_output import print_result
from tools.console.progress_bar import console_of
from tools.console.units import counted

LEVELS = ("ok", "note", "bad")
OK, NOTE, BAD = range(3)  # exit codes, and places in LEVELS

Finding = tuple[int, str, str]  # level, what was looked at, what was seen


def verify(args: argparse.Namespace) -> int:
    """Run `megaprec data verify`; return the worst level. Raises UserError if the path does not
    exist."""
    entries = list[dict[str, str]]()
    worst = OK
    all_findings = findings(
        args.path, args.tokenizer, text_options(args, chat_template=args.chat_template)
    )
    for level, check, seen in _with_status(args.path, all_findings):
        worst = max(worst, level)
        entries.append({"level": LEVELS[level], "check": check, "seen": seen})
        # as they come, for reading all of a large set takes minutes
        if not args.json:
            print(f"{LEVELS[level]:<5} {check:<10} {seen}")
    print_result(args, lambda: {"worst": LEVELS[worst], "findings": entries}, lambda: None)
    return worst


def _with_status(path: str, all_findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings; while one is looked for, say so on a terminal: large files take minutes
    to read."""
    while True:
        with console_of(stderr=True).status(f"reading {escape(path)}"):
            finding = next(all_findings, None)
        if finding is None:
            return
        yield finding


def _problems(check: str, error: UserError) -> Iterator[Finding]:
    """Yield the problems of an error as findings."""
    for problem in error.problems:
        yield BAD, check, problem


def findings(
    path: str, tokenizer: Path | None, options: TextOptions | None = None
) -> Iterator[Finding]:
    """Yield the findings on a data set or a text. Raises UserError for an option that only the
    other one has."""
    options = options or TextOptions()
    # who completes the name by Tab gives one of the two files
    if path.endswith((".bin", ".idx")):
        path = path[:-4]
    prefix = path_of(path)
    if is_there(prefix, ".idx") or is_there(prefix, ".bin"):
        if options != TextOptions():
            raise UserError.of("command.text_options_of_tokens", path=path)
        yield from _data_set_findings(prefix, tokenizer)
    else:
        if tokenizer and options.chats is None:
            raise UserError.of("command.tokenizer_of_text", tokenizer=tokenizer, path=path)
        yield from _text_findings(path, options)


def _text_findings(path: str, options: TextOptions) -> Iterator[Finding]:
    """Yield the findings on a text, whose documents are counted."""
    # files that `data build` would leave out are named below
    source = open_source(path, options)
    documents = 0
    chars = 0
    empty = 0
    try:
        # a long document comes in several pieces, (number of the document, text) each
        for _, pieces in groupby(source, key=itemgetter(0)):
            length = sum(len(text) for _, text in pieces)
            documents += 1
            chars += length
            if length == 0:
                empty += 1
    except UserError as error:
        yield from _problems("text", error)
        return
    counts = (
        f"{counted(documents, 'document')} in {counted(len(source.files), 'file')}, "
        f"{counted(chars, 'character')}"
    )
    yield OK, "text", counts
    if source.left_out:
        yield OK, "left out", ", ".join(left_out_words(source.left_out))
    if empty == documents:
        yield BAD, "documents", "there is none with text"
    elif empty:
        yield NOTE, "documents", f"{counted(empty, 'empty one')} left out"


def _data_set_findings(prefix: Path, tokenizer_file: Path | None) -> Iterator[Finding]:
    """Yield the findings on a data set. tokenizer_file: of --tokenizer; None: the one beside it."""
    # again: the files are read anew, whatever was found of them before
    try:
        dataset = IndexedDataset(prefix, again=True)
    except UserError as error:
        yield from _problems("index", error)
        return
    # the other checks need an id
    if not dataset.num_tokens:
        yield BAD, "index", "there is no token"
        return
    counts = (
        f"{counted(dataset.num_documents, 'document')}, "
        f"{counted(dataset.num_sequences, 'sequence')}, "
        f"{counted(dataset.num_tokens, 'token')}"
    )
    yield OK, "index", f"{counts} of {dataset.dtype.name}"
    for note in dataset.notes:
        yield NOTE, "index", note
    if tokenizer_file is None and is_there(prefix, ".model"):
        tokenizer_file = file_here(prefix, ".model", again=True)
    tokenizer = None
    if tokenizer_file is not None:
        try:
            tokenizer = load_tokenizer(tokenizer_file)
            for note in tokenizer.notes:
                yield NOTE, "tokenizer", note
        except UserError as error:
            yield from _problems("tokenizer", error)
    yield from _id_findings(dataset, tokenizer)
    yield from _document_findings(dataset, tokenizer)
    yield from _record_findings(dataset, tokenizer)


def _id_findings(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield a finding on the token ids: good if each is that of a token."""
    try:
        dataset.require_integer_ids()
    except UserError as error:
        yield from _problems("ids", error)
        return
    ids = scan_file(with_suffix(dataset.prefix, ".bin"), dataset.dtype, again=True)
    bounds = f"{ids.low:,} to {ids.high:,}"
    if tokenizer is None and ids.low >= 0:
        yield NOTE, "ids", f"{bounds}; no tokenizer to compare with: give --tokenizer"
        return
    # without a tokenizer only negative ids are outside
    vocab_size = tokenizer.vocab_size if tokenizer else ids.high + 1
    first_outside = dataset.first_outside(vocab_size)
    if first_outside is not None:
        if ids.low < 0:
            reason = "token ids cannot be negative"
        else:
            reason = f"but there are {vocab_size:,} tokens: it is another one's data"
        first_id = dataset.tokens(first_outside, 1)[0]
        location = describe_token_place(dataset, first_outside)
        yield BAD, "ids", f"{bounds}: {reason}; the first is {first_id} {location}"
    elif tokenizer:
        yield OK, "ids", f"{bounds}, of {tokenizer.vocab_size:,} tokens in {tokenizer.path}"


def _document_findings(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield findings on documents: if some are empty, and if each ends as the tokenizer says."""
    lengths = dataset.document_lengths()
    if empty := int((lengths == 0).sum()):
        yield NOTE, "documents", f"{empty:,} of {len(lengths):,} are empty"
    else:
        yield OK, "documents", f"{lengths.min():,} to {lengths.max():,} tokens, none is empty"
    # floats are no token ids
    if tokenizer is None or tokenizer.eos is None or dataset.dtype.kind == "f":
        return
    if dataset.has_mask:  # a chat template may have ended them
        return
    ends = np.cumsum(lengths)
    last_positions = ends[lengths > 0] - 1
    open_ended = 0
    # a chunk at a time, for there may be very many documents
    for start in range(0, len(last_positions), CHUNK):
        positions = last_positions[start : start + CHUNK]
        last_ids = np.array([dataset.tokens(int(position), 1)[0] for position in positions])
        open_ended += int((last_ids != tokenizer.eos).sum())
    if open_ended:
        yield (
            NOTE,
            "ends",
            f"{counted(open_ended, 'document')} without the end-of-document token {tokenizer.eos}",
        )
    else:
        yield OK, "ends", f"every document ends with the end-of-document token {tokenizer.eos}"


def _record_findings(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield findings on the data set: if it is what `megaprec data build` recorded of it."""
    path = with_suffix(dataset.prefix, ".json")
    if not is_there(dataset.prefix, ".json"):
        reason = (
            f"there is no {path.name}: not made by `megaprec data build`, so its checksums "
            "cannot be compared"
        )
        yield NOTE, "record", reason
        return
    try:
        record = read_record(dataset.prefix)
    except UserError as error:
        yield from _problems("record", error)
        return
    # the file is there, and was read
    assert record is not None
    if unknown := record.get("unknown"):
        yield NOTE, "unknown", f"{unknown:,} tokens stand for text that the tokenizer does not know"
    yield _hash_finding(dataset, "bin", record)
    yield _hash_finding(dataset, "idx", record)
    if dataset.has_mask or MASK_DIGEST in record:
        yield _mask_finding(dataset, record)
    if tokenizer is not None:
        yield _recorded_tokenizer(record, tokenizer)


def _hash_finding(dataset: IndexedDataset, suffix: str, record: Mapping[str, Any]) -> Finding:
    """Return the finding on a file of the data set: good if it has the bytes that were recorded."""
    file = with_suffix(dataset.prefix, f".{suffix}")
    has_ids = suffix == "bin" and dataset.dtype.kind != "f"
    # the ids have been scanned just now; of other files an earlier scan may be remembered
    read_file = dataset.idx_file if suffix == "idx" else file
    scan = scan_file(read_file, dataset.dtype if has_ids else None, again=not has_ids)
    if scan.sha256 == record[f"{suffix}_sha256"]:
        return OK, "hash", f"{file.name} is as it was built"
    return BAD, "hash", f"{file.name} is not what was built: copy it again or build it again"


def _mask_finding(dataset: IndexedDataset, record: Mapping[str, Any]) -> Finding:
    """Return the finding on the loss mask: good if it is the one that was recorded."""
    file = with_suffix(dataset.prefix, LOSS_MASK)
    if not dataset.has_mask:
        return BAD, "hash", f"{file.name} is missing: copy it again or build it again"
    mask = file_here(dataset.prefix, LOSS_MASK)
    if scan_file(mask, again=True).sha256 == record.get(MASK_DIGEST):
        return OK, "hash", f"{file.name} is as it was built"
    return BAD, "hash", f"{file.name} is not what was built: copy it again or build it again"


def _recorded_tokenizer(record: Mapping[str, Any], tokenizer: Tokenizer) -> Finding:
    """Return the finding on a tokenizer: good if it built the data set, with the same settings."""
    path = tokenizer.path
    if not has_built(tokenizer, record):
        return BAD, "tokenizer", f"{path} is not the one that the data set was built with"
    if record.get("eos", tokenizer.eos) != tokenizer.eos:
        reason = f"the settings beside {path} name another end of documents than at the build"
        return NOTE, "tokenizer", reason
    return OK, "tokenizer", f"{path} is the one that the data set was built with"
