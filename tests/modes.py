"""Every mode of the five dialects, and what dtypes its system says that it has."""

from dataclasses import dataclass
from typing import Any

import torch

from megaprec.dialects.reading import Resolved
from megaprec.dialects.translate import DIALECTS
from megaprec.precision.plan import DTYPES, PrecisionPlan, plan

KEPT = ("norm.weight", "embedding.weight", "layers.0.mlp.", "head.weight")


@dataclass(frozen=True)
class Mode:
    """What a dialect is told, and the dtypes that must come of it, each a key of plan.DTYPES.

    weights to moments: of all parameters but those kept in FP32. sent: between stages. residual:
        what layers add to.
    logits: in training.
    kept: what the names of those parameters contain that are FP32 throughout.
    """

    system: str
    config: Any
    weights: str
    products: str
    gradients: str
    travel: str
    masters: str
    moments: str
    sent: str
    residual: str = ""  # those of products if not given
    logits: str = ""  # those of products if not given
    attention: str = (
        ""  # those of products if not given: query, key and value, between attention's two products
    )
    tables: str = "fp32"
    kept: tuple[str, ...] = ()
    tf32: bool = False

    @property
    def unit(self) -> float:
        """The largest relative error of a rounding to the coarsest dtype that activations pass
        through."""
        dtypes = {
            self.weights,
            self.products,
            self.logits or self.products,
            self.attention or self.products,
        }
        return max(
            2.0**-11 if self.tf32 else 0.0, *(torch.finfo(DTYPES[name]).eps / 2 for name in dtypes)
        )


ZERO = {"optimizer_config": {"zero_one_enabled": True}}
START = {"grad_scaler": {"fp16": {"initial_scale": 1024.0}}}


def nxd(**config: Any) -> Any:
    return {**config, **ZERO}


def fsdp(**config: Any) -> Any:
    return {"mixed_precision": config}


def apex(level: str, **config: Any) -> Any:
    return {"fp16": {"mode": "APEX", "opt_level": level, **config}}


B = "bf16"
H = "fp16"
F = "fp32"
MODES = {
    "NxD standard": Mode("nxd", nxd(), B, B, F, F, F, F, B),
    "NxD without FP32 accumulation": Mode("nxd", nxd(use_fp32_grad_acc=False), B, B, B, B, F, F, B),
    "NxD without masters": Mode("nxd", nxd(use_master_weights=False), B, B, F, F, B, B, B),
    "NxD legacy": Mode("nxd", None, B, B, B, B, B, B, B),
    "FSDP bf16": Mode("smp", fsdp(param_dtype="bfloat16"), B, B, F, B, F, F, B),
    "FSDP bf16, reduced in fp32": Mode(
        "smp", fsdp(param_dtype="bfloat16", reduce_dtype="float32"), B, B, F, F, F, F, B
    ),
    "FSDP bf16, low gradients and buffers": Mode(
        "smp",
        fsdp(param_dtype="bfloat16", keep_low_precision_grads=True, buffer_dtype="bfloat16"),
        *(B, B, B, B, F, F, B),
        tables=B,
    ),
    "FSDP fp32": Mode("smp", fsdp(), F, F, F, F, F, F, F),
    "FSDP fp32, reduced in bf16": Mode("smp", fsdp(reduce_dtype="bfloat16"), F, F, F, B, F, F, F),
    "FSDP fp16": Mode(
        "smp",
        fsdp(param_dtype="float16") | {"grad_scaler": {"init_scale": 2.0**10}},
        H,
        H,
        F,
        H,
        F,
        F,
        H,
    ),
    "FSDP2 bf16": Mode("smp", {"mp_policy": {"param_dtype": "bfloat16"}}, B, B, F, B, F, F, B),
    "FSDP2 fp32, output bf16": Mode(
        "smp", {"mp_policy": {"output_dtype": "bfloat16"}}, F, F, F, F, F, F, F, logits=B
    ),
    "TORCH": Mode("colossalai", {"fp16": {"mode": "TORCH"}}, F, H, F, F, F, F, F, residual=F),
    "APEX O0": Mode("colossalai", apex("O0"), F, F, F, F, F, F, F),
    "APEX O0, output fp16": Mode(
        "colossalai", apex("O0", cast_model_outputs="float16"), F, F, F, F, F, F, F, logits=H
    ),
    "APEX O1": Mode("colossalai", apex("O1"), F, H, F, F, F, F, F, residual=F),
    "APEX O2": Mode("colossalai", apex("O2"), H, H, F, H, F, F, H, kept=("norm",)),
    "APEX O3": Mode("colossalai", apex("O3"), H, H, H, H, H, F, H),
    "PARALLEL": Mode(
        "colossalai", {"fp16": {"mode": "PARALLEL", "initial_scale": 2.0**13}}, H, H, H, H, F, F, H
    ),
    "InternEvo bf16": Mode(
        "internevo", {"dtype": "torch.bfloat16", **START}, B, B, B, B, F, F, B, tables=B
    ),
    "InternEvo fp16": Mode(
        "internevo", {"dtype": "torch.float16", **START}, H, H, H, H, F, F, H, tables=H
    ),
    "InternEvo bf16 without flash attention": Mode(
        "internevo",
        {"dtype": "torch.bfloat16", "use_flash_attn": False, **START},
        B,
        B,
        B,
        B,
        F,
        F,
        B,
        tables=B,
    ),
    "InternEvo tf32": Mode(
        "internevo", {"dtype": "torch.tf32"}, F, F, F, F, F, F, F, tf32=True, attention=B
    ),
    "InternEvo tf32 without flash attention": Mode(
        "internevo",
        {"dtype": "torch.tf32", "use_flash_attn": False},
        F,
        F,
        F,
        F,
        F,
        F,
        F,
        tf32=True,
    ),
    "InternEvo bf16, norms fp32": Mode(
        "internevo",
        {"dtype": "torch.bfloat16", "use_fp32_norm": True, **START},
        *(B, B, B, B, F, F, B),
        tables=B,
        kept=("norm",),
    ),
    "InternEvo bf16, residual fp32": Mode(
        "internevo",
        {"dtype": "torch.bfloat16", "residual_in_fp32": True, **START},
        *(B, B, B, B, F, F, F),
        tables=B,
        residual=F,
    ),
    "NeMo bf16-mixed": Mode("nemo", {"precision": "bf16-mixed"}, B, B, F, F, F, F, B),
    "NeMo 16-mixed": Mode(
        "nemo",
        {"precision": "16-mixed", "fp16_initial_loss_scale": 2.0**24, "fp16_hysteresis": 1},
        H,
        H,
        F,
        F,
        F,
        F,
        F,
    ),
    "NeMo fp16_mixed": Mode(
        "nemo", {"recipe": "fp16_mixed", "fp16_initial_loss_scale": 2.0**10}, H, H, H, H, F, F, H
    ),
    "native, kept in fp32": Mode(
        "native",
        {"compute": B, "keep_fp32": [f"*{name}*" for name in KEPT]},
        *(B, B, F, F, F, F, B),
        logits=F,
        kept=KEPT,
    ),
    "NeMo autocast": Mode(
        "nemo", {"precision": "bf16", "autocast_enabled": True}, F, B, F, F, F, F, B, residual=F
    ),
    "native, residual fp32": Mode(
        "native",
        {"compute": B, "residual": DTYPES[F], "pipeline": DTYPES[F]},
        B,
        B,
        F,
        F,
        F,
        F,
        F,
        residual=F,
    ),
}


def resolved(mode: Mode) -> tuple[PrecisionPlan, bool, float]:
    """The plan, whether state is cut over dp, and at which norm gradients are clipped."""
    if mode.system == "native":
        return plan(**mode.config), True, 1.0
    made: Resolved = DIALECTS[mode.system].resolve(mode.config)
    zero, clip = (made.settings.get(key) for key in ("parallel.zero", "optimizer.clip"))
    return made.plan, zero is None or zero.value, 1.0 if clip is None else clip.value
