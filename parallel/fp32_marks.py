"""Model parts marked FP32 (`megaprec.precision.marks`) in a model that is built from the parallel
layers.

A layer fixes its dtypes when it is built: it holds a Context or a provider of its products. In a
marked part both are replaced by FP32 ones. No value between the layers of the part is rounded, and
none of its products is in FP8. Inputs of the part are cast to FP32. Its outputs are cast back to
the dtype of the input, of the products or of the residual stream. The optimizer holds the part's
weights, gradients and master weights in FP32 on every rank; it finds them by their names.
"""

import torch
from torch import nn

from megaprec.errors import UserError
from megaprec.fp8.linear import FP8Gemm
from megaprec.fp8.params import unmark_fp8
from megaprec.precision.gemm import Gemm
from megaprec.precision.marks import CASTS_ITSELF, compute_in_fp32, outermost_marked
from megaprec.precision.plan import PrecisionPlan
from parallel.context import Context
from parallel.norms import LayerNorm, RMSNorm


def compute_marked_in_fp32(model: nn.Module, plan: PrecisionPlan) -> None:
    """Make the marked parts of `model`, which was built by `plan`, compute in the sensitive dtype.

    Call this once, before the optimizer is made. Raises UserError for a part that casts itself.
    """
    for path, module in model.named_modules():
        if hasattr(module, CASTS_ITSELF):
            raise UserError.of(
                "parallel.fp32_mark_on_wrapper",
                path=path or "the model",
                kind=type(module).__name__,
            )
    for _, part in outermost_marked(model):
        for module in part.modules():
            _widen(module, plan)
        # norms of this project round to the dtype of products, whatever their input has
        norm_dtype = plan.compute if isinstance(part, RMSNorm | LayerNorm) else None

        # `norm_dtype` is a default argument, so that the function keeps that of this part: the loop
        # goes on to others
        def output_dtype(
            input_dtype: torch.dtype | None, norm_dtype: torch.dtype | None = norm_dtype
        ) -> torch.dtype:
            return norm_dtype or input_dtype or plan.residual

        compute_in_fp32(part, output_dtype, plan.sensitive)


def _widen(module: nn.Module, plan: PrecisionPlan) -> None:
    """Make one module, without its submodules, compute in the sensitive dtype: replace its context
    and what computes its products, cast its buffers, and mark its weights as not in FP8."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Context):
            setattr(module, name, value.in_fp32())
        elif isinstance(value, Gemm | FP8Gemm):
            if isinstance(value, FP8Gemm):
                value.state.leave_out(value.eligibility, "it is in a part that is marked FP32")
            gemm = Gemm(dtype=plan.sensitive, out=plan.sensitive, tf32=plan.tf32)
            setattr(module, name, gemm)
    # Weights of the part have no FP8 codes. The optimizer changes their dtype.
    for parameter in module.parameters(recurse=False):
        unmark_fp8(parameter)
    for table in module.buffers(recurse=False):
        if table.is_floating_point():
            table.data = table.data.to(plan.sensitive)
