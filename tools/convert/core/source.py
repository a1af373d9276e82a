"""A model in any format, read by logical names; what every format's reader makes.

Keys are those of our checkpoints: weight/NAME, exp_avg/NAME and exp_avg_sq/NAME. A tensor of another system may hold
several logical ones: they are its `Origin`. It is read once, its parts are kept until each is asked for.
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
from tools.convert.core.tensors import PIECE


@dataclass(frozen=True)
class Origin:
    """A tensor of a file format: its own name, the keys of the logical tensors in it, and how it is read."""

    name: str
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    load: Callable[[], Sequence[Tensor]]
    rows: Callable[[int, int], Tensor] | None = None  # reads some rows only, where the tensor is stored as ours is


@dataclass(frozen=True)
class Facts:
    """What a model's folder tells besides tensors. Empty where it does not tell.

    steps: optimizer steps that were applied. rule: numbers of the optimizer's rule.
    progress, watch, precision, layout: as our checkpoints keep them. unread: what is there and cannot be read.
    special: bos_token_id and the like, as config.json has them; generation: what generation_config.json says.
    notes: what a user should know of how the folder was understood, a sentence each.
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
    notes: tuple[str, ...] = ()


class Source:
    """An opened model. kind: as `formats.FORMATS` has it. tokenizer: the files that make it up, if any."""

    def __init__(
        self,
        path: Path,
        kind: str,
        model: ModelConfig,
        origins: Sequence[Origin],
        facts: Facts,
        tokenizer: Sequence[Path],
    ) -> None:
        self.path, self.kind, self.model, self.facts, self.tokenizer = path, kind, model, facts, tuple(tokenizer)
        self._origin = {key: origin for origin in origins for key in origin.keys}
        self.shapes = {k: s for o in origins for k, s in zip(o.keys, o.shapes, strict=True)}
        self.loads: Counter[str] = Counter()  # how often each foreign tensor was read
        self._held: tuple[str, dict[str, Tensor]] = "", {}

    def keys(self, kind: str) -> Iterator[str]:
        """All keys of a kind, in the order of the files' tensors."""
        return (key for key in self.shapes if key.startswith(f"{kind}/"))

    @property
    def kinds(self) -> tuple[str, ...]:
        """weight, and exp_avg and exp_avg_sq if the optimizer's state is there."""
        return tuple(dict.fromkeys(key.split("/", 1)[0] for key in self.shapes))

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that a logical tensor is stored in."""
        return self._origin[key].dtype

    def rows(self, key: str, top: int, bottom: int) -> Tensor:
        """Rows [top, bottom) of a logical tensor."""
        some = self._origin[key].rows
        return some(top, bottom) if some else self.read(key)[top:bottom]

    def pieces(self, key: str) -> Iterator[Tensor]:
        """A logical tensor's rows, some at a time in their order; all at once if they cannot be read apart."""
        origin, shape = self._origin[key], self.shapes[key]
        if origin.rows is None or not shape:
            yield self.read(key)
            return
        self.loads[origin.name] += 1
        step = max(1, PIECE // max(1, prod(shape[1:]) * origin.dtype.itemsize))
        for top in range(0, shape[0], step):
            yield origin.rows(top, min(top + step, shape[0]))

    def read(self, key: str) -> Tensor:
        """A logical tensor. The other parts of its foreign tensor stay in memory, for they are asked for next."""
        origin = self._origin[key]
        if self._held[0] != origin.name or key not in self._held[1]:
            self._held = "", {}  # lets go of the old one first
            self._held = origin.name, dict(zip(origin.keys, origin.load(), strict=True))
            self.loads[origin.name] += 1
        return self._held[1].pop(key)
