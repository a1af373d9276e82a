"""Reading Megatron-LM's checkpoints: the legacy folders mp_rank_XX[_YYY] and distributed ones
(torch_dist).

Ranks' tensors are put together into whole ones, numbered over all stages; what several ranks hold
alike must be alike. No pickle is opened in this process (`tools.convert.core.untrusted`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from tools.convert.core.source import Facts, Source
from tools.convert.core.tensors import Stored
from tools.convert.hf.folder import check_tensors, origin_of, read_generation
from tools.convert.megatron.buckets import GATHERED, RESHARDABLE, Saved, bucketed_state, sharding_of
from tools.convert.megatron.distributed import (
    Contents,
    has_args,
    read_chunked,
    read_common,
    whole_tensors,
)
from tools.convert.megatron.experts import is_expert, is_trained
from tools.convert.megatron.keys import unknown
from tools.convert.megatron.kinds import require_kinds
from tools.convert.megatron.layout import EMBEDDING, HEAD, TRACKER, args_of, model_of
from tools.convert.megatron.order import odd, sizes_of
from tools.convert.megatron.ranks import (
    RANK,
    Held,
    Ranks,
    Whole,
    contradicted,
    copied,
    named_over_all,
    read_ranks,
    wholes_of,
)
from tools.convert.megatron.state import MOMENTS, optimizer_state, scaler_of, steps_of

BY_NAME = "--dist-ckpt-optim-fully-reshardable saves it by name"


def find_megatron(path: Path) -> Path | None:
    """The folder of an iteration: `path`, or the one that its tracker file names; None if there is
    none."""
    if (path / TRACKER).is_file():
        said = read_regular(path / TRACKER, 1000).decode("utf-8", "backslashreplace").strip()
        if said == "release":
            name = said
        elif said.isascii() and said.isdigit() and len(said) < 20:
            name = f"iter_{int(said):07d}"
        else:
            name = ""
        if not name or not (path / name).is_dir():
            raise UserError(
                f"{path / TRACKER} says {said!r}, but there is no such checkpoint beside it"
            )
        path = path / name
    is_one = (path / ".metadata").is_file() or any(RANK.fullmatch(p.name) for p in path.iterdir())
    return path if is_one else None


def open_megatron(
    path: Path,
    vocab: int | None = None,
    weights_only: bool = False,
    model: ModelConfig | None = None,
) -> Source:
    """Opens the folder of an iteration. vocab: tokens without padding, if its args do not say.
    weights_only: as saved, with nothing of the optimizer's state, which is not looked at. model:
    that of a distributed checkpoint that Megatron-core saved without args, of which only weights
    are read; UserError for others."""
    distributed = (path / ".metadata").is_file()
    if model is not None:
        if not distributed or has_args(path):
            raise UserError(
                f"--config is for distributed checkpoints without args, and {path} has some: "
                "leave it out"
            )
        return _open_bare(path, model)
    opens = _open_distributed if distributed else _open_legacy
    return opens(path, vocab, weights_only)


def _open_bare(path: Path, model: ModelConfig) -> Source:
    """Open a checkpoint of which only its names and `model` say what it is."""
    args = args_of(model, model.vocab, 1, 1, True, torch.float32)
    held = read_chunked(path)
    weights = held.by_kind["weight"]
    found = _found(weights, args, model, "whole")
    wholes = whole_tensors(path, found, weights, model)
    others = len(held.by_kind) > 1 or held.flat
    unread = "the optimizer's state, whose order the args would say" if others else ""
    facts = Facts(
        unread=unread,
        notes=("what the model is was taken from --config, for nothing here says it",),
    )
    return _source(path, model, found, {"weight": wholes}, facts)


def _open_legacy(path: Path, vocab: int | None, weights_only: bool) -> Source:
    ranks = read_ranks(path)
    _require_one_time(ranks)
    model = model_of(ranks.args, vocab)
    by_name = named_over_all(ranks, lambda rank: rank.chunks)
    _check_tied(path, model, by_name)
    found = _found(by_name, ranks.args, model, _down(by_name, model))
    weights = wholes_of(path, found, by_name, model.vocab)
    check_tensors(path, found, weights)
    state = {} if weights_only else optimizer_state(ranks, found, model)
    facts = _facts(ranks.first.content, ranks.args, ranks.sizes)
    rows = sum(part.shape[0] for part in by_name[EMBEDDING])
    facts = replace(facts, notes=(*facts.notes, *_notes(ranks), *_other_padding(ranks.args, rows)))
    if ranks.first.content.get("optimizer") is not None and not state and not weights_only:
        facts = replace(
            facts,
            unread="the optimizer's state, which not all files hold in a form that is known here",
        )
    return _source(path, model, found, {"weight": weights, **state}, facts)


def _open_distributed(path: Path, vocab: int | None, weights_only: bool) -> Source:
    common = read_common(path)
    args = common["args"]
    _require_form(path, common)
    model = model_of(args, vocab)
    held = read_chunked(path)
    if weights_only:
        held = replace(held, by_kind={"weight": held.by_kind["weight"]}, flat={})
    found = _found(
        held.by_kind["weight"],
        args,
        model,
        "rows" if args.get("transformer_impl") == "local" else "whole",
    )
    trained = [m for m in found if is_trained(m.foreign)]
    kinds = {
        kind: whole_tensors(path, found if kind == "weight" else trained, tensors, model)
        for kind, tensors in held.by_kind.items()
    }
    unread = _unread(common, held)
    if held.flat and not unread:
        dtypes = {name: weight.dtype for name, weight in kinds["weight"].items()}
        padded = held.by_kind["weight"][EMBEDDING].shape[0]
        kinds |= bucketed_state(Saved(path, args, model, trained, dtypes, padded), held.flat)
    sizes = sizes_of(args)
    facts = _facts(common | held.said, args, (sizes.tp, sizes.pp, sizes.ep))
    notes = (*facts.notes, *_other_padding(args, held.by_kind["weight"][EMBEDDING].shape[0]))
    return _source(path, model, found, kinds, replace(facts, unread=unread, notes=notes))


def _unread(common: Mapping[str, Any], held: Contents) -> str:
    """Return the parts of the optimizer state that cannot be read."""
    form = sharding_of(common)
    setting = odd(common["args"])
    if form == GATHERED or (held.flat and form != RESHARDABLE):
        return f"the optimizer's state, in flat buffers of {form or 'an unnamed form'} ({BY_NAME})"
    if held.flat and setting:
        return f"the optimizer's state, in flat buffers with {setting} ({BY_NAME})"
    return ""


def _source(
    path: Path,
    model: ModelConfig,
    found: list[Match],
    kinds: Mapping[str, Mapping[str, Held]],
    facts: Facts,
) -> Source:
    """kinds: weight and what there is of master, exp_avg and exp_avg_sq; each by the names of
    `found`."""
    weights = kinds["weight"]
    masters = kinds.get("master")
    if masters:
        own = {name: _master(path, name, master, weights[name]) for name, master in masters.items()}
        weights = {**weights, **own}
    taken = {"weight": weights, **{kind: kinds[kind] for kind in MOMENTS if kind in kinds}}
    origins = [
        origin_of(m, taken[k][m.foreign].read, taken[k][m.foreign].dtype, model, k)
        for k in taken
        for m in found
        if m.foreign in taken[k]
    ]
    # Megatron's own has none; ours has the source's
    facts = replace(facts, generation=read_generation(path))
    return Source(path, "megatron", model, origins, facts, ())


def _master(path: Path, name: str, master: Held, weight: Held) -> Whole:
    """A master, which has to be the weight but for rounding: what was saved in another order does
    not pass."""

    def read() -> Tensor:
        values = master.read()
        if not same_values(values.to(weight.dtype), weight.read()):
            raise UserError(
                f"{path}: what its optimizer holds as the FP32 master of {name} is not that "
                "of its weight"
            )
        return values

    return Whole(master.shape, master.dtype, read)


def _found(
    names: Mapping[str, Any], args: Mapping[str, Any], model: ModelConfig, down: Cut
) -> list[Match]:
    """The tensors that the model has in Megatron, by the names that these tensors have.

    Without Transformer Engine a norm before experts may have the name of one that belongs to a
    feed-forward, but then all have. down: how projections down to latents are cut.
    """
    into = "linear_kv_up_proj" if model.latent else "linear_qkv"
    fused, before_mlp, alone = (
        any(f".{part}" in name for name in names)
        for part in (f"{into}.layer_norm_", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    )
    rules = megatron(
        fused, bool(args.get("rotary_interleaved")), model, before_mlp and not alone, down
    )
    return matches(rules, model)


def _down(by_name: Mapping[str, list[Held]], model: ModelConfig) -> Cut:
    """Return how ranks cut projections down to latents: not those of Transformer Engine, others by
    rows."""
    held = [
        parts for name, parts in by_name.items() if name.endswith(".linear_kv_down_proj.weight")
    ]
    whole = model.latent.kv_rank + model.latent.rope_dim
    if any(part.shape[0] != whole for parts in held for part in parts):
        return "rows"
    return "whole"


def _require_one_time(ranks: Ranks) -> None:
    """Raise UserError unless all files were saved after the same step, in a form that is read."""
    for rank in ranks.files.values():
        _require_form(rank.folder, rank.content)
    first = ranks.first.folder
    expected = dict(_time(ranks.first.content))
    for rank in ranks.files.values():
        for what, value in _time(rank.content):
            if value != expected[what]:
                raise UserError(
                    f"{rank.folder} was saved at another time than {first}: {what} is {value} "
                    "there, and "
                    f"{expected[what]} in the other"
                )


def _time(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "iteration", content.get("iteration")
    yield "num_steps of the scheduler", _scheduled(content)
    yield "the step of the optimizer", steps_of(content)
    yield "the state of the loss scaler", scaler_of(content)


def _scheduled(content: Mapping[str, Any]) -> Any:
    """Return the number of samples that the schedule of the learning rate has counted; None if it
    is not said."""
    schedule = content.get("opt_param_scheduler")
    return schedule.get("num_steps") if isinstance(schedule, dict) else None


def _require_form(path: Path, content: Mapping[str, Any]) -> None:
    """Raise UserError for a file's version or counts that are not read. Before 2.0 rows of QKV had
    another order."""
    require_kinds({"iteration": content.get("iteration"), "num_steps": _scheduled(content)})
    version = content.get("checkpoint_version")
    if version is not None and not (is_number(version) and 2 <= version <= 3):
        raise UserError(
            f"{path}: checkpoint_version = {version!r}, and only 2.0 and 3.0 are read, for "
            "older ones have the rows of "
            "query, key and value in another order: load it with Megatron-LM and have it "
            "saved again"
        )


def _facts(first: Mapping[str, Any], args: Mapping[str, Any], sizes: tuple[int, int, int]) -> Facts:
    """first: a rank's file, or what all ranks have in common. sizes: ranks along tp, pp and ep."""
    steps = steps_of(first)
    scaler = scaler_of(first)
    iteration = first.get("iteration") or 0
    samples = args.get("consumed_train_samples") or 0
    tokens = samples * (args.get("seq_length") or 0)
    progress = {"step": iteration, "applied": steps or iteration, "tokens": tokens}
    applied = _scheduled(first)
    progress |= {"samples": samples, "applied_samples": samples if applied is None else applied}
    tp, pp, ep = sizes
    layout = {"tensor": tp, "pipeline": pp, "data": args.get("data_parallel_size") or 1}
    layout |= {"expert": ep} if ep > 1 else {}
    if args.get("bf16"):
        compute = "bf16"
    elif args.get("fp16"):
        compute = "fp16"
    else:
        compute = "fp32"
    progress = progress if iteration else {}
    special = {
        key: args[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in args
    }
    others = ", ".join(unknown(args))
    notes = (f"args that are not known here, and were not read: {others}",) if others else ()
    precision = {"compute": compute}
    return Facts(
        steps,
        scaler,
        progress=progress,
        precision=precision,
        layout=layout,
        special=special,
        notes=notes,
    )


def _notes(ranks: Ranks) -> Iterator[str]:
    """Yield notes on what the files of ranks are, other than their args say or than they should
    be."""
    yield from contradicted(ranks)
    held: dict[tuple[int, int, int], list[dict[str, Stored]]] = {}
    for (
        (t, p, e),
        rank,
    ) in ranks.files.items():  # those of one ep axis hold the same if their stage has no experts
        experts = any(is_expert(name) for chunk in rank.chunks for name in chunk)
        held.setdefault((t, p, e if experts else 0), rank.chunks)
    yield from copied(ranks.path, held)


def _other_padding(args: Mapping[str, Any], rows: int) -> Iterator[str]:
    """Yield a note if the args say another number of rows of the padded vocabulary than there
    are."""
    if (said := args.get("padded_vocab_size")) not in (None, rows):
        yield (
            f"args say padded_vocab_size = {said}, but {EMBEDDING} has {rows} rows; the files "
            "were read as they are"
        )


def _check_tied(path: Path, model: ModelConfig, by_name: dict[str, list[Held]]) -> None:
    """The last stage's copy of a tied embedding must be one; it is then left aside.

    Beside modules of multi-token prediction it is none: that stage has the embedding too, and
    computes with it.
    """
    if not model.tied or HEAD not in by_name:
        return
    for head, embedding in zip(by_name.pop(HEAD), by_name.get(EMBEDDING, ()), strict=True):
        if not model.mtp_layers and not same_values(head.read(), embedding.read()):
            raise UserError(
                f"{path}: {HEAD} of the last stage differs from {EMBEDDING}, though they are tied"
            )
