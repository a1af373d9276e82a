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
class HeadCopies:
    """The number of copies of each key/value head, and their order.

    heads: different key/value heads.
    grouped: the copies of a head lie together.
    """

    count: int
    heads: int
    grouped: bool

    def drop_copies(self, x: Tensor) -> Tensor | None:
        """Return rows of key/value heads, each head once; None if its copies differ."""
        copies = self._by_head(x)
        if same_values(copies, copies[:, :1].expand_as(copies)):
            return copies[:, 0].flatten(0, 1)
        return None

    def in_order(self, x: Tensor) -> Tensor:
        """Return rows of query heads, those of a key/value head together."""
        return self._by_head(x).flatten(0, 2)

    def _by_head(self, x: Tensor) -> Tensor:
        """Return [key/value heads, copies, rows of one, ...]."""
        if self.grouped:
            return x.unflatten(0, (self.heads, self.count, -1))
        return x.unflatten(0, (self.count, self.heads, -1)).transpose(0, 1)


def hugging_face(
    path: Path, shards_by_name: Mapping[str, Sequence[TensorSource]], model: ModelConfig
) -> dict[str, TensorSource]:
    """Return Hugging Face's names -> the whole tensors. shards_by_name: NxD's names -> the parts of
    the tensor-parallel ranks."""
    unfused: dict[str, Sequence[TensorSource]] = {}
    for name, shards in shards_by_name.items():
        for own_name, own_shards in _unfuse(path, name, shards, model).items():
            if own_name in unfused:
                raise UserError.of("convert.nxd_mixed", path=path, own_name=own_name, name=name)
            unfused[own_name] = own_shards
    merged = {name: _merge(path, name, shards, model) for name, shards in unfused.items()}
    copies = _find_copies(path, merged, model)
    if copies is None:
        return merged
    return {name: _without_copies(path, name, tensor, copies) for name, tensor in merged.items()}


def _unfuse(
    path: Path, name: str, shards: Sequence[TensorSource], model: ModelConfig
) -> dict[str, Sequence[TensorSource]]:
    """Return the tensors that NxD keeps as one, on each rank. UserError if ranks have it in several
    shapes."""
    gate_up = GATE_UP.fullmatch(name)
    qkv = QKV.fullmatch(name)
    if (gate_up or qkv) and len({shard.shape for shard in shards}) > 1:
        shapes = ", ".join(str(list(shard.shape)) for shard in shards)
        raise UserError.of("convert.megatron_shapes", path=path, foreign=name, shapes=shapes)
    rows = shards[0].shape[0]
    if gate_up:
        prefix, kind = gate_up.groups()
        _require_halves(path, name, rows)
        return _split_rows(shards, prefix, kind, {"gate": rows // 2, "up": rows // 2})
    if not qkv:
        return {name: shards}
    prefix, kind, part = qkv.groups()
    if part in ("q", "k", "v"):
        return {f"{prefix}{part}_proj.{kind}": shards}
    # Each rank has as many query heads; keys and values share what is left.
    query_rows = model.heads * model.head_dim // len(shards)
    kv_rows = (rows - query_rows) // 2
    if kv_rows < 1:
        raise UserError.of(
            "convert.nxd_rows", path=path, name=name, rows=rows, query_rows=query_rows
        )
    _require_halves(path, name, rows - query_rows)
    return _split_rows(shards, prefix, kind, {"q": query_rows, "k": kv_rows, "v": kv_rows})


def _split_rows(
    shards: Sequence[TensorSource], prefix: str, kind: str, rows: Mapping[str, int]
) -> dict[str, Sequence[TensorSource]]:
    """Return the projections that lie one below the other in each shard.

    prefix, kind: what is before and after a projection in names.
    rows: of each projection, in order.
    """
    projections: dict[str, Sequence[TensorSource]] = {}
    top = 0
    for projection, count in rows.items():
        bottom = top + count
        projections[f"{prefix}{projection}_proj.{kind}"] = [
            _rows(shard, top, bottom) for shard in shards
        ]
        top = bottom
    return projections


def _require_halves(path: Path, name: str, rows: int) -> None:
    """Raise UserError unless rows are those of two parts of one size: half of one row would belong
    to none."""
    if rows % 2:
        raise UserError.of("convert.nxd_halves", path=path, name=name, rows=rows)


def _rows(tensor: TensorSource, top: int, bottom: int) -> MergedTensor:
    """Return rows [top, bottom) of a tensor."""

    def read() -> Tensor:
        if isinstance(tensor, Stored):
            return tensor.rows(top, bottom)
        return tensor.read()[top:bottom]

    return MergedTensor((bottom - top, *tensor.shape[1:]), tensor.dtype, read)


def _merge(
    path: Path, name: str, shards: Sequence[TensorSource], model: ModelConfig
) -> TensorSource:
    """Return the ranks' parts put together."""
    if len(shards) == 1 or not (ROWS.fullmatch(name) or COLUMNS.fullmatch(name)):
        return checked_copy(path, name, shards)
    # shard_across_embedding
    cuts_features = "embed_tokens" in name and shards[0].shape[-1] != model.hidden
    dim = 1 if cuts_features or COLUMNS.fullmatch(name) else 0
    other_sizes = {
        (len(shard.shape), *shard.shape[:dim], *shard.shape[dim + 1 :], shard.dtype)
        for shard in shards
    }
    if len(other_sizes) > 1 or len(shards[0].shape) <= dim:
        raise UserError.of("convert.nxd_parts", path=path, name=name)
    shape = list(shards[0].shape)
    shape[dim] = sum(shard.shape[dim] for shard in shards)

    def read() -> Tensor:
        return torch.cat([shard.read() for shard in shards], dim)

    return MergedTensor(tuple(shape), shards[0].dtype, read)


def _find_copies(
    path: Path, tensors: Mapping[str, TensorSource], model: ModelConfig
) -> HeadCopies | None:
    """Return how the key/value heads are repeated; None if each occurs once. Raises UserError if
    that cannot be recognized.
    """
    key = tensors.get("model.layers.0.self_attn.k_proj.weight")
    rows = model.kv_heads * model.head_dim
    # With as many heads as there must be nothing is repeated; `check_tensors` speaks of others.
    if key is None or key.shape[0] <= rows or key.shape[0] % rows:
        return None
    if model.heads % (key.shape[0] // model.head_dim):
        return None
    count = key.shape[0] // rows
    # The first layer's keys tell the order of copies; all other tensors are checked as they are
    # read.
    values = key.read()
    orders = [HeadCopies(count, model.kv_heads, grouped) for grouped in (False, True)]
    fitting = [order for order in orders if order.drop_copies(values) is not None]
    if not fitting:
        raise UserError.of("convert.nxd_copies_differ", path=path, count=count)
    if len(fitting) > 1 and model.kv_heads > 1:
        raise UserError.of("convert.nxd_copies_order", path=path)
    return fitting[0]


def _without_copies(
    path: Path, name: str, tensor: TensorSource, copies: HeadCopies
) -> TensorSource:
    """Return the tensor with each key/value head once, and the heads of the others in their
    order."""

    def read_once() -> Tensor:
        values = copies.drop_copies(tensor.read())
        if values is None:
            raise UserError.of("convert.nxd_head_copies", path=path, name=name)
        return values

    def read_query() -> Tensor:
        return copies.in_order(tensor.read())

    def read_output() -> Tensor:
        return copies.in_order(tensor.read().t()).t()

    shape = tensor.shape
    if KEY_VALUE.fullmatch(name):
        return MergedTensor((shape[0] // copies.count, *shape[1:]), tensor.dtype, read_once)
    if QUERY.fullmatch(name):
        return MergedTensor(shape, tensor.dtype, read_query)
    if OUTPUT.fullmatch(name):
        return MergedTensor(shape, tensor.dtype, read_output)
    return tensor
