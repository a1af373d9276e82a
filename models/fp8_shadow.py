"""How far a micro-batch in FP8 is from the same one without it: the loss, each weight's gradient, what casts lose.

The cosine between a weight's gradients with and without FP8 says how much of what FP8 leaves is the gradient: noise of
a relative size r that has nothing to do with it makes a cosine of 1 / sqrt(1 + r^2). Gradients of dp ranks are not
summed before, so that each rank's micro-batch counts. Saturated is what lies beyond the largest number of its format,
underflowed what is not zero and becomes so.
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
    """Of one micro-batch on each dp rank.

    loss, wide_loss: with FP8 and without, the same part of a global mean. cosines: by logical weight; nan if a gradient
    is zero or not finite. saturated, underflowed: ratios by "<first logical weight of a product>.<role>", the roles
    being input, weight and gradient.
    """

    loss: float
    wide_loss: float
    cosines: Mapping[str, float]
    saturated: Mapping[str, float]
    underflowed: Mapping[str, float]

    @staticmethod
    def of(loss: float, wide_loss: float, found: Found) -> "Shadow":
        """found: what `compared` gives, of all stages."""
        cosines, saturated, underflowed = {}, {}, {}
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
        """(loss - wide_loss) / wide_loss; inf where only the loss with FP8 is not finite."""
        if not math.isfinite(self.loss) and math.isfinite(self.wide_loss):
            return math.inf
        return (self.loss - self.wide_loss) / self.wide_loss if self.wide_loss else math.nan

    @property
    def worst(self) -> tuple[str, float]:
        """The weight with the lowest cosine, and that; ("", nan) if there is none."""
        known = {name: cosine for name, cosine in self.cosines.items() if not math.isnan(cosine)}
        name = min(known, key=known.__getitem__, default="")
        return name, known.get(name, math.nan)


def run_shadow(passes: Passes, share: Share, number: int) -> Shadow:
    """What FP8 does to the first micro-batch, on each dp rank, of the `number`-th step, which must be the next one.

    The micro-batch is run twice more, without FP8 and with it: same weights, same scales, same dropout. The training
    step is unaffected. Takes as much memory as the gradients of weights in FP8. Collective over the whole mesh.
    """
    fp8, optimizer = passes.fp8, passes.optimizer
    require_steady_scales(fp8, "compare a micro-batch with itself")
    fp8.roll()  # or the step would begin so
    buffers, names = optimizer.all_buffers(), fp8.narrow
    with passes.gradients_aside(), fp8.autocast(enabled=False):
        wide_loss = _first_alone(passes, share, number)
        wide = {name: values.clone() for name, values in weight_gradients(buffers, names).items()}
    with passes.gradients_aside():
        with fp8.replayed(), fp8.watching() as lost:
            loss = _first_alone(passes, share, number)
        narrow, counts = weight_gradients(buffers, names), lost_by_tensor(lost, names, buffers)
        found = compared(wide, narrow, counts, (optimizer.tp, optimizer.dp))
    loss, wide_loss = optimizer.world.sum_(torch.stack([loss, wide_loss])).unbind()
    return Shadow.of(loss.item(), wide_loss.item(), everyones(found, optimizer.world, optimizer.device))


def _first_alone(passes: Passes, share: Share, number: int) -> Tensor:
    """Runs the first micro-batch, forward and backward, through all stages; returns this rank's part of its loss.
    Gradients are left, summed over tp but not over dp."""
    run = passes.begin(share, number, passes.optimizer.scale)
    passes.executor(run, [i for i in passes.program if i.microbatch == 0 and i.op is not Op.REDUCE]).run()
    for buffer in passes.optimizer.all_buffers():
        sum_partial(buffer.parameters, passes.optimizer.tp)
    return run.loss


def weight_gradients(buffers: Sequence[Buffer], names: Set[str]) -> dict[str, Tensor]:
    """Views of what this rank has of the gradients of weights in FP8, flat, by logical name; empty where another tensor
    rank counts the slice. names: of the first logical tensor in each parameter."""
    return dict(span for b in buffers for p in b.parameters for span in _spans(p, names))


def _spans(parameter: torch.nn.Parameter, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
    layout = layout_of(parameter)
    flat = parameter.main_grad.view(-1)  # type: ignore[attr-defined]
    for part, first, last in layout.spans() if layout.parts[0].name in names else ():
        yield part.name, flat[first : last if part.copy == 0 else first]


def lost_by_tensor(casts: Mapping[str, Tensor], names: Set[str], buffers: Sequence[Buffer]) -> dict[str, Tensor]:
    """Counts of what casts lost, zeros where there was none; of weights that are kept in codes it is looked up.

    casts: what `FP8State.watching` gave. names: as above.
    """
    none = torch.zeros(4, dtype=torch.float64, device=buffers[0].weights.device)
    nothing = {f"{name}.{role}": none for name in names for role in ROLES}
    own = {f"{one.param.name}.weight": one.lost() for buffer in buffers for one in buffer.owned}
    return {**nothing, **casts, **own}


def compared(
    wide: Mapping[str, Tensor], narrow: Mapping[str, Tensor], lost: Mapping[str, Tensor], axes: Sequence[Axis]
) -> Found:
    """Numbers of this stage that `Shadow.of` reads, summed over `axes`, whose ranks all have the same names."""
    sums = {name: _products(values.double(), narrow[name].double()) for name, values in wide.items()}
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
