"""Matrix products that torch fuses with their transfers over tp: asynchronous tensor parallelism.

A call works in parts, one for each rank. A GPU copies the next part from the memory of another GPU,
or another GPU copies it from here, while the present one is multiplied. That memory is symmetric:
each rank has a workspace in it that all others may read, as large as two shards of an activation.
Sums over ranks are made by each rank, of products that were rounded to the dtype of the factors.

On a CPU torch's own unfused forms stand for the calls: a collective, and a product.

Ranks have shards of dim 0, in rank order. Matrices are those of `x @ matrix`.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.waiting import waiting
from megaprec.errors import Problem, UserError
from megaprec.precision.plan import PrecisionPlan
from megaprec.torch_private import fused_products

# of the products that are tried before a run
_ROWS = 4
_FEATURES = 16


def product_of_gathered(shard: Tensor, matrix: Tensor, tp: Axis) -> Tensor:
    """Return the product of `matrix` [k, m] with the shards [n, ..., k] of all ranks of tp:
    [size * n, ..., m]."""
    _, product = _gather_product(shard, matrix, tp, keeps_gathered=False)
    return product


def gathered_and_product(shard: Tensor, matrix: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """Return the shards [n, ..., k] of all ranks of tp, all-gathered to [size * n, ..., k], and
    their product with `matrix` [k, m]."""
    gathered, product = _gather_product(shard, matrix, tp, keeps_gathered=True)
    assert gathered is not None, "it was asked for"
    return gathered, product


def _gather_product(
    shard: Tensor,
    matrix: Tensor,
    tp: Axis,
    keeps_gathered: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the all-gathered shards, None unless `keeps_gathered`, and their product with
    `matrix`, by torch's fused all-gather and product."""
    all_gather_and_multiply, _ = fused_products(shard.device.type)
    # Transfer and product are one call, so on a CPU the product counts as a wait too.
    with waiting():
        gathered, (product,) = all_gather_and_multiply(
            shard.contiguous(), [matrix], 0, _group_name(tp), return_A=keeps_gathered
        )
    return gathered, product


def sum_of_products(x: Tensor, matrix: Tensor, tp: Axis) -> Tensor:
    """Return this rank's shard [n, ..., m] of the sum over tp of the ranks' products x @ matrix.

    x: [size * n, ..., k]. matrix: [k, m].
    """
    _, multiply_and_reduce_scatter = fused_products(x.device.type)
    with waiting():
        return multiply_and_reduce_scatter(x, matrix, "sum", 0, _group_name(tp))


def _group_name(tp: Axis) -> str:
    assert tp.group is not None, "an axis of several ranks has a group"
    return tp.group.group_name


def async_tensor_problems(
    plan: PrecisionPlan,
    ranks: int,
    sequence: bool,
    canonical: bool,
) -> list[Problem]:
    """Return the reasons why no product of a run can be fused with its transfers; none if some can.

    ranks: of tp. sequence: sequence parallelism is asked for. canonical: the sums of virtual ranks
        have one order in every layout.
    """
    problems: list[Problem] = []
    if canonical:
        problems.append(Problem.of("parallel.async_tensor_canonical"))
    elif ranks == 1:
        problems.append(Problem.of("parallel.async_tensor_alone"))
    elif not sequence:
        problems.append(Problem.of("parallel.async_tensor_sequence"))
    if plan.fp8 is not None:
        problems.append(Problem.of("parallel.async_tensor_fp8", kind=plan.fp8.kind))
    return problems


def require_fused_products(mesh: DeviceMesh | None, device: torch.device) -> None:
    """Raise UserError, on every rank of the mesh, unless all of them can compute fused products.

    Collective over the world; products are tried over tp. GPUs without access to each other's
    memory lack them. The line of each reason names the last of the ranks that have it.
    """
    world = Axis.world(mesh)
    own_reasons: dict[str, str] = {}
    if reason := _hindrance(Axis.of(mesh, "tp"), device):
        own_reasons[reason] = f"rank {world.rank}"
    problems: list[Problem] = []
    # over the world: other tensor groups would wait for one that is refused
    for text, where in gather_entries(own_reasons, world, device).items():
        problems.append(Problem.of("parallel.async_tensor_unavailable", where=where, reason=text))
    if problems:
        raise UserError(*problems)


def _hindrance(tp: Axis, device: torch.device) -> str:
    """Return why fused products of small matrices cannot be computed or are wrong; "" if they are
    right. Collective over tp."""
    rank_numbers = torch.arange(1.0, tp.size + 1, device=device)
    number_of_row = rank_numbers.repeat_interleave(_ROWS).unsqueeze(1)
    whole = number_of_row.repeat(1, _FEATURES)  # the shard of rank r is full of r + 1
    shard = tp.chunk(whole)
    matrix = torch.eye(_FEATURES, device=device)
    try:
        gathered, product = gathered_and_product(shard, matrix, tp)
        same_product = product_of_gathered(shard, matrix, tp)
        summed = sum_of_products(whole, matrix, tp)
        # a kernel that has failed is seen here
        are_whole = [torch.equal(x, whole) for x in (gathered, product, same_product)]
        is_right = all(are_whole) and torch.equal(summed, tp.size * shard)
    # torch and the driver raise what they like
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    return "" if is_right else "torch's symmetric memory returns wrong numbers"
