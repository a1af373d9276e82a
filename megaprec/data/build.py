"""From text to a data set on disk: tokenize once, reuse until the text or the tokenizer changes.

`build` streams a source through a tokenizer into `PREFIX.bin/.idx`, with `eos` after each document, holding a few
chunks of text at a time, and records in `PREFIX.json` what it was made of. Workers may be many: the bytes are the same.
A build that was killed is taken up by the next one of the same text and tokenizer where `PREFIX.resume` says. `prepare`
is what a program calls: it finds out by the record whether the work is already done, and otherwise loads or trains the
tokenizer and builds.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from megaprec.data import intact
from megaprec.data.files import beside, write_whole
from megaprec.data.indexed import IndexedDataset, IndexedWriter, Mark
from megaprec.data.text import Source
from megaprec.data.tokenizer import Tokenizer, load_tokenizer
from megaprec.data.training import train_sentencepiece
from megaprec.data.workers import Chunk, encode_chunks
from megaprec.errors import UserError

CHUNK_CHARS = 1 << 20  # of text that is encoded together; where chunks are cut shows in no byte of the result
PIECE_COST = 64  # characters that a piece counts for besides its own, so that tiny ones fill a chunk too
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RESUME_CHARS = 1 << 26  # of text between two places from which a killed build goes on

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
    workers: int = 1,
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
    with suppress(*([UserError] if overwrite else [])):  # a damaged one is replaced then
        if result := reusable(prefix, source, tokenizer or beside(prefix, ".model"), vocab_size):
            return result
    _refuse_overwriting(prefix, overwrite)
    if vocab_size is not None:
        given = load_tokenizer(train_sentencepiece((text for _, text in source), prefix, vocab_size, overwrite))
    assert given
    return build(source, given, prefix, workers=workers, overwrite=overwrite, on_progress=on_progress)


def build(
    source: Source,
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> BuildResult:
    """Tokenize `source` into `PREFIX.bin/.idx` and write the record `PREFIX.json`.

    workers: processes that encode, if the text is long enough to be worth them; their number shows in no byte.
    `on_progress(documents, chars, tokens)` hears of the totals so far, now and then and at the end.
    `UserError` if a data set is there and may not be overwritten, or if the source has no text. On any error
    what was there before is untouched.
    """
    _refuse_overwriting(prefix, overwrite)
    wanted, resume = made_of(source, tokenizer), beside(prefix, ".resume")
    state = _left(prefix, wanted)
    try:
        _write(source, tokenizer, prefix, wanted, state, workers, on_progress or (lambda *totals: None))
    except Exception as error:
        resume.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL:
            raise UserError(
                f"{prefix}: no room for the data set ({error.strerror}); what was written of it is removed: "
                "free some room or choose another place"
            ) from error
        raise
    counts = asdict(state.counts)
    content = json.dumps(wanted | counts | _digests(prefix), indent=2)
    write_whole(beside(prefix, ".json"), f"{content}\n".encode())
    resume.unlink(missing_ok=True)
    return BuildResult(prefix, tokenizer.path, tokenizer.vocab_size, tokenizer.eos, **counts)


def _digests(prefix: Path) -> dict[str, Any]:
    """Of both files, and of the blocks of a large one, by which some of it can be checked at a start."""
    files = {suffix: beside(prefix, f".{suffix}") for suffix in ("bin", "idx")}
    digests: dict[str, Any] = {f"{suffix}_sha256": _sha256(file) for suffix, file in files.items()}
    if files["bin"].stat().st_size > intact.WHOLE:
        digests["blocks"] = {"bytes": intact.BLOCK, "sha256": intact.block_digests(files["bin"])}
    return digests


def reusable(prefix: Path, source: Source, tokenizer: Path, vocab_size: int | None = None) -> BuildResult | None:
    """The data set at `prefix` if it is there and was made of this source with this tokenizer file, else None.

    With `vocab_size`, the tokenizer must have just that size. Raises UserError if it is damaged, as far as sizes tell;
    `megaprec.data.intact` looks at the rest.
    """
    idx = beside(prefix, ".idx")
    if not idx.exists() or not tokenizer.is_file():
        return None
    try:
        record = intact.read_record(prefix)
        if record is None or not _is_of(record, source, tokenizer, vocab_size):
            return None
        if record["tokens"] != (found := IndexedDataset(prefix).num_tokens):
            raise UserError(f"{prefix} has {found} tokens where {prefix.name}.json says {record['tokens']}")
    except UserError as error:
        again = f"remove {idx} and the same command makes it anew"
        raise UserError(*(f"{line}; {again}" for line in error.problems)) from error
    counts = {name: record[name] for name in ("vocab_size", "eos", "documents", "tokens", "chars")}
    return BuildResult(prefix, tokenizer, **counts, reused=True)


def _is_of(record: dict[str, Any], source: Source, tokenizer: Path, vocab_size: int | None) -> bool:
    if lacking := {"source", "vocab_size", "eos", "documents", "tokens", "chars"} - record.keys():
        raise UserError(f"its record lacks {', '.join(sorted(lacking))}")
    same = record["source"] == source.identity() and record.get("tokenizer_sha256") == _sha256(tokenizer)
    return same and vocab_size in (None, record["vocab_size"])


def made_of(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides every byte of a data set."""
    return {
        "source": source.identity(),
        "tokenizer_sha256": _sha256(tokenizer.path),
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
    }


def _workers(source: Source, wanted: int) -> int:
    """As many as are wanted, but no more than there are chunks for."""
    return max(1, min(wanted, source.total_bytes() // CHUNK_CHARS))


def _chunks(source: Source) -> Iterator[Chunk]:
    """All text, in chunks of some pieces each: a function of the source alone."""
    texts, ends, size = list[str](), list[bool](), 0
    for text, end in _endings(source):
        texts.append(text)
        ends.append(end)
        size += len(text) + PIECE_COST
        if size >= CHUNK_CHARS:
            yield Chunk(texts, ends)
            texts, ends, size = [], [], 0
    if texts:
        yield Chunk(texts, ends)


def _endings(source: Source) -> Iterator[tuple[str, bool]]:
    """Every piece with text, and whether its document ends with it: so that one of any length passes through."""
    for _, pieces in groupby(source, key=itemgetter(0)):
        texts = (text for _, text in pieces if text)
        last = next(texts, None)
        if last is not None:
            for text in texts:
                yield last, False
                last = text
            yield last, True


@dataclass
class _State:
    """How far a build has come: chunks that are written, what was in them, where the writer is (None: nowhere)."""

    chunks: int
    counts: _Counts
    mark: Mark | None


def _left(prefix: Path, made_of: dict[str, Any]) -> _State:
    """What an interrupted build of just the same left, if it is all there; else the beginning."""
    try:
        left = json.loads(beside(prefix, ".resume").read_text("utf-8"))
        mark = Mark(**left["mark"])
        sizes = {".bin": mark.tokens, ".lengths": mark.lengths, ".documents": mark.documents}
        whole = all(beside(prefix, f"{suffix}.part").stat().st_size >= size for suffix, size in sizes.items())
        if whole and left["made_of"] == made_of:
            return _State(left["chunks"], _Counts(**left["counts"]), mark)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return _State(0, _Counts(), None)


def _write(
    source: Source,
    tokenizer: Tokenizer,
    prefix: Path,
    made_of: dict[str, Any],
    state: _State,
    workers: int,
    report: Progress,
) -> None:
    """Writes the chunks that are not written yet, and now and then how far it is. Brings `state` up to date."""
    counts, noted = state.counts, state.counts.chars
    with IndexedWriter(prefix, tokenizer.vocab_size, state.mark) as writer:
        chunks = islice(_chunks(source), state.chunks, None)
        for chunk, (ids, ends) in encode_chunks(chunks, tokenizer, _workers(source, workers)):
            writer.extend(ids, ends)
            state.chunks += 1
            counts.documents += len(ends)
            counts.tokens += len(ids)
            counts.chars += sum(map(len, chunk.texts))
            report(counts.documents, counts.chars, counts.tokens)
            if counts.chars - noted >= RESUME_CHARS:
                noted, state.mark = counts.chars, writer.mark()
                left = json.dumps({"made_of": made_of, **asdict(state)})
                write_whole(beside(prefix, ".resume"), left.encode())
        if counts.documents == 0:
            raise UserError(f"{source.name} has no text; give a source with at least one document")
        # A record that outlived its data set would vouch for another one.
        beside(prefix, ".json").unlink(missing_ok=True)


def _refuse_overwriting(prefix: Path, overwrite: bool) -> None:
    idx = beside(prefix, ".idx")
    if idx.exists() and not overwrite:
        raise UserError(f"{idx} exists and was made of another text or tokenizer; choose another prefix or remove it")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
