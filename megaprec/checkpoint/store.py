"""Reading logical tensors, or any rectangle of one, from a checkpoint's chunks."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaprec.checkpoint.digests import OTHERS, is_sealed
from megaprec.errors import UserError
from megaprec.layout import Part

INDEX = "checkpoint.json"
FORMAT = 1


class _Chunk(BaseModel):
    file: str
    offset: list[int]
    shape: list[int]


class _Tensor(BaseModel):
    dtype: str
    shape: list[int]
    chunks: list[_Chunk]


class _Optimizer(BaseModel):
    steps: int
    scaler: dict[str, float]


class _FP8(BaseModel):
    rolls: int


class _Index(BaseModel):
    """What every checkpoint.json holds, whatever the caller keeps there besides."""

    step: int
    optimizer: _Optimizer
    files: dict[str, int]
    sha256: dict[str, str] = {}  # earlier versions recorded none
    tensors: dict[str, _Tensor]
    fp8: _FP8 = _FP8(rolls=0)  # earlier versions kept none


class Store:
    """An opened checkpoint. `index` is its checkpoint.json.

    Raises UserError if there is no whole checkpoint at `path`, or one of a format that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._open = path, {}
        try:
            content = (path / INDEX).read_bytes()
            self.index: dict[str, Any] = json.loads(content)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a checkpoint: {INDEX} cannot be read ({error})") from error
        if not is_sealed(content, self.index):
            raise UserError(f"{path} is damaged: {INDEX} is not what was saved (SHA-256 differs): restore it")
        found = self.index.get("format") if isinstance(self.index, dict) else None
        if found != FORMAT:
            raise UserError(f"{path} has checkpoint format {found!r}; this version reads {FORMAT}")
        try:
            _Index.model_validate(self.index)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]]
            raise UserError(f"{path} is damaged: {INDEX} is not as it was written", *wrong) from error
        self._check_files()

    def _check_files(self) -> None:
        problems = []
        for name, size in self.index["files"].items():
            file = self.path / name
            if Path(name).name != name:
                problems.append(f"{self.path}: {INDEX} names a file outside of the checkpoint: {name!r}")
            elif not file.is_file() or file.stat().st_size != size:
                problems.append(f"{file} is missing or is not the {size} bytes that were written")
        if self.digests and self.digests.keys() != self.index["files"].keys():
            problems.append(f"{self.path} is damaged: {INDEX} lists other files than it has digests of")
        if problems:
            raise UserError(*problems)

    def file(self, name: str) -> Path:
        """The path of a file of the checkpoint. Raises UserError unless it is one that checkpoint.json lists."""
        if name not in self.index["files"]:
            raise UserError(f"{self.path} has no file {name!r}")
        return self.path / name

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file, in hex; empty if an earlier version saved it."""
        return self.index.get(OTHERS, {})

    def files_of(self, kind: str) -> set[str]:
        """The files that hold tensors of a kind."""
        tensors = (entry for key, entry in self.index["tensors"].items() if key.startswith(f"{kind}/"))
        return {chunk["file"] for entry in tensors for chunk in entry["chunks"]}

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Logical name -> shape of the tensors of one kind: prefix weight, exp_avg or exp_avg_sq."""
        start = f"{prefix}/"
        return {
            k.removeprefix(start): tuple(v["shape"]) for k, v in self.index["tensors"].items() if k.startswith(start)
        }

    def require(self, key: str, shape: Sequence[int]) -> None:
        """Raises UserError unless the whole tensor `key` is there. Reads no more than the heads of its files."""
        chunks = self.index["tensors"].get(key, {"chunks": ()})["chunks"]
        there = [chunk for chunk in chunks if self._slice(chunk["file"], key).get_shape() == chunk["shape"]]
        if sum(prod(chunk["shape"]) for chunk in there) != prod(shape):
            raise UserError(f"{self.path} lacks a part of {key}: it is damaged")

    def read(self, kind: str, name: str) -> Tensor:
        """A whole logical tensor, in the dtype it was saved in."""
        shape = self.index["tensors"][f"{kind}/{name}"]["shape"]
        return self.rectangle(f"{kind}/{name}", [0] * len(shape), shape)

    def read_range(self, kind: str, part: Part, first: int, last: int) -> Tensor:
        """Elements [first, last) of the flattened slice `part`. Reads no rows but those they lie in."""
        if not part.shape:
            return self.read(kind, part.name).reshape(1)
        row = prod(part.local[1:])
        top, bottom = first // row, -(-last // row)
        offset = [part.start if d == part.dim else 0 for d in range(len(part.shape))]
        offset[0] += top
        rows = self.rectangle(f"{kind}/{part.name}", offset, (bottom - top, *part.local[1:]))
        return rows.reshape(-1)[first - top * row : last - top * row]

    def rectangle(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """[*shape] of the tensor `key`, from `offset` on in each dim, put together from the chunks it lies in."""
        found: Tensor | None = None
        filled = 0
        for chunk in self.index["tensors"][key]["chunks"]:
            low = [max(a, b) for a, b in zip(offset, chunk["offset"], strict=True)]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(offset, shape, chunk["offset"], chunk["shape"], strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            piece = self._slice(chunk["file"], key)[
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk["offset"], strict=True))
            ]
            if list(piece.shape) == list(shape):
                return piece
            found = torch.empty(*shape, dtype=piece.dtype) if found is None else found
            found[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))] = piece
            filled += piece.numel()
        if found is None or filled != prod(shape):
            raise UserError(f"{self.path} lacks a part of {key}: it is damaged")
        return found

    def _slice(self, file: str, key: str) -> Any:
        kind, name = key.split("/", 1)
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.file(file), "pt")
            return self._open[file].get_slice(name if kind == "weight" else key)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path / file} is damaged: {error}") from error
