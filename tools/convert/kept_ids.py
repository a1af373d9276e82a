"""The ids of special tokens and the settings of generation that first weights came with, kept
through a run.

A checkpoint has them as its folder said them, with the text of each token that an id names. They
are read as the model of the checkpoint has them: an id follows its token into another tokenizer,
and the tokens around the documents of the run's training come before those of the folder.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaprec.checkpoint.atomic import INDEX
from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.text.tokenizer import Tokenizer, load_tokenizer, loaded_once
from tools.convert.core.source import Source
from tools.convert.hf.vocabulary import main_file
from tools.saved.train_state import (
    read_documents,
    read_ids,
    read_table,
    read_tokenizer,
)

SPECIAL = "special_ids"
GENERATION = "generation"
TOKENS = "special_tokens"
BEGIN = "bos_token_id"
END = "eos_token_id"
_OF_TOKENS = ("_token_id", "suppress_tokens")  # endings of keys whose values are ids


@dataclass(frozen=True)
class KeptIds:
    """The special tokens and the settings of generation of a model folder.

    special: bos_token_id and the like, as in config.json. generation: contents of
    generation_config.json. changes: a line for each entry that a run has changed.
    """

    special: dict[str, Any]
    generation: dict[str, Any]
    changes: tuple[str, ...] = ()


def first_ids(source: Source) -> dict[str, Any]:
    """Return the entries of a checkpoint's index that keep what the folder of its first weights
    says."""
    facts = source.facts
    file = main_file(source.tokenizer)
    tokens = dict[str, str]()
    if file:
        texts = _texts(load_tokenizer(file))
        named = _all_ids(facts.special) | _all_ids(facts.generation)
        for token_id in sorted(named):
            if token_id in texts:
                tokens[str(token_id)] = texts[token_id]
    return {SPECIAL: facts.special, GENERATION: facts.generation, TOKENS: tokens}


def saved_ids(checkpoint: Store) -> dict[str, Any]:
    """Return these entries of a checkpoint, for one that goes on from it; none if it has none.

    Raises UserError if they are damaged.
    """
    special = read_ids(checkpoint, SPECIAL)
    generation = read_table(checkpoint, GENERATION)
    if not special and not generation:
        return {}
    tokens = _read_tokens(checkpoint)
    return {SPECIAL: special, GENERATION: generation, TOKENS: tokens}


def kept_ids(checkpoint: Store) -> KeptIds:
    """Return the special ids and the settings of generation of a checkpoint's model.

    Those of the folder of its first weights, changed where its run has trained with others; those
    of its run if it has no such folder. Raises UserError if they are damaged.
    """
    special = read_ids(checkpoint, SPECIAL)
    generation = read_table(checkpoint, GENERATION)
    documents = read_documents(checkpoint)
    if not documents:
        return KeptIds(special, generation)
    begin = documents["begin"]
    end = documents["end"]
    if not special and not generation:
        return KeptIds({BEGIN: begin, END: end}, {})
    moved = _moved_ids(checkpoint)
    in_config = _Table(special, "config.json")
    in_generation = _Table(generation, "generation_config.json")
    for table in (in_config, in_generation):
        table.move(moved)
    in_config.begin_with(begin, end)
    # A key that a file leaves out is not added to it.
    if BEGIN in generation:
        in_generation.begin_with(begin, end)
    # Either file may name the end of a chat beside that of a text.
    known_ends = in_config.ids(END) | in_generation.ids(END)
    if end not in known_ends:
        in_config.end_with(end)
        if END in generation:
            in_generation.end_with(end)
    changes = (*in_config.changes(), *in_generation.changes())
    return KeptIds(in_config.entries, in_generation.entries, changes)


class _Table:
    """The entries of a file, as a run changes them. file: its name."""

    def __init__(self, entries: Mapping[str, Any], file: str) -> None:
        self._before = entries
        self._file = file
        self._reasons = dict[str, str]()  # by key
        self.entries = dict(entries)

    def ids(self, key: str) -> set[int]:
        """Return the ids under a key."""
        return _ids(self.entries.get(key))

    def move(self, moved: Mapping[int, int | None]) -> None:
        """Let ids follow their tokens. moved: id -> its new id, None for a token that is gone."""
        for key, value in self.entries.items():
            has_moved = _ids(value) & moved.keys()
            # a number under another key, as a size, is no id
            if not has_moved or not key.endswith(_OF_TOKENS):
                continue
            new_value = _moved(value, moved)
            self._change(key, new_value, "the run's tokenizer has other tokens")

    def begin_with(self, begin: int | None, end: int | None) -> None:
        """Let documents begin as in training."""
        stated = self.entries.get(BEGIN)
        # Where no begin token is stated, the end of one document comes before the next.
        if stated is None and begin == end:
            return
        all_stated = stated if isinstance(stated, list) else [stated]
        if begin not in all_stated:
            self._change(BEGIN, begin, "documents of the run begin with it")

    def end_with(self, end: int | None) -> None:
        """Let documents end as in training, and as before."""
        # Without an end in training, the ends of before are still known.
        if end is None:
            return
        value = self.entries.get(END)
        others = value if isinstance(value, list) else [value]
        known = [token_id for token_id in others if token_id is not None]
        ends = [end, *known] if known else end
        self._change(END, ends, "documents of the run end with it")

    def changes(self) -> Iterator[str]:
        """Yield a line for each entry that was changed."""
        for key, reason in self._reasons.items():
            before = self._before.get(key)
            now = self.entries[key]
            if now != before:
                change = f"{_in_words(before)} -> {_in_words(now)}"
                yield f"{key} of {self._file}: {change}: {reason}"

    def _change(self, key: str, value: Any, reason: str) -> None:
        """Put a value under a key, for a reason in words, of which the last one is told."""
        self.entries[key] = value
        self._reasons[key] = reason


def _moved_ids(checkpoint: Store) -> dict[int, int | None]:
    """Return the ids whose tokens have another id in the checkpoint's tokenizer, or none: old id ->
    new id."""
    tokens = _read_tokens(checkpoint)
    file = read_tokenizer(checkpoint)
    # One that cannot be loaded is reported where it is used.
    tokenizer = loaded_once(file) if tokens and file else None
    if tokenizer is None:
        return {}
    new_ids = tokenizer.vocabulary()
    moved = dict[int, int | None]()
    for token_id, text in tokens.items():
        new_id = new_ids.get(text)
        if new_id != int(token_id):
            moved[int(token_id)] = new_id
    return moved


def _read_tokens(checkpoint: Store) -> dict[str, str]:
    """Return id -> text of the tokens that were named in the folder of the first weights. Raises
    UserError if they are damaged."""
    tokens = read_table(checkpoint, TOKENS)
    for token_id, text in tokens.items():
        if not token_id.isdecimal() or not isinstance(text, str):
            raise UserError.of(
                "convert.record_damaged", path=checkpoint.path, key=TOKENS, index=INDEX
            )
    return tokens


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id -> text of the tokens."""
    vocabulary = tokenizer.vocabulary()
    return {token_id: token for token, token_id in vocabulary.items()}


def _all_ids(table: Mapping[str, Any]) -> set[int]:
    """Return all ids of tokens that a table has."""
    token_ids = set[int]()
    for key, value in table.items():
        if key.endswith(_OF_TOKENS):
            token_ids |= _ids(value)
    return token_ids


def _ids(value: Any) -> set[int]:
    """Return the ids of a value that is one, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return {token_id for token_id in values if type(token_id) is int}


def _moved(value: Any, moved: Mapping[int, int | None]) -> Any:
    """Return an id or a list of ids after a change of the tokenizer; None if no token is left."""
    if not isinstance(value, list):
        return moved.get(value, value)
    new_ids = [moved.get(token_id, token_id) for token_id in value]
    remaining_ids = [token_id for token_id in new_ids if token_id is not None]
    return remaining_ids or None


def _in_words(value: Any) -> str:
    return "none" if value is None else f"{value}"
