"""A model that continues a text without computing it again.

The keys and values of earlier tokens are kept, and of gated delta nets and Mamba-2 mixers their
states and the last tokens that their convolutions see.

An earlier token's key and value do not depend on later tokens, so each new token costs one token's
products plus attention over what is kept. Training knows nothing of this: the cache is a subclass
of the attention and of the stage.

Dynamic rotary scaling is the exception. Beyond its original length every further token changes the
angles of all tokens, and with them everything above the first layer, so the whole text is computed
again.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from megaprec.errors import UserError
from models.attention.attention import Attention
from models.attention.context_limits import require_uncut_sequences
from models.attention.flash_windows import Documents
from models.attention.latent_attention import LatentAttention
from models.attention.packing import Packing, causal_mask
from models.attention.rope import RotaryTables
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from models.recurrent import delta_rule, state_space
from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.gated_delta_net import GatedDeltaNet
from models.recurrent.kimi_delta_attention import KimiDeltaAttention
from models.recurrent.mamba_mixer import MambaMixer
from models.recurrent.state_space import StateSpaceInputs
from parallel.context import Context
from parallel.dropout import MicrobatchInfo


class CachedAttention(Attention):
    """Attention of new tokens over all tokens since `reserve`. Under a sliding window all tokens
    are kept too."""

    def reserve(self, batch: int, capacity: int) -> None:
        """Forget all tokens and make room for `capacity` tokens of `batch` sequences."""
        kv_heads, width = self.key_value_shape()
        weight = self.output.weight  # the cache is in its dtype and on its device
        shape = (batch, kv_heads, capacity, width)
        # empty: only what has been written is read
        self._keys = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.empty_like(self._keys)
        self.forget()

    def forget(self) -> None:
        """Forget all tokens."""
        self._length = 0

    def _core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        """Return attention of the new tokens, as in `Attention`, over all tokens since `reserve`.

        The mask is made here; `attn_mask` is not read.
        """
        past = self._length
        length = past + query.shape[2]
        # keys are kept after their rotation, whose angles do not change any more
        self._keys[:, :, past:length] = key
        self._values[:, :, past:length] = value
        self._length = length
        all_keys = self._keys[:, :, :length].to(query.dtype)
        all_values = self._values[:, :, :length].to(query.dtype)
        mask = causal_mask(length, self.config.window, None, query.device, past)
        return super()._core_attention(query, all_keys, all_values, microbatch, mask)


class CachedLatentAttention(CachedAttention, LatentAttention):
    """Multi-head latent attention, of which the keys and values of all heads are kept, not the
    latents.

    A new token then costs no projections of earlier ones, for the memory of as many key/value heads
    as query heads.
    """


class CachedRecurrence(nn.Module):
    """A layer that keeps, of all tokens since `reserve`, its state and the last tokens that its
    convolution sees. Its memory does not grow with their number."""

    convolution: nn.Parameter

    def reserve(self, batch: int, capacity: int) -> None:
        """Forget all tokens, before `batch` sequences of any length."""
        self.forget()

    def forget(self) -> None:
        """Forget all tokens."""
        # None stands for zeros.
        self._before: Tensor | None = None
        self._state: Tensor | None = None

    def _tokens_before(self, mixed: Tensor) -> Tensor:
        """Return the tokens before `mixed` that its convolution sees, [kernel - 1, b, features],
        and keep the last ones of both for the next call. mixed: [s, b, features]."""
        reach = self.convolution.shape[1] - 1
        before = self._before
        if before is None:
            before = mixed.new_zeros(reach, *mixed.shape[1:])
        extended = torch.cat((before, mixed))
        self._before = extended[len(extended) - reach :]
        return before


class CachedDeltaNet(CachedRecurrence, GatedDeltaNet):
    """A gated delta net of new tokens, which goes on from the state that earlier ones have left."""

    def _apply_rule(self, inputs: DeltaInputs) -> Tensor:
        # a single token: in a chunk all others would be padding
        apply = delta_rule.recurrent if inputs.key.shape[2] == 1 else self._scan
        outputs, self._state = apply(inputs, self._state)
        return outputs


class CachedKimiDelta(CachedDeltaNet, KimiDeltaAttention):
    """Kimi Delta Attention of new tokens, which goes on from the state that earlier ones have
    left."""


class CachedMambaMixer(CachedRecurrence, MambaMixer):
    """A Mamba-2 mixer of new tokens, which goes on from the state that earlier ones have left."""

    def _apply_rule(self, inputs: StateSpaceInputs) -> Tensor:
        # a single token: in a chunk all others would be padding
        apply = state_space.recurrent if inputs.key.shape[2] == 1 else self._scan
        outputs, self._state = apply(inputs, self._state)
        return outputs


class CachedStage(Stage):
    """A whole model, in one stage on one process, that continues texts. `start` and `extend`
    replace `forward`."""

    attention = CachedAttention
    own_kinds: ClassVar[Mapping[str, type[nn.Module]]] = {
        "LatentAttention": CachedLatentAttention,
        "GatedDeltaNet": CachedDeltaNet,
        "KimiDeltaAttention": CachedKimiDelta,
        "MambaMixer": CachedMambaMixer,
    }

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        cut: Cut,
        tied: tuple[int, ...] = (),
    ) -> None:
        # A new token attends to all earlier ones, which would lie on other ranks.
        require_uncut_sequences(context.cp.size, "continue a text")
        super().__init__(config, context, cut, tied)
        self._capacity = 0
        self._text = torch.empty(0, 1, dtype=torch.int64)

    def start(self, capacity: int, batch: int = 1) -> None:
        """Begin `batch` new texts of up to `capacity` tokens each.

        Raises UserError if the model has fewer positions.
        """
        if capacity > self.config.max_positions:
            raise UserError.of(
                "model.too_many_positions",
                capacity=capacity,
                max_positions=self.config.max_positions,
            )
        self._capacity = capacity
        self._text = torch.empty(0, batch, dtype=torch.int64, device=self.head.device)
        for layer in self._cached_layers():
            layer.reserve(batch, capacity)

    @torch.no_grad()
    def extend(self, ids: Tensor) -> Tensor:
        """Append tokens to all texts. Returns the logits after the last one, [b, vocab].

        ids: int64 [s, b]. Raises UserError for more tokens than were announced to `start`.
        """
        # The whole text is remembered in case it must be computed again.
        text = torch.cat((self._text, ids))
        if len(text) > self._capacity:
            raise UserError.of("model.cache_full", num_tokens=len(text), capacity=self._capacity)
        past = len(self._text)
        if past and self._changes_all_angles(len(text)):
            # the keys that are kept were rotated by other angles: begin again with the whole text
            past = 0
            ids = text
            for layer in self._cached_layers():
                layer.forget()
        self._text = text
        # The stage counts positions from the tokens that it is given.
        positions = torch.arange(past, len(text), device=ids.device).expand(ids.shape[1], -1)
        logits = super().forward(ids, None, Packing(positions=positions))  # [1, b, vocab]
        return logits[0]

    def _changes_all_angles(self, length: int) -> bool:
        """Return True if the angles of all tokens change with each token, in a text of `length`
        tokens."""
        scaling = self.config.rope_scaling
        return scaling.kind == "dynamic" and length > scaling.original_max_position_embeddings

    def _find_rotary_tables(
        self,
        length: int,
        device: torch.device,
        positions: Tensor | None,
        windowed: bool,
    ) -> RotaryTables:
        """Return the tables at the positions of the new tokens, as `Stage` does, from tables of the
        whole text and not of the new tokens alone. `length` is not read."""
        table_length = self._capacity
        scaling = self.config.rope_scaling
        if scaling.kind == "dynamic":
            # Angles follow from the length of the tables, which up to the original one is constant.
            original = scaling.original_max_position_embeddings
            table_length = max(len(self._text), min(table_length, original))
        return super()._find_rotary_tables(table_length, device, positions, windowed)

    def _logits(self, x: Tensor) -> Tensor:
        # of the last token alone: the tokens after the others are given
        return super()._logits(x[-1:])

    def _cached_layers(self) -> list[CachedAttention | CachedRecurrence]:
        """Return the attentions, gated delta nets and Mamba-2 mixers of all layers."""
        kinds = (CachedAttention, CachedRecurrence)
        return [module for module in self.modules() if isinstance(module, kinds)]
