"""Faults of gradients and updates, the run and layout of each, and where it must be said to
arise."""

from dataclasses import replace

import torch

from megaprec.comm.layout import Layout, layout_of
from megaprec.optim import grad_sync
from megaprec.optim.model_buffers import ModelBuffers
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import AdamW
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.update_tile import Tile as Run
from models.engine.passes import Passes
from models.feed_forward import router
from parallel import collectives, layers, loss, norms
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import MessageType
from parallel.recomputation import _Call
from tests.parity.faults import (
    DP,
    MLP,
    MLP_2,
    PP,
    SP,
    TP,
    Fault,
    after_reduce,
    alone,
    averaged_shares,
    change,
    doubled,
    dp_counts_twice,
    dropped_work,
    input_gradient,
    lost_rows,
    messages,
    named,
    numbers_without,
    once_more,
    overwritten,
    padding_counts,
    rounded_masters,
    same_samples,
    scaled_input_gradient,
    shares,
    twice,
    uncollected,
    unsummed,
    untied,
    updates,
    weight_gradients,
    wrong_step_in_recomputation,
)
from tools.training.batches import Batches

FAULTS = {
    # --- backward
    "the loss weighs double on its way back": Fault(
        "llama",
        TP,
        "backward",
        "head and loss",
        change(Passes, "scaled_loss", lambda inner: lambda *a: inner(*a) * 2),
    ),
    "the loss is scaled twice": Fault(
        "fp16",
        DP,
        "backward",
        "head and loss",
        change(
            Passes,
            "scaled_loss",
            lambda inner: lambda self, *a: inner(self, *a) * self.optimizer.scale,
        ),
    ),
    "the gradient of the loss forgets the target": Fault(
        "llama",
        TP,
        "backward",
        "head and loss",
        change(
            loss.CrossEntropy,
            "backward",
            lambda inner: (
                lambda ctx, grad, *others: (
                    (made := inner(ctx, grad, *others))[0] + 1e-3,
                    *made[1:],
                )
            ),
        ),
    ),
    "the head's input gradient is not summed": Fault(
        "llama", TP, "backward", "head and loss", input_gradient("head", alone)
    ),
    "a column-parallel input gradient is not summed": Fault(
        "llama", TP, "backward", r"layers\.2\.mlp", input_gradient("layers.2.mlp.gate", alone)
    ),
    "that of query, key and value is not summed": Fault(
        "gpt2",
        TP,
        "backward",
        r"layers\.1\.attention",
        input_gradient("layers.1.attention.query", alone),
    ),
    "a column-parallel input gradient is summed twice": Fault(
        "llama", TP, "backward", r"layers\.2\.mlp", input_gradient("layers.2.mlp.gate", twice)
    ),
    "no column-parallel input gradient is summed": Fault(
        "llama", TP, "backward", "head and loss", input_gradient("", alone)
    ),
    "the scatter of an input gradient is a cut": Fault(
        "llama", SP, "backward", r"layers\.1\.mlp", input_gradient("layers.1.mlp.gate", alone)
    ),
    "the way back of a scatter gathers one part twice": Fault(
        "llama",
        SP,
        "backward",
        MLP,
        change(
            collectives._ReduceScatter,
            "backward",
            lambda inner: lambda ctx, grad: (torch.cat([grad] * ctx.axis.size), None),
        ),
    ),
    "a norm's input gradient is too large": Fault(
        "llama",
        PP,
        "backward",
        "final_norm",
        change(norms.Normalize, "backward", scaled_input_gradient(1.5)),
    ),
    "a stage sends twice the gradient": Fault(
        "llama",
        PP,
        "backward",
        r"between layers\.1 and layers\.2",
        messages(MessageType.GRADIENT, lambda x: x * 2),
    ),
    "a stage sends gradients of other samples": Fault(
        "llama",
        PP,
        "backward",
        r"between layers\.1 and layers\.2",
        messages(MessageType.GRADIENT, lambda x: x.flip(1)),
    ),
    "what is made again is something else": Fault(
        "recompute",
        TP,
        "backward",
        r"after layers\.3\.mlp.*",
        change(_Call, "_recompute", wrong_step_in_recomputation),
    ),
    "each tp rank adds the router's losses": Fault(
        "mixtral",
        TP,
        "backward",
        MLP,
        change(
            router.WithLoss,
            "forward",
            lambda inner: lambda ctx, x, value, weight: inner(ctx, x, value, weight * 2),
        ),
    ),
    # --- gradients of weights
    "tied gradients are not summed": Fault(
        "gpt2",
        PP,
        "gradients|copies",
        r"embedding\.weight",
        change(ParallelAMPOptimizer, "_complete_gradients", untied),
    ),
    "tied gradients are summed twice": Fault(
        "gpt2",
        PP,
        "gradients",
        r"embedding\.weight",
        change(ModelBuffers, "sum_tied_and_virtual", once_more),
    ),
    "a shared weight's split gradient is added twice": Fault(
        "gpt2",
        "pp=2,schedule=zb-v",
        "gradients",
        r"embedding\.weight",
        weight_gradients("embedding", doubled),
    ),
    "row-parallel biases are not summed": Fault(
        "gpt2",
        SP,
        "gradients",
        r".*down\.bias.*",
        shares(
            lambda p: (
                not any(
                    part.name.endswith(("output.bias", "down.bias")) for part in layout_of(p).parts
                )
            )
        ),
    ),
    "norms are not summed over the sequence": Fault(
        "llama",
        SP,
        "gradients",
        r".*final_norm\.weight.*",
        shares(lambda p: not any("norm" in part.name for part in layout_of(p).parts)),
    ),
    "one norm is not summed over the sequence": Fault(
        "llama",
        SP,
        "gradients",
        r"layers\.2\.mlp_norm\.weight",
        shares(lambda p: not named(p, "layers.2.mlp_norm")),
    ),
    "shares are averaged": Fault(
        "llama",
        SP,
        "gradients",
        r".*final_norm\.weight.*",
        change(grad_sync, "sum_partial", averaged_shares),
    ),
    "copies of key and value are not summed": Fault(
        "one key",
        TP,
        "gradients",
        r"layers\.\*\.attention\.(key|value)\.weight.*",
        shares(lambda p: len(layout_of(p).parts) < 3),
    ),
    "the router is not summed": Fault(
        "mixtral",
        TP,
        "gradients",
        r"layers\.\*\.mlp\.router\.weight",
        shares(lambda p: not any("router" in part.name for part in layout_of(p).parts)),
    ),
    "micro-batches overwrite gradients": Fault(
        "llama", PP, "gradients", r"layers\..*|all|head.*", weight_gradients("", overwritten)
    ),
    "replicas are not summed": Fault(
        "llama", DP, "gradients", "all", change(Buffer, "start_reduce", unsummed)
    ),
    "replicas are averaged": Fault(
        "llama",
        DP,
        "gradients",
        "all",
        after_reduce(lambda buffer: buffer.grads.div_(buffer.dp.size)),
    ),
    "one weight's gradient is made twice": Fault(
        "llama", TP, "gradients", r"layers\.2\.mlp\.down\.weight", weight_gradients(MLP_2, doubled)
    ),
    "repeated tokens lose their gradient": Fault(
        "llama", TP, "gradients", r"embedding\.weight", change(layers.Lookup, "backward", lost_rows)
    ),
    "what was put off is lost": Fault(
        "llama",
        "pp=2,schedule=zb-h1",
        "gradients",
        r".*",
        change(Executor, "_backward_weight", dropped_work),
    ),
    # --- norm, update
    "a stage is left out of the norm": Fault(
        "llama",
        PP,
        "norm",
        "norm",
        change(ParallelAMPOptimizer, "_local_numbers", numbers_without(1)),
    ),
    "tied weights count twice": Fault(
        "gpt2", PP, "norm", "norm", change(Layout, "counts", lambda inner: lambda self, rank: True)
    ),
    "replicas count twice": Fault(
        "llama", "dp=2,zero=false", "norm", "norm", change(Buffer, "counted", dp_counts_twice)
    ),
    "padding counts as zeros": Fault(
        "gpt2", TP, "norm", "zeros", change(Buffer, "counted", padding_counts)
    ),
    "the clip hangs on the rank": Fault(
        "llama",
        PP,
        "update",
        ".*",
        change(
            ParallelAMPOptimizer,
            "_clip_factor",
            lambda inner: lambda self, norm: inner(self, norm * (1 + self.pp.rank)),
        ),
    ),
    "nothing is clipped": Fault(
        "llama",
        TP,
        "update",
        ".*",
        change(
            ParallelAMPOptimizer,
            "_clip_factor",
            lambda inner: lambda self, norm: torch.ones_like(norm),
        ),
    ),
    "the learning rate hangs on the stage": Fault(
        "llama",
        PP,
        "update",
        ".*",
        updates(lambda self, step: replace(step, lr=step.lr * (1 + 1e-6 * self.pp.rank))),
    ),
    "a stage does not decay its weights": Fault(
        "llama",
        PP,
        "update",
        ".*",
        updates(
            lambda self, step: replace(step, weight_decay=step.weight_decay * (1 - self.pp.rank))
        ),
    ),
    "a stage counts its steps otherwise": Fault(
        "llama",
        PP,
        "update",
        ".*",
        updates(lambda self, step: replace(step, applied=step.applied + self.pp.rank)),
    ),
    "a rank has other betas": Fault(
        "llama",
        DP,
        "update",
        ".*",
        change(
            AdamW,
            "update_",
            lambda inner: (
                lambda self, *a: inner(
                    replace(self, betas=(0.9, 0.95 - 0.05 * torch.distributed.get_rank())), *a
                )
            ),
        ),
    ),
    "masters are rounded": Fault("llama", DP, "update", ".*", change(Run, "wide", rounded_masters)),
    # --- what later steps begin with
    "weights are not collected": Fault(
        "llama", DP, "forward", "embedding", change(Buffer, "start_all_gather", uncollected)
    ),
    "replicas take the same samples": Fault(
        "llama", DP, "data", ".*", change(Batches, "_read", same_samples)
    ),
    "initial weights are drawn by the rank": Fault(
        "llama",
        TP,
        "initial weights",
        ".*",
        change(
            layers,
            "normal_part",
            lambda inner: lambda part, seed, std, dtype: inner(part, seed + part.shard, std, dtype),
        ),
    ),
}
