"""Settings under which sums over micro-batches and data-parallel ranks cannot have the same bits in
every layout."""

from collections.abc import Iterator, Sequence

from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.errors import Problem, UserError
from megaprec.optim.torch_wrappers import is_dtensor
from megaprec.precision.plan import PrecisionPlan, dtype_name


def canonical_conflicts(plan: PrecisionPlan, dp: int) -> Iterator[Problem]:
    """Yield a problem for each setting that is incompatible with canonical sums. dp: number of
    data-parallel ranks."""
    if dp & (dp - 1):  # no power of two
        yield Problem.of("optimizer.canonical_ranks", ranks=dp)
    if plan.reduce != plan.gradients:
        yield Problem.of(
            "optimizer.canonical_reduce",
            gradients=dtype_name(plan.gradients),
            reduce=dtype_name(plan.reduce),
        )


def require_canonical(
    model_parts: Sequence[nn.Module],
    plan: PrecisionPlan,
    dp: Axis,
    tp: Axis,
    average: bool,
) -> None:
    """Raise UserError if the sums over these parameters' gradients would depend on the layout."""
    problems = list(canonical_conflicts(plan, dp.size))
    if tp.size > 1:
        problems.append(Problem.of("optimizer.canonical_tensor", ranks=tp.size))
    if average:
        problems.append(Problem.of("optimizer.canonical_average"))
    for parameter in parameters_of(model_parts):
        layout = layout_of(parameter)
        name = layout.parts[0].name
        if is_dtensor(parameter):
            problems.append(Problem.of("optimizer.canonical_fsdp", name=name))
            break
        if len(layout.tied) > 2:  # a sum of two is the same in any order
            problems.append(Problem.of("optimizer.canonical_tied", name=name))
    if problems:
        raise UserError(*problems)
