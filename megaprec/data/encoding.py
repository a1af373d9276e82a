"""Encoding of texts to token ids, in this process or, run as a program, in a worker process.

A worker reads requests from standard input and answers each on standard output, until its input
ends:

    request   u64 P, u64 B       pieces of text and bytes that they take together
              i64[P]             bytes of each piece
              u8[P]              1 where a document ends after the piece
              B bytes            the pieces, UTF-8, back to back
    answer    u64 T, u64 D       number of tokens, and of documents that end among them
              i64[D]             number of tokens up to the end of each document
              i32[T]             the tokens
    refusal   u64 REFUSED, u64 B number of bytes; B bytes: why a text cannot be encoded, UTF-8

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
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

HEAD = struct.Struct("<QQ")
REFUSED = 2**64 - 1
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that stands for a byte

Encode = Callable[[str], list[int]]
Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]


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
    hidden = without_special_tokens(definition)
    encoder = tokenizers.Tokenizer.from_str(hidden) if hidden else tokenizer
    for one in (tokenizer, encoder):
        one.no_truncation()
        one.no_padding()
        one.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        try:
            return encoder.encode(text, add_special_tokens=False).ids
        except BaseException as problem:
            if type(problem).__name__ != "PanicException":  # a panic of Rust, which is no Exception
                raise
            raise ValueError(f"the package tokenizers panics: {problem}") from None

    return encode, tokenizer


def without_special_tokens(definition: str) -> str:
    """Return a `tokenizer.json` with the same ids, whose model finds no special token in a text; ""
    if its own is such.

    The library leaves special tokens to the model, which finds those that are pieces of its
    vocabulary: Unigram and lists of words do, and BPE if merges make one. Here they have names that
    no text holds. A token of one character or byte keeps its name, for text would be lost.
    """
    said = json.loads(definition)
    model = said["model"]
    special = {one["content"] for one in said.get("added_tokens") or () if one.get("special")}
    hidden = {token for token in special if len(token) > 1 and not BYTE.fullmatch(token)} & _tokens(
        model["vocab"]
    )
    merges = model.get("merges") if hidden and isinstance(model["vocab"], dict) else None
    if merges is not None:
        begin = len(model.get("continuing_subword_prefix") or "")
        pairs = ((one, one.split(" ") if isinstance(one, str) else one) for one in merges)
        model["merges"] = [
            one for one, (first, second) in pairs if first + second[begin:] not in hidden
        ]
    if not hidden or (
        merges is not None
        and not model.get("ignore_merges")
        and len(model["merges"]) == len(merges)
    ):
        return ""
    unspoken = uuid.uuid4().hex
    names = {token: f"{unspoken} {token}" for token in hidden}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            names.get(token, token): number for token, number in model["vocab"].items()
        }
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    for one in said["added_tokens"]:
        one["content"] = names.get(one["content"], one["content"])
    return json.dumps(said)


def _tokens(vocab: dict[str, int] | list[tuple[str, float]]) -> set[str]:
    return set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}


def is_json(content: bytes) -> bool:
    """Return True if `content`, the start of a tokenizer file, is JSON (Hugging Face's); else it is
    SentencePiece's."""
    return content[:64].lstrip().startswith(b"{")


def encode_pieces(
    encode: Encode, texts: Sequence[str], ends: Sequence[bool], eos: int | None
) -> Encoded:
    """Return the ids of all texts back to back (int32), with `eos` after each that ends a document,
    and the ends of the documents (int64)."""
    ending = [] if eos is None else [eos]
    ids = [
        np.array(encode(text) + ending * end, np.int32)
        for text, end in zip(texts, ends, strict=True)
    ]
    until = np.cumsum([len(some) for some in ids], dtype=np.int64)
    return np.concatenate(ids) if ids else np.zeros(0, np.int32), until[np.array(ends, dtype=bool)]


def send_request(stream: IO[bytes], texts: Sequence[str], ends: Sequence[bool]) -> None:
    """Send a request to a worker; called in the main process."""
    encoded = [text.encode() for text in texts]
    sizes = np.array([len(text) for text in encoded], "<i8")
    stream.write(HEAD.pack(len(texts), int(sizes.sum())))
    stream.write(sizes.tobytes() + np.array(ends, "u1").tobytes())
    stream.writelines(encoded)
    stream.flush()


def read_answer(stream: IO[bytes]) -> Encoded:
    """Return a worker's answer; called in the main process.

    Raises EOFError if the worker has ended, and ValueError, with the reason, if a text cannot be
    encoded.
    """
    tokens, documents = HEAD.unpack(_read(stream, HEAD.size))
    if tokens == REFUSED:
        raise ValueError(_read(stream, documents).decode())
    until = np.frombuffer(_read(stream, 8 * documents), "<i8")
    return np.frombuffer(_read(stream, 4 * tokens), "<i4"), until


def serve(encode: Encode, eos: int | None, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more; called in a worker. Raises EOFError if a request is
    incomplete."""
    while head := requests.read(HEAD.size):
        pieces, size = HEAD.unpack(head + _read(requests, HEAD.size - len(head)))
        cuts = np.cumsum(np.frombuffer(_read(requests, 8 * pieces), "<i8"))[:-1]
        ends = np.frombuffer(_read(requests, pieces), "u1").astype(bool).tolist()
        text = _read(requests, size)
        texts = [text[a:b].decode() for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        try:
            ids, until = encode_pieces(encode, texts, ends, eos)
        except Exception as problem:  # the libraries raise bare Exception
            reason = str(problem).encode()
            answers.write(HEAD.pack(REFUSED, len(reason)) + reason)
            answers.flush()
            continue
        answers.write(HEAD.pack(len(ids), len(until)))
        answers.write(until.astype("<i8", copy=False).tobytes())
        answers.write(ids.astype("<i4", copy=False).tobytes())
        answers.flush()


def _read(stream: IO[bytes], size: int) -> bytes:
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
    if is_json(content):
        encode, _ = hugging_face_encoder(content.decode())
    else:
        encode, _ = sentencepiece_encoder(content)
    try:
        serve(encode, int(eos) if eos else None, sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError):
        # the main process was killed: no reader is left for an error or for buffered output
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
