"""The feed-forward of a decoder layer: two parallel linear layers around an activation function."""

from torch import Tensor, nn

from models.activations import ACTIVATIONS, ActivationSettings
from models.config import ModelConfig
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows
from parallel.norms import vector


class MLP(nn.Module):
    """The feed-forward act(x up) down, or with a gate (act(x gate) * (x up)) down, where act is
    `config.mlp` of `ACTIVATIONS`.

    layer: the number of the decoder layer, which may decide how its initial weights are scaled.
    biases: the layers have biases, the first and the second one; None: as `config.mlp_bias` says.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
        biases: tuple[bool, bool] | None = None,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.recompute = context.recompute
        up_bias, down_bias = biases or (config.mlp_bias, config.mlp_bias)
        # Gate and up are stacked in one weight, so that one product computes both.
        parts = ("gate", "up") if self.activation.gated else ("up",)
        self.inner = ColumnParallelLinear(
            context,
            config.hidden,
            [Rows(f"{name}.{part}", config.ffn) for part in parts],
            bias=up_bias,
            std=config.initial_std("up", layer),
        )
        self.down = RowParallelLinear(
            context,
            config.ffn,
            config.hidden,
            name=f"{name}.down",
            bias=down_bias,
            std=config.initial_std("down", layer),
        )
        # Of all features, of which each rank of tp has some: its gradients are partial.
        self.activation_parameters = nn.ParameterList(
            vector(context, f"{name}.activation.{parameter}", 1, first_value, differs_over_tp=True)
            for parameter, first_value in self.activation.parameters.items()
        )
        self.settings = ActivationSettings(
            config.swiglu_alpha,
            config.swiglu_limit,
            context.leaves,
            self.activation_parameters,
            context.plan.sensitive,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of
        the same shape."""
        return self.recompute.run_forward(
            "activation", self.activate, self.inner(x), then=self.down
        )

    def activate(self, y: Tensor) -> Tensor:
        """Apply the activation function: y [..., local features of `inner`] -> [..., local features
        of `down`]."""
        return self.activation.apply(y, self.settings)
