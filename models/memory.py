"""How many bytes of activations a stage keeps of one micro-batch, found by running it on tensors without memory.

The stage is built and run for real, forward and loss, under torch's fake tensors, which have shapes and dtypes but
no storage and cost no time. What autograd saves is what is kept until the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megaprec.comm import Axis
from megaprec.fp8.state import FP8State
from megaprec.layout import layout_of
from megaprec.plan import PrecisionPlan
from models.config import ModelConfig
from models.stages import Cut, Stage
from parallel.context import Context
from parallel.schedule import Instruction, Op


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro-batch on one rank. activations: from the forward to the backward, or to its first half.
    put_off: between the halves of a split backward, the input and the gradient of the output of each product.
    """

    activations: int
    put_off: int

    def growth(self, i: Instruction) -> int:
        """What an instruction of this stage adds to the memory in use."""
        changes = {
            Op.FORWARD: self.activations,
            Op.BACKWARD: -self.activations,
            Op.BACKWARD_INPUT: self.put_off - self.activations,
            Op.BACKWARD_WEIGHT: -self.put_off,
        }
        return changes.get(i.op, 0)


def kept_bytes(
    config: ModelConfig, plan: PrecisionPlan, cuts: Sequence[Cut], seq_length: int, micro_batch: int, tp: int = 1
) -> list[Kept]:
    """What each stage keeps, without sequence parallelism, on each of `tp` ranks. The vocabulary must be known."""
    axis, held = Axis("tp", 0, tp), replace(plan, masters=plan.parameters)
    known: dict[tuple[int, bool, bool], Kept] = {}
    for cut in cuts:
        alike = len(cut.layers), cut.first, cut.last
        if alike not in known:
            context = Context(held, axis, fp8=FP8State(plan.fp8, config.layers, axis))
            with FakeTensorMode():
                known[alike] = _kept(Stage(config, context, cut), seq_length, micro_batch)
    return [known[len(cut.layers), cut.first, cut.last] for cut in cuts]


def _kept(stage: Stage, seq_length: int, micro_batch: int) -> Kept:
    weights = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    ids = torch.zeros(seq_length, micro_batch, dtype=torch.int64)
    compute = stage.context.plan.compute
    x = ids if stage.cut.first else torch.zeros(*ids.shape, stage.config.hidden, dtype=compute, requires_grad=True)
    with stage.context.fp8.autocast(), saved_tensors_hooks(save, lambda tensor: tensor):
        y = stage(x)
        if stage.cut.last:
            stage.losses(y, ids).sum()
    return Kept(sum(storage.nbytes() for storage in saved.values()), _put_off(stage, ids.numel()))


def _put_off(stage: Stage, tokens: int) -> int:
    """Every matrix is a factor of a product but the tables of the embedding; the head is one, even if tied to them.

    What is in FP8 takes a byte; its scales, which take a thirtieth of that at most, are left out.
    """
    tables, fp8 = ("embedding.weight", "positions"), stage.context.fp8
    matrices = [p for name, p in stage.named_parameters() if p.dim() == 2 and name not in (*tables, "head")]
    matrices += [stage.head] if stage.cut.last else []
    narrow = {one.name for one in fp8.reached if not one.wide} if fp8.recipe and fp8.recipe.weight_gradients else set()
    wide = stage.context.plan.compute.itemsize
    return tokens * sum(sum(m.shape) * (1 if layout_of(m).parts[0].name in narrow else wide) for m in matrices)
