"""Length, batch, learning rate, optimizer and precision of Megatron-LM's arguments.

Megatron-LM counts its schedule in samples, whatever unit the arguments have: training.py's
`get_optimizer_param_scheduler` multiplies iterations by the global batch.

All goes into the draft of a run file. A key that the user gives beside the arguments counts instead
of them: if the draft does not need it (`Draft.needs`), an argument for it may be missing, or have a
value that has no meaning here.
"""

from typing import Any

from megaprec.dialects.nemo import resolve
from megaprec.errors import UserError
from megaprec.optim.rules.lr import SCHEDULES
from megaprec.optim.rules.rule_table import NAMES, name_here
from tools.config.tables.native_keys import native_keys_of
from tools.config.tables.precision_settings import FP8, PLAN_ONLY
from tools.interop.arguments.megatron import option
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.draft import NO_HALF
from tools.interop.importing.megatron_batches import (
    IN_STEPS,
    NO_RANKS_FOR_BATCH,
    batches_of,
    iteration_samples,
    steps_of_samples,
)

TAILS = {
    "exponential": "exponential",
    "linear": "linear",
    "cosine": "cosine",
    "minus_sqrt": "sqrt",
}
STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
# fields of NeMo's plugin that Megatron-LM has under another name
FP16_NAMES = (
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)
# fields that both have
SAME_NAMES = (
    "fp8",
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_param_gather",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "use_precision_aware_optimizer",
    "fp4",
    "fp4_recipe",
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}
DTYPE_NAMES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
PLANS = {"bf16": ("bf16-mixed", "bfloat16"), "fp16": ("16-mixed", "float16")}
# keys of [precision] and of [fp8], and the arguments that they come from
SCALE = {
    "initial_scale": "initial_loss_scale",
    "min_scale": "min_loss_scale",
    "growth_interval": "loss_scale_window",
    "hysteresis": "hysteresis",
}
FORMATS = {"fp8": "fp8_format", "fp4": "fp4_format"}
FP8_NAMES = {
    "kind": "fp8_recipe",
    "format": "fp8",
    "margin": "fp8_margin",
    "history_length": "fp8_amax_history_len",
    "amax_algo": "fp8_amax_compute_algo",
    "parameters": "fp8_param_gather",
    "weight_gradients": "fp8_wgrad",
    "first_layers": "num_layers_at_start_in_bf16",
    "last_layers": "num_layers_at_end_in_bf16",
}
RAMP_OF_DECAY = ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style")
MUON = (
    "; Megatron's iterates with other coefficients each time (quintic) and by default on each "
    "tensor-parallel rank's rows alone (--muon-tp-mode blockwise), muon here with the same ones on "
    "whole matrices: optimizer.name=muon beside these arguments takes it (docs/optimizer.md)"
)


def add_length(arguments: Arguments) -> None:
    """Add the length of the run and the batch."""
    _require(arguments, "train.seq_length", "seq_length")
    _require(arguments, "train.micro_batch", "micro_batch_size")
    _add_steps(arguments)
    arguments.copy("train.seed", "seed")
    if arguments.get("deterministic_mode"):
        arguments.copy("train.deterministic", "deterministic_mode")


def _require(arguments: Arguments, key: str, *names: str) -> None:
    """Set a key to the first of these arguments. Add a problem unless one of them, or the key, is
    given."""
    draft = arguments.draft
    if arguments.has(names[0]):
        arguments.copy(key, names[0])
    elif draft.needs(key):
        options = " or ".join(map(option, names))
        draft.missing.append(
            f"{options} is missing, which Megatron-LM needs: {key}=N beside gives it"
        )


def _add_steps(arguments: Arguments) -> None:
    """Add the length of the run in steps, of --train-iters or of --train-samples."""
    draft = arguments.draft
    batch = draft.value("train.global_batch")
    if not arguments.has("train_samples"):
        _require(arguments, "train.steps", "train_iters", "train_samples")
    elif arguments.has("train_iters"):
        arguments.refuse("give one of them", "train_iters", "train_samples")
    elif isinstance(batch, int) and batch > 0:
        samples = arguments.get("train_samples")
        steps = steps_of_samples(arguments, samples, batch)
        arguments.put("train.steps", steps, "train_samples")
        taken = batches_of(draft, batch).after(0, steps)
        if taken < samples:
            draft.notes.append(
                f"--train-samples {samples} are {steps} steps; the last part of a batch is left out"
            )
        if taken > samples:
            draft.notes.append(
                f"--train-samples {samples} are {steps} steps of {taken} samples, as in Megatron-LM"
            )


def add_rate(arguments: Arguments) -> None:
    """Add the schedule of the learning rate."""
    draft = arguments.draft
    _require(arguments, "lr.peak", "lr")
    _refuse_decoupled(arguments)
    style = arguments.get("lr_decay_style")
    if style in STYLES:
        arguments.put("lr.schedule", STYLES[style], "lr_decay_style")
    elif draft.needs("lr.schedule"):
        schedules = ", ".join(SCHEDULES)
        arguments.refuse(f"the schedules here are {schedules} (lr.schedule)", "lr_decay_style")
        return
    arguments.copy("lr.final", "min_lr")
    if arguments.has("lr_warmup_init"):
        arguments.copy("lr.initial", "lr_warmup_init")
    steps = draft.value("train.steps")
    batch = draft.value("train.global_batch")
    if isinstance(steps, int) and isinstance(batch, int) and min(steps, batch) > 0:
        _add_lengths(arguments, steps, batch)
    if style != "WSD":
        return
    tail = TAILS[arguments.get("lr_wsd_decay_style")]
    arguments.put("lr.wsd_decay", tail, "lr_wsd_decay_style")
    if "lr.decay" not in draft.keys and draft.needs("lr.decay"):
        draft.missing.append("--lr-decay-style WSD needs --lr-wsd-decay-iters or -samples")


def _refuse_decoupled(arguments: Arguments) -> None:
    """Refuse the rates of embedding and head, of which the last one counts beside the first
    alone."""
    peak = "decoupled_lr"
    last = "decoupled_min_lr"
    if arguments.has(peak):
        why = "the learning rate is one schedule: optimizer.groups has factors by name"
        arguments.refuse(why, *filter(arguments.has, (peak, last)))
    elif arguments.has(last):
        said = arguments.origin(last)
        arguments.draft.notes.append(f"{said}: without {option(peak)} it changes nothing")


def _add_lengths(arguments: Arguments, steps: int, batch: int) -> None:
    """Add warm-up, decay and length, in samples where the arguments are."""
    draft = arguments.draft
    by_samples = arguments.has("train_samples")
    unit, other_unit = ("samples", "iters") if by_samples else ("iters", "samples")
    _refuse_lengths_in(arguments, other_unit, unit)
    if by_samples:
        arguments.put("lr.unit", "samples", "train_samples")
    run_length = arguments.get("train_samples") if by_samples else steps
    # with batches that change a schedule of iterations is one of samples
    is_converted = not by_samples and arguments.has(IN_STEPS)
    factor = _convert_to_samples(arguments) if is_converted else 1
    length = (arguments.get(f"lr_decay_{unit}") or run_length) * factor
    _add_warmup(arguments, length, f"lr_warmup_{unit}", factor)
    taken = batches_of(draft, batch).after(0, steps)
    in_samples = by_samples or is_converted
    if length != run_length or (in_samples and length != taken):
        origin = arguments.origin(f"lr_decay_{unit}", "train_samples", "train_iters")
        draft.put("lr.length", length, origin)
    decay = f"lr_wsd_decay_{unit}"
    if arguments.has(decay):
        arguments.put("lr.decay", arguments.get(decay) * factor, decay)


def _refuse_lengths_in(arguments: Arguments, unit: str, unit_of_run: str) -> None:
    """Add a problem for each length of the schedule in another unit than that of the run."""
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        length = f"{name}_{unit}"
        if arguments.has(length) and arguments.get(length):
            why = f"the length of the run is in {unit_of_run}, so this must be too"
            arguments.refuse(why, length)


def _convert_to_samples(arguments: Arguments) -> int:
    """Set the unit of the schedule to samples, and return those of an iteration."""
    draft = arguments.draft
    if not draft.given("parallel.data") and draft.needs("parallel.data"):
        draft.missing.append(f"a schedule of --train-iters {NO_RANKS_FOR_BATCH}")
    factor = iteration_samples(arguments)
    origin = f"{arguments.said[IN_STEPS]}, with {factor} samples an iteration"
    draft.put("lr.unit", "samples", origin)
    draft.notes.append(
        f"lr.unit: Megatron-LM counts each iteration of its schedule as {factor} samples, a "
        "micro-batch of each replica, whatever the batch is: the rates are the same here"
    )
    return factor


def _add_warmup(arguments: Arguments, length: int, name: str, factor: int) -> None:
    """Add the warm-up. name: of the argument that says it, if it is no share of the length. factor:
    by which it is multiplied."""
    draft = arguments.draft
    fraction = "lr_warmup_fraction"
    if not arguments.has(fraction):
        arguments.put("lr.warmup", arguments.get(name) * factor, name)
        return
    if arguments.get(name):
        arguments.refuse("give one of them", fraction, name)
    share = arguments.get(fraction) * length
    warmup = round(share)
    if abs(share - warmup) > 1e-9 * max(1.0, share) and draft.needs("lr.warmup"):
        arguments.refuse(f"are {share:g} of {length}, no whole number: give lr.warmup=N", fraction)
    arguments.put("lr.warmup", warmup, fraction)


def add_optimizer(arguments: Arguments) -> None:
    """Add the update rule."""
    draft = arguments.draft
    name = arguments.get("optimizer")
    rule = name_here(name)
    if rule == "adamw":
        arguments.put("optimizer.name", rule, "optimizer")
        betas = [arguments.get("adam_beta1"), arguments.get("adam_beta2")]
        arguments.put("optimizer.betas", betas, "adam_beta1", "adam_beta2")
        arguments.copy("optimizer.eps", "adam_eps")
    elif rule == "sgd":
        arguments.put("optimizer.name", rule, "optimizer")
        options = {"momentum": arguments.get("sgd_momentum")}
        arguments.put("optimizer.options", options, "sgd_momentum")
    elif rule == "lion":
        arguments.put("optimizer.name", rule, "optimizer")
        betas = [arguments.get("lion_beta1"), arguments.get("lion_beta2")]
        arguments.put("optimizer.options", {"betas": betas}, "lion_beta1", "lion_beta2")
    elif draft.needs("optimizer.name"):
        rules = (
            f"the update rules here are {NAMES} and elementwise ones of torch.optim "
            "(optimizer.name)"
        )
        arguments.refuse(rules + (MUON if "muon" in name else ""), "optimizer")
    _add_heads_of_muon(arguments)
    arguments.copy("optimizer.weight_decay", "weight_decay")
    _refuse_ramp_of_decay(arguments)
    arguments.copy("optimizer.clip", "clip_grad")
    _add_qk_clip(arguments)
    _add_offload(arguments)


def _add_heads_of_muon(arguments: Arguments) -> None:
    """Add that Muon orthogonalizes heads one by one, where the user takes the rule here for
    Megatron-LM's."""
    name = "muon_split_qkv_per_head"
    if not arguments.get(name):
        return
    if arguments.draft.value("optimizer.name") == "muon":
        arguments.put("optimizer.options", {"per_head": True}, name)
    else:
        arguments.unused[name] = arguments.said[name]


def _add_qk_clip(arguments: Arguments) -> None:
    """Add the largest attention logit that leaves queries and keys as they are."""
    settings = ("qk_clip_threshold", "qk_clip_alpha")
    if not arguments.get("qk_clip"):
        for name in filter(arguments.has, settings):
            arguments.unused[name] = arguments.said[name]
        return
    arguments.put("optimizer.qk_clip", arguments.get("qk_clip_threshold"), "qk_clip", settings[0])
    arguments.copy("optimizer.qk_clip_alpha", "qk_clip_alpha")


def _add_offload(arguments: Arguments) -> None:
    """Add whether masters and moments lie in host memory: all of them, or none."""
    switch = "optimizer_cpu_offload"
    fraction = "optimizer_offload_fraction"
    if not arguments.get(switch):
        if arguments.has(fraction):
            arguments.unused[fraction] = arguments.said[fraction]
        return
    moved = arguments.get(fraction)
    arguments.put("optimizer.offload", "host" if moved > 0 else "none", switch, fraction)
    if 0 < moved < 1:
        arguments.draft.notes.append(
            f"{arguments.origin(fraction)}: all masters and moments lie in host memory here, which "
            "changes no number"
        )


def _refuse_ramp_of_decay(arguments: Arguments) -> None:
    """Refuse a weight decay that increases from a first value, without which its other arguments
    change nothing."""
    first, *others = RAMP_OF_DECAY
    given = [*filter(arguments.has, others)]
    if arguments.has(first):
        why = "weight decay is constant here: optimizer.weight_decay counts without them"
        arguments.refuse(why, first, *given)
    elif arguments.get("weight_decay_incr_style") != "constant":
        said = arguments.origin(*given)
        arguments.draft.notes.append(f"{said}: without {option(first)} it changes nothing")


def add_precision(arguments: Arguments) -> None:
    """Add [precision] and [fp8], as the dialect of NeMo reads the same settings of Megatron-LM."""
    draft = arguments.draft
    halves = [name for name in PLANS if arguments.get(name)]
    if len(halves) == len(PLANS):
        arguments.refuse("give one of them", *halves)
        return
    (half,) = halves or ["fp32"]
    if arguments.get("fp4") and half != "bf16":
        why = "Transformer Engine's NVFP4 takes BF16 alone: give --bf16, and no --fp16"
        arguments.refuse(why, "fp4", *halves)
        return
    try:
        plan = resolve(_fields_of_nemo(arguments, half)).plan
    except UserError as error:
        draft.problems += map(_typed_name, error.problems)
        return
    keys = native_keys_of(plan)
    draft.put("precision.compute", half, arguments.origin(half) if halves else NO_HALF)
    if half != "fp32":
        names = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "main_grads_dtype")
        arguments.put("precision.gradients", keys["precision.gradients"], *names)
    moments = keys["precision.moments"]
    if moments != "fp32":
        arguments.put("precision.moments", moments, "exp_avg_dtype", "exp_avg_sq_dtype")
    if arguments.get("fp32_residual_connection"):
        arguments.put("precision.residual", "fp32", "fp32_residual_connection")
    _add_scaling(arguments, keys, half)
    if plan.fp8 is not None:
        _add_fp8(arguments, keys)


def _fields_of_nemo(arguments: Arguments, half: str) -> dict[str, Any]:
    """Return the settings as fields of NeMo's plugin."""
    precision, dtype = PLANS.get(half, ("32", "float32"))
    # BF16 accumulates gradients in FP32 unless told otherwise, FP16 only if asked
    in_fp32 = {
        "bf16": not arguments.get("grad_reduce_in_bf16"),
        "fp16": arguments.get("accumulate_allreduce_grads_in_fp32"),
    }
    fields: dict[str, Any] = {name: arguments.get(name) for name in SAME_NAMES}
    fields |= {"precision": precision, "params_dtype": dtype}
    fields["grad_reduce_in_fp32"] = in_fp32.get(half, True)
    for name in DTYPE_NAMES:
        if arguments.get(name) != "fp32":
            fields[name] = DTYPES[arguments.get(name)]
    for name in FP16_NAMES:
        value = arguments.get(name)
        is_unset = name == "loss_scale" and not value  # Megatron-LM takes 0 as no constant scale
        if arguments.has(name) and not is_unset:
            is_count = name == "loss_scale_window" and value == int(value)
            fields[f"fp16_{name}"] = int(value) if is_count else value
    return fields


def _typed_name(problem: str) -> str:
    """Return a problem of the dialect by the name that is typed."""
    text = problem.removeprefix("precision.nemo.").removesuffix(" (NeMo)")
    key, sign, rest = text.partition(" ")
    name = FORMATS.get(key, key.removeprefix("fp16_"))
    return f"{option(name)}{sign}{rest}"


def _add_scaling(arguments: Arguments, keys: dict[str, Any], half: str) -> None:
    """Add loss scaling, and what happens to a step with inf or NaN.

    keys: of a run file, for the precision of these arguments. half: "bf16", "fp16", or "fp32" for
        neither.
    """
    draft = arguments.draft
    scaling = keys["precision.scaling"]
    checks = "check_for_nan_in_loss_and_grad"
    if scaling == "constant":
        origin = arguments.origin("loss_scale")
        draft.put("precision.loss_scale", keys["precision.loss_scale"], origin)
    if scaling == "dynamic":
        for key, name in SCALE.items():
            arguments.put(f"precision.{key}", keys[f"precision.{key}"], name)
        draft.put("precision.on_nonfinite", "skip", "--fp16 with a dynamic loss scale")
    elif arguments.get(checks):
        arguments.put("precision.on_nonfinite", "raise", checks)
    else:
        # with a loss scale Megatron-LM skips a step with inf even so; its FP32 optimizer does not
        skips = half != "fp32" and scaling == "constant"
        arguments.put("precision.on_nonfinite", "skip" if skips else "ignore", checks)


def _add_nvfp4(arguments: Arguments, keys: dict[str, Any]) -> None:
    """Add [fp8] of NVFP4, of which only the layers in BF16 are said, as those of FP8 are."""
    arguments.put("fp8.kind", keys["fp8.kind"], "fp4", "fp4_recipe")
    for key, name in FP8_NAMES.items():
        if key in ("first_layers", "last_layers"):
            if keys[f"fp8.{key}"]:
                arguments.put(f"fp8.{key}", keys[f"fp8.{key}"], "first_last_layers_bf16", name)
        elif arguments.has(name):
            said = arguments.origin(name)
            arguments.draft.notes.append(f"{said}: beside --fp4-format this changes nothing")


def _add_fp8(arguments: Arguments, keys: dict[str, Any]) -> None:
    """Add [fp8] of FP8 or of NVFP4."""
    if arguments.get("fp4"):
        _add_nvfp4(arguments, keys)
        return
    for key, field in FP8.model_fields.items():
        dotted = f"fp8.{key}"
        names = [FP8_NAMES[key]] if key in FP8_NAMES else ["fp8_recipe", "fp8"]
        given = key in FP8_NAMES and arguments.has(FP8_NAMES[key])
        if dotted in keys and dotted not in PLAN_ONLY and (keys[dotted] != field.default or given):
            arguments.put(dotted, keys[dotted], *names)
