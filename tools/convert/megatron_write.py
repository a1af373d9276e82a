"""Writing Megatron-LM's legacy checkpoint: the files of all ranks, filled in tensor by tensor.

torch.save writes a file's pickle with room for the values (`torch.serialization.skip_data`), which are put there
afterwards. The pickle holds tensors, plain containers and one argparse.Namespace, so torch's weights_only loader takes
it. As torch says of files so made, their checksums of the zip format are not right; torch.load does not look at them.
"""

import argparse
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial as bind
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megaprec.errors import UserError
from tools.convert.megatron import find_megatron, open_megatron
from tools.convert.megatron_layout import FILE, TRACKER, args_of, part, part_shape, rank_folder
from tools.convert.megatron_state import MOMENTS, decayed
from tools.convert.names import megatron
from tools.convert.rules import Match, heads, matches
from tools.convert.source import Source
from tools.convert.target import Place, Target, Write
from tools.convert.tensors import fill

DIVISIBLE = 128  # rows of the vocabulary are padded to this times the tensor-parallel ranks, as Megatron does
HALF = (torch.bfloat16, torch.float16)
# Megatron looks for these, and takes its own with --override-opt-param-scheduler.
SCHEDULE = dict.fromkeys(
    ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
    + ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")
)


@dataclass(frozen=True)
class MegatronLayout:
    """Over how many ranks the checkpoint is laid out, and whether norms bear Transformer Engine's fused names."""

    tp: int = 1
    pp: int = 1
    fused_norms: bool = True


@dataclass(frozen=True)
class _Local:
    """A tensor of `match` as a stage has it: its name there and its part's shape."""

    name: str
    match: Match
    shape: tuple[int, ...]


def megatron_target(source: Source, dtype: torch.dtype | None, layout: MegatronLayout) -> Target:
    """A folder with one iteration. UserError for a model or a layout that Megatron does not have."""
    model = source.model
    if layout.tp < 1 or layout.pp < 1 or model.layers % layout.pp:
        raise UserError(
            f"--tp {layout.tp} --pp {layout.pp}: give 1 or more, and stages that divide {model.layers} layers"
        )
    weights = dtype or source.dtype("weight/embedding.weight")
    writer = _Writer(source, layout, weights)
    describe = {"to": "megatron", "dtype": str(dtype), "layout": [layout.tp, layout.pp, layout.fused_norms]}
    size = sum(prod(source.shapes[key]) * kept.itemsize for key, kept in writer.dtypes.items())
    return Target(describe, size, writer.dtypes, writer.reserve, writer.finish, _reopen)


def _reopen(path: Path) -> Source:
    found = find_megatron(path)
    assert found
    return open_megatron(found)


class _Writer:
    def __init__(self, source: Source, layout: MegatronLayout, weights: torch.dtype) -> None:
        self.source, self.layout, self.weights = source, layout, weights
        model = source.model
        unit = DIVISIBLE * layout.tp
        self.padded = -(-model.vocab // unit) * unit
        self.args = args_of(model, self.padded, layout.tp, layout.pp, layout.fused_norms, weights)
        self.matches = matches(megatron(layout.fused_norms, False, model), model)
        self.has_state = set(MOMENTS) <= set(source.kinds)
        self.masters = self.has_state and weights in HALF
        self.folder = f"iter_{source.facts.progress.get('step', source.facts.steps):07d}"
        kept = {"weight": torch.float32 if self.masters else weights, **dict.fromkeys(MOMENTS, torch.float32)}
        names = [name for match in self.matches for name in match.logical]
        self.stages = [list(self._stage(stage)) for stage in range(layout.pp)]
        self.dtypes = {
            f"{kind}/{n}": d for kind, d in kept.items() if kind == "weight" or self.has_state for n in names
        }

    def _stage(self, stage: int) -> Iterator[_Local]:
        """The tensors of a pipeline stage, in the order of its parameters."""
        pp, layers = self.layout.pp, self.source.model.layers // self.layout.pp
        for match in self.matches:
            if name := _local_name(match.foreign, stage, layers, pp):
                yield self._local(name, match)
        if self.source.model.tied and pp > 1 and stage == pp - 1:
            embedding = next(m for m in self.matches if m.foreign.startswith("embedding.word"))
            yield self._local("output_layer.weight", embedding)

    def _local(self, name: str, match: Match) -> _Local:
        return _Local(name, match, part_shape(match.shape, match.cut, self.layout.tp, self.padded))

    def reserve(self, folder: Path, write: bool) -> list[Write]:
        """Makes all ranks' files; one write for each whole tensor and kind, with a place in each file that has it."""
        places: dict[tuple[str, Match], list[Place]] = {}
        for stage, local in enumerate(self.stages):
            for rank in range(self.layout.tp):
                file = f"{self.folder}/{rank_folder(rank, stage, self.layout.pp)}/{FILE}"
                starts = self._make(folder / file, local, stage, rank, write)
                for (kind, tensor, dtype), start in starts:
                    take = bind(_part, tensor.match, rank, self.layout.tp, self.padded, dtype)
                    places.setdefault((kind, tensor.match), []).append(Place(file, start, take))
        sizes = heads(self.source.model)
        return [
            Write(
                f"{kind}/{match.foreign}",
                tuple(f"{kind}/{name}" for name in match.logical),
                bind(_join, match, sizes),
                tuple(into),
            )
            for (kind, match), into in places.items()
        ]

    def _make(
        self, file: Path, local: Sequence[_Local], stage: int, rank: int, write: bool
    ) -> Iterator[tuple[tuple[str, _Local, torch.dtype], int]]:
        """((kind, tensor, dtype), byte where it begins) of all tensors in one rank's file."""
        slots: list[tuple[str, _Local, torch.dtype] | None] = []

        def room(kind: str, tensor: _Local, dtype: torch.dtype) -> Tensor:
            slots.append((kind, tensor, dtype))
            return torch.empty(tensor.shape, dtype=dtype)

        with FakeTensorMode():
            content = self._content(local, stage, rank, room)
            scale = self._add_scaler(content, slots)
        if write:
            file.parent.mkdir(parents=True, exist_ok=True)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(content, file)
        starts = _storage_starts(file)
        for slot, start in zip(slots, starts, strict=True):
            if slot is not None:
                yield slot, start
            elif write and scale is not None:
                fill(file, start, torch.tensor([scale]))

    def _content(self, local: Sequence[_Local], stage: int, rank: int, room: Any) -> dict[str, Any]:
        progress = self.source.facts.progress
        samples = progress.get("samples", 0)
        args = {**self.args, "consumed_train_samples": samples, "rank": rank}
        args["seq_length"] = progress.get("tokens", 0) // samples if samples else args["seq_length"]
        content: dict[str, Any] = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": progress.get("step", self.source.facts.steps),
            "model": {tensor.name: room("weight", tensor, self.weights) for tensor in local},
        }
        if self.has_state:
            content["optimizer"] = self._optimizer(local, room)
            content["opt_param_scheduler"] = {**SCHEDULE, "num_steps": progress.get("applied_samples", 0)}
        return content

    def _optimizer(self, local: Sequence[_Local], room: Any) -> dict[str, Any]:
        steps = self.source.facts.steps
        groups = [[t for t in local if decayed(t.name, t.shape) == decays] for decays in (True, False)]
        state: dict[int, Any] = {}
        for number, tensor in enumerate(tensor for group in groups for tensor in group):
            state[number] = {"step": float(steps), **{kind: room(kind, tensor, torch.float32) for kind in MOMENTS}}
        first = len(groups[0])
        inner = {
            "state": state,
            "param_groups": [
                _group(steps, 1.0, range(first)),
                _group(steps, 0.0, range(first, first + len(groups[1]))),
            ],
        }
        if not self.masters:
            return inner
        return {
            "optimizer": inner,
            "fp32_from_fp16_params": [[room("weight", t, torch.float32) for t in group] for group in groups],
        }

    def _add_scaler(self, content: dict[str, Any], slots: list[Any]) -> float | None:
        """Puts the loss scaler's state there, where Megatron has one; returns its scale, which is a tensor there."""
        scaler = self.source.facts.scaler
        if not self.masters or not scaler:
            return None
        trackers = {name: int(scaler[name]) for name in ("growth_tracker", "hysteresis_tracker")}
        content["optimizer"]["grad_scaler"] = {"scale": torch.empty(1), **trackers}
        slots.append(None)
        return scaler["scale"]

    def finish(self, folder: Path) -> None:
        """The file that names the iteration."""
        (folder / TRACKER).write_text(str(int(self.folder.removeprefix("iter_"))))


def _group(steps: int, wd_mult: float, params: Sequence[int]) -> dict[str, Any]:
    """A group of parameters as Megatron's optimizer tells it from others; rates and decay are for it to set."""
    told = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**told, "step": steps, "params": list(params)}


def _local_name(name: str, stage: int, layers: int, pp: int) -> str | None:
    """The name of a tensor in a stage, where layers count from 0; None if the stage does not have it."""
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        own = int(number) - stage * layers
        return f"decoder.layers.{own}.{rest}" if 0 <= own < layers else None
    return name if stage == (0 if name.startswith("embedding.") else pp - 1) else None


def _storage_starts(file: Path) -> list[int]:
    """Where the storages of a torch file begin, in the order in which they were saved."""
    starts = {}
    with zipfile.ZipFile(file) as archive, open(file, "rb") as opened:
        for entry in archive.infolist():
            folder, _, number = entry.filename.rpartition("/")
            if folder.endswith("/data") and number.isdigit():
                opened.seek(entry.header_offset + 26)
                name, extra = (int.from_bytes(opened.read(2), "little") for _ in range(2))
                starts[int(number)] = entry.header_offset + 30 + name + extra
    return [starts[number] for number in sorted(starts)]


def _part(match: Match, rank: int, tp: int, padded: int, dtype: torch.dtype, whole: Tensor) -> Tensor:
    return part(whole, match.cut, rank, tp, padded).to(dtype)


def _join(match: Match, sizes: Any, parts: Sequence[Tensor]) -> Tensor:
    return match.how.join(parts, sizes)
