"""Kimi Delta Attention: a gated delta net whose keys have a decay of each feature (Kimi Team, "Kimi
Linear", 2025).

It differs from `models.recurrent.gated_delta_net` in what is projected besides queries, keys,
values and strengths:

    down, replicated   x [s, b, hidden] -> two vectors of `gate_rank` features
    up, over tp        one of them      -> gate of the heads of this rank, of which the output is
                                           multiplied by the sigmoid
    up, over tp        the other        -> decays of each feature of a key of these heads

The decay of feature i of token t is exp(-exp(log_rate) softplus(decay_ti + bias_i)), with a rate of
each head and a bias of each of its features. Under sequence parallelism each rank makes the two
vectors of its own shard of the sequence, and they are all-gathered.

Recomputation of "attention" begins after gate and decays.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.delta_net import DeltaNet
from models.recurrent.gated_delta_net import GatedDeltaNet
from models.recurrent.kernel_choice import ROW_DECAY_RULE, Package
from models.recurrent.mixer_parts import (
    MEAN_LOG_RATE,
    MEAN_STEP_BIAS,
    STD_LOG_RATE,
    STD_STEP_BIAS,
    heads_of,
)
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, Rows
from parallel.linear import InputLayout
from parallel.replicated_linear import ReplicatedLinear, whole_on_all_ranks


class KimiDeltaAttention(GatedDeltaNet):
    """The Kimi Delta Attention of a layer; `config.delta_net` has the sizes, of which `gate_rank`
    is above 0.

    Raises UserError if the ranks over which sequences are cut cannot share the heads.
    """

    package: ClassVar[Package] = ROW_DECAY_RULE

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__(config, context, name, layer)
        sizes = config.delta_net
        std = config.initial_std("qkv")
        stack = [
            Rows(f"{name}.gate_down", sizes.gate_rank),
            Rows(f"{name}.decay_down", sizes.gate_rank),
        ]
        self.down = ReplicatedLinear(context, config.hidden, stack, bias=False, std=std)
        self.gate_up = self._make_up(f"{name}.gate_up", sizes.value_width, std)
        self.decay_up = self._make_up(f"{name}.decay_up", sizes.decay_width, std)

    @staticmethod
    def _rows_beside(name: str, sizes: DeltaNet) -> list[Rows]:
        return [Rows(f"{name}.strength", sizes.value_heads)]

    @staticmethod
    def _factor(gate: Tensor) -> Tensor:
        return gate.sigmoid()

    def _make_decays(self, sizes: DeltaNet) -> None:
        self.decay_bias = self._make_vector(
            "decay.bias", sizes.decay_width, MEAN_STEP_BIAS, STD_STEP_BIAS
        )
        self.log_rate = self._make_vector(
            "decay.log_rate", sizes.value_heads, MEAN_LOG_RATE, STD_LOG_RATE
        )

    def _make_up(self, name: str, width: int, std: float) -> ColumnParallelLinear:
        """Return the product from a vector, which lies whole on every rank, to this rank's
        heads."""
        return ColumnParallelLinear(
            self.context,
            self.config.delta_net.gate_rank,
            [Rows(name, width, heads=self.config.delta_net.value_heads)],
            bias=False,
            std=std,
            input_layout=InputLayout.OWN,
        )

    def _project(self, x: Tensor) -> Tensor:
        """Return queries, keys, values, strengths, gates and decays of this rank's heads, [s, b,
        features]."""
        heads = super()._project(x)
        shared = whole_on_all_ranks(self.down(x), self.context)
        gate_vector, decay_vector = shared.chunk(2, -1)
        gate = self.gate_up(gate_vector)
        decay = self.decay_up(decay_vector)
        return torch.cat((heads, gate, decay), -1)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is convolved, gate, strength and decay as projected, [s, b, features] each,
        which lie in another order here."""
        sizes = self.config.delta_net
        ranks = self.context.tp.size
        widths = [
            sum(self.convolved_widths),
            sizes.value_heads // ranks,
            sizes.value_width // ranks,
            sizes.decay_width // ranks,
        ]
        mixed, strength, gate, decay = projected.split(widths, -1)
        return mixed, gate, strength, decay

    def _log_decay(self, decay: Tensor) -> Tensor:
        """Return the logarithms of the decays [b, n, s, d], 0 or less. decay: as projected, [s, b,
        n * d]."""
        rate, bias = self._rate_and_bias(decay.dtype)
        step = heads_of(F.softplus(decay + bias), self.config.delta_net.key_dim)
        rate_of_heads = rate[:, None, None]  # [n, 1, 1]
        return -rate_of_heads * step
