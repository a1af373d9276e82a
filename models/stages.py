"""A decoder cut into pipeline stages.

A stage is a run of consecutive layers; the first stage also has the embedding, the last one the final norm and the
head. The cut is chosen by cost, including the head, so that the slowest stage is as fast as possible.

Logical names, the same for every layout:

    embedding.weight [vocab, hidden]        positions.weight [max_positions, hidden] (learned positions)
    layers.N.attention_norm.weight|bias     layers.N.attention.query|key|value|output.weight|bias
                                            layers.N.attention.query_norm|key_norm.weight [head_dim]
    layers.N.mlp_norm.weight|bias           layers.N.mlp.gate|up|down.weight|bias, or with experts
                                            layers.N.mlp.router.weight [experts, hidden]
                                            layers.N.mlp.experts.E.gate|up|down.weight
    final_norm.weight|bias                  head.weight [vocab, hidden] (a tied head is embedding.weight)

Weights are [output features, input features]. Rows of query and key are in the order of `models.rope`'s rotation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from models.blocks import Attention, DecoderLayer, make_norm
from models.config import ModelConfig
from models.packing import WHOLE, Packing, causal_mask
from models.rope import rotary_tables
from parallel.activation_checkpoint import KEEP, Recompute, recomputed
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, dropout
from parallel.layers import VocabParallelEmbedding, parameter
from parallel.linear import Add, Input, Linear
from parallel.loss import cross_entropy


@dataclass(frozen=True)
class Cut:
    """The layers of one stage. The first stage has the embedding, the last one the head."""

    stage: int
    layers: range
    first: bool
    last: bool


class Stage(nn.Module):
    """One pipeline stage. forward: int64 ids [s, b] (first stage) or activation -> activation or logits (last stage).

    Activations are [s, b, hidden] in the dtype of the residual stream, or [s / tp, b, hidden] under sequence
    parallelism; logits are [s, b, own vocabulary].
    """

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config, self.context, self.cut = config, context, cut
        if cut.first:
            self.embedding = VocabParallelEmbedding(
                context, config.vocab, config.hidden, name="embedding", tied=tied, std=config.initial_std("embedding")
            )
            if config.positions == "learned":
                whole = Part.cut("positions.weight", (config.max_positions, config.hidden), None, context.tp)
                self.positions = parameter(context, [whole], config.init_std, partial=context.cut_sequence)
        self.again = {str(n) for n in cut.layers[: context.recompute.whole(len(cut.layers))]}
        self.layers = nn.ModuleDict({str(n): self._make_block(str(n)) for n in cut.layers})
        if cut.last:
            self.final_norm = make_norm(config, context, "final_norm")
            self.head = self._make_head(tied)
        self._tables: tuple[Tensor, Tensor] | None = None

    def _make_block(self, n: str) -> DecoderLayer:
        within = self.context.recompute.within(whole=n in self.again)
        context = replace(self.context, recompute=within)
        return DecoderLayer(self.config.of_layer(int(n)), context, f"layers.{n}", int(n), self.attention)

    def _make_head(self, tied: tuple[int, ...]) -> nn.Parameter:
        if self.config.tied and self.cut.first:
            return self.embedding.weight
        name = "embedding.weight" if self.config.tied else "head.weight"
        rows = Part.cut(name, (self.config.vocab, self.config.hidden), 0, self.context.tp)
        std = self.config.initial_std("embedding" if self.config.tied else "head")
        return parameter(self.context, [rows], std, tied=tied)

    def forward(self, x: Tensor, place: MicrobatchInfo | None = None, packing: Packing = WHOLE) -> Tensor:
        length = x.shape[0] * (self.context.tp.size if self.context.cut_sequence and not self.cut.first else 1)
        if self.cut.first:
            x = self._embed(x, place, packing.positions)
        rotary = self._rotary(length, x.device, packing.positions) if self.config.positions == "rope" else None
        masks = self._masks(length, x.device, packing.documents)
        for n, block in self.layers.items():
            run = partial(block, rotary=rotary, place=place, attn_mask=masks.get(self._window(n)))
            x = recomputed(run, x) if n in self.again else run(x)
        return self._hand_out(self._logits(x), place) if self.cut.last else x

    def _window(self, n: str) -> int:
        return self.config.of_layer(int(n)).window

    def _masks(self, length: int, device: torch.device, documents: Tensor | None) -> dict[int, Tensor]:
        """Return the attention masks of the layers of this stage, by window; empty if each sample is one document."""
        if documents is None:
            return {}
        windows = {self._window(n) for n in self.layers}
        return {window: causal_mask(length, window, documents, device) for window in windows}

    def _embed(self, ids: Tensor, place: MicrobatchInfo | None, positions: Tensor | None) -> Tensor:
        x = self.embedding(ids)
        if self.config.embedding_grad_scale != 1:
            x = ScaleGradient.apply(x, self.config.embedding_grad_scale)
        if self.config.positions == "learned":
            first = self.context.tp.rank * len(x) if self.context.cut_sequence else 0
            own = slice(first, first + len(x))
            x = Add.apply(x, self.positions, own if positions is None else positions.t()[own])
        if self.config.dropout_at == "stream":
            return x  # the first block applies dropout to its input
        return dropout(x, self.config.embedding_dropout, self.context, "embedding", place)

    def _logits(self, x: Tensor) -> Tensor:
        c, lies = self.context, Input.SEQUENCE if self.context.cut_sequence else Input.COPIED
        products = c.products_of_head(layout_of(self.head).parts[0].name, self.config.head_grad_scale)
        return c.recompute.run(
            "norm",
            self.final_norm,
            x,
            into=lambda y: Linear.apply(y, self.head, None, lies, c.tp, c.deferred, products),
        )

    def _hand_out(self, logits: Tensor, place: MicrobatchInfo | None) -> Tensor:
        """Return the logits in the plan's `output` dtype.

        Training does not widen them: that would not change the loss, which is computed in the sensitive dtype in any
        case.
        """
        output = self.context.plan.output
        widens = torch.promote_types(logits.dtype, output) == output
        return logits if place is not None and widens else logits.to(output)

    def _rotary(self, length: int, device: torch.device, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine tables, [s, 1, 1, r / 2] each, or [s, b, 1, r / 2] at given positions [b, s].

        The tables are computed once per length, because under dynamic scaling the angles depend on the length.
        """
        if self._tables is None or len(self._tables[0]) != length:
            c, dtype = self.config, self.context.plan.buffers
            made = rotary_tables(c.rope_scaling, c.rope_base, c.rotary_dims, length, dtype)
            self._tables = made[0].to(device), made[1].to(device)
        cosine, sine = self._tables
        return (cosine, sine) if positions is None else (cosine[positions.t(), 0], sine[positions.t(), 0])

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token on the last stage, in the sensitive dtype, [s, b] like `targets`."""
        vocabulary = layout_of(self.head).parts[0]
        return cross_entropy(logits, targets, vocabulary, self.context.tp, self.context.plan.sensitive)


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def cuts(
    config: ModelConfig,
    stages: int,
    seq_length: int,
    given: Sequence[int] = (),
    rank_of_stage: Sequence[int] = (),
    recompute: Recompute = KEEP,
) -> list[Cut]:
    """Return the cut of a model into `stages` stages that gives the busiest rank the least work in both passes.

    Each stage gets at least one layer.
    given: the number of layers of each stage; empty: decided by cost.
    rank_of_stage: the rank of each stage; empty: each stage has its own rank.
    recompute: the activations that the backward pass recomputes.
    Raises ValueError if `given` does not fit.
    """
    ends = config.embedding_flops(), 3 * config.head_flops()
    counts = given or best_cut(
        config.layers, _layer_cost(config, seq_length, recompute), rank_of_stage or range(stages), *ends
    )
    if (len(counts), sum(counts), min(counts) > 0) != (stages, config.layers, True):
        raise ValueError(f"{config.layers} layers are not cut into {stages} stages by {[*counts]}")
    borders = list(accumulate(counts))
    return [
        Cut(i, range(end - n, end), i == 0, i == stages - 1)
        for i, (n, end) in enumerate(zip(counts, borders, strict=True))
    ]


def _layer_cost(config: ModelConfig, seq_length: int, recompute: Recompute) -> float:
    """Return the FLOPs of both passes of a layer, per token: three times the forward pass, plus the recomputation.

    If a fraction of a stage's layers is recomputed, each layer bears this fraction. A fixed number of recomputed layers
    is the same in every stage, so it does not affect the cut and is left out.
    """
    share = 0.0 if recompute.layers else recompute.fraction
    attention = config.attention_flops(seq_length) if "attention" in recompute.modules else 0
    return 3 * config.layer_flops(seq_length) + share * config.again_flops(seq_length) + attention


def best_cut(layers: int, cost: float, rank_of_stage: Sequence[int], first: float = 0, last: float = 0) -> list[int]:
    """Return the number of layers of each stage that gives the busiest rank the least work; all layers cost the same.

    Each stage gets at least one layer. `first` and `last` are the extra costs of the first and the last stage. Each
    further layer goes to the least busy rank, and there to its smallest stage. No other assignment makes the busiest
    rank less busy, because one more layer costs every rank the same. Among equals, early stages get more layers: they
    run first and wait longest.
    """
    stages = len(rank_of_stage)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    counts, busy = [1] * stages, [cost] * stages
    busy[0] += first
    busy[-1] += last
    of_rank = {rank: sum(b for b, r in zip(busy, rank_of_stage, strict=True) if r == rank) for rank in rank_of_stage}
    for _ in range(layers - stages):
        stage = min(range(stages), key=lambda s: (of_rank[rank_of_stage[s]], busy[s]))
        counts[stage] += 1
        busy[stage] += cost
        of_rank[rank_of_stage[stage]] += cost
    return counts


MakeStage = Callable[[ModelConfig, Context, Cut, tuple[int, ...]], Stage]
"""A function that builds one stage, or any module with a Stage's `forward` and `losses`. Its last argument is the
pipeline ranks that share a tied embedding; empty if it is untied, or if both ends of the model are on one rank."""


def build(
    config: ModelConfig,
    context: Context,
    all_cuts: Sequence[Cut],
    rank_of_stage: Sequence[int],
    pp_rank: int,
    make: MakeStage = Stage,
) -> Mapping[int, Stage]:
    """Return the stages that pipeline rank `pp_rank` holds, by number. A tied head on another rank is a tied copy."""
    ends = (rank_of_stage[0], rank_of_stage[-1])
    tied = ends if config.tied and ends[0] != ends[1] else ()
    stages = {cut.stage: make(config, context, cut, tied) for cut in all_cuts if rank_of_stage[cut.stage] == pp_rank}
    if config.tied and not tied and len(all_cuts) > 1 and pp_rank == ends[0]:
        stages[len(all_cuts) - 1].head = stages[0].embedding.weight
    return stages
