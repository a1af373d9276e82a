"""A Mamba-2 mixer in place of attention (Dao and Gu, 2024; Nemotron-H).

    projection, over tp    x [s, b, hidden] -> gate, values, keys, queries and time steps of the
                                               heads of this rank
    convolution            values, keys and queries, each feature over a few tokens, then SiLU
    state space            of each head, with the key and query of its group
    gate and norm          times SiLU of the gate, then normalized over the features of a group
    output, over tp        back to the hidden features

In Mamba's letters gate, value, key, query and time step are z, x, B, C and dt. Groups are shared
out over tp, with their heads and their part of the norm. Everything between the two products, but
for their results, is in the plan's sensitive dtype, and so are the states.

The time step of token t is d_t = softplus(step_t + bias), at least `least_step`. With a rate and a
skip of each head the decay is exp(-exp(log_rate) d_t), the value d_t x_t is written to the state,
and skip * x_t is added to what is read.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from models.attention.context_limits import require_shared_heads
from models.attention.flash_windows import Documents
from models.config import ModelConfig
from models.recurrent import kernel_calls
from models.recurrent.kernel_choice import STATE_SPACE
from models.recurrent.mixer_parts import (
    MEAN_LOG_RATE,
    MEAN_STEP_BIAS,
    STD_LOG_RATE,
    STD_STEP_BIAS,
    RecurrentMixer,
    begins_of,
    heads_of,
)
from models.recurrent.state_space import StateSpaceInputs, chunked
from parallel.context import Context
from parallel.layers import Rows
from parallel.linear import Widen

FIRST_SKIP = 1.0


class MambaMixer(RecurrentMixer):
    """The Mamba-2 mixer of a layer; `config.mamba` has the sizes.

    Raises UserError if the ranks over which sequences are cut cannot share the heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
    ) -> None:
        sizes = config.mamba
        require_shared_heads(config, context.tp.size, context.cp.size)
        convolved = [
            Rows(f"{name}.value", sizes.width),
            Rows(f"{name}.key", sizes.key_width),
            Rows(f"{name}.query", sizes.key_width),
        ]
        gate = Rows(f"{name}.gate", sizes.width)
        step = Rows(f"{name}.step", sizes.heads)
        stack = [gate, *convolved, step]
        heads = (sizes.heads, sizes.groups, sizes.groups)
        super().__init__(config, context, name, stack, convolved, heads, sizes.kernel, biased=True)
        self.step_bias = self._make_vector("step.bias", sizes.heads, MEAN_STEP_BIAS, STD_STEP_BIAS)
        self.log_rate = self._make_vector("log_rate", sizes.heads, MEAN_LOG_RATE, STD_LOG_RATE)
        self.skip = self._make_vector("skip", sizes.heads, FIRST_SKIP)
        self.norm_weight = self._make_vector("output_norm.weight", sizes.width, 1.0)
        self.output = self._make_output(sizes.width, layer)

    def _mix(self, projected: Tensor, documents: Tensor | Documents | None) -> Tensor:
        """Convolve, apply the recurrence, add the skip, gate and normalize, as the base class asks.
        Collective over cp."""
        sensitive = self.context.plan.sensitive
        gate_width, *_, step_width = self.local_widths
        widths = [gate_width, sum(self.convolved_widths), step_width]
        gate, mixed, step = projected.split(widths, -1)  # [s, b, ...]
        gate = gate.to(sensitive)
        # from here on all tokens, of the heads that this rank of cp computes
        num_heads = self.skip.numel()
        mixed, step = self._exchange_for_tokens(mixed, [step], num_heads)
        begins = begins_of(documents)
        inputs = self._inputs(mixed.to(sensitive), step.to(sensitive), begins)
        read = self._apply_rule(inputs)  # [b, n, s, v]
        skip = self._of_own_heads(self.skip, sensitive)[:, None, None]  # [n, 1, 1]
        outputs = read + skip * inputs.value
        # back to the tokens of this rank, of all its heads
        heads = self._exchange_back(outputs.permute(2, 0, 1, 3))  # [s, b, n, v]
        features = heads.flatten(2)  # [s, b, n * v]
        gated = features * F.silu(gate)
        normalized = self._normalize(gated)
        return normalized.to(self.context.plan.compute)

    def _inputs(self, mixed: Tensor, step: Tensor, begins: Tensor | None) -> StateSpaceInputs:
        """Return the inputs of the recurrence, of the n heads that this rank computes.

        mixed: values, keys and queries [s, b, features] before the convolution.
        step: time steps as projected, [s, b, n].
        begins: bool [b, s], True where a document begins; None: nowhere.
        """
        sizes = self.config.mamba
        convolved = self._convolve(mixed, begins)
        value, key, query = convolved.split(self._own_convolved_widths(), -1)
        steps = self._steps(step)  # [s, b, n]
        log_rate = self._of_own_heads(self.log_rate, step.dtype)
        return StateSpaceInputs(
            query=heads_of(query, sizes.state_dim),
            key=heads_of(key, sizes.state_dim),
            value=heads_of(value, sizes.head_dim),
            step=steps.permute(1, 2, 0),  # [b, n, s]
            rate=log_rate.exp(),
            begins=begins,
        )

    def _steps(self, step: Tensor) -> Tensor:
        """Return the time steps [s, b, n], above 0. step: as projected."""
        bias = self._of_own_heads(self.step_bias, step.dtype)
        positive = F.softplus(step + bias)
        return positive.clamp(min=self.config.mamba.least_step)

    def _of_own_heads(self, vector: Parameter, dtype: torch.dtype) -> Tensor:
        """Return the numbers of the heads that this rank computes, of a vector with one of each."""
        return self._own_part(Widen.apply(vector, dtype), vector.numel())

    def _apply_rule(self, inputs: StateSpaceInputs) -> Tensor:
        """Return the outputs of the recurrence, [b, n, s, v]."""
        outputs, _ = self._scan(inputs)
        return outputs

    def _scan(self, inputs: StateSpaceInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs of the recurrence, [b, n, s, v], and the last state, by the kernel
        that there is.

        state: the one before the first token; None: zeros.
        """
        kernel = self._choose(STATE_SPACE, inputs.value).kernel
        if kernel is None:
            return chunked(inputs, state)
        return kernel_calls.state_space(kernel, inputs, state, self.context.plan.compute)

    def _normalize(self, features: Tensor) -> Tensor:
        """Return features [s, b, local features] normalized over those of each group."""
        weight = Widen.apply(self.norm_weight, features.dtype)
        group_width = self.config.mamba.group_width
        groups = features.unflatten(-1, (-1, group_width))  # [s, b, groups, features of one]
        mean_square = groups.square().mean(-1, keepdim=True)  # [s, b, groups, 1]
        scale = (mean_square + self.config.norm_eps).rsqrt()
        normalized = groups * scale
        return normalized.flatten(2) * weight
