"""The file of a tokenizer and the settings beside it: what they say, checked before a library reads
them.

The libraries read a file leniently: they number tokens anew, take the last of two equal keys, and
draw merges at random where the file asks for dropout. Here such a file is refused, by the token or
key. Settings are the files that transformers reads beside a tokenizer: they name the tokens that
begin and end a document and those that were added, and may contradict the tokenizer.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_json, read_text

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
SETTINGS = (CONFIG, SPECIAL_MAP, ADDED)
ROLES = ("eos_token", "bos_token", "pad_token")
FURTHER = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
MOST_TOKENS = 10_000_000  # of a vocabulary
SAVE_ANEW = (
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes files "
    "that agree"
)
_KINDS = {  # how a file of another kind begins, or what its JSON has -> what it is
    b"version https://git-lfs": "it is a pointer of Git LFS, not the file itself: run git lfs pull in its folder",
    b"\x1f\x8b": "it is packed by gzip: unpack it",
    b"PK\x03\x04": "it is a zip archive: unpack it",
    b"\x80": "it is perhaps a pickle, which is not read",
    b"\xef\xbb\xbf": "it is text with a byte order mark: take its first three bytes away",
    b"<!": "it is HTML or XML: perhaps a page of a download that failed",
    b"#version:": (
        "it is the merges of a tokenizer (merges.txt): give the tokenizer.json that is made of them"
    ),
}
# beside what a model has as attributes
_OF_MODELS = (
    "type",
    "vocab",
    "merges",
    "unk_id",
    "byte_fallback",
)
_OF_TOKENS = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
_OLD_METASPACE = ("add_prefix_space", "str_rep")  # taken over as prepend_scheme and replacement
# key of tokenizer_config.json -> part and key of tokenizer.json that it stands for
_CONTRADICTED = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}


@dataclass(frozen=True)
class Settings:
    """The settings in the files beside a tokenizer. notes: lines for the user on what is not
    followed.

    named: tokens by their role, such as "eos_token". further: other tokens that are named, each
        with the key.
    added: ids of tokens that were added. special: those of them that no text can hold. Each token
    has the file that says it.
    """

    named: Mapping[str, tuple[str, Path]]
    further: Mapping[str, tuple[str, Path]]
    added: Mapping[str, tuple[int, Path]]
    special: frozenset[str]
    notes: tuple[str, ...]


def settings_of(path: Path) -> list[Path]:
    """Return the files of settings that belong to a tokenizer: those beside it.

    Beside a SentencePiece model they belong to it only if it has the name that transformers knows,
    tokenizer.model.
    """
    if path.suffix == ".model" and path.name != "tokenizer.model":
        return []
    return [
        file
        for file in (path.with_name(name) for name in SETTINGS)
        if file.is_file() and file != path
    ]


def read_settings(path: Path, definition: Mapping[str, Any]) -> Settings:
    """Return the settings beside a tokenizer. definition: what its tokenizer.json says, empty for
    SentencePiece.

    Raises UserError, with the name of the file, for settings that cannot be read or have values of
    another kind.
    """
    said = {file.name: read_json(file) for file in settings_of(path)}
    config = said.get(CONFIG, {})
    special = said.get(SPECIAL_MAP, {})
    at = {name: path.with_name(name) for name in SETTINGS}
    notes = [*_not_followed(path, config, definition)]
    named = dict(_named(config, at[CONFIG]))
    later = dict(_named(special, at[SPECIAL_MAP]))
    for role in sorted(named.keys() & later.keys() & set(ROLES)):
        if named[role][0] != later[role][0]:
            # as transformers
            first, other = (named, later) if "added_tokens_decoder" in config else (later, named)
            said_there = f"{first[role][1].name} says {first[role][0]!r}"
            notes.append(
                f"{other[role][1]}: {role} = {other[role][0]!r} is not followed, for {said_there}"
            )
            named[role] = first[role]
    further = dict([*_listed(config, at[CONFIG]), *_listed(special, at[SPECIAL_MAP])])
    added = {
        token: (number, at[ADDED]) for token, number in _numbers(said.get(ADDED, {}), at[ADDED])
    }
    decoder = [*_decoder(config, at[CONFIG])]
    added |= {token: (number, at[CONFIG]) for token, number, _ in decoder}
    special_ones = frozenset(token for token, _, is_special in decoder if is_special)
    return Settings(later | named, further, added, special_ones, tuple(notes))


def with_other_names(
    settings: Settings, vocabulary: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary with the names that settings give to some of its tokens, and a note on
    them.

    Only special tokens may have another name: no text holds them, so ids are the same by either
    name.
    """
    tokens = {id: token for token, id in vocabulary.items()}
    known = dict(vocabulary)
    notes = list[str]()
    for token in sorted(settings.special - vocabulary.keys()):
        number, file = settings.added[token]
        if number in tokens:
            known[token] = number
            notes.append(
                f"{file}: {token!r} is token {number}, which is {tokens[number]!r} in the "
                "tokenizer itself"
            )
    return known, [f"{notes[0]}; {len(notes) - 1} others have another name too"] if notes[
        1:
    ] else notes


def require_agreeing(path: Path, settings: Settings, vocabulary: Mapping[str, int]) -> None:
    """Raise UserError unless the tokenizer has every token that the settings beside it name, with
    the same id.

    transformers adds such a token to the vocabulary, so that texts have other ids there.
    """
    for token, (number, file) in settings.added.items():
        if (found := vocabulary.get(token)) != number:
            has = "does not have" if found is None else f"has as {found}"
            raise UserError(
                f"{file} adds token {number}, {token!r}, which {path.name} {has}: {SAVE_ANEW}"
            )
    named = [(f"{role} = {token!r}", token, file) for role, (token, file) in settings.named.items()]
    named += [(f"{key}: {token!r}", token, file) for token, (key, file) in settings.further.items()]
    for what, token, file in named:
        if token not in vocabulary:
            raise UserError(f"{file}: {what}: {path.name} has no such token: {SAVE_ANEW}")


def read_definition(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a tokenizer.json, and what it says. Raises UserError."""
    try:
        text = read_text(path)
        said = parse_json(text, read_again=True)
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise neither(path, f"{error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("model"), dict):
        raise neither(path, _kind_of_json(said))
    return text, said


def require_as_written(
    path: Path, definition: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> None:
    """Raise UserError unless a library's `vocabulary` is that of the file, and texts have one way
    to be split."""
    if definition["model"].get("dropout"):
        raise UserError(
            f"{path}: model.dropout = {definition['model']['dropout']} splits texts at random, so "
            "a text has other tokens each time: set it to null"
        )
    for one in definition.get("added_tokens") or ():
        if (found := vocabulary.get(one["content"])) != one["id"]:
            raise UserError(
                f"{path}: added_tokens has {one['content']!r} as token {one['id']}, but it becomes "
                f"token {found}, for a token of the model keeps its id, and others follow without "
                "a gap: add tokens of any name for ids between"
            )
    owner = dict[int, str]()
    for token, number in vocabulary.items():
        if (other := owner.setdefault(number, token)) != token:
            first, second = sorted((other, token))
            raise UserError(
                f"{path}: {first!r} and {second!r} are both token {number}: give each its own id"
            )
    if not owner:
        raise UserError(f"{path} has no token")
    if (largest := max(owner)) >= MOST_TOKENS:
        raise UserError(
            f"{path}: {owner[largest]!r} is token {largest}: ids below {MOST_TOKENS:,} are possible"
        )


def unread_keys(definition: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return the keys of a tokenizer.json that the library's `tokenizer` has not taken over, with
    their places.

    Post-processors are left out: no text gets the tokens that they add.
    """
    found = list[str]()
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(tokenizer, name)
        found += _lacking(
            definition.get(name), json.loads(part.__getstate__()) if part else None, name
        )
    model = definition["model"]
    found += [
        f"model.{key}"
        for key in model
        if key not in _OF_MODELS and not hasattr(tokenizer.model, key)
    ]
    flags = (
        key for one in definition.get("added_tokens") or () for key in one if key not in _OF_TOKENS
    )
    return [*found, *(f"added_tokens.{key}" for key in dict.fromkeys(flags))]


def _lacking(said: Any, kept: Any, at: str) -> Iterator[str]:
    if isinstance(said, dict):
        for key, value in said.items():
            if isinstance(kept, dict) and key in kept:
                yield from _lacking(value, kept[key], f"{at}.{key}")
            elif not (
                isinstance(kept, dict) and "prepend_scheme" in kept and key in _OLD_METASPACE
            ):
                yield f"{at}.{key}"
    elif isinstance(said, list) and isinstance(kept, list):
        for number, (one, other) in enumerate(zip(said, kept, strict=False)):
            yield from _lacking(one, other, f"{at}[{number}]")


def neither(path: Path, why: str) -> UserError:
    """Return the error for a file that is no tokenizer. why: the reason, or what the file is."""
    return UserError(
        f"{path} is neither a SentencePiece .model nor a Hugging Face tokenizer.json: {why}"
    )


def another_kind(path: Path, content: bytes) -> str:
    """Return what a file is that is no tokenizer; "" if nothing is known of it."""
    found = next(
        (what for start, what in _KINDS.items() if content.startswith(start)),
        "" if content else "it is empty",
    )
    lines = [line.split() for line in content[:4096].split(b"\n")[:-1]]
    if not found and lines and all(len(line) == 2 and line[1].isdigit() for line in lines):
        found = (
            "it is a vocabulary of tiktoken: convert it to a tokenizer.json (TikTokenConverter of "
            "transformers)"
        )
    if not found and path.suffix == ".json":
        found = "it holds no JSON object; tokenizers of Keras and lists of tokens are not read"
    if not found and path.suffix in (".txt", ".vocab"):
        found = (
            "it is a list of words, which says nothing of how texts are split: give the "
            "tokenizer.json beside it"
        )
    return found


def protobuf_fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the fields of a protobuf message, of which a SentencePiece model is
    one."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(content):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        length = {1: 8, 2: -1, 5: 4}[key & 7]
        length = number() if length < 0 else length
        yield key >> 3, content[place : place + length]
        place += length


def require_whole(path: Path, content: bytes) -> None:
    """Raise UserError for a SentencePiece model without its last parts, for which the library takes
    its defaults."""
    parts = {2: "trainer_spec", 3: "normalizer_spec"}
    lacking = parts.keys() - {number for number, _ in protobuf_fields(content)}
    if lacking:
        raise UserError(
            f"{path} has no {' and no '.join(parts[one] for one in sorted(lacking))}, which is the "
            "end of every SentencePiece model: it is cut off; copy it again"
        )


def _named(said: Mapping[str, Any], file: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield each role with its token. The token may be a text, or a table with its `content`; null
    names none."""
    for role, value in said.items():
        token = value.get("content") if isinstance(value, dict) else value
        if role in ROLES and value is not None and not isinstance(token, str):
            raise UserError(f"{file}: {role} = {value!r}: give a token, as text")
        if role.endswith("_token") and isinstance(token, str) and token:
            yield role, (token, file)


def _listed(said: Mapping[str, Any], file: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield each further special token with the key that names it. Two of the keys may hold a table
    of roles."""
    for key in FURTHER:
        listed = said.get(key) or []
        if isinstance(listed, dict) and key != FURTHER[0]:
            listed = [*listed.values()]
        if not isinstance(listed, list):
            raise UserError(f"{file}: {key} = {listed!r}: give a list of tokens")
        tokens = (one.get("content") if isinstance(one, dict) else one for one in listed)
        yield from ((token, (key, file)) for token in tokens if isinstance(token, str))


def _numbers(said: Mapping[str, Any], file: Path) -> Iterator[tuple[str, int]]:
    for token, number in said.items():
        if type(number) is not int:
            raise UserError(f"{file}: {token!r} has the id {number!r}: give a whole number")
        yield token, number


def _decoder(config: Mapping[str, Any], file: Path) -> Iterator[tuple[str, int, bool]]:
    said = config.get("added_tokens_decoder") or {}
    if not isinstance(said, dict):
        raise UserError(f"{file}: added_tokens_decoder is no table of tokens by their ids")
    for number, one in said.items():
        token = one.get("content") if isinstance(one, dict) else one
        if not number.isdecimal() or not isinstance(token, str):
            raise UserError(
                f"{file}: added_tokens_decoder has {number!r} = {one!r}: give tokens by their ids"
            )
        yield token, int(number), isinstance(one, dict) and one.get("special") is True


def _not_followed(
    path: Path, config: Mapping[str, Any], definition: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a note for each setting that other programs follow in place of the tokenizer's file."""
    at = path.with_name(CONFIG)
    code = config.get("auto_map")
    if isinstance(code, dict) and code.get("AutoTokenizer"):
        yield (
            f"{at}: auto_map: code of the folder's own is not run; texts are split as {path.name} "
            "says"
        )
    for key, (part, other) in _CONTRADICTED.items():
        for value in _values(definition.get(part), other):
            if (
                isinstance(config.get(key), bool)
                and isinstance(value, bool)
                and config[key] != value
            ):
                said = f"{part}.{other} = {str(value).lower()} in {path.name}"
                yield (
                    f"{at}: {key} = {str(config[key]).lower()} is not followed, for {said} counts "
                    "alone"
                )


def _values(part: Any, key: str) -> Iterator[Any]:
    """Yield the values under a key in a part of a tokenizer.json, which may consist of several
    parts."""
    for name, value in (
        part.items()
        if isinstance(part, dict)
        else enumerate(part)
        if isinstance(part, list)
        else ()
    ):
        if name == key:
            yield value
        yield from _values(value, key)


def _kind_of_json(said: Any) -> str:
    if not isinstance(said, dict):
        return "it holds no JSON object"
    if "tokenizer_class" in said or "eos_token" in said:
        return f"it has the settings of a tokenizer ({CONFIG}): give the tokenizer.json beside it"
    if said and all(type(value) is int for value in said.values()):
        return (
            "it is a vocabulary (vocab.json) without merges: give the tokenizer.json that is made "
            "of both"
        )
    if "class_name" in said:
        return "it is a tokenizer of Keras, which is not read"
    if "model_type" in said:
        return "it is the configuration of a model (config.json): give the tokenizer.json beside it"
    if isinstance(said.get("vocab"), list) and "config" in said:
        return "it is a tekken.json of Mistral: give the tokenizer.json of the same model"
    return 'it has no table "model"'
