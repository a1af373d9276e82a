"""Writing Megatron-LM's legacy checkpoint: the files of all ranks, filled in tensor by tensor.

torch.save writes a file's pickle with room for the values (`torch.serialization.skip_data`), which
are put there afterwards. The pickle holds tensors, plain containers and one argparse.Namespace, so
torch's weights_only loader takes it. As torch says of files so made, their checksums of the zip
format are not right; torch.load does not look at them.
"""

import argparse
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial as bind
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megaprec.durable import reading
from megaprec.errors import UserError
from models.router import is_correction
from tools.convert.core.names import megatron
from tools.convert.core.rules import Cut, Match, heads, matches
from tools.convert.core.source import Source
from tools.convert.core.target import Location, Target, Write
from tools.convert.core.tensors import fill
from tools.convert.hf.folder import write_generation
from tools.convert.megatron.experts import expert_of, is_trained, local_name
from tools.convert.megatron.layout import (
    EMBEDDING,
    FILE,
    HEAD,
    TRACKER,
    args_of,
    part,
    part_shape,
    rank_folder,
    unsaid,
)
from tools.convert.megatron.order import as_registered
from tools.convert.megatron.read import find_megatron, open_megatron
from tools.convert.megatron.state import MOMENTS, decayed

# rows of the vocabulary are padded to this times the tensor-parallel ranks, as Megatron does
DIVISIBLE = 128
HALF = (torch.bfloat16, torch.float16)
# Megatron looks for these, and takes its own with --override-opt-param-scheduler.
RATES = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
DECAYS = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")


@dataclass(frozen=True)
class MegatronLayout:
    """Over how many ranks the checkpoint is laid out, and which names it has.

    fused_norms: norms bear Transformer Engine's names. grouped: so do experts, which Megatron then
        computes together.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    fused_norms: bool = True
    grouped: bool = False

    @property
    def down(self) -> Cut:
        """Return how projections down to latents are cut: not at all where Transformer Engine
        computes them."""
        return "whole" if self.fused_norms else "rows"


@dataclass(frozen=True)
class _Local:
    """A tensor of `match` as a stage has it: its name there and its part's shape.

    expert: the number of the expert that it belongs to, if it is one's; the name counts a rank's
        own.
    """

    name: str
    match: Match
    shape: tuple[int, ...]
    expert: int | None


def megatron_target(source: Source, dtype: torch.dtype | None, layout: MegatronLayout) -> Target:
    """A folder with one iteration. UserError for a model or a layout that Megatron does not
    have."""
    model = source.model
    if layout.tp < 1 or layout.pp < 1 or model.layers % layout.pp:
        raise UserError(
            f"--tp {layout.tp} --pp {layout.pp}: give 1 or more, and stages that divide "
            f"{model.layers} layers"
        )
    if layout.ep < 1 or model.experts % layout.ep or (layout.ep > 1 and not model.experts):
        raise UserError(
            f"--ep {layout.ep}: give a number of ranks that divides the {model.experts} experts"
        )
    if layout.grouped and not model.experts:
        raise UserError("--grouped-experts: the model has no experts: leave it out")
    weights = dtype or source.dtype("weight/embedding.weight")
    writer = _Writer(source, layout, weights)
    describe = {"to": "megatron", "dtype": str(dtype), "layout": astuple(layout)}
    size = sum(prod(source.shapes[key]) * kept.itemsize for key, kept in writer.dtypes.items())
    left_out = tuple(writer.left_out) + (("the tokenizer",) if source.tokenizer else ())
    return Target(describe, size, writer.dtypes, writer.reserve, writer.finish, _reopen, left_out)


def _reopen(path: Path) -> Source:
    found = find_megatron(path)
    assert found
    return open_megatron(found)


class _Rooms:
    """Tensors without values for a file to be, in the order in which it will hold them."""

    def __init__(self) -> None:
        self.slots: list[tuple[str, _Local, torch.dtype] | None] = []  # None: the loss scale

    def take(self, kind: str, tensor: _Local, dtype: torch.dtype) -> Tensor:
        """Room for a rank's part of a tensor."""
        self.slots.append((kind, tensor, dtype))
        return torch.empty(tensor.shape, dtype=dtype)

    def take_scale(self) -> Tensor:
        """Room for the loss scale."""
        self.slots.append(None)
        return torch.empty(1)


class _Writer:
    def __init__(self, source: Source, layout: MegatronLayout, weights: torch.dtype) -> None:
        self.source = source
        self.layout = layout
        self.weights = weights
        model = source.model
        unit = DIVISIBLE * layout.tp
        self.padded = -(-model.vocab // unit) * unit
        self.args = args_of(model, self.padded, layout.tp, layout.pp, layout.fused_norms, weights)
        self.left_out = unsaid(model, self.args)
        self.args |= source.facts.special
        # Megatron has biases of experts only where these are not cut; others are cut as all else
        # is.
        self.expert_tp = 1 if model.expert_bias else layout.tp
        self.args |= {"expert_model_parallel_size": layout.ep, "moe_grouped_gemm": layout.grouped}
        self.args |= {"expert_tensor_parallel_size": self.expert_tp} if model.expert_bias else {}
        self.matches = matches(megatron(layout.fused_norms, False, model, down=layout.down), model)
        trained = [
            key.removeprefix("weight/") for key in source.keys("weight") if not is_correction(key)
        ]
        moments = [f"{kind}/{name}" for name in trained for kind in MOMENTS]
        # not of other rules, nor of Muon, which mixes two
        self.has_state = source.shapes.keys() >= {*moments}
        self.masters = self.has_state and weights in HALF
        self.folder = f"iter_{source.facts.progress.get('step', source.facts.steps):07d}"
        kept = {
            "weight": torch.float32 if self.masters else weights,
            **dict.fromkeys(MOMENTS, torch.float32),
        }
        self.stages = [list(self._stage(stage)) for stage in range(layout.pp)]
        self.dtypes = {
            f"{kind}/{name}": self._dtype(match, dtype)
            for kind, dtype in kept.items()
            for match in self.matches
            for name in match.logical
            if kind == "weight" or (self.has_state and is_trained(match.foreign))
        }

    def _stage(self, stage: int) -> Iterator[_Local]:
        """The tensors of a pipeline stage, in the order of its parameters."""
        pp = self.layout.pp
        layers = self.source.model.layers // self.layout.pp
        copied = pp > 1 and stage == pp - 1
        embedding = next(m for m in self.matches if m.foreign == EMBEDDING)
        if self.source.model.mtp_layers and copied:
            yield self._local(EMBEDDING, embedding)
        for match in as_registered(self.matches, self.layout.grouped):
            if name := _local_name(match.foreign, stage, layers, pp):
                yield self._local(name, match)
        if self.source.model.tied and copied:
            yield self._local(HEAD, embedding)

    def _local(self, name: str, match: Match) -> _Local:
        try:
            shape = part_shape(match.shape, match.cut, self._ranks(match), self.padded)
        except UserError as error:
            raise UserError(
                f"--tp {self.layout.tp}: {name} of {error}; give a number that divides it"
            ) from error
        own = self.source.model.experts // self.layout.ep
        return _Local(
            local_name(name, own, self.layout.grouped), match, shape, expert_of(match.foreign)
        )

    def _dtype(self, match: Match, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of a tensor among weights; a router's correction keeps its own."""
        if is_trained(match.foreign):
            return weights
        return self.source.dtype(f"weight/{match.logical[0]}")

    def _ranks(self, match: Match) -> int:
        """Return over how many ranks a tensor is cut."""
        if expert_of(match.foreign) is None:
            return self.layout.tp
        return self.expert_tp

    def _files(self) -> Iterator[tuple[int, str, list[_Local]]]:
        """(tp rank, file, what is in it) of every rank."""
        layout = self.layout
        own = self.source.model.experts // self.layout.ep
        for stage, local in enumerate(self.stages):
            for tp, ep in product(range(layout.tp), range(layout.ep)):
                folder = rank_folder(tp, stage, layout.pp, ep, layout.ep)
                held = [
                    tensor
                    for tensor in local
                    if tensor.expert is None or tensor.expert // own == ep
                ]
                yield tp, f"{self.folder}/{folder}/{FILE}", held

    def reserve(self, folder: Path, write: bool) -> list[Write]:
        """Makes all ranks' files; one write for each whole tensor and kind, with a place in each
        file that has it."""
        places: dict[tuple[str, Match], list[Location]] = {}
        for rank, file, held in self._files():
            for (kind, tensor, dtype), start in self._make(folder / file, held, rank, write):
                ranks = self._ranks(tensor.match)
                take = bind(_part, tensor.match, rank % ranks, ranks, self.padded, dtype)
                places.setdefault((kind, tensor.match), []).append(Location(file, start, take))
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
        self, file: Path, local: Sequence[_Local], rank: int, write: bool
    ) -> Iterator[tuple[tuple[str, _Local, torch.dtype], int]]:
        """((kind, tensor, dtype), byte where it begins) of all tensors in one rank's file."""
        rooms = _Rooms()
        with FakeTensorMode():
            content = self._content(local, rank, rooms)
        if write:
            file.parent.mkdir(parents=True, exist_ok=True)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(content, file)
        for slot, start in zip(rooms.slots, _storage_starts(file), strict=True):
            if slot is not None:
                yield slot, start
            elif write:
                fill(file, start, torch.tensor([self.source.facts.scaler["scale"]]))

    def _content(self, local: Sequence[_Local], rank: int, rooms: _Rooms) -> dict[str, Any]:
        progress = self.source.facts.progress
        samples = progress.get("samples", 0)
        args = {**self.args, "consumed_train_samples": samples, "rank": rank}
        args["seq_length"] = progress.get("tokens", 0) // samples if samples else args["seq_length"]
        content: dict[str, Any] = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": progress.get("step", self.source.facts.steps),
            "model": {
                tensor.name: rooms.take("weight", tensor, self._dtype(tensor.match, self.weights))
                for tensor in local
            },
        }
        if self.has_state:
            content["optimizer"] = self._optimizers([t for t in local if is_trained(t.name)], rooms)
            content["opt_param_scheduler"] = {
                **dict.fromkeys(RATES + DECAYS),
                "num_steps": progress.get("applied_samples", 0),
            }
        return content

    def _optimizers(self, local: Sequence[_Local], rooms: _Rooms) -> Any:
        """One, or two in a list where a rank has experts of its own."""
        if self.layout.ep == 1:
            return self._optimizer(local, rooms)
        apart = ([t for t in local if (t.expert is not None) == own] for own in (False, True))
        return [self._optimizer(tensors, rooms) for tensors in apart]

    def _optimizer(self, local: Sequence[_Local], rooms: _Rooms) -> dict[str, Any]:
        experts = self.layout.ep > 1 and any(t.expert is not None for t in local)
        steps = self.source.facts.steps
        both = (True, False)
        groups = {
            decays: [t for t in local if decayed(t.name, t.shape) == decays] for decays in both
        }
        state: dict[int, Any] = {}
        told = []
        for decays, group in groups.items():
            if group:
                told.append(
                    _group(
                        steps, float(decays), range(len(state), len(state) + len(group)), experts
                    )
                )
            for t in group:
                moments = {kind: rooms.take(kind, t, torch.float32) for kind in MOMENTS}
                state[len(state)] = {"step": float(steps), **moments}
        inner = {"state": state, "param_groups": told}
        if not self.masters:
            return inner
        masters = [
            [rooms.take("weight", t, torch.float32) for t in group]
            for group in groups.values()
            if group
        ]
        return {"optimizer": inner, "fp32_from_fp16_params": masters} | self._scaler(rooms)

    def _scaler(self, rooms: _Rooms) -> dict[str, Any]:
        """The loss scaler's state, of which the scale is a tensor there."""
        kept = self.source.facts.scaler
        if not kept:
            return {}
        trackers = {name: int(kept[name]) for name in ("growth_tracker", "hysteresis_tracker")}
        return {"grad_scaler": {"scale": rooms.take_scale(), **trackers}}

    def finish(self, folder: Path) -> None:
        """The file that names the iteration, and how texts are generated, which Megatron does not
        look at."""
        if said := self.source.facts.generation:
            write_generation(folder / self.folder, said)
        (folder / TRACKER).write_text(str(int(self.folder.removeprefix("iter_"))))


def _group(steps: int, wd_mult: float, params: Sequence[int], experts: bool) -> dict[str, Any]:
    """A group of parameters as Megatron's optimizer tells it from others; rates and decay are for
    it to set."""
    told = {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_expert_parallel": experts,
        "is_decoupled_lr": False,
    }
    return {**told, "step": steps, "params": list(params)}


def _local_name(name: str, stage: int, layers: int, pp: int) -> str | None:
    """The name of a tensor in a stage, where layers count from 0; None if the stage does not have
    it."""
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        own = int(number) - stage * layers
        return f"decoder.layers.{own}.{rest}" if 0 <= own < layers else None
    if stage == (0 if name.startswith("embedding.") else pp - 1):
        return name
    return None


def _storage_starts(file: Path) -> list[int]:
    """Return the first bytes of the storages of a torch file, in the order in which they were
    saved."""
    starts = {}
    with zipfile.ZipFile(file) as archive, reading(file) as opened:
        for entry in archive.infolist():
            folder, _, number = entry.filename.rpartition("/")
            if folder.endswith("/data") and number.isdigit():
                opened.seek(entry.header_offset + 26)
                name, extra = (int.from_bytes(opened.read(2), "little") for _ in range(2))
                starts[int(number)] = entry.header_offset + 30 + name + extra
    return [starts[number] for number in sorted(starts)]


def _part(
    match: Match, rank: int, tp: int, padded: int, dtype: torch.dtype, whole: Tensor
) -> Tensor:
    """Return a rank's part of the vocabulary without padding, for which there is room that holds
    zeros."""
    if match.cut == "vocabulary":
        rows = padded // tp
        return whole[rank * rows : (rank + 1) * rows].to(dtype)
    return part(whole, match.cut, rank, tp, padded).to(dtype)


def _join(match: Match, sizes: Any, parts: Sequence[Tensor]) -> Tensor:
    return match.how.join(parts, sizes)
