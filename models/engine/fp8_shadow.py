"""A comparison of one micro-batch with FP8 and without FP8.

Compared are the loss and each weight gradient; the values that casts lose are counted.

The cosine between a weight's gradients with and without FP8 measures how much of the FP8 gradient
is the true gradient: independent noise of relative size r makes a cosine of 1 / sqrt(1 + r^2).
Gradients of dp ranks are not summed before the comparison, so each rank's micro-batch counts. A
value is saturated if it is beyond the largest number of its format, and underflowed if it is not
zero and is rounded to zero.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import layout_of
from megaprec.fp8.state import ROLES
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.partial_grads import sum_partial
from models.engine.passes import Passes, Share, require_steady_scales, require_whole_gradients
from parallel.pipeline.instructions import Op

Sums = dict[str, list[float]]
"""Sums over all ranks, by name: three products of a weight's gradients, or four counts of values in
casts (saturated, of all; underflowed, of all)."""


@dataclass(frozen=True)
class Shadow:
    """The comparison of one micro-batch on each dp rank.

    loss, wide_loss: the losses with FP8 and without, means over the tokens of the micro-batches
        that count.
    cosines: by logical weight; nan if a gradient is zero or not finite.
    saturated, underflowed: ratios by "<first logical weight of a product>.<role>", with the roles
        input, weight and gradient.
    """

    loss: float
    wide_loss: float
    cosines: Mapping[str, float]
    saturated: Mapping[str, float]
    underflowed: Mapping[str, float]

    @staticmethod
    def of(
        loss: float,
        wide_loss: float,
        sums: Sums,
    ) -> "Shadow":
        """Return the comparison.

        loss, wide_loss: with FP8 and without. sums: those of all stages.
        """
        cosines = {}
        saturated = {}
        underflowed = {}
        for name, numbers in sums.items():
            # three products of a weight's gradients, or four counts of values in casts
            if len(numbers) == 3:
                cosines[name] = _cosine(*numbers)
                continue
            num_saturated, num_compared, num_underflowed, num_rounded = numbers
            # of a tensor that was never cast all counts are 0
            saturated[name] = num_saturated / max(1.0, num_compared)
            underflowed[name] = num_underflowed / max(1.0, num_rounded)
        return Shadow(loss, wide_loss, cosines, saturated, underflowed)

    @property
    def gap(self) -> float:
        """Return (loss - wide_loss) / wide_loss; inf if only the loss with FP8 is not finite."""
        if not math.isfinite(self.loss) and math.isfinite(self.wide_loss):
            return math.inf
        if self.wide_loss:
            return (self.loss - self.wide_loss) / self.wide_loss
        return math.nan

    @property
    def worst(self) -> tuple[str, float]:
        """Return the weight with the lowest cosine, and that cosine; ("", nan) if there is none."""
        finite = {name: cosine for name, cosine in self.cosines.items() if not math.isnan(cosine)}
        name = min(finite, key=finite.__getitem__, default="")
        return name, finite.get(name, math.nan)


def _cosine(
    product: float,
    square: float,
    other_square: float,
) -> float:
    """Return the cosine of two vectors from their scalar product and the squares of their lengths;
    NaN if one of them is zero or not finite."""
    squares = square * other_square
    return product / math.sqrt(squares) if squares > 0 else math.nan


def run_shadow(
    passes: Passes,
    share: Share,
    number: int,
) -> Shadow:
    """Compare the first micro-batch of step `number` on each dp rank with FP8 and without.

    The step must be the next one. The micro-batch is run two extra times, without FP8 and with it,
    with the same weights, scales and dropout. The training step is unaffected. The comparison needs
    as much extra memory as the gradients of the FP8 weights. Collective over the whole mesh.
    """
    fp8 = passes.fp8
    optimizer = passes.optimizer
    require_steady_scales(fp8, "compare a micro-batch with itself")
    require_whole_gradients(optimizer, "compare a micro-batch with itself")
    fp8.roll()  # as at the start of the step itself
    buffers = optimizer.all_buffers()
    fp8_names = fp8.weight_names
    with passes.scratch_gradients(), fp8.autocast(enabled=False):
        wide_loss, counted_part = _run_first_microbatch(passes, share, number)
        gradients = _weight_gradients(buffers, fp8_names)
        # Copies, because the second run overwrites the buffers.
        wide_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    with passes.scratch_gradients():
        with fp8.replayed(), fp8.watching() as casts:
            loss, _ = _run_first_microbatch(passes, share, number)
        fp8_gradients = _weight_gradients(buffers, fp8_names)
        lost = _count_lost_values(casts, fp8_names, buffers)
        sums = _sum_over_ranks(wide_gradients, fp8_gradients, lost, (optimizer.tp, optimizer.dp))
    # One message, and one wait of the host.
    losses = optimizer.world.sum_(torch.stack([loss, wide_loss, counted_part]))
    loss, wide_loss, counted_part = losses.tolist()
    divisor = counted_part or math.nan  # without a token that counts there is no loss
    sums_of_all_stages = gather_entries(sums, optimizer.world, optimizer.device)
    return Shadow.of(loss / divisor, wide_loss / divisor, sums_of_all_stages)


def _run_first_microbatch(
    passes: Passes,
    share: Share,
    number: int,
) -> tuple[Tensor, Tensor]:
    """Run the first micro-batch of each dp rank, forward and backward, through all stages.

    Returns two numbers, float64 []: this rank's part of the sum of losses, and its number of tokens
    that count, both divided by the tokens of the whole batch. The quotient of their sums over all
    ranks is the loss of the micro-batches. The gradients stay in the buffers, summed over tp but
    not over dp.
    """
    state = passes.begin(share, number, passes.optimizer.scale)
    program = [
        instruction
        for instruction in passes.program
        if instruction.microbatch == 0 and instruction.op is not Op.REDUCE
    ]
    passes.make_executor(state, program).run()
    for buffer in passes.optimizer.all_buffers():
        sum_partial(buffer.parameters, passes.optimizer.tp)
    counted_part = torch.zeros_like(state.divisor)
    if passes.last_stage in passes.stages and passes.optimizer.tp.rank == 0:
        targets = state.share.targets[: passes.micro_batch]
        mask = state.share.mask
        if mask is None:
            tokens = float(targets.numel())
        else:
            tokens = mask[: passes.micro_batch].sum(dtype=torch.float64)
        counted_part = tokens / state.divisor
    return state.loss.sum(), counted_part


def _weight_gradients(buffers: Sequence[Buffer], fp8_names: Set[str]) -> dict[str, Tensor]:
    """Return flat views of this rank's gradients of the FP8 weights, by logical name.

    A view is empty if another tensor-parallel rank counts the slice.
    fp8_names: the first logical tensor of each parameter with FP8 products.
    """
    gradients: dict[str, Tensor] = {}
    for buffer in buffers:
        for parameter in buffer.parameters:
            layout = layout_of(parameter)
            if layout.parts[0].name not in fp8_names:
                continue
            flat_gradient = parameter.main_grad.view(-1)  # type: ignore[attr-defined]
            for part, start, stop in layout.spans():
                # of the ranks that hold this slice, the first one counts it
                counted_stop = stop if part.copy == 0 else start
                gradients[part.name] = flat_gradient[start:counted_stop]
    return gradients


def _count_lost_values(
    casts: Mapping[str, Tensor],
    fp8_names: Set[str],
    buffers: Sequence[Buffer],
) -> dict[str, Tensor]:
    """Return the four counts of values that casts lost (`Sums`), by "<weight>.<role>": float64 [4],
    zeros for tensors without a cast.

    For weights that are kept as FP8 codes the counts are read from the parameter.
    casts: the result of `FP8State.watching`.
    fp8_names: the first logical tensor of each parameter with FP8 products.
    """
    zeros = torch.zeros(4, dtype=torch.float64, device=buffers[0].weights.device)
    counts: dict[str, Tensor] = {}
    for name in fp8_names:
        counts |= {f"{name}.{role}": zeros for role in ROLES}
    counts |= casts
    for buffer in buffers:
        for shard in buffer.fp8_shards:
            counts[f"{shard.param.name}.weight"] = shard.lost()
    return counts


def _sum_over_ranks(
    wide_gradients: Mapping[str, Tensor],
    fp8_gradients: Mapping[str, Tensor],
    lost: Mapping[str, Tensor],
    axes: Sequence[Axis],
) -> Sums:
    """Return this stage's numbers for `Shadow.of`, summed over each of `axes`, whose ranks all have
    the same names. Collective over these.

    wide_gradients, fp8_gradients: without FP8 and with it, by weight. lost: the counts of values
    that casts lost.
    """
    sums: dict[str, Tensor] = {}
    for name, gradient in wide_gradients.items():
        sums[name] = _scalar_products(gradient.double(), fp8_gradients[name].double())
    sums |= lost
    if not sums:
        return {}
    # one message over each axis for all of them, in an order that all ranks share
    names = sorted(sums)
    packed = torch.cat([sums[name] for name in names])
    for axis in axes:
        axis.sum_(packed)
    lengths = [len(sums[name]) for name in names]
    parts = packed.split(lengths)
    return {name: part.tolist() for name, part in zip(names, parts, strict=True)}


def _scalar_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of two vectors, and the squares of each: [3]."""
    return torch.stack([x @ y, x @ x, y @ y])
