"""Building of a data set on disk from text: tokenized once, and reused until the text or the
tokenizer changes.

`build` streams a source through a tokenizer into `PREFIX.bin/.idx`, with `eos` after each document,
with a few chunks of text in memory at a time, and records its source and tokenizer in
`PREFIX.json`. The number of workers does not change a byte. A build that was killed is resumed by
the next build of the same text and tokenizer, from the state in `PREFIX.resume`. The record has the
digest of the text too: a text that was moved, copied or touched is compared by its content, once.
Programs call `prepare`: it returns the existing data set if the record matches, and otherwise loads
or trains the tokenizer and builds.
"""

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaprec.durable import naming_file
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_json, read_text
from megaprec.text.characters import CharacterTokenizer
from megaprec.text.pieces import MarkedPiece
from megaprec.text.sources import TextDigest, TextSource, has_digest
from megaprec.text.tokenizer import (
    FILE_DIGEST,
    TOKENS_DIGEST,
    Tokenizer,
    load_tokenizer,
    tokens_digest,
)
from megaprec.text.training import learn_characters, train_sentencepiece
from megaprec.text.workers import Chunk, encode_chunks
from megaprec.tokens import intact
from megaprec.tokens.files import file_digest, with_suffix, write_whole
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter, WriteProgress
from megaprec.tokens.loss_mask import SUFFIX as LOSS_MASK
from megaprec.tokens.loss_mask import MaskMark

# of text that is encoded together; the boundaries of chunks change no byte of the result
CHUNK_CHARS = 1 << 20
# characters added to the length of each piece, so that many tiny pieces fill a chunk too
PIECE_COST = 64
# errors of a disk that is full, by bytes, by a quota or by the size of a file
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RESUME_CHARS = 1 << 26  # of text between two points from which a killed build can resume

RECORD_BYTES = 1 << 24  # more than any record has

SKIPPED = ".skipped.txt"  # ends the name of the list of bad files and rows that were left out

SAME = "same_texts"  # key of a record: identities of texts that were found to be the same
MAX_SAME = 16  # so that a record does not grow for ever

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    tokenizer: the path of its file.
    tokens: with the end-of-document tokens.
    bytes: of the text, in UTF-8; None if the data set was built before they were counted.
    unknown: number of tokens that stand for text which the tokenizer does not know.
    counted: number of tokens that count in the loss, by the loss mask; None: there is no mask.
    unanswered: number of documents of which no token counts.
    skipped: number of bad files and rows that were left out, named in `PREFIX.skipped.txt`.
    reused: the data set was there already.
    """

    prefix: Path
    tokenizer: Path
    vocab_size: int
    eos: int | None
    documents: int
    tokens: int
    chars: int
    bytes: int | None
    unknown: int = 0
    counted: int | None = None
    unanswered: int = 0
    skipped: int = 0
    reused: bool = False


@dataclass
class _Counts:
    """Totals of what a build has written so far. unknown: tokens that stand for unknown text."""

    documents: int = 0
    tokens: int = 0
    chars: int = 0
    unknown: int = 0
    bytes: int = 0


def prepare(
    source: TextSource,
    prefix: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    characters: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> BuildResult:
    """Return the data set of `source` at `prefix`: an existing one built from the same input, or a
    new one.

    Give a tokenizer file, a `vocab_size` to train one on the source as `PREFIX.model`, or
    `characters` to have the characters of the source as tokens, by a tokenizer of the same name.
    Raises UserError if another data set or model has the name and may not be overwritten. Only one
    process at a time may prepare a prefix.
    """
    ways = [tokenizer is not None, vocab_size is not None, characters]
    if ways.count(True) != 1:
        raise UserError.of("data.tokenizer_or_vocabulary")
    chosen = load_tokenizer(tokenizer) if tokenizer else None
    existing = _existing(source, prefix, chosen, vocab_size, overwrite)
    if existing is not None:
        return existing
    _refuse_overwriting(prefix, overwrite)
    if chosen is None:
        texts = (text for _, text in source)
        is_new = not with_suffix(prefix, ".model").exists()
        learned = _learned(texts, prefix, vocab_size, overwrite)
        chosen = load_tokenizer(learned)
        with _removing_if_full(learned, is_new):
            return build(source, chosen, prefix, workers, overwrite, on_progress)
    return build(source, chosen, prefix, workers, overwrite, on_progress)


@contextmanager
def _removing_if_full(tokenizer: Path, is_new: bool) -> Iterator[None]:
    """Remove a tokenizer if there is no room for the data set that it is for. is_new: it was not
    there before."""
    try:
        yield
    except UserError as error:
        if is_new and any(problem.code == "data.no_room" for problem in error.problems):
            tokenizer.unlink(missing_ok=True)
        raise


def _learned(texts: Iterable[str], prefix: Path, vocab_size: int | None, overwrite: bool) -> Path:
    """Return the tokenizer that is learned of texts. vocab_size: None for characters."""
    if vocab_size is None:
        return learn_characters(texts, with_suffix(prefix, ".model"), overwrite)
    return train_sentencepiece(texts, prefix, vocab_size, overwrite)


def _existing(
    source: TextSource,
    prefix: Path,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    overwrite: bool,
) -> BuildResult | None:
    """Return the data set at `prefix` if it has the same input, otherwise None.

    tokenizer: None: that which was trained for the data set.
    Raises UserError if it is damaged; with `overwrite` it is replaced then.
    """
    try:
        if tokenizer is None:
            trained = with_suffix(prefix, ".model")
            if not (with_suffix(prefix, ".idx").exists() and trained.is_file()):
                return None
            tokenizer = load_tokenizer(trained)
            # without a size, characters are asked for
            if isinstance(tokenizer, CharacterTokenizer) != (vocab_size is None):
                return None
        return reusable(
            prefix,
            source,
            tokenizer,
            vocab_size,
            by_content=True,
        )
    except UserError:
        if overwrite:
            return None
        raise


def build(
    source: TextSource,
    tokenizer: Tokenizer,
    prefix: Path,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> BuildResult:
    """Tokenize `source` into `PREFIX.bin/.idx` and write the record `PREFIX.json`.

    workers: maximal number of processes that encode; short texts use fewer. The number changes no
        byte.
    on_progress: called as on_progress(documents, chars, tokens) with the totals so far, repeatedly
        and at the end.
    Raises UserError if a data set is there and may not be overwritten, or if the
    source has no text. After any error the files that were there before are unchanged.
    """
    _refuse_overwriting(prefix, overwrite)
    inputs = made_of(source, tokenizer)
    resume = with_suffix(prefix, ".resume")
    state = _interrupted_state(prefix, inputs)
    try:
        # an error of the disk that names no file names the prefix
        with naming_file(prefix):
            text_digest = TextDigest()
            report = on_progress or (lambda *totals: None)
            skipped: list[Problem] = []
            ids = _write(
                source=source,
                text_digest=text_digest,
                skipped=skipped,
                tokenizer=tokenizer,
                prefix=prefix,
                inputs=inputs,
                state=state,
                workers=workers,
                report=report,
            )
    except Exception as error:
        # the writer has removed its files, so there is nothing to go on with
        resume.unlink(missing_ok=True)
        # what is no text may be so because it is written to
        if isinstance(error, UserError) and not source.is_still(inputs["source"]):
            raise UserError.of("data.text_changed", name=source.name) from error
        if isinstance(error, OSError) and error.errno in FULL:
            raise UserError.of("data.no_room", prefix=prefix, reason=error.strerror) from error
        raise
    counts = asdict(state.counts)
    try:
        _write_skipped(prefix, skipped)
        mask_counts = _mask_counts(prefix)
        contents = mask_counts | {
            "ids": ids,
            "skipped": len(skipped),
            TOKENS_DIGEST: tokens_digest(tokenizer),
            "text_sha256": text_digest.hexdigest(),
            **_digests(prefix),
        }
        content = json.dumps(inputs | counts | contents, indent=2)
        write_whole(with_suffix(prefix, ".json"), f"{content}\n".encode())
    except OSError:
        # without its record, the set could not be built again
        with_suffix(prefix, ".idx").unlink(missing_ok=True)
        raise
    resume.unlink(missing_ok=True)
    return BuildResult(
        prefix,
        tokenizer.path,
        tokenizer.vocab_size,
        tokenizer.eos,
        **counts,
        counted=mask_counts.get("counted"),
        unanswered=mask_counts.get("unanswered", 0),
        skipped=len(skipped),
    )


def _mask_counts(prefix: Path) -> dict[str, int]:
    """Return how many tokens of a data set count, and of how many documents none does; nothing for
    one without a loss mask."""
    dataset = IndexedDataset(prefix)
    if not dataset.has_mask:
        return {}
    counted = 0
    unanswered = 0
    ends = np.cumsum(dataset.document_lengths())
    begin = 0
    for end in ends.tolist():
        in_document = int(dataset.counted(begin, end - begin).sum())
        counted += in_document
        if in_document == 0:
            unanswered += 1
        begin = end
    return {"counted": counted, "unanswered": unanswered}


def _write_skipped(prefix: Path, skipped: Sequence[Problem]) -> None:
    """Write a line for each bad file and row that was left out, or remove the list of an earlier
    build."""
    path = with_suffix(prefix, SKIPPED)
    if not skipped:
        path.unlink(missing_ok=True)
        return
    lines = "".join(f"{problem}\n" for problem in skipped)
    write_whole(path, lines.encode(errors="surrogateescape"))


def _digests(prefix: Path) -> dict[str, Any]:
    """Return the digests of both files, and of the blocks of a large .bin, some of which a run
    checks at its start."""
    bin_file = with_suffix(prefix, ".bin")
    digests: dict[str, Any] = {
        "bin_sha256": file_digest(bin_file),
        "idx_sha256": file_digest(with_suffix(prefix, ".idx")),
    }
    loss_mask = with_suffix(prefix, LOSS_MASK)
    if loss_mask.is_file():
        digests[intact.MASK_DIGEST] = file_digest(loss_mask)
    # the pair may be put at a URL
    if bin_file.stat().st_size > min(intact.WHOLE, intact.WHOLE_REMOTE):
        digests["blocks"] = {"bytes": intact.BLOCK, "sha256": intact.block_digests(bin_file)}
    IndexedDataset(prefix)  # records the check of a large index
    return digests


def reusable(
    prefix: Path,
    source: TextSource,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    by_content: bool = False,
) -> BuildResult | None:
    """Return the data set at `prefix` if it exists and was built from this source with this
    tokenizer, else None.

    vocab_size: if set, the tokenizer must have exactly this size.
    by_content: a source whose files have another name or time is read, and is the same if its text
        is; the record then has its name and time too. Only one process at a time may do so.
    Raises UserError if file sizes show that the data set is damaged; `megaprec.tokens.intact`
        checks its content.
    """
    idx = with_suffix(prefix, ".idx")
    if not idx.exists():
        return None
    try:
        record = intact.read_record(prefix)
        if record is None or not _is_of(record, tokenizer, vocab_size):
            return None
        same_text = _is_known(record, source)
        if not same_text and by_content:
            same_text = _has_the_text(prefix, record, source)
        if not same_text:
            return None
        token_count = IndexedDataset(prefix).num_tokens
        if record["tokens"] != token_count:
            raise UserError.of(
                "data.token_count_differs",
                prefix=prefix,
                token_count=token_count,
                name=prefix.name,
                tokens=record["tokens"],
            )
    except UserError as error:
        remedy = f"remove {idx} and the same command makes it anew"
        raise UserError(*(line.within(after=f"; {remedy}") for line in error.problems)) from error
    return BuildResult(
        prefix,
        tokenizer.path,
        vocab_size=record["vocab_size"],
        eos=record["eos"],
        documents=record["documents"],
        tokens=record["tokens"],
        chars=record["chars"],
        bytes=record.get("bytes"),
        # earlier versions did not count them
        unknown=record.get("unknown", 0),
        counted=record.get("counted"),
        unanswered=record.get("unanswered", 0),
        skipped=record.get("skipped", 0),
        reused=True,
    )


def _is_of(
    record: dict[str, Any],
    tokenizer: Tokenizer,
    vocab_size: int | None,
) -> bool:
    """Return True if a data set was built with this tokenizer, of this size if one is given."""
    missing = {"source", "vocab_size", "eos", "documents", "tokens", "chars"} - record.keys()
    if missing:
        raise UserError.of("data.record_incomplete", missing=", ".join(sorted(missing)))
    if vocab_size not in (None, record["vocab_size"]) or record["eos"] != tokenizer.eos:
        return False
    return record.get(FILE_DIGEST) == file_digest(tokenizer.path)


def _is_known(record: dict[str, Any], source: TextSource) -> bool:
    """Return True if the source has names, sizes and times with which the text of a data set was
    seen."""
    identity = source.identity()
    return identity == record["source"] or identity in _same_texts(record)


def _same_texts(record: dict[str, Any]) -> list[Any]:
    """Return further identities of the text of a data set."""
    same = record.get(SAME)
    return same if isinstance(same, list) else []


def _has_the_text(
    prefix: Path,
    record: dict[str, Any],
    source: TextSource,
) -> bool:
    """Return True if the source has the text of a data set, and then add its identity to the
    record."""
    digest = record.get("text_sha256")  # of which earlier versions recorded none
    identity = source.identity()
    if not isinstance(digest, str) or not has_digest(source, digest, record["chars"]):
        return False
    if not source.is_still(identity):
        return False
    identities = [*_same_texts(record), identity]
    record[SAME] = identities[-MAX_SAME:]
    content = json.dumps(record, indent=2)
    with suppress(OSError):  # then it is read again the next time
        write_whole(with_suffix(prefix, ".json"), f"{content}\n".encode())
    return True


def made_of(source: TextSource, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the inputs that determine every byte of a data set."""
    return {
        "source": source.identity(),
        FILE_DIGEST: file_digest(tokenizer.path),
        "vocab_size": tokenizer.vocab_size,
        "eos": tokenizer.eos,
    }


def _worker_count(source: TextSource, maximum: int) -> int:
    """Return the number of workers to start: at most `maximum`, and one per chunk of text."""
    return max(1, min(maximum, source.total_bytes() // CHUNK_CHARS))


def _chunks(source: Iterable[MarkedPiece]) -> Iterator[Chunk]:
    """Yield all text in chunks of several pieces. The chunks depend only on the source."""
    chunk = Chunk([], [], [])
    size = 0  # characters, and PIECE_COST for each piece
    for piece, end in _with_ends(source):
        chunk.texts.append(piece.text)
        chunk.ends.append(end)
        if piece.marks:
            chunk.marks.append(piece.marks)
        size += len(piece.text) + PIECE_COST
        if size >= CHUNK_CHARS:
            yield chunk
            chunk = Chunk([], [], [])
            size = 0
    if chunk.texts:
        yield chunk


def _with_ends(source: Iterable[MarkedPiece]) -> Iterator[tuple[MarkedPiece, bool]]:
    """Yield every non-empty piece, and True if its document ends with it. No document need fit into
    memory."""
    for _, pieces in groupby(source, key=attrgetter("document")):
        nonempty = (piece for piece in pieces if piece.text)
        previous = next(nonempty, None)
        if previous is None:
            continue
        # each piece is yielded when the next one is there, which shows that it is not the last
        for piece in nonempty:
            yield previous, False
            previous = piece
        yield previous, True


@dataclass
class _State:
    """The progress of a build.

    chunks: number of those written.
    counts: of their content.
    mark: of the writer; None: not started.
    """

    chunks: int
    counts: _Counts
    mark: WriteProgress | None


def _interrupted_state(prefix: Path, inputs: dict[str, Any]) -> _State:
    """Return the state of an interrupted build of exactly the same inputs if it is complete, else
    the initial one."""
    try:
        saved = parse_json(read_text(with_suffix(prefix, ".resume")))
        mark = WriteProgress(**saved["mark"])
        if mark.mask is not None:
            mark = replace(mark, mask=MaskMark(**saved["mark"]["mask"]))
        sizes = {".bin": mark.tokens, ".lengths": mark.lengths, ".documents": mark.documents}
        if mark.mask is not None:
            sizes[LOSS_MASK] = mark.mask.size
        complete = True
        for suffix, size in sizes.items():
            part = with_suffix(prefix, f"{suffix}.part")
            # a file may be longer: what came after the mark is cut off and written again
            complete = complete and part.stat().st_size >= size
        # an earlier version counted other things
        same_counts = saved["counts"].keys() == asdict(_Counts()).keys()
        if complete and same_counts and saved["made_of"] == inputs:
            return _State(saved["chunks"], _Counts(**saved["counts"]), mark)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a state that cannot be read is as none
    return _State(0, _Counts(), None)


def _write(
    source: TextSource,
    text_digest: TextDigest,
    skipped: list[Problem],
    tokenizer: Tokenizer,
    prefix: Path,
    inputs: dict[str, Any],
    state: _State,
    workers: int,
    report: Progress,
) -> tuple[int, int]:
    """Write the chunks that are not written yet; return the smallest and largest id.

    Updates `state`, and periodically saves it to `PREFIX.resume`.
    text_digest: all text is added to it.
    skipped: what is left out of the text is added to it.
    """
    counts = state.counts
    saved_chars = state.counts.chars
    has_mask = source.options.chats is not None
    with IndexedWriter(prefix, tokenizer.vocab_size, state.mark, has_mask) as writer:
        # skipped chunks are read all the same: the digest is of the whole text
        all_chunks = _chunks(text_digest.reading(source.marked(skipped.append)))
        chunks = islice(all_chunks, state.chunks, None)
        num_workers = _worker_count(source, workers)
        for chunk, (ids, ends, counted) in encode_chunks(chunks, tokenizer, num_workers):
            writer.extend(ids, ends, counted)
            state.chunks += 1
            counts.documents += len(ends)
            counts.tokens += len(ids)
            counts.unknown += _count_unknown(tokenizer, ids, len(ends))
            counts.chars += sum(map(len, chunk.texts))
            counts.bytes += sum(len(text.encode()) for text in chunk.texts)
            report(counts.documents, counts.chars, counts.tokens)
            if counts.chars - saved_chars >= RESUME_CHARS:
                saved_chars = counts.chars
                state.mark = writer.mark()
                content = json.dumps({"made_of": inputs, **asdict(state)})
                write_whole(with_suffix(prefix, ".resume"), content.encode())
        if not source.is_still(inputs["source"]):
            raise UserError.of("data.text_changed", name=source.name)
        if counts.documents == 0:
            raise UserError.of("data.text_empty", name=source.name)
        # An old record must not remain beside the new data set.
        with_suffix(prefix, ".json").unlink(missing_ok=True)
    return writer.ids


def _count_unknown(
    tokenizer: Tokenizer,
    ids: NDArray[np.int32],
    documents: int,
) -> int:
    """Return the number of ids that stand for unknown text.

    documents: number of documents that end among them.
    """
    if tokenizer.unk is None:
        return 0
    count = int((ids == tokenizer.unk).sum())
    # the same id also ends documents
    if tokenizer.unk == tokenizer.eos:
        return count - documents
    return count


def _refuse_overwriting(prefix: Path, overwrite: bool) -> None:
    """Raise UserError if a data set is at `prefix` and may not be overwritten, or if the file with
    the name of its record is none."""
    idx = with_suffix(prefix, ".idx")
    if idx.exists() and not overwrite:
        raise UserError.of("data.build_exists", index_file=idx)
    record = with_suffix(prefix, ".json")
    beside_data = idx.exists() or with_suffix(prefix, ".bin").exists()
    if record.exists() and not _may_replace(record, beside_data):
        raise UserError.of("data.build_would_replace", record=record)


def _may_replace(record: Path, beside_data: bool) -> bool:
    """Return True if a file with the name of a record is one, or may be a damaged one.

    beside_data: a .bin or .idx of the same prefix is there. Without them it may be a text, or the
        file of a tokenizer.
    """
    if record.stat().st_size > RECORD_BYTES:
        return False
    try:
        content = parse_json(read_text(record))
    except (OSError, ValueError):
        return beside_data
    if isinstance(content, dict) and FILE_DIGEST in content:
        return True
    is_list_of_texts = isinstance(content, list) and len(content) > 0
    return beside_data and not is_list_of_texts
