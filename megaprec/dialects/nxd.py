"""Dialect of NeuronX Distributed (NxD): Standard Mixed Precision on Trainium and Inferentia.

BF16 without a loss scale. With ZeRO-1, weights have FP32 masters, and gradients are accumulated and
reduced in FP32, by default. In the legacy mode, without both, weights are updated in BF16 with
stochastic rounding.

    [precision.nxd]                     mixed_precision_config of NxD's configuration
    use_master_weights = true           default: true with ZeRO-1
    use_fp32_grad_acc = true            default: true with ZeRO-1
    use_master_weights_in_ckpt = false
    [precision.nxd.optimizer_config]    of the same configuration
    zero_one_enabled = true             NxD's default is false; in a run file the default is its
                                        `parallel.zero`
    grad_clipping = true
    max_grad_norm = 1.0
    [precision.nxd.environment]         variables that the training script sets, "0" or "1"
    NEURON_RT_STOCHASTIC_ROUNDING_EN = "1"      rounds stochastically where FP32 becomes BF16
    XLA_USE_BF16 = "0"                  "1" makes every FP32 tensor BF16
    XLA_DOWNCAST_BF16 = "1"             "1" makes every FP32 tensor BF16 and every FP64 tensor FP32

A file of neuronx-distributed-training gives `precision_type` instead: its `precision.type`, which
sets the keys above. NxD itself ignores max_grad_norm under ZeRO-1 and clips at 1.0; megaprec uses
it.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from megaprec.dialects.reading import Decision, Keys, Reading, Resolved, all_of
from megaprec.precision.plan import PrecisionPlan

SYSTEM = "NxD"
PREFIX = "precision.nxd"
# keys that decide something, as dotted names below PREFIX
MASTERS = "use_master_weights"
ACCUMULATE = "use_fp32_grad_acc"
IN_CHECKPOINT = "use_master_weights_in_ckpt"
ZERO = "optimizer_config.zero_one_enabled"
STOCHASTIC = "environment.NEURON_RT_STOCHASTIC_ROUNDING_EN"
ALL_BF16 = "environment.XLA_USE_BF16"
TYPE = "precision_type"
# precision types of neuronx-distributed-training (its model/base.py and training_orchestrator.py)
FOLLOWS_ZERO = ("mixed_precision", "mixed_precisionSR", "mixed_precision_SR", "autocast")
"""Precision types that have masters and FP32 accumulation with ZeRO-1."""
ROUNDS_STOCHASTICALLY = ("mixed_precisionSR", "mixed_precision_SR", "bf16SR")


class MixedPrecisionConfig(Keys):
    """Keys of `mixed_precision_config`. None: true with ZeRO-1."""

    use_master_weights: bool | None = None
    use_fp32_grad_acc: bool | None = None
    use_master_weights_in_ckpt: bool = False
    optimizer_config: Any = None
    environment: Any = None
    precision_type: Literal[
        "mixed_precision",
        "mixed_precisionSR",
        "mixed_precision_SR",
        "bf16SR",
        "fp32",
        "autocast",
        "manual",
    ] = "manual"


class OptimizerConfig(Keys):
    """The keys of `optimizer_config` that concern precision."""

    zero_one_enabled: bool = False
    grad_clipping: bool = True
    max_grad_norm: float = Field(default=1.0, gt=0)


Switch = Literal["0", "1"]


class Environment(Keys):
    """Environment variables that change numbers on Neuron devices.

    XLA_DOWNCAST_BF16 decides nothing here: NxD needs it for FP32 masters, which it makes FP64 then;
    a plan has them without it.
    """

    NEURON_RT_STOCHASTIC_ROUNDING_EN: Switch | None = None
    XLA_USE_BF16: Switch = "0"
    XLA_DOWNCAST_BF16: Switch = "0"


def resolve(config: Mapping[str, Any] | None, sources: Mapping[str, str] | None = None) -> Resolved:
    """Return the plan and settings of `config`, a mixed_precision_config that contains an
    optimizer_config.

    sources: full dotted key -> where it was set: a file or the command line. Raises UserError.
    """
    reading = Reading(SYSTEM, PREFIX, sources)
    precision = reading.read(MixedPrecisionConfig, config)
    optimizer = reading.read(OptimizerConfig, precision.optimizer_config, "optimizer_config")
    environment = reading.read(Environment, precision.environment, "environment")
    zero = optimizer.zero_one_enabled  # on which the defaults of mixed precision depend
    has_masters = _is_on(precision, MASTERS, zero)
    accumulates = _is_on(precision, ACCUMULATE, zero)
    is_on = {MASTERS: has_masters, ACCUMULATE: accumulates}
    _refuse_contradictions(reading, precision, environment, is_on, zero)
    reading.raise_problems()
    if precision.precision_type == "manual":
        dtype = reading.always(torch.bfloat16)
    elif precision.precision_type == "fp32":
        dtype = reading.decided_by(torch.float32, TYPE)
    else:
        dtype = reading.decided_by(torch.bfloat16, TYPE)
    # without masters the optimizer updates the weights, with moments in their dtype
    state = torch.float32 if has_masters else dtype.value
    gradients = torch.float32 if accumulates else dtype.value
    decisions = {
        **all_of(("compute", "pipeline", "parameters"), dtype),
        **all_of(("masters", "moments"), reading.decided_by(state, MASTERS, TYPE)),
        **all_of(("gradients", "reduce"), reading.decided_by(gradients, ACCUMULATE, TYPE)),
        "rounding": _rounding(reading, precision, environment, has_masters or accumulates),
        "masters_in_checkpoint": reading.decided_by(
            precision.use_master_weights_in_ckpt, IN_CHECKPOINT
        ),
        "sensitive": reading.always(torch.float32),
    }
    if optimizer.grad_clipping:
        clip = reading.decided_by(optimizer.max_grad_norm, "optimizer_config.max_grad_norm")
    else:
        clip = reading.decided_by(0.0, "optimizer_config.grad_clipping")
    settings = {"parallel.zero": reading.decided_by(zero, ZERO), "optimizer.clip": clip}
    return reading.resolved(decisions, settings, _notes(reading, precision))


def _is_on(precision: MixedPrecisionConfig, key: str, zero: bool) -> bool:
    """Return True if NxD has FP32 masters, or accumulates in FP32, whichever `key` is about.

    zero: True with ZeRO-1, which is the default of both keys.
    """
    # every type but "manual" overrides both keys
    if precision.precision_type != "manual":
        return zero and precision.precision_type in FOLLOWS_ZERO
    value = getattr(precision, key)
    return zero if value is None else value


def _refuse_contradictions(
    reading: Reading,
    precision: MixedPrecisionConfig,
    environment: Environment,
    is_on: Mapping[str, bool],
    zero: bool,
) -> None:
    """Record a problem for each key whose value does not go with another one.

    is_on: for the keys MASTERS and ACCUMULATE, the value that takes effect.
    """
    in_checkpoint = precision.use_master_weights_in_ckpt
    if not zero:
        for key, value in {**is_on, IN_CHECKPOINT: in_checkpoint}.items():
            if value:
                reading.refuse(key, True, f"needs ZeRO-1: set {PREFIX}.{ZERO} = true")
    if zero and in_checkpoint and not is_on[MASTERS]:
        reading.refuse(
            IN_CHECKPOINT, True, f"there are no master weights to save: set {MASTERS} = true"
        )
    # masters and accumulation need FP32 tensors
    fp32_keys = [key for key, value in is_on.items() if value]
    if environment.XLA_USE_BF16 == "1" and fp32_keys:
        reading.refuse(
            ALL_BF16,
            "1",
            f'makes every FP32 tensor BF16, which contradicts {fp32_keys[0]}: set it to "0"',
        )


def _rounding(
    reading: Reading,
    precision: MixedPrecisionConfig,
    environment: Environment,
    is_mixed: bool,
) -> Decision:
    """Return the rounding that the precision type or the environment sets.

    By default the legacy mode rounds stochastically and mixed precision to nearest.
    """
    if precision.precision_type != "manual":
        stochastic = precision.precision_type in ROUNDS_STOCHASTICALLY
        return reading.decided_by("stochastic" if stochastic else "nearest", TYPE)
    switch = environment.NEURON_RT_STOCHASTIC_ROUNDING_EN
    if switch is not None:
        return reading.decided_by("stochastic" if switch == "1" else "nearest", STOCHASTIC)
    return reading.decided_by("nearest" if is_mixed else "stochastic", MASTERS, ACCUMULATE)


def _notes(reading: Reading, precision: MixedPrecisionConfig) -> tuple[str, ...]:
    """Return a note on the keys that a precision type overrides, if they are set."""
    if precision.precision_type == "manual":
        return ()
    keys = (MASTERS, ACCUMULATE, "environment")
    idle = [key for key in keys if f"{PREFIX}.{key}" in reading.set_keys]
    if not idle:
        return ()
    why = f'precision_type = "{precision.precision_type}" decides: they are used only with "manual"'
    return (f"{', '.join(idle)}: {why}",)


def express(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return configurations that approximate a plan and the run-file keys in `settings`."""
    has_masters = plan.masters == torch.float32
    accumulates = plan.gradients == torch.float32
    # the legacy mode is the only one without ZeRO-1, so of other plans ZeRO-1 is nearer
    is_legacy = plan.rounding == "stochastic" and not has_masters
    zero = settings.get("parallel.zero", not is_legacy)
    optimizer: dict[str, Any] = {"zero_one_enabled": zero}
    clip = settings.get("optimizer.clip")
    if clip:
        optimizer |= {"grad_clipping": True, "max_grad_norm": clip}
    elif clip is not None:  # 0: no clipping, while max_grad_norm must be positive
        optimizer["grad_clipping"] = False
    # without ZeRO-1 NxD refuses all three keys
    manual = {
        MASTERS: has_masters and zero,
        ACCUMULATE: accumulates and zero,
        "optimizer_config": optimizer,
        IN_CHECKPOINT: plan.masters_in_checkpoint and has_masters and zero,
    }
    variable = STOCHASTIC.removeprefix("environment.")
    rounding = {variable: "1" if plan.rounding == "stochastic" else "0"}
    fp32 = {"precision_type": "fp32", "optimizer_config": optimizer}
    return [manual, manual | {"environment": rounding}, fp32]
