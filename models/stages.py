"""A decoder cut into pipeline stages.

A stage is a run of consecutive layers; the first stage also has the embedding, the last one the
final norm, the head and the modules of multi-token prediction (`models.mtp`), which read the
embedding too. `models.cutting` chooses the cut.

Logical names, the same for every layout:

    embedding.weight [vocab, hidden]        positions.weight [max_positions, hidden] (learned positions)
    layers.N.attention_norm.weight|bias     layers.N.attention.query|key|value|output.weight|bias
    layers.N.attention_post_norm.weight     layers.N.attention.query_norm|key_norm.weight [head_dim] or [all heads]
    layers.N.attention.sinks.weight [heads]
    layers.N.mlp_norm.weight|bias           layers.N.mlp.gate|up|down.weight|bias, or with experts
    layers.N.mlp_post_norm.weight           layers.N.mlp.router.weight|bias [experts, hidden] or [experts]
                                            layers.N.mlp.router.correction [experts]
                                            layers.N.mlp.experts.E.gate|up|down.weight|bias
                                            layers.N.mlp.shared.gate|up|down.weight
                                            layers.N.mlp.shared_gate.weight [1, hidden]
    final_norm.weight|bias                  head.weight [vocab, hidden] (a tied head is embedding.weight)
    mtp.N.embedding_norm|hidden_norm|final_norm.weight|bias, mtp.N.projection.weight [hidden, 2 * hidden], and
    mtp.N.attention_norm and so on as of layers

Multi-head latent attention has in layers.N.attention, instead of query, key and value:

    query_down.weight|bias [query_rank, hidden]       query_up.weight [heads * (rope_dim + nope_dim), query_rank]
    key_value_down.weight|bias [kv_rank, hidden]      key_up.weight [heads * nope_dim, kv_rank]
    key_rope.weight|bias [rope_dim, hidden]           value_up.weight [heads * value_dim, kv_rank]
    query_down_norm.weight [query_rank]               key_value_down_norm.weight [kv_rank]

A model without a latent of queries has query.weight [heads * (rope_dim + nope_dim), hidden] for its
three of queries.

Weights are [output features, input features]. Rows of query and key are in the order of
`models.rope`'s rotation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from megaprec.precision.rounding import nearest
from models.blocks import Attention, DecoderLayer, make_norm
from models.config import ModelConfig
from models.flash_windows import Documents
from models.latent_attention import LatentAttention
from models.mtp import Ahead, PredictionModule
from models.packing import WHOLE, Packing, causal_mask
from models.rope import RopeScaling, rotary_tables
from models.softcap import softcap
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, dropout
from parallel.layers import VocabParallelEmbedding, parameter
from parallel.linear import Add, Input, Linear
from parallel.loss import cross_entropy
from parallel.recomputation import recomputed
from parallel.sequence_cut import positions_between, take


@dataclass(frozen=True)
class Cut:
    """The layers of one stage. The first stage has the embedding, the last one the head."""

    stage: int
    layers: range
    first: bool
    last: bool


class Stage(nn.Module):
    """One pipeline stage. forward: int64 ids [s, b] (first stage) or activation -> activation or
    logits (last stage).

    Activations are [s, b, hidden] in the dtype of the residual stream, or [s / tp, b, hidden] under
    sequence parallelism; logits are [s, b, own vocabulary]. Under context parallelism s are this
    rank's tokens (`parallel.sequence_cut`), and so are the positions of a packing, but its
    documents are those of whole samples.
    """

    attention: ClassVar[type[Attention]] = Attention
    latent_attention: ClassVar[type[LatentAttention]] = LatentAttention

    def __init__(
        self, config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.cut = cut
        if cut.first:
            self.embedding = self._make_embedding(tied)
            if config.positions == "learned":
                whole = Part.cut(
                    "positions.weight", (config.max_positions, config.hidden), None, context.tp
                )
                self.positions = parameter(
                    context, [whole], config.init_std, partial=context.cut_sequence
                )
        self.again = {str(n) for n in cut.layers[: context.recompute.whole(len(cut.layers))]}
        self.layers = nn.ModuleDict({str(n): self._make_block(str(n)) for n in cut.layers})
        if cut.last:
            self.final_norm = make_norm(config, context, "final_norm")
            if config.mtp_layers and not cut.first:
                self.embedding = self._make_embedding(tied)
            self.head = self._make_head(tied)
            again = len(self.again) == len(cut.layers)  # if all layers of the stage are recomputed
            made = {str(n): self._make_module(n, again) for n in range(config.mtp_layers)}
            self.mtp = nn.ModuleDict(made)
        self._windows = {str(n): config.of_layer(n).window for n in cut.layers}
        self._tables: dict[tuple[bool, int, bool], tuple[Tensor, Tensor]] = {}

    def _make_block(self, n: str) -> DecoderLayer:
        within = self.context.recompute.within(whole=n in self.again)
        context = replace(self.context, recompute=within)
        attention = self.latent_attention if self.config.latent else self.attention
        return DecoderLayer(self.config.of_layer(int(n)), context, f"layers.{n}", int(n), attention)

    def _make_module(self, n: int, again: bool) -> PredictionModule:
        attention = self.latent_attention if self.config.latent else self.attention
        return PredictionModule(self.config, self.context, n, attention, again)

    def _make_embedding(self, tied: tuple[int, ...]) -> VocabParallelEmbedding:
        c = self.config
        std = self.config.initial_std("embedding")
        return VocabParallelEmbedding(
            self.context, c.vocab, c.hidden, name="embedding", tied=tied, std=std
        )

    def _make_head(self, tied: tuple[int, ...]) -> nn.Parameter:
        # the modules' embedding is the head's copy
        beside = self.config.mtp_layers and not self.cut.first
        if self.config.tied and (beside or (self.cut.first and not tied)):
            return self.embedding.weight
        tied = tied if self.config.tied else ()
        name = "embedding.weight" if self.config.tied else "head.weight"
        rows = Part.cut(name, (self.config.vocab, self.config.hidden), 0, self.context.tp)
        std = self.config.initial_std("embedding" if self.config.tied else "head")
        return parameter(self.context, [rows], std, tied=tied, again=len(set(tied)) < len(tied))

    def read_late(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Return the weights that are read after the layers only, with the first module that runs
        there."""
        if not self.cut.last:
            return {}
        head = [] if self.config.tied and self.cut.first else [self.head]
        table = [self.embedding.weight] if self.config.mtp_layers and not self.cut.first else []
        return {self.final_norm: [*self.final_norm.parameters(), *head, *table]}

    def forward(
        self,
        x: Tensor,
        place: MicrobatchInfo | None = None,
        packing: Packing = WHOLE,
        ahead: Ahead | None = None,
    ) -> Tensor:
        length = x.shape[0] * (
            self.context.tp.size if self.context.cut_sequence and not self.cut.first else 1
        )
        if self.cut.first:
            x = self._embed(x, place, packing.positions)
        rotary = self._rotaries(length * self.context.cp.size, x.device, packing.positions)
        masks = self._masks(length, x.device, packing)
        for n, block in self.layers.items():
            turns = rotary.get(self._turns_by_window(n))
            run = partial(block, rotary=turns, place=place, attn_mask=masks.get(self._windows[n]))
            x = recomputed(run, x) if n in self.again else run(x)
        if not self.cut.last:
            return x
        if ahead is None:
            return self._hand_out(self._logits(x), place)
        last = str(self.cut.layers[-1])
        run = partial(
            self._predict_ahead,
            ahead=ahead,
            rotary=rotary.get(self._turns_by_window(last)),
            place=place,
            attn_mask=masks.get(self._windows[last]),
        )
        return self._hand_out(self._of_head(run(self.final_norm(x))), place)

    def _predict_ahead(
        self,
        hidden: Tensor,
        ahead: Ahead,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Return hidden states of the final norm, whose backward pass also starts those of the
        modules' losses."""
        y = hidden
        shares = []
        for n, module in self.mtp.items():
            embedded = self._embed(ahead.tokens[int(n)], place, None, f"mtp.{n}.embedding")
            y = module(embedded, y, rotary=rotary, place=place, attn_mask=attn_mask)
            shares.append(ahead.share(int(n), self.losses(self._of_head(y), ahead.targets[int(n)])))
        # other tp ranks have the same losses
        return ahead.attach(hidden, shares, note=self.context.tp.rank == 0)

    def _turns_by_window(self, n: str) -> bool:
        """Return True if the layer has the rotary positions of layers with the sliding window."""
        return self.config.window_rope_base > 0 and self._windows[n] > 0

    def _masks(
        self, length: int, device: torch.device, packing: Packing
    ) -> Mapping[int, Tensor | Documents]:
        """Return the attention masks of the layers of this stage, by window; empty if each sample
        is one document.

        On a GPU these are the documents: attention that needs no mask makes none. Under context
        parallelism they are the numbers of documents, from which attention makes masks in parts.
        """
        if packing.documents is None:
            return {}
        windows = {*self._windows.values()}
        if self.context.cp.size > 1:
            return dict.fromkeys(windows, packing.documents)
        if device.type != "cpu":
            return dict.fromkeys(windows, Documents(packing.documents, sum(packing.counted)))
        return {
            window: causal_mask(length, window, packing.documents, device) for window in windows
        }

    def _embed(
        self,
        ids: Tensor,
        place: MicrobatchInfo | None,
        positions: Tensor | None,
        name: str = "embedding",
    ) -> Tensor:
        x = self.embedding(ids)
        if self.config.embedding_scale != 1:
            x = x * nearest(self.config.embedding_scale, x.dtype)
        if self.config.embedding_grad_scale != 1:
            x = ScaleGradient.apply(x, self.config.embedding_grad_scale)
        if self.config.positions == "learned":
            x = Add.apply(x, self.positions, self._rows_of_positions(x, positions))
        rate = self.config.embedding_dropout
        if not rate or self.config.dropout_at == "stream":
            return x  # under "stream" the first block applies dropout to its input
        return dropout(x, rate, self.context, name, place)

    def _rows_of_positions(self, x: Tensor, positions: Tensor | None) -> slice | Tensor:
        """Return the rows of the position table for activations x. positions: of the packing, [b,
        s]."""
        c = self.context
        first = c.tp.rank * len(x) if c.cut_sequence else 0
        own = slice(first, first + len(x))
        if positions is not None:
            return positions.t()[own]
        if c.cp.size == 1:
            return own
        return positions_between(c, len(x), x.device).unsqueeze(1).expand(x.shape[:2])

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.context.recompute.run("norm", self.final_norm, x, into=self._products_of_head)
        return softcap(logits, self.config.final_softcap)

    def _of_head(self, y: Tensor) -> Tensor:
        """Return the logits of normalized hidden states."""
        return softcap(self._products_of_head(y), self.config.final_softcap)

    def _products_of_head(self, y: Tensor) -> Tensor:
        c = self.context
        lies = Input.SEQUENCE if self.context.cut_sequence else Input.COPIED
        products = c.products_of_head(
            layout_of(self.head).parts[0].name, self.config.head_grad_scale
        )
        return Linear.apply(y, self.head, None, lies, c.tp, c.deferred, products)

    def _hand_out(self, logits: Tensor, place: MicrobatchInfo | None) -> Tensor:
        """Return the logits in the plan's `output` dtype.

        Training does not widen them: that would not change the loss, which is computed in the
        sensitive dtype in any case.
        """
        output = self.context.plan.output
        widens = torch.promote_types(logits.dtype, output) == output
        return logits if place is not None and widens else logits.to(output)

    def _rotaries(
        self, length: int, device: torch.device, positions: Tensor | None
    ) -> dict[bool, tuple[Tensor, Tensor]]:
        """Return the tables of `_rotary` that the layers of this stage need, by
        `_turns_by_window`."""
        if self.config.positions == "rope":
            kinds = {self._turns_by_window(n) for n in self.layers}
        else:
            kinds = ()
        return {windowed: self._rotary(length, device, positions, windowed) for windowed in kinds}

    def _rotary(
        self, length: int, device: torch.device, positions: Tensor | None, windowed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine tables, [s, 1, 1, r / 2] each, or [s, b, 1, r / 2] at given
        positions [b, s].

        length: of whole sequences. The tables are computed once per length, because under dynamic
        scaling the angles depend on the length.
        """
        kind = windowed, length, positions is None
        if kind not in self._tables:
            c = self.config
            dtype = self.context.plan.buffers
            if windowed:
                scaling, base = (RopeScaling(), c.window_rope_base)
            else:
                scaling, base = (c.rope_scaling, c.rope_base)
            made = rotary_tables(scaling, base, c.rotary_dims, length, dtype)
            if positions is None:
                made = take(made[0], self.context.cp, 0), take(made[1], self.context.cp, 0)
            self._tables = {
                known: table for known, table in self._tables.items() if known[0] != windowed
            }
            self._tables[kind] = made[0].to(device), made[1].to(device)
        cosine, sine = self._tables[kind]
        if positions is None:
            return (cosine, sine)
        return (cosine[positions.t(), 0], sine[positions.t(), 0])

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token on the last stage, in the sensitive dtype, [s, b] like
        `targets`.

        The backward pass overwrites the logits with their gradient.
        """
        vocabulary = layout_of(self.head).parts[0]
        c = self.context
        return cross_entropy(
            logits, targets, vocabulary, c.tp, c.plan.sensitive, consume=True, leaves=c.leaves
        )


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
