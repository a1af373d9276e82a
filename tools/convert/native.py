"""Megaprec's own checkpoints as source and target of conversions."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial as bind
from math import prod
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.atomic import INDEX
from megaprec.checkpoint.digests import FILE_DIGESTS, file_digest, seal_index
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import FORMAT, Store
from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.durable import put_bytes, read_whole
from megaprec.optim.rules.muon.rule import MUON_MOMENTUM
from megaprec.optim.state.flat_buffer import EMA
from megaprec.precision.plan import LossScaling
from megaprec.tokens.places import is_remote
from models.config import ModelConfig, require_builtin
from models.feed_forward.router import is_correction
from models.logical_shapes import logical_shapes
from tools.convert.core.rules import Match
from tools.convert.core.source import Facts, Origin, Source
from tools.convert.core.target import JOURNAL, Location, Target, Write
from tools.convert.core.tensors import (
    Stored,
    reserve_safetensors,
    safetensors_in,
    torch_name,
)
from tools.convert.core.transforms import SAME
from tools.convert.hf.folder import check_tensors
from tools.convert.hf.vocabulary import main_file
from tools.convert.kept_ids import GENERATION, SPECIAL, kept_ids
from tools.convert.run_record import read_run_record
from tools.saved.train_state import (
    TrainState,
    read_documents,
    read_model,
    read_overflow_monitor,
    read_progress,
    read_table,
    read_tokenizer,
    tokenizer_files,
)

# Prefix of scales and amax histories, which belong to products, not to logical tensors.
SCALES = "fp8/"
MODEL_FILE = "model-00000.safetensors"
OPTIMIZER_FILE = "optimizer-00000.safetensors"


def native_model(path: Path) -> tuple[ModelConfig, Path | None]:
    """Return the model of a checkpoint and its tokenizer file, if there is one."""
    checkpoint = Store(path)
    tokenizer = None
    if "tokenizer" in checkpoint.index:
        tokenizer = read_tokenizer(checkpoint)
        require_intact(checkpoint, tokenizer_files(checkpoint))
    return read_model(checkpoint), tokenizer


def open_native(path: Path, custom: bool = False) -> Source:
    """Open a checkpoint. Raises UserError if it is damaged or does not hold the model that it
    describes.

    custom: its tensors may be those of a model of the user's own, which only its code knows.
    """
    checkpoint = Store(path)
    model = read_model(checkpoint)
    if not custom:
        require_builtin(model, "conversion")
    index = checkpoint.index
    logical = {}
    for tensor_key, entry in index["tensors"].items():
        if not tensor_key.startswith(SCALES):
            logical[tensor_key] = entry
    if not custom:
        _check_shapes(path, model, checkpoint, logical)
    names = tokenizer_files(checkpoint) if index.get("tokenizer") else []
    optimizer = index["optimizer"]
    ids = kept_ids(checkpoint)
    facts = Facts(
        optimizer["steps"],
        optimizer["scaler"],
        optimizer.get("rule", {}),
        progress=asdict(read_progress(checkpoint)) if index.get("progress") else {},
        watch=read_overflow_monitor(checkpoint) if index.get("watch") else {},
        precision=read_table(checkpoint, "precision"),
        layout=read_table(checkpoint, "layout"),
        unread="" if len(logical) == len(index["tensors"]) else "FP8 scales and amax histories",
        special=ids.special,
        generation=ids.generation,
        documents=read_documents(checkpoint),
        notes=tuple(f"{path}: {change}" for change in ids.changes),
        run=read_run_record(checkpoint) if index.get("run") else None,
    )
    tokenizer = [checkpoint.file(name) for name in names]
    return Source(path, "megaprec", model, _origins(checkpoint, logical), facts, tokenizer)


def _origins(checkpoint: Store, logical: Mapping[str, Any]) -> list[Origin]:
    """Return the origins of logical tensors, those of one tensor together: its weight, and its
    moments.

    logical: key -> its entry in the checkpoint's index.
    """
    files = {}
    for file_name in checkpoint.index["files"]:
        # at a URL the checkpoint reads its tensors by ranges
        if file_name.endswith(".safetensors") and not is_remote(checkpoint.path):
            files[file_name] = safetensors_in(checkpoint.file(file_name))

    def name_then_kind(tensor_key: str) -> tuple[str, str]:
        kind, _, name = tensor_key.partition("/")
        return name, kind

    origins = []
    for tensor_key in sorted(logical, key=name_then_kind):
        entry = logical[tensor_key]
        rows = bind(_read_rows, checkpoint, tensor_key, files)
        shape = tuple(entry["shape"])
        load = bind(_read_whole, rows, shape)
        dtype = getattr(torch, entry["dtype"])
        origins.append(Origin(tensor_key, (tensor_key,), (shape,), dtype, load, rows))
    return origins


def _check_shapes(
    path: Path, model: ModelConfig, checkpoint: Store, logical: Iterable[str]
) -> None:
    """Raise UserError unless the weights, and the moments that are there, are those of `model`."""
    # Muon's tensors have no other moment, and the others have none of Muon.
    by_muon = checkpoint.shapes(MUON_MOMENTUM).keys()
    entries = checkpoint.index["tensors"]
    frozen = {key.partition("/")[2] for key, entry in entries.items() if entry.get("frozen")}
    for kind in dict.fromkeys(key.split("/", 1)[0] for key in logical):
        shapes = checkpoint.shapes(kind)
        if not shapes:
            continue
        expected = []
        for tensor_name, shape in logical_shapes(model).items():
            # a correction by loads is not averaged
            if kind == EMA and tensor_name not in shapes:
                continue
            if kind != "weight" and tensor_name in frozen:
                continue
            if _has_kind(kind, tensor_name, tensor_name in by_muon):
                expected.append(Match(tensor_name, (tensor_name,), SAME, "whole", shape))
        stand_ins = {}
        for tensor_name, shape in shapes.items():
            stand_ins[tensor_name] = torch.empty(shape, device="meta")
        check_tensors(path, expected, stand_ins)


def _has_kind(kind: str, tensor_name: str, by_muon: bool) -> bool:
    """Return True if a tensor has this moment, or kind is "weight" or that of averages. by_muon:
    True if Muon updates the tensor."""
    if kind in ("weight", EMA):
        return True
    # Loads move a correction, not the optimizer's rule.
    if is_correction(tensor_name):
        return False
    return (kind == MUON_MOMENTUM) == by_muon


def _read_whole(rows: Callable[[int, int], Tensor], shape: Sequence[int]) -> list[Tensor]:
    return [rows(0, shape[0])]


def _read_rows(
    checkpoint: Store, tensor_key: str, files: dict[str, dict[str, Stored]], top: int, bottom: int
) -> Tensor:
    """Return rows [top, bottom) of a logical tensor, of the chunks that ranks wrote."""
    entry = checkpoint.index["tensors"][tensor_key]
    # One chunk that is the whole tensor is read from its file directly.
    first_chunk = entry["chunks"][0]
    is_one_chunk = len(entry["chunks"]) == 1 and first_chunk["shape"] == entry["shape"]
    if is_one_chunk and first_chunk["file"] in files:
        stored = files[first_chunk["file"]].get(_name_in_file(tensor_key))
        if stored is not None and list(stored.shape) == entry["shape"]:
            return stored.rows(top, bottom)
    row_shape = entry["shape"][1:]
    offset = [top] + [0] * len(row_shape)
    return checkpoint.rectangle(tensor_key, offset, [bottom - top, *row_shape])


def native_target(source: Source, dtype: torch.dtype | None) -> Target:
    """Return a target with all tensors of `source`: weights in `dtype` or their own dtype, moments
    unchanged."""
    dtypes = _dtypes_by_key(source, dtype)
    size = 0
    for tensor_key, stored_dtype in dtypes.items():
        size += prod(source.shapes[tensor_key]) * stored_dtype.itemsize

    def reserve(folder: Path, write: bool) -> list[Write]:
        """Create the files, if `write`; return a write for each tensor."""
        writes = []
        for safetensors_file, keys in _keys_by_file(dtypes).items():
            tensors = {}
            for tensor_key in keys:
                tensors[_name_in_file(tensor_key)] = (dtypes[tensor_key], source.shapes[tensor_key])
            starts = reserve_safetensors(folder / safetensors_file, tensors, write)
            for tensor_key in keys:
                start = starts[_name_in_file(tensor_key)]
                cast = methodcaller("to", dtypes[tensor_key])
                location = Location(safetensors_file, start, cast)
                join = itemgetter(0)  # of one tensor; the file has the logical tensors themselves
                writes.append(Write(tensor_key, (tensor_key,), join, (location,), straight=True))
        return writes

    def finish(folder: Path) -> None:
        if main_file(source.tokenizer):
            for tokenizer_file in source.tokenizer:
                put_bytes(folder / tokenizer_file.name, read_whole(tokenizer_file))
        _write_index(folder, source, dtypes)

    return Target(
        {"to": "megaprec", "dtype": str(dtype)}, size, dtypes, reserve, finish, open_native
    )


def _dtypes_by_key(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return key -> dtype of the tensors to write. dtype: of weights; None: their own."""
    dtypes: dict[str, torch.dtype] = {}
    for kind in source.kinds:
        for tensor_name in logical_shapes(source.model):
            tensor_key = f"{kind}/{tensor_name}"
            if kind == "weight":
                dtypes[tensor_key] = source.dtype_in(tensor_key, dtype)
            # Muon keeps a moment of matrices, AdamW two of others.
            elif tensor_key in source.shapes:
                dtypes[tensor_key] = source.dtype(tensor_key)
    return dtypes


def _keys_by_file(dtypes: dict[str, torch.dtype]) -> dict[str, list[str]]:
    weights = [tensor_key for tensor_key in dtypes if tensor_key.startswith("weight/")]
    moments = [tensor_key for tensor_key in dtypes if not tensor_key.startswith("weight/")]
    keys_by_file = {MODEL_FILE: weights}
    if moments:
        keys_by_file[OPTIMIZER_FILE] = moments
    return keys_by_file


def _name_in_file(tensor_key: str) -> str:
    return tensor_key.removeprefix("weight/")


def _write_index(folder: Path, source: Source, dtypes: dict[str, torch.dtype]) -> None:
    """Write checkpoint.json, sealed, of a folder that has all other files. dtypes: of the tensors,
    by key."""
    facts = source.facts
    progress = facts.progress or asdict(TrainState(facts.steps, facts.steps))
    tokenizer = main_file(source.tokenizer)
    tensors = {}
    for file_name, keys in _keys_by_file(dtypes).items():
        for tensor_key in keys:
            shape = list(source.shapes[tensor_key])
            chunk = {"file": file_name, "offset": [0] * len(shape), "shape": shape}
            dtype = torch_name(dtypes[tensor_key])
            tensors[tensor_key] = {"dtype": dtype, "shape": shape, "chunks": [chunk]}
    for tensor_key in _frozen_weights(dtypes):
        tensors[tensor_key]["frozen"] = True
    # The journal of the conversion is removed before the folder gets its name.
    files = [file for file in sorted(folder.iterdir()) if file.name != JOURNAL]
    index = {
        "model": json.loads(source.model.model_dump_json()),
        "progress": progress,
        "watch": facts.watch or OverflowMonitor(LossScaling()).state_dict(),
        "layout": facts.layout,
        "precision": facts.precision,
        SPECIAL: facts.special,
        GENERATION: facts.generation,
        **({"documents": facts.documents} if facts.documents else {}),
        "tokenizer": tokenizer.name if tokenizer else "",
        "torch": torch.__version__,
        **_record_of_origin(source),
        "step": progress["step"],
        "optimizer": {"steps": facts.steps, "scaler": facts.scaler, "rule": facts.rule},
        "format": FORMAT,
        "files": {file.name: file.stat().st_size for file in files},
        FILE_DIGESTS: {file.name: file_digest(file) for file in files},
        "tensors": tensors,
    }
    put_bytes(folder / INDEX, seal_index(index))


def _frozen_weights(tensor_keys: Iterable[str]) -> list[str]:
    """Return the weights without moments beside others that have some: they were not trained."""
    kinds_of = defaultdict[str, set[str]](set)
    for tensor_key in tensor_keys:
        kind, _, name = tensor_key.partition("/")
        kinds_of[name].add(kind)
    with_moments = [name for name, kinds in kinds_of.items() if kinds - {"weight", EMA}]
    if not with_moments:
        return []
    without = kinds_of.keys() - set(with_moments)
    return [f"weight/{name}" for name in sorted(without) if not is_correction(f"weight/{name}")]


def _record_of_origin(source: Source) -> dict[str, Any]:
    """Return the entry of an index that says which model was converted, or which were merged."""
    if not source.facts.merged:
        record: dict[str, Any] = {"format": source.kind, "folder": source.path.name}
        if source.facts.averaged:
            record["ema"] = True
        return {"converted_from": record}
    inputs = []
    for merged_input in source.facts.merged:
        inputs.append(
            {
                "format": merged_input.kind,
                # The whole path: checkpoints of two runs have the same names.
                "folder": str(merged_input.path),
                "weight": merged_input.weight,
            }
        )
    return {"merged_from": inputs}
