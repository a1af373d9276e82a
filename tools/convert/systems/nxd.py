"""Reading checkpoints of NxD (neuronx-distributed), and what its own converter makes of them.

    100/checkpoint, 100/done                       mark the folder, and that it is whole
    100/model/dp_rank_00_tp_rank_00_pp_rank_00.pt  a rank
    ..._pp_rank_00.pt.tensors/tensor_7.pt          with use_xser: tensors each in a file of its own
    tp_rank_00_pp_rank_00/checkpoint.pt            as older versions save it
    checkpoint.pt                                  what NxD's converter makes of the ranks' files
                                                   (--convert_to_full_state)

Tensors have the names that they have in Hugging Face, layers are numbered over all stages
(trainer/checkpoint.py). A checkpoint does not say what the model is: the Hugging Face config.json
that the model was made of has to be in its folder or in the one above. No pickle is opened in this
process (`tools.convert.core.untrusted`).

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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megaprec.errors import UserError
from megaprec.parsing import read_json
from models.config import ModelConfig
from tools.convert.core.finite import same_values
from tools.convert.core.names import BUFFERS, HUGGING_FACE
from tools.convert.core.rules import Cut, matches
from tools.convert.core.shards import (
    MergedTensor,
    ShardPart,
    TensorSource,
    collect_shards,
    count_ranks,
    file_of_each_rank,
    join_shards,
    notes_on_copies,
    unlike_shapes,
)
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import FileReference, contents, state_in
from tools.convert.hf.config import from_hugging_face, special_ids
from tools.convert.hf.families import FAMILIES
from tools.convert.hf.folder import (
    CONFIG,
    check_tensors,
    check_tied,
    has_weights,
    hf_tokenizer,
    origins_of,
    read_generation,
)
from tools.convert.hf.notes import notes

FILE = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
OLD = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")
EXPERTS = re.compile(r"dp_rank_\d+_ep_rank_\d+_tp_rank_\d+_pp_rank_\d+\.pt")
MERGED = "checkpoint.pt"
EXPORT = "NxD's scripts/checkpoint_converter.py --convert_to_full_state puts it together"
# Keys that NxD's own models add to config.json: how layers are cut, fused and computed, which is
# seen from the tensors.
OWN_KEYS = {
    "fuse_qkv",
    "kv_shared_group_size",
    "move_model_to_device",
    "qkv_linear",
    "selective_checkpoint_enabled",
    "separate_qkv",
    "sequence_parallel_enabled",
    "transpose_nki_inputs",
    "use_flash_attention",
}


class ModelRank(NamedTuple):
    """The numbers of a rank along tensor and pipeline parallelism."""

    tp: int
    pp: int


def find_nxd(path: Path) -> Path | None:
    """Return the checkpoint's folder: `path`, the one above if it is a `model` folder, or the only
    whole one in it."""
    if path.name == "model" and _has_ranks(path):
        return path.parent
    # beside Hugging Face's weights it is some other file
    merged = (path / MERGED).is_file() and not has_weights(path)
    if merged or _has_ranks(path / "model") or _has_ranks(path):
        return path
    candidates = _checkpoints_of_run(path)
    # One that was interrupted is left out, unless there is no other.
    complete = [candidate for candidate in candidates if (candidate / "done").is_file()]
    if len(complete) > 1:
        names = ", ".join(candidate.name for candidate in complete)
        raise UserError.of("convert.nxd_several", path=path, names=names)
    return next(iter(complete or candidates), None)


def _checkpoints_of_run(path: Path) -> list[Path]:
    """Return the folders of checkpoints in the folder of a run, whole or not."""
    return [
        folder
        for folder in sorted(path.iterdir())
        if (folder / "checkpoint").is_file() and _has_ranks(folder / "model")
    ]


def _has_ranks(folder: Path) -> bool:
    """Return True if a folder has files of ranks."""
    if not folder.is_dir():
        return False
    names = [file.name for file in folder.iterdir()]
    candidates = product((FILE, OLD, EXPERTS), names)
    return any(pattern.fullmatch(file_name) for pattern, file_name in candidates)


def open_nxd(checkpoint: Path) -> Source:
    """Open a checkpoint's folder. UserError for what is missing, surplus or not known."""
    # NxD writes the first file before it saves, and the second after.
    if (checkpoint / "checkpoint").is_file() and not (checkpoint / "done").is_file():
        raise UserError.of("convert.nxd_not_whole", path=checkpoint, last_file=checkpoint / "done")
    config_file, config = _read_config(checkpoint)
    model, model_type = _model_of(config_file, config)
    rank_files = _find_files(checkpoint)
    tensors_by_rank, unread_keys = _read_tensors(rank_files)
    tensor_ranks, pipeline_ranks = count_ranks(tensors_by_rank)
    ranks = []
    for model_rank, tensors in tensors_by_rank.items():
        ranks.append((partial(_part_of, model_rank, tensor_ranks), tensors))
    weights = hugging_face(checkpoint, collect_shards(checkpoint, ranks), model)
    expected = matches(HUGGING_FACE[model_type], model)
    check_tied(checkpoint, model, weights, expected)
    check_tensors(checkpoint, expected, weights)
    chunks = {model_rank: [tensors] for model_rank, tensors in tensors_by_rank.items()}
    # The model is read without modules of multi-token prediction.
    architecture = FAMILIES[model_type].architecture
    config_notes = notes(config, architecture, has_modules=False)
    facts = Facts(
        layout={"tensor": tensor_ranks, "pipeline": pipeline_ranks},
        unread=_unread(checkpoint, unread_keys),
        special=special_ids(config),
        generation=read_generation(config_file.parent),
        notes=(
            *(f"{config_file}: {note}" for note in config_notes),
            *notes_on_copies(checkpoint, chunks),
        ),
    )
    origins = origins_of(expected, weights, model)
    tokenizer = hf_tokenizer(checkpoint) or hf_tokenizer(config_file.parent)
    return Source(checkpoint, "nxd", model, origins, facts, tokenizer)


def _part_of(model_rank: ModelRank, tensor_ranks: int, tensor_name: str) -> ShardPart:
    """Return which part of any tensor a rank has. tensor_ranks: tensor-parallel ranks."""
    return ShardPart(model_rank.tp, tensor_ranks)


def _read_config(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """Return the config.json of the model, and what it says but for NxD's own keys."""
    # NxD saves none; people keep one beside a checkpoint, or one for all of a run.
    for file in (checkpoint / CONFIG, checkpoint.parent / CONFIG):
        if file.is_file():
            config = read_json(file)
            return file, {key: value for key, value in config.items() if key not in OWN_KEYS}
    raise UserError.of("convert.nxd_config_missing", path=checkpoint / CONFIG)


def _model_of(config_file: Path, config: dict[str, Any]) -> tuple[ModelConfig, str]:
    """Return the model of config.json, and its model_type."""
    # Quantized layers hold codes under the usual names, and scales beside them
    # (quantization/quantization_layers.py).
    if config.get("quantization_config") is not None:
        raise UserError.of("convert.nxd_quantized", file=config_file)
    try:
        return from_hugging_face(config).without_mtp, config["model_type"]
    except UserError as error:
        raise UserError(
            *(problem.within(f"{config_file}: ") for problem in error.problems)
        ) from error


def _find_files(checkpoint: Path) -> dict[ModelRank, Path]:
    """Return the file of each rank. UserError if one is missing."""
    folder = checkpoint / "model" if _has_ranks(checkpoint / "model") else checkpoint
    if folder == checkpoint and not _has_ranks(checkpoint):
        return {ModelRank(0, 0): checkpoint / MERGED}
    # Nothing says which of the two is the newer.
    if (checkpoint / MERGED).is_file():
        raise UserError.of("convert.nxd_two_kinds", path=checkpoint, merged=MERGED)
    names = sorted(file.name for file in folder.iterdir())
    _refuse_experts(folder, names)
    new = _new_files(folder, names)
    old = _old_files(folder, names)
    if new and old:
        raise UserError.of("convert.nxd_versions", folder=folder)
    rank_files = new or old
    _require_all_ranks(folder, rank_files, _ranks_of_optimizer(checkpoint), bool(old))
    return rank_files


def _require_all_ranks(
    folder: Path, rank_files: Mapping[ModelRank, Path], others: Sequence[ModelRank], old: bool
) -> None:
    """Raise UserError if a rank has no file.

    others: ranks that other files tell of.
    old: files have the names of older versions.
    """
    ranks = [*rank_files, *others]
    tp_size, pp_size = count_ranks(ranks)
    for tp, pp in product(range(tp_size), range(pp_size)):
        file_name = f"tp_rank_{tp:02d}_pp_rank_{pp:02d}"
        usual = folder / (file_name if old else f"dp_rank_00_{file_name}.pt")
        rank_file = rank_files.get(ModelRank(tp, pp), usual)
        if not rank_file.is_file():
            raise UserError.of("convert.megatron_folder_missing", file=rank_file)


def _refuse_experts(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError for a file with the experts of a rank."""
    for file_name in names:
        if EXPERTS.fullmatch(file_name):
            raise UserError.of("convert.nxd_experts", folder=folder / file_name, export=EXPORT)


def _new_files(folder: Path, names: Sequence[str]) -> dict[ModelRank, Path]:
    """Return the files of the first data-parallel rank, which have the others' values."""
    ranks = {}
    for file_name in names:
        match = FILE.fullmatch(file_name)
        # Data-parallel ranks hold the same weights.
        if match and int(match[1]) == 0:
            ranks[file_name] = ModelRank(int(match[2]), int(match[3]))
    return file_of_each_rank(folder, ranks)


def _old_files(folder: Path, names: Sequence[str]) -> dict[ModelRank, Path]:
    """Return the files of ranks as older versions save them, mostly each in a folder of its own."""
    ranks = {}
    for file_name in names:
        if match := OLD.fullmatch(file_name):
            ranks[file_name] = ModelRank(int(match[1]), int(match[2]))
    files = {}
    for model_rank, rank_file in file_of_each_rank(folder, ranks).items():
        files[model_rank] = rank_file / MERGED if rank_file.is_dir() else rank_file
    return files


def _ranks_of_optimizer(checkpoint: Path) -> list[ModelRank]:
    """Return the ranks of the files beside the model's, which tell how many ranks there were."""
    folder = checkpoint / "optim"
    if not folder.is_dir():
        return []
    ranks = []
    for file in folder.iterdir():
        if match := FILE.fullmatch(file.name):
            ranks.append(ModelRank(int(match[2]), int(match[3])))
    return ranks


def _read_tensors(
    rank_files: Mapping[ModelRank, Path],
) -> tuple[dict[ModelRank, dict[str, Stored]], list[str]]:
    """Return the tensors of each rank by name; and the keys of what the files hold besides."""
    tensors: dict[ModelRank, dict[str, Stored]] = {}
    unread_keys: set[str] = set()
    # All files at once: starting the process that opens pickles takes seconds.
    loaded = contents(list(rank_files.values()))
    for (model_rank, rank_file), content in zip(rank_files.items(), loaded, strict=True):
        if not isinstance(content, dict):
            raise UserError.of("convert.not_a_state", file=rank_file)
        state = content
        # Older versions and the converter have a dict around the state.
        if isinstance(content.get("model"), dict):
            state = content["model"]
            unread_keys |= {str(key) for key in content if key != "model"}
        resolved = _resolve(rank_file, state)
        tensors[model_rank] = {
            name: stored for name, stored in resolved.items() if not name.endswith(BUFFERS)
        }
    return tensors, sorted(unread_keys)


def _resolve(rank_file: Path, state: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a file, those included that lie in files of their own."""
    state = state_in(rank_file, state, with_references=True)
    folder = rank_file.with_name(f"{rank_file.name}.tensors")
    files = {}
    for tensor_name, value in state.items():
        if isinstance(value, FileReference):
            files[tensor_name] = folder / f"tensor_{value.number}.pt"
    for tensor_file in files.values():
        if not tensor_file.is_file():
            raise UserError.of("convert.nxd_file_missing", tensor_file=tensor_file)
    resolved = dict(state)
    if files:
        values = contents(list(files.values()))
        resolved.update(zip(files, values, strict=True))
    # What lies in a file of its own has to be a tensor too.
    return state_in(rank_file, resolved)


def _unread(checkpoint: Path, unread_keys: Sequence[str]) -> str:
    """Return the files that are ignored: those beside the weights."""
    unread = []
    if (checkpoint / "optim").is_dir():
        unread.append("the optimizer's state (optim/)")
    for file_name in ("scheduler.pt", "user_content.pt"):
        if (checkpoint / file_name).is_file():
            unread.append(file_name)
    return ", ".join([*unread, *unread_keys])


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

    def drop_copies(self, values: Tensor) -> Tensor | None:
        """Return rows of key/value heads, each head once; None if its copies differ."""
        copies = self._by_head(values)
        if same_values(copies, copies[:, :1].expand_as(copies)):
            return copies[:, 0].flatten(0, 1)
        return None

    def in_order(self, values: Tensor) -> Tensor:
        """Return rows of query heads, those of a key/value head together."""
        return self._by_head(values).flatten(0, 2)

    def _by_head(self, values: Tensor) -> Tensor:
        """Return [key/value heads, copies, rows of one, ...]."""
        if self.grouped:
            return values.unflatten(0, (self.heads, self.count, -1))
        repeated = values.unflatten(0, (self.count, self.heads, -1))
        return repeated.transpose(0, 1)


def hugging_face(
    checkpoint: Path, shards_by_name: Mapping[str, Sequence[TensorSource]], model: ModelConfig
) -> dict[str, TensorSource]:
    """Return Hugging Face's names -> the whole tensors. shards_by_name: NxD's names -> the parts of
    the tensor-parallel ranks."""
    unfused: dict[str, Sequence[TensorSource]] = {}
    for tensor_name, shards in shards_by_name.items():
        projections = _unfuse(checkpoint, tensor_name, shards, model)
        for projection_name, own_shards in projections.items():
            # A projection in a fused tensor and apart: nothing says which of the two counts.
            if projection_name in unfused:
                raise UserError.of(
                    "convert.nxd_mixed",
                    path=checkpoint,
                    own_name=projection_name,
                    name=tensor_name,
                )
            unfused[projection_name] = own_shards
    merged = {}
    for tensor_name, shards in unfused.items():
        merged[tensor_name] = _merge(checkpoint, tensor_name, shards, model)
    copies = _find_copies(checkpoint, merged, model)
    if copies is None:
        return merged
    deduplicated = {}
    for tensor_name, tensor in merged.items():
        deduplicated[tensor_name] = _without_copies(checkpoint, tensor_name, tensor, copies)
    return deduplicated


def _unfuse(
    checkpoint: Path, tensor_name: str, shards: Sequence[TensorSource], model: ModelConfig
) -> dict[str, Sequence[TensorSource]]:
    """Return the tensors that NxD keeps as one, on each rank. UserError if ranks have it in several
    shapes."""
    # fuse_qkv, and the fused layers of its own models.
    gate_up = GATE_UP.fullmatch(tensor_name)
    qkv = QKV.fullmatch(tensor_name)
    if (gate_up or qkv) and len({shard.shape for shard in shards}) > 1:
        raise unlike_shapes(checkpoint, tensor_name, shards)
    rows = shards[0].shape[0]
    if gate_up:
        prefix, suffix = gate_up.groups()
        _require_halves(checkpoint, tensor_name, rows)
        return _split_rows(shards, prefix, suffix, {"gate": rows // 2, "up": rows // 2})
    if not qkv:
        return {tensor_name: shards}
    prefix, suffix, projection = qkv.groups()
    # Without fuse_qkv one module has the three as parameters of their own.
    if projection in ("q", "k", "v"):
        return {f"{prefix}{projection}_proj.{suffix}": shards}
    # Each rank has as many query heads; keys and values share what is left.
    query_rows = model.heads * model.head_dim // len(shards)
    kv_rows = (rows - query_rows) // 2
    if kv_rows < 1:
        raise UserError.of(
            "convert.nxd_rows", path=checkpoint, name=tensor_name, rows=rows, query_rows=query_rows
        )
    _require_halves(checkpoint, tensor_name, rows - query_rows)
    return _split_rows(shards, prefix, suffix, {"q": query_rows, "k": kv_rows, "v": kv_rows})


def _split_rows(
    shards: Sequence[TensorSource], prefix: str, suffix: str, rows: Mapping[str, int]
) -> dict[str, Sequence[TensorSource]]:
    """Return the projections that lie one below the other in each shard.

    prefix, suffix: what is before and after a projection in names.
    rows: of each projection, in order.
    """
    projections: dict[str, Sequence[TensorSource]] = {}
    top = 0
    for projection, count in rows.items():
        bottom = top + count
        name = f"{prefix}{projection}_proj.{suffix}"
        projections[name] = [_rows(shard, top, bottom) for shard in shards]
        top = bottom
    return projections


def _require_halves(checkpoint: Path, tensor_name: str, rows: int) -> None:
    """Raise UserError unless rows are those of two parts of one size: half of one row would belong
    to none."""
    if rows % 2:
        raise UserError.of("convert.nxd_halves", path=checkpoint, name=tensor_name, rows=rows)


def _rows(tensor: TensorSource, top: int, bottom: int) -> MergedTensor:
    """Return rows [top, bottom) of a tensor."""

    def read() -> Tensor:
        # A stored tensor is read by rows; a merged one would be made whole for each part.
        if isinstance(tensor, Stored):
            return tensor.rows(top, bottom)
        return tensor.read()[top:bottom]

    return MergedTensor((bottom - top, *tensor.shape[1:]), tensor.dtype, read)


def _merge(
    checkpoint: Path, tensor_name: str, shards: Sequence[TensorSource], model: ModelConfig
) -> TensorSource:
    """Return the ranks' parts put together."""
    # NxD's shard_across_embedding cuts the features of the embedding, not its vocabulary.
    cuts_features = "embed_tokens" in tensor_name and shards[0].shape[-1] != model.hidden
    cut: Cut = "whole"  # as norms and biases of closing layers are on every rank
    if COLUMNS.fullmatch(tensor_name) or cuts_features:
        cut = "columns"
    elif ROWS.fullmatch(tensor_name):
        cut = "rows"
    return join_shards(checkpoint, tensor_name, shards, cut)


def _find_copies(
    checkpoint: Path, tensors: Mapping[str, TensorSource], model: ModelConfig
) -> HeadCopies | None:
    """Return how the key/value heads are repeated; None if each occurs once. Raises UserError if
    that cannot be recognized.
    """
    key = tensors.get("model.layers.0.self_attn.k_proj.weight")
    rows = model.kv_heads * model.head_dim
    # With as many heads as there must be nothing is repeated; `check_tensors` speaks of others.
    if key is None or key.shape[0] <= rows or key.shape[0] % rows:
        return None
    # With their copies, too, key/value heads must share the queries evenly.
    if model.heads % (key.shape[0] // model.head_dim):
        return None
    count = key.shape[0] // rows
    # The first layer's keys tell the order of copies; all other tensors are checked as they are
    # read.
    values = key.read()
    orders = [HeadCopies(count, model.kv_heads, grouped) for grouped in (False, True)]
    fitting = [order for order in orders if order.drop_copies(values) is not None]
    if not fitting:
        raise UserError.of("convert.nxd_copies_differ", path=checkpoint, count=count)
    # All heads alike fit both orders; with one head the orders are one.
    if len(fitting) > 1 and model.kv_heads > 1:
        raise UserError.of("convert.nxd_copies_order", path=checkpoint)
    return fitting[0]


def _without_copies(
    checkpoint: Path, tensor_name: str, tensor: TensorSource, copies: HeadCopies
) -> TensorSource:
    """Return the tensor with each key/value head once, and the heads of the others in their
    order."""

    def read_once() -> Tensor:
        values = copies.drop_copies(tensor.read())
        if values is None:
            raise UserError.of("convert.nxd_head_copies", path=checkpoint, name=tensor_name)
        return values

    def read_query() -> Tensor:
        return copies.in_order(tensor.read())

    def read_output() -> Tensor:
        return copies.in_order(tensor.read().t()).t()

    shape = tensor.shape
    if KEY_VALUE.fullmatch(tensor_name):
        shape_once = (shape[0] // copies.count, *shape[1:])
        return MergedTensor(shape_once, tensor.dtype, read_once)
    if QUERY.fullmatch(tensor_name):
        return MergedTensor(shape, tensor.dtype, read_query)
    if OUTPUT.fullmatch(tensor_name):
        return MergedTensor(shape, tensor.dtype, read_output)
    return tensor
