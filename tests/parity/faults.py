"""Faults that are planted in the ranks of a layout, and where `megaprec parity` must say that they
arise.

Each is a change to the library within the ranks of one launch. `phase` and `place` (a pattern) are
what the certificate must name as the first difference: the part of the step, and the module or
tensors.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import layout_of
from megaprec.comm.main_grad import begin_accumulation
from megaprec.optim import grad_sync
from megaprec.optim.model_buffers import ModelBuffers
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.partial_grads import sum_partial
from megaprec.optim.state.update_tile import Tile
from models.decoder.layer import DecoderLayer
from models.decoder.stages import Stage
from models.engine.passes import Passes
from parallel import collectives, dropout, layers, linear
from parallel.pipeline.instructions import Message, MessageType
from parallel.pipeline.p2p import P2P
from parallel.recomputation import _Call
from tests.planting import put

Make = Callable[[Any], Any]
LAYER_1 = "layers.1.attention.output"
MLP_2 = "layers.2.mlp.down"
IDENTITY: Callable[[Tensor, Axis], Tensor] = lambda x, axis: x  # noqa: E731
TP = "tp=2"
SP = "tp=2,sequence=true"
PP = "pp=2"
DP = "dp=2"
MLP = r"layers\.3\.mlp"


@dataclass(frozen=True)
class Fault:
    """A fault, the run and the layout that it is planted in, and where it must be said to arise."""

    run: str
    layout: str
    phase: str
    place: str
    plant: Callable[[], None]


def change(owner: Any, name: str, make: Make) -> Callable[[], None]:
    """Puts make(what was there) in the place of an attribute, which must be there now: most faults
    are planted in campaigns only, where one that is planted nowhere would long go unseen."""
    assert name in vars(owner), f"{owner} has no {name}"

    def plant() -> None:
        inner = vars(owner)[name]
        static = isinstance(inner, staticmethod)
        made = make(inner.__func__ if static else inner)
        put(owner, name, staticmethod(made) if static else made)

    return plant


def called_from(file: str) -> bool:
    """Whether who calls the function that asks is in a file of this name."""
    return sys._getframe(2).f_code.co_filename.endswith(file)


def named(weight: Any, name: str) -> bool:
    """Whether a part of the parameter has a logical name that begins so."""
    return any(part.name.startswith(name) for part in layout_of(weight).parts)


def in_module(
    name: str, collective: str, instead: Callable[[Tensor, Axis], Tensor]
) -> Callable[[], None]:
    """A row-parallel layer's collective is another one."""

    def make(inner: Any) -> Any:
        def forward(self: Any, x: Tensor) -> Any:
            kept = getattr(collectives, collective)
            if named(self.weight, name):
                setattr(collectives, collective, instead)
            try:
                return inner(self, x)
            finally:
                setattr(collectives, collective, kept)

        return forward

    return change(layers.RowParallelLinear, "forward", make)


def input_gradient(name: str, instead: Callable[[Any, Any, Any, Any], Any]) -> Callable[[], None]:
    """Layers whose weight's name begins so make their input's gradient by instead(inner, ctx, grad,
    shape)."""

    def make(inner: Any) -> Any:
        return lambda ctx, grad, shape: (
            instead(inner, ctx, grad, shape) if named(ctx.weight, name) else inner(ctx, grad, shape)
        )

    return change(linear, "_start_input_gradient", make)


def alone(inner: Any, ctx: Any, grad: Any, shape: Any) -> Any:
    """The input's gradient is not summed over tp."""
    layout = ctx.input_layout
    tp = ctx.tp
    ctx.input_layout = linear.InputLayout.OWN
    try:
        made = inner(ctx, grad, shape)()
    finally:
        ctx.input_layout = layout
    return lambda: tp.chunk(made).contiguous() if layout is linear.InputLayout.SEQUENCE else made


def twice(inner: Any, ctx: Any, grad: Any, shape: Any) -> Any:
    return lambda: inner(ctx, grad, shape)() * 2


def only(rank: int, axis: str, changed: Callable[..., Any]) -> Make:
    """`changed(inner, self, ...)` where self's axis has this rank, else `inner`."""

    def make(inner: Any) -> Any:
        def new(self: Any, *args: Any, **named: Any) -> Any:
            if hasattr(self, "context") and axis == "tp":
                place = self.context.tp
            else:
                place = getattr(self, axis)
            if place.rank == rank:
                return changed(inner, self, *args, **named)
            return inner(self, *args, **named)

        return new

    return make


def messages(kind: MessageType, instead: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """What stages send of this kind is changed."""

    def make(inner: Any) -> Any:
        def send(self: P2P, i: Any, tensor: Tensor) -> None:
            message = Message.of(i)
            assert message is not None
            inner(self, i, instead(tensor) if message.kind is kind else tensor)

        return send

    return change(P2P, "send", make)


def late_messages() -> Callable[[], None]:
    """Each activation that is sent is that of the micro-batch before."""
    last: dict[int, Tensor] = {}

    def make(inner: Any) -> Any:
        def send(self: P2P, i: Any, tensor: Tensor) -> None:
            message = Message.of(i)
            assert message is not None
            if message.kind is MessageType.ACTIVATION:
                tensor, last[message.stage] = last.get(message.stage, tensor), tensor
            inner(self, i, tensor)

        return send

    return change(P2P, "send", make)


def weight_gradients(name: str, instead: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """instead(weight, make) makes the gradient of weights whose name begins so."""

    def make(inner: Any) -> Any:
        def made(products: Any, weight: Any, grad: Any, x: Any) -> Any:
            go = lambda: inner(products, weight, grad, x)  # noqa: E731
            return instead(weight, go) if named(weight, name) else go()

        return made

    return change(linear, "add_weight_gradient", make)


def overwritten(weight: Any, go: Any) -> Any:
    begin_accumulation(weight)[0].zero_()
    return go()


def doubled(weight: Any, go: Any) -> Any:
    go()
    return go()


def shares(keep: Callable[[Any], bool]) -> Callable[[], None]:
    """Only the shares of parameters that are kept are summed over tp."""

    def make(inner: Any) -> Any:
        return lambda parameters, tp: sum_partial([p for p in parameters if keep(p)], tp)

    return change(grad_sync, "sum_partial", make)


def averaged_shares(inner: Any) -> Any:
    def average(parameters: Any, tp: Axis) -> None:
        inner(parameters, tp)
        for parameter in (p for p in parameters if layout_of(p).partial):
            for part, first, last in layout_of(parameter).spans():
                parameter.main_grad.view(-1)[first:last] /= part.copies

    return average


def after_reduce(what: Callable[[Buffer], object]) -> Callable[[], None]:
    """`what` happens to a buffer when its gradients are summed over dp."""

    def make(inner: Any) -> Any:
        def start(self: Buffer) -> Any:
            finish = inner(self)
            return lambda: (finish(), what(self), None)[2]

        return start

    return change(Buffer, "start_reduce", make)


def unsummed(inner: Any) -> Any:
    return lambda self: lambda: None


def once_more(inner: Any) -> Any:
    def sum_tied_and_virtual(self: ModelBuffers) -> None:
        inner(self)
        for buffer, axis in self.tied:
            axis.sum_(buffer.local_grads)

    return sum_tied_and_virtual


def untied(inner: Any) -> Any:
    def complete(self: ParallelAMPOptimizer, loss: Tensor | None) -> None:
        self._model_buffers.tied = []
        inner(self, loss)

    return complete


def numbers_without(pp_rank: int) -> Make:
    def make(inner: Any) -> Any:
        def numbers(self: ParallelAMPOptimizer, *arguments: Any) -> Tensor:
            self._counted_grads = [] if self.pp.rank == pp_rank else self._counted_grads
            return inner(self, *arguments)

        return numbers

    return make


def dp_counts_twice(inner: Any) -> Any:
    def counted(self: Buffer) -> Any:
        self.share = 0, self.size
        return inner(self)

    return counted


def padding_counts(inner: Any) -> Any:
    def counted(self: Buffer) -> Any:
        looked_at = sorted(inner(self) + self.counted_elsewhere())
        ends = (
            [0, *(last for _, last in looked_at)],
            [*(first for first, _ in looked_at), self.stop - self.start],
        )
        return inner(self) + [(a, b) for a, b in zip(*ends, strict=True) if a < b]

    return counted


def own_tokens(inner: Any) -> Any:
    def begin(self: Passes, share: Any, step: Any, scale: Any) -> Any:
        run = inner(self, share, step, scale)
        run.divisor.copy_(share.mask.sum())
        return run

    return begin


def running(what: Callable[[Passes, Any], object]) -> Callable[[], None]:
    """`what` happens to what is under way before a step's passes."""

    def make(inner: Any) -> Any:
        def begin(self: Passes, share: Any, step: Any, scale: Any) -> Any:
            run = inner(self, share, step, scale)
            what(self, run)
            return run

        return begin

    return change(Passes, "begin", make)


def unmasked(self: Passes, run: Any) -> None:
    if self.optimizer.dp.rank == 1:
        run.share = replace(run.share, mask=torch.ones_like(run.share.mask))


def own_samples(self: Passes, run: Any) -> None:
    run.share = replace(run.share, first=0)


def fewer_layers(inner: Any) -> Any:
    def init(self: Stage, config: Any, context: Any, cut: Any, tied: Any = ()) -> None:
        inner(self, config, context, replace(cut, layers=[n for n in cut.layers if n != 2]), tied)

    return init


def block(name: str, instead: Callable[..., Tensor]) -> Callable[[], None]:
    """A layer's forward is instead(inner, self, x, ...)."""

    def make(inner: Any) -> Any:
        def forward(self: DecoderLayer, x: Tensor, *rest: Any, **more: Any) -> Tensor:
            if self.name == name:
                return instead(inner, self, x, *rest, **more)
            return inner(self, x, *rest, **more)

        return forward

    return change(DecoderLayer, "forward", make)


def scaled_input_gradient(factor: float) -> Make:
    """A norm's input gradient is multiplied."""

    def make(inner: Any) -> Any:
        def backward(ctx: Any, grad: Tensor) -> Any:
            first, *others = inner(ctx, grad)
            return first * factor, *others

        return backward

    return make


def same_samples(inner: Any) -> Any:
    def read(self: Any, samples: Any, first: int, batch: int, replica: int, pieces: int = 1) -> Any:
        of_first = first - replica * (batch // self._dp.size)
        return inner(self, samples, of_first, batch, replica, pieces)

    return read


def updates(change_step: Callable[[ParallelAMPOptimizer, Any], Any]) -> Callable[[], None]:
    """Each block's update is of a changed step."""

    def make(inner: Any) -> Any:
        return lambda self, tile, rule, step: inner(self, tile, rule, change_step(self, step))

    return change(ParallelAMPOptimizer, "_update_tile", make)


def rounded_masters(inner: Any) -> Any:
    def wide(self: Tile) -> Any:
        tensors = inner(self)
        tensors.masters.copy_(tensors.masters.to(torch.bfloat16).double())
        return tensors

    return wide


def uncollected(inner: Any) -> Any:
    """Under ZeRO-1 each rank keeps the other slices of its weights as they were."""
    return lambda self: lambda: None


def wrong_step_in_recomputation(inner: Any) -> Any:
    """What is made again drops other elements."""

    def made(self: _Call) -> None:
        kept = dropout.key
        dropout.key = lambda seed, *names: kept(seed + 1, *names)
        try:
            inner(self)
        finally:
            dropout.key = kept

    return made


def lost_rows(inner: Any) -> Any:
    """Of a token that occurs twice in a micro-batch one gradient is kept."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        ids = ctx.saved_tensors[0].flatten()
        again = torch.tensor([id in ids[:n] for n, id in enumerate(ids.tolist())]).view(
            ctx.saved_tensors[0].shape
        )
        return inner(ctx, grad.masked_fill(again.unsqueeze(-1), 0))

    return backward


def dropped_work(inner: Any) -> Any:
    def backward_weight(self: Any, i: Any) -> None:
        inner(self, i) if i.microbatch else self._weight_work.pop((i.stage, i.microbatch)).clear()

    return backward_weight
