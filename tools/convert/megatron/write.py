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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megaprec.durable import put_text, reading, require_room
from megaprec.errors import UserError
from models.config import ModelConfig
from models.feed_forward.router import is_correction
from tools.convert.core.names import megatron
from tools.convert.core.rules import Cut, Match, head_sizes, matches
from tools.convert.core.source import Source
from tools.convert.core.target import Location, Target, Write
from tools.convert.core.tensors import fill
from tools.convert.hf.write import write_generation
from tools.convert.megatron.args import args_of, omitted_fields
from tools.convert.megatron.hybrid_layers import needs_transformer_engine
from tools.convert.megatron.layout import (
    EMBEDDING,
    FILE,
    HEAD,
    TRACKER,
    cut_part,
    expert_of,
    is_trained,
    local_name,
    part_shape,
    rank_folder,
)
from tools.convert.megatron.optimizer_state import MOMENTS, decayed
from tools.convert.megatron.order import in_registered_order
from tools.convert.megatron.read import find_megatron, open_megatron

# Rows of the vocabulary are padded to a multiple of this times the tensor-parallel ranks, as
# Megatron does.
DIVISIBLE = 128
HALF = (torch.bfloat16, torch.float16)
# Megatron looks for these, and takes its own with --override-opt-param-scheduler.
SCHEDULER_KEYS = (
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
)
# A local header of a zip: its length without name and extra field, whose lengths are at its end.
ZIP_HEADER = 30
ZIP_LENGTHS = 26


@dataclass(frozen=True)
class MegatronLayout:
    """The numbers of ranks that the checkpoint is laid out over, and the names that it has.

    fused_norms: norms bear Transformer Engine's names.
    grouped: so do experts, which Megatron then computes together.
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
class _LocalTensor:
    """A tensor of `match` as a stage has it: its name there and its part's shape.

    expert: the number of the expert that it belongs to, if it is one's; the name counts a rank's
        own.
    """

    name: str
    match: Match
    shape: tuple[int, ...]
    expert: int | None


class _Slot(NamedTuple):
    """Room for a rank's part of a tensor in its file. kind: weight, exp_avg or exp_avg_sq."""

    kind: str
    tensor: _LocalTensor
    dtype: torch.dtype


def megatron_target(source: Source, dtype: torch.dtype | None, layout: MegatronLayout) -> Target:
    """Return a target that is a folder with one iteration. UserError for a model or a layout that
    Megatron does not have."""
    _check_layout(source.model, layout)
    weight_dtype = dtype or source.dtype("weight/embedding.weight")
    writer = _Writer(source, layout, weight_dtype)
    describe = {"to": "megatron", "dtype": str(dtype), "layout": astuple(layout)}
    size = 0
    for tensor_key, stored_dtype in writer.dtypes.items():
        size += prod(source.shapes[tensor_key]) * stored_dtype.itemsize
    left_out = list(writer.left_out)
    if source.tokenizer:
        left_out.append("the tokenizer")
    return Target(
        describe=describe,
        size=size,
        dtypes=writer.dtypes,
        reserve=writer.reserve,
        finish=writer.finish,
        reopen=_reopen,
        left_out=tuple(left_out),
    )


def _check_layout(model: ModelConfig, layout: MegatronLayout) -> None:
    """Raise UserError for a layout that the model cannot have."""
    if layout.tp < 1 or layout.pp < 1 or model.layers % layout.pp:
        raise UserError.of("convert.target_stages", tp=layout.tp, pp=layout.pp, layers=model.layers)
    if not model.fits_tensor(layout.tp):
        possible = [ranks for ranks in range(1, model.heads + 1) if model.fits_tensor(ranks)]
        raise UserError.of(
            "convert.target_heads", tp=layout.tp, possible=", ".join(map(str, possible))
        )
    if not layout.fused_norms and needs_transformer_engine(model):
        raise UserError.of("convert.target_local_layers")
    # Each rank has as many experts, and each stage as many layers.
    has_ranks_without = layout.ep > 1 and not model.experts
    if layout.ep < 1 or model.experts % layout.ep or has_ranks_without:
        raise UserError.of("convert.target_expert_ranks", ep=layout.ep, experts=model.experts)
    if layout.grouped and not model.experts:
        raise UserError.of("convert.target_no_experts")


def _reopen(path: Path) -> Source:
    iteration = find_megatron(path)
    assert iteration
    return open_megatron(iteration)


class _Slots:
    """Tensors without values for a file to be, in the order in which it will hold them."""

    def __init__(self) -> None:
        self.slots: list[_Slot | None] = []  # None: the loss scale

    def add(self, kind: str, tensor: _LocalTensor, dtype: torch.dtype) -> Tensor:
        """Return room for a rank's part of a tensor."""
        self.slots.append(_Slot(kind, tensor, dtype))
        return torch.empty(tensor.shape, dtype=dtype)

    def add_scale(self) -> Tensor:
        """Return room for the loss scale."""
        self.slots.append(None)
        return torch.empty(1)


class _Writer:
    """The files of one conversion. weight_dtype: of the model's weights in them."""

    def __init__(self, source: Source, layout: MegatronLayout, weight_dtype: torch.dtype) -> None:
        self.source = source
        self.layout = layout
        self.weight_dtype = weight_dtype
        model = source.model
        unit = DIVISIBLE * layout.tp
        self.padded = -(-model.vocab // unit) * unit
        # Megatron has biases of experts only where these are not cut; others are cut as all else
        # is.
        self.expert_tp = 1 if model.expert_bias else layout.tp
        self.args = args_of(
            model, self.padded, layout.tp, layout.pp, layout.fused_norms, weight_dtype
        )
        self.left_out = omitted_fields(model, self.args)
        self.args |= source.facts.special
        self.args |= {"expert_model_parallel_size": layout.ep, "moe_grouped_gemm": layout.grouped}
        if model.expert_bias:
            self.args["expert_tensor_parallel_size"] = self.expert_tp
        rules = megatron(layout.fused_norms, interleaved=False, model=model, down=layout.down)
        self.matches = matches(rules, model)
        # The state of other rules is not written, nor that of Muon, which mixes two.
        self.has_state = _has_all_moments(source)
        # FP32 masters take the place of half weights: they are what is read back.
        self.has_masters = self.has_state and weight_dtype in HALF
        # A source without progress counts the steps that were applied.
        self.iteration = source.facts.progress.get("step", source.facts.steps)
        self.folder = f"iter_{self.iteration:07d}"
        self.stages = [list(self._stage(stage)) for stage in range(layout.pp)]
        self.dtypes = self._dtypes()

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Return key -> dtype in which a logical tensor is read back: masters in place of half
        weights, and the moments of what is trained."""
        dtypes: dict[str, torch.dtype] = {}
        read_dtype = torch.float32 if self.has_masters else self.weight_dtype
        for match in self.matches:
            for name in match.logical:
                dtypes[f"weight/{name}"] = self._dtype(match, read_dtype)
        if not self.has_state:
            return dtypes
        for kind in MOMENTS:
            for match in self.matches:
                if is_trained(match.foreign):
                    dtypes |= {f"{kind}/{name}": torch.float32 for name in match.logical}
        return dtypes

    def _stage(self, stage: int) -> Iterator[_LocalTensor]:
        """Yield the tensors of a pipeline stage, in the order of its parameters."""
        pp = self.layout.pp
        layers = self.source.model.layers // pp
        # A single stage has the embedding already.
        is_another_last = pp > 1 and stage == pp - 1
        embedding = next(match for match in self.matches if match.foreign == EMBEDDING)
        # Modules of multi-token prediction embed tokens too, before their layers.
        if self.source.model.mtp_layers and is_another_last:
            yield self._local(EMBEDDING, embedding)
        for match in in_registered_order(self.matches, self.layout.grouped):
            tensor_name = _name_in_stage(match.foreign, stage, layers, pp)
            if tensor_name is not None:
                yield self._local(tensor_name, match)
        if self.source.model.tied and is_another_last:
            yield self._local(HEAD, embedding)

    def _local(self, tensor_name: str, name_match: Match) -> _LocalTensor:
        """Return a tensor as a rank's file has it. Raises UserError if the ranks cannot cut it."""
        ranks = self._ranks(name_match)
        try:
            shape = part_shape(name_match.shape, name_match.cut, ranks, self.padded)
        except UserError as error:
            raise UserError.of(
                "convert.target_tensor_ranks", tp=self.layout.tp, name=tensor_name, error=error
            ) from error
        experts = self.source.model.experts // self.layout.ep
        tensor_name = local_name(tensor_name, experts, self.layout.grouped)
        return _LocalTensor(tensor_name, name_match, shape, expert_of(name_match.foreign))

    def _dtype(self, name_match: Match, weight_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a tensor among weights; a router's correction keeps its own."""
        if is_trained(name_match.foreign):
            return weight_dtype
        return self.source.dtype(f"weight/{name_match.logical[0]}")

    def _ranks(self, name_match: Match) -> int:
        """Return over how many ranks a tensor is cut."""
        if expert_of(name_match.foreign) is None:
            return self.layout.tp
        return self.expert_tp

    def _files(self) -> Iterator[tuple[int, str, list[_LocalTensor]]]:
        """Yield (tp rank, file, the tensors in it) of every rank."""
        layout = self.layout
        experts = self.source.model.experts // layout.ep
        for stage, tensors in enumerate(self.stages):
            for tp, ep in product(range(layout.tp), range(layout.ep)):
                folder = rank_folder(tp, stage, layout.pp, ep, layout.ep)
                local = []
                for tensor in tensors:
                    if tensor.expert is None or tensor.expert // experts == ep:
                        local.append(tensor)
                yield tp, f"{self.folder}/{folder}/{FILE}", local

    def reserve(self, folder: Path, write: bool) -> list[Write]:
        """Make all ranks' files; return one write for each whole tensor and kind, with a location
        in each file that has it."""
        locations: dict[tuple[str, Match], list[Location]] = {}
        for tp, file, tensors in self._files():
            for slot, start in self._make_file(folder / file, tensors, tp, write):
                match = slot.tensor.match
                ranks = self._ranks(match)
                take = bind(_unpadded_part, match, tp % ranks, ranks, self.padded, slot.dtype)
                locations_of_tensor = locations.setdefault((slot.kind, match), [])
                locations_of_tensor.append(Location(file, start, take))
        sizes = head_sizes(self.source.model)
        writes = []
        for (kind, match), locations_of_tensor in locations.items():
            tensor_write = Write(
                f"{kind}/{match.foreign}",
                keys=tuple(f"{kind}/{name}" for name in match.logical),
                join=bind(match.join, sizes),
                locations=tuple(locations_of_tensor),
            )
            writes.append(tensor_write)
        return writes

    def _make_file(
        self, file: Path, tensors: Sequence[_LocalTensor], rank: int, write: bool
    ) -> Iterator[tuple[_Slot, int]]:
        """Yield (slot, byte where it begins) of all tensors in one rank's file. write: make it."""
        slots = _Slots()
        # Tensors without memory: the file gets room for the values, which follow one by one.
        with FakeTensorMode():
            content = self._content(tensors, rank, slots)
        if write:
            file.parent.mkdir(parents=True, exist_ok=True)
            _save_without_values(content, file)
        # torch numbers storages in the order in which it meets the tensors, which is that of
        # the slots.
        for slot, start in zip(slots.slots, _storage_starts(file), strict=True):
            if slot is not None:
                yield slot, start
            # The loss scale is one number, and needs no write of its own.
            elif write:
                fill(file, start, torch.tensor([self.source.facts.scaler["scale"]]))

    def _content(self, tensors: Sequence[_LocalTensor], rank: int, slots: _Slots) -> dict[str, Any]:
        """Return what a rank's file holds, with tensors without values."""
        progress = self.source.facts.progress
        # Megatron counts samples, and reckons steps and tokens from them.
        samples = progress.get("samples", 0)
        args = {**self.args, "consumed_train_samples": samples, "rank": rank}
        # Tokens are read back as samples of this length.
        if samples:
            args["seq_length"] = progress.get("tokens", 0) // samples
        weights = {}
        for tensor in tensors:
            dtype = self._dtype(tensor.match, self.weight_dtype)
            weights[tensor.name] = slots.add("weight", tensor, dtype)
        content: dict[str, Any] = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "model": weights,
        }
        if self.has_state:
            trained = [tensor for tensor in tensors if is_trained(tensor.name)]
            content["optimizer"] = self._optimizers(trained, slots)
            content["opt_param_scheduler"] = {
                **dict.fromkeys(SCHEDULER_KEYS),
                "num_steps": progress.get("applied_samples", 0),
            }
        return content

    def _optimizers(self, tensors: Sequence[_LocalTensor], slots: _Slots) -> Any:
        """Return the state of one optimizer, or of two in a list where a rank has experts of its
        own."""
        # Experts are reduced over other ranks than all else, so Megatron has two then.
        if self.layout.ep == 1:
            return self._optimizer(tensors, slots)
        dense = [tensor for tensor in tensors if tensor.expert is None]
        experts = [tensor for tensor in tensors if tensor.expert is not None]
        return [self._optimizer(dense, slots), self._optimizer(experts, slots)]

    def _optimizer(self, tensors: Sequence[_LocalTensor], slots: _Slots) -> dict[str, Any]:
        """Return the state of an optimizer: parameters with weight decay, then those without."""
        # With ep > 1 an optimizer is of experts alone, or of all else.
        is_of_experts = any(tensor.expert is not None for tensor in tensors)
        has_experts = self.layout.ep > 1 and is_of_experts
        steps = self.source.facts.steps
        # Megatron numbers parameters in this order: first those with weight decay.
        groups = []
        state: dict[int, Any] = {}
        param_groups = []
        for decays in (True, False):
            group = [tensor for tensor in tensors if decayed(tensor.name, tensor.shape) == decays]
            if not group:
                continue
            groups.append(group)
            indices = range(len(state), len(state) + len(group))
            param_groups.append(_param_group(steps, float(decays), indices, has_experts))
            for tensor in group:
                moments = {kind: slots.add(kind, tensor, torch.float32) for kind in MOMENTS}
                state[len(state)] = {"step": float(steps), **moments}
        inner = {"state": state, "param_groups": param_groups}
        if not self.has_masters:
            return inner
        # After the moments in the file, and so after them among the slots.
        masters = []
        for group in groups:
            masters.append([slots.add("weight", tensor, torch.float32) for tensor in group])
        return {
            "optimizer": inner,
            "fp32_from_fp16_params": masters,
            **self._scaler(slots),
        }

    def _scaler(self, slots: _Slots) -> dict[str, Any]:
        """Return the loss scaler's state, of which the scale is a tensor there."""
        scaler = self.source.facts.scaler
        if not scaler:
            return {}
        return {
            "grad_scaler": {
                "scale": slots.add_scale(),
                "growth_tracker": int(scaler["growth_tracker"]),
                "hysteresis_tracker": int(scaler["hysteresis_tracker"]),
            }
        }

    def finish(self, folder: Path) -> None:
        """Write the file that names the iteration, and how texts are generated, which Megatron does
        not look at."""
        if generation := self.source.facts.generation:
            write_generation(folder / self.folder, generation)
        put_text(folder / TRACKER, str(self.iteration))


def _has_all_moments(source: Source) -> bool:
    """Return True if the source has Adam's moments of all tensors that are trained."""
    for key in source.keys("weight"):
        tensor_name = key.removeprefix("weight/")
        if is_correction(key):
            continue
        if any(f"{kind}/{tensor_name}" not in source.shapes for kind in MOMENTS):
            return False
    return True


def _param_group(
    steps: int, wd_mult: float, params: Sequence[int], experts: bool
) -> dict[str, Any]:
    """Return a group of parameters as Megatron's optimizer tells it from others; rates and decay
    are for it to set."""
    return {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_expert_parallel": experts,
        "is_decoupled_lr": False,
        "step": steps,
        "params": list(params),
    }


def _name_in_stage(tensor_name: str, stage: int, layers: int, pp: int) -> str | None:
    """Return the name of a tensor in a stage, where layers count from 0; None if the stage does not
    have it. layers: of each stage."""
    if tensor_name.startswith("decoder.layers."):
        number, suffix = tensor_name.removeprefix("decoder.layers.").split(".", 1)
        local_number = int(number) - stage * layers
        if not 0 <= local_number < layers:
            return None
        return f"decoder.layers.{local_number}.{suffix}"
    owner = 0 if tensor_name.startswith("embedding.") else pp - 1
    return tensor_name if stage == owner else None


def _save_without_values(content: dict[str, Any], file: Path) -> None:
    """Write a file of torch's with room for the values of tensors without memory. Raises OSError
    with the path if the disk takes no such file."""
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, file)
    except RuntimeError:  # torch does not say why it cannot write
        require_room(file)
        raise


def _storage_starts(file: Path) -> list[int]:
    """Return the first bytes of the storages of a torch file, in the order in which they were
    saved."""
    starts = {}
    with zipfile.ZipFile(file) as archive, reading(file) as opened:
        for entry in archive.infolist():
            folder, _, number = entry.filename.rpartition("/")
            if folder.endswith("/data") and number.isdigit():
                opened.seek(entry.header_offset + ZIP_LENGTHS)
                name_length = int.from_bytes(opened.read(2), "little")
                extra_length = int.from_bytes(opened.read(2), "little")
                header_length = ZIP_HEADER + name_length + extra_length
                starts[int(number)] = entry.header_offset + header_length
    return [starts[number] for number in sorted(starts)]


def _unpadded_part(
    name_match: Match, rank: int, tp: int, padded: int, dtype: torch.dtype, tensor: Tensor
) -> Tensor:
    """Return a rank's part of a whole tensor, of the vocabulary without padding, for which there is
    room that holds zeros."""
    # The last rank's rows may be fewer: what follows them stays zero.
    if name_match.cut == "vocabulary":
        rows = padded // tp
        return tensor[rank * rows : (rank + 1) * rows].to(dtype)
    return cut_part(tensor, name_match.cut, rank, tp, padded).to(dtype)
