"""Keys of a run file from a configuration of DeepSpeed.

Every leaf of the JSON is read, refused or without a meaning here. The batch follows DeepSpeed's
rule: the whole batch is the micro-batch times the accumulation steps times the replicas, and what
is left out follows from the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from megaprec.errors import did_you_mean
from tools.arguments.deepspeed import IDLE, READ, REFUSED, TABLES, idle
from tools.console.units import counted
from tools.importing.draft import ASSUMED, DEEPSPEED, Draft

DTYPES = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}
FUSED_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
CLIP = 1.0  # the default of gradient_clipping
ADAMS = ("adam", "adamw")
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,), "whole number": (int,), "number": (int, float), "text": (str,), "list": (list,),
}  # fmt: skip
TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            key
            for key in READ
            if key.endswith(
                (
                    "enabled",
                    "_comm",
                    "_adam",
                    "_mode",
                    "_hysteresis",
                    "_overflow",
                    "_grads",
                    "_states",
                )
            )
        ),
        "bool",
    ),
    **dict.fromkeys((key for key in READ if key.endswith(("type", "_dtype"))), "text"),
    **dict.fromkeys(
        (
            key
            for key in READ
            if key.endswith(("_size", "_gpu", "_steps", "_print", "stage")) and "bucket" not in key
        ),
        "whole number",
    ),
    **dict.fromkeys(
        ("fp16.loss_scale_window", "fp16.hysteresis", "fp16.initial_scale_power"), "whole number"
    ),
    "optimizer.params.betas": "list",
}
SHIFT = (
    "DeepSpeed's schedules are one step behind: a step here has the rate of DeepSpeed's next step"
)


@dataclass
class Config:
    """The leaves of a file. place: its name. leaves: by dotted key; null counts as not given."""

    place: str
    leaves: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        return self.leaves.get(key, default)

    def shown(self, key: str) -> str:
        """Return a key with its value and file, for a line to the user."""
        return f"{key} = {self.leaves.get(key)!r} ({self.place})"

    def origin(self, *keys: str) -> str:
        """Return the given ones of these keys, or that the value is DeepSpeed's default."""
        given = [f"{key} = {self.leaves[key]}" for key in keys if key in self.leaves]
        return ", ".join(given) if given else DEEPSPEED


def add_deepspeed(
    content: Mapping[str, Any], place: str, draft: Draft, ranks: int | None
) -> dict[str, str]:
    """Add the keys that DeepSpeed's configuration decides. Returns the leaves without a meaning
    here."""
    config = Config(place)
    unused = dict[str, str]()
    for path, value in _leaves("", content):
        problem = _problem(path, value, config, draft)
        if problem:
            draft.problems.append(f"{path} = {value!r} ({place}): {problem}")
        elif path in READ and value is not None:
            config.leaves[path] = value
        elif path not in READ and idle(path):
            unused[path] = f"{path} = {value!r}"
    _add_batch(config, draft, ranks)
    _add_precision(config, draft)
    _add_zero(config, draft)
    _add_optimizer(config, draft)
    _add_schedule(config, draft)
    if "steps_per_print" in config.leaves:
        _put(draft, "log.every", config.get("steps_per_print"), config.origin("steps_per_print"))
    return unused


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def _problem(path: str, value: Any, config: Config, draft: Draft) -> str:
    """Return why a leaf is refused; "" if it is not."""
    if path in READ:
        if value == "auto":
            settled = any(key in draft.settled for key in READ[path])
            if settled:
                return ""
            return f"what it will be is not known: give {READ[path][0]}=... beside the file"
        kind = TYPES.get(path, "number")
        right = value is None or (
            isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
        )
        finite = not isinstance(value, float) or isfinite(value)
        if right and finite:
            return ""
        if not right:
            return f"must be a {kind}"
        return "must be finite"
    if path in TABLES:
        return "" if value in (None, {}) else "must be a table of keys in braces"
    parts = path.split(".")
    table = next(
        (name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in REFUSED), ""
    )
    if table:
        permitted, why = REFUSED[table]
        if (table == path and any(value == one for one in permitted)) or value == {}:
            return ""
        return why
    if idle(path) or (value == {} and any(key.startswith(f"{path}.") for key in READ)):
        return ""
    return f"no such key of DeepSpeed is known here{did_you_mean(path, [*READ, *REFUSED, *IDLE])}"


def _put(draft: Draft, key: str, value: Any, origin: str) -> None:
    """Set a key; a value that the arguments give otherwise is a problem."""
    if value == "auto":
        return
    assumed = origin in ASSUMED
    if not draft.given(key):
        draft.put(key, value, origin)
    elif not assumed and draft.keys[key].value != value and draft.needs(key):
        before = draft.keys[key]
        draft.problems.append(
            f"{key}: {before.origin} says {before.value}, but {origin} says {value}: keep one "
            "of them"
        )


def _add_batch(config: Config, draft: Draft, ranks: int | None) -> None:
    """Add batch, micro-batch and replicas by DeepSpeed's rule."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (
        None if config.get(name) == "auto" else config.get(name) for name in names
    )
    origin = config.origin(*names)
    if any(size is not None and size < 1 for size in (whole, micro, steps)):
        draft.problems.append(f"{origin} ({config.place}): give numbers from 1 on")
        return
    whole = draft.value("train.global_batch") if whole is None else whole
    micro = draft.value("train.micro_batch") if micro is None else micro
    data = _replicas(draft, ranks, whole, micro, steps)
    if whole is None and micro is None:
        return
    if data is None and (whole is None or micro is None):
        if draft.needs("train.global_batch") or draft.needs("train.micro_batch"):
            draft.problems.append(
                f"{origin} ({config.place}): the rest depends on the number of ranks: give "
                "--ranks N"
            )
        return
    whole, micro, steps = _completed(whole, micro, steps, data or 1)
    if data and whole != micro * steps * data:
        rule = f"{whole} is not {micro} x {steps} x {data} replicas, as DeepSpeed demands"
        rule += "; --ranks gives another number of them" if ranks else ""
        draft.problems.append(f"{origin} ({config.place}): {rule}")
        return
    _put(draft, "train.global_batch", whole, origin)
    _put(draft, "train.micro_batch", micro, origin)
    if data:
        _put(draft, "parallel.data", data, counted(ranks, "rank") if ranks else origin)


def _replicas(
    draft: Draft, ranks: int | None, whole: int | None, micro: int | None, steps: int | None
) -> int | None:
    """Return the number of replicas: as given, by the ranks, or by the three sizes; None if it is
    not known."""
    if "parallel.data" in draft.settled:
        return draft.settled["parallel.data"].value
    model = (draft.value("parallel.tensor", 1) or 1) * (draft.value("parallel.pipeline", 1) or 1)
    if ranks:
        return ranks // model
    if whole and micro and steps and whole % (micro * steps) == 0:
        return whole // (micro * steps)
    return None


def _completed(
    whole: int | None, micro: int | None, steps: int | None, data: int
) -> tuple[int, int, int]:
    """Return the three sizes by DeepSpeed's rule, of which the whole batch or the micro-batch is
    known."""
    if micro is None:
        assert whole is not None
        steps = steps or 1
        return whole, whole // data // steps, steps
    if whole is None:
        return micro * (steps or 1) * data, micro, steps or 1
    return whole, micro, steps or whole // micro // data


def _add_precision(config: Config, draft: Draft) -> None:
    bf16 = config.get("bf16.enabled", config.get("bfloat16.enabled", False))
    fp16 = config.get("fp16.enabled", False)
    if bf16 is True and fp16 is True:
        draft.problems.append(f"fp16.enabled and bf16.enabled ({config.place}): give one of them")
        return
    if bf16 is True:
        half = "bf16"
    elif fp16 is True:
        half = "fp16"
    else:
        half = "fp32"
    origin = config.origin("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    if "auto" in (bf16, fp16) or (origin == DEEPSPEED and "precision.compute" in draft.keys):
        return
    _put(draft, "precision.compute", half, origin)
    if DTYPES.get(config.get("data_types.param_dtype", half), "") != half:
        shown = config.shown("data_types.param_dtype")
        draft.problems.append(f"{shown}: the weights are {half} by {origin}: remove it")
    sharded = bool(config.get("zero_optimization.stage", 0))
    usual = "fp32" if half == "fp32" or (half == "bf16" and not sharded) else half
    for key, name, default in (
        ("precision.gradients", "data_types.grad_accum_dtype", usual),
        ("precision.reduce", "communication_data_type", half),
    ):
        said = config.get(name, default)
        if said not in DTYPES:
            draft.problems.append(f"{config.shown(name)}: the dtypes are fp32, fp16 and bf16")
        elif half != "fp32":
            _put(draft, key, DTYPES[said], config.origin(name))
    checks = config.get("bf16.check_grad_overflow", True) if half == "bf16" else True
    _put(
        draft,
        "precision.on_nonfinite",
        "skip" if checks else "ignore",
        config.origin("bf16.check_grad_overflow"),
    )
    if half == "bf16":
        _add_narrow_state(config, draft, sharded)
    if half == "fp16":
        _add_scaling(config, draft)


def _add_narrow_state(config: Config, draft: Draft, sharded: bool) -> None:
    """Add master weights and moments in BF16, by the rules of DeepSpeed."""
    masters = "bf16.bf16_master_weights_and_grads"
    moments = "bf16.bf16_optimizer_states"
    if config.get(masters) and not sharded:
        draft.problems.append(
            f"{config.shown(masters)}: DeepSpeed needs zero_optimization.stage 1 or higher with it"
        )
    if config.get(moments) and not config.get(masters):
        draft.problems.append(f"{config.shown(moments)}: DeepSpeed needs {masters} = true with it")
    if config.get(masters):
        _put(draft, "precision.masters", "none", config.origin(masters))
    if config.get(moments):
        _put(draft, "precision.moments", "bf16", config.origin(moments))


def _add_scaling(config: Config, draft: Draft) -> None:
    if scale := config.get("fp16.loss_scale", 0):
        _put(draft, "precision.loss_scale", float(scale), config.origin("fp16.loss_scale"))
        for key in ("initial_scale", "min_scale", "growth_interval", "hysteresis"):
            draft.keys.pop(f"precision.{key}", None)
        return
    power = config.get("fp16.initial_scale_power", 16)
    if not 0 <= power <= 127:
        draft.problems.append(
            f"{config.shown('fp16.initial_scale_power')}: give a power of two from 0 to 127"
        )
        return
    values = {
        "initial_scale": (2.0**power, "fp16.initial_scale_power"),
        "growth_interval": (config.get("fp16.loss_scale_window", 1000), "fp16.loss_scale_window"),
        "hysteresis": (config.get("fp16.hysteresis", 2), "fp16.hysteresis"),
        "min_scale": (float(config.get("fp16.min_loss_scale", 1)), "fp16.min_loss_scale"),
    }
    for key, (value, name) in values.items():
        _put(draft, f"precision.{key}", value, config.origin(name))
    refill = "good_step" if config.get("fp16.consecutive_hysteresis", False) else "growth"
    _put(draft, "precision.hysteresis_refill", refill, config.origin("fp16.consecutive_hysteresis"))


def _add_zero(config: Config, draft: Draft) -> None:
    stage = config.get("zero_optimization.stage", 0)
    if stage == "auto":
        return
    if stage not in (0, 1, 2, 3):
        draft.problems.append(
            f"{config.shown('zero_optimization.stage')}: the stages are 0, 1, 2 and 3"
        )
        return
    if stage == 3 and draft.needs("parallel.zero"):
        way = (
            "parallel.tensor and parallel.pipeline divide them; parallel.zero=true beside the "
            "file takes ZeRO-1 instead"
        )
        why = f"weights are not sharded over replicas here: {way}"
        draft.problems.append(f"{config.shown('zero_optimization.stage')}: {why}")
        return
    if stage == 2:
        draft.notes.append(
            "ZeRO-2 becomes ZeRO-1: the results are the same, each rank holds its whole gradients"
        )
    _put(draft, "parallel.zero", stage > 0, config.origin("zero_optimization.stage"))
    if config.get("zero_optimization.overlap_comm") is True:
        _put(draft, "parallel.overlap", True, config.origin("zero_optimization.overlap_comm"))
    bucket = config.get("zero_optimization.reduce_bucket_size", "auto")
    if bucket != "auto":
        _put(
            draft,
            "parallel.bucket",
            round(bucket),
            config.origin("zero_optimization.reduce_bucket_size"),
        )


def _add_optimizer(config: Config, draft: Draft) -> None:
    clip = config.get("gradient_clipping", CLIP)
    left_open = "gradient_clipping" not in config.leaves and "optimizer.clip" not in draft.keys
    if left_open and draft.needs("optimizer.clip"):
        draft.notes.append(
            f"gradient_clipping ({config.place}) is left open: {CLIP}, as DeepSpeed does "
            "since June 2026; before, it "
            "did not clip (optimizer.clip=0)"
        )
    if "gradient_clipping" in config.leaves or "optimizer.clip" not in draft.keys:
        _put(
            draft,
            "optimizer.clip",
            clip if clip == "auto" else float(clip),
            config.origin("gradient_clipping"),
        )
    kind = config.get("optimizer.type")
    if kind in (None, "auto"):
        return
    params = {name: config.get(f"optimizer.params.{name}") for name in (*FUSED_ADAM, "momentum")}
    if kind.lower() in ADAMS:
        if config.get("optimizer.params.adam_w_mode", True) is False and kind.lower() == "adam":
            draft.problems.append(
                f"{config.shown('optimizer.params.adam_w_mode')}: weight decay is decoupled "
                "in adamw; "
                "optimizer.name=Adam beside the file adds it to the gradient"
            )
        _put(draft, "optimizer.name", "adamw", config.origin("optimizer.type"))
        usual = dict(FUSED_ADAM)
        usual |= {"weight_decay": 0.01} if config.get("optimizer.params.torch_adam") is True else {}
        for name in ("betas", "eps", "weight_decay"):
            value = usual[name] if params[name] is None else params[name]
            _put(draft, f"optimizer.{name}", value, config.origin(f"optimizer.params.{name}"))
    elif kind.lower() == "sgd":
        _put(draft, "optimizer.name", "sgd", config.origin("optimizer.type"))
        _put(
            draft,
            "optimizer.options",
            {"momentum": params["momentum"] or 0.0},
            config.origin("optimizer.params.momentum"),
        )
        _put(
            draft,
            "optimizer.weight_decay",
            params["weight_decay"] or 0.0,
            config.origin("optimizer.params.weight_decay"),
        )
    elif draft.needs("optimizer.name"):
        rules = (
            "adamw, sgd, muon and elementwise ones of torch.optim: give optimizer.name=... "
            "beside the file"
        )
        draft.problems.append(
            f"{config.shown('optimizer.type')}: the update rules here are {rules}"
        )
        return
    if draft.value("optimizer.weight_decay"):
        draft.notes.append(
            "DeepSpeed decays all parameters that it is given; here biases and norms have no "
            "weight decay "
            "(optimizer.groups changes it by name)"
        )
    if config.get("scheduler.type") is None:
        _put(
            draft, "lr.peak", params["lr"] or FUSED_ADAM["lr"], config.origin("optimizer.params.lr")
        )
        if "lr.schedule" not in draft.keys:
            _put(draft, "lr.schedule", "constant", "no scheduler in DeepSpeed's configuration")


def _add_schedule(config: Config, draft: Draft) -> None:
    kind = config.get("scheduler.type")
    if kind in (None, "auto"):
        return
    if kind not in SCHEDULES:
        if draft.needs("lr.schedule"):
            draft.problems.append(
                f"{config.shown('scheduler.type')}: of DeepSpeed's, {', '.join(SCHEDULES)} are read"
            )
        return

    def get(name: str, default: Any) -> Any:
        return config.get(f"scheduler.params.{name}", default)

    cosine = kind == "WarmupCosineLR"
    start = "warmup_min_ratio" if cosine else "warmup_min_lr"
    if get(start, 0) not in (0, 0.0, "auto"):
        draft.problems.append(
            f"{config.shown(f'scheduler.params.{start}')}: warm-up begins at 0 here"
        )
    warmup = get("warmup_num_steps", 1000)
    if (form := get("warmup_type", "log")) not in ("log", "linear", "auto"):
        draft.problems.append(
            f"{config.shown('scheduler.params.warmup_type')}: DeepSpeed's are log and linear"
        )
    if form == "log" and warmup != 0 and draft.needs("lr.warmup"):
        said = config.origin("scheduler.params.warmup_type")
        draft.problems.append(
            f"scheduler.params.warmup_type ({config.place}): warm-up is linear here, but "
            f"{said} is log: write linear, "
            "or give lr.warmup=N beside the file"
        )
    peak_key = "optimizer.params.lr" if cosine else "scheduler.params.warmup_max_lr"
    peak = config.get(peak_key, FUSED_ADAM["lr"])
    _put(draft, "lr.peak", peak, config.origin(peak_key))
    if cosine:
        shape = "cosine"
    elif kind == "WarmupDecayLR":
        shape = "linear"
    else:
        shape = "constant"
    _put(draft, "lr.schedule", shape, config.origin("scheduler.type"))
    _put(draft, "lr.warmup", warmup, config.origin("scheduler.params.warmup_num_steps"))
    if shape != "constant":
        _add_end(config, draft, get, cosine, peak)
    draft.notes.append(SHIFT)


def _add_end(config: Config, draft: Draft, get: Any, cosine: bool, peak: Any) -> None:
    total = get("total_num_steps", None)
    if total is None:
        draft.problems.append(
            f"scheduler.params.total_num_steps ({config.place}) is missing, which DeepSpeed needs"
        )
        return
    _put(draft, "lr.length", total, config.origin("scheduler.params.total_num_steps"))
    ratio = get("cos_min_ratio", 0.0001) if cosine else 0.0
    if "auto" not in (ratio, peak):
        final = ratio * peak
        _put(
            draft,
            "lr.final",
            final,
            config.origin("scheduler.params.cos_min_ratio") if cosine else "0, as WarmupDecayLR",
        )
