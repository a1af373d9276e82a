"""Settings under which sums over micro-batches and data-parallel ranks cannot have the same bits in
every layout."""

from collections.abc import Iterator, Sequence

from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.optim.torch_wrappers import is_dtensor
from megaprec.precision.plan import PrecisionPlan, dtype_name


def canonical_conflicts(plan: PrecisionPlan, dp: int) -> Iterator[str]:
    """Yield a line for each setting that is incompatible with canonical sums. dp: number of
    data-parallel ranks."""
    if dp & (dp - 1):  # no power of two
        yield (
            "canonical numerics add gradients by a binary tree, so the number of data-parallel "
            f"ranks must be a power of two, not {dp}"
        )
    if plan.reduce != plan.gradients:
        yield (
            "canonical numerics add gradients over data-parallel ranks in the dtype in which they "
            f"are accumulated, {dtype_name(plan.gradients)}: leave precision.reduce = "
            f"{dtype_name(plan.reduce)} out"
        )


def require_canonical(
    model_parts: Sequence[nn.Module], plan: PrecisionPlan, dp: Axis, tp: Axis, average: bool
) -> None:
    """Raise UserError if the sums over these parameters' gradients would depend on the layout."""
    problems = list(canonical_conflicts(plan, dp.size))
    if tp.size > 1:
        problems.append(
            f"canonical = True: the sums over {tp.size} tensor-parallel ranks depend on their "
            "number"
        )
    if average:
        problems.append(
            "canonical = True: the average over data-parallel ranks rounds small gradients by "
            "their number: divide each loss by the samples of all ranks, and give average = False"
        )
    for parameter in parameters_of(model_parts):
        layout = layout_of(parameter)
        name = layout.parts[0].name
        if is_dtensor(parameter):
            problems.append(
                f"canonical = True: the gradients of {name} are summed by fully_shard: leave "
                "fully_shard out, because the optimizer shards its state over dp by itself"
            )
            break
        if len(layout.tied) > 2:  # a sum of two is the same in any order
            problems.append(f"canonical = True: {name} is tied over more than two pipeline ranks")
    if problems:
        raise UserError(*problems)
