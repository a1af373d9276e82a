"""A model in any format, read by logical names: the result of every format's reader.

Keys are those of megaprec checkpoints: weight/NAME, exp_avg/NAME, exp_avg_sq/NAME and ema/NAME, the
moving average of a weight. A tensor of another system may contain several logical ones and is their
`Origin`. It is read once, and its parts are kept until each has been read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.feed_forward.router import is_correction
from tools.convert.core.tensors import PIECE


@dataclass(frozen=True)
class Origin:
    """A tensor of a file format, and the logical tensors that it consists of.

    name: of the tensor in the file.
    keys, shapes: of the logical tensors.
    load: reads it, and returns the logical tensors.
    rows: reads rows [top, bottom) only, where the tensor is stored as ours is; otherwise None.
    """

    name: str
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    load: Callable[[], Sequence[Tensor]]
    rows: Callable[[int, int], Tensor] | None = None


@dataclass(frozen=True)
class MergedInput:
    """A model among those whose mean another one is.

    kind: of its source.
    weight: its factor in the mean.
    """

    path: Path
    kind: str
    weight: float


@dataclass(frozen=True)
class TrainedText:
    """A text or data set that a run was trained on.

    source: its name in the run file, without secrets of URLs. weight: its first one. later_weights:
        pairs of a number of samples and the weight from there on.
    """

    source: str
    weight: float
    later_weights: tuple[tuple[int, float], ...]
    tokens: int
    documents: int


@dataclass(frozen=True)
class EvaluatedLoss:
    """A mean loss in nats a token, and the number of tokens that it is of."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class RunRecord:
    """The record of its run in a checkpoint of ours, for a reader.

    keys: of the run file but for [model], by dotted name, in TOML's grammar, without secrets of
    URLs. evaluated: after the step of the checkpoint, by field of metrics.jsonl. held_out_tokens,
    held_out_bytes: of the evaluated text, as far as the run's folder says them. torch: its version.
    """

    keys: dict[str, str]
    data: tuple[TrainedText, ...]
    evaluated: dict[str, EvaluatedLoss]
    held_out_tokens: int = 0
    held_out_bytes: int | None = None
    torch: str = ""


@dataclass(frozen=True)
class Facts:
    """The information of a model folder besides tensors; fields are empty if the folder lacks it.

    steps: optimizer steps that were applied.
    scaler: state of the loss scaler.
    rule: numbers of the optimizer's rule.
    progress, watch, precision, layout: as in megaprec checkpoints.
    unread: contents that cannot be read.
    special: bos_token_id and the like, as in config.json.
    generation: contents of generation_config.json.
    documents: the ids "begin" and "end" of the tokens around documents in the training of a run,
        each None if there was none; empty if that is not known.
    averaged: True if the weights are the moving average that a checkpoint keeps.
    merged: the models whose mean this is, in order; empty if it was not merged.
    run: what a checkpoint of ours says of its run.
    notes: remarks for the user, a sentence each.
    """

    steps: int = 0
    scaler: dict[str, float] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)
    watch: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    unread: str = ""
    special: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, int | None] = field(default_factory=dict)
    averaged: bool = False
    merged: tuple[MergedInput, ...] = ()
    run: RunRecord | None = None
    notes: tuple[str, ...] = ()


class Source:
    """An opened model.

    path: the folder of the checkpoint.
    kind: as `formats.FORMATS` has it.
    model: what the tensors are of.
    tokenizer: the files that make it up, if any.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        model: ModelConfig,
        origins: Sequence[Origin],
        facts: Facts,
        tokenizer: Sequence[Path],
    ) -> None:
        self.path = path
        self.kind = kind
        self.model = model
        self.facts = facts
        self.tokenizer = tuple(tokenizer)
        self.loads: Counter[str] = Counter()  # how often each foreign tensor was read
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._origins: dict[str, Origin] = {}  # by the keys of their logical tensors
        for origin in origins:
            self.shapes.update(zip(origin.keys, origin.shapes, strict=True))
            self._origins.update(dict.fromkeys(origin.keys, origin))
        # What was loaded last: the name of the foreign tensor, and its parts that nobody has read.
        # One tensor alone, for a target asks in the order of the source.
        self._loaded_name = ""
        self._loaded: dict[str, Tensor] = {}

    @property
    def without_mtp(self) -> "Source":
        """Return this source without modules of multi-token prediction."""
        if not self.model.mtp_layers:
            return self
        retained: dict[Origin, None] = {}  # in order, each once
        for tensor_key, origin in self._origins.items():
            name = tensor_key.partition("/")[2]
            if not name.startswith("mtp."):
                retained[origin] = None
        return Source(
            self.path,
            self.kind,
            self.model.without_mtp,
            tuple(retained),
            self.facts,
            self.tokenizer,
        )

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that are read: one, or those of all models that are merged."""
        merged_folders = tuple(merged_input.path for merged_input in self.facts.merged)
        return merged_folders or (self.path,)

    def origin(self, tensor_key: str) -> Origin:
        """Return the foreign tensor that has a logical one."""
        return self._origins[tensor_key]

    def keys(self, kind: str) -> Iterator[str]:
        """Return all keys of a kind, in the order of the files' tensors."""
        prefix = f"{kind}/"
        return (tensor_key for tensor_key in self.shapes if tensor_key.startswith(prefix))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return weight, exp_avg and exp_avg_sq if the optimizer's state is there, and ema if there
        is an average."""
        kinds = [tensor_key.split("/", 1)[0] for tensor_key in self.shapes]
        return tuple(dict.fromkeys(kinds))

    def dtype(self, tensor_key: str) -> torch.dtype:
        """Return the dtype that a logical tensor is stored in."""
        return self._origins[tensor_key].dtype

    def dtype_in(self, tensor_key: str, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of a logical tensor in a conversion to `dtype`; None keeps its own, as
        corrections do."""
        # A correction is moved by small steps, which half precision would round away.
        if dtype is None or is_correction(tensor_key):
            return self.dtype(tensor_key)
        return dtype

    def rows(self, tensor_key: str, top: int, bottom: int) -> Tensor:
        """Return rows [top, bottom) of a logical tensor."""
        read_rows = self._origins[tensor_key].rows
        if read_rows is None:
            return self.read(tensor_key)[top:bottom]
        return read_rows(top, bottom)

    def pieces(self, tensor_key: str) -> Iterator[Tensor]:
        """Yield the rows of a logical tensor in order, some at a time; all at once if they cannot
        be read separately.
        """
        origin = self._origins[tensor_key]
        shape = self.shapes[tensor_key]
        if origin.rows is None or not shape:
            yield self.read(tensor_key)
            return
        self.loads[origin.name] += 1
        # Pieces of about PIECE bytes, but of whole rows.
        row_bytes = prod(shape[1:]) * origin.dtype.itemsize
        rows = max(1, PIECE // max(1, row_bytes))
        for top in range(0, shape[0], rows):
            bottom = min(top + rows, shape[0])
            yield origin.rows(top, bottom)

    def read(self, tensor_key: str) -> Tensor:
        """Return a logical tensor. The other parts of its foreign tensor stay in memory, for they
        are read next."""
        origin = self._origins[tensor_key]
        if self._loaded_name != origin.name or tensor_key not in self._loaded:
            # Let go of the old tensor first: two need not be in memory at once.
            self._loaded = {}
            parts = origin.load()
            self._loaded = dict(zip(origin.keys, parts, strict=True))
            self._loaded_name = origin.name
            self.loads[origin.name] += 1
        return self._loaded.pop(tensor_key)
