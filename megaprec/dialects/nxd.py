"""NeuronX Distributed (NxD): Standard Mixed Precision on Trainium and Inferentia.

Always BF16, never a loss scale. With ZeRO-1 weights have FP32 masters and gradients are accumulated and reduced in
FP32 unless told otherwise. Without either, which is the legacy mode, weights are updated in BF16 and stochastically
rounded.

    [precision.nxd]                     mixed_precision_config of NxD's configuration
    use_master_weights = true           default: whether ZeRO-1 is on
    use_fp32_grad_acc = true            default: whether ZeRO-1 is on
    use_master_weights_in_ckpt = false
    [precision.nxd.optimizer_config]    of the same configuration
    zero_one_enabled = true             NxD's default is false; that of a run file is its `parallel.zero`
    grad_clipping = true
    max_grad_norm = 1.0

NxD itself drops max_grad_norm under ZeRO-1 and clips at 1.0; here it is honoured.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from megaprec.dialects.reading import Keys, Reading, Resolved, all_of
from megaprec.plan import PrecisionPlan

SYSTEM, PREFIX = "NxD", "precision.nxd"
MASTERS, ACCUMULATE, IN_CHECKPOINT = "use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"
ZERO = "optimizer_config.zero_one_enabled"


class MixedPrecisionConfig(Keys):
    """`mixed_precision_config`: None follows ZeRO-1."""

    use_master_weights: bool | None = None
    use_fp32_grad_acc: bool | None = None
    use_master_weights_in_ckpt: bool = False
    optimizer_config: Any = None


class OptimizerConfig(Keys):
    """The keys of `optimizer_config` that bear on precision."""

    zero_one_enabled: bool = False
    grad_clipping: bool = True
    max_grad_norm: float = Field(default=1.0, gt=0)


def resolve(config: Mapping[str, Any] | None, places: Mapping[str, str] | None = None) -> Resolved:
    """What `config`, a mixed_precision_config with an optimizer_config inside, says. Raises UserError.

    places: where its keys stand, by full dotted key.
    """
    reading = Reading(SYSTEM, PREFIX, places)
    precision = reading.read(MixedPrecisionConfig, config or {})
    optimizer = reading.read(OptimizerConfig, precision.optimizer_config or {}, "optimizer_config")
    zero = optimizer.zero_one_enabled
    masters = zero if precision.use_master_weights is None else precision.use_master_weights
    accumulates = zero if precision.use_fp32_grad_acc is None else precision.use_fp32_grad_acc
    in_checkpoint = precision.use_master_weights_in_ckpt
    asked = {MASTERS: masters, ACCUMULATE: accumulates, IN_CHECKPOINT: in_checkpoint}
    for key in (key for key, on in asked.items() if on and not zero):
        reading.refuse(key, True, f"needs ZeRO-1: set {PREFIX}.{ZERO} = true")
    if zero and in_checkpoint and not masters:
        reading.refuse(IN_CHECKPOINT, True, f"there are no master weights to save: set {MASTERS} = true")
    reading.done()
    legacy = not (masters or accumulates or in_checkpoint)
    decisions = {
        **all_of(("compute", "pipeline", "parameters"), reading.always(torch.bfloat16)),
        **all_of(("masters", "moments"), reading.by(_wide(masters), MASTERS)),
        **all_of(("gradients", "reduce"), reading.by(_wide(accumulates), ACCUMULATE)),
        "rounding": reading.by("stochastic" if legacy else "nearest", MASTERS, ACCUMULATE),
        "masters_in_checkpoint": reading.by(in_checkpoint, IN_CHECKPOINT),
        "sensitive": reading.always(torch.float32),
    }
    norm = "optimizer_config.max_grad_norm" if optimizer.grad_clipping else "optimizer_config.grad_clipping"
    settings = {
        "parallel.zero": reading.by(zero, ZERO),
        "optimizer.clip": reading.by(optimizer.max_grad_norm if optimizer.grad_clipping else 0.0, norm),
    }
    return reading.resolved(decisions, settings)


def _wide(on: bool) -> torch.dtype:
    return torch.float32 if on else torch.bfloat16


def express(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The one configuration that comes nearest to a plan and to the run-file keys in `settings`."""
    masters, accumulates = plan.masters == torch.float32, plan.gradients == torch.float32
    legacy = plan.rounding == "stochastic" and not masters
    zero = settings.get("parallel.zero", not legacy)
    optimizer: dict[str, Any] = {"zero_one_enabled": zero}
    if "optimizer.clip" in settings:
        clip = settings["optimizer.clip"]
        optimizer |= {"grad_clipping": True, "max_grad_norm": clip} if clip else {"grad_clipping": False}
    asked = {MASTERS: masters and zero, ACCUMULATE: accumulates and zero}
    return [asked | {IN_CHECKPOINT: plan.masters_in_checkpoint and masters and zero, "optimizer_config": optimizer}]
