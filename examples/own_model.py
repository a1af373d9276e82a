"""A model of your own, built from the parallel layers, for `megaprec train` and `megaprec parity`.

megaprec parity examples/own_model.toml

`build` makes one pipeline stage. Every parameter carries a Layout, which says who holds which part
of it; the layers of `parallel` give it to theirs, `parallel.layers.parameter` to your own. This one
has no attention: in each layer a token is normalised, scaled by a learned vector and sent through a
feed-forward with a squared ReLU.
"""

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.decoder.stages import Cut
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, dropout
from parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    parameter,
)
from parallel.linear import InputLayout, Linear
from parallel.loss import cross_entropy
from parallel.norms import RMSNorm


class Layer(nn.Module):
    """x + down(relu(up(norm(x) * scale))²)."""

    def __init__(self, config: ModelConfig, context: Context, name: str) -> None:
        super().__init__()
        self.name = name
        self.context = context
        self.probability = config.dropout
        self.norm = RMSNorm(context, config.hidden, name=f"{name}.norm")
        # Every tp rank holds all of it. Where the sequence is cut, each sees only its own tokens:
        # then the gradient is a share, to be summed over tp, and `partial` says so.
        whole = Part.cut(f"{name}.scale", (config.hidden,), None, context.tp)
        self.scale = parameter(context, [whole], 0.0, partial=context.cut_sequence, mean=1.0)
        self.up = ColumnParallelLinear(context, config.hidden, config.ffn, name=f"{name}.up")
        self.down = RowParallelLinear(context, config.ffn, config.hidden, name=f"{name}.down")

    def forward(self, x: Tensor, microbatch: MicrobatchInfo | None) -> Tensor:
        y = self.down(torch.relu(self.up(self.norm(x) * self.scale)).square())
        return x + dropout(y, self.probability, self.context, self.name, microbatch)


class Stage(nn.Module):
    """Some layers; the first stage also embeds, the last also has the head and the loss."""

    def __init__(
        self, config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.context = context
        self.cut = cut
        if cut.first:
            self.embedding = VocabParallelEmbedding(
                context, config.vocab, config.hidden, name="embedding"
            )
        self.layers = nn.ModuleList(Layer(config, context, f"layers.{n}") for n in cut.layers)
        if cut.last:
            self.final_norm = RMSNorm(context, config.hidden, name="final_norm")
            rows = Part.cut("head.weight", (config.vocab, config.hidden), 0, context.tp)
            self.head = parameter(context, [rows], config.init_std)

    def forward(
        self, x: Tensor, microbatch: MicrobatchInfo | None = None, packing: Packing = UNPACKED
    ) -> Tensor:
        """int64 ids [s, b], or activations [s, b, hidden] ([s / tp, ...] where the sequence is cut)
        of the stage before -> activations, or logits [s, b, own rows of the vocabulary].

        microbatch: None in evaluation.
        packing: where documents end, for models whose tokens see each other.
        """
        if self.cut.first:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, microbatch)
        if not self.cut.last:
            return x
        c = self.context
        lies = InputLayout.SEQUENCE if self.context.cut_sequence else InputLayout.COPIED
        products = c.products_of_head("head.weight")
        return Linear.apply(self.final_norm(x), self.head, None, lies, c.tp, c.deferred, products)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token, [s, b] like `targets`."""
        c = self.context
        return cross_entropy(logits, targets, layout_of(self.head).parts[0], c.tp, c.plan.sensitive)


def build(config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...]) -> Stage:
    """One stage. `tied` is for models whose head is their embedding (model.tied = true); this one's
    is not."""
    return Stage(config, context, cut, tied)
