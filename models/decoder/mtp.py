"""Multi-token prediction (MTP): modules that predict tokens further ahead.

They train the layers below them better.

Module k = 1, 2, ... D stands after the model's last layer. It joins what is known of token i, the
hidden state h of module k - 1 (of the final norm, if k is 1), with the embedding of token i + k,
and predicts token i + k + 1:

    h'  =  projection [embedding_norm(embedding(token i + k)), hidden_norm(h)]
    h   =  final_norm(layer(h')), from which the model's own head makes the logits

`layer` is a transformer layer such as the model's last one. Embedding and head are the model's own,
so the modules train them too. The loss of module k is the mean cross entropy over the tokens that
it counts; the training loss gets `mtp_loss_weight` times the mean of the D losses. A position
counts in module k if the model's own loss counts the position k tokens later, within the sample
and, if attention is restricted to documents, within the document: module k predicts nothing that
the model itself would not predict. Where there is no token k later, token 0 stands in its place.

Only training has these losses: an evaluation and the generation of text leave the modules aside.
The definition is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2) in the order of operations of
Megatron-core (`multi_token_prediction.py`), which applies the model's final norm before the first
module.

Logical names, N = k - 1: mtp.N.embedding_norm|hidden_norm|final_norm.weight,
mtp.N.projection.weight [hidden, 2 * hidden], and mtp.N.attention and so on as those of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from models.attention.flash_windows import Documents
from models.attention.rope import RotaryTables
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer, make_norm
from models.decoder.token_count import TokenCount, count_tokens
from models.feed_forward.router import WithLoss
from parallel import collectives
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear
from parallel.recomputation import recomputed
from parallel.sequence_cut import take_own_positions

if TYPE_CHECKING:
    from models.decoder.layer import Mixer


@dataclass(frozen=True)
class MTPBatch:
    """The tokens that the modules of multi-token prediction read and predict, and their losses. D:
    the number of modules.

    tokens, targets: int64 [D, samples, s] of a share, or [D, s, b] of a micro-batch, each shifted
        for its module.
    weights: of the targets in the losses, float64 of the same shape; 0 where there is no target.
    token_counts: the sum of the weights of each module over the global batch.
    scale: factor of the mean of the losses for the backward pass, [].
    losses: float64 [D]; each micro-batch adds its part of the mean losses, without the factor.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    token_counts: Sequence[TokenCount]
    scale: Tensor
    losses: Tensor

    def of_samples(self, samples: slice) -> "MTPBatch":
        """Return the part of a share's batch that belongs to the micro-batch of these samples, with
        tensors [D, s, b]."""

        def by_position(x: Tensor) -> Tensor:
            """Return [D, s, b] of these samples, of x [D, samples, s]."""
            return x[:, samples].transpose(1, 2).contiguous()

        return replace(
            self,
            tokens=by_position(self.tokens),
            targets=by_position(self.targets),
            weights=by_position(self.weights),
        )

    def part_of_loss(self, module: int, token_losses: Tensor) -> Tensor:
        """Return this micro-batch's part of the mean loss of a module: [].

        token_losses: of each token, [s, b].
        """
        weighted_sum = (token_losses * self.weights[module].to(token_losses.dtype)).sum()
        return weighted_sum / self.token_counts[module].divisor.to(token_losses.dtype)

    def attach(
        self,
        hidden: Tensor,
        loss_parts: Sequence[Tensor],
        record: bool,
    ) -> Tensor:
        """Return `hidden`, whose backward pass also starts those of the losses.

        loss_parts: this micro-batch's part of each module's loss.
        record: add them to `losses`.
        """
        # One tensor of all modules: one addition, and one gradient of their mean.
        stacked = torch.stack(list(loss_parts))
        if record:
            self.losses.add_(stacked.detach())
        return WithLoss.apply(hidden, stacked.mean(), self.scale)


def make_mtp_batch(
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    modules: int,
    scale: Tensor,
    cp: Axis,
    dp: Axis,
    divides: bool,
) -> MTPBatch:
    """Return what the modules of a share read and predict. Collective over dp, of ranks that have
    the last stage.

    tokens, targets: int64 [samples, s] of whole samples, ids inside the vocabulary.
    mask: weights of the targets; None: all count.
    documents: the number of each token's document, if attention is restricted to documents.
    modules: the number of modules.
    scale: on the device that computes.
    cp: the ranks that share the samples; the result is this rank's part.
    divides: True on ranks that have the model's last stage.
    """
    device = scale.device
    if mask is None:
        # weights also where all count, as shifting makes some of them 0
        weights = torch.ones(tokens.shape, dtype=torch.float64, device=tokens.device)
    else:
        weights = mask.double()

    def local_part(x: Tensor) -> Tensor:
        """Return, for each module k and each position of this rank's tokens, x of the token k
        later: [D, samples, s / cp]."""
        distances = range(1, modules + 1)
        later = torch.stack([_shift(x, distance, documents) for distance in distances])
        # cut after the shift: the token k later may be one of another rank of cp
        return take_own_positions(later, cp, 2).to(device)

    local_tokens = local_part(tokens)
    local_targets = local_part(targets)
    local_weights = local_part(weights)
    token_counts = [
        count_tokens(0, module_weights, dp, divides, device) for module_weights in local_weights
    ]
    losses = torch.zeros(modules, dtype=torch.float64, device=device)
    return MTPBatch(local_tokens, local_targets, local_weights, token_counts, scale, losses)


def _shift(
    x: Tensor,
    distance: int,
    documents: Tensor | None,
) -> Tensor:
    """Return, for each position of x [samples, s], the value `distance` positions later; 0 where
    the sample, or the document, has ended before."""
    # of tokens: token 0 stands where there is none; of weights: such a token has the weight 0
    later = torch.zeros_like(x)
    length = max(0, x.shape[1] - distance)
    later[:, :length] = x[:, distance:]
    if documents is not None:
        other_document = documents[:, distance:] != documents[:, :length]
        later[:, :length].masked_fill_(other_document, 0)
    return later


class PredictionModule(nn.Module):
    """Module number `number` (from 0), without embedding and head.

    mixer: the class of attention of its layer, or of what it has in place of it.
    recompute_layer: its layer is recomputed as a whole in the backward pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        number: int,
        mixer: "type[Mixer]",
        recompute_layer: bool,
    ) -> None:
        super().__init__()
        self.context = context
        self.recompute_layer = recompute_layer
        name = f"mtp.{number}"
        self.embedding_norm = make_norm(config, context, f"{name}.embedding_norm")
        self.hidden_norm = make_norm(config, context, f"{name}.hidden_norm")
        # Cut over tp like any other product; its result is gathered for the layer.
        self.projection = ColumnParallelLinear(
            context,
            2 * config.hidden,
            config.hidden,
            name=f"{name}.projection",
            bias=False,
            std=config.init_std * config.mup.hidden,
        )
        # If the layer is recomputed as a whole, its modules have nothing to recompute themselves.
        inner_context = replace(
            context, recompute=context.recompute.inside_layer(whole=recompute_layer)
        )
        # The layer is such as the model's last one, with its mixer, its window and its experts.
        last_layer = config.of_layer(config.layers - 1)
        self.layer = DecoderLayer(
            last_layer,
            inner_context,
            name,
            config.layers + number,
            mixer,
        )
        self.final_norm = make_norm(config, context, f"{name}.final_norm")

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Map embeddings and hidden states, [s, b, hidden] or [s / tp, b, hidden], to the next
        hidden states."""
        context = self.context
        normed = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        # Each tp rank has some output features of the projection, and the layer wants them all.
        # `join`, not `gather`: all ranks go on alike, so each has the whole gradient.
        x = collectives.join(self.projection(normed), context.tp, 2)
        if context.cut_sequence:
            x = collectives.split(x, context.tp, 0)
        x = x.to(context.plan.residual)

        def run_layer(x: Tensor) -> Tensor:
            return self.layer(x, rotary=rotary, microbatch=microbatch, attn_mask=attn_mask)

        hidden = recomputed(run_layer, x) if self.recompute_layer else run_layer(x)
        return self.final_norm(hidden)
