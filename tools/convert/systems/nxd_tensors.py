"""NxD's tensors under the names and in the shapes that they have in Hugging Face.

NxD's layers cut tensors over tensor-parallel ranks, and fuse some of them on each rank: gate and up
(gate_up_proj), query, key and value (qkv_proj). With fewer key/value heads than ranks, heads are
there several times (kv_size_multiplier), in one of two orders (modules/qkv_linear.py,
scripts/checkpoint_converter.py):

    repeated    K0 K1 K2 K3  K0 K1 K2 K3    and the queries of K0 lie with each K0
    grouped     K0 K0 K1 K1  K2 K2 K3 K3    and the queries are as they were

Which it is, the values of the first layer's keys tell; every tensor is then held against it when it
is read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.finite import same_values
from tools.convert.core.tensors import Stored
from tools.convert.megatron.ranks import MergedTensor, TensorSource, checked_copy

QKV = re.compile(r"(.*\.self_attn\.)qkv_proj\.(weight|bias)(?:_(q|k|v|qkv))?")
GATE_UP = re.compile(r"(.*\.)gate_up_proj\.(weight|bias)")
ROWS = re.compile(
    r".*\.(?:[qkv]|gate|up)_proj\.(?:weight|bias)|.*\bembed_tokens\.weight|.*\blm_head\.weight"
)
COLUMNS = re.compile(r".*\.(?:o|down)_proj\.weight")
KEY_VALUE = re.compile(r".*\.self_attn\.[kv]_proj\.(?:weight|bias)")
QUERY = re.compile(r".*\.self_attn\.q_proj\.(?:weight|bias)")
OUTPUT = re.compile(r".*\.self_attn\.o_proj\.weight")


@dataclass(frozen=True)
class Copies:
    """The number of copies of each key/value head, and their order."""

    count: int
    heads: int
    grouped: bool

    def once(self, x: Tensor) -> Tensor | None:
        """Rows of key/value heads, each head once; None if its copies differ."""
        copies = self._apart(x)
        if same_values(copies, copies[:, :1].expand_as(copies)):
            return copies[:, 0].flatten(0, 1)
        return None

    def in_order(self, x: Tensor) -> Tensor:
        """Rows of query heads, those of a key/value head together."""
        return self._apart(x).flatten(0, 2)

    def _apart(self, x: Tensor) -> Tensor:
        """[key/value heads, copies, rows of one, ...]."""
        if self.grouped:
            return x.unflatten(0, (self.heads, self.count, -1))
        return x.unflatten(0, (self.count, self.heads, -1)).transpose(0, 1)


def hugging_face(
    path: Path, by_name: Mapping[str, Sequence[TensorSource]], model: ModelConfig
) -> dict[str, TensorSource]:
    """Hugging Face's names -> the whole tensors. by_name: NxD's names -> the parts of the
    tensor-parallel ranks."""
    pieces: dict[str, Sequence[TensorSource]] = {}
    for name, parts in by_name.items():
        for own, held in _unfused(path, name, parts, model).items():
            if own in pieces:
                raise UserError(f"{path} has {own} alone and in {name}")
            pieces[own] = held
    wholes = {name: _joined(path, name, parts, model) for name, parts in pieces.items()}
    copies = _copies(path, wholes, model)
    if copies is None:
        return wholes
    return {name: _single(path, name, held, copies) for name, held in wholes.items()}


def _unfused(
    path: Path, name: str, parts: Sequence[TensorSource], model: ModelConfig
) -> dict[str, Sequence[TensorSource]]:
    """The tensors that NxD keeps as one, on each rank. UserError if ranks have it in several
    shapes."""
    if (GATE_UP.fullmatch(name) or QKV.fullmatch(name)) and len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise UserError(
            f"{path}: {name} is {shapes} on the tensor-parallel ranks, which do not fit each other"
        )
    if match := GATE_UP.fullmatch(name):
        _require_halves(path, name, parts[0].shape[0])
        half = parts[0].shape[0] // 2
        cuts = {"gate": (0, half), "up": (half, 2 * half)}
        return {
            f"{match[1]}{part}_proj.{match[2]}": [_rows(p, *at) for p in parts]
            for part, at in cuts.items()
        }
    if not (match := QKV.fullmatch(name)):
        return {name: parts}
    if match[3] in ("q", "k", "v"):
        return {f"{match[1]}{match[3]}_proj.{match[2]}": parts}
    query = model.heads * model.head_dim // len(parts)
    rest = (parts[0].shape[0] - query) // 2
    if rest < 1:
        raise UserError(
            f"{path}: {name} has {parts[0].shape[0]} rows on a rank, and config.json asks for "
            f"{query} queries alone"
        )
    _require_halves(path, name, parts[0].shape[0] - query)
    cuts = {"q": (0, query), "k": (query, query + rest), "v": (query + rest, query + 2 * rest)}
    return {
        f"{match[1]}{part}_proj.{match[2]}": [_rows(p, *at) for p in parts]
        for part, at in cuts.items()
    }


def _require_halves(path: Path, name: str, rows: int) -> None:
    """Raise UserError unless rows are those of two parts of one size: half of one row would belong
    to none."""
    if rows % 2:
        raise UserError(f"{path}: {name} leaves {rows} rows on a rank for two parts of one size")


def _rows(held: TensorSource, top: int, bottom: int) -> MergedTensor:
    def read() -> Tensor:
        if isinstance(held, Stored):
            return held.rows(top, bottom)
        return held.read()[top:bottom]

    return MergedTensor((bottom - top, *held.shape[1:]), held.dtype, read)


def _joined(
    path: Path, name: str, parts: Sequence[TensorSource], model: ModelConfig
) -> TensorSource:
    """The ranks' parts put together."""
    if len(parts) == 1 or not (ROWS.fullmatch(name) or COLUMNS.fullmatch(name)):
        return checked_copy(path, name, parts)
    across = "embed_tokens" in name and parts[0].shape[-1] != model.hidden  # shard_across_embedding
    dim = 1 if across or COLUMNS.fullmatch(name) else 0
    others = {(len(p.shape), *p.shape[:dim], *p.shape[dim + 1 :], p.dtype) for p in parts}
    if len(others) > 1 or len(parts[0].shape) <= dim:
        raise UserError(f"{path}: the parts of {name} on the ranks do not fit each other")
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return MergedTensor(
        tuple(shape), parts[0].dtype, lambda: torch.cat([part.read() for part in parts], dim)
    )


def _copies(path: Path, wholes: Mapping[str, TensorSource], model: ModelConfig) -> Copies | None:
    """Return how the key/value heads are repeated; None if each occurs once. Raises UserError if
    that cannot be recognized.
    """
    key = wholes.get("model.layers.0.self_attn.k_proj.weight")
    rows = model.kv_heads * model.head_dim
    if (
        key is None
        or key.shape[0] <= rows
        or key.shape[0] % rows
        or model.heads % (key.shape[0] // model.head_dim)
    ):
        return None  # as many as there must be, or for `check_tensors` to speak of
    count = key.shape[0] // rows
    values = key.read()
    fits = [
        c
        for grouped in (False, True)
        if (c := Copies(count, model.kv_heads, grouped)).once(values) is not None
    ]
    if not fits:
        raise UserError(
            f"{path}: the {count} copies of a key head (kv_size_multiplier) differ in the "
            "first layer"
        )
    if len(fits) > 1 and model.kv_heads > 1:
        raise UserError(
            f"{path}: key heads of the first layer are equal, so the order of their copies "
            "cannot be told"
        )
    return fits[0]


def _single(path: Path, name: str, held: TensorSource, copies: Copies) -> TensorSource:
    """The tensor with each key/value head once, and the heads of the others in their order."""

    def once() -> Tensor:
        values = copies.once(held.read())
        if values is None:
            raise UserError(f"{path}: the copies of a head (kv_size_multiplier) differ in {name}")
        return values

    if KEY_VALUE.fullmatch(name):
        return MergedTensor((held.shape[0] // copies.count, *held.shape[1:]), held.dtype, once)
    if QUERY.fullmatch(name):
        return MergedTensor(held.shape, held.dtype, lambda: copies.in_order(held.read()))
    if OUTPUT.fullmatch(name):
        return MergedTensor(held.shape, held.dtype, lambda: copies.in_order(held.read().t()).t())
    return held
