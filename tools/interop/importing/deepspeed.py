"""Keys of a run file from a configuration of DeepSpeed.

Every leaf of the JSON is read, refused or not used here. The batch follows DeepSpeed's rule: the
whole batch is the micro-batch times the accumulation steps times the replicas, and what is left out
follows from the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from megaprec.errors import did_you_mean
from tools.console.units import counted
from tools.interop.arguments.deepspeed import (
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
FUSED_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
CLIP = 1.0  # the default of gradient_clipping
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
TYPES: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "bool": ("a bool", bool),
    "whole": ("a whole number", int),
    "number": ("a number", (int, float)),
    "text": ("a text", str),
    "list": ("a list", list),
}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SHIFT = (
    "DeepSpeed's schedules are one step behind: a step here has the rate of DeepSpeed's next step"
)


@dataclass
class Config:
    """A file whose keys go into a draft. place: its name. leaves: by dotted key; null counts as not
    given."""

    place: str
    draft: Draft
    leaves: dict[str, Any] = field(default_factory=dict)

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
        """Set a key of the run file to what dotted keys say; a value that the arguments give
        otherwise is a problem."""
        origin = origin or self.origin(*names)
        if value == "auto":
            return
        if not self.draft.given(key):
            self.draft.put(key, value, origin)
            return
        before = self.draft.keys[key]
        if origin not in ASSUMED and before.value != value and self.draft.needs(key):
            self.draft.problems.append(
                f"{key}: {before.origin} says {before.value}, but {origin} says {value}: keep one "
                "of them"
            )


def add_deepspeed(
    content: Mapping[str, Any], place: str, draft: Draft, ranks: int | None
) -> dict[str, str]:
    """Add the keys that DeepSpeed's configuration decides. Returns the leaves that are not used
    here."""
    config = Config(place, draft)
    unused = dict[str, str]()
    for path, value in _leaves("", content):
        config.leaves[path] = value
        problem = _problem(path, value, draft)
        if problem:
            config.refuse(path, problem)
        if is_unused(path) and path not in READ:
            unused[path] = f"{path} = {value!r}"
        if problem or path not in READ or value is None:
            del config.leaves[path]
    _add_batch(config, ranks)
    _add_precision(config)
    _add_zero(config)
    _add_optimizer(config)
    _add_schedule(config)
    if config.get("steps_per_print"):
        config.put("log.every", config.get("steps_per_print"), "steps_per_print")
    return unused


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
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


def _problem_of_value(path: str, value: Any, draft: Draft) -> str:
    if value is None:
        return ""
    if value == "auto":
        if any(key in draft.settled for key in READ[path]):
            return ""
        return f"what it will be is not known: give {READ[path][0]}=... beside the file"
    name, kind = TYPES[KINDS[path]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return f"must be {name}"
    return "" if not isinstance(value, float) or isfinite(value) else "must be finite"


def _add_batch(config: Config, ranks: int | None) -> None:
    """Add batch, micro-batch and replicas by DeepSpeed's rule."""
    draft = config.draft
    whole, micro, steps = (_size(config, name) for name in SIZES)
    where = f"{config.origin(*SIZES)} ({config.place})"
    if any(size < 1 for size in (whole, micro, steps) if size is not None):
        draft.problems.append(f"{where}: give numbers from 1 on")
        return
    whole = draft.value("train.global_batch") if whole is None else whole
    micro = draft.value("train.micro_batch") if micro is None else micro
    data = _replicas(draft, ranks, whole, micro, steps)
    num_known = (whole is not None) + (micro is not None)
    if num_known == 0:
        return
    if num_known == 1 and data is None:
        _refuse_open_batch(draft, where)
        return
    _put_sizes(config, _completed_sizes(whole, micro, steps, data or 1), data, ranks)


def _put_sizes(
    config: Config, sizes: tuple[int, int, int], data: int | None, ranks: int | None
) -> None:
    """Add batch, micro-batch and replicas, which must fit together."""
    whole, micro, steps = sizes
    if data and whole != micro * steps * data:
        where = f"{config.origin(*SIZES)} ({config.place})"
        rule = f"{whole} is not {micro} x {steps} x {data} replicas, as DeepSpeed demands"
        way = "; --ranks gives another number of them" if ranks else ""
        config.draft.problems.append(f"{where}: {rule}{way}")
        return
    config.put("train.global_batch", whole, *SIZES)
    config.put("train.micro_batch", micro, *SIZES)
    if data:
        origin = counted(ranks, "rank") if ranks else ""
        config.put("parallel.data", data, *SIZES, origin=origin)


def _refuse_open_batch(draft: Draft, where: str) -> None:
    if draft.needs("train.global_batch") or draft.needs("train.micro_batch"):
        draft.problems.append(f"{where}: the rest depends on the number of ranks: give --ranks N")


def _size(config: Config, name: str) -> int | None:
    size = config.get(name)
    return None if size == "auto" else size


def _completed_sizes(
    whole: int | None, micro: int | None, steps: int | None, replicas: int
) -> tuple[int, int, int]:
    """Return batch, micro-batch and accumulation steps, one of the first two of which is given."""
    if micro is None:
        assert whole is not None
        steps = steps or 1
        return whole, whole // replicas // steps, steps
    if whole is None:
        steps = steps or 1
        return micro * steps * replicas, micro, steps
    return whole, micro, steps or whole // micro // replicas


def _replicas(
    draft: Draft, ranks: int | None, whole: int | None, micro: int | None, steps: int | None
) -> int | None:
    """Return the number of replicas: as given, by the ranks, or by the three sizes; None if it is
    not known."""
    if "parallel.data" in draft.settled:
        return draft.settled["parallel.data"].value
    if ranks:
        tensor = draft.value("parallel.tensor") or 1
        pipeline = draft.value("parallel.pipeline") or 1
        return ranks // (tensor * pipeline)
    if whole and micro and steps and whole % (micro * steps) == 0:
        return whole // (micro * steps)
    return None


def _add_precision(config: Config) -> None:
    draft = config.draft
    bf16 = config.get("bf16.enabled", config.get("bfloat16.enabled", False))
    fp16 = config.get("fp16.enabled", False)
    if bf16 is True and fp16 is True:
        draft.problems.append(f"fp16.enabled and bf16.enabled ({config.place}): give one of them")
        return
    compute = "fp32"
    for dtype, switch in (("bf16", bf16), ("fp16", fp16)):
        if switch is True:
            compute = dtype
    switches = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    origin = config.origin(*switches)
    if "auto" in (bf16, fp16) or (origin == DEEPSPEED and "precision.compute" in draft.keys):
        return
    config.put("precision.compute", compute, *switches)
    if DTYPES.get(config.get("data_types.param_dtype", compute), "") != compute:
        config.refuse("data_types.param_dtype", f"the weights are {compute} by {origin}: remove it")
    is_sharded = bool(config.get("zero_optimization.stage", 0))
    _add_gradients(config, compute, is_sharded)
    _add_overflows(config, compute)
    if compute == "bf16":
        _add_narrow_state(config, is_sharded)
    elif compute == "fp16":
        _add_scaling(config)


def _add_overflows(config: Config, compute: str) -> None:
    """Add what happens to a step with inf or NaN, which can be applied in BF16 only."""
    action = "skip"
    if compute == "bf16" and not config.get("bf16.check_grad_overflow", True):
        action = "ignore"
    config.put("precision.on_nonfinite", action, "bf16.check_grad_overflow")


def _add_gradients(config: Config, compute: str, is_sharded: bool) -> None:
    """Add the dtypes in which gradients are accumulated and reduced."""
    # gradients of BF16 are accumulated in FP32 without ZeRO
    usual = "fp32" if compute == "bf16" and not is_sharded else compute
    for key, name, default in (
        ("precision.gradients", "data_types.grad_accum_dtype", usual),
        ("precision.reduce", "communication_data_type", compute),
    ):
        dtype = config.get(name, default)
        if dtype not in DTYPES:
            config.refuse(name, "the dtypes are fp32, fp16 and bf16")
        elif compute != "fp32":
            config.put(key, DTYPES[dtype], name)


def _add_narrow_state(config: Config, is_sharded: bool) -> None:
    """Add master weights and moments in BF16, by the rules of DeepSpeed."""
    masters = "bf16.bf16_master_weights_and_grads"
    moments = "bf16.bf16_optimizer_states"
    if config.get(masters) and not is_sharded:
        config.refuse(masters, "DeepSpeed needs zero_optimization.stage 1 or higher with it")
    if config.get(moments) and not config.get(masters):
        config.refuse(moments, f"DeepSpeed needs {masters} = true with it")
    if config.get(masters):
        config.put("precision.masters", "none", masters)
    if config.get(moments):
        config.put("precision.moments", "bf16", moments)


def _add_scaling(config: Config) -> None:
    if scale := config.get("fp16.loss_scale", 0):
        config.put("precision.loss_scale", float(scale), "fp16.loss_scale")
        for key in ("initial_scale", "min_scale", "growth_interval", "hysteresis"):
            config.draft.keys.pop(f"precision.{key}", None)
        return
    power = config.get("fp16.initial_scale_power", 16)
    if not 0 <= power <= 127:
        config.refuse("fp16.initial_scale_power", "give a power of two from 0 to 127")
        return
    good_step = config.get("fp16.consecutive_hysteresis", False)
    for key, value, name in (
        ("initial_scale", 2.0**power, "initial_scale_power"),
        ("growth_interval", config.get("fp16.loss_scale_window", 1000), "loss_scale_window"),
        ("hysteresis", config.get("fp16.hysteresis", 2), "hysteresis"),
        ("min_scale", float(config.get("fp16.min_loss_scale", 1)), "min_loss_scale"),
        ("hysteresis_refill", "good_step" if good_step else "growth", "consecutive_hysteresis"),
    ):
        config.put(f"precision.{key}", value, f"fp16.{name}")


def _add_zero(config: Config) -> None:
    name = "zero_optimization.stage"
    stage = config.get(name, 0)
    if stage == "auto":
        return
    if stage not in (0, 1, 2, 3):
        config.refuse(name, "the stages are 0, 1, 2 and 3")
        return
    if stage == 3 and config.draft.needs("parallel.zero"):
        way = (
            "parallel.tensor and parallel.pipeline divide them; parallel.zero=true beside the "
            "file takes ZeRO-1 instead"
        )
        config.refuse(name, f"weights are not sharded over replicas here: {way}")
        return
    if stage == 2:
        config.draft.notes.append(
            "ZeRO-2 becomes ZeRO-1: the results are the same, each rank holds its whole gradients"
        )
    config.put("parallel.zero", stage > 0, name)
    if config.get("zero_optimization.overlap_comm") is True:
        config.put("parallel.overlap", True, "zero_optimization.overlap_comm")
    bucket = config.get("zero_optimization.reduce_bucket_size", "auto")
    if bucket != "auto":
        config.put("parallel.bucket", round(bucket), "zero_optimization.reduce_bucket_size")


def _add_optimizer(config: Config) -> None:
    draft = config.draft
    _add_clipping(config)
    kind = config.get("optimizer.type")
    if kind in (None, "auto"):
        return
    if kind.lower() in ("adam", "adamw"):
        _add_adam(config, is_adam=kind.lower() == "adam")
    elif kind.lower() == "sgd":
        _add_sgd(config)
    elif draft.needs("optimizer.name"):
        rules = (
            "adamw, sgd, muon and elementwise ones of torch.optim: give optimizer.name=... "
            "beside the file"
        )
        config.refuse("optimizer.type", f"the update rules here are {rules}")
        return
    if draft.value("optimizer.weight_decay"):
        draft.notes.append(
            "DeepSpeed decays all parameters that it is given; here biases and norms have no "
            "weight decay (optimizer.groups changes it by name)"
        )
    if config.get("scheduler.type") is None:
        rate = config.get("optimizer.params.lr") or FUSED_ADAM["lr"]
        config.put("lr.peak", rate, "optimizer.params.lr")
        if "lr.schedule" not in draft.keys:
            origin = "no scheduler in DeepSpeed's configuration"
            config.put("lr.schedule", "constant", origin=origin)


def _add_adam(config: Config, is_adam: bool) -> None:
    prefix = "optimizer.params"
    if is_adam and config.get(f"{prefix}.adam_w_mode", True) is False:
        config.refuse(
            f"{prefix}.adam_w_mode",
            "weight decay is decoupled in adamw; optimizer.name=Adam beside the file adds it "
            "to the gradient",
        )
    config.put("optimizer.name", "adamw", "optimizer.type")
    usual = dict(FUSED_ADAM)
    if config.get(f"{prefix}.torch_adam") is True:
        usual["weight_decay"] = 0.01
    for name in ("betas", "eps", "weight_decay"):
        value = config.get(f"{prefix}.{name}", usual[name])
        config.put(f"optimizer.{name}", value, f"{prefix}.{name}")


def _add_sgd(config: Config) -> None:
    prefix = "optimizer.params"
    config.put("optimizer.name", "sgd", "optimizer.type")
    momentum = config.get(f"{prefix}.momentum") or 0.0
    config.put("optimizer.options", {"momentum": momentum}, f"{prefix}.momentum")
    decay = config.get(f"{prefix}.weight_decay") or 0.0
    config.put("optimizer.weight_decay", decay, f"{prefix}.weight_decay")


def _add_clipping(config: Config) -> None:
    draft = config.draft
    if "gradient_clipping" not in config.leaves:
        if "optimizer.clip" in draft.keys:
            return
        if draft.needs("optimizer.clip"):
            draft.notes.append(
                f"gradient_clipping ({config.place}) is left open: {CLIP}, as DeepSpeed does "
                "since June 2026; before, it did not clip (optimizer.clip=0)"
            )
    clip = config.get("gradient_clipping", CLIP)
    config.put("optimizer.clip", clip if clip == "auto" else float(clip), "gradient_clipping")


def _add_schedule(config: Config) -> None:
    kind = config.get("scheduler.type")
    if kind in (None, "auto"):
        return
    if kind not in SCHEDULES:
        if config.draft.needs("lr.schedule"):
            config.refuse("scheduler.type", f"of DeepSpeed's, {', '.join(SCHEDULES)} are read")
        return
    params = "scheduler.params"
    schedule = SCHEDULES[kind]
    cosine = schedule == "cosine"
    start = f"{params}.warmup_min_ratio" if cosine else f"{params}.warmup_min_lr"
    if config.get(start, 0) not in (0, "auto"):
        config.refuse(start, "warm-up begins at 0 here")
    warmup = config.get(f"{params}.warmup_num_steps", 1000)
    form = config.get(f"{params}.warmup_type", "log")
    if form not in ("log", "linear", "auto"):
        config.refuse(f"{params}.warmup_type", "DeepSpeed's are log and linear")
    if form == "log" and warmup != 0 and config.draft.needs("lr.warmup"):
        origin = config.origin(f"{params}.warmup_type")
        config.draft.problems.append(
            f"{params}.warmup_type ({config.place}): warm-up is linear here, but {origin} is log: "
            "write linear, or give lr.warmup=N beside the file"
        )
    peak_key = "optimizer.params.lr" if cosine else f"{params}.warmup_max_lr"
    peak = config.get(peak_key, FUSED_ADAM["lr"])
    config.put("lr.peak", peak, peak_key)
    config.put("lr.schedule", schedule, "scheduler.type")
    config.put("lr.warmup", warmup, f"{params}.warmup_num_steps")
    if schedule != "constant":
        _add_end(config, peak, cosine)
    config.draft.notes.append(SHIFT)


def _add_end(config: Config, peak: Any, cosine: bool) -> None:
    length = "scheduler.params.total_num_steps"
    if config.get(length) is None:
        config.draft.problems.append(f"{length} ({config.place}) is missing, which DeepSpeed needs")
        return
    config.put("lr.length", config.get(length), length)
    if not cosine:
        config.put("lr.final", 0.0, origin="0, as WarmupDecayLR")
        return
    ratio = config.get("scheduler.params.cos_min_ratio", 0.0001)
    if "auto" not in (ratio, peak):
        config.put("lr.final", ratio * peak, "scheduler.params.cos_min_ratio")
