"""From text to a data set on disk: tokenize once, reuse until the text or the tokenizer changes.

`build` streams a source through a tokenizer into `PREFIX.bin/.idx`, with `eos` after each document, holding one
piece of text at a time, and records in `PREFIX.json` what it was made of. `prepare` is what a program calls: it
finds out by that record whether the work is already done, and otherwise loads or trains the tokenizer and builds.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from megaprec.data.files import beside, write_whole
from megaprec.data.indexed import IndexedDataset, IndexedWriter
from megaprec.data.text import Source
from megaprec.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from megaprec.errors import UserError

PROGRESS_CHARS = 1 << 18  # characters between two reports of progress

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class BuildResult:
    """What a build made. `tokenizer` is the path of its file; counts include the end-of-document tokens."""

    prefix: Path
    tokenizer: Path
    vocab_size: int
    eos: int | None
    documents: int
    tokens: int
    chars: int
    reused: bool = False


@dataclass
class _Counts:
    documents: int = 0
    tokens: int = 0
    chars: int = 0


def prepare(
    source: Source,
    prefix: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> BuildResult:
    """The data set of `source` at `prefix`: the one that is there if it was made of the same, else a new one.

    Give a tokenizer file, or a `vocab_size` to train one on the source as `PREFIX.model`. `UserError` if another
    data set or model has the name and may not be overwritten. One process at a time for one prefix.
    """
    if (tokenizer is None) == (vocab_size is None):
        raise UserError("give either a tokenizer file or a vocabulary size to train one, not both or neither")
    given = load_tokenizer(tokenizer) if tokenizer else None
    if result := reusable(prefix, source, tokenizer or beside(prefix, ".model"), vocab_size):
        return result
    _refuse_overwriting(prefix, overwrite)
    if vocab_size is not None:
        given = load_tokenizer(train_sentencepiece((text for _, text in source), prefix, vocab_size, overwrite))
    assert given
    return build(source, given, prefix, overwrite=overwrite, on_progress=on_progress)


def build(
    source: Source,
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> BuildResult:
    """Tokenize `source` into `PREFIX.bin/.idx` and write the record `PREFIX.json`.

    `on_progress(documents, chars, tokens)` hears of the totals so far, now and then and at the end.
    `UserError` if a data set is there and may not be overwritten, or if the source has no text. On any error
    what was there before is untouched.
    """
    _refuse_overwriting(prefix, overwrite)
    report = on_progress or (lambda documents, chars, tokens: None)
    with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
        counts = _write_documents(source, tokenizer, writer, report)
        if counts.documents == 0:
            raise UserError(f"{source.name} has no text; give a source with at least one document")
        # A record that outlived its data set would vouch for another one.
        beside(prefix, ".json").unlink(missing_ok=True)
    record = {
        "source": source.identity(),
        "tokenizer_sha256": _sha256(tokenizer.path),
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
        **asdict(counts),
    }
    write_whole(beside(prefix, ".json"), (json.dumps(record, indent=2) + "\n").encode())
    return BuildResult(prefix, tokenizer.path, tokenizer.vocab_size, tokenizer.eos, **asdict(counts))


def reusable(prefix: Path, source: Source, tokenizer: Path, vocab_size: int | None = None) -> BuildResult | None:
    """The data set at `prefix` if it is whole and was made of this source with this tokenizer file, else None.

    With `vocab_size`, the tokenizer must have just that size. The ids themselves are not read.
    """
    try:
        record = json.loads(beside(prefix, ".json").read_text("utf-8"))
        dataset = IndexedDataset(prefix)
        same = (
            record["source"] == source.identity()
            and record["tokenizer_sha256"] == _sha256(tokenizer)
            and record["tokens"] == dataset.num_tokens
            and vocab_size in (None, record["vocab_size"])
        )
        counts = {name: record[name] for name in ("vocab_size", "eos", "documents", "tokens", "chars")}
    except (OSError, ValueError, KeyError, TypeError):  # UserError is a ValueError: not whole is not reusable
        return None
    return BuildResult(prefix, tokenizer, **counts, reused=True) if same else None


def check_vocabulary(dataset: IndexedDataset, vocab_size: int) -> None:
    """`UserError` if a token id lies outside [0, vocab_size). Reads the data set once, in bounded memory."""
    low, high = dataset.token_range()
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{dataset.prefix} has token ids {low} to {high}, which a vocabulary of {vocab_size} does not hold; "
            f"set the vocabulary to at least {high + 1} or give the tokenizer's own data"
        )


def _write_documents(source: Source, tokenizer: Tokenizer, writer: IndexedWriter, report: Progress) -> _Counts:
    """Write all documents that have text, piece by piece, so that one of any length passes through."""
    counts, reported = _Counts(), 0
    ending = [] if tokenizer.eos is None else [tokenizer.eos]
    for _, pieces in groupby(source, key=itemgetter(0)):
        chars_before = counts.chars
        for _, text in pieces:
            ids = tokenizer.encode(text)
            writer.append(ids)
            counts.chars += len(text)
            counts.tokens += len(ids)
            if counts.chars - reported >= PROGRESS_CHARS:
                reported = counts.chars
                report(counts.documents, counts.chars, counts.tokens)
        if counts.chars > chars_before:
            writer.add_document(ending)
            counts.documents += 1
            counts.tokens += len(ending)
    report(counts.documents, counts.chars, counts.tokens)
    return counts


def _refuse_overwriting(prefix: Path, overwrite: bool) -> None:
    idx = beside(prefix, ".idx")
    if idx.exists() and not overwrite:
        raise UserError(f"{idx} exists and was made of another text or tokenizer; choose another prefix or remove it")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
