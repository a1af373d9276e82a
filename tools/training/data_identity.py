"""The identity of the data that a run is trained on, as its checkpoints store it, and its
differences from another run's.

A resumed run continues at a sample number. With other tokens, another order or another held-out
part, that number means another sample: text would be trained on twice or never, or the model would
be evaluated on text that it has seen. Such a run is refused unless --allow accepts the difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megaprec.checkpoint.reader import Store, newer_version
from megaprec.errors import UserError
from tools.config.data_settings import Data
from tools.config.settings import Train
from tools.console.toml import toml

ALLOW = ("data", "tokenizer", "seed", "shuffle", "seq_length")
"""Differences that a resumed run may have only with --allow."""


class _Kept(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class DataSet(_Kept):
    """One text or data set. source: its name in the run file. text: the text that was tokenized,
    None if unknown.

    The other fields are those of `megaprec.data.intact.Contents`.
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
    """All settings that decide which samples come in which order. tokenizer: SHA-256 of its file,
    empty if there is none. begin: id of the token before each document that data.begin asks for,
    None if it asks for none.
    """

    sets: list[DataSet]
    tokenizer: str
    held_out: float
    shuffle: bool
    seed: int
    begin: int | None = None


@dataclass(frozen=True)
class Difference:
    """One difference. what: one of ALLOW. line: the old and the new value."""

    what: str
    line: str


def read_identity(store: Store) -> Identity | None:
    """Return the data that a checkpoint was trained on; None if an earlier version saved it. Raises
    UserError."""
    if "data" not in store.index:
        return None
    try:
        return Identity.model_validate(store.index["data"])
    except ValidationError as error:
        found = error.errors(include_url=False)
        unknown = [
            ".".join(map(str, ("data", *e["loc"]))) for e in found if e["type"] == "extra_forbidden"
        ]
        if len(unknown) == len(found):
            raise newer_version(store.path, f"says {', '.join(unknown)}") from error
        raise UserError(
            f'{store.path} is damaged: "data" in its checkpoint.json is not as it was written'
        ) from error


def other_settings(kept: Identity, data: Data, train: Train) -> Iterator[Difference]:
    """Yield the differences between the keys of the run and the stored identity."""
    if kept.held_out != data.held_out:
        line = (
            f"data.held_out: {toml(kept.held_out)} -> {toml(data.held_out)}: other text is kept "
            "for evaluation"
        )
        yield Difference("data", line)
    if kept.shuffle != data.shuffle:
        line = (
            f"data.shuffle: {toml(kept.shuffle)} -> {toml(data.shuffle)}: samples come in another "
            "order"
        )
        yield Difference("shuffle", line)
    if kept.seed != train.seed:
        line = (
            f"train.seed: {kept.seed} -> {train.seed}: samples come in another order, and dropout "
            "is another"
        )
        yield Difference("seed", line)
    weights = [one.weight for one in data.blend] or [1.0]
    if len(kept.sets) != len(weights):
        yield Difference("data", f"data.blend: {_count(len(kept.sets))} -> {_count(len(weights))}")
        return
    for n, (one, weight) in enumerate(zip(kept.sets, weights, strict=True)):
        if one.weight != weight:
            yield Difference(
                "data", f"data.blend[{n}].weight: {toml(one.weight)} -> {toml(weight)}"
            )


def other_sets(kept: Identity, now: Identity, between: str = " -> ") -> Iterator[Difference]:
    """Yield the differences between the data sets of the run and the stored ones. between: the old
    and the new."""
    if kept.begin != now.begin:
        was = "none" if kept.begin is None else kept.begin
        one = "none" if now.begin is None else now.begin
        yield Difference(
            "data",
            f"data.begin: {toml(was)}{between}{toml(one)}: the tokens before documents are others",
        )
    if len(kept.sets) != len(now.sets):
        return
    for n, (was, one) in enumerate(zip(kept.sets, now.sets, strict=True)):
        if not _same(was, one):
            key = "data.source" if len(now.sets) == 1 else f"data.blend[{n}].source"
            yield Difference("data", f"{key}: {_described(was)}{between}{_described(one)}")


def _same(was: DataSet, one: DataSet) -> bool:
    """Return True unless the digests differ; digests of different sets of blocks cannot be compared
    and count as equal.
    """
    sizes = (was.tokens, was.documents, was.idx_sha256) == (
        one.tokens,
        one.documents,
        one.idx_sha256,
    )
    return sizes and (was.bin_sha256 == one.bin_sha256 or was.sampled != one.sampled)


def _described(one: DataSet) -> str:
    of = " of some blocks" if one.sampled else ""
    return f"{toml(one.source)} ({one.tokens:,} tokens, SHA-256{of} {one.bin_sha256[:12]}...)"


def _count(sets: int) -> str:
    return f"{sets} data set{'' if sets == 1 else 's'}"
