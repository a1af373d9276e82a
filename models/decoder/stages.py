"""A decoder cut into pipeline stages.

A stage is a run of consecutive layers; the first stage also has the embedding, the last one the
final norm, the head and the modules of multi-token prediction (`models.decoder.mtp`), which read
the embedding too. `models.decoder.cutting` chooses the cut.

Its tensors have the logical names of `models.logical_shapes`, the same for every layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from megaprec.precision.rounding import nearest
from models import optional_parts
from models.attention.attention import Attention
from models.attention.flash_windows import Documents
from models.attention.kernels import softcap
from models.attention.packing import UNPACKED, Packing, causal_mask
from models.attention.rope import RotaryTables, query_factors, rotary_tables
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer, make_norm
from models.decoder.mtp import MTPBatch, PredictionModule
from models.mup import note_growth
from models.rope_scaling import RopeScaling
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, dropout
from parallel.gradient_scale import scale_gradient
from parallel.layers import VocabParallelEmbedding, parameter
from parallel.linear import Add, InputLayout, Linear
from parallel.loss import cross_entropy_and_log_sum
from parallel.recomputation import recomputed
from parallel.sequence_cut import positions_between, take_own_positions

if TYPE_CHECKING:
    from models.decoder.layer import Mixer


@dataclass(frozen=True)
class Cut:
    """The layers of one stage.

    stage: its number.
    layers: the numbers of its layers.
    first, last: it is the model's first stage, with the embedding, or the last one, with the head.
    """

    stage: int
    layers: range
    first: bool
    last: bool


class Stage(nn.Module):
    """One pipeline stage: the layers of `cut`, with what only the first or the last stage has.

    tied: the pipeline ranks that both have the embedding (`models.decoder.cutting.MakeStage`).

    `forward` maps int64 ids [s, b] (first stage) or an activation to an activation or, on the last
    stage, to logits. Activations are [s, b, hidden] in the dtype of the residual stream, or
    [s / tp, b, hidden] under sequence parallelism; logits are [s, b, local vocabulary]. Under
    context parallelism s are this rank's tokens (`parallel.sequence_cut`), and so are the positions
    of a packing, but its documents are those of whole samples.
    """

    attention: ClassVar[type[Attention]] = Attention
    # in place of those of `models.optional_parts`, by name
    own_kinds: ClassVar[Mapping[str, type[nn.Module]]] = {}

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        cut: Cut,
        tied: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        recipe = context.plan.fp8
        if recipe is not None and recipe.scales.four_bits:
            optional_parts.require_nvfp4_layers(config)
        self.config = config
        self.context = context
        self.cut = cut
        # Parameters lie in the optimizer's buffers in the order in which they are made here.
        if cut.first:
            self._add_first_modules(tied)
        # by the layers' names, their numbers as text, which a ModuleDict wants as keys
        recomputed_layers = context.recompute.count_whole_layers(len(cut.layers))
        self.recomputed_layers = {str(number) for number in cut.layers[:recomputed_layers]}
        self.layers = nn.ModuleDict(
            {str(number): self._make_layer(number) for number in cut.layers}
        )
        if cut.last:
            self._add_last_modules(tied)
        note_growth(self.parameters(), config.mup)
        # the window of each layer, 0 without, by the layer's name
        self._windows = {str(number): config.of_layer(number).window for number in cut.layers}
        recurrent_layers = {*config.delta_layers, *config.layers_of("M")}
        self._recurrent_layers = {
            str(number) for number in cut.layers if number in recurrent_layers
        }
        # by whether they are those of layers with a window, the length of sequences, and whether
        # they are those of this rank's consecutive positions or of all positions of a sequence
        self._rotary_tables: dict[tuple[bool, int, bool], RotaryTables] = {}

    def _add_first_modules(self, tied: tuple[int, ...]) -> None:
        """Make what the first stage has before its layers: the embedding, and if the model has them
        a table of learned positions and the norm of the embeddings."""
        self.embedding = self._make_embedding(tied)
        if self.config.positions == "learned":
            self.position_table = self._make_position_table()
        if self.config.embedding_norm:
            self.embedding_norm = make_norm(self.config, self.context, "embedding_norm")

    def _add_last_modules(self, tied: tuple[int, ...]) -> None:
        """Make what only the last stage has: the final norm, the head, and the modules of
        multi-token prediction with the embedding that they read."""
        config = self.config
        self.final_norm = make_norm(config, self.context, "final_norm", config.mup.final_norm)
        if config.mtp_layers and not self.cut.first:
            self.embedding = self._make_embedding(tied)
        self.head = self._make_head(tied)
        self.mtp = nn.ModuleDict(
            {str(number): self._make_module(number) for number in range(config.mtp_layers)}
        )

    def _make_layer(self, number: int) -> DecoderLayer:
        is_recomputed = str(number) in self.recomputed_layers
        inner = self.context.recompute.inside_layer(whole=is_recomputed)
        context = replace(self.context, recompute=inner)
        config = self.config.of_layer(number)
        return DecoderLayer(config, context, f"layers.{number}", number, self._mixer_type(config))

    def _mixer_type(self, config: ModelConfig) -> "type[Mixer]":
        """Return the class of attention of a layer, or of what it has in place of it. config: the
        model of the layer."""
        if config.delta_net.gate_rank:
            return self._kind("KimiDeltaAttention")
        if config.delta_net:
            return self._kind("GatedDeltaNet")
        if config.mamba:
            return self._kind("MambaMixer")
        return self._attention_type()

    def _make_module(self, number: int) -> PredictionModule:
        """Return module `number`, from 0, of multi-token prediction."""
        # Its layer is recomputed if all layers of the stage are.
        recompute_layer = len(self.recomputed_layers) == len(self.cut.layers)
        return PredictionModule(
            self.config,
            self.context,
            number,
            self._mixer_type(self.config.of_layer(self.config.layers - 1)),
            recompute_layer,
        )

    def _attention_type(self) -> type[Attention]:
        return self._kind("LatentAttention") if self.config.latent else self.attention

    def _kind(self, name: str) -> Any:
        """Return the class of attention, or of what layers have in its place, by its name: one of
        `own_kinds`, or that of `models.optional_parts`."""
        return self.own_kinds.get(name) or getattr(optional_parts, name)

    def _make_embedding(self, tied: tuple[int, ...]) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(
            self.context,
            self.config.vocab,
            self.config.hidden,
            name="embedding",
            tied=tied,
            std=self.config.initial_std("embedding"),
        )

    def _make_position_table(self) -> nn.Parameter:
        context = self.context
        shape = (self.config.max_positions, self.config.hidden)
        table = Part.cut("positions.weight", shape, None, context.tp)
        # Each tp rank sees its own positions only if the sequence is cut.
        return parameter(context, [table], self.config.init_std, partial=context.cut_sequence)

    def _make_head(self, tied: tuple[int, ...]) -> nn.Parameter:
        """Return the weight of the head, which may be that of this stage's embedding."""
        config = self.config
        # the copy of the embedding that modules of multi-token prediction read on this stage
        has_own_embedding = config.mtp_layers and not self.cut.first
        shares_first_embedding = self.cut.first and not tied
        if config.tied and (has_own_embedding or shares_first_embedding):
            return self.embedding.weight
        shape = (config.vocab, config.hidden)
        if not config.tied:
            rows = Part.cut("head.weight", shape, 0, self.context.tp)
            return parameter(self.context, [rows], config.initial_std("head"))
        # a copy of the embedding, tied to that of the first stage
        rows = Part.cut("embedding.weight", shape, 0, self.context.tp)
        # a rank that has both of them has two parameters
        again = len(set(tied)) < len(tied)
        std = config.initial_std("embedding")
        return parameter(self.context, [rows], std, tied=tied, again=again)

    def read_early(self) -> list[nn.Parameter]:
        """Return the weights that are read before the layers."""
        if not self.cut.first:
            return []
        weights = [self.embedding.weight]
        if self.config.positions == "learned":
            weights.append(self.position_table)
        if self.config.embedding_norm:
            weights += self.embedding_norm.parameters()
        return weights

    def read_late(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Return the weights that are read after the layers, with the first module that runs
        there. A tied head, and the embedding that modules of multi-token prediction read, may have
        been read early too."""
        # Elsewhere there is nothing after the layers.
        if not self.cut.last:
            return {}
        weights = [*self.final_norm.parameters(), self.head]
        if self.config.mtp_layers:
            weights.append(self.embedding.weight)
        # once, if the head is the embedding
        return {self.final_norm: list(dict.fromkeys(weights))}

    def forward(
        self,
        x: Tensor,
        microbatch: MicrobatchInfo | None = None,
        packing: Packing = UNPACKED,
        mtp_batch: MTPBatch | None = None,
    ) -> Tensor:
        """Compute the stage; shapes as above.

        microbatch: what dropout and router losses need to know of it; None in evaluation.
        packing: the documents of its samples.
        mtp_batch: what modules of multi-token prediction read and predict; last stage only.
        """
        # Ids are not cut over tp, activations may be.
        length = x.shape[0]
        if self.context.cut_sequence and not self.cut.first:
            length *= self.context.tp.size
        if self.cut.first:
            x = self._embed(x, microbatch, packing.positions)
            # a frozen embedding: layers compute their backward passes all the same
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()
        # Tables and masks are made once for all layers of the stage.
        rotary = self._rotary_by_window(length * self.context.cp.size, x.device, packing.positions)
        masks = self._make_masks(length, x.device, packing)

        def with_arguments(run: Callable[..., Tensor], layer: str) -> Callable[..., Tensor]:
            """Return `run` with the arguments that the layer of this name gets besides its
            activation."""
            return partial(
                run,
                rotary=self._rotary_of(layer, rotary),
                microbatch=microbatch,
                attn_mask=self._mask_of(layer, masks, packing),
            )

        for number, layer in self.layers.items():
            run = with_arguments(layer, number)
            x = recomputed(run, x) if number in self.recomputed_layers else run(x)
        if not self.cut.last:
            return x
        if mtp_batch is None:
            return self._to_output_dtype(self._logits(x), microbatch)
        # The modules mix tokens as the last layer does.
        predict = with_arguments(self._attach_mtp_losses, str(self.cut.layers[-1]))
        hidden = predict(self.final_norm(x), mtp_batch=mtp_batch)
        return self._to_output_dtype(self._logits_of_normalized(hidden), microbatch)

    def _mask_of(
        self, layer: str, masks: Mapping[int, Tensor | Documents], packing: Packing
    ) -> Tensor | Documents | None:
        """Return what the layer of this name is told of documents: the mask or the documents that
        `_make_masks` has made; of a layer with a recurrent state on a CPU the number of each
        token's document; None if each sample is one document."""
        mask = masks.get(self._windows[layer])
        # a recurrent state has no use for the mask that attention has on a CPU
        if layer in self._recurrent_layers and not isinstance(mask, Documents):
            return packing.documents
        return mask

    def _attach_mtp_losses(
        self,
        hidden: Tensor,
        mtp_batch: MTPBatch,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Run the modules of multi-token prediction. Return `hidden`, whose backward pass also
        starts those of the modules' losses.

        hidden: the hidden states after the final norm, [s, b, hidden].
        """
        x = hidden
        loss_parts = []
        for name, module in self.mtp.items():
            number = int(name)
            embedding_name = f"mtp.{number}.embedding"
            embedded = self._embed(mtp_batch.tokens[number], microbatch, None, embedding_name)
            # Each module reads the hidden states of the one before.
            x = module(embedded, x, rotary=rotary, microbatch=microbatch, attn_mask=attn_mask)
            token_losses = self.losses(self._logits_of_normalized(x), mtp_batch.targets[number])
            loss_parts.append(mtp_batch.part_of_loss(number, token_losses))
        # The report sums the losses over all ranks, and other tp ranks have the same ones.
        return mtp_batch.attach(hidden, loss_parts, record=self.context.tp.rank == 0)

    def _rotary_of(self, layer: str, tables: Mapping[bool, RotaryTables]) -> RotaryTables | None:
        """Return the tables by which the heads of a layer rotate; None if they do not."""
        if int(layer) in self.config.nope_layers:
            return None
        return tables.get(self._uses_window_rotary(layer))

    def _uses_window_rotary(self, layer: str) -> bool:
        """Return True if the layer has the rotary positions of layers with the sliding window."""
        return self.config.window_rope_base > 0 and self._windows[layer] > 0

    def _make_masks(
        self,
        length: int,
        device: torch.device,
        packing: Packing,
    ) -> Mapping[int, Tensor | Documents]:
        """Return the attention masks of the layers of this stage, by their window; empty if each
        sample is one document.

        On a GPU they are the documents themselves, from which attention makes a mask only if it
        needs one. Under context parallelism they are the number of each token's document, from
        which attention makes masks in parts.
        length: tokens of a sequence.
        """
        if packing.documents is None:
            return {}
        windows = {*self._windows.values()}
        if self.context.cp.size > 1:
            return dict.fromkeys(windows, packing.documents)
        if device.type != "cpu":
            documents = Documents(packing.documents, sum(packing.document_counts))
            return dict.fromkeys(windows, documents)
        return {
            window: causal_mask(length, window, packing.documents, device) for window in windows
        }

    def _embed(
        self,
        ids: Tensor,
        microbatch: MicrobatchInfo | None,
        positions: Tensor | None,
        name: str = "embedding",
    ) -> Tensor:
        """Return the embeddings of ids [s, b], with learned positions, a norm and dropout if the
        model has them.

        positions: of the packing, [b, s]; None: consecutive ones. name: keys the random numbers of
        dropout.
        """
        x = self.embedding(ids)
        # Rounded to the dtype of the embeddings first, as Gemma does.
        if self.config.embedding_scale != 1:
            x = x * nearest(self.config.embedding_scale, x.dtype)
        x = scale_gradient(x, self.config.embedding_grad_scale * self.config.mup.embedding)
        if self.config.positions == "learned":
            x = Add.apply(x, self.position_table, self._position_rows(x, positions))
        if self.config.embedding_norm:
            # The stream keeps its dtype, which may be wider than that of a norm.
            x = self.embedding_norm(x).to(x.dtype)
        rate = self.config.embedding_dropout
        # Under "stream" the first layer applies dropout to its input
        if not rate or self.config.dropout_at == "stream":
            return x
        return dropout(x, rate, self.context, name, microbatch)

    def _position_rows(self, x: Tensor, positions: Tensor | None) -> slice | Tensor:
        """Return the rows of the position table that are added to activations x of this rank: a
        slice of s rows, or int64 [s, b].

        positions: of the packing, [b, s]; None: consecutive ones.
        """
        context = self.context
        # under sequence parallelism x is this rank's shard of the sequence
        first = context.tp.rank * len(x) if context.cut_sequence else 0
        local_rows = slice(first, first + len(x))
        if positions is not None:
            return positions.t()[local_rows]
        if context.cp.size == 1:
            return local_rows
        return positions_between(context, len(x), x.device).unsqueeze(1).expand(x.shape[:2])

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits, with their soft cap, of hidden states x before the final norm."""
        # Under muP the gradient of the norm's weight is multiplied by `norm_scale`: that of the
        # norm's result is, and the gradient of x is divided by it again.
        norm_scale = self.config.mup.final_norm
        logits = self.context.recompute.run_forward(
            "norm",
            self.final_norm,
            scale_gradient(x, 1 / norm_scale),
            then=lambda normalized: self._uncapped_logits(scale_gradient(normalized, norm_scale)),
        )
        return softcap(logits, self.config.final_softcap)

    def _logits_of_normalized(self, x: Tensor) -> Tensor:
        """Return the logits, with their soft cap, of hidden states x after the final norm."""
        return softcap(self._uncapped_logits(x), self.config.final_softcap)

    def _uncapped_logits(self, x: Tensor) -> Tensor:
        """Return the products of the head with hidden states after the final norm."""
        context = self.context
        # x has fewer numbers than the logits, and the quotients are the same
        if self.config.logit_divisor != 1:
            x = x / self.config.logit_divisor
        layout = InputLayout.SEQUENCE if context.cut_sequence else InputLayout.COPIED
        name = layout_of(self.head).parts[0].name
        grad_scale = self.config.head_grad_scale * self.config.mup.head_gradient
        products = context.products_of_head(name, grad_scale)
        return Linear.apply(
            x,
            self.head,
            None,
            layout,
            context.tp,
            context.deferred,
            products,
            context.fuses(products),
        )

    def _to_output_dtype(self, logits: Tensor, microbatch: MicrobatchInfo | None) -> Tensor:
        """Return the logits in the plan's `output` dtype.

        Training does not widen them: that would not change the loss, which is computed in the
        sensitive dtype in any case.
        """
        output_dtype = self.context.plan.output
        would_widen = torch.promote_types(logits.dtype, output_dtype) == output_dtype
        is_training = microbatch is not None
        if is_training and would_widen:
            return logits
        return logits.to(output_dtype)

    def _rotary_by_window(
        self,
        length: int,
        device: torch.device,
        positions: Tensor | None,
    ) -> dict[bool, RotaryTables]:
        """Return the rotary tables that the layers of this stage need: by True those of layers with
        the rotary positions of a window (`_uses_window_rotary`), by False those of all others."""
        if self.config.positions != "rope":
            return {}
        tables: dict[bool, RotaryTables] = {}
        for windowed in {self._uses_window_rotary(layer) for layer in self.layers}:
            tables[windowed] = self._find_rotary_tables(length, device, positions, windowed)
        return tables

    def _find_rotary_tables(
        self,
        length: int,
        device: torch.device,
        positions: Tensor | None,
        windowed: bool,
    ) -> RotaryTables:
        """Return the cosine and sine tables, [s, 1, 1, r / 2] each, or [s, b, 1, r / 2] at given
        positions [b, s]; and factors of queries, [s, 1, 1, 1] or [s, b, 1, 1], if there are any.

        length: of whole sequences. The tables are computed once per length, because under dynamic
        scaling the angles depend on the length.
        positions: those of this rank's tokens, [b, s]; None: consecutive ones.
        windowed: the tables are those of layers with the rotary positions of a window.
        """
        key = windowed, length, positions is None
        if key not in self._rotary_tables:
            new_tables = self._make_rotary_tables(length, windowed)
            # given positions are those of this rank's tokens already
            if positions is None:
                cp = self.context.cp
                new_tables = tuple(take_own_positions(table, cp, 0) for table in new_tables)
            # Tables of one length are kept at a time: evaluation has many lengths.
            for old_key in [*self._rotary_tables]:
                old_windowed, _, _ = old_key
                if old_windowed == windowed:
                    del self._rotary_tables[old_key]
            self._rotary_tables[key] = tuple(table.to(device) for table in new_tables)
        tables = self._rotary_tables[key]
        if positions is None:
            return tables
        return tuple(table[positions.t(), 0] for table in tables)

    def _make_rotary_tables(self, length: int, windowed: bool) -> RotaryTables:
        """Return the cosine and sine of consecutive positions, [length, 1, 1, r / 2] each, and the
        factors of their queries if there are any."""
        config = self.config
        scaling = config.rope_scaling
        base = config.rope_base
        dims = config.unwindowed.rotary_dims
        # Within a window positions are never far apart, so that its angles need no scaling.
        if windowed:
            scaling = RopeScaling()
            base = config.window_rope_base
            dims = config.rotary_dims
        dtype = self.context.plan.buffers
        tables = rotary_tables(scaling, base, dims, length, dtype)
        if scaling.query_beta:
            return *tables, query_factors(scaling, length, dtype)
        return tables

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token on the last stage, in the sensitive dtype, [s, b] like
        `targets`.

        The backward pass overwrites the logits with their gradient.
        """
        losses, _ = self._cross_entropy(logits, targets)
        return losses

    def losses_and_log_sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return [2, s, b]: the loss of each token, as `losses` does, and the log of the sum of the
        exponentials of its logits."""
        return torch.stack(self._cross_entropy(logits, targets))

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and the log of the sum of the exponentials of its logits,
        [s, b] each. Collective over tp."""
        context = self.context
        return cross_entropy_and_log_sum(
            logits,
            targets,
            layout_of(self.head).parts[0],
            context.tp,
            context.plan.sensitive,
            consume=True,
            leaves=context.leaves,
        )
