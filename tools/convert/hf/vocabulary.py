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
from tempfile import TemporaryDirectory
from typing import Any

import sentencepiece

from megaprec.data.encoding import sentencepiece_encoder
from megaprec.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megaprec.data.tokenizer_files import CONFIG, SAVE_ANEW, SETTINGS, SPECIAL_MAP, protobuf_fields
from megaprec.data.training import DENORMALIZER, DLE, ESCAPES, NORMALIZER, SPACE, TABLE, escapes
from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text
from tools.convert.core.source import Source

UNREAD = (  # other files that a tokenizer may be in
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
FROM_FILE = (
    "PreTrainedTokenizerFast"  # the class of transformers that takes a tokenizer.json as it is
)
BPE = 2  # model_type in SentencePiece's trainer_spec
USER_DEFINED = 4  # type of a piece
PROBE = (
    'Ünï — 数字 😀\u200d👩 \t  def f(x):\n\n    return {"a": 1.5e-3}  # x\x00\x07\r\n'
    + "aaa   " * 9
    + "\u0301é\u2581\x10_ \x10.\x10"
)


def main_file(files: Sequence[Path]) -> Path | None:
    """The file among a tokenizer's that defines it whole."""
    named = [f for f in files if f.name not in SETTINGS]
    return min(named, key=lambda f: f.suffix != ".json", default=None)


def check_tokenizer(files: Sequence[Path], vocab: int) -> Tokenizer | None:
    """The tokenizer, if there is one. UserError if it has more tokens than the model's vocabulary
    `vocab`."""
    file = main_file(files)
    if file is None:
        return None
    tokenizer = load_tokenizer(file)
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"{file} has {tokenizer.vocab_size} tokens, but the vocabulary of the model holds "
            f"{vocab}"
        )
    return tokenizer


def folder_notes(folder: Path, files: Sequence[Path]) -> Iterator[str]:
    """Yield notes on files of a tokenizer that are not read, and on two that disagree. files: those
    that are read."""
    file = main_file(files)
    if file is None:
        names = sorted(
            {found.name for name in UNREAD for found in folder.glob(name)}
            | {one.name for one in files}
        )
        if names:
            yield (
                f"{folder}: of {', '.join(names)} no tokenizer is read, but of a tokenizer.json: "
                f"{SAVE_ANEW}"
            )
        return
    pieces = next((f for f in files if f.suffix == ".model" and f != file), None)
    if pieces is None:
        return
    try:
        model = sentencepiece_encoder(read_whole(pieces))[1]
    except RuntimeError:
        yield f"{file} is read, not {pieces.name} beside it, which is no SentencePiece model"
        return
    tokens = {id: token for token, id in load_tokenizer(file).vocabulary().items()}
    other = (id for id in range(model.get_piece_size()) if tokens.get(id) != model.id_to_piece(id))
    if (id := next(other, None)) is not None:
        yield (
            f"{file} is read, not {pieces.name} beside it, which disagrees: token {id} is "
            f"{tokens.get(id)!r} in "
            f"the first and {model.id_to_piece(id)!r} in the other"
        )


def said_ids(special: Mapping[str, Any], key: str, known: int) -> list[int]:
    """Return the ids under a key, such as bos_token_id, which may hold one, a list or none.

    known: number of ids that a token may have; others are left out.
    """
    value = special.get(key)
    listed = value if isinstance(value, list) else [value]
    return [id for id in listed if type(id) is int and 0 <= id < known]


def begin_note(source: Source, tokenizer: Tokenizer | None) -> list[str]:
    """Return a note if a tokenizer names a begin token that is not the one that a run of ours was
    trained with."""
    facts = source.facts
    of_a_run = bool(facts.documents) or not facts.special
    begin = facts.documents.get("begin", tokenizer.eos if tokenizer else None)
    if (
        not isinstance(tokenizer, HuggingFaceTokenizer)
        or not of_a_run
        or tokenizer.bos in (None, begin)
    ):
        return []
    instead = "no token stands there" if begin is None else f"they begin after the token {begin}"
    return [
        f"{tokenizer.path}: the settings beside it name token {tokenizer.bos} as bos_token, "
        "which nothing says to "
        f"stand before documents: {instead}"
    ]


def write_tokenizer(files: Sequence[Path], folder: Path, begin: int | None = None) -> None:
    """Writes into `folder` what AutoTokenizer needs. Raises UserError for a model that a
    tokenizer.json cannot say.

    begin: id of the token that begins a document, as in config.json, if the files do not name it.
    """
    file = main_file(files)
    if file is None:
        return
    tokenizer = load_tokenizer(file)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content = parse_json(read_text(file))
    else:
        content = _as_tokenizer_json(file)
    (folder / "tokenizer.json").write_text(
        json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    given = next((f for f in files if f.name == CONFIG), None)
    extras = [f for f in files if f.name == SPECIAL_MAP]
    settings = parse_json(read_text(given)) if given else {"clean_up_tokenization_spaces": False}
    named = {*settings, *(role for extra in extras for role in parse_json(read_text(extra)))}
    settings = _config(content, tokenizer, begin, named) | settings | {"tokenizer_class": FROM_FILE}
    settings.pop("auto_map", None)  # code of the folder's own, which is not carried over
    (folder / CONFIG).write_text(
        json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8"
    )
    for extra in extras:
        (folder / extra.name).write_bytes(read_whole(extra))
    probe = PROBE + _spelled(file)
    if load_tokenizer(folder / "tokenizer.json").encode(probe) != tokenizer.encode(probe):
        raise UserError(f"{file} cannot be put as a tokenizer.json: it would split texts otherwise")


def class_note(files: Sequence[Path]) -> list[str]:
    """Return a note on a class of tokenizers that the settings name, and that is written as
    another."""
    given = next((f for f in files if f.name == CONFIG), None)
    if given and main_file(files):
        named = parse_json(read_text(given)).get("tokenizer_class")
    else:
        named = None
    if named in (None, FROM_FILE, "TokenizersBackend"):
        return []
    return [
        f"{given}: tokenizer_class = {named!r} is written as {FROM_FILE!r}, which splits "
        "texts as tokenizer.json says "
        "in every version of transformers"
    ]


def require_writable(files: Sequence[Path]) -> None:
    """Raise UserError if `write_tokenizer` would, before hours of work that come first."""
    with TemporaryDirectory() as folder:
        try:
            write_tokenizer(files, Path(folder))
        except UserError as error:
            raise UserError(
                *(problem.replace(f"{folder}/", "") for problem in error.problems)
            ) from error


def _spelled(file: Path) -> str:
    """Return a text with every user-defined symbol of a SentencePiece model, among others and
    alone."""
    symbols = [] if file.suffix == ".json" else _user_defined(file)
    return "".join(f"a{symbol} {symbol}{symbol}b" for symbol in symbols).replace(SPACE, " ")


def _user_defined(file: Path) -> list[str]:
    """Pieces that a SentencePiece model splits off wherever they stand, the longest first."""
    pieces = [
        dict(protobuf_fields(value))
        for number, value in protobuf_fields(read_whole(file))
        if number == 1
    ]
    found = [piece[1].decode() for piece in pieces if piece.get(3) == USER_DEFINED]
    return sorted(found, key=lambda symbol: (-len(symbol), symbol))


def _config(
    content: dict[str, Any], tokenizer: Tokenizer, begin: int | None, named: Collection[str]
) -> dict[str, Any]:
    """Return the roles of tokens that no file names, for tokenizer_config.json. named: the others.

    The begin token is that of the model, and not a piece `<s>` that the model may never have seen.
    """
    tokens = {id: token for token, id in tokenizer.vocabulary().items()}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    ids = {"eos_token": tokenizer.eos, "bos_token": begin, "unk_token": added.get("<unk>")}
    known = {role: id for role, id in ids.items() if isinstance(id, int) and id in tokens}
    return {role: tokens[id] for role, id in known.items() if role not in named}


def _as_tokenizer_json(file: Path) -> dict[str, Any]:
    """A SentencePiece BPE model in the words of Hugging Face's tokenizers."""
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(read_whole(file))
    dummy_prefix = _check_model(file)
    pieces = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    special = [i for i in pieces.values() if model.is_control(i) or model.is_unknown(i)]
    odd = {*special, *(pieces[symbol] for symbol in _user_defined(file))}
    plain = {
        p: i for p, i in pieces.items() if not (i in odd or model.is_byte(i) or model.is_unused(i))
    }
    escaped = {DLE: ESCAPES[DLE], SPACE: ESCAPES[SPACE]} if _is_lossless(file) else {}
    escape = [_replace(one, other) for one, other in escaped.items()]
    space = _replace(" ", SPACE)
    back = _replace(SPACE, " ")
    unescape = [_replace(other, one) for one, other in reversed(escaped.items())]
    prefix = [{"type": "Prepend", "prepend": SPACE}] if dummy_prefix else []
    symbols = _user_defined(file)
    split = {
        "type": "Split",
        "pattern": {"Regex": "|".join(map(re.escape, symbols))},
        "behavior": "Isolated",
    }
    fallback = any(map(model.is_byte, pieces.values()))
    bytes_back = [{"type": "ByteFallback"}] if fallback else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if dummy_prefix else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(model.id_to_piece(i), i) for i in sorted(special)],
        "normalizer": {"type": "Sequence", "normalizers": [*escape, *prefix, space]},
        "pre_tokenizer": {**split, "invert": False} if symbols else None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, *bytes_back, {"type": "Fuse"}, *unescape, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.id_to_piece(model.unk_id()),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": fallback,
            "ignore_merges": bool(symbols),  # a symbol is no merge of pieces
            "vocab": pieces,
            "merges": [[a, b] for a, b in _merges(plain, model)],
        },
    }


def _replace(one: str, other: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": one}, "content": other}


def _added(content: str, number: int) -> dict[str, Any]:
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {"id": number, "content": content, **flags}


def _merges(plain: dict[str, int], model: Any) -> Iterator[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best-scored piece first: SentencePiece merges in that
    order."""
    for piece in sorted(plain, key=lambda p: (-model.get_score(plain[p]), plain[p])):
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(a, b) for a, b in pairs if a in plain and b in plain]
        yield from sorted(known, key=lambda pair: (plain[pair[0]], plain[pair[1]]))


def _is_lossless(file: Path) -> bool:
    """Return True if a model rewrites texts by the escapes of the models that are trained here, and
    by nothing else."""
    parts = dict(protobuf_fields(read_whole(file)))
    tables = tuple(
        dict(protobuf_fields(parts.get(part, b""))).get(TABLE)
        for part in (NORMALIZER, DENORMALIZER)
    )
    return tables == escapes()


def _check_model(file: Path) -> bool:
    """Return True if a space is put before texts. Raises UserError for unsupported kinds of
    models."""
    whole = dict(protobuf_fields(read_whole(file)))
    trainer = dict(protobuf_fields(whole.get(2, b"")))
    normalizer = dict(protobuf_fields(whole.get(3, b"")))
    if trainer.get(3, 1) != BPE:
        raise UserError(
            f"{file} is no byte-pair model; others cannot be put as a tokenizer.json here"
        )
    if not _is_lossless(file) and (normalizer.get(2) or normalizer.get(4, 1)):
        raise UserError(
            f"{file} rewrites texts before it splits them, which a tokenizer.json cannot say "
            "exactly"
        )
    return bool(normalizer.get(3, 1))
