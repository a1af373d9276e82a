"""Keys of a run file from a configuration of DeepSpeed.

Every leaf of the JSON is read, refused or not used here. The batch follows DeepSpeed's rule: the
whole batch is the micro-batch times the accumulation steps times the replicas, and what is left out
follows from the rest.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from megaprec.errors import did_you_mean
from megaprec.optim.rules.rule_table import NAMES, name_here
from tools.console.units import counted
from tools.interop.arguments.deepspeed import (
    AUTO,
    KINDS,
    PERMITTED,
    READ,
    TABLES,
    UNUSED,
    WHY,
    is_unused,
    paths_to,
)
from tools.interop.importing.draft import ASSUMED, DEEPSPEED, Draft

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
DTYPES |= {name: name for name in DTYPES.values()}
# the defaults of its optimizers
RATE = 1e-3  # before June 2025 that of a warm-up even where the optimizer had one
OPTIONS = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
# the one option of other rules, and its default
OWN_OPTION: Mapping[str, tuple[str, Any]] = {
    "sgd": ("momentum", 0.0),
    "lion": ("betas", [0.9, 0.99]),
}
CLIP = 1.0  # the default of gradient_clipping
BESIDE = re.compile(r"give (\w+\.\w+)\S* beside")
SHORTEST_WARMUP = 2  # steps, of DeepSpeed's WarmupLR
SCHEDULER_PARAMS = "scheduler.params"
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
TYPES: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "bool": ("a bool", bool),
    "whole": ("a whole number", int),
    "number": ("a number", (int, float)),
    "text": ("a text", str),
    "list": ("a list", list),
}
WHOLE = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
STAGE = "zero_optimization.stage"
SUMS = "data_types.grad_accum_dtype"
GROUP = "zero_optimization.mics_shard_size"
BUCKET = "zero_optimization.reduce_bucket_size"
OFFLOAD = "zero_optimization.offload_optimizer.device"
FORMER_OFFLOAD = "zero_optimization.cpu_offload"  # which DeepSpeed still reads
BF16 = "bf16"
FORMER_BF16 = "bfloat16"  # which DeepSpeed still reads


@dataclass
class DeepSpeedConfig:
    """A file whose keys go into a draft. place: its name. leaves: what is read, by dotted key."""

    place: str
    draft: Draft
    leaves: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        return self.leaves.get(key, default)

    def origin(self, *keys: str) -> str:
        """Return the given ones of these keys, or that the value is DeepSpeed's default."""
        given = [f"{key} = {self.leaves[key]}" for key in keys if key in self.leaves]
        return ", ".join(given) or DEEPSPEED

    def refuse(self, key: str, why: str) -> None:
        """Add a problem with the value of a dotted key."""
        self.draft.problems.append(f"{key} = {self.get(key)!r} ({self.place}): {why}")

    def put(self, key: str, value: Any, *names: str, origin: str = "") -> None:
        """Set a key of the run file to what dotted keys say.

        A default that stands there is replaced. Another value that the arguments beside this file
        have given stays; that is a problem, or only a note if the key changes no number, unless the
        user gives the key.
        """
        origin = origin or self.origin(*names)
        if value == "auto":
            return
        if not self.draft.given(key):
            self.draft.put(key, value, origin)
            return
        before = self.draft.keys[key]
        if origin in ASSUMED or before.value == value or not self.draft.needs(key):
            return
        said = f"{key}: {before.origin} says {before.value}, but {origin} says {value}"
        # these change no number
        if key.startswith(("log.", "parallel.overlap", "parallel.bucket")):
            self.draft.notes.append(f"{said}: the first counts")
        else:
            self.draft.problems.append(f"{said}: keep one of them")


def add_deepspeed(
    content: Mapping[str, Any], place: str, draft: Draft, ranks: int | None
) -> dict[str, str]:
    """Add the keys that DeepSpeed's configuration decides. Returns the leaves that are not used
    here."""
    config = DeepSpeedConfig(place, draft, {})
    unused = _read_leaves(content, config)
    _add_batch(config, ranks)
    _add_precision(config)
    _add_zero(config)
    if config.get(STAGE) == 3 and BUCKET in config.leaves:
        # what is reduced together is a layer
        unused[BUCKET] = f"{BUCKET} = {config.leaves[BUCKET]!r}"
    _add_optimizer(config)
    _add_schedule(config)
    if config.get("steps_per_print"):
        config.put("log.every", config.get("steps_per_print"), "steps_per_print")
    return unused


def _read_leaves(content: Mapping[str, Any], config: DeepSpeedConfig) -> dict[str, str]:
    """Put the leaves that are used into `config`, and a problem for each that is refused. Returns
    those that are not used here."""
    if FORMER_BF16 in content and BF16 not in content:
        content = {BF16 if key == FORMER_BF16 else key: content[key] for key in content}
    unused = dict[str, str]()
    for path, value in _leaves("", content):
        problem = _problem(path, value, config.draft)
        if problem:
            _tell_problem(f"{path} = {value!r} ({config.place})", problem, config.draft)
        elif path not in READ and is_unused(path):
            unused[path] = f"{path} = {value!r}"
        elif path in READ and value is not None:
            config.leaves[path] = value
    return unused


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in tables by dotted key; an empty table is one. path: of the value."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def _problem(path: str, value: Any, draft: Draft) -> str:
    """Return why a leaf is refused; "" if it is not."""
    if path in READ:
        return _problem_of_value(path, value, draft)
    if path in TABLES:
        return "" if value in (None, {}) else "must be a table of keys in braces"
    for table in paths_to(path):
        if table in WHY:
            permitted = value in (None, {}, PERMITTED.get(path))
            return "" if permitted else WHY[table]
    if is_unused(path):
        return ""
    return f"no such key of DeepSpeed is known here{did_you_mean(path, [*READ, *WHY, *UNUSED])}"


def _tell_problem(said: str, problem: str, draft: Draft) -> None:
    """Add a problem of a leaf, or a note if a key that the user gives answers it. said: the leaf,
    and where it stands."""
    key = _key_beside(problem, draft)
    if key:
        draft.notes.append(f"{said}: {key} that is given beside counts instead")
    else:
        draft.problems.append(f"{said}: {problem}")


def _key_beside(problem: str, draft: Draft) -> str:
    """Return the key that a problem asks for beside the file; "" unless the user gives it."""
    asked = BESIDE.search(problem)
    return "" if asked is None or draft.needs(asked[1]) else asked[1]


def _problem_of_value(path: str, value: Any, draft: Draft) -> str:
    """Return why the value of a leaf that is read is refused; "" if it is not. "auto" is refused
    unless a program fills it in or the user gives the key beside the file."""
    keys = READ[path]
    if value == "auto":
        if draft.fills_auto or any(key in draft.settled for key in keys):
            return ""
        filled = f", what Hugging Face's Trainer makes of {AUTO[path]}" if path in AUTO else ""
        return f"what it will be is not known{filled}: give {keys[0]}=... beside"
    name, kind = TYPES[KINDS[path]]
    is_flag = isinstance(value, bool)
    if value is not None and (not isinstance(value, kind) or (is_flag and kind is not bool)):
        return f"must be {name}"
    return "must be finite" if isinstance(value, float) and not isfinite(value) else ""


class _Batch(NamedTuple):
    """The sizes of DeepSpeed's rule, whole = micro * steps * replicas; None: not known.

    steps: micro-batches of a replica in a step.
    """

    whole: int | None
    micro: int | None
    steps: int | None
    replicas: int | None

    def with_replicas(self) -> "_Batch":
        """Return the sizes with the number of replicas, if the others say it."""
        if self.replicas is None and self.whole and self.micro and self.steps:
            return self._replace(replicas=self.whole // (self.micro * self.steps))
        return self

    @property
    def has_one(self) -> bool:
        """Return True if the batch or the micro-batch is known."""
        return bool(self.whole or self.micro)

    @property
    def needs_ranks(self) -> bool:
        """Return True if what is known does not say the others without the number of ranks, or no
        batch is known."""
        if not self.has_one:
            return True
        return self.replicas is None and not (self.whole and self.micro)

    def completed(self) -> "_Batch":
        """Return the sizes with those that follow from the others. Needs the number of replicas, or
        both batches."""
        whole = self.whole
        micro = self.micro
        steps = self.steps
        replicas = self.replicas or 1
        if whole and micro:
            steps = steps or whole // micro // replicas
        steps = steps or 1
        if micro is None:
            assert whole is not None
            micro = whole // replicas // steps
        whole = whole or micro * steps * replicas
        return _Batch(whole, micro, steps, self.replicas)

    @property
    def follows_rule(self) -> bool:
        """Return True unless all sizes are known and the rule does not hold."""
        if self.micro is None or self.steps is None or self.replicas is None:
            return True
        return self.whole in (None, self.micro * self.steps * self.replicas)


def _add_batch(config: DeepSpeedConfig, ranks: int | None) -> None:
    """Add batch, micro-batch and replicas by DeepSpeed's rule."""
    draft = config.draft
    sizes = {name: config.get(name) for name in (WHOLE, MICRO, STEPS)}
    where = f"{config.origin(*sizes)} ({config.place})"
    if draft.fills_auto and "auto" in sizes.values():
        return
    numbers = [size for size in sizes.values() if isinstance(size, int)]
    if min(numbers, default=1) < 1:
        draft.problems.append(f"{where}: give numbers from 1 on")
        return
    batch = _given_batch(draft, sizes, ranks)
    if batch.needs_ranks:
        if batch.has_one and _is_batch_needed(draft):
            problem = "the rest depends on the number of ranks: give --ranks N"
            draft.problems.append(f"{where}: {problem}")
        return
    batch = batch.completed()
    if not batch.follows_rule:
        rule = (
            f"{batch.whole} is not {batch.micro} x {batch.steps} x {batch.replicas} replicas, as "
            "DeepSpeed demands"
        )
        draft.problems.append(f"{where}: {rule}; --ranks N says how many there are")
        return
    config.put("train.global_batch", batch.whole, *sizes)
    config.put("train.micro_batch", batch.micro, *sizes)
    if batch.replicas is not None:
        origin = counted(ranks, "rank") if ranks else ""
        config.put("parallel.data", batch.replicas, *sizes, origin=origin)


def _is_batch_needed(draft: Draft) -> bool:
    return draft.needs("train.global_batch") or draft.needs("train.micro_batch")


def _given_batch(draft: Draft, sizes: Mapping[str, Any], ranks: int | None) -> _Batch:
    """Return what a file and the keys beside it say of the batch."""
    whole, micro, steps = (None if size == "auto" else size for size in sizes.values())
    batch = _Batch(
        whole or draft.value("train.global_batch"),
        micro or draft.value("train.micro_batch"),
        steps,
        _replicas(draft, ranks),
    )
    return batch.with_replicas()


def _replicas(draft: Draft, ranks: int | None) -> int | None:
    """Return the number of replicas that is given, or that of the ranks; None if it is not
    known."""
    if "parallel.data" in draft.settled:
        return draft.settled["parallel.data"].value
    tensor = draft.value("parallel.tensor", 1)
    pipeline = draft.value("parallel.pipeline", 1)
    return ranks // (tensor * pipeline) if ranks else None


def _add_precision(config: DeepSpeedConfig) -> None:
    """Add the dtypes, and the loss scale of FP16. The dtype of products is that of the arguments
    where the file leaves it open."""
    draft = config.draft
    halves = {dtype: config.get(f"{dtype}.enabled", False) for dtype in ("bf16", "fp16")}
    names = [f"{dtype}.enabled" for dtype in halves]
    chosen = [dtype for dtype, switch in halves.items() if switch is True]
    if len(chosen) > 1:
        draft.problems.append(f"{' and '.join(names)} ({config.place}): give one of them")
        return
    is_open = config.origin(*names) == DEEPSPEED and "precision.compute" in draft.keys
    if is_open or "auto" in halves.values():
        if not draft.fills_auto or draft.value("precision.compute") is None:
            return
        compute = draft.value("precision.compute")
    else:
        (compute,) = chosen or ["fp32"]
        config.put("precision.compute", compute, *names)
    config.put("precision.on_nonfinite", "skip", *names)
    _add_dtypes(config, compute)
    if compute == "fp16":
        _add_scaling(config)


def _add_dtypes(config: DeepSpeedConfig, compute: str) -> None:
    """Add the dtypes in which gradients are accumulated and reduced."""
    for key, name in (
        ("precision.gradients", SUMS),
        ("precision.reduce", "communication_data_type"),
    ):
        dtype = config.get(name, compute)
        if dtype not in DTYPES:
            config.refuse(name, "the dtypes are fp32, fp16 and bf16")
        elif compute != "fp32":
            config.put(key, DTYPES[dtype], name)
    is_open = SUMS not in config.leaves and config.draft.needs("precision.gradients")
    if compute == "bf16" and config.get(STAGE, 0) == 0 and is_open:
        config.draft.notes.append(
            f"{SUMS} ({config.place}) is left open: bf16, as DeepSpeed has it without ZeRO since "
            "August 2025; before, fp32 (precision.gradients=fp32)"
        )


def _add_scaling(config: DeepSpeedConfig) -> None:
    """Add a constant loss scale, which is any but 0, or the keys of a dynamic one."""
    if scale := config.get("fp16.loss_scale", 0):
        config.put("precision.loss_scale", float(scale), "fp16.loss_scale")
        for key in ("initial_scale", "min_scale", "growth_interval", "hysteresis"):
            config.draft.keys.pop(f"precision.{key}", None)
        return
    power = config.get("fp16.initial_scale_power", 16)
    if not 0 <= power <= 127:
        config.refuse("fp16.initial_scale_power", "give a power of two from 0 to 127")
        return
    config.put("precision.initial_scale", 2.0**power, "fp16.initial_scale_power")
    window = config.get("fp16.loss_scale_window", 1000)
    config.put("precision.growth_interval", window, "fp16.loss_scale_window")
    config.put("precision.hysteresis", _hysteresis(config), "fp16.hysteresis")
    least = float(config.get("fp16.min_loss_scale", 1))
    config.put("precision.min_scale", least, "fp16.min_loss_scale")
    config.put("precision.hysteresis_refill", "growth", "fp16.hysteresis")


def _hysteresis(config: DeepSpeedConfig) -> int:
    """Return how many overflows lower the scale: with ZeRO those of the file, without it one."""
    name = "fp16.hysteresis"
    if config.get(STAGE, 0):
        return config.get(name, 2)
    if config.get(name, 1) != 1:
        config.draft.notes.append(
            f"{config.origin(name)} ({config.place}): no effect without ZeRO, as in DeepSpeed"
        )
    return 1


def _add_zero(config: DeepSpeedConfig) -> None:
    """Add the stage of ZeRO, and what is offloaded, overlapped and reduced together."""
    stage = config.get(STAGE, 0)
    if stage == "auto":
        return
    if stage not in range(4) and config.draft.needs("parallel.zero"):
        config.refuse(STAGE, "the stages of ZeRO are 0 to 3")
        return
    # stage 0 is false here, and stage 1 true
    zero = stage if stage > 1 else stage == 1
    config.put("parallel.zero", zero, STAGE)
    _add_offload(config, stage)
    if config.get("zero_optimization.overlap_comm") is True:
        config.put("parallel.overlap", True, "zero_optimization.overlap_comm")
    group = config.get(GROUP, -1)
    if stage == 3:
        if group > 0:
            config.put("parallel.zero_size", group, GROUP)
        return
    if group > 0:
        config.draft.notes.append(
            f"{config.origin(GROUP)} ({config.place}): no effect below stage 3, as in DeepSpeed"
        )
    bucket = config.get(BUCKET, "auto")
    if bucket != "auto":
        config.put("parallel.bucket", round(bucket), BUCKET)


def _add_offload(config: DeepSpeedConfig, stage: int) -> None:
    """Add whether masters and moments lie in host memory."""
    device = config.get(OFFLOAD, "none")
    if device not in ("none", "cpu"):
        why = "masters and moments lie on the device or in host memory here: give cpu or none"
        config.refuse(OFFLOAD, why)
    elif device == "cpu" or config.get(FORMER_OFFLOAD, False):
        if stage:
            config.put("optimizer.offload", "host", OFFLOAD, FORMER_OFFLOAD)
            return
        said = config.origin(OFFLOAD, FORMER_OFFLOAD)
        config.draft.notes.append(
            f"{said} ({config.place}): no effect without ZeRO, as in DeepSpeed"
        )


def _add_optimizer(config: DeepSpeedConfig) -> None:
    """Add the update rule, clipping, and without a scheduler the rate."""
    draft = config.draft
    _add_clipping(config)
    name = "optimizer.type"
    kind = config.get(name, "auto").lower()
    prefix = "optimizer.params"
    if kind == "auto":
        return
    rule = name_here(kind)
    if rule == "adamw":
        config.put("optimizer.name", rule, name)
        for option, default in OPTIONS.items():
            value = config.get(f"{prefix}.{option}", default)
            config.put(f"optimizer.{option}", value, f"{prefix}.{option}")
    elif rule in OWN_OPTION:
        option, default = OWN_OPTION[rule]
        config.put("optimizer.name", rule, name)
        value = config.get(f"{prefix}.{option}", default)
        config.put("optimizer.options", {option: value}, f"{prefix}.{option}")
        decay = config.get(f"{prefix}.weight_decay", 0.0)
        config.put("optimizer.weight_decay", decay, f"{prefix}.weight_decay")
    elif draft.needs("optimizer.name"):
        rules = f"{NAMES} and elementwise ones of torch.optim"
        config.refuse(name, f"the update rules here are {rules}: give optimizer.name=... beside")
        return
    if draft.value("optimizer.weight_decay"):
        draft.notes.append(
            "DeepSpeed decays all parameters that it is given; here biases and norms have no "
            "weight decay (optimizer.groups changes it by name)"
        )
    schedule = config.get("scheduler.type")
    # those that are read say the peak themselves
    if schedule not in (*SCHEDULES, "auto"):
        config.put("lr.peak", config.get(f"{prefix}.lr", RATE), f"{prefix}.lr")
    if schedule is None and "lr.schedule" not in draft.keys:
        origin = "no scheduler in DeepSpeed's configuration"
        config.put("lr.schedule", "constant", origin=origin)


def _add_clipping(config: DeepSpeedConfig) -> None:
    """Add the norm to which gradients are clipped, unless the arguments alone give one."""
    draft = config.draft
    name = "gradient_clipping"
    if name not in config.leaves and "optimizer.clip" in draft.keys:
        return
    if name not in config.leaves and draft.needs("optimizer.clip"):
        draft.notes.append(
            f"{name} ({config.place}) is left open: {CLIP}, as DeepSpeed does since June 2026; "
            "before, it did not clip (optimizer.clip=0)"
        )
    clip = config.get(name, CLIP)
    config.put("optimizer.clip", clip if clip == "auto" else float(clip), name)


def _add_schedule(config: DeepSpeedConfig) -> None:
    """Add the schedule of the rate: a linear warm-up, and behind it a constant rate or a linear
    decay."""
    draft = config.draft
    kind = config.get("scheduler.type", "auto")
    if kind == "auto":
        return
    if kind not in SCHEDULES:
        if draft.needs("lr.schedule"):
            ways = f"{', '.join(SCHEDULES)} are read; or give lr.schedule=... beside"
            config.refuse("scheduler.type", f"of DeepSpeed's, {ways}")
        else:
            of_schedule = [key for key in config.leaves if key.startswith("scheduler.")]
            draft.notes.append(
                f"{config.origin(*of_schedule)} ({config.place}): lr.schedule that is given beside "
                "counts instead, with its lr.warmup, lr.length and lr.final"
            )
        return
    _add_warmup(config)
    config.put("lr.schedule", SCHEDULES[kind], "scheduler.type")
    length = f"{SCHEDULER_PARAMS}.total_num_steps"
    initial = f"{SCHEDULER_PARAMS}.warmup_min_lr"
    if kind == "WarmupDecayLR" and config.get(length) is None:
        draft.problems.append(f"{length} ({config.place}) is missing, which DeepSpeed needs")
    elif kind == "WarmupDecayLR":
        config.put("lr.length", config.get(length), length)
        # the rate falls to where its warm-up began: min_lr + (max_lr - min_lr) * what is left
        if config.get(initial):
            config.put("lr.final", config.get(initial), initial)
        else:
            config.put("lr.final", 0.0, origin="0, as WarmupDecayLR")
    draft.notes.append(
        "DeepSpeed's schedules are one step behind: a step here has the rate of DeepSpeed's next "
        "step"
    )


def _add_warmup(config: DeepSpeedConfig) -> None:
    """Add the steps of the linear warm-up, and the rates between which it leads."""
    draft = config.draft
    form = config.get(f"{SCHEDULER_PARAMS}.warmup_type", "log")
    warmup = config.get(f"{SCHEDULER_PARAMS}.warmup_num_steps", 1000)
    # DeepSpeed takes a shorter one for one of two steps
    warmup_there = max(SHORTEST_WARMUP, warmup)
    is_linear = form in ("linear", "auto")
    if not is_linear and warmup_there > SHORTEST_WARMUP and draft.needs("lr.warmup"):
        origin = config.origin(f"{SCHEDULER_PARAMS}.warmup_type")
        draft.problems.append(
            f"{SCHEDULER_PARAMS}.warmup_type ({config.place}): warm-up is linear here, but "
            f"{origin} is not: write linear, or give lr.warmup=N beside the file"
        )
    _add_peak_of_warmup(config)
    # two steps of its logarithm end at the second one, whose rate the first step here has
    is_over = not is_linear and warmup_there == SHORTEST_WARMUP
    config.put("lr.warmup", 0 if is_over else warmup_there, f"{SCHEDULER_PARAMS}.warmup_num_steps")
    initial = f"{SCHEDULER_PARAMS}.warmup_min_lr"
    if config.get(initial):
        config.put("lr.initial", config.get(initial), initial)


def _add_peak_of_warmup(config: DeepSpeedConfig) -> None:
    """Add the rate that a warm-up leads to: the optimizer's where the schedule has none."""
    name = f"{SCHEDULER_PARAMS}.warmup_max_lr"
    of_optimizer = "optimizer.params.lr"
    has_own = of_optimizer in config.leaves
    if name not in config.leaves and has_own:
        config.put("lr.peak", config.get(of_optimizer), of_optimizer)
        if config.draft.needs("lr.peak"):
            config.draft.notes.append(
                f"{name} ({config.place}) is left open: that of {of_optimizer}, as DeepSpeed does "
                f"since June 2025; before, it was {RATE} (lr.peak={RATE})"
            )
        return
    peak = config.get(name, RATE)
    config.put("lr.peak", peak, name)
    if has_own and peak not in ("auto", config.get(of_optimizer)):
        config.draft.notes.append(
            f"{config.origin(of_optimizer)} ({config.place}): {name} counts, as in DeepSpeed"
        )
