"""A gated delta net in place of attention (Yang, Kautz and Hatamizadeh, 2025; Qwen3-Next).

    projection, over tp    x [s, b, hidden] -> queries, keys, values, gate, strength and decay of
                                               the heads of this rank
    convolution            queries, keys and values, each feature over a few tokens, then SiLU
    delta rule             of each head of values, with the key and query of its head of keys,
                           normalized to length 1
    norm and gate          the output of each head, normalized, times SiLU of the gate
    output, over tp        back to the hidden features

Heads of values are shared out over tp, with their heads of keys; if there are fewer of these than
ranks, neighbouring ranks hold the same one. Everything between the two products, but for their
results, is in the plan's sensitive dtype, and so are the states.

The decay of token t is exp(-exp(log_rate) softplus(decay_t + bias)), with a rate and a bias of each
head, and its strength is the sigmoid of one more number.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.context_limits import require_shared_heads
from models.attention.flash_windows import Documents
from models.config import ModelConfig
from models.delta_net import DeltaNet
from models.recurrent import kernel_calls, kernel_choice
from models.recurrent.delta_rule import DeltaInputs, chunked
from models.recurrent.kernel_choice import DELTA_RULE, Package
from models.recurrent.mixer_parts import RecurrentMixer, begins_of, heads_of, starts_of
from parallel.context import Context
from parallel.layers import Rows
from parallel.linear import Widen
from parallel.norms import RMSNorm

# Added to the squared length of queries and keys, as in flash-linear-attention and transformers.
LENGTH_EPS = 1e-6
# Rates of decay begin with logarithms of the mean and the deviation that those of uniform numbers
# from 0 to 16 have, which transformers draws; biases begin at 1, as there.
MEAN_LOG_RATE = math.log(16) - 1
STD_LOG_RATE = 1.0
FIRST_BIAS = 1.0


class GatedDeltaNet(RecurrentMixer):
    """The gated delta net of a layer; `config.delta_net` has the sizes.

    Raises UserError if the ranks over which sequences are cut cannot share the heads.
    """

    package: ClassVar[Package] = DELTA_RULE

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
    ) -> None:
        sizes = config.delta_net
        require_shared_heads(config, context.tp.size, context.cp.size)
        # Ranks beyond the number of heads of keys hold the same ones as their neighbours.
        key_shards = min(context.tp.size, sizes.key_heads)
        convolved = [
            Rows(f"{name}.query", sizes.key_width, key_shards, sizes.key_heads),
            Rows(f"{name}.key", sizes.key_width, key_shards, sizes.key_heads),
            Rows(f"{name}.value", sizes.value_width, heads=sizes.value_heads),
        ]
        stack = [*convolved, *self._rows_beside(name, sizes)]
        heads = (sizes.key_heads, sizes.key_heads, sizes.value_heads)
        super().__init__(config, context, name, stack, convolved, heads, sizes.kernel, biased=False)
        self._make_decays(sizes)
        self.output_norm = RMSNorm(
            context,
            sizes.value_dim,
            name=f"{name}.output_norm",
            eps=config.norm_eps,
            differs_over_tp=True,
        )
        self.output = self._make_output(sizes.value_width, layer)

    @staticmethod
    def _rows_beside(name: str, sizes: DeltaNet) -> list[Rows]:
        """Return the matrices that are projected with those of queries, keys and values."""
        return [
            Rows(f"{name}.gate", sizes.value_width, heads=sizes.value_heads),
            Rows(f"{name}.strength", sizes.value_heads),
            Rows(f"{name}.decay", sizes.value_heads),
        ]

    @staticmethod
    def _factor(gate: Tensor) -> Tensor:
        """Return what the normalized output is multiplied by. gate: as projected."""
        return F.silu(gate)

    def _make_decays(self, sizes: DeltaNet) -> None:
        """Make the biases and the rates of the decays."""
        self.decay_bias = self._make_vector("decay.bias", sizes.value_heads, FIRST_BIAS)
        self.log_rate = self._make_vector(
            "decay.log_rate", sizes.value_heads, MEAN_LOG_RATE, STD_LOG_RATE
        )

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is convolved, gate, strength and decay as projected, [s, b, features]
        each."""
        # the first three matrices, of queries, keys and values, are convolved
        _, _, _, *other_widths = self.local_widths
        widths = [sum(self.convolved_widths), *other_widths]
        mixed, gate, strength, decay = projected.split(widths, -1)
        return mixed, gate, strength, decay

    def _mix(self, projected: Tensor, documents: Tensor | Documents | None) -> Tensor:
        """Convolve, apply the gated delta rule, normalize and gate, as the base class asks.
        Collective over cp."""
        sensitive = self.context.plan.sensitive
        mixed, gate, strength, decay = self._split(projected)
        heads = self.log_rate.numel()
        # from here on all tokens, of the heads that this rank of cp computes
        mixed, strength, decay = self._exchange_for_tokens(mixed, (strength, decay), heads)
        begins = begins_of(documents)
        convolved = self._convolve(mixed.to(sensitive), begins)
        query, key, value = self._heads(*convolved.split(self._own_convolved_widths(), -1))
        inputs = DeltaInputs(
            query=query,
            key=key,
            value=value,
            log_decay=self._log_decay(decay.to(sensitive)),
            strength=strength.to(sensitive).sigmoid().permute(1, 2, 0),
            begins=begins,
            starts=starts_of(documents),
        )
        # [b, n, s, v] -> [s, b, n, v]
        read = self._apply_rule(inputs).permute(2, 0, 1, 3)
        # back to the tokens of this rank, of all its heads
        normalized = self.output_norm(self._exchange_back(read)).flatten(2)
        gated = normalized.to(sensitive) * self._factor(gate.to(sensitive))
        return gated.to(self.context.plan.compute)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key [b, n, s, d], of length 1 but for the scale 1 / sqrt(d) of queries,
        and value [b, n, s, v], for each of n heads of values.

        query, key, value: features [s, b, ...].
        """
        sizes = self.config.delta_net
        queries = _unit(heads_of(query, sizes.key_dim)) * sizes.key_dim**-0.5
        keys = _unit(heads_of(key, sizes.key_dim))
        values = heads_of(value, sizes.value_dim)
        # a head of keys serves several heads of values in a row
        group_size = values.shape[1] // keys.shape[1]
        queries = queries.repeat_interleave(group_size, 1)
        keys = keys.repeat_interleave(group_size, 1)
        return queries, keys, values

    def _log_decay(self, decay: Tensor) -> Tensor:
        """Return the logarithms of the decays [b, n, s], 0 or less. decay: as projected, [s, b,
        n]."""
        rate, bias = self._rate_and_bias(decay.dtype)
        log_decay = -rate * F.softplus(decay + bias)
        return log_decay.permute(1, 2, 0)

    def _rate_and_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rates and the biases of the decays of the heads that this rank computes."""
        heads = self.log_rate.numel()
        log_rate = self._own_part(Widen.apply(self.log_rate, dtype), heads)
        bias = self._own_part(Widen.apply(self.decay_bias, dtype), heads)
        return log_rate.exp(), bias

    def _apply_rule(self, inputs: DeltaInputs) -> Tensor:
        """Return the outputs of the delta rule, [b, n, s, v]."""
        outputs, _ = self._scan(inputs)
        return outputs

    def _scan(
        self, inputs: DeltaInputs, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the delta rule, [b, n, s, v], and the last state, by the kernel
        that there is.

        state: the one before the first token; None: zeros.
        """
        refusal = kernel_choice.delta_rule_refusal(self.config.delta_net.key_dim)
        if state is not None and inputs.begins is not None:
            refusal = "flash-linear-attention has one state for each document"
        kernel = self._choose(self.package, inputs.value, refusal).kernel
        if kernel is None:
            return chunked(inputs, state)
        return kernel_calls.delta_rule(kernel, inputs, state, self.context.plan.compute)


def _unit(heads: Tensor) -> Tensor:
    """Return heads [..., features] of length 1."""
    squares = heads.square().sum(-1, keepdim=True)
    return heads * (squares + LENGTH_EPS).rsqrt()
