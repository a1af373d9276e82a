"""Encoding of texts to token ids, in this process or, run as a program, in a worker process.

A worker reads requests from standard input and answers each on standard output, until its input
ends:

    request   u64 P, u64 B, u64 A pieces of text, bytes that they take together, ranges of answers
              i64[P]             bytes of each piece
              u8[P]              1 where a document ends after the piece
              u8[P]              its marks: 0 none, 1 marked, 2 marked and rendered
              i64[A, 3]          of each answer the piece, its first character and its end
              B bytes            the pieces, UTF-8, back to back
    answer    u64 T, u64 D, u64 M number of tokens, of documents that end among them, of flags
              i64[D]             number of tokens up to the end of each document
              i32[T]             the tokens
              u8[M]              1 where a token counts in the loss; M is T, or 0: all count
    refusal   u64 REFUSED, u64 B, u64 0  number of bytes; B bytes: why a text cannot be encoded

This module imports no other module of the project, so that a worker starts fast and needs little
more memory than its tokenizer.
"""

import json
import os
import re
import signal
import struct
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray

HEAD = struct.Struct("<QQQ")
UNMARKED, MARKED, RENDERED = range(3)  # kinds of pieces in a request
EACH_CHARACTER = r"[\s\S]"  # the expression by which a character tokenizer splits texts
SPLIT_INTO_CHARACTERS = {
    "type": "Split",
    "pattern": {"Regex": EACH_CHARACTER},
    "behavior": "Isolated",
}
# parts of a definition that change texts or tokens
CHANGES = ("normalizer", "post_processor", "added_tokens", "truncation", "padding")
CHARACTER_FILE = 1 << 26  # bytes; more than all characters of Unicode take
REFUSED = 2**64 - 1  # in place of a number of tokens
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that stands for a byte

Encode = Callable[[str], list[int]]
Answers = tuple[tuple[int, int], ...]
EncodeRendered = Callable[[str, Answers], tuple[list[int], NDArray[np.bool_]]]


@dataclass(frozen=True)
class Marks:
    """The part of a piece's text that counts in the loss.

    answers: ranges [begin, end) of characters, ascending; in a text that is not rendered none or
        the whole.
    rendered: a chat template has written the text: special tokens that it spells are these tokens,
        and no token is put behind the document.
    """

    answers: Answers
    rendered: bool


class CharacterMissing(ValueError):
    """A text has a character that a character tokenizer does not know."""


class Encoded(NamedTuple):
    """Tokens of several documents back to back.

    ids: int32 [tokens].
    ends: int64 [documents], the number of tokens up to the end of each.
    counted: bool [tokens], whether each counts in the loss; None: all do.
    """

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    counted: NDArray[np.bool_] | None = None


def sentencepiece_encoder(model: bytes) -> tuple[Encode, sentencepiece.SentencePieceProcessor]:
    """Return the function that encodes a text with a SentencePiece model, and the model."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor.encode, processor


def hugging_face_encoder(definition: str) -> tuple[Encode, Any]:
    """Return the function that encodes a text with a `tokenizer.json`, and the tokenizer.

    A special token spelled out in a text is encoded as plain text, so no text can end its own
    document. Raises ImportError without the package `tokenizers`.
    """
    import tokenizers  # noqa: PLC0415 (optional)

    tokenizer = tokenizers.Tokenizer.from_str(definition)
    changed_definition = without_special_tokens(definition)
    if changed_definition:
        encoder = tokenizers.Tokenizer.from_str(changed_definition)
    else:
        encoder = tokenizer
    for set_up in (tokenizer, encoder):
        # The file may ask for these, and they would change what a text's tokens are.
        set_up.no_truncation()
        set_up.no_padding()
        # In a text they are text.
        set_up.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        try:
            return encoder.encode(text, add_special_tokens=False).ids
        except BaseException as problem:
            if type(problem).__name__ != "PanicException":  # a panic of Rust, which is no Exception
                raise
            raise ValueError(f"the package tokenizers panics: {problem}") from None

    return encode, tokenizer


def characters_of(content: bytes) -> list[str] | None:
    """Return the characters of a character tokenizer in the order of their ids; None for the file
    of any other tokenizer.

    Its definition says that each character is a token, and nothing else.
    """
    may_be_one = is_json(content) and b'"WordLevel"' in content
    # a large file of another kind is not read for it
    if not may_be_one or len(content) > CHARACTER_FILE:
        return None
    try:
        definition = json.loads(content)
    except ValueError:
        return None
    model = definition.get("model")
    if not isinstance(model, dict) or not _takes_characters_alone(definition):
        return None
    return _characters_by_id(model.get("vocab"))


def _takes_characters_alone(definition: Mapping[str, Any]) -> bool:
    """Return True if a text is split into its characters, and its tokens are joined to it again."""
    pre_tokenizer = definition.get("pre_tokenizer")
    decoder = definition.get("decoder")
    if not isinstance(pre_tokenizer, dict) or decoder != {"type": "Fuse"}:
        return False
    if any(definition.get(key) for key in CHANGES):
        return False
    # it may have further keys
    return all(pre_tokenizer.get(key) == value for key, value in SPLIT_INTO_CHARACTERS.items())


def _characters_by_id(vocabulary: object) -> list[str] | None:
    """Return the characters of a vocabulary; None if its tokens are no characters, or if its ids do
    not count them."""
    if not isinstance(vocabulary, dict) or not vocabulary:
        return None
    characters = [*vocabulary]
    ids = [*vocabulary.values()]
    are_single = all(len(character) == 1 for character in characters)
    is_in_order = ids == [*range(len(ids))]
    return characters if are_single and is_in_order else None


def character_encoder(characters: Sequence[str]) -> Encode:
    """Return the function that encodes a text with a character tokenizer.

    It raises CharacterMissing for a text with another character.
    """
    code_points = np.array([ord(character) for character in characters])
    # the id of each code point, -1 if it has none; the last entry is that of all beyond
    num_entries = code_points.max() + 2
    ids = np.full(num_entries, -1, np.int32)
    ids[code_points] = np.arange(len(characters))

    def encode(text: str) -> list[int]:
        # half of a surrogate pair has a code point too, and no character has it
        utf_32 = text.encode("utf-32-le", "surrogatepass")
        numbers = np.frombuffer(utf_32, "<u4")
        last_entry = len(ids) - 1
        encoded = ids[np.minimum(numbers, last_entry)]
        is_missing = encoded < 0
        if is_missing.any():
            first_missing = text[int(is_missing.argmax())]
            num_others = len(set(text) - set(characters)) - 1
            and_more = f" and {num_others} more of other kinds" if num_others else ""
            raise CharacterMissing(
                f"{first_missing!r}{and_more} is none of its {len(characters)} "
                "characters: leave such out, or learn the characters of a text that has them"
            )
        return encoded.tolist()

    return encode


def rendered_encoder(definition: str) -> EncodeRendered:
    """Return the function that encodes a chat as its template has written it, with a
    `tokenizer.json`: special tokens that it spells are these tokens.

    It also returns, for each token, whether any of its characters is of an answer. Raises
    ImportError without the package `tokenizers`.
    """
    import tokenizers  # noqa: PLC0415 (optional)

    tokenizer = tokenizers.Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode_rendered(text: str, answers: Answers) -> tuple[list[int], NDArray[np.bool_]]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        # the characters [begin, end) of each token
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        begins = offsets[:, 0]
        ends = offsets[:, 1]
        counted = np.zeros(len(offsets), bool)
        for answer_begin, answer_end in answers:
            # what a token has in common with the answer: nothing, if it has no characters
            common_begins = np.maximum(begins, answer_begin)
            common_ends = np.minimum(ends, answer_end)
            counted |= common_begins < common_ends
        return encoding.ids, counted

    return encode_rendered


def _loaded_when_needed(definition: str) -> EncodeRendered:
    """Return a `rendered_encoder`, whose library reads the definition for the first chat: few texts
    are chats."""
    load_once = cache(lambda: rendered_encoder(definition))

    def encode_rendered(text: str, answers: Answers) -> tuple[list[int], NDArray[np.bool_]]:
        encode = load_once()
        return encode(text, answers)

    return encode_rendered


def without_special_tokens(definition: str) -> str:
    """Return a `tokenizer.json` with the same ids, whose model finds no special token in a text; ""
    if its own is such.

    The library leaves special tokens to the model, which finds those that are pieces of its
    vocabulary: Unigram and lists of words do, and BPE if merges make one. Here they have names that
    no text holds. A token of one character or byte keeps its name, for text would be lost.
    """
    tokenizer = json.loads(definition)
    model = tokenizer["model"]
    hidden = _special_tokens(tokenizer) & _vocabulary(model)
    if not hidden:
        return ""
    if isinstance(model["vocab"], dict) and model.get("merges") is not None:
        merge_count = len(model["merges"])
        model["merges"] = _merges_without(hidden, model)
        finds_whole_words = bool(model.get("ignore_merges"))
        makes_none = len(model["merges"]) == merge_count
        # neither a merge nor the look-up of a whole word gives one of them
        if makes_none and not finds_whole_words:
            return ""
    # random, so that no text can hold it
    prefix = uuid.uuid4().hex
    new_names = {token: f"{prefix} {token}" for token in hidden}
    _rename_tokens(tokenizer, new_names)
    return json.dumps(tokenizer)


def _special_tokens(tokenizer: dict[str, Any]) -> set[str]:
    """Return the special tokens of more than one character or byte."""
    tokens: set[str] = set()
    for added in tokenizer.get("added_tokens") or ():
        token = added["content"]
        is_one_unit = len(token) <= 1 or BYTE.fullmatch(token)
        if added.get("special") and not is_one_unit:
            tokens.add(token)
    return tokens


def _vocabulary(model: dict[str, Any]) -> set[str]:
    """Return the tokens of a model, which lists them by their id, or, Unigram, with a score."""
    vocab: dict[str, int] | list[tuple[str, float]] = model["vocab"]
    if isinstance(vocab, dict):
        return set(vocab)
    return {token for token, _ in vocab}


def _merges_without(tokens: set[str], model: dict[str, Any]) -> list[Any]:
    """Return the merges of a BPE model that make none of the tokens."""
    prefix_length = len(model.get("continuing_subword_prefix") or "")
    merges: list[Any] = []
    for merge in model["merges"]:
        # a pair, or in older files a text with a space between both
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        # the right half has the prefix of what continues a word, which the whole has not
        whole = left + right[prefix_length:]
        if whole not in tokens:
            merges.append(merge)
    return merges


def _rename_tokens(
    tokenizer: dict[str, Any],
    names: dict[str, str],
) -> None:
    """Give tokens new names wherever the definition has them, in place. names: new ones by old
    ones."""

    def new_name(token: str) -> str:
        return names.get(token, token)

    model = tokenizer["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {new_name(token): number for token, number in vocab.items()}
    else:
        model["vocab"] = [[new_name(token), score] for token, score in vocab]
    if model.get("unk_token"):
        model["unk_token"] = new_name(model["unk_token"])
    for added in tokenizer["added_tokens"]:
        added["content"] = new_name(added["content"])


def is_json(content: bytes) -> bool:
    """Return True if the start of a tokenizer file is JSON, of Hugging Face; otherwise the file is
    SentencePiece's."""
    start = content[:64].lstrip()
    return start.startswith(b"{")


def encode_pieces(
    encode: Encode,
    texts: Sequence[str],
    ends: Sequence[bool],
    eos: int | None,
    marks: Sequence[Marks] = (),
    encode_rendered: EncodeRendered | None = None,
) -> Encoded:
    """Return the ids of all texts back to back, with `eos` after each that ends a document.

    marks: of each text, which parts count in the loss; empty: all of all texts.
    encode_rendered: encodes the texts that are rendered; they end without `eos`.
    """
    ids_of_pieces = [np.zeros(0, np.int32)]  # so that there is something to join
    counted_of_pieces = [np.zeros(0, bool)]
    token_count = 0
    document_ends: list[int] = []
    pieces = zip(texts, ends, strict=True)
    for number, (text, ends_document) in enumerate(pieces):
        marks_of_text = marks[number] if marks else None
        if marks_of_text and marks_of_text.rendered:
            assert encode_rendered
            ids, counted = encode_rendered(text, marks_of_text.answers)
        else:
            ids = encode(text)
            if ends_document and eos is not None:
                ids = [*ids, eos]
            # such a text is an answer as a whole, or no part of it is
            is_answer = marks_of_text is None or bool(marks_of_text.answers)
            counted = np.full(len(ids), is_answer)
        ids_of_pieces.append(np.array(ids, np.int32))
        counted_of_pieces.append(counted)
        token_count += len(ids)
        if ends_document:
            document_ends.append(token_count)
    ids_of_all = np.concatenate(ids_of_pieces)
    counted_of_all = np.concatenate(counted_of_pieces) if marks else None
    return Encoded(ids_of_all, np.array(document_ends, np.int64), counted_of_all)


def send_request(
    stream: IO[bytes],
    texts: Sequence[str],
    ends: Sequence[bool],
    marks: Sequence[Marks] = (),
) -> None:
    """Send a request to a worker, as the module's docstring has it; called in the main process.

    texts: the pieces. ends: whether a document ends after each. marks: of each; empty: none.
    """
    pieces = [text.encode() for text in texts]
    sizes_in_bytes = [len(piece) for piece in pieces]
    sizes = np.array(sizes_in_bytes, "<i8")
    document_ends = np.array(ends, "u1")
    kinds = np.full(len(pieces), UNMARKED, "u1")
    answers: list[tuple[int, int, int]] = []
    for number, marks_of_text in enumerate(marks):
        kinds[number] = RENDERED if marks_of_text.rendered else MARKED
        answers += [(number, begin, end) for begin, end in marks_of_text.answers]
    answer_places = np.array(answers, "<i8")
    total_size = int(sizes.sum())
    head = HEAD.pack(len(pieces), total_size, len(answers))
    stream.write(head)
    for part in (sizes, document_ends, kinds, answer_places):
        stream.write(part.tobytes())
    stream.writelines(pieces)
    stream.flush()


def read_answer(stream: IO[bytes]) -> Encoded:
    """Return a worker's answer; called in the main process.

    Raises EOFError if the worker has ended, and ValueError, with the reason, if a text cannot be
    encoded.
    """
    head = _read_bytes(stream, HEAD.size)
    num_tokens, num_documents, num_flags = HEAD.unpack(head)
    if num_tokens == REFUSED:
        reason = _read_bytes(stream, num_documents)  # of a refusal it is the number of bytes
        raise ValueError(reason.decode())
    document_ends = _read_array(stream, "<i8", num_documents)
    ids = _read_array(stream, "<i4", num_tokens)
    counted = _read_array(stream, "u1", num_flags).astype(bool) if num_flags else None
    return Encoded(ids, document_ends, counted)


def _read_marks(stream: IO[bytes], num_pieces: int, num_answers: int) -> list[Marks]:
    """Return the marks of a request; none if it has none."""
    kinds = _read_array(stream, "u1", num_pieces)
    places = _read_array(stream, "<i8", 3 * num_answers)
    table = places.reshape(-1, 3).tolist()
    if not kinds.any():
        return []
    answers_of_pieces: list[list[tuple[int, int]]] = [[] for _ in range(num_pieces)]
    for number, begin, end in table:
        answers = answers_of_pieces[number]
        answers.append((begin, end))
    marks: list[Marks] = []
    for answers, kind in zip(answers_of_pieces, kinds, strict=True):
        is_rendered = bool(kind == RENDERED)
        marks.append(Marks(tuple(answers), is_rendered))
    return marks


def serve(
    encode: Encode,
    eos: int | None,
    requests: IO[bytes],
    answers: IO[bytes],
    encode_rendered: EncodeRendered | None = None,
) -> None:
    """Answer requests until there are no more; called in a worker.

    encode, eos, encode_rendered: as `encode_pieces` has them. requests, answers: streams.
    Raises EOFError if a request is incomplete.
    """
    # an empty read is the end of the input
    while head := requests.read(HEAD.size):
        head += _read_bytes(requests, HEAD.size - len(head))
        num_pieces, num_bytes, num_answers = HEAD.unpack(head)
        piece_sizes = _read_array(requests, "<i8", num_pieces)
        ends = _read_array(requests, "u1", num_pieces).astype(bool)
        marks = _read_marks(requests, num_pieces, num_answers)
        content = _read_bytes(requests, num_bytes)
        texts: list[str] = []
        begin = 0
        for piece_size in piece_sizes.tolist():
            end = begin + piece_size
            piece = content[begin:end]
            texts.append(piece.decode())
            begin = end
        try:
            encoded = encode_pieces(encode, texts, ends.tolist(), eos, marks, encode_rendered)
        except Exception as problem:  # the libraries raise bare Exception
            reason = str(problem).encode()
            refusal = HEAD.pack(REFUSED, len(reason), 0)
            answers.write(refusal + reason)
            answers.flush()
            continue
        flags = b"" if encoded.counted is None else encoded.counted.astype("u1").tobytes()
        answer_head = HEAD.pack(len(encoded.ids), len(encoded.ends), len(flags))
        answers.write(answer_head)
        answers.write(encoded.ends.astype("<i8", copy=False).tobytes())
        answers.write(encoded.ids.astype("<i4", copy=False).tobytes())
        answers.write(flags)
        answers.flush()


def _read_array(stream: IO[bytes], dtype: str, count: int) -> NDArray[Any]:
    """Return the next `count` numbers. Raises EOFError if there are fewer."""
    itemsize = np.dtype(dtype).itemsize
    content = _read_bytes(stream, count * itemsize)
    return np.frombuffer(content, dtype)


def _read_bytes(stream: IO[bytes], size: int) -> bytes:
    """Return the next `size` bytes. Raises EOFError if there are fewer."""
    content = stream.read(size)
    if len(content) < size:
        raise EOFError(f"{len(content)} bytes, {size} were expected")
    return content


def main(path: str, eos: str) -> None:
    """Run a worker with the tokenizer in file `path`; `eos` is an id or empty."""
    # the main process handles it and closes this worker's input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with open(path, "rb") as file:
        content = file.read()
    characters = characters_of(content)
    encode_rendered: EncodeRendered | None = None
    if characters is not None:
        encode = character_encoder(characters)
    elif is_json(content):
        definition = content.decode()
        encode, _ = hugging_face_encoder(definition)
        encode_rendered = _loaded_when_needed(definition)
    else:
        encode, _ = sentencepiece_encoder(content)
    eos_id = int(eos) if eos else None
    try:
        serve(encode, eos_id, sys.stdin.buffer, sys.stdout.buffer, encode_rendered)
    except (EOFError, BrokenPipeError):
        # the main process was killed: no reader is left for an error or for buffered output
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
