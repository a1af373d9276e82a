"""Reading Megatron-LM's checkpoints: the legacy folders mp_rank_XX[_YYY] and distributed ones
(torch_dist).

Ranks' tensors are put together into whole ones, numbered over all stages; what several ranks hold
alike must be alike. No pickle is opened in this process (`tools.convert.core.untrusted`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.kinds import is_number
from megaprec.parsing import read_regular
from models.config import ModelConfig
from tools.convert.core.finite import same_values
from tools.convert.core.names import megatron
from tools.convert.core.rules import Cut, Match, matches
from tools.convert.core.shards import MergedTensor, TensorSource, notes_on_copies
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.hf.folder import check_tensors, origin_of, read_generation
from tools.convert.megatron.args import args_of, model_of_args
from tools.convert.megatron.bridge import BRIDGE, bridge_arguments
from tools.convert.megatron.distributed import (
    DistributedContents,
    has_args,
    merge_chunks,
    read_chunked,
    read_common,
)
from tools.convert.megatron.flat import (
    GATHERED,
    RESHARDABLE,
    FlatLayout,
    bucketed_state,
    sharding_of,
)
from tools.convert.megatron.hybrid_layers import needs_transformer_engine
from tools.convert.megatron.keys import unknown_arguments
from tools.convert.megatron.kinds import require_kinds
from tools.convert.megatron.layout import EMBEDDING, HEAD, TRACKER, is_expert, is_trained
from tools.convert.megatron.optimizer_state import MOMENTS, optimizer_state, scaler_of, steps_of
from tools.convert.megatron.order import sizes_of, unknown_order_setting
from tools.convert.megatron.ranks import (
    RANK,
    PerAxis,
    RankFiles,
    merge_parts,
    notes_on_contradictions,
    parts_over_all,
    read_ranks,
)
from tools.saved.train_state import TrainState

DISTRIBUTED = ("metadata.json", "common.pt")  # what Megatron-core writes beside .metadata
BY_NAME = "--dist-ckpt-optim-fully-reshardable saves it by name"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Digits of a tracker file's number: nobody trains more steps.
MOST_DIGITS = 19
MOST_TRACKER_BYTES = 1000  # what is longer is no number, and is not read to its end
# Versions of files: before 2.0 rows of query, key and value had another order.
OLDEST_VERSION = 2
NEWEST_VERSION = 3


def find_megatron(path: Path) -> Path | None:
    """Return the folder of an iteration: `path`, or the one that its tracker file names; None if
    there is none."""
    # A run's folder is given more often than that of an iteration.
    if (path / TRACKER).is_file():
        content = read_regular(path / TRACKER, MOST_TRACKER_BYTES)
        tracker = content.decode("utf-8", "backslashreplace").strip()
        name = _iteration_folder(tracker)
        if not name or not (path / name).is_dir():
            raise UserError.of("convert.megatron_tracker", path=path / TRACKER, tracker=tracker)
        path = path / name
        if (path / ".metadata").is_file():
            return path
    # PyTorch's own distributed checkpoints have the first of these files alone.
    has_metadata = (path / ".metadata").is_file()
    if has_metadata and any((path / name).is_file() for name in DISTRIBUTED):
        return path
    if any(RANK.fullmatch(file.name) for file in path.iterdir()):
        return path
    return None


def _iteration_folder(tracker: str) -> str:
    """Return the folder that a tracker file names; empty if it names none."""
    if tracker == "release":
        return tracker
    if tracker.isascii() and tracker.isdigit() and len(tracker) <= MOST_DIGITS:
        return f"iter_{int(tracker):07d}"
    return ""


def open_megatron(
    checkpoint: Path,
    vocab: int | None = None,
    weights_only: bool = False,
    model: ModelConfig | None = None,
) -> Source:
    """Open the folder of an iteration.

    vocab: tokens without padding, if its args do not say.
    weights_only: as saved, with nothing of the optimizer's state, which is not looked at.
    model: that of a distributed checkpoint that Megatron-core saved without args, of which only
        weights are read; UserError for others.
    """
    distributed = (checkpoint / ".metadata").is_file()
    if model is not None:
        says_model = has_args(checkpoint) or (checkpoint / BRIDGE).is_file()
        if not distributed or says_model:
            raise UserError.of("convert.megatron_config_unused", path=checkpoint)
        return _open_without_args(checkpoint, model)
    if distributed and (checkpoint / BRIDGE).is_file() and not has_args(checkpoint):
        return _open_bridge(checkpoint, vocab)
    if distributed:
        return _open_distributed(checkpoint, vocab, weights_only)
    return _open_legacy(checkpoint, vocab, weights_only)


def _open_without_args(checkpoint: Path, model: ModelConfig) -> Source:
    """Open a checkpoint of which only its names and `model` say what it is."""
    # Of these args only the rotary ones are looked at, which no layout decides.
    arguments = args_of(model, model.vocab, tp=1, pp=1, fused_norms=True, dtype=torch.float32)
    note = "what the model is was taken from the run file, for nothing here says it"
    return _open_weights(checkpoint, arguments, model, Facts(notes=(note,)))


def _open_bridge(checkpoint: Path, vocab: int | None) -> Source:
    """Open a checkpoint of Megatron-Bridge."""
    file = checkpoint / BRIDGE
    arguments = bridge_arguments(file)
    if not (vocab or arguments.get("vocab_size")):
        raise UserError.of("convert.bridge_vocab", file=file)
    try:
        model = model_of_args(arguments, vocab)
    except UserError as error:
        raise UserError(*(problem.within(f"{file}: ") for problem in error.problems)) from error
    layout = {}
    for axis in ("tensor", "pipeline"):
        # It decides nothing: a distributed checkpoint has whole tensors.
        ranks = arguments.get(f"{axis}_model_parallel_size")
        if isinstance(ranks, int):
            layout[axis] = ranks
    unknown = ", ".join(unknown_arguments(arguments))
    notes = (f"{file}: fields that are not known here, and were not read: {unknown}",)
    facts = Facts(layout=layout, notes=notes if unknown else ())
    return _open_weights(checkpoint, arguments, model, facts)


def _open_weights(
    checkpoint: Path, arguments: Mapping[str, Any], model: ModelConfig, facts: Facts
) -> Source:
    """Open the weights alone of a distributed checkpoint that has no args of its own."""
    saved = read_chunked(checkpoint)
    weights = saved.by_kind["weight"]
    down: Cut = "rows" if arguments.get("transformer_impl") == "local" else "whole"
    expected = _expected(weights, arguments, model, down)
    merged = merge_chunks(checkpoint, expected, weights, model)
    # The state is there, but args would say how its flat buffers are laid out.
    if len(saved.by_kind) > 1 or saved.flat:
        facts = replace(facts, unread="the optimizer's state, whose order the args would say")
    notes = (*facts.notes, *_notes_on_padding(arguments, weights[EMBEDDING].shape[0]))
    facts = replace(facts, notes=notes)
    return _source(checkpoint, model, expected, {"weight": merged}, facts)


def _open_legacy(checkpoint: Path, vocab: int | None, weights_only: bool) -> Source:
    """Open a folder with a file of each rank."""
    rank_files = read_ranks(checkpoint)
    _require_one_time(rank_files)
    model = model_of_args(rank_files.args, vocab)
    parts_by_name = parts_over_all(rank_files, lambda rank: rank.chunks)
    # Before names are matched, for the table has no such tensor in a tied model.
    _drop_tied_head(checkpoint, model, parts_by_name)
    down = _latent_down_cut(parts_by_name, model)
    expected = _expected(parts_by_name, rank_files.args, model, down)
    weights = merge_parts(checkpoint, expected, parts_by_name)
    check_tensors(checkpoint, expected, weights)
    state = {} if weights_only else optimizer_state(rank_files, expected, model)
    facts = _facts(rank_files.first.content, rank_files.args, rank_files.sizes)
    padded = sum(part.shape[0] for part in parts_by_name[EMBEDDING])
    notes = (
        *facts.notes,
        *_notes_on_files(rank_files),
        *_notes_on_padding(rank_files.args, padded),
    )
    unread = ""
    has_optimizer = rank_files.first.content.get("optimizer") is not None
    if has_optimizer and not state and not weights_only:
        unread = "the optimizer's state, which not all files hold in a form that is known here"
    facts = replace(facts, notes=notes, unread=unread)
    return _source(checkpoint, model, expected, {"weight": weights, **state}, facts)


def _open_distributed(checkpoint: Path, vocab: int | None, weights_only: bool) -> Source:
    """Open a distributed checkpoint with args."""
    common = read_common(checkpoint)
    arguments = common["args"]
    _require_form(checkpoint, common)
    model = model_of_args(arguments, vocab)
    saved = read_chunked(checkpoint)
    if weights_only:
        # Masters are state too: weights stay as saved.
        saved = replace(saved, by_kind={"weight": saved.by_kind["weight"]}, flat={})
    weights = saved.by_kind["weight"]
    # Transformer Engine does not cut projections down to latents.
    down: Cut = "rows" if arguments.get("transformer_impl") == "local" else "whole"
    expected = _expected(weights, arguments, model, down)
    trained = [match for match in expected if is_trained(match.foreign)]
    merged: dict[str, Mapping[str, TensorSource]] = {}
    for kind, tensors in saved.by_kind.items():
        expected_of_kind = expected if kind == "weight" else trained
        merged[kind] = merge_chunks(checkpoint, expected_of_kind, tensors, model)
    unread = _unread(common, saved)
    # What was saved, whatever the args say: a note tells where they differ.
    padded = weights[EMBEDDING].shape[0]
    if saved.flat and not unread:
        dtypes = {tensor_name: weight.dtype for tensor_name, weight in merged["weight"].items()}
        layout = FlatLayout(checkpoint, arguments, model, trained, dtypes, padded)
        merged |= bucketed_state(layout, saved.flat)
    sizes = sizes_of(arguments)
    ranks = PerAxis(sizes.tp, sizes.pp, sizes.ep)
    facts = _facts(common | saved.optimizer, arguments, ranks)
    notes = (*facts.notes, *_notes_on_padding(arguments, padded))
    return _source(checkpoint, model, expected, merged, replace(facts, unread=unread, notes=notes))


def _unread(common: Mapping[str, Any], saved: DistributedContents) -> str:
    """Return the parts of the optimizer state that cannot be read."""
    form = sharding_of(common)
    setting = unknown_order_setting(common["args"])
    if form == GATHERED or (saved.flat and form != RESHARDABLE):
        return f"the optimizer's state, in flat buffers of {form or 'an unnamed form'} ({BY_NAME})"
    if saved.flat and setting:
        return f"the optimizer's state, in flat buffers with {setting} ({BY_NAME})"
    return ""


def _source(
    checkpoint: Path,
    model: ModelConfig,
    expected: list[Match],
    kinds: Mapping[str, Mapping[str, TensorSource]],
    facts: Facts,
) -> Source:
    """Return the source of merged tensors.

    kinds: weight and what there is of master, exp_avg and exp_avg_sq; each by the names of
        `expected`. Masters take the place of weights.
    """
    # Masters are what training went on with; half weights are rounded from them.
    weights = dict(kinds["weight"])
    for tensor_name, master in kinds.get("master", {}).items():
        weights[tensor_name] = _checked_master(
            checkpoint, tensor_name, master, weights[tensor_name]
        )
    merged: dict[str, Mapping[str, TensorSource]] = {"weight": weights}
    merged |= {kind: kinds[kind] for kind in MOMENTS if kind in kinds}
    origins = []
    for kind, tensors in merged.items():
        for match in expected:
            if match.foreign in tensors:
                tensor = tensors[match.foreign]
                origins.append(origin_of(match, tensor.read, tensor.dtype, model, kind))
    # Megatron's own checkpoints have no such file; ours have the source's.
    facts = replace(facts, generation=read_generation(checkpoint))
    return Source(checkpoint, "megatron", model, origins, facts, ())


def _checked_master(
    checkpoint: Path, tensor_name: str, master: TensorSource, weight: TensorSource
) -> MergedTensor:
    """Return a master, which has to be the weight but for rounding: what was saved in another order
    does not pass."""

    def read() -> Tensor:
        values = master.read()
        if not same_values(values.to(weight.dtype), weight.read()):
            raise UserError.of("convert.megatron_master_differs", path=checkpoint, name=tensor_name)
        return values

    return MergedTensor(master.shape, master.dtype, read)


def _expected(
    names: Mapping[str, Any], arguments: Mapping[str, Any], model: ModelConfig, down: Cut
) -> list[Match]:
    """Return the tensors that the model has in Megatron, by the names that these tensors have.

    Without Transformer Engine a norm before experts may have the name of one that belongs to a
    feed-forward, but then all have.
    down: how projections down to latents are cut.
    """

    def is_in_names(module: str) -> bool:
        return any(f".{module}" in tensor_name for tensor_name in names)

    # Names tell whether Transformer Engine made them; args of other programs may not.
    after_norm = "linear_kv_up_proj" if model.latent else "linear_qkv"
    # Mixers and gated delta nets are Transformer Engine's alone.
    fused = needs_transformer_engine(model) or is_in_names(f"{after_norm}.layer_norm_")
    fused_before_mlp = is_in_names("mlp.linear_fc1.layer_norm_")
    fused_before_experts = fused_before_mlp and not is_in_names("pre_mlp_layernorm.")
    interleaved = bool(arguments.get("rotary_interleaved"))
    rules = megatron(fused, interleaved, model, fused_before_experts, down)
    return matches(rules, model)


def _latent_down_cut(parts_by_name: Mapping[str, list[TensorSource]], model: ModelConfig) -> Cut:
    """Return how ranks cut projections down to latents: not those of Transformer Engine, others by
    rows."""
    full_rows = model.latent.kv_rank + model.latent.rope_dim
    for tensor_name, parts in parts_by_name.items():
        is_down = tensor_name.endswith(".linear_kv_down_proj.weight")
        if is_down and any(part.shape[0] != full_rows for part in parts):
            return "rows"
    return "whole"


def _require_one_time(rank_files: RankFiles) -> None:
    """Raise UserError unless all files were saved after the same step, in a form that is read."""
    for rank_file in rank_files.files.values():
        _require_form(rank_file.folder, rank_file.content)
    first = rank_files.first.folder
    # A save that was interrupted leaves files of two steps under one name.
    expected = dict(_clocks(rank_files.first.content))
    for rank_file in rank_files.files.values():
        for clock, value in _clocks(rank_file.content):
            if value != expected[clock]:
                raise UserError.of(
                    "convert.megatron_other_time",
                    folder=rank_file.folder,
                    first=first,
                    clock=clock,
                    value=value,
                    expected=expected[clock],
                )


def _clocks(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a file that tell when it was saved, each with its description."""
    yield "iteration", content.get("iteration")
    yield "num_steps of the scheduler", _scheduled(content)
    yield "the step of the optimizer", steps_of(content)
    yield "the state of the loss scaler", scaler_of(content)


def _scheduled(content: Mapping[str, Any]) -> Any:
    """Return the number of samples that the schedule of the learning rate has counted; None if it
    is not said."""
    schedule = content.get("opt_param_scheduler")
    return schedule.get("num_steps") if isinstance(schedule, dict) else None


def _require_form(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Raise UserError for a file's version or counts that are not read."""
    require_kinds({"iteration": content.get("iteration"), "num_steps": _scheduled(content)})
    version = content.get("checkpoint_version")
    if version is None:
        return
    if not is_number(version) or not OLDEST_VERSION <= version <= NEWEST_VERSION:
        raise UserError.of("convert.megatron_version", path=checkpoint, version=version)


def _facts(content: Mapping[str, Any], arguments: Mapping[str, Any], sizes: PerAxis) -> Facts:
    """Return the facts of a checkpoint.

    content: a rank's file, or what all ranks have in common.
    sizes: how many ranks there are along each axis.
    """
    steps = steps_of(content)
    layout = {
        "tensor": sizes.tp,
        "pipeline": sizes.pp,
        "data": arguments.get("data_parallel_size") or 1,
    }
    if sizes.ep > 1:
        layout["expert"] = sizes.ep
    # Of the two switches one is on, or none.
    compute = next((dtype for dtype in ("bf16", "fp16") if arguments.get(dtype)), "fp32")
    special = {key: arguments[key] for key in SPECIAL_IDS if key in arguments}
    unknown = ", ".join(unknown_arguments(arguments))
    notes = (f"args that are not known here, and were not read: {unknown}",) if unknown else ()
    return Facts(
        steps,
        scaler_of(content),
        progress=_progress(content, arguments, steps),
        precision={"compute": compute},
        layout=layout,
        special=special,
        notes=notes,
    )


def _progress(
    content: Mapping[str, Any], arguments: Mapping[str, Any], steps: int
) -> dict[str, int]:
    """Return how far training was; empty if it had not begun. steps: those of the optimizer."""
    iteration = content.get("iteration") or 0
    if not iteration:
        return {}
    samples = arguments.get("consumed_train_samples") or 0
    seq_length = arguments.get("seq_length") or 0
    scheduled = _scheduled(content)
    applied_samples = samples if scheduled is None else scheduled
    progress = TrainState(
        step=iteration,
        # without the optimizer's steps nothing tells that some were skipped
        applied=steps or iteration,
        samples=samples,
        applied_samples=applied_samples,
        tokens=samples * seq_length,
        skipped_tokens=max(0, samples - applied_samples) * seq_length,
    )
    return asdict(progress)


def _notes_on_files(rank_files: RankFiles) -> Iterator[str]:
    """Yield notes on what the files of ranks are, other than their args say or than they should
    be."""
    yield from notes_on_contradictions(rank_files)
    distinct: dict[PerAxis, list[dict[str, Stored]]] = {}
    for rank, file in rank_files.files.items():
        # Ranks of one ep axis hold the same by design if their stage has no experts.
        has_experts = any(is_expert(name) for chunk in file.chunks for name in chunk)
        if not has_experts:
            rank = rank._replace(ep=0)
        distinct.setdefault(rank, file.chunks)
    yield from notes_on_copies(rank_files.path, distinct)


def _notes_on_padding(arguments: Mapping[str, Any], padded: int) -> Iterator[str]:
    """Yield a note if the args say another number of rows of the padded vocabulary than there
    are."""
    stated = arguments.get("padded_vocab_size")
    if stated not in (None, padded):
        yield (
            f"args say padded_vocab_size = {stated}, but {EMBEDDING} has {padded} rows; the files "
            "were read as they are"
        )


def _drop_tied_head(
    checkpoint: Path, model: ModelConfig, parts_by_name: dict[str, list[TensorSource]]
) -> None:
    """Remove the last stage's copy of a tied embedding, which must be one.

    Beside modules of multi-token prediction it is none: that stage has the embedding too, and
    computes with it.
    """
    if not model.tied or HEAD not in parts_by_name:
        return
    heads = parts_by_name.pop(HEAD)
    for head, embedding in zip(heads, parts_by_name.get(EMBEDDING, ()), strict=True):
        if not model.mtp_layers and not same_values(head.read(), embedding.read()):
            raise UserError.of(
                "convert.megatron_tied_differs", path=checkpoint, head=HEAD, embedding=EMBEDDING
            )
