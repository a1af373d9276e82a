"""Faults of activations and the loss, the run and layout of each, and where it must be said to
arise."""

from dataclasses import replace

import torch

from models.attention import kernels
from models.attention.attention import Attention
from models.decoder import stages
from models.decoder.layer import DecoderLayer
from models.decoder.stages import Stage
from models.engine.passes import Passes
from models.feed_forward import moe, router
from parallel import collectives, layers, linear, loss, norms
from parallel.pipeline.instructions import MessageType
from tests.parity.faults import (
    DP,
    IDENTITY,
    LAYER_1,
    MLP_2,
    PP,
    SP,
    TP,
    Fault,
    block,
    called_from,
    change,
    fewer_layers,
    in_module,
    late_messages,
    messages,
    only,
    own_samples,
    own_tokens,
    running,
    unmasked,
)

FAULTS = {
    # --- forward
    "a row-parallel output is not summed": Fault(
        "llama", TP, "forward", LAYER_1, in_module(LAYER_1, "reduce", IDENTITY)
    ),
    "a feed-forward's output is not summed": Fault(
        "llama", TP, "forward", MLP_2, in_module(MLP_2, "reduce", IDENTITY)
    ),
    "a row-parallel output is summed twice": Fault(
        "llama",
        TP,
        "forward",
        MLP_2,
        in_module(
            MLP_2,
            "reduce",
            lambda x, a: collectives._Reduce.apply(collectives._Reduce.apply(x, a), a),
        ),
    ),
    "a row-parallel output is averaged": Fault(
        "gpt2",
        TP,
        "forward",
        LAYER_1,
        in_module(LAYER_1, "reduce", lambda x, a: collectives._Reduce.apply(x, a) / a.size),
    ),
    "the scatter of a row-parallel output is a cut": Fault(
        "llama",
        SP,
        "forward",
        MLP_2,
        in_module(MLP_2, "reduce_scatter", lambda x, a: collectives._Split.apply(x, a, 0)),
    ),
    "looked-up rows are not summed": Fault(
        "llama",
        TP,
        "forward",
        "embedding",
        change(
            layers.VocabParallelEmbedding,
            "forward",
            lambda inner: (
                lambda self, ids: layers.Lookup.apply(
                    (ids - self.part.start).clamp(0, self.part.local[0] - 1),
                    self.weight,
                    (ids < self.part.start) | (ids >= self.part.start + self.part.local[0]),
                )
            ),
        ),
    ),
    "a row-parallel bias is added by every rank": Fault(
        "gpt2",
        TP,
        "gradients",
        r".*\.output\.bias.*",
        change(
            layers.RowParallelLinear,
            "forward",
            lambda inner: lambda self, x: inner(self, x) + self.bias,
        ),
    ),
    "a gather turns the ranks round": Fault(
        "llama",
        SP,
        "forward",
        r"layers\.0\.attention\.output",
        change(
            linear.Axis,
            "gather",
            lambda inner: (
                lambda self, x: (
                    torch.cat(inner(self, x).chunk(self.size)[::-1])
                    if self.name == "tp" and x.dim() == 3
                    else inner(self, x)
                )
            ),
        ),
    ),
    "a norm's epsilon hangs on the rank": Fault(
        "llama",
        TP,
        "forward",
        r"layers\.0\.attention_norm",
        change(
            norms.RMSNorm,
            "forward",
            lambda inner: (
                lambda self, x: norms.Normalize.apply(
                    x,
                    self.weight,
                    self.eps * (10 if torch.distributed.get_rank() else 1),
                    self.context.plan.sensitive,
                    self.context.plan.compute,
                )
            ),
        ),
    ),
    "one rank divides scores by another number": Fault(
        "llama",
        TP,
        "forward",
        r"layers\.0\.attention\.output",
        change(
            Attention,
            "_core_attention",
            only(1, "tp", lambda inner, self, query, *rest: inner(self, query * 1.1, *rest)),
        ),
    ),
    "heads turn as if they stood elsewhere": Fault(
        "llama",
        TP,
        "forward",
        r"layers\.0\.attention\.output",
        change(
            Attention,
            "_attend",
            only(
                1,
                "tp",
                lambda inner, self, y, rotary, **rest: inner(
                    self, y, rotary=tuple(t.roll(1, 0) for t in rotary), **rest
                ),
            ),
        ),
    ),
    "positions of the first part are added to each part": Fault(
        "gpt2",
        SP,
        "forward",
        r"between embedding and layers\.0",
        change(
            stages.Add,
            "forward",
            lambda inner: (
                lambda ctx, x, table, own=None: inner(
                    ctx, x, table, slice(0, len(x)) if isinstance(own, slice) else own
                )
            ),
        ),
    ),
    "dropout knows a replica's samples only": Fault(
        "dropout", DP, "forward", "tokens", running(own_samples)
    ),
    "dropout forgets where a part of the sequence begins": Fault(
        "dropout",
        SP,
        "forward",
        r"between embedding and layers\.0",
        change(
            stages,
            "dropout",
            lambda inner: (
                lambda x, p, context, name, place: inner(
                    x, p, replace(context, sequence=False), name, place
                )
            ),
        ),
    ),
    "dropout of attention takes all heads for the first": Fault(
        "dropout",
        TP,
        "forward",
        r"layers\.0\.attention\.output",
        change(
            kernels,
            "attention_dropout",
            lambda inner: (
                lambda w, p, context, *rest: inner(
                    w, p, replace(context, tp=replace(context.tp, rank=0)), *rest
                )
            ),
        ),
    ),
    "a stage does not scale what dropout keeps": Fault(
        "dropout",
        PP,
        "forward",
        r"between layers\.2\.attention and layers\.2\.mlp_norm",
        change(
            DecoderLayer,
            "_drop",
            lambda inner: (
                lambda self, x, branch, place: (
                    inner(self, x, branch, place) * (0.9 if self.name == "layers.2" else 1)
                )
            ),
        ),
    ),
    "a layer is not run": Fault(
        "llama",
        PP,
        "forward",
        r"layers\.2",
        block("layers.2", lambda inner, self, x, *rest, **more: x),
    ),
    "a layer is run twice": Fault(
        "llama",
        PP,
        "forward",
        r"layers\.2",
        block(
            "layers.2",
            lambda inner, self, x, *rest, **more: inner(
                self, inner(self, x, *rest, **more), *rest, **more
            ),
        ),
    ),
    "a layer is on no stage": Fault(
        "llama", PP, "model", r"layers\.2\..*", change(Stage, "__init__", fewer_layers)
    ),
    "a stage sends half of its activation": Fault(
        "llama",
        PP,
        "forward",
        r"between layers\.1 and layers\.2",
        messages(MessageType.ACTIVATION, lambda x: x / 2),
    ),
    "a stage sends the micro-batch before": Fault(
        "llama", PP, "forward", r"between layers\.1 and layers\.2", late_messages()
    ),
    "a stage sends its samples in another order": Fault(
        "llama",
        PP,
        "forward",
        r"between layers\.1 and layers\.2",
        messages(MessageType.ACTIVATION, lambda x: x.flip(1)),
    ),
    "experts' shares are not summed": Fault(
        "mixtral",
        TP,
        "forward",
        r"layers\.0\.mlp",
        change(
            moe.collectives,
            "reduce",
            lambda inner: lambda x, a: x if called_from("moe.py") else inner(x, a),
        ),
    ),
    "one rank routes to the next best experts": Fault(
        "mixtral",
        TP,
        "forward",
        r"layers\.0\.mlp",
        change(
            router.Router,
            "forward",
            only(
                1,
                "tp",
                lambda inner, self, x, place: (lambda w, c: (w, (c + 1) % 4))(
                    *inner(self, x, place)
                ),
            ),
        ),
    ),
    # --- loss
    "exponentials are not summed over the vocabulary": Fault(
        "llama",
        TP,
        "loss",
        "head and loss",
        change(
            loss.Axis,
            "sum_",
            lambda inner: lambda self, x: x if called_from("loss.py") else inner(self, x),
        ),
    ),
    "padding of the vocabulary is counted": Fault(
        "gpt2",
        TP,
        "loss",
        "head and loss",
        change(
            loss.CrossEntropy,
            "forward",
            lambda inner: (
                lambda ctx, logits, targets, part, *rest: inner(
                    ctx,
                    logits,
                    targets,
                    replace(part, shape=(part.padded[0] * part.shards, *part.shape[1:])),
                    *rest,
                )
            ),
        ),
    ),
    "the loss is divided by a replica's tokens": Fault(
        "llama", DP, "loss", "head and loss", change(Passes, "begin", own_tokens)
    ),
    "one replica counts targets that do not": Fault(
        "llama", DP, "loss", "head and loss", running(unmasked)
    ),
    "the loss is divided by the micro-batches once more": Fault(
        "llama", PP, "loss", "head and loss", running(lambda self, run: run.divisor.mul_(2))
    ),
}
