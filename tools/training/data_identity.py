"""Which data a run is trained on, as its checkpoints keep it, and how another run's differs from it.

Samples are counted, so a run that goes on takes up its data where it was. With other tokens, in another order or with
another share held out, that place means something else: text would be trained on twice or never, or be judged by what
it was trained on. Such a run is refused unless it is meant.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megaprec.checkpoint.reader import Store, newer_version
from megaprec.errors import UserError
from tools.config.settings import Data, Train
from tools.console.toml import toml

ALLOW = ("data", "tokenizer", "seed", "shuffle")  # what a run that goes on may have other ones of only if it is said


class _Kept(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class DataSet(_Kept):
    """One text or data set. source: its name in the run file. text: what it was tokenized from, None if unknown.

    The rest as in `megaprec.data.intact.Contents`.
    """

    source: str
    weight: float
    text: dict[str, Any] | None
    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str
    sampled: bool


class Identity(_Kept):
    """All that decides which samples come in which order. tokenizer: SHA-256 of its file, empty if there is none."""

    sets: list[DataSet]
    tokenizer: str
    held_out: float
    shuffle: bool
    seed: int


@dataclass(frozen=True)
class Difference:
    """what: one of ALLOW. line: what it was and what it is."""

    what: str
    line: str


def read_identity(store: Store) -> Identity | None:
    """The data that a checkpoint was trained on; None if an earlier version saved it. Raises UserError."""
    if "data" not in store.index:
        return None
    try:
        return Identity.model_validate(store.index["data"])
    except ValidationError as error:
        found = error.errors(include_url=False)
        unknown = [".".join(map(str, ("data", *e["loc"]))) for e in found if e["type"] == "extra_forbidden"]
        if len(unknown) == len(found):
            raise newer_version(store.path, f"says {', '.join(unknown)}") from error
        raise UserError(f'{store.path} is damaged: "data" in its checkpoint.json is not as it was written') from error


def other_settings(kept: Identity, data: Data, train: Train) -> Iterator[Difference]:
    """What differs, as far as keys tell."""
    if kept.held_out != data.held_out:
        line = f"data.held_out: {toml(kept.held_out)} -> {toml(data.held_out)}: other text is kept for evaluation"
        yield Difference("data", line)
    if kept.shuffle != data.shuffle:
        line = f"data.shuffle: {toml(kept.shuffle)} -> {toml(data.shuffle)}: samples come in another order"
        yield Difference("shuffle", line)
    if kept.seed != train.seed:
        line = f"train.seed: {kept.seed} -> {train.seed}: samples come in another order, and dropout is another"
        yield Difference("seed", line)
    weights = [one.weight for one in data.blend] or [1.0]
    if len(kept.sets) != len(weights):
        yield Difference("data", f"data.blend: {_count(len(kept.sets))} -> {_count(len(weights))}")
        return
    for n, (one, weight) in enumerate(zip(kept.sets, weights, strict=True)):
        if one.weight != weight:
            yield Difference("data", f"data.blend[{n}].weight: {toml(one.weight)} -> {toml(weight)}")


def other_sets(kept: Identity, now: Identity) -> Iterator[Difference]:
    """What differs in the data sets themselves."""
    if len(kept.sets) != len(now.sets):
        return
    for n, (was, one) in enumerate(zip(kept.sets, now.sets, strict=True)):
        if not _same(was, one):
            key = "data.source" if len(now.sets) == 1 else f"data.blend[{n}].source"
            yield Difference("data", f"{key}: {_described(was)} -> {_described(one)}")


def _same(was: DataSet, one: DataSet) -> bool:
    """A digest of some blocks says nothing of one of all."""
    sizes = (was.tokens, was.documents, was.idx_sha256) == (one.tokens, one.documents, one.idx_sha256)
    return sizes and (was.bin_sha256 == one.bin_sha256 or was.sampled != one.sampled)


def _described(one: DataSet) -> str:
    of = " of some blocks" if one.sampled else ""
    return f"{toml(one.source)} ({one.tokens:,} tokens, SHA-256{of} {one.bin_sha256[:12]}...)"


def _count(sets: int) -> str:
    return f"{sets} data set{'' if sets == 1 else 's'}"
