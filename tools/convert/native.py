"""Megaprec's own checkpoints as source and target of conversions."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial as bind
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.digests import FILE_DIGESTS, file_digest, seal_index
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.ranges import blocks, stored_shape
from megaprec.checkpoint.reader import FORMAT, INDEX, Store
from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.optim.muon.rule import MUON_MOMENTUM
from megaprec.precision.plan import LossScaling
from models.config import ModelConfig
from models.own_model import require_builtin
from models.router import is_correction
from tools.convert.core.rules import Match, logical_shapes
from tools.convert.core.source import Facts, Origin, Source
from tools.convert.core.target import JOURNAL, Location, Target, Write
from tools.convert.core.tensors import Stored, reserve_safetensors, safetensors_in
from tools.convert.core.transforms import SAME
from tools.convert.hf.folder import check_tensors
from tools.convert.hf.vocabulary import main_file
from tools.convert.train_state import (
    TrainState,
    read_documents,
    read_ids,
    read_model,
    read_progress,
    read_table,
    read_tokenizer,
    read_watch,
    tokenizer_files,
)

# Prefix of scales and amax histories, which belong to products, not to logical tensors.
SCALES = "fp8/"
MODEL_FILE = "model-00000.safetensors"
OPTIMIZER_FILE = "optimizer-00000.safetensors"


def native_model(path: Path) -> tuple[ModelConfig, Path | None]:
    """Return the model of a checkpoint and its tokenizer file, if there is one."""
    store = Store(path)
    tokenizer = read_tokenizer(store) if "tokenizer" in store.index else None
    require_intact(store, tokenizer_files(store) if "tokenizer" in store.index else [])
    return read_model(store), tokenizer


def special_ids(store: Store) -> dict[str, Any]:
    """Return bos_token_id and the like of a checkpoint: of the folder that it was converted from,
    or of its run."""
    converted = read_ids(store, "special_ids")
    documents = read_documents(store)
    if converted or not documents:
        return converted
    return {"bos_token_id": documents["begin"], "eos_token_id": documents["end"]}


def open_native(path: Path) -> Source:
    """Open a checkpoint. Raises UserError if it is damaged or does not hold the model that it
    describes."""
    store = Store(path)
    model = read_model(store)
    require_builtin(model, "conversion")
    index = store.index
    logical = {key: entry for key, entry in index["tensors"].items() if not key.startswith(SCALES)}
    _check_shapes(path, model, store, logical)
    names = tokenizer_files(store) if index.get("tokenizer") else []
    facts = Facts(
        index["optimizer"]["steps"],
        index["optimizer"]["scaler"],
        index["optimizer"].get("rule", {}),
        progress=asdict(read_progress(store)) if index.get("progress") else {},
        watch=read_watch(store) if index.get("watch") else {},
        precision=read_table(store, "precision"),
        layout=read_table(store, "layout"),
        unread="" if len(logical) == len(index["tensors"]) else "FP8 scales and amax histories",
        special=special_ids(store),
        generation=read_table(store, "generation"),
        documents=read_documents(store),
    )
    tokenizer = [store.file(name) for name in names]
    return Source(path, "megaprec", model, _origins(store, logical), facts, tokenizer)


def _origins(store: Store, logical: Mapping[str, Any]) -> list[Origin]:
    """Return the origins of logical tensors: all of a tensor after another, whatever their kind.

    logical: key -> its entry in the checkpoint's index.
    """
    files = {
        name: safetensors_in(store.file(name))
        for name in store.index["files"]
        if name.endswith(".safetensors")
    }

    def name_then_kind(key: str) -> list[str]:
        return key.split("/", 1)[::-1]

    origins = []
    for key in sorted(logical, key=name_then_kind):
        entry = logical[key]
        load = bind(_assemble, store, key, files)
        rows = bind(_read_rows, store, key, files)
        shape = tuple(entry["shape"])
        origins.append(Origin(key, (key,), (shape,), getattr(torch, entry["dtype"]), load, rows))
    return origins


def _check_shapes(path: Path, model: ModelConfig, store: Store, logical: Iterable[str]) -> None:
    """Raise UserError unless the weights, and the moments that are there, are those of `model`."""
    # Muon's tensors have no other moment, and the others have none of Muon.
    by_muon = store.shapes(MUON_MOMENTUM).keys()
    for kind in dict.fromkeys(key.split("/", 1)[0] for key in logical):
        shapes = store.shapes(kind)
        if not shapes:
            continue
        expected = [
            Match(name, (name,), SAME, "whole", shape)
            for name, shape in logical_shapes(model).items()
            if _has_kind(kind, name, name in by_muon)
        ]
        stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        check_tensors(path, expected, stand_ins)


def _has_kind(kind: str, name: str, by_muon: bool) -> bool:
    """Return True if a tensor has this moment, or kind is "weight". by_muon: True if Muon updates
    the tensor."""
    return kind == "weight" or (not is_correction(name) and (kind == MUON_MOMENTUM) == by_muon)


def _assemble(store: Store, key: str, files: dict[str, dict[str, Stored]]) -> list[Tensor]:
    """Return a logical tensor, assembled from the chunks that ranks wrote."""
    entry = store.index["tensors"][key]
    kind, name = key.split("/", 1)
    assembled: Tensor | None = None
    filled = 0
    for chunk in entry["chunks"]:
        stored = files[chunk["file"]].get(name if kind == "weight" else key)
        # A file of another save, or half of one: the sum of elements tells it below.
        if stored is None or list(stored.shape) != stored_shape(chunk):
            break
        values = stored.read()
        filled += values.numel()
        if list(values.shape) == entry["shape"]:
            assembled = values
            continue
        if assembled is None:
            assembled = torch.empty(entry["shape"], dtype=values.dtype)
        # A chunk holds the values of several rectangles of the tensor, one after another.
        for offset, shape, start in blocks(chunk):
            rectangle = tuple(
                slice(first, first + size) for first, size in zip(offset, shape, strict=True)
            )
            block = values.view(-1)[start : start + prod(shape)]
            assembled[rectangle] = block.view(shape)
    if assembled is None or filled != prod(entry["shape"]):
        raise UserError.of("convert.part_missing", path=store.path, key=key)
    return [assembled]


def _read_rows(
    store: Store, key: str, files: dict[str, dict[str, Stored]], top: int, bottom: int
) -> Tensor:
    """Return rows [top, bottom) of a logical tensor."""
    entry = store.index["tensors"][key]
    # One chunk that is the whole tensor is read from its file directly.
    if [chunk["shape"] for chunk in entry["chunks"]] == [entry["shape"]]:
        stored = files[entry["chunks"][0]["file"]].get(_name_in_file(key))
        if stored is not None and list(stored.shape) == entry["shape"]:
            return stored.rows(top, bottom)
    row_shape = entry["shape"][1:]
    return store.rectangle(key, [top, *(0 for _ in row_shape)], [bottom - top, *row_shape])


def native_target(source: Source, dtype: torch.dtype | None) -> Target:
    """Return a target with all tensors of `source`: weights in `dtype` or their own dtype, moments
    unchanged."""
    dtypes: dict[str, torch.dtype] = {}
    for kind in source.kinds:
        for name in logical_shapes(source.model):
            key = f"{kind}/{name}"
            if kind == "weight":
                dtypes[key] = source.dtype_in(key, dtype)
            elif key in source.shapes:  # Muon keeps a moment of matrices, AdamW two of others
                dtypes[key] = source.dtype_in(key, None)
    size = sum(prod(source.shapes[key]) * dtype.itemsize for key, dtype in dtypes.items())

    def reserve(folder: Path, write: bool) -> list[Write]:
        writes = []
        for file, keys in _keys_by_file(dtypes).items():
            tensors = {_name_in_file(key): (dtypes[key], source.shapes[key]) for key in keys}
            starts = reserve_safetensors(folder / file, tensors, write)
            for key in keys:
                location = Location(file, starts[_name_in_file(key)], bind(_cast, dtypes[key]))
                writes.append(Write(key, (key,), _only_part, (location,), straight=True))
        return writes

    def finish(folder: Path) -> None:
        if main_file(source.tokenizer):
            for file in source.tokenizer:
                (folder / file.name).write_bytes(read_whole(file))
        _write_index(folder, source, dtypes)

    return Target(
        {"to": "megaprec", "dtype": str(dtype)}, size, dtypes, reserve, finish, open_native
    )


def _keys_by_file(dtypes: dict[str, torch.dtype]) -> dict[str, list[str]]:
    weights = [key for key in dtypes if key.startswith("weight/")]
    moments = [key for key in dtypes if not key.startswith("weight/")]
    return {MODEL_FILE: weights} | ({OPTIMIZER_FILE: moments} if moments else {})


def _name_in_file(key: str) -> str:
    return key.removeprefix("weight/")


def _only_part(parts: Any) -> Tensor:
    return parts[0]


def _cast(dtype: torch.dtype, values: Tensor) -> Tensor:
    return values.to(dtype)


def _write_index(folder: Path, source: Source, dtypes: dict[str, torch.dtype]) -> None:
    facts = source.facts
    progress = facts.progress or asdict(TrainState(facts.steps, facts.steps))
    tokenizer = main_file(source.tokenizer)
    tensors = {}
    for file_name, keys in _keys_by_file(dtypes).items():
        for key in keys:
            shape = list(source.shapes[key])
            chunk = {"file": file_name, "offset": [0] * len(shape), "shape": shape}
            dtype = str(dtypes[key]).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "shape": shape, "chunks": [chunk]}
    files = [file for file in sorted(folder.iterdir()) if file.name != JOURNAL]
    index = {
        "model": json.loads(source.model.model_dump_json()),
        "progress": progress,
        "watch": facts.watch or OverflowMonitor(LossScaling()).state_dict(),
        "layout": facts.layout,
        "precision": facts.precision,
        "special_ids": facts.special,
        "generation": facts.generation,
        **({"documents": facts.documents} if facts.documents else {}),
        "tokenizer": tokenizer.name if tokenizer else "",
        "torch": torch.__version__,
        "converted_from": {"format": source.kind, "folder": source.path.name},
        "step": progress["step"],
        "optimizer": {"steps": facts.steps, "scaler": facts.scaler, "rule": facts.rule},
        "format": FORMAT,
        "files": {file.name: file.stat().st_size for file in files},
        FILE_DIGESTS: {file.name: file_digest(file) for file in files},
        "tensors": tensors,
    }
    (folder / INDEX).write_bytes(seal_index(index))
