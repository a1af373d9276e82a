"""Tokenizers on their way to Hugging Face: a tokenizer.json is copied, a SentencePiece model is put
as one.

What is written for a SentencePiece model splits texts into the same ids, with one exception that
Hugging Face's format brings with it: special tokens such as `</s>` that are spelled out in a text
become that token.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megaprec.durable import put_bytes, put_text, read_whole
from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text
from megaprec.scratch import scratch_folder
from megaprec.text.characters import CharacterTokenizer
from megaprec.text.encoding import sentencepiece_encoder
from megaprec.text.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megaprec.text.tokenizer_files import (
    CONFIG,
    SAVE_ANEW,
    SETTINGS,
    SPECIAL_MAP,
    TEMPLATE,
    protobuf_fields,
)
from megaprec.text.training import DENORMALIZER, DLE, ESCAPES, NORMALIZER, SPACE, TABLE, escapes
from megaprec.tokens.places import is_remote
from tools.convert.core.source import Source

# Other files that a tokenizer may be in.
UNREAD = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tokenizer.model.*",
    "*.tiktoken",
    "tekken.json",
    "tokenization_*.py",
)
# The class of transformers that takes a tokenizer.json as it is.
FROM_FILE = "PreTrainedTokenizerFast"
# Numbers of fields in SentencePiece's protobuf (sentencepiece_model.proto): of the model, ...
PIECES_FIELD = 1
TRAINER_FIELD = 2
NORMALIZER_FIELD = 3
# ... of a piece, ...
PIECE_TEXT = 1
PIECE_TYPE = 3
USER_DEFINED = 4  # value of a piece's type
# ... of the trainer, ...
MODEL_TYPE = 3
UNIGRAM = 1  # the default
BPE = 2
# ... and of the normalizer.
CHARACTER_MAP = 2
DUMMY_PREFIX = 3
REMOVE_SPACES = 4
# Texts that both tokenizers must split alike before one is written for the other.
PROBE = (
    'Ünï — 数字 😀\u200d👩 \t  def f(x):\n\n    return {"a": 1.5e-3}  # x\x00\x07\r\n'
    + "aaa   " * 9
    + "\u0301é\u2581\x10_ \x10.\x10"
)


def main_file(files: Sequence[Path]) -> Path | None:
    """Return the file among a tokenizer's that defines it whole."""
    candidates = [file for file in files if file.name not in (*SETTINGS, TEMPLATE)]
    # a tokenizer.json before a SentencePiece model
    return min(candidates, key=lambda file: file.suffix != ".json", default=None)


def check_tokenizer(tokenizer_files: Sequence[Path], vocab: int) -> Tokenizer | None:
    """Return the tokenizer, if there is one. UserError if it has more tokens than the model's
    vocabulary `vocab`."""
    tokenizer_file = main_file(tokenizer_files)
    if tokenizer_file is None:
        return None
    tokenizer = load_tokenizer(tokenizer_file)
    if tokenizer.vocab_size > vocab:
        raise UserError.of(
            "convert.tokenizer_beyond_vocabulary",
            file=tokenizer_file,
            vocab_size=tokenizer.vocab_size,
            vocab=vocab,
        )
    return tokenizer


def folder_notes(folder: Path, tokenizer_files: Sequence[Path]) -> Iterator[str]:
    """Yield notes on files of a tokenizer that are not read, and on two that disagree.

    tokenizer_files: those that are read.
    """
    tokenizer_file = main_file(tokenizer_files)
    if tokenizer_file is None:
        names = {settings_file.name for settings_file in tokenizer_files}
        # a checkpoint of ours at a URL has no other files
        if is_remote(folder):
            return
        for pattern in UNREAD:
            names |= {match.name for match in folder.glob(pattern)}
        if names:
            yield (
                f"{folder}: of {', '.join(sorted(names))} no tokenizer is read, but of a "
                f"tokenizer.json: {SAVE_ANEW}"
            )
        return
    for other in tokenizer_files:
        if other.suffix == ".model" and other != tokenizer_file:
            yield from _notes_on_disagreement(tokenizer_file, other)
            return


def _notes_on_disagreement(tokenizer_file: Path, pieces: Path) -> Iterator[str]:
    """Yield a note if a SentencePiece model beside a tokenizer.json has other tokens."""
    try:
        _, model = sentencepiece_encoder(read_whole(pieces))
    except RuntimeError:
        yield (
            f"{tokenizer_file} is read, not {pieces.name} beside it, which is no SentencePiece "
            "model"
        )
        return
    tokens = {}
    for token, token_id in load_tokenizer(tokenizer_file).vocabulary().items():
        tokens[token_id] = token
    for token_id in range(model.get_piece_size()):
        if tokens.get(token_id) != model.id_to_piece(token_id):
            yield (
                f"{tokenizer_file} is read, not {pieces.name} beside it, which disagrees: "
                f"token {token_id} is {tokens.get(token_id)!r} in the first and "
                f"{model.id_to_piece(token_id)!r} in the other"
            )
            return


def stated_ids(special: Mapping[str, Any], key: str, vocab_size: int) -> list[int]:
    """Return the ids under a key, such as bos_token_id, which may hold one, a list or none. Ids
    that no token has are left out."""
    value = special.get(key)
    token_ids = value if isinstance(value, list) else [value]
    return [
        token_id for token_id in token_ids if type(token_id) is int and 0 <= token_id < vocab_size
    ]


def begin_note(source: Source, tokenizer: Tokenizer | None) -> list[str]:
    """Return a note if a tokenizer names a begin token that is not the one that a run of ours was
    trained with."""
    facts = source.facts
    is_of_a_run = bool(facts.documents) or not facts.special
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not is_of_a_run:
        return []
    begin = facts.documents.get("begin", tokenizer.eos)
    if tokenizer.bos in (None, begin):
        return []
    instead = "no token stands there" if begin is None else f"they begin after the token {begin}"
    return [
        f"{tokenizer.path}: the settings beside it name token {tokenizer.bos} as bos_token, which "
        f"nothing says to stand before documents: {instead}"
    ]


def write_tokenizer(
    tokenizer_files: Sequence[Path], folder: Path, begin: int | None = None
) -> None:
    """Write into `folder` what AutoTokenizer needs. Raises UserError for a model that a
    tokenizer.json cannot say.

    begin: id of the token that begins a document, as in config.json, if the files do not name it.
    """
    tokenizer_file = main_file(tokenizer_files)
    if tokenizer_file is None:
        return
    tokenizer = load_tokenizer(tokenizer_file)
    of_characters = isinstance(tokenizer, CharacterTokenizer)
    if of_characters or isinstance(tokenizer, HuggingFaceTokenizer):
        content = parse_json(read_text(tokenizer_file))
    else:
        content = _as_tokenizer_json(tokenizer_file)
    put_text(folder / "tokenizer.json", json.dumps(content, ensure_ascii=False, indent=1))
    settings = _settings(tokenizer_files, content, tokenizer, begin)
    put_text(folder / CONFIG, json.dumps(settings, indent=2, ensure_ascii=False))
    for name in (SPECIAL_MAP, TEMPLATE):
        for file in _named(tokenizer_files, name):
            put_bytes(folder / name, read_whole(file))
    # The proof that nothing was lost on the way.
    if of_characters:
        probe = "".join(tokenizer.vocabulary())
    else:
        probe = PROBE + _text_of_symbols(tokenizer_file)
    written = load_tokenizer(folder / "tokenizer.json")
    if written.encode(probe) != tokenizer.encode(probe):
        raise UserError.of("convert.tokenizer_splits", file=tokenizer_file)


def _named(tokenizer_files: Sequence[Path], name: str) -> list[Path]:
    """Return the files of a name."""
    return [tokenizer_file for tokenizer_file in tokenizer_files if tokenizer_file.name == name]


def _settings(
    tokenizer_files: Sequence[Path],
    content: dict[str, Any],
    tokenizer: Tokenizer,
    begin: int | None,
) -> dict[str, Any]:
    """Return the tokenizer_config.json of a tokenizer: the one it has, with the roles of tokens
    that no file names. content: of its tokenizer.json."""
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for tokenizer_file in _named(tokenizer_files, CONFIG)[:1]:
        settings = parse_json(read_text(tokenizer_file))
    named_roles = set(settings)
    for tokenizer_file in _named(tokenizer_files, SPECIAL_MAP):
        named_roles |= set(parse_json(read_text(tokenizer_file)))
    roles = _missing_roles(content, tokenizer, begin, named_roles)
    settings = {**roles, **settings, "tokenizer_class": FROM_FILE}
    settings.pop("auto_map", None)  # code of the folder's own, which is not carried over
    return settings


def class_note(tokenizer_files: Sequence[Path]) -> list[str]:
    """Return a note on a class of tokenizers that the settings name, and that is written as
    another."""
    configs = _named(tokenizer_files, CONFIG)
    if not configs or not main_file(tokenizer_files):
        return []
    config = configs[0]
    name = parse_json(read_text(config)).get("tokenizer_class")
    if name in (None, FROM_FILE, "TokenizersBackend"):
        return []
    return [
        f"{config}: tokenizer_class = {name!r} is written as {FROM_FILE!r}, which splits texts as "
        "tokenizer.json says in every version of transformers"
    ]


def require_writable(tokenizer_files: Sequence[Path]) -> None:
    """Raise UserError if `write_tokenizer` would, before hours of work that come first."""
    # Written for real, since only the result tells whether it splits alike.
    with scratch_folder("tokenizer") as folder:
        try:
            write_tokenizer(tokenizer_files, Path(folder))
        except UserError as error:
            # The folder is gone when the user reads this.
            problems = [problem.replace(f"{folder}/", "") for problem in error.problems]
            raise UserError(*problems) from error


def _text_of_symbols(tokenizer_file: Path) -> str:
    """Return a text with every user-defined symbol of a SentencePiece model, among others and
    alone."""
    if tokenizer_file.suffix == ".json":
        return ""
    symbols = _user_defined(tokenizer_file)
    text = "".join(f"a{symbol} {symbol}{symbol}b" for symbol in symbols)
    # Pieces have a character of their own for the space of texts.
    return text.replace(SPACE, " ")


def _user_defined(tokenizer_file: Path) -> list[str]:
    """Return the pieces that a SentencePiece model splits off wherever they stand, the longest
    first."""
    symbols: list[str] = []
    for number, value in protobuf_fields(read_whole(tokenizer_file)):
        if number == PIECES_FIELD:
            piece = dict(protobuf_fields(value))
            if piece.get(PIECE_TYPE) == USER_DEFINED:
                symbols.append(piece[PIECE_TEXT].decode())
    return sorted(symbols, key=lambda symbol: (-len(symbol), symbol))


def _missing_roles(
    content: dict[str, Any], tokenizer: Tokenizer, begin: int | None, named: Collection[str]
) -> dict[str, Any]:
    """Return the roles of tokens that no file names, for tokenizer_config.json.

    named: roles that files name.
    The begin token is that of the model, and not a piece `<s>` that the model may never have seen.
    """
    tokens = {token_id: token for token, token_id in tokenizer.vocabulary().items()}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    token_ids = {"eos_token": tokenizer.eos, "bos_token": begin, "unk_token": added.get("<unk>")}
    roles: dict[str, Any] = {}
    for role, token_id in token_ids.items():
        if role not in named and isinstance(token_id, int) and token_id in tokens:
            roles[role] = tokens[token_id]
    return roles


def _as_tokenizer_json(tokenizer_file: Path) -> dict[str, Any]:
    """Return a SentencePiece BPE model in the words of Hugging Face's tokenizers."""
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(read_whole(tokenizer_file))
    dummy_prefix = _check_model(tokenizer_file)
    pieces = {model.id_to_piece(token_id): token_id for token_id in range(model.get_piece_size())}
    special = []
    for token_id in pieces.values():
        if model.is_control(token_id) or model.is_unknown(token_id):
            special.append(token_id)
    symbols = _user_defined(tokenizer_file)
    symbol_ids = {pieces[symbol] for symbol in symbols}
    mergeable: dict[str, int] = {}
    for piece, token_id in pieces.items():
        is_other = (
            token_id in special
            or token_id in symbol_ids
            or model.is_byte(token_id)
            or model.is_unused(token_id)
        )
        if not is_other:
            mergeable[piece] = token_id
    # Bytes stand for characters that no piece has.
    byte_fallback = any(map(model.is_byte, pieces.values()))
    merges = _merges(mergeable, model)
    added_tokens: list[dict[str, Any]] = []
    for token_id in sorted(special):
        added_tokens.append(_added_token(model.id_to_piece(token_id), token_id))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": {
            "type": "Sequence",
            "normalizers": _normalizers(tokenizer_file, dummy_prefix),
        },
        "pre_tokenizer": _split_symbols(symbols),
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": _decoders(tokenizer_file, dummy_prefix, byte_fallback),
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.id_to_piece(model.unk_id()),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": bool(symbols),  # a symbol is no merge of pieces
            "vocab": pieces,
            "merges": [[left, right] for left, right in merges],
        },
    }


def _escapes(tokenizer_file: Path) -> list[tuple[str, str]]:
    """Return (characters, what stands for them within pieces) of a model that is trained here."""
    if not _is_lossless(tokenizer_file):
        return []
    return [(DLE, ESCAPES[DLE]), (SPACE, ESCAPES[SPACE])]


def _normalizers(tokenizer_file: Path, dummy_prefix: bool) -> list[dict[str, Any]]:
    """Return the steps from a text to what is split into pieces."""
    steps = [_replace(characters, escape) for characters, escape in _escapes(tokenizer_file)]
    if dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace(" ", SPACE))
    return steps


def _decoders(
    tokenizer_file: Path, dummy_prefix: bool, byte_fallback: bool
) -> list[dict[str, Any]]:
    """Return the steps from pieces to a text, in the reverse order of `_normalizers`."""
    steps = [_replace(SPACE, " ")]
    if byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    steps += [
        _replace(escape, characters) for characters, escape in reversed(_escapes(tokenizer_file))
    ]
    if dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _split_symbols(symbols: Sequence[str]) -> dict[str, Any] | None:
    """Return the step that splits off user-defined symbols; None without any."""
    if not symbols:
        return None
    return {
        "type": "Split",
        "pattern": {"Regex": "|".join(map(re.escape, symbols))},
        "behavior": "Isolated",
        "invert": False,
    }


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _added_token(content: str, token_id: int) -> dict[str, Any]:
    """Return the entry of a special token in a tokenizer's file."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _merges(mergeable: dict[str, int], model: Any) -> Iterator[tuple[str, str]]:
    """Yield pairs of pieces that make a piece, the best-scored piece first: SentencePiece merges in
    that order. mergeable: the pieces that may be halves or wholes, and their ids."""

    def best_first(piece: str) -> tuple[float, int]:
        token_id = mergeable[piece]
        return -model.get_score(token_id), token_id

    def ids_of(pair: tuple[str, str]) -> tuple[int, int]:
        left, right = pair
        return mergeable[left], mergeable[right]

    for piece in sorted(mergeable, key=best_first):
        pairs: list[tuple[str, str]] = []
        for end in range(1, len(piece)):
            left = piece[:end]
            right = piece[end:]
            if left in mergeable and right in mergeable:
                pairs.append((left, right))
        yield from sorted(pairs, key=ids_of)


def _is_lossless(tokenizer_file: Path) -> bool:
    """Return True if a model rewrites texts by the escapes of the models that are trained here, and
    by nothing else."""
    parts = dict(protobuf_fields(read_whole(tokenizer_file)))
    tables = []
    for number in (NORMALIZER, DENORMALIZER):
        spec = dict(protobuf_fields(parts.get(number, b"")))
        tables.append(spec.get(TABLE))
    return tuple(tables) == escapes()


def _check_model(tokenizer_file: Path) -> bool:
    """Return True if a space is put before texts. Raises UserError for unsupported kinds of
    models."""
    fields = dict(protobuf_fields(read_whole(tokenizer_file)))
    trainer = dict(protobuf_fields(fields.get(TRAINER_FIELD, b"")))
    normalizer = dict(protobuf_fields(fields.get(NORMALIZER_FIELD, b"")))
    if trainer.get(MODEL_TYPE, UNIGRAM) != BPE:
        raise UserError.of("convert.tokenizer_not_bpe", file=tokenizer_file)
    rewrites = normalizer.get(CHARACTER_MAP) or normalizer.get(REMOVE_SPACES, 1)
    if not _is_lossless(tokenizer_file) and rewrites:
        raise UserError.of("convert.tokenizer_rewrites", file=tokenizer_file)
    return bool(normalizer.get(DUMMY_PREFIX, 1))
