"""The identity of the data that a run is trained on, as its checkpoints store it, and its
differences from another run's.

A resumed run continues at a sample number. With other tokens, another order or another held-out
part, that number means another sample: text would be trained on twice or never, or the model would
be evaluated on text that it has seen. Such a run is refused unless --allow accepts the difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megaprec.checkpoint.reader import Store, newer_version
from megaprec.errors import UserError
from megaprec.tokens.blend_phases import BlendPhases, Points
from megaprec.tokens.held_out import HeldOutRule
from megaprec.tokens.samples import Pack, Windows
from megaprec.url_secrets import masked
from models.equivalence import CONTEXT_KEYS
from tools.config.rules.derived import blend_phases
from tools.config.tables.data_settings import Data
from tools.config.tables.settings import Train
from tools.console.toml import toml
from tools.console.units import counted

ALLOW = (
    "data",
    "tokenizer",
    "seed",
    "shuffle",
    "windows",
    "pack",
    "seq_length",
    "ema",
    *(f"model.{key}" for key in CONTEXT_KEYS),
)
"""Differences that a run may have only with --allow: a resumed one from its checkpoint, and of the
keys of [model] also one that begins with weights from these."""


# a checkpoint without it is one that earlier versions read too
SAVED_IF_SET = Field(exclude_if=lambda value: not value)


class _Saved(BaseModel):
    """A part of a checkpoint's index: nothing is converted, and no key is unknown."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class WeightFrom(_Saved):
    """A weight that a data set has after so many samples of the run."""

    samples: int
    weight: float


class DataSet(_Saved):
    """One text or data set.

    source: its name in the run file, without secrets of URLs. weight: its first one, which
    later_weights follow if it changes. text: the text that was tokenized,
    None if unknown. The other fields are those of `megaprec.tokens.intact.Contents`.
    """

    source: Annotated[str, AfterValidator(masked)]
    weight: float
    text: dict[str, Any] | None
    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str
    sampled: bool
    loss_mask_sha256: str = ""
    later_weights: Annotated[list[WeightFrom], SAVED_IF_SET] = []

    @property
    def points(self) -> Points:
        """Return the weights, as `BlendPhases` takes them."""
        later = [(changed.samples, changed.weight) for changed in self.later_weights]
        return ((0, self.weight), *later)


class BlendStretch(_Saved):
    """A `megaprec.tokens.blend.Stretch`."""

    begin: int
    weights: list[float]
    taken: list[int]


class Identity(_Saved):
    """All settings that decide which samples come in which order.

    tokenizer: SHA-256 of its file, empty if there is none. begin: id of the token before each
    document that data.begin asks for, None if it asks for none. held_out_from: the rule of the
    held-out part, which was always "end" in checkpoints that do not say it.
    stretches: the weights by position, of a run whose weights change or have changed; else none.
    windows: "tiled" in checkpoints that do not say it. linear: as in `BlendPhases`.
    pack: "none" in checkpoints that do not say it.
    """

    sets: list[DataSet]
    tokenizer: str
    held_out: float
    shuffle: bool
    seed: int
    begin: int | None = None
    held_out_from: HeldOutRule = "end"
    stretches: list[BlendStretch] = []
    windows: Windows = "tiled"
    linear: Annotated[bool, SAVED_IF_SET] = False
    pack: Annotated[Pack, Field(exclude_if=lambda pack: pack == "none")] = "none"

    @property
    def phases(self) -> BlendPhases:
        """Return the weights that the run file of the checkpoint had."""
        return BlendPhases(tuple(data_set.points for data_set in self.sets), self.linear)


@dataclass(frozen=True)
class DataDifference:
    """One difference. option: what --allow accepts it by, one of ALLOW. line: the old and the new
    value."""

    option: str
    line: str


def read_identity(checkpoint: Store) -> Identity | None:
    """Return the data that a checkpoint was trained on; None if an earlier version saved it.

    Raises UserError.
    """
    if "data" not in checkpoint.index:
        return None
    try:
        return Identity.model_validate(checkpoint.index["data"])
    except ValidationError as error:
        unknown_keys = list[str]()
        for problem in error.errors(include_url=False):
            if problem["type"] != "extra_forbidden":
                raise UserError.of("training.data_record_damaged", path=checkpoint.path) from error
            location = ("data", *problem["loc"])
            unknown_keys.append(".".join(map(str, location)))
        # Keys that are only unknown are those of a later version, no damage.
        raise newer_version(checkpoint.path, f"says {', '.join(unknown_keys)}") from error


def other_settings(saved: Identity, data: Data, train: Train) -> Iterator[DataDifference]:
    """Yield the differences between the keys of the run and the stored identity."""
    if saved.held_out != data.held_out:
        change = f"{toml(saved.held_out)} -> {toml(data.held_out)}"
        yield DataDifference("data", f"data.held_out: {change}: other text is kept for evaluation")
    rule = data.held_out_from
    if rule not in ("auto", saved.held_out_from) and data.held_out:
        change = f"{toml(saved.held_out_from)} -> {toml(rule)}"
        effect = "text that was trained on may be evaluated"
        yield DataDifference("data", f"data.held_out_from: {change}: {effect}")
    if saved.shuffle != data.shuffle:
        change = f"{toml(saved.shuffle)} -> {toml(data.shuffle)}"
        yield DataDifference("shuffle", f"data.shuffle: {change}: samples come in another order")
    if saved.windows != data.windows:
        change = f"{toml(saved.windows)} -> {toml(data.windows)}"
        effect = "samples are cut from the text in another way"
        yield DataDifference("windows", f"data.windows: {change}: {effect}")
    if saved.pack != data.pack:
        change = f"{toml(saved.pack)} -> {toml(data.pack)}"
        effect = "samples are made of other documents"
        yield DataDifference("pack", f"data.pack: {change}: {effect}")
    if saved.seed != train.seed:
        change = f"{saved.seed} -> {train.seed}"
        effect = "samples come in another order, and dropout is another"
        yield DataDifference("seed", f"train.seed: {change}: {effect}")
    yield from other_weights(saved.phases, blend_phases(data))


def other_weights(
    saved: BlendPhases, now: BlendPhases, between: str = " -> "
) -> Iterator[DataDifference]:
    """Yield the differences between the weights of two blends.

    between: the words between the old and the new value.
    """
    # Other numbers of sets cannot be compared one by one.
    if len(saved.points) != len(now.points):
        counts = [counted(len(phases.points), "data set") for phases in (saved, now)]
        yield DataDifference("data", f"data.blend: {between.join(counts)}")
        return
    for number, (before, points) in enumerate(zip(saved.points, now.points, strict=True)):
        if before != points:
            change = f"{describe_points(before)}{between}{describe_points(points)}"
            yield DataDifference("data", f"data.blend[{number}].weight: {change}")
    # without a change of weights it says nothing
    if saved.linear != now.linear and (saved.changes or now.changes):
        words = [toml("linear" if phases.linear else "steps") for phases in (saved, now)]
        yield DataDifference("data", f"data.blend_phases: {between.join(words)}")


def describe_points(points: Points) -> str:
    """Return a weight as a run file has it."""
    _, weight = points[0]
    return toml(weight) if len(points) == 1 else toml(points)


def other_sets(saved: Identity, now: Identity, between: str = " -> ") -> Iterator[DataDifference]:
    """Yield the differences between the data sets of the run and the stored ones.

    between: the words between the old and the new value.
    """
    if saved.begin != now.begin:
        saved_begin = _describe_begin(saved.begin)
        change = f"{saved_begin}{between}{_describe_begin(now.begin)}"
        yield DataDifference(
            "data", f"data.begin: {change}: the tokens before documents are others"
        )
    if len(saved.sets) != len(now.sets):  # `other_settings` names it
        return
    pairs = zip(saved.sets, now.sets, strict=True)
    for number, (saved_set, current_set) in enumerate(pairs):
        if not _is_same(saved_set, current_set):
            # The key as the run file has it: a single set has no number.
            key = "data.source" if len(now.sets) == 1 else f"data.blend[{number}].source"
            before = _describe_set(saved_set)
            yield DataDifference("data", f"{key}: {before}{between}{_describe_set(current_set)}")


def _describe_begin(begin: int | None) -> str:
    return toml("none" if begin is None else begin)


def _is_same(saved_set: DataSet, current_set: DataSet) -> bool:
    """Return True unless sizes or digests differ."""
    for field in ("tokens", "documents", "idx_sha256", "loss_mask_sha256"):
        if getattr(saved_set, field) != getattr(current_set, field):
            return False
    # Digests of some blocks and of all blocks cannot be compared, and count as equal.
    comparable = saved_set.sampled == current_set.sampled
    return saved_set.bin_sha256 == current_set.bin_sha256 or not comparable


def _describe_set(data_set: DataSet) -> str:
    extent = " of some blocks" if data_set.sampled else ""
    digest = f"SHA-256{extent} {data_set.bin_sha256[:12]}..."
    mask = ""
    if data_set.loss_mask_sha256:
        mask = f", loss mask {data_set.loss_mask_sha256[:12]}..."
    return f"{toml(data_set.source)} ({data_set.tokens:,} tokens, {digest}{mask})"
