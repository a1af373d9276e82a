"""Reading InternEvo's checkpoints: a file of each rank, and what the model is in model_config.pt.

    model_tp0_pp0.pt          a rank along tensor and pipeline parallelism
    model_wp0_pp0.pt          weight parallelism: rows of every layer over wp
    model_tp0_wp0_pp0.pt      the same in older versions, where embedding and head are cut over tp

Layers are numbered within a stage; with num_chunks > 1 a file has stages one after another,
0.model.blocks.0, ... The bias of a layer whose columns are cut is in the first rank's file alone
(internlm/checkpoint/components.py, internlm/model/ops/linear.py). No pickle is opened in this
process (`tools.convert.core.untrusted`).

The dict `model = dict(...)` is read completely: a key describes the model, or is known not to
change what the weights compute, or is refused. Keys that the dict omits get the values of
InternEvo's builder (modeling_internlm.py:build_model_with_cfg), with a note. The feed-forward and
the biases are recognized by the tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.errors import Problem, UserError
from megaprec.kinds import is_number
from models.config import ModelConfig
from tools.convert.core.names import BUFFERS, internevo
from tools.convert.core.rules import matches
from tools.convert.core.shards import (
    ShardPart,
    TensorSource,
    collect_shards,
    count_ranks,
    file_of_each_rank,
    merge_shards,
    notes_on_copies,
    number_over_stages,
)
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents, state_in
from tools.convert.hf.folder import check_tensors, hf_tokenizer, origins_of
from tools.saved.model_fields import make_model, problems_of_keys

CONFIG = "model_config.pt"
FILE = re.compile(r"model_(?:tp(\d+)_)?(?:wp(\d+)_)?pp(\d+)\.pt")
RANK = re.compile(r"(?:model|topo|optimizer)_(?:tp(\d+)_)?(?:wp(\d+)_)?pp(\d+)(?:_\w+)?\.\w+")
SHARDED = re.compile(r"model_tp\d+_pp\d+_(?:dp|zo)\d+\.pt")
EXPERT = re.compile(r"model_moe_layer\d+_expert\d+_\w+\.pt")
LAYER = re.compile(r"^(blocks\.)(\d+)(\..*)$")
CHUNK = re.compile(r"(\d+)\.(?:model\.)?(.*)")
LONE = (".out_proj.bias",)  # ends of names that only the first rank has
UNREAD_FILES = ("schedulder.pt", "context.pt", "config_file.pt")  # the first is spelled so
EXPORT = "InternEvo's transformers/convert2hf_internlm.py makes a Hugging Face folder of it"


Chunks = list[dict[str, Stored]]  # of a rank: tensors by name


class RankAxes(NamedTuple):
    """A number along each axis: where a rank is, or how many ranks there are. tp, wp: 0, or 1,
    where files do not name them."""

    tp: int
    wp: int
    pp: int


@dataclass(frozen=True)
class InternEvoRankFiles:
    """The ranks' tensors.

    chunks: of each rank, the tensors of each of its chunks.
    sizes: how many ranks there are along each axis.
    weight_parallel: files name ranks along weight parallelism.
    """

    path: Path
    chunks: Mapping[RankAxes, Chunks]
    sizes: RankAxes
    weight_parallel: bool


def find_internevo(path: Path) -> Path | None:
    """Return `path` if it has files of InternEvo's ranks."""
    return path if any(_is_rank_file(file.name) for file in path.iterdir()) else None


def _is_rank_file(file_name: str) -> bool:
    return any(pattern.fullmatch(file_name) for pattern in (FILE, SHARDED, EXPERT))


def open_internevo(checkpoint: Path) -> Source:
    """Open the folder of a step. UserError for what is missing, surplus or not known."""
    _refuse_unread_kinds(checkpoint)
    rank_files = _read_ranks(checkpoint)
    config = _read_config(checkpoint / CONFIG)
    shards_by_name = _shards_over_all(rank_files)
    mlp, ffn = _feed_forward(checkpoint, shards_by_name)
    # What the dict does not say, the tensors do: gates, widths and biases.
    gated = "gate" in mlp.values()
    biased = "blocks.0.mixer.Wqkv.bias" in shards_by_name
    model, note = model_of(config, gated, ffn, biased, origin=str(checkpoint / CONFIG))
    first_chunks = next(iter(rank_files.chunks.values()))
    num_chunks = len(first_chunks)
    if config.get("num_chunks", num_chunks) != num_chunks:
        raise UserError.of(
            "convert.internevo_chunks",
            path=checkpoint / CONFIG,
            num_chunks=config["num_chunks"],
            chunks=num_chunks,
        )
    split_hidden = _split_hidden(shards_by_name, model.hidden)
    rules = internevo(mlp, split_hidden, rank_files.weight_parallel)
    expected = matches(rules, model)
    weights = merge_shards(checkpoint, expected, shards_by_name)
    check_tensors(checkpoint, expected, weights)
    layout = {"tensor": rank_files.sizes.tp, "pipeline": rank_files.sizes.pp}
    if rank_files.weight_parallel:
        layout["weight"] = rank_files.sizes.wp
    notes = [note] if note else []
    notes += notes_on_copies(checkpoint, _distinct_ranks(rank_files))
    facts = Facts(layout=layout, unread=_unread(checkpoint), notes=tuple(notes))
    origins = origins_of(expected, weights, model)
    return Source(checkpoint, "internevo", model, origins, facts, hf_tokenizer(checkpoint))


def _refuse_unread_kinds(checkpoint: Path) -> None:
    """Raise UserError for files of ranks that hold something else than whole layers."""
    unread = ((SHARDED, "a part of each parameter (zero1.fsdp)"), (EXPERT, "experts"))
    for pattern, content in unread:
        for file in sorted(checkpoint.iterdir()):
            if pattern.fullmatch(file.name):
                raise UserError.of(
                    "convert.internevo_kinds", path=checkpoint / file.name, content=content
                )


def _read_ranks(checkpoint: Path) -> InternEvoRankFiles:
    """Return the tensors of all ranks. UserError if names have two forms, a rank has two files, or
    one has none; the last shows only where names do not give both tp and wp."""
    names = sorted(rank_file.name for rank_file in checkpoint.iterdir())
    matches_by_name = {}
    for file_name in names:
        if match := FILE.fullmatch(file_name):
            matches_by_name[file_name] = match
    # Weight parallelism (isp) names wp, the other modes name tp, older versions both: one save has
    # one form.
    forms = set()
    for match in matches_by_name.values():
        forms.add(tuple(number is not None for number in match.groups()))
    if len(forms) > 1:
        raise UserError.of(
            "convert.internevo_two_forms",
            path=checkpoint,
            names=", ".join(matches_by_name),
        )
    ((names_tp, names_wp, _),) = forms
    ranks = {file_name: _rank_of(match) for file_name, match in matches_by_name.items()}
    file_of_rank = file_of_each_rank(checkpoint, ranks)
    sizes = _count_ranks(names)
    # Where files name both, a rank has one number of each, and not every pair is a rank.
    if not (names_tp and names_wp):
        _require_all_ranks(checkpoint, file_of_rank, sizes, names_tp, names_wp)
    # All files at once: starting the process that opens pickles takes seconds.
    states = contents([*file_of_rank.values()])
    chunks = {}
    for (rank_axes, rank_file), state in zip(file_of_rank.items(), states, strict=True):
        chunks[rank_axes] = _chunks(rank_file, state)
    return InternEvoRankFiles(checkpoint, chunks, sizes, names_wp)


def _count_ranks(names: Sequence[str]) -> RankAxes:
    """Return how many ranks there are, of which files of topology and optimizers tell too."""
    ranks: list[RankAxes] = []
    for file_name in names:
        if match := RANK.fullmatch(file_name):
            ranks.append(_rank_of(match))
    return RankAxes(*count_ranks(ranks))


def _require_all_ranks(
    checkpoint: Path,
    file_of_rank: Mapping[RankAxes, Path],
    sizes: RankAxes,
    names_tp: bool,
    names_wp: bool,
) -> None:
    """Raise UserError if a rank has no file. names_tp, names_wp: what names of files tell."""
    for numbers in product(*(range(size) for size in sizes)):
        rank_axes = RankAxes(*numbers)
        if rank_axes not in file_of_rank:
            tensor = f"tp{rank_axes.tp}_" if names_tp else ""
            weight = f"wp{rank_axes.wp}_" if names_wp else ""
            file_name = f"model_{tensor}{weight}pp{rank_axes.pp}.pt"
            raise UserError.of("convert.megatron_folder_missing", file=checkpoint / file_name)


def _rank_of(match: re.Match[str]) -> RankAxes:
    return RankAxes(*(int(number or 0) for number in match.groups()))


def _chunks(rank_file: Path, state: Any) -> Chunks:
    """Return a file's tensors, of each of its chunks: names as the chunk alone would have them."""
    chunks: dict[int, dict[str, Stored]] = {}
    for tensor_name, stored in state_in(rank_file, state).items():
        if tensor_name.endswith(BUFFERS):
            continue
        number = 0
        chunk_name = tensor_name.removeprefix("model.")
        if match := CHUNK.fullmatch(tensor_name):
            number = int(match[1])
            chunk_name = match[2]
        # Without embed_split_hidden the table is inside of ParallelGPT2Embeddings.
        chunk_name = chunk_name.replace("embedding.word_embeddings.", "embedding.")
        chunks.setdefault(number, {})[chunk_name] = stored
    if sorted(chunks) != [*range(len(chunks))] or not chunks:
        raise UserError.of("convert.internevo_chunk_missing", file=rank_file)
    return [chunks[number] for number in sorted(chunks)]


def _read_config(config_file: Path) -> Mapping[str, Any]:
    """Return the dict `model` of InternEvo's configuration."""
    if not config_file.is_file():
        raise UserError.of("convert.internevo_config_missing", file=config_file)
    (config,) = contents([config_file])
    if not isinstance(config, dict):
        raise UserError.of("convert.internevo_not_dict", file=config_file)
    return config


def _shards_over_all(rank_files: InternEvoRankFiles) -> dict[str, list[TensorSource]]:
    """Return name, with layers counted over all stages -> its parts. Stages are in the order of
    chunks, then of ranks."""
    # Interleaved stages: all ranks have as many.
    counts = {len(chunks) for chunks in rank_files.chunks.values()}
    if len(counts) > 1:
        raise UserError.of("convert.internevo_chunks_differ", path=rank_files.path)
    stages = []
    for chunk in range(max(counts)):
        for stage in range(rank_files.sizes.pp):
            stages.append(_shards_of_stage(rank_files, stage, chunk))
    last = len(stages) - 1
    ends = {"embedding.": 0, "norm.": last, "head.": last}
    return number_over_stages(rank_files.path, stages, LAYER, ends)


def _distinct_ranks(rank_files: InternEvoRankFiles) -> dict[RankAxes, Chunks]:
    """Return the ranks' tensors, without ranks that hold what another does by design: where weight
    parallelism cuts layers, those with the same part of a stage that has nothing but layers."""
    distinct: dict[RankAxes, Chunks] = {}
    for rank_axes, chunks in rank_files.chunks.items():
        has_layers_alone = all(LAYER.match(name) for chunk in chunks for name in chunk)
        if rank_files.weight_parallel and has_layers_alone:
            rank_axes = rank_axes._replace(tp=0)
        distinct.setdefault(rank_axes, chunks)
    return distinct


def _shards_of_stage(
    rank_files: InternEvoRankFiles, stage: int, chunk: int
) -> dict[str, list[TensorSource]]:
    """Return name -> its parts, of one stage."""
    ranks_of_stage = []
    for rank_axes, chunks in rank_files.chunks.items():
        if rank_axes.pp == stage:
            part_of = partial(_part_of, rank_files, rank_axes)
            ranks_of_stage.append((part_of, chunks[chunk]))
    return collect_shards(rank_files.path, ranks_of_stage, LONE)


def _part_of(rank_files: InternEvoRankFiles, rank: RankAxes, tensor_name: str) -> ShardPart:
    """Return which part of a tensor a rank has: weight parallelism cuts layers over wp, and the
    ends of the model over tp where files name both."""
    is_in_layer = LAYER.match(tensor_name) is not None
    # Older versions cut embedding and head over tp, and name both axes.
    if rank_files.weight_parallel and (is_in_layer or rank_files.sizes.tp == 1):
        return ShardPart(rank.wp, rank_files.sizes.wp)
    return ShardPart(rank.tp, rank_files.sizes.tp)


def _feed_forward(
    checkpoint: Path, shards_by_name: Mapping[str, Sequence[TensorSource]]
) -> tuple[dict[str, str], int]:
    """Return InternEvo's names of the feed-forward's layers -> ours, and its width.

    Before 2024 w3 was the closing one, since then w2 is (internlm/model/modules/mlp.py): their
    shapes tell.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for tensor_name in ("w1", "w2", "w3", "fc1", "fc2"):
        shards = shards_by_name.get(f"blocks.0.mlp.{tensor_name}.weight", ())
        shapes[tensor_name] = [shard.shape for shard in shards]
    # Two products instead of a gate: without use_swiglu, with use_flash_attn.
    if shapes["fc1"] and shapes["fc2"]:
        return {"fc1": "up", "fc2": "down"}, sum(shape[0] for shape in shapes["fc1"])
    if not (shapes["w1"] and shapes["w2"] and shapes["w3"]):
        raise UserError.of("convert.internevo_not_internlm", path=checkpoint, export=EXPORT)
    # Only a width other than hidden tells the closing layer from the others.
    if shapes["w2"] == shapes["w3"]:
        shape = [*shapes["w2"][0]]
        raise UserError.of(
            "convert.internevo_feed_forward", path=checkpoint, w2=shape, export=EXPORT
        )
    width = sum(shape[0] for shape in shapes["w1"])
    if shapes["w3"] == shapes["w1"]:
        return {"w1": "gate", "w3": "up", "w2": "down"}, width
    return {"w1": "gate", "w2": "up", "w3": "down"}, width


def _split_hidden(shards_by_name: Mapping[str, Sequence[TensorSource]], hidden: int) -> bool:
    """Return True if ranks hold all tokens of the embedding and some features of each."""
    shards = shards_by_name.get("embedding.weight", ())
    return len(shards) > 1 and shards[0].shape[-1] != hidden


def _unread(checkpoint: Path) -> str:
    """Return the files that are ignored: those beside the weights."""
    names = sorted(file.name for file in checkpoint.iterdir())
    unread = []
    if any(file_name.startswith("optimizer_") for file_name in names):
        unread.append("the optimizer's state (optimizer_*.pt)")
    for file_name in names:
        if file_name.startswith("sampler") or file_name in UNREAD_FILES:
            unread.append(file_name)
    return ", ".join(unread)


REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
# What the builder takes where the dict says nothing.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "norm_type": "rmsnorm",
    "layer_norm_epsilon": 1e-5,
    "rope_base": 10000,
    "drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "embed_grad_scale": 1,
}
# Keys of which one value is known, the one that changes nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "is_reward": (False,),
    "use_dynamic_ntk_rope": (False,),
    "qk_interleaved": (False,),
    "norm_head": (False,),
    "deepnorm": (False,),
    "num_experts": (0, 1, None),
}
CHECKED = (
    "use_swiglu",
    "mlp_ratio",
    "multiple_of",
    "no_bias",
    "num_kv_attention_heads",
    "num_chunks",
)
# How the model is stored, cut, drawn or computed, which its weights do not depend on.
UNIMPORTANT = {
    "apply_post_layer_norm",  # accepted by the builder and not used
    "attn_other_init_std",
    "attn_wqkv_init_std",
    "checkpoint",
    "dropout_selective_checkpoint",
    "dtype",
    "embed_split_hidden",  # seen from the tensors
    "embedding_init_std",
    "ffn_other_init_std",
    "ffn_uplayer_init_std",
    "init_type",
    "mlp_layer_fusion",  # undone when saved
    "out_head_init_std",
    "parallel_output",
    "residual_in_fp32",
    # chooses a kernel; the layers that it chooses besides are seen from the tensors
    "use_flash_attn",
    "use_scaled_init",
    "vocab_parallel",
}
WHOLE_NUMBERS = (*REQUIRED, "max_position_embeddings", "multiple_of", "num_chunks")
NUMBERS = (
    "mlp_ratio",
    "layer_norm_epsilon",
    "rope_base",
    "drop_rate",
    "attn_drop_rate",
    "embed_grad_scale",
)
MULTIPLE = 256  # the width of a gated feed-forward is rounded up to this


def model_of(
    config: Mapping[str, Any], gated: bool, ffn: int, biased: bool, origin: str
) -> tuple[ModelConfig, str]:
    """Return the model, and a note on what InternEvo's builder decided ("" if nothing).

    gated: the feed-forward has a gate.
    ffn: width of the feed-forward.
    biased: attention has biases.
    origin: where the dict is, for messages.
    Raises UserError that names the key in `origin` that is missing, unknown or contradicted by the
    tensors.
    """
    _refuse(config, origin)
    _check_against_tensors(config, gated, ffn, biased, origin)
    settings = {setting: config.get(setting, default) for setting, default in DEFAULTS.items()}
    if settings["norm_type"] not in ("rmsnorm", "layernorm"):
        raise UserError.of("convert.internevo_norm", origin=origin, norm_type=settings["norm_type"])
    fields = {
        "family": "llama",
        "layers": config["num_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "vocab": config["vocab_size"],
        # its GELU is the tanh approximation
        "mlp": "swiglu" if gated else "gelu",
        "ffn": ffn,
        "max_positions": settings["max_position_embeddings"],
        "norm": "rms" if settings["norm_type"] == "rmsnorm" else "layer",
        "norm_eps": _as_real(settings["layer_norm_epsilon"]),
        "rope_base": _as_real(settings["rope_base"]),
        "dropout": _as_real(settings["drop_rate"]),
        "attention_dropout": _as_real(settings["attn_drop_rate"]),
        "embedding_grad_scale": _as_real(settings["embed_grad_scale"]),
        "qkv_bias": biased,
        "output_bias": biased,
    }
    missing = []
    for setting, default in DEFAULTS.items():
        if setting not in config:
            missing.append(f"{setting} = {default!r}")
    note = f"{origin} leaves to InternEvo, which takes: {', '.join(missing)}" if missing else ""
    return make_model(fields, origin), note


def _as_real(value: Any) -> Any:
    """Return a number that is real, but that a configuration may write as an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _refuse(config: Mapping[str, Any], origin: str) -> None:
    """Raise UserError for keys that are missing or not known, and for values that are not read."""
    known = {*DEFAULTS, *CHECKED, *UNIMPORTANT}
    problems = [*problems_of_keys(config, origin, REQUIRED, ONLY, known)]
    problems += _problems_of_numbers(config, origin)
    if problems:
        raise UserError(*problems)


def _problems_of_numbers(config: Mapping[str, Any], origin: str) -> Iterator[Problem]:
    """Yield a line for each value that is not the number that it has to be."""
    for setting in WHOLE_NUMBERS:
        value = config.get(setting, 1)
        if not is_number(value, whole=True) or value <= 0:
            yield Problem.of(
                "convert.internevo_whole_number", origin=origin, key=setting, value=value
            )
    for setting in NUMBERS:
        if setting in config and not is_number(config[setting]):
            yield Problem.of(
                "convert.internevo_number", origin=origin, key=setting, value=config[setting]
            )


def _check_against_tensors(
    config: Mapping[str, Any], gated: bool, ffn: int, biased: bool, origin: str
) -> None:
    """Raise UserError if the dict and the tensors contradict each other."""
    # This type of InternEvo's models has no groups of queries.
    heads = config["num_attention_heads"]
    if config.get("num_kv_attention_heads", heads) != heads:
        raise UserError.of("convert.internevo_heads", origin=origin)
    if "no_bias" in config and bool(config["no_bias"]) == biased:
        biases = "have" if biased else "have no"
        raise UserError.of(
            "convert.internevo_bias", origin=origin, no_bias=config["no_bias"], biases=biases
        )
    if "use_swiglu" in config and bool(config["use_swiglu"]) != gated:
        gate = "has a gate" if gated else "has no gate"
        raise UserError.of(
            "convert.internevo_swiglu", origin=origin, use_swiglu=config["use_swiglu"], gate=gate
        )
    if "mlp_ratio" in config:
        # As InternEvo rounds it, which it does with a gate alone (modules/mlp.py).
        width = int(config["hidden_size"] * config["mlp_ratio"])
        multiple = config.get("multiple_of", MULTIPLE) if gated else 1
        expected = -(-width // multiple) * multiple
        if expected != ffn:
            raise UserError.of("convert.internevo_width", origin=origin, expected=expected, ffn=ffn)
