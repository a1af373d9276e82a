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
NAMES = ("tokenizer.json", "tokenizer.model")  # of a tokenizer in a folder of Hugging Face's
TEMPLATE = "chat_template.jinja"  # before a template that the settings have
ROLES = ("eos_token", "bos_token", "pad_token")
FURTHER = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's tokens
MAX_TOKENS = 10_000_000  # of a vocabulary
SAVE_ANEW = (
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes files "
    "that agree"
)
_KINDS = {  # how a file of another kind begins -> what it is
    b"version https://git-lfs": (
        "it is a pointer of Git LFS, not the file itself: run git lfs pull in its folder"
    ),
    b"\x1f\x8b": "it is packed by gzip: unpack it",
    b"PK\x03\x04": "it is a zip archive: unpack it",
    b"\x80": "it is perhaps a pickle, which is not read",
    b"\xef\xbb\xbf": "it is text with a byte order mark: take its first three bytes away",
    b"<!": "it is HTML or XML: perhaps a page of a download that failed",
    b"#version:": (
        "it is the merges of a tokenizer (merges.txt): give the tokenizer.json that is made of them"
    ),
}
# keys of a model that the library reads, beside those that its models have as attributes
_MODEL_KEYS = ("type", "vocab", "merges", "unk_id", "byte_fallback")
# keys of an added token that it reads
_TOKEN_KEYS = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
# Keys of Metaspace in older files, taken over as prepend_scheme and replacement.
_OLD_METASPACE = ("add_prefix_space", "str_rep")
# key of tokenizer_config.json -> part and key of tokenizer.json that it stands for
_CONTRADICTED = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings in the files beside a tokenizer. Each token has the file that says it.

    named: tokens by their role, such as "eos_token".
    further: other tokens that are named, each with the key.
    added: ids of tokens that were added.
    special: those of them that no text can hold.
    notes: lines for the user on what is not followed.
    """

    named: Mapping[str, tuple[str, Path]]
    further: Mapping[str, tuple[str, Path]]
    added: Mapping[str, tuple[int, Path]]
    special: frozenset[str]
    notes: tuple[str, ...]


def tokenizer_in(path: Path) -> Path:
    """Return the file of the tokenizer in a folder: that of Hugging Face's names, or else its only
    SentencePiece model, as in a checkpoint. A file, or a folder without one, is returned itself."""
    if not path.is_dir():
        return path
    for name in NAMES:
        if (path / name).is_file():
            return path / name
    models = [file for file in path.glob("*.model") if file.is_file()]
    return models[0] if len(models) == 1 else path


def settings_of(path: Path) -> list[Path]:
    """Return the files of settings that belong to a tokenizer: those beside it.

    Beside a SentencePiece model they belong to it only if it has the name that transformers knows,
    tokenizer.model.
    """
    if path.suffix == ".model" and path.name != "tokenizer.model":
        return []
    files = [path.with_name(name) for name in SETTINGS]
    return [file for file in files if file.is_file() and file != path]


def files_beside(path: Path) -> list[Path]:
    """Return the files that belong to a tokenizer: its settings, and its chat template."""
    template = path.with_name(TEMPLATE)
    is_its_own = path.suffix != ".model" or path.name == "tokenizer.model"
    if is_its_own and template.is_file():
        return [*settings_of(path), template]
    return settings_of(path)


def read_settings(path: Path, definition: Mapping[str, Any]) -> TokenizerSettings:
    """Return the settings beside a tokenizer.

    definition: what its tokenizer.json says, empty for SentencePiece.
    Raises UserError, with the name of the file, for settings that cannot be read or have values of
    another kind.
    """
    tables = {file.name: read_json(file) for file in settings_of(path)}
    config = tables.get(CONFIG, {})
    special_map = tables.get(SPECIAL_MAP, {})
    config_file = path.with_name(CONFIG)
    map_file = path.with_name(SPECIAL_MAP)
    added_file = path.with_name(ADDED)

    notes = list(_not_followed(path, config, definition))
    in_config = dict(_named_tokens(config, config_file))
    in_map = dict(_named_tokens(special_map, map_file))
    # transformers prefers the configuration if it has the added tokens, too
    config_counts = "added_tokens_decoder" in config
    for role in sorted(in_config.keys() & in_map.keys() & set(ROLES)):
        candidates = [in_config[role], in_map[role]]
        if not config_counts:
            candidates.reverse()
        (followed, followed_file), (ignored, ignored_file) = candidates
        if followed == ignored:
            continue
        notes.append(
            f"{ignored_file}: {role} = {ignored!r} is not followed, for {followed_file.name} says "
            f"{followed!r}"
        )
        in_config[role] = (followed, followed_file)

    further = dict(_listed_tokens(config, config_file))
    further |= _listed_tokens(special_map, map_file)
    added: dict[str, tuple[int, Path]] = {}
    for token, token_id in _added_tokens(tables.get(ADDED, {}), added_file):
        added[token] = (token_id, added_file)
    special: set[str] = set()
    # after the older file, whose ids it replaces
    for token, token_id, is_special in _decoder_tokens(config, config_file):
        added[token] = (token_id, config_file)
        if is_special:
            special.add(token)
    return TokenizerSettings(
        in_map | in_config,
        further,
        added,
        frozenset(special),
        tuple(notes),
    )


def with_other_names(
    settings: TokenizerSettings, vocabulary: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary with the names that settings give to some of its tokens, and a note on
    them.

    Only special tokens may have another name: no text holds them, so ids are the same by either
    name.
    """
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    with_names = dict(vocabulary)
    notes: list[str] = []
    for token in sorted(settings.special - vocabulary.keys()):
        token_id, file = settings.added[token]
        if token_id in tokens:
            with_names[token] = token_id
            notes.append(
                f"{file}: {token!r} is token {token_id}, which is {tokens[token_id]!r} in the "
                "tokenizer itself"
            )
    if len(notes) > 1:
        notes = [f"{notes[0]}; so it is with {len(notes) - 1} more"]
    return with_names, notes


def require_agreeing(
    path: Path,
    settings: TokenizerSettings,
    vocabulary: Mapping[str, int],
) -> None:
    """Raise UserError unless the tokenizer has every token that the settings beside it name, with
    the same id.

    transformers adds such a token to the vocabulary, so that texts have other ids there.
    """
    for token, (token_id, file) in settings.added.items():
        own_id = vocabulary.get(token)
        if own_id != token_id:
            has = "does not have" if own_id is None else f"has as {own_id}"
            raise UserError.of(
                "data.added_token_conflict",
                file=file,
                number=token_id,
                token=token,
                name=path.name,
                has=has,
                save_anew=SAVE_ANEW,
            )
    named = []
    for role, (token, file) in settings.named.items():
        named.append((f"{role} = {token!r}", token, file))
    for token, (key, file) in settings.further.items():
        named.append((f"{key}: {token!r}", token, file))
    for setting, token, file in named:
        if token not in vocabulary:
            raise UserError.of(
                "data.special_token_missing",
                file=file,
                setting=setting,
                name=path.name,
                save_anew=SAVE_ANEW,
            )


def read_definition(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a tokenizer.json, and what it says: a table that has the table "model".
    Raises UserError for a file that is not that or gives a key twice."""
    try:
        text = read_text(path)
        # the library of tokenizers checks the values
        definition = parse_json(text, check_values=False)
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise not_a_tokenizer(path, f"{error}") from error
    except (OSError, ValueError) as error:
        raise UserError.of("data.definition_unreadable", path=path, error=error) from error
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict):
        raise not_a_tokenizer(path, _kind_of_json(definition))
    return text, definition


def require_as_written(
    path: Path,
    definition: Mapping[str, Any],
    vocabulary: Mapping[str, int],
) -> None:
    """Raise UserError unless a library's `vocabulary` is that of the file, and texts have one way
    to be split."""
    if definition["model"].get("dropout"):
        raise UserError.of(
            "data.tokenizer_dropout", path=path, dropout=definition["model"]["dropout"]
        )
    for added in definition.get("added_tokens") or ():
        token_id = vocabulary.get(added["content"])
        if token_id != added["id"]:
            raise UserError.of(
                "data.added_token_moves",
                path=path,
                content=added["content"],
                id=added["id"],
                number=token_id,
            )
    # two tokens of one id would be one token to the model
    tokens: dict[int, str] = {}
    for token, token_id in vocabulary.items():
        earlier = tokens.setdefault(token_id, token)
        if earlier != token:
            first, second = sorted((earlier, token))
            raise UserError.of(
                "data.token_id_twice", path=path, first=first, second=second, number=token_id
            )
    if not tokens:
        raise UserError.of("data.tokenizer_empty", path=path)
    largest = max(tokens)
    if largest >= MAX_TOKENS:
        raise UserError.of(
            "data.token_id_too_large",
            path=path,
            tokens=tokens[largest],
            largest=largest,
            max_tokens=MAX_TOKENS,
        )


def unread_keys(definition: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return the keys of a tokenizer.json that the library's `tokenizer` has not taken over, with
    their places.

    Post-processors are left out: no text gets the tokens that they add.
    """
    unread: list[str] = []
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        # its state, as the library would write it into a file
        part = getattr(tokenizer, name)
        state = json.loads(part.__getstate__()) if part else None
        unread += _keys_lacking(definition.get(name), state, name)
    for key in definition["model"]:
        if key not in _MODEL_KEYS and not hasattr(tokenizer.model, key):
            unread.append(f"model.{key}")
    for added in definition.get("added_tokens") or ():
        for key in added:
            if key not in _TOKEN_KEYS:
                unread.append(f"added_tokens.{key}")
    return [*dict.fromkeys(unread)]  # each once


def _keys_lacking(
    written: Any,
    read: Any,
    location: str,
) -> Iterator[str]:
    """Yield the keys of a value in the file that the library's value at its place has not."""
    if isinstance(written, dict):
        table = read if isinstance(read, dict) else {}
        for key, value in written.items():
            if key in table:
                yield from _keys_lacking(value, table[key], f"{location}.{key}")
            # In older files Metaspace has other keys, which the library renames.
            elif not ("prepend_scheme" in table and key in _OLD_METASPACE):
                yield f"{location}.{key}"
    elif isinstance(written, list) and isinstance(read, list):
        for number, (value, read_value) in enumerate(zip(written, read, strict=False)):
            yield from _keys_lacking(value, read_value, f"{location}[{number}]")


def not_a_tokenizer(path: Path, why: str) -> UserError:
    """Return the error for a file that is no tokenizer. why: the reason, or what the file is."""
    return UserError.of("data.not_a_tokenizer", path=path, why=why)


def another_kind(path: Path, content: bytes) -> str:
    """Return what a file is that is no tokenizer; "" if nothing is known of it."""
    if not content:
        return "it is empty"
    for start, description in _KINDS.items():
        if content.startswith(start):
            return description
    if _is_tiktoken(content):
        return (
            "it is a vocabulary of tiktoken: convert it to a tokenizer.json (TikTokenConverter of "
            "transformers)"
        )
    if path.suffix == ".json":
        return "it holds no JSON object; tokenizers of Keras and lists of tokens are not read"
    if path.suffix in (".txt", ".vocab"):
        return (
            "it is a list of words, which says nothing of how texts are split: give the "
            "tokenizer.json beside it"
        )
    return ""


def _is_tiktoken(content: bytes) -> bool:
    """Return True if each line is a word and a number."""
    lines = content[:4096].split(b"\n")[:-1]  # the last one may be cut
    for line in lines:
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdigit():
            return False
    return bool(lines)


def protobuf_fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the fields of a protobuf message, such as a SentencePiece model."""
    position = 0

    def read_varint() -> int:
        """Return the whole number at `position`, which has 7 bits a byte, and move behind it."""
        nonlocal position
        value = 0
        shift = 0
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift  # the lowest bits first
            shift += 7
            if byte < 0x80:
                return value

    while position < len(content):
        key = read_varint()
        number = key >> 3
        wire_type = key & 7
        if wire_type == 0:
            yield number, read_varint()
            continue
        # Types 1 and 5 are numbers of 64 and 32 bits; texts, bytes and messages state their length.
        length = read_varint() if wire_type == 2 else {1: 8, 5: 4}[wire_type]
        yield number, content[position : position + length]
        position += length


def require_whole(path: Path, content: bytes) -> None:
    """Raise UserError for a SentencePiece model without its last parts, for which the library takes
    its defaults."""
    # By their numbers in sentencepiece_model.proto.
    parts = {2: "trainer_spec", 3: "normalizer_spec"}
    missing = parts.keys() - {number for number, _ in protobuf_fields(content)}
    if missing:
        names = " and no ".join(parts[number] for number in sorted(missing))
        raise UserError.of("data.sentencepiece_cut_off", path=path, names=names)


def _token_of(value: Any) -> Any:
    """Return the token of a setting, which may be a text, or a table with its `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _named_tokens(table: Mapping[str, Any], file: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield each role with its token. null names none."""
    for role, value in table.items():
        token = _token_of(value)
        is_text = isinstance(token, str)
        if role in ROLES and value is not None and not is_text:
            raise UserError.of("data.special_not_text", file=file, role=role, value=value)
        # other keys have texts too, such as the name of a class
        if role.endswith("_token") and is_text and token:
            yield role, (token, file)


def _listed_tokens(table: Mapping[str, Any], file: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """Yield each further special token with the key that names it."""
    for key in FURTHER:
        values = table.get(key) or []
        if isinstance(values, dict) and key != FURTHER[0]:  # a table of roles
            values = [*values.values()]
        if not isinstance(values, list):
            raise UserError.of("data.special_not_list", file=file, key=key, values=values)
        for token in map(_token_of, values):
            if isinstance(token, str):
                yield token, (key, file)


def _added_tokens(table: Mapping[str, Any], file: Path) -> Iterator[tuple[str, int]]:
    """Yield each token of an added_tokens.json with its id."""
    for token, token_id in table.items():
        if type(token_id) is not int:
            raise UserError.of(
                "data.special_id_not_number", file=file, token=token, number=token_id
            )
        yield token, token_id


def _decoder_tokens(config: Mapping[str, Any], file: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield each added token of a tokenizer_config.json, its id, and True if it is special."""
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, dict):
        raise UserError.of("data.decoder_not_table", file=file)
    for key, value in table.items():
        token = _token_of(value)
        if not key.isdecimal() or not isinstance(token, str):
            raise UserError.of("data.decoder_entry", file=file, number=key, value=value)
        is_special = isinstance(value, dict) and value.get("special") is True
        yield token, int(key), is_special


def _not_followed(
    path: Path,
    config: Mapping[str, Any],
    definition: Mapping[str, Any],
) -> Iterator[str]:
    """Yield a note for each setting that other programs follow in place of the tokenizer's file."""
    file = path.with_name(CONFIG)
    code = config.get("auto_map")
    if isinstance(code, dict) and code.get("AutoTokenizer"):
        yield (
            f"{file}: auto_map: code of the folder's own is not run; texts are split as "
            f"{path.name} says"
        )
    for key, (part, part_key) in _CONTRADICTED.items():
        setting = config.get(key)
        if not isinstance(setting, bool):
            continue
        for value in _values(definition.get(part), part_key):
            if isinstance(value, bool) and setting != value:
                counts = f"{part}.{part_key} = {str(value).lower()} in {path.name}"
                yield (
                    f"{file}: {key} = {str(setting).lower()} is not followed, for {counts} counts "
                    "alone"
                )
    prefix = config.get("add_prefix_space")
    place = _place_of_prefix(definition)
    if prefix is False and place:
        yield (
            f"{file}: add_prefix_space = false is not followed, for {place} in {path.name} puts a "
            "space before texts; transformers may put none"
        )
    elif prefix is True and place == "":
        yield (
            f"{file}: add_prefix_space = true is not followed, for nothing in {path.name} puts a "
            "space before texts; transformers may put one"
        )


def _place_of_prefix(definition: Mapping[str, Any]) -> str | None:
    """Return the part of a tokenizer.json that puts a space before texts, "" if no part does; None
    if spaces are not written as SentencePiece writes them."""
    normalizer = definition.get("normalizer")
    pre_tokenizer = definition.get("pre_tokenizer")
    if SPACE in _values(normalizer, "prepend"):
        return "the normalizer Prepend"
    schemes = [*_values(pre_tokenizer, "prepend_scheme")]
    if any(scheme != "never" for scheme in schemes):
        return "the pre_tokenizer Metaspace"
    replaced = [*_values(normalizer, "content")]
    return "" if schemes or SPACE in replaced else None


def _values(part: Any, key: str) -> Iterator[Any]:
    """Yield the values under a key in a part of a tokenizer.json, which may consist of several
    parts."""
    if isinstance(part, dict):
        children = part.items()
    elif isinstance(part, list):
        children = enumerate(part)
    else:
        return
    for name, value in children:
        if name == key:
            yield value
        yield from _values(value, key)


def _kind_of_json(value: Any) -> str:
    """Return what a JSON file is that is no tokenizer.json."""
    if not isinstance(value, dict):
        return "it holds no JSON object"
    if "tokenizer_class" in value or "eos_token" in value:
        return f"it has the settings of a tokenizer ({CONFIG}): give the tokenizer.json beside it"
    if value and all(type(token_id) is int for token_id in value.values()):
        return (
            "it is a vocabulary (vocab.json) without merges: give the tokenizer.json that is made "
            "of both"
        )
    if "class_name" in value:
        return "it is a tokenizer of Keras, which is not read"
    if "model_type" in value:
        return "it is the configuration of a model (config.json): give the tokenizer.json beside it"
    if isinstance(value.get("vocab"), list) and "config" in value:
        return "it is a tekken.json of Mistral: give the tokenizer.json of the same model"
    return 'it has no table "model"'
