"""Length, batch, learning rate, optimizer and precision of Megatron-LM's arguments.

Megatron-LM counts its schedule in samples, whatever unit the arguments have: training.py's
`get_optimizer_param_scheduler` multiplies iterations by the global batch.
"""

from typing import Any

from megaprec.dialects.nemo import resolve
from megaprec.errors import UserError
from megaprec.precision.plan import PrecisionPlan
from tools.arguments.megatron import option
from tools.config.native_keys import native_keys_of
from tools.config.precision_settings import FP8, PLAN_ONLY
from tools.importing.draft import MEGATRON, NO_HALF, Draft
from tools.importing.arguments import Arguments

STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
NAMES = {"fp16_loss_scale": "loss_scale", "fp16_initial_loss_scale": "initial_loss_scale"}
NAMES |= {"fp16_min_loss_scale": "min_loss_scale", "fp16_loss_scale_window": "loss_scale_window"}
NAMES |= {"fp16_hysteresis": "hysteresis"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}
SCALE = ("initial_scale", "min_scale", "growth_interval", "hysteresis")


def add_length(a: Arguments, draft: Draft) -> None:
    """Add the length of the run and the batch."""
    draft.put("train.seq_length", a.get("seq_length"), a.origin("seq_length"))
    draft.put("train.micro_batch", a.get("micro_batch_size"), a.origin("micro_batch_size"))
    for name, key in (
        ("seq_length", "train.seq_length"),
        ("micro_batch_size", "train.micro_batch"),
    ):
        if not a.has(name):
            del draft.keys[key]
            if draft.needs(key) and name not in a.tried:
                draft.missing.append(f"{option(name)} is missing, which Megatron-LM needs")
    _add_steps(a, draft)
    draft.put("train.seed", a.get("seed"), a.origin("seed"))


def _add_steps(a: Arguments, draft: Draft) -> None:
    batch = draft.value("train.global_batch")
    if a.has("train_iters") and a.has("train_samples"):
        a.refuse("give one of them", "train_iters", "train_samples")
    elif a.has("train_samples"):
        if not isinstance(batch, int) or batch < 1:
            return
        samples = a.get("train_samples")
        draft.put("train.steps", samples // batch, a.origin("train_samples"))
        if samples % batch:
            draft.notes.append(
                f"--train-samples {samples} are {samples // batch} steps; the last part of a "
                "batch is left out"
            )
    elif a.has("train_iters"):
        draft.put("train.steps", a.get("train_iters"), a.origin("train_iters"))
    elif draft.needs("train.steps") and not {"train_iters", "train_samples"} & a.tried:
        draft.missing.append("--train-iters or --train-samples is missing, which Megatron-LM needs")


def add_rate(a: Arguments, draft: Draft) -> None:
    """Add the schedule of the learning rate."""
    if a.has("lr"):
        draft.put("lr.peak", a.get("lr"), a.origin("lr"))
    elif draft.needs("lr.peak") and "lr" not in a.tried:
        draft.missing.append("--lr is missing, which Megatron-LM needs")
    style = a.get("lr_decay_style")
    if style not in STYLES:
        if draft.needs("lr.schedule"):
            a.refuse(
                f"the schedules here are {', '.join(STYLES.values())} (lr.schedule)",
                "lr_decay_style",
            )
        return
    draft.put("lr.schedule", STYLES[style], a.origin("lr_decay_style"))
    draft.put("lr.final", a.get("min_lr"), a.origin("min_lr"))
    steps = draft.value("train.steps")
    batch = draft.value("train.global_batch")
    if isinstance(steps, int) and isinstance(batch, int) and steps > 0 and batch > 0:
        _add_lengths(a, draft, steps, batch)
    if style == "WSD":
        _check_wsd(a, draft)


def _add_lengths(a: Arguments, draft: Draft, steps: int, batch: int) -> None:
    """Add warm-up, decay and length, in samples where the arguments are, or where a share is no
    whole step."""
    by_samples = a.has("train_samples")
    unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if a.has(f"{name}_{other}") and a.get(f"{name}_{other}"):
            a.refuse(f"the length of the run is in {unit}, so this must be too", f"{name}_{other}")
    whole = a.get("train_samples") if by_samples else steps
    length = a.get(f"lr_decay_{unit}") or whole
    warmup = a.get(f"lr_warmup_{unit}")
    origin = a.origin(f"lr_warmup_{unit}")
    factor = 1
    if a.has("lr_warmup_fraction"):
        if warmup:
            a.refuse("give one of them", "lr_warmup_fraction", f"lr_warmup_{unit}")
        share = a.get("lr_warmup_fraction") * length
        origin = a.origin("lr_warmup_fraction")
        factor = 1 if by_samples or _whole(share) else batch
        warmup = round(share * factor)
        if not _whole(share * factor):
            draft.notes.append(
                f"{origin}: warm-up takes {warmup} samples, the nearest whole number to "
                f"{share * factor:g}"
            )
    in_samples = by_samples or factor > 1
    if in_samples:
        draft.put("lr.unit", "samples", origin if factor > 1 else a.origin("train_samples"))
    draft.put("lr.warmup", warmup, origin)
    if length != whole or (by_samples and length != steps * batch):
        draft.put("lr.length", length * factor, a.origin(f"lr_decay_{unit}", "train_samples"))
    if a.has(f"lr_wsd_decay_{unit}"):
        draft.put(
            "lr.decay", a.get(f"lr_wsd_decay_{unit}") * factor, a.origin(f"lr_wsd_decay_{unit}")
        )


def _whole(number: float) -> bool:
    return abs(number - round(number)) < 1e-9 * max(1.0, abs(number))


def _check_wsd(a: Arguments, draft: Draft) -> None:
    if a.get("lr_wsd_decay_style") != "exponential" and draft.needs("lr.schedule"):
        a.refuse("the decay of wsd is exponential here", "lr_wsd_decay_style")
    if "lr.decay" not in draft.keys and draft.needs("lr.decay"):
        a.refuse("needs --lr-wsd-decay-iters or --lr-wsd-decay-samples", "lr_decay_style")


def add_optimizer(a: Arguments, draft: Draft) -> None:
    """Add the update rule."""
    name = a.get("optimizer")
    if name == "adam":
        draft.put("optimizer.name", "adamw", a.origin("optimizer"))
        draft.put(
            "optimizer.betas",
            [a.get("adam_beta1"), a.get("adam_beta2")],
            a.origin("adam_beta1", "adam_beta2"),
        )
        draft.put("optimizer.eps", a.get("adam_eps"), a.origin("adam_eps"))
    elif name == "sgd":
        draft.put("optimizer.name", "sgd", a.origin("optimizer"))
        draft.put(
            "optimizer.options", {"momentum": a.get("sgd_momentum")}, a.origin("sgd_momentum")
        )
    elif draft.needs("optimizer.name"):
        muon = (
            "; Megatron's iterates with other coefficients each time (quintic) and by "
            "default on each tensor-parallel "
            "rank's rows alone (--muon-tp-mode blockwise), muon here with the same ones on "
            "whole matrices: "
            "optimizer.name=muon beside these arguments takes it (docs/optimizer.md)"
        )
        rules = (
            "the update rules here are adamw, sgd, muon and elementwise ones of torch.optim "
            "(optimizer.name)"
        )
        a.refuse(rules + (muon if "muon" in name else ""), "optimizer")
    draft.put("optimizer.weight_decay", a.get("weight_decay"), a.origin("weight_decay"))
    draft.put("optimizer.clip", a.get("clip_grad"), a.origin("clip_grad"))


def add_precision(a: Arguments, draft: Draft) -> None:
    """Add [precision] and [fp8], as the dialect of NeMo reads the same settings of Megatron-LM."""
    if a.get("bf16") and a.get("fp16"):
        a.refuse("give one of them", "bf16", "fp16")
        return
    plan = _plan(a, draft)
    if plan is None:
        return
    if a.get("bf16"):
        half = "bf16"
    elif a.get("fp16"):
        half = "fp16"
    else:
        half = "fp32"
    keys = native_keys_of(plan)
    draft.put("precision.compute", half, a.origin(half) if half != "fp32" else NO_HALF)
    reduced = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "main_grads_dtype")
    if half != "fp32":
        draft.put("precision.gradients", keys["precision.gradients"], a.origin(*reduced))
    if keys["precision.moments"] != "fp32":
        draft.put(
            "precision.moments",
            keys["precision.moments"],
            a.origin("exp_avg_dtype", "exp_avg_sq_dtype"),
        )
    if a.get("fp32_residual_connection"):
        draft.put("precision.residual", "fp32", a.origin("fp32_residual_connection"))
    _add_scaling(a, draft, keys, half)
    if plan.fp8 is not None:
        _add_fp8(a, draft, keys)


def _plan(a: Arguments, draft: Draft) -> PrecisionPlan | None:
    if a.get("bf16"):
        half = "bf16-mixed"
    elif a.get("fp16"):
        half = "16-mixed"
    else:
        half = "32"
    said: dict[str, Any] = {"precision": half, "grad_reduce_in_fp32": _gradients_in_fp32(a)}
    said |= {
        "params_dtype": {"bf16-mixed": "bfloat16", "16-mixed": "float16", "32": "float32"}[half]
    }
    for name in (
        "fp8_recipe",
        "fp8_margin",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_wgrad",
    ):
        said[name] = a.get(name)
    said |= {"fp8": a.get("fp8"), "fp8_param_gather": a.get("fp8_param_gather")}
    said |= {"first_last_layers_bf16": a.get("first_last_layers_bf16")}
    said |= {
        f"num_layers_at_{end}_in_bf16": a.get(f"num_layers_at_{end}_in_bf16")
        for end in ("start", "end")
    }
    said["use_precision_aware_optimizer"] = a.get("use_precision_aware_optimizer")
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if a.get(name) != "fp32":
            said[name] = DTYPES[a.get(name)]
    for name, ours in NAMES.items():
        unset = ours == "loss_scale" and not a.get(ours)  # Megatron-LM takes 0 as no constant scale
        if a.has(ours) and not unset:
            value = a.get(ours)
            if ours == "loss_scale_window" and value == int(value):
                said[name] = int(value)
            else:
                said[name] = value
    try:
        return resolve(said).plan
    except UserError as error:
        draft.problems += [_typed_name(problem) for problem in error.problems]
        return None


def _typed_name(problem: str) -> str:
    """Return a problem of the dialect by the name that is typed."""
    key, sign, rest = problem.removeprefix("precision.nemo.").partition(" ")
    name = {"fp8": "fp8_format"}.get(key, NAMES.get(key, key))
    return f"{option(name)}{sign}{rest}"


def _gradients_in_fp32(a: Arguments) -> bool:
    """Return True if gradients are accumulated in FP32; BF16 does so unless told otherwise, FP16
    only if asked."""
    if a.get("bf16"):
        return not a.get("grad_reduce_in_bf16")
    return bool(a.get("accumulate_allreduce_grads_in_fp32")) or not a.get("fp16")


def _add_scaling(a: Arguments, draft: Draft, keys: dict[str, Any], half: str) -> None:
    """Add loss scaling, and what happens to a step with inf or NaN."""
    scaling = keys["precision.scaling"]
    if scaling == "constant":
        draft.put("precision.loss_scale", keys["precision.loss_scale"], a.origin("loss_scale"))
    elif scaling == "dynamic":
        theirs = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        for key, name in zip(SCALE, theirs, strict=True):
            draft.put(f"precision.{key}", keys[f"precision.{key}"], a.origin(name))
    if scaling == "dynamic":
        draft.put("precision.on_nonfinite", "skip", "--fp16 with a dynamic loss scale")
    elif a.get("check_for_nan_in_loss_and_grad"):
        draft.put("precision.on_nonfinite", "raise", MEGATRON)
    else:
        skips = half != "fp32" and scaling == "constant"
        kind = "skip" if skips else "ignore"
        draft.put("precision.on_nonfinite", kind, a.origin("check_for_nan_in_loss_and_grad"))


def _add_fp8(a: Arguments, draft: Draft, keys: dict[str, Any]) -> None:
    names = {
        "kind": "fp8_recipe", "format": "fp8", "margin": "fp8_margin", "history_length": "fp8_amax_history_len",
        "amax_algo": "fp8_amax_compute_algo", "parameters": "fp8_param_gather", "weight_gradients": "fp8_wgrad",
        "first_layers": "num_layers_at_start_in_bf16", "last_layers": "num_layers_at_end_in_bf16",
    }  # fmt: skip
    for key, field in FP8.model_fields.items():
        dotted = f"fp8.{key}"
        if dotted not in keys or dotted in PLAN_ONLY:
            continue
        name = names.get(key)
        if keys[dotted] != field.default or (name and a.has(name)):
            draft.put(
                dotted, keys[dotted], a.origin(name) if name else a.origin("fp8_recipe", "fp8")
            )
