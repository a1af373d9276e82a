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

Recomputation of "attention" begins at the projected features.
"""

import math
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from models.attention.delta_rule import DeltaInputs, chunked
from models.attention.flash_windows import Documents
from models.attention.recurrent_parts import begins_of, heads_of
from models.attention.rope import RotaryTables
from models.attention.short_convolution import short_convolution
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows, parameter
from parallel.linear import Widen
from parallel.norms import RMSNorm

# Added to the squared length of queries and keys, as in flash-linear-attention and transformers.
LENGTH_EPS = 1e-6
# Rates of decay begin with logarithms of the mean and the deviation that those of uniform numbers
# from 0 to 16 have, which transformers draws; biases begin at 1, as there.
MEAN_LOG_RATE = math.log(16) - 1
STD_LOG_RATE = 1.0
FIRST_BIAS = 1.0


class GatedDeltaNet(nn.Module):
    """The gated delta net of a layer; `config.delta_net` has the sizes.

    Raises UserError if sequences are cut over ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if context.cp.size > 1:
            raise UserError.of("model.context_delta_net", context=context.cp.size)
        self.config = config
        self.context = context
        self.name = name
        sizes = config.delta_net
        std = config.initial_std("qkv")
        # Ranks beyond the number of heads of keys hold the same ones as their neighbours.
        self.key_shards = min(context.tp.size, sizes.key_heads)
        convolved = [
            Rows(f"{name}.query", sizes.key_width, self.key_shards),
            Rows(f"{name}.key", sizes.key_width, self.key_shards),
            Rows(f"{name}.value", sizes.value_width),
        ]
        others = [
            Rows(f"{name}.gate", sizes.value_width),
            Rows(f"{name}.strength", sizes.value_heads),
            Rows(f"{name}.decay", sizes.value_heads),
        ]
        stack = [*convolved, *others]
        self.local_widths = [matrix.rows // (matrix.shards or context.tp.size) for matrix in stack]
        self.projection = ColumnParallelLinear(context, config.hidden, stack, bias=False, std=std)
        kernels = [
            Part.cut(
                f"{matrix.name}_convolution.weight",
                (matrix.rows, sizes.kernel),
                0,
                context.tp,
                matrix.shards,
            )
            for matrix in convolved
        ]
        # partial: ranks that hold the same heads of keys have gradients of their own values
        self.convolution = parameter(context, kernels, std, partial=True)
        self.decay_bias = self._make_decay("bias", mean=FIRST_BIAS)
        # A model whose values do not matter draws none (`ModelConfig.with_zero_weights`).
        std_log_rate = STD_LOG_RATE if config.init_std else 0.0
        self.log_rate = self._make_decay("log_rate", std_log_rate, MEAN_LOG_RATE)
        self.output_norm = RMSNorm(
            context,
            sizes.value_dim,
            name=f"{name}.output_norm",
            eps=config.norm_eps,
            differs_over_tp=True,
        )
        self.output = RowParallelLinear(
            context,
            sizes.value_width,
            config.hidden,
            name=f"{name}.output",
            bias=False,
            std=config.initial_std("output", layer),
        )

    def _make_decay(self, kind: str, std: float = 0.0, mean: float = 0.0) -> nn.Parameter:
        """Return a number of each head of values of this rank."""
        heads = (self.config.delta_net.value_heads,)
        part = Part.cut(f"{self.name}.decay.{kind}", heads, 0, self.context.tp)
        return parameter(self.context, [part], std, mean=mean)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of
        the same shape.

        attn_mask: int64 [b, whole s], the number of each token's document, or the documents; None:
            a sample is one document.
        rotary and microbatch are those of attention, and are not read.
        """
        return self.context.recompute.run_forward(
            "attention",
            partial(self._mix, begins=begins_of(attn_mask)),
            self.projection(x),
            then=self.output,
        )

    def _mix(self, projected: Tensor, begins: Tensor | None) -> Tensor:
        """Map projected features [s, b, features] to the output projection's input, [s, b, local
        features]."""
        sensitive = self.context.plan.sensitive
        widths = [sum(self.local_widths[:3]), *self.local_widths[3:]]
        mixed, gate, strength, decay = projected.split(widths, -1)
        convolved = F.silu(self._convolve(mixed.to(sensitive), begins))
        query, key, value = convolved.split(self.local_widths[:3], -1)
        sizes = self.config.delta_net
        query = heads_of(query, sizes.key_dim)
        key = heads_of(key, sizes.key_dim)
        value = heads_of(value, sizes.value_dim)
        # A head of keys serves several heads of values in a row.
        group = value.shape[1] // key.shape[1]
        query = _unit(query) * sizes.key_dim**-0.5
        inputs = DeltaInputs(
            query=query.repeat_interleave(group, 1),
            key=_unit(key).repeat_interleave(group, 1),
            value=value,
            log_decay=self._log_decay(decay.to(sensitive)).permute(1, 2, 0),
            strength=strength.to(sensitive).sigmoid().permute(1, 2, 0),
            begins=begins,
        )
        # [b, n, s, v] -> [s, b, n, v]
        read = self._apply_rule(inputs).permute(2, 0, 1, 3)
        normalized = self.output_norm(read).flatten(2)
        gated = normalized.to(sensitive) * F.silu(gate.to(sensitive))
        return gated.to(self.context.plan.compute)

    def _convolve(self, mixed: Tensor, begins: Tensor | None) -> Tensor:
        """Return the convolution of queries, keys and values [s, b, features]."""
        weight = Widen.apply(self.convolution, mixed.dtype)
        return short_convolution(mixed, weight, self._tokens_before(mixed), begins)

    def _tokens_before(self, mixed: Tensor) -> Tensor | None:
        """Return the tokens before those that are convolved; None: there are none."""
        return None

    def _log_decay(self, decay: Tensor) -> Tensor:
        """Return the logarithms of the decays [s, b, n], 0 or less. decay: as projected."""
        rate = Widen.apply(self.log_rate, decay.dtype).exp()
        bias = Widen.apply(self.decay_bias, decay.dtype)
        return -rate * F.softplus(decay + bias)

    def _apply_rule(self, inputs: DeltaInputs) -> Tensor:
        """Return the outputs of the delta rule, [b, n, s, v]."""
        outputs, _ = chunked(inputs)
        return outputs


def _unit(heads: Tensor) -> Tensor:
    """Return heads [..., features] of length 1."""
    squares = heads.square().sum(-1, keepdim=True)
    return heads * (squares + LENGTH_EPS).rsqrt()
