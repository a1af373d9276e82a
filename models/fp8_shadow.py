"""A comparison of one micro-batch with FP8 and without: the loss, each weight gradient, and the
values that casts lose.

The cosine between a weight's gradients with and without FP8 measures how much of the FP8 gradient
is the true gradient: independent noise of relative size r makes a cosine of 1 / sqrt(1 + r^2).
Gradients of dp ranks are not summed before the comparison, so each rank's micro-batch counts. A
value is saturated if it is beyond the largest number of its format, and underflowed if it is not
zero and is rounded to zero.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.comm.layout import layout_of
from megaprec.fp8.state import ROLES
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.partial_grads import sum_partial
from models.passes import Passes, Share, require_steady_scales
from parallel.pipeline.instructions import Op

Found = dict[str, list[float]]


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
    def of(loss: float, wide_loss: float, found: Found) -> "Shadow":
        """Return the Shadow of two losses. found: the results of `compared` for all stages."""
        cosines = {}
        saturated = {}
        underflowed = {}
        for name, numbers in found.items():
            if len(numbers) == 3:
                both, one, other = numbers
                cosines[name] = both / math.sqrt(one * other) if one * other > 0 else math.nan
            else:
                saturated[name] = numbers[0] / max(1.0, numbers[1])
                underflowed[name] = numbers[2] / max(1.0, numbers[3])
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
        known = {name: cosine for name, cosine in self.cosines.items() if not math.isnan(cosine)}
        name = min(known, key=known.__getitem__, default="")
        return name, known.get(name, math.nan)


def run_shadow(passes: Passes, share: Share, number: int) -> Shadow:
    """Compare the first micro-batch of step `number` on each dp rank with FP8 and without.

    The step must be the next one. The micro-batch is run two extra times, without FP8 and with it,
    with the same weights, scales and dropout. The training step is unaffected. The comparison needs
    as much extra memory as the gradients of the FP8 weights. Collective over the whole mesh.
    """
    fp8 = passes.fp8
    optimizer = passes.optimizer
    require_steady_scales(fp8, "compare a micro-batch with itself")
    fp8.roll()  # as at the start of the step itself
    buffers = optimizer.all_buffers()
    names = fp8.narrow
    with passes.gradients_aside(), fp8.autocast(enabled=False):
        wide_loss, counted = _first_alone(passes, share, number)
        wide = {name: values.clone() for name, values in weight_gradients(buffers, names).items()}
    with passes.gradients_aside():
        with fp8.replayed(), fp8.watching() as lost:
            loss, _ = _first_alone(passes, share, number)
        narrow = weight_gradients(buffers, names)
        counts = lost_by_tensor(lost, names, buffers)
        found = compared(wide, narrow, counts, (optimizer.tp, optimizer.dp))
    loss, wide_loss, counted = optimizer.world.sum_(
        torch.stack([loss, wide_loss, counted])
    ).tolist()
    part = counted or math.nan  # without a token that counts there is no loss
    return Shadow.of(
        loss / part, wide_loss / part, everyones(found, optimizer.world, optimizer.device)
    )


def _first_alone(passes: Passes, share: Share, number: int) -> tuple[Tensor, Tensor]:
    """Run the first micro-batch, forward and backward, through all stages.

    Returns this rank's part of the loss, divided by the tokens of the whole batch, and its part of
    the tokens that count, divided by the same: float64 []. Their quotient, of sums over all ranks,
    is the loss of the micro-batch. The gradients stay in the buffers, summed over tp but not over
    dp.
    """
    run = passes.begin(share, number, passes.optimizer.scale)
    passes.executor(
        run, [i for i in passes.program if i.microbatch == 0 and i.op is not Op.REDUCE]
    ).run()
    for buffer in passes.optimizer.all_buffers():
        sum_partial(buffer.parameters, passes.optimizer.tp)
    counted = torch.zeros_like(run.num_tokens)
    if passes.last in passes.stages and passes.optimizer.tp.rank == 0:
        targets = run.share.targets[: passes.micro_batch]
        mask = run.share.mask
        if mask is None:
            tokens = float(targets.numel())
        else:
            tokens = mask[: passes.micro_batch].sum(dtype=torch.float64)
        counted = tokens / run.num_tokens
    return run.loss.sum(), counted


def weight_gradients(buffers: Sequence[Buffer], names: Set[str]) -> dict[str, Tensor]:
    """Return flat views of this rank's gradients of the FP8 weights, by logical name.

    A view is empty if another tensor-parallel rank counts the slice. names: the first logical
    tensor of each parameter.
    """
    return dict(span for b in buffers for p in b.parameters for span in _spans(p, names))


def _spans(parameter: torch.nn.Parameter, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
    layout = layout_of(parameter)
    flat = parameter.main_grad.view(-1)  # type: ignore[attr-defined]
    for part, first, last in layout.spans() if layout.parts[0].name in names else ():
        yield part.name, flat[first : last if part.copy == 0 else first]


def lost_by_tensor(
    casts: Mapping[str, Tensor], names: Set[str], buffers: Sequence[Buffer]
) -> dict[str, Tensor]:
    """Return the counts of values that casts lost, with zeros for tensors without a cast.

    For weights that are kept as FP8 codes the counts are read from the parameter. casts: the result
    of `FP8State.watching`. names: as in `weight_gradients`.
    """
    none = torch.zeros(4, dtype=torch.float64, device=buffers[0].weights.device)
    nothing = {f"{name}.{role}": none for name in names for role in ROLES}
    own = {f"{one.param.name}.weight": one.lost() for buffer in buffers for one in buffer.owned}
    return {**nothing, **casts, **own}


def compared(
    wide: Mapping[str, Tensor],
    narrow: Mapping[str, Tensor],
    lost: Mapping[str, Tensor],
    axes: Sequence[Axis],
) -> Found:
    """Return this stage's numbers for `Shadow.of`, summed over `axes`, whose ranks all have the
    same names."""
    sums = {
        name: _products(values.double(), narrow[name].double()) for name, values in wide.items()
    }
    sums |= lost
    names = sorted(sums)
    if not names:
        return {}
    packed = torch.cat([sums[name] for name in names])
    for axis in axes:
        axis.sum_(packed)
    parts = packed.split([len(sums[name]) for name in names])
    return {name: part.tolist() for name, part in zip(names, parts, strict=True)}


def _products(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a @ b, a @ a, b @ b])
