"""Keys of a run file from torchtitan's TOML, and from its options on a command line.

Every setting is read, refused by name, or not used here. What a file does not say is torchtitan's
default.
"""

import re
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any

from megaprec.errors import did_you_mean
from tools.interop.arguments.torchtitan import PERMITTED, READ, UNUSED, WHY, is_unused
from tools.interop.importing.draft import Draft
from tools.interop.importing.megatron_data import OPEN_SOURCE
from tools.interop.importing.shell_words import Word

TORCHTITAN = "torchtitan's default"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v",
}
QWEN3 = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
# what is asked for a model that has several of ours
ALIKE = {
    ("llama3", "8B"): "llama-3-8b, or llama-3.1-8b with its scaling of rotary positions",
    ("llama3", "70B"): "llama-3-70b, without the scaling of rotary positions that 3.1 has",
    ("deepseek_v3", "16B"): "deepseek-v2-lite, whose router is another",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
DECAYS = ("linear", "sqrt", "cosine")
KEY = re.compile(r"\b[a-z0-9]+\.[a-z_]+\b")
TRUE = ("true", "1", "yes")
FALSE = ("false", "0", "no")


class TitanSettings:
    """Settings of torchtitan, on their way to a draft of ours.

    values: those that are read, by dotted key. said: how each was given. unused: settings that are
        not used here, as they were given. dropped: names to leave out. left_out: those found.
    """

    def __init__(
        self, given: Mapping[str, tuple[Any, str]], draft: Draft, dropped: frozenset[str]
    ) -> None:
        self.draft = draft
        self.values = dict[str, Any]()
        self.said = dict[str, str]()
        self.unused = dict[str, str]()
        self.left_out = dict[str, str]()
        for key, (value, place) in given.items():
            said = f"{key} = {value!r}"
            if key in dropped:
                self.left_out[key] = said
            else:
                self._take(key, value, said, place)

    def _take(self, key: str, value: Any, said: str, place: str) -> None:
        """Read a setting, note it, or add a problem."""
        if key in READ:
            problem = self._read(key, value, said)
        elif key in WHY:
            is_permitted = _is_same(value, PERMITTED[key]) or self._is_answered(WHY[key])
            problem = "" if is_permitted else WHY[key]
            if is_permitted:
                self.unused[key] = said
        elif is_unused(key):
            problem = ""
            self.unused[key] = said
        else:
            hint = did_you_mean(key, [*READ, *WHY, *UNUSED])
            problem = f"no such key of torchtitan is known here{hint}"
        if problem:
            self.draft.problems.append(f"{said} ({place}): {problem}")

    def _is_answered(self, why: str) -> bool:
        """Return True if the user gives a key of the run file that a refusal names."""
        return any(name in self.draft.settled for name in KEY.findall(why))

    def _read(self, key: str, value: Any, said: str) -> str:
        """Keep the value of a setting; return what is wrong with it."""
        kind = READ[key].kind
        typed = _typed(value, kind)
        if value is not None and typed is None:
            names = {"bool": "true or false", "whole": "a whole number", "number": "a number"}
            return f"must be {names.get(kind, 'a text')}"
        self.values[key] = typed
        self.said[key] = said
        return ""

    def get(self, key: str) -> Any:
        """Return the value of a setting, or torchtitan's default."""
        value = self.values.get(key)
        return READ[key].default if value is None else value

    def origin(self, *keys: str) -> str:
        """Return how settings were given, those of them that were, or that it is the default."""
        given = [self.said[key] for key in keys if key in self.said]
        return ", ".join(given) or TORCHTITAN

    def put(self, ours: str, value: Any, *keys: str) -> None:
        """Set a key of the run file to what settings say."""
        self.draft.put(ours, value, self.origin(*keys))

    def refuse(self, key: str, why: str, unless: str = "") -> None:
        """Add a problem with a setting, unless the user gives a key of the run file."""
        if not unless or self.draft.needs(unless):
            said = self.said.get(key, f"{key} = {self.get(key)!r}, {TORCHTITAN}")
            self.draft.problems.append(f"{said}: {why}")


def _typed(value: Any, kind: str) -> Any:
    """Return a value, which a command line gives as a text, as one of a kind; None if it is
    none."""
    if kind == "text":
        # the number of layers may be given as a number
        return str(value) if isinstance(value, str | int) else None
    if kind == "bool":
        if isinstance(value, bool):
            return value
        words = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}
        return words.get(str(value).lower())
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not isfinite(number):
        return None
    if kind == "number":
        return number
    return int(number) if number.is_integer() else None


def _is_same(value: Any, permitted: Any) -> bool:
    """Return True if a value is the permitted one; a command line gives it as a text."""
    if isinstance(permitted, bool):
        return _typed(value, "bool") is permitted
    return value == permitted or value in ("", "[]", None)


def given_in_words(words: Sequence[Word]) -> dict[str, tuple[Any, str]]:
    """Return the options of a command line by their dotted names, each with its place. An option
    without a value is a switch, whose name may begin with no_."""
    given = dict[str, tuple[Any, str]]()
    name = ""
    for word in words:
        place = word.place or "a command line"
        if word.text.startswith("--"):
            typed, equals, value = word.text.removeprefix("--").partition("=")
            name = typed.replace("-", "_")
            table, dot, last = name.rpartition(".")
            if not equals and last.startswith("no_"):
                name = f"{table}{dot}{last.removeprefix('no_')}"
                value = "false"
            given[name] = (value if equals or value else "true", place)
        elif name:
            given[name] = (word.text, place)
    return given


def add_torchtitan(
    given: Mapping[str, tuple[Any, str]], draft: Draft, ranks: int | None, dropped: frozenset[str]
) -> TitanSettings:
    """Add the keys of a run, and return what was read. ranks: how many there are; None if that is
    not known."""
    settings = TitanSettings(given, draft, dropped)
    _add_model(settings)
    _add_layout(settings, ranks)
    _add_batch(settings)
    _add_rate(settings)
    _add_optimizer(settings)
    _add_precision(settings)
    _add_recomputation(settings)
    _add_rest(settings)
    return settings


def _add_model(settings: TitanSettings) -> None:
    """Add the preset of a model of torchtitan, or ask for a model if it is not certain."""
    draft = settings.draft
    name = settings.get("model.name")
    flavor = settings.get("model.flavor")
    _note_first_weights(settings)
    if name == "qwen3" and flavor in QWEN3:
        settings.put("model.preset", f"qwen3-{flavor.lower()}", "model.name", "model.flavor")
        return
    is_given = any(not draft.needs(key) for key in ("model.preset", "train.init_from"))
    if is_given or any(key.startswith("model.") for key in draft.settled):
        return
    alike = ALIKE.get((name, flavor))
    which = f"model.preset={alike.split(',')[0]} ({alike})" if alike else "model.preset=..."
    draft.problems.append(
        f"{settings.origin('model.name', 'model.flavor')}: the model is in torchtitan's code: give "
        f"{which}, or train.init_from=FOLDER"
    )


def _note_first_weights(settings: TitanSettings) -> None:
    """Note that weights begin with other numbers, unless they come from a checkpoint."""
    draft = settings.draft
    if draft.needs("train.init_from") and draft.needs("model.init"):
        draft.notes.append(
            "first weights: torchtitan draws its embedding with standard deviation 1, its head "
            "with hidden^-0.5 and the outputs of layer n with 0.02 / sqrt(2 n); here they have "
            "model.init_std, and model.init has others"
        )


def _add_layout(settings: TitanSettings, ranks: int | None) -> None:
    """Add the axes, and ZeRO, which shards over data_parallel_shard_degree and context ranks."""
    table = "parallelism."
    tensor = settings.get(f"{table}tensor_parallel_degree")
    pipeline = settings.get(f"{table}pipeline_parallel_degree")
    context = settings.get(f"{table}context_parallel_degree")
    copies = settings.get(f"{table}data_parallel_replicate_degree")
    shards = settings.get(f"{table}data_parallel_shard_degree")
    settings.put("parallel.tensor", tensor, f"{table}tensor_parallel_degree")
    if tensor > 1:
        settings.put("parallel.sequence", True, f"{table}tensor_parallel_degree")
    settings.put("parallel.pipeline", pipeline, f"{table}pipeline_parallel_degree")
    settings.put("parallel.context", context, f"{table}context_parallel_degree")
    if settings.get(f"{table}enable_async_tensor_parallel"):
        settings.put("parallel.async_tensor", True, f"{table}enable_async_tensor_parallel")
    experts = settings.get(f"{table}expert_parallel_degree")
    settings.put("parallel.expert", experts, f"{table}expert_parallel_degree")
    if experts > 1:
        slices = settings.get(f"{table}expert_tensor_parallel_degree")
        settings.put("parallel.expert_tensor", slices, f"{table}expert_tensor_parallel_degree")
    _add_schedule(settings, pipeline)
    others = prod((tensor, pipeline, context, copies))
    if shards < 0:
        shards = _left_over(settings, others, ranks)
    if shards is None:
        return
    if ranks is not None and ranks != others * shards:
        settings.refuse(
            f"{table}data_parallel_shard_degree",
            f"the axes are {others * shards} ranks, and not {ranks}",
            "parallel.data",
        )
    names = (f"{table}data_parallel_replicate_degree", f"{table}data_parallel_shard_degree")
    settings.put("parallel.data", copies * shards, *names)
    _add_zero(settings, copies, shards * context, pipeline)


def _left_over(settings: TitanSettings, others: int, ranks: int | None) -> int | None:
    """Return how many ranks shard if these are all that are left over by the other axes."""
    name = "parallelism.data_parallel_shard_degree"
    replicas = settings.draft.value("parallel.data")
    if isinstance(replicas, int):
        return max(1, replicas // settings.get("parallelism.data_parallel_replicate_degree"))
    if ranks is None:
        settings.refuse(name, "it depends on the number of ranks: give --ranks N")
        return None
    if ranks % others:
        settings.refuse(name, f"{ranks} ranks are no multiple of the {others} of the other axes")
        return None
    return ranks // others


def _add_zero(settings: TitanSettings, copies: int, sharing: int, pipeline: int) -> None:
    """Add the stage of ZeRO. sharing: the ranks that share a copy."""
    shards_name = "parallelism.data_parallel_shard_degree"
    policy_name = "parallelism.fsdp_reshard_after_forward"
    policy = settings.get(policy_name)
    if policy not in ("default", "always", "never"):
        settings.refuse(policy_name, "default, always and never are known", "parallel.zero")
        return
    if sharing == 1:
        if copies > 1:
            settings.put("parallel.zero", False, shards_name)
        return
    # by default what a pipeline gathers stays until the backward pass
    keeps_gathered = policy == "never" or (policy == "default" and pipeline > 1)
    settings.put("parallel.zero", 2 if keeps_gathered else 3, shards_name, policy_name)
    if copies > 1:
        copies_name = "parallelism.data_parallel_replicate_degree"
        settings.put("parallel.zero_size", sharing, copies_name, shards_name)


def _add_schedule(settings: TitanSettings, pipeline: int) -> None:
    """Add the schedule of a pipeline; an interleaved one has two chunks on each rank there."""
    if pipeline == 1:
        return
    name = "parallelism.pipeline_parallel_schedule"
    ours = SCHEDULES.get(settings.get(name).lower())
    if ours is None:
        known = ", ".join(SCHEDULES)
        settings.refuse(
            name, f"{known} are read: parallel.schedule=... beside gives one", "parallel.schedule"
        )
        return
    settings.put("parallel.schedule", ours, name)
    if ours == "interleaved":
        settings.put("parallel.chunks", 2, name)


def _add_batch(settings: TitanSettings) -> None:
    """Add the batches: a pipeline cuts the local batch into micro-batches of a size of its own."""
    local_name = "training.local_batch_size"
    if "training.batch_size" in settings.values:
        local_name = "training.batch_size"
    local = settings.get(local_name)
    micro = local
    name = local_name
    if settings.get("parallelism.pipeline_parallel_degree") > 1:
        name = "parallelism.pipeline_parallel_microbatch_size"
        micro = settings.get(name)
    settings.put("train.micro_batch", micro, name)
    whole = settings.get("training.global_batch_size")
    replicas = settings.draft.value("parallel.data")
    if whole > 0:
        settings.put("train.global_batch", whole, "training.global_batch_size")
    elif isinstance(replicas, int):
        settings.put("train.global_batch", local * replicas, local_name)
    settings.put("train.seq_length", settings.get("training.seq_len"), "training.seq_len")
    settings.put("train.steps", settings.get("training.steps"), "training.steps")
    seeds = [key for key in ("training.seed", "debug.seed") if settings.get(key) is not None]
    if seeds:
        settings.put("train.seed", settings.get(seeds[0]), seeds[0])
    for key in ("training.deterministic", "debug.deterministic"):
        if settings.get(key):
            settings.put("train.deterministic", True, key)


def _add_rate(settings: TitanSettings) -> None:
    """Add the rates: step n of a warm-up of w has (n + 1) / w of the peak, step w the peak once
    more, and the decay ends one step after the run's last."""
    table = "lr_scheduler."
    peak = settings.get("optimizer.lr")
    length = settings.get(f"{table}total_steps") or settings.get("training.steps")
    warmup = min(settings.get(f"{table}warmup_steps"), length)
    ratio = settings.get(f"{table}decay_ratio")
    decay = length - warmup
    if ratio is not None:
        decay = min(round(length * ratio), decay)
    shape = settings.get(f"{table}decay_type")
    if shape not in DECAYS:
        settings.refuse(f"{table}decay_type", f"{', '.join(DECAYS)} are known", "lr.wsd_decay")
        return
    settings.put("lr.peak", peak, "optimizer.lr")
    if warmup > 1:
        settings.put("lr.initial", peak / warmup, f"{table}warmup_steps")
    settings.put("lr.warmup", max(0, warmup - 1), f"{table}warmup_steps")
    least_name = f"{table}min_lr_factor"
    if f"{table}lr_min" in settings.values:
        least_name = f"{table}lr_min"
    settings.put("lr.final", peak * settings.get(least_name), least_name)
    if f"{table}total_steps" in settings.values:
        settings.put("lr.length", length, f"{table}total_steps")
    if decay <= 0:
        settings.put("lr.schedule", "constant", f"{table}warmup_steps")
        return
    settings.put("lr.schedule", "wsd", f"{table}decay_type")
    settings.put("lr.wsd_decay", shape, f"{table}decay_type")
    settings.put("lr.decay", decay, f"{table}decay_ratio", f"{table}warmup_steps")


def _add_optimizer(settings: TitanSettings) -> None:
    """Add AdamW, which decays all parameters, and clipping."""
    if settings.get("optimizer.name") != "AdamW":
        settings.refuse("optimizer.name", "give optimizer.name=... beside", "optimizer.name")
    settings.put("optimizer.name", "adamw", "optimizer.name")
    betas = [settings.get("optimizer.beta1"), settings.get("optimizer.beta2")]
    settings.put("optimizer.betas", betas, "optimizer.beta1", "optimizer.beta2")
    settings.put("optimizer.eps", settings.get("optimizer.eps"), "optimizer.eps")
    decay = settings.get("optimizer.weight_decay")
    settings.put("optimizer.weight_decay", decay, "optimizer.weight_decay")
    # as its optimizers have one group of all parameters
    every = {"pattern": "*", "all_dims": True}
    settings.draft.put("optimizer.groups", [every], "torchtitan decays norms and biases too")
    clip = settings.get("training.max_norm")
    if clip <= 0:
        settings.refuse("training.max_norm", "gradients would be zero", "optimizer.clip")
    settings.put("optimizer.clip", clip, "training.max_norm")


def _add_precision(settings: TitanSettings) -> None:
    """Add the dtypes. Products are in the narrower one under FSDP, and on replicas or one rank by
    autocast; with tensor or pipeline ranks alone they are in the dtype of the weights."""
    names = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")
    dtypes = list[str]()
    for name in names:
        dtype = DTYPES.get(settings.get(name))
        if dtype is None:
            settings.refuse(name, f"{', '.join(DTYPES)} are known", "precision.compute")
            return
        dtypes.append(dtype)
    held, products, reduced = dtypes
    has_fsdp = settings.draft.value("parallel.zero", False) in (2, 3)
    table = "parallelism."
    splits_model = max(
        settings.get(f"{table}tensor_parallel_degree"),
        settings.get(f"{table}pipeline_parallel_degree"),
    )
    if not has_fsdp and splits_model > 1:
        products = held
    of_weights, of_products, of_reduction = names
    if held == "fp32":
        settings.put("precision.compute", products, of_products)
    else:
        settings.put("precision.compute", held, of_weights)
        settings.put("precision.masters", "none", of_weights)
        settings.put("precision.moments", held, of_weights)
        settings.put("precision.gradients", held, of_weights)
    if has_fsdp:
        settings.put("precision.reduce", reduced, of_reduction)


def _add_recomputation(settings: TitanSettings) -> None:
    """Add what is recomputed: nothing, all layers, parts of each, or each layer of a number."""
    name = "activation_checkpoint.mode"
    mode = settings.get(name)
    option_name = "activation_checkpoint.selective_ac_option"
    option = settings.get(option_name)
    if mode in ("none", "full"):
        settings.put("parallel.recompute", mode, name)
    elif mode == "selective" and option == "op":
        settings.put("parallel.recompute", "selective", name, option_name)
    elif mode == "selective" and option.isdecimal() and int(option) > 0:
        settings.put("parallel.recompute", "full", name, option_name)
        settings.put("parallel.recompute_fraction", 1 / int(option), option_name)
        settings.draft.notes.append(
            f"{settings.origin(option_name)}: torchtitan recomputes each layer of that number, "
            "and the run here as many, the first of each stage"
        )
    else:
        why = "none, full and selective are read: parallel.recompute=... beside gives one"
        settings.refuse(name, why, "parallel.recompute")


def _add_rest(settings: TitanSettings) -> None:
    """Add data, folder, checkpoints and log lines."""
    draft = settings.draft
    names = ("training.dataset", "training.dataset_path")
    if draft.needs("data.source") and draft.needs("data.blend"):
        said = settings.origin(*names)
        draft.put("data.source", OPEN_SOURCE, said)
        draft.notes.append(
            f"{said}: texts become token files first (megaprec data build, docs/data.md); instead "
            f"of {OPEN_SOURCE} give their prefix"
        )
    draft.put("data.held_out", 0.0, "torchtitan evaluates on a data set of its own")
    settings.put("train.folder", settings.get("job.dump_folder"), "job.dump_folder")
    settings.put("log.every", settings.get("metrics.log_freq"), "metrics.log_freq")
    trackers = {"tensorboard": "metrics.enable_tensorboard", "wandb": "metrics.enable_wandb"}
    used = [tracker for tracker, name in trackers.items() if settings.get(name)]
    if used:
        settings.put("log.to", used, *trackers.values())
    switches = ("checkpoint.enable", "checkpoint.enable_checkpoint")
    if any(map(settings.get, switches)):
        interval = settings.get("checkpoint.interval")
        settings.put("checkpoint.every", interval, "checkpoint.interval")
        kept = settings.get("checkpoint.keep_latest_k")
        settings.put("checkpoint.keep", kept or "all", "checkpoint.keep_latest_k")
    else:
        settings.put("checkpoint.every", 0, *switches)
