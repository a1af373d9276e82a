"""Faults that are planted in the ranks of a layout, and where `megaprec parity` must say that they arise.

Each is a change to the library within the ranks of one launch. `phase` and `place` (a pattern) are what the certificate
must name as the first difference: the part of the step, and the module or tensors.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaprec import overlap
from megaprec.block import Block as Run
from megaprec.buffer import Buffer
from megaprec.comm import Axis
from megaprec.layout import Layout, layout_of
from megaprec.main_gradient import given
from megaprec.optimizer import ParallelAMPOptimizer
from megaprec.partial import sum_partial
from megaprec.rules import AdamW
from models import blocks, moe, stages
from models.blocks import Attention, Block
from models.engine import Engine
from models.stages import Stage
from parallel import collectives, dropout, layers, linear, loss, norms
from parallel.executor import Executor
from parallel.links import Links
from parallel.recompute import _Call
from parallel.schedule import Kind, Message
from tools.trainer import Trainer

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Fault:
    """A fault, the run and the layout that it is planted in, and where it must be said to arise."""

    run: str
    layout: str
    phase: str
    place: str
    plant: Callable[[], None]


def change(owner: Any, name: str, make: Make) -> Callable[[], None]:
    """Puts make(what was there) in the place of an attribute."""

    def plant() -> None:
        inner = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        static = isinstance(inner, staticmethod)
        made = make(inner.__func__ if static else inner)
        setattr(owner, name, staticmethod(made) if static else made)

    return plant


def called_from(file: str) -> bool:
    """Whether who calls the function that asks is in a file of this name."""
    return sys._getframe(2).f_code.co_filename.endswith(file)


def named(weight: Any, name: str) -> bool:
    """Whether a part of the parameter has a logical name that begins so."""
    return any(part.name.startswith(name) for part in layout_of(weight).parts)


def in_module(name: str, collective: str, instead: Callable[[Tensor, Axis], Tensor]) -> Callable[[], None]:
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
    """Layers whose weight's name begins so make their input's gradient by instead(inner, ctx, grad, shape)."""

    def make(inner: Any) -> Any:
        return lambda ctx, grad, shape: (
            instead(inner, ctx, grad, shape) if named(ctx.weight, name) else inner(ctx, grad, shape)
        )

    return change(linear, "_start_input_gradient", make)


def alone(inner: Any, ctx: Any, grad: Any, shape: Any) -> Any:
    """The input's gradient is not summed over tp."""
    lies, tp = ctx.lies, ctx.tp
    ctx.lies = linear.Input.OWN
    try:
        made = inner(ctx, grad, shape)()
    finally:
        ctx.lies = lies
    return lambda: tp.chunk(made).contiguous() if lies is linear.Input.SEQUENCE else made


def twice(inner: Any, ctx: Any, grad: Any, shape: Any) -> Any:
    return lambda: inner(ctx, grad, shape)() * 2


def only(rank: int, axis: str, changed: Callable[..., Any]) -> Make:
    """`changed(inner, self, ...)` where self's axis has this rank, else `inner`."""

    def make(inner: Any) -> Any:
        def new(self: Any, *args: Any, **named: Any) -> Any:
            place = self.context.tp if hasattr(self, "context") and axis == "tp" else getattr(self, axis)
            return changed(inner, self, *args, **named) if place.rank == rank else inner(self, *args, **named)

        return new

    return make


def messages(kind: Kind, instead: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """What stages send of this kind is changed."""

    def make(inner: Any) -> Any:
        def send(self: Links, i: Any, tensor: Tensor) -> None:
            message = Message.of(i)
            assert message is not None
            inner(self, i, instead(tensor) if message.kind is kind else tensor)

        return send

    return change(Links, "send", make)


def late_messages() -> Callable[[], None]:
    """Each activation that is sent is that of the micro-batch before."""
    last: dict[int, Tensor] = {}

    def make(inner: Any) -> Any:
        def send(self: Links, i: Any, tensor: Tensor) -> None:
            message = Message.of(i)
            assert message is not None
            if message.kind is Kind.ACTIVATION:
                tensor, last[message.stage] = last.get(message.stage, tensor), tensor
            inner(self, i, tensor)

        return send

    return change(Links, "send", make)


def weight_gradients(name: str, instead: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """instead(weight, make) makes the gradient of weights whose name begins so."""

    def make(inner: Any) -> Any:
        def made(products: Any, weight: Any, grad: Any, x: Any) -> Any:
            go = lambda: inner(products, weight, grad, x)  # noqa: E731
            return instead(weight, go) if named(weight, name) else go()

        return made

    return change(linear, "weight_gradient", make)


def overwritten(weight: Any, go: Any) -> Any:
    given(weight)[0].zero_()
    return go()


def doubled(weight: Any, go: Any) -> Any:
    go()
    return go()


def shares(keep: Callable[[Any], bool]) -> Callable[[], None]:
    """Only the shares of parameters that are kept are summed over tp."""

    def make(inner: Any) -> Any:
        return lambda parameters, tp: sum_partial([p for p in parameters if keep(p)], tp)

    return change(overlap, "sum_partial", make)


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
    def finish(self: ParallelAMPOptimizer) -> None:
        inner(self)
        for buffer, axis in self._tied:
            axis.sum_(buffer.own(buffer.grads))

    return finish


def untied(inner: Any) -> Any:
    def finish(self: ParallelAMPOptimizer) -> None:
        self._tied = []
        inner(self)

    return finish


def numbers_without(pp_rank: int) -> Make:
    def make(inner: Any) -> Any:
        def numbers(self: ParallelAMPOptimizer, loss: Any) -> Tensor:
            self._counted = [] if self.pp.rank == pp_rank else self._counted
            return inner(self, loss)

        return numbers

    return make


def dp_counts_twice(inner: Any) -> Any:
    def counted(self: Buffer) -> Any:
        self.share = 0, self.size
        return inner(self)

    return counted


def padding_counts(inner: Any) -> Any:
    def counted(self: Buffer) -> Any:
        looked_at = sorted(inner(self) + self.copies())
        ends = [0, *(last for _, last in looked_at)], [*(first for first, _ in looked_at), self.last - self.first]
        return inner(self) + [(a, b) for a, b in zip(*ends, strict=True) if a < b]

    return counted


def own_tokens(inner: Any) -> Any:
    def begin(self: Engine, share: Any, step: Any, scale: Any) -> Any:
        run = inner(self, share, step, scale)
        run.num_tokens = share.mask.sum().double()
        return run

    return begin


def running(what: Callable[[Engine, Any], object]) -> Callable[[], None]:
    """`what` happens to what is under way before a step's passes."""

    def make(inner: Any) -> Any:
        def begin(self: Engine, share: Any, step: Any, scale: Any) -> Any:
            run = inner(self, share, step, scale)
            what(self, run)
            return run

        return begin

    return change(Engine, "_begin", make)


def unmasked(self: Engine, run: Any) -> None:
    if self.dp.rank == 1:
        run.share = replace(run.share, mask=torch.ones_like(run.share.mask))


def own_samples(self: Engine, run: Any) -> None:
    run.share = replace(run.share, first=0)


def fewer_layers(inner: Any) -> Any:
    def init(self: Stage, config: Any, context: Any, cut: Any, tied: Any = ()) -> None:
        inner(self, config, context, replace(cut, layers=[n for n in cut.layers if n != 2]), tied)

    return init


def block(name: str, instead: Callable[..., Tensor]) -> Callable[[], None]:
    """A layer's forward is instead(inner, self, x, ...)."""

    def make(inner: Any) -> Any:
        def forward(self: Block, x: Tensor, *rest: Any, **more: Any) -> Tensor:
            return instead(inner, self, x, *rest, **more) if self.name == name else inner(self, x, *rest, **more)

        return forward

    return change(Block, "forward", make)


def scaled_input_gradient(factor: float) -> Make:
    """A norm's input gradient is multiplied."""

    def make(inner: Any) -> Any:
        def backward(ctx: Any, grad: Tensor) -> Any:
            first, *others = inner(ctx, grad)
            return first * factor, *others

        return backward

    return make


def same_samples(inner: Any) -> Any:
    return lambda self, samples, position: inner(self, samples, position - self.dp.rank * (self.config.train.global_batch // self.dp.size))


def updates(change_step: Callable[[ParallelAMPOptimizer, Any], Any]) -> Callable[[], None]:
    """Each block's update is of a changed step."""

    def make(inner: Any) -> Any:
        return lambda self, block, step: inner(self, block, change_step(self, step))

    return change(ParallelAMPOptimizer, "_update_block", make)


def rounded_masters(inner: Any) -> Any:
    def wide(self: Run) -> Any:
        weights, grads, state = inner(self)
        weights.copy_(weights.to(torch.bfloat16).double())
        return weights, grads, state

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
        again = torch.tensor([id in ids[:n] for n, id in enumerate(ids.tolist())]).view(ctx.saved_tensors[0].shape)
        return inner(ctx, grad.masked_fill(again.unsqueeze(-1), 0))

    return backward


def dropped_work(inner: Any) -> Any:
    def backward_weight(self: Any, i: Any) -> None:
        inner(self, i) if i.microbatch else self._put_off.pop((i.stage, i.microbatch)).clear()

    return backward_weight


LAYER_1, MLP_2 = "layers.1.attention.output", "layers.2.mlp.down"
IDENTITY: Callable[[Tensor, Axis], Tensor] = lambda x, axis: x  # noqa: E731
TP, SP, PP, DP = "tp=2", "tp=2,sequence=true", "pp=2", "dp=2"
MLP = r"layers\.3\.mlp"
FAULTS = {
    # --- forward
    "a row-parallel output is not summed": Fault("llama", TP, "forward", LAYER_1, in_module(LAYER_1, "reduce", IDENTITY)),
    "a feed-forward's output is not summed": Fault("llama", TP, "forward", MLP_2, in_module(MLP_2, "reduce", IDENTITY)),
    "a row-parallel output is summed twice": Fault("llama", TP, "forward", MLP_2, in_module(MLP_2, "reduce", lambda x, a: collectives._Reduce.apply(collectives._Reduce.apply(x, a), a))),
    "a row-parallel output is averaged": Fault("gpt2", TP, "forward", LAYER_1, in_module(LAYER_1, "reduce", lambda x, a: collectives._Reduce.apply(x, a) / a.size)),
    "the scatter of a row-parallel output is a cut": Fault("llama", SP, "forward", MLP_2, in_module(MLP_2, "scatter", lambda x, a: collectives._Split.apply(x, a, 0))),
    "looked-up rows are not summed": Fault("llama", TP, "forward", "embedding", change(layers.VocabParallelEmbedding, "forward", lambda inner: lambda self, ids: layers.Lookup.apply((ids - self.part.start).clamp(0, self.part.local[0] - 1), self.weight, (ids < self.part.start) | (ids >= self.part.start + self.part.local[0])))),
    "a row-parallel bias is added by every rank": Fault("gpt2", TP, "gradients", r".*\.output\.bias.*", change(layers.RowParallelLinear, "forward", lambda inner: lambda self, x: (inner(self, x)[0] + self.bias, None))),
    "a gather turns the ranks round": Fault("llama", SP, "forward", r"layers\.0\.attention\.output", change(linear.Axis, "gather", lambda inner: lambda self, x: torch.cat(inner(self, x).chunk(self.size)[::-1]) if self.name == "tp" and x.dim() == 3 else inner(self, x))),
    "a norm's epsilon hangs on the rank": Fault("llama", TP, "forward", r"layers\.0\.attention_norm", change(norms.RMSNorm, "forward", lambda inner: lambda self, x: norms._Normalize.apply(x, self.weight, self.eps * (10 if torch.distributed.get_rank() else 1), self.sensitive, self.out))),
    "one rank divides scores by another number": Fault("llama", TP, "forward", r"layers\.0\.attention\.output", change(Attention, "_mix", only(1, "tp", lambda inner, self, query, *rest: inner(self, query * 1.1, *rest)))),
    "heads turn as if they stood elsewhere": Fault("llama", TP, "forward", r"layers\.0\.attention\.output", change(Attention, "_attend", only(1, "tp", lambda inner, self, y, rotary, place, hidden: inner(self, y, tuple(t.roll(1, 0) for t in rotary), place, hidden)))),
    "positions of the first part are added to each part": Fault("gpt2", SP, "forward", r"between embedding and layers\.0", change(stages.Add, "forward", lambda inner: lambda ctx, x, table, own=None: inner(ctx, x, table, slice(0, len(x)) if isinstance(own, slice) else own))),
    "dropout knows a replica's samples only": Fault("dropout", DP, "forward", "tokens", running(own_samples)),
    "dropout forgets where a part of the sequence begins": Fault("dropout", SP, "forward", r"between embedding and layers\.0", change(stages, "dropout", lambda inner: lambda x, p, context, name, place: inner(x, p, replace(context, sequence=False), name, place))),
    "dropout of attention takes all heads for the first": Fault("dropout", TP, "forward", r"layers\.0\.attention\.output", change(blocks, "attention_dropout", lambda inner: lambda w, p, context, *rest: inner(w, p, replace(context, tp=replace(context.tp, rank=0)), *rest))),
    "a stage does not scale what dropout keeps": Fault("dropout", PP, "forward", r"between layers\.2\.attention and layers\.2\.mlp_norm", change(Block, "_drop", lambda inner: lambda self, x, branch, place: inner(self, x, branch, place) * (0.9 if self.name == "layers.2" else 1))),
    "a layer is not run": Fault("llama", PP, "forward", r"layers\.2", block("layers.2", lambda inner, self, x, *rest, **more: x)),
    "a layer is run twice": Fault("llama", PP, "forward", r"layers\.2", block("layers.2", lambda inner, self, x, *rest, **more: inner(self, inner(self, x, *rest, **more), *rest, **more))),
    "a layer is on no stage": Fault("llama", PP, "model", r"layers\.2\..*", change(Stage, "__init__", fewer_layers)),
    "a stage sends half of its activation": Fault("llama", PP, "forward", r"between layers\.1 and layers\.2", messages(Kind.ACTIVATION, lambda x: x / 2)),
    "a stage sends the micro-batch before": Fault("llama", PP, "forward", r"between layers\.1 and layers\.2", late_messages()),
    "a stage sends its samples in another order": Fault("llama", PP, "forward", r"between layers\.1 and layers\.2", messages(Kind.ACTIVATION, lambda x: x.flip(1))),
    "experts' shares are not summed": Fault("mixtral", TP, "forward", r"layers\.0\.mlp", change(moe.collectives, "reduce", lambda inner: lambda x, a: x if called_from("moe.py") else inner(x, a))),
    "one rank routes to the next best experts": Fault("mixtral", TP, "forward", r"layers\.0\.mlp", change(moe.MixtureOfExperts, "_route", only(1, "tp", lambda inner, self, x, place: (lambda w, c: (w, (c + 1) % 4))(*inner(self, x, place))))),
    # --- loss
    "exponentials are not summed over the vocabulary": Fault("llama", TP, "loss", "head and loss", change(loss.Axis, "sum_", lambda inner: lambda self, x: x if called_from("loss.py") else inner(self, x))),
    "padding of the vocabulary is counted": Fault("gpt2", TP, "loss", "head and loss", change(loss.CrossEntropy, "forward", lambda inner: lambda ctx, logits, targets, part, tp, wide: inner(ctx, logits, targets, replace(part, shape=(part.padded[0] * part.shards, *part.shape[1:])), tp, wide))),
    "the loss is divided by a replica's tokens": Fault("llama", DP, "loss", "head and loss", change(Engine, "_begin", own_tokens)),
    "one replica counts targets that do not": Fault("llama", DP, "loss", "head and loss", running(unmasked)),
    "the loss is divided by the micro-batches once more": Fault("llama", PP, "loss", "head and loss", running(lambda self, run: run.num_tokens.mul_(2))),
    # --- backward
    "the loss weighs double on its way back": Fault("llama", TP, "backward", "head and loss", change(Engine, "_scaled_loss", lambda inner: lambda *a: inner(*a) * 2)),
    "the loss is scaled twice": Fault("fp16", DP, "backward", "head and loss", change(Engine, "_scaled_loss", lambda inner: lambda self, *a: inner(self, *a) * self.optimizer.scale)),
    "the gradient of the loss forgets the target": Fault("llama", TP, "backward", "head and loss", change(loss.CrossEntropy, "backward", lambda inner: lambda ctx, grad: (inner(ctx, grad)[0] + 1e-3, None, None, None, None))),
    "the head's input gradient is not summed": Fault("llama", TP, "backward", "head and loss", input_gradient("head", alone)),
    "a column-parallel input gradient is not summed": Fault("llama", TP, "backward", r"layers\.2\.mlp", input_gradient("layers.2.mlp.gate", alone)),
    "that of query, key and value is not summed": Fault("gpt2", TP, "backward", r"layers\.1\.attention", input_gradient("layers.1.attention.query", alone)),
    "a column-parallel input gradient is summed twice": Fault("llama", TP, "backward", r"layers\.2\.mlp", input_gradient("layers.2.mlp.gate", twice)),
    "no column-parallel input gradient is summed": Fault("llama", TP, "backward", "head and loss", input_gradient("", alone)),
    "the scatter of an input gradient is a cut": Fault("llama", SP, "backward", r"layers\.1\.mlp", input_gradient("layers.1.mlp.gate", alone)),
    "the way back of a scatter gathers one part twice": Fault("llama", SP, "backward", MLP, change(collectives._Scatter, "backward", lambda inner: lambda ctx, grad: (torch.cat([grad] * ctx.axis.size), None))),
    "a norm's input gradient is too large": Fault("llama", PP, "backward", "final_norm", change(norms._Normalize, "backward", scaled_input_gradient(1.5))),
    "a stage sends twice the gradient": Fault("llama", PP, "backward", r"between layers\.1 and layers\.2", messages(Kind.GRADIENT, lambda x: x * 2)),
    "a stage sends gradients of other samples": Fault("llama", PP, "backward", r"between layers\.1 and layers\.2", messages(Kind.GRADIENT, lambda x: x.flip(1))),
    "what is made again is something else": Fault("recompute", TP, "backward", r"layers\.3.*", change(_Call, "_make", wrong_step_in_recomputation)),
    "each tp rank adds the router's losses": Fault("mixtral", TP, "backward", MLP, change(moe.WithLoss, "forward", lambda inner: lambda ctx, x, value, weight: inner(ctx, x, value, weight * 2))),
    # --- gradients of weights
    "tied gradients are not summed": Fault("gpt2", PP, "gradients|copies", r"embedding\.weight", change(ParallelAMPOptimizer, "_finish_sums", untied)),
    "tied gradients are summed twice": Fault("gpt2", PP, "gradients", r"embedding\.weight", change(ParallelAMPOptimizer, "_finish_sums", once_more)),
    "a shared weight's split gradient is added twice": Fault("gpt2", "pp=2,schedule=zb-v", "gradients", r"embedding\.weight", weight_gradients("embedding", doubled)),
    "row-parallel biases are not summed": Fault("gpt2", SP, "gradients", r".*down\.bias.*", shares(lambda p: not any(part.name.endswith(("output.bias", "down.bias")) for part in layout_of(p).parts))),
    "norms are not summed over the sequence": Fault("llama", SP, "gradients", r".*final_norm\.weight.*", shares(lambda p: not any("norm" in part.name for part in layout_of(p).parts))),
    "one norm is not summed over the sequence": Fault("llama", SP, "gradients", r"layers\.2\.mlp_norm\.weight", shares(lambda p: not named(p, "layers.2.mlp_norm"))),
    "shares are averaged": Fault("llama", SP, "gradients", r".*final_norm\.weight.*", change(overlap, "sum_partial", averaged_shares)),
    "copies of key and value are not summed": Fault("one key", TP, "gradients", r"layers\.\*\.attention\.(key|value)\.weight.*", shares(lambda p: len(layout_of(p).parts) < 3)),
    "the router is not summed": Fault("mixtral", TP, "gradients", r"layers\.\*\.mlp\.router\.weight", shares(lambda p: not any("router" in part.name for part in layout_of(p).parts))),
    "micro-batches overwrite gradients": Fault("llama", PP, "gradients", r"layers\..*|all|head.*", weight_gradients("", overwritten)),
    "replicas are not summed": Fault("llama", DP, "gradients", "all", change(Buffer, "start_reduce", unsummed)),
    "replicas are averaged": Fault("llama", DP, "gradients", "all", after_reduce(lambda buffer: buffer.grads.div_(buffer.dp.size))),
    "one weight's gradient is made twice": Fault("llama", TP, "gradients", r"layers\.2\.mlp\.down\.weight", weight_gradients(MLP_2, doubled)),
    "repeated tokens lose their gradient": Fault("llama", TP, "gradients", r"embedding\.weight", change(layers.Lookup, "backward", lost_rows)),
    "what was put off is lost": Fault("llama", "pp=2,schedule=zb-h1", "gradients", r".*", change(Executor, "_backward_weight", dropped_work)),
    # --- norm, update
    "a stage is left out of the norm": Fault("llama", PP, "norm", "", change(ParallelAMPOptimizer, "_own_numbers", numbers_without(1))),
    "tied weights count twice": Fault("gpt2", PP, "norm", "", change(Layout, "counts", lambda inner: lambda self, rank: True)),
    "replicas count twice": Fault("llama", "dp=2,zero=false", "norm", "", change(Buffer, "counted", dp_counts_twice)),
    "padding counts as zeros": Fault("gpt2", TP, "norm", "", change(Buffer, "counted", padding_counts)),
    "the clip hangs on the rank": Fault("llama", PP, "update", ".*", change(ParallelAMPOptimizer, "_clip_factor", lambda inner: lambda self, norm: inner(self, norm * (1 + self.pp.rank)))),
    "nothing is clipped": Fault("llama", TP, "update", ".*", change(ParallelAMPOptimizer, "_clip_factor", lambda inner: lambda self, norm: torch.ones_like(norm))),
    "the learning rate hangs on the stage": Fault("llama", PP, "update", ".*", updates(lambda self, step: replace(step, lr=step.lr * (1 + 1e-6 * self.pp.rank)))),
    "a stage does not decay its weights": Fault("llama", PP, "update", ".*", updates(lambda self, step: replace(step, weight_decay=step.weight_decay * (1 - self.pp.rank)))),
    "a stage counts its steps otherwise": Fault("llama", PP, "update", ".*", updates(lambda self, step: replace(step, steps=step.steps + self.pp.rank))),
    "a rank has other betas": Fault("llama", DP, "update", ".*", change(AdamW, "update_", lambda inner: lambda self, *a: inner(replace(self, betas=(0.9, 0.95 - 0.05 * torch.distributed.get_rank())), *a))),
    "masters are rounded": Fault("llama", DP, "update", ".*", change(Run, "wide", rounded_masters)),
    # --- what later steps begin with
    "weights are not collected": Fault("llama", DP, "forward", "embedding", change(Buffer, "start_collect", uncollected)),
    "replicas take the same samples": Fault("llama", DP, "data", ".*", change(Trainer, "share", same_samples)),
    "initial weights are drawn by the rank": Fault("llama", TP, "initial weights", ".*", change(layers, "normal_part", lambda inner: lambda part, seed, std, dtype: inner(part, seed + part.shard, std, dtype))),
}  # fmt: skip
