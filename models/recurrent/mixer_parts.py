"""Parts of all layers with a recurrent state in place of attention: two products, a convolution
after the first one, heads of features, and where documents begin."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from models.attention.flash_windows import Documents
from models.attention.rope import RotaryTables
from models.config import ModelConfig
from models.recurrent import kernel_calls, kernel_choice
from models.recurrent.kernel_choice import CONVOLUTION, KernelChoice, KernelSetting, Package
from models.recurrent.short_convolution import short_convolution
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows, parameter
from parallel.linear import Widen
from parallel.lockstep import LaneAxis

# The distribution of first rates and biases in Mamba-2 and Kimi Delta Attention. Megatron and
# flash-linear-attention draw rates uniformly from 1 to 16, and steps with uniform logarithms from
# 0.001 to 0.1. Ours are normal in the logarithm, with the same mean and deviation of it. The
# softplus of a bias so far below 0 is its exponential, so that the bias is the step's logarithm.
MEAN_LOG_RATE = 16 / 15 * math.log(16) - 1
STD_LOG_RATE = 0.673
MEAN_STEP_BIAS = math.log(0.01)
STD_STEP_BIAS = math.log(100) / math.sqrt(12)


class RecurrentMixer(nn.Module, ABC):
    """A layer with a recurrent state in place of attention.

    projection     over tp, x [s, b, hidden] -> the features of `stack` of this rank
    `_mix`         of a subclass: a convolution of some of these features, a recurrence, a gate
    output         over tp, back to the hidden features; a subclass makes it last

    stack: the matrices of the projection.
    convolved: those of them whose features pass the convolution over `kernel` tokens.
    biased: the convolution has a bias.
    Recomputation of "attention" begins at the projected features.
    """

    output: RowParallelLinear

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        stack: Sequence[Rows],
        convolved: Sequence[Rows],
        kernel: int,
        biased: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.name = name
        std = config.initial_std("qkv")
        self.local_widths = [matrix.rows // (matrix.shards or context.tp.size) for matrix in stack]
        self.projection = ColumnParallelLinear(context, config.hidden, stack, bias=False, std=std)
        kernels = []
        biases = []
        for matrix in convolved:
            convolution = f"{matrix.name}_convolution"
            kernel_shape = (matrix.rows, kernel)
            bias_shape = (matrix.rows,)
            cut = (0, context.tp, matrix.shards)
            kernels.append(Part.cut(f"{convolution}.weight", kernel_shape, *cut))
            biases.append(Part.cut(f"{convolution}.bias", bias_shape, *cut))
        # partial: ranks that hold the same heads of keys have gradients of their own values
        self.convolution = parameter(context, kernels, std, partial=True)
        self.convolution_bias = parameter(context, biases, 0.0, partial=True) if biased else None

    def _make_vector(self, kind: str, elements: int, mean: float, std: float = 0.0) -> nn.Parameter:
        """Return this rank's part of a logical vector."""
        part = Part.cut(f"{self.name}.{kind}", (elements,), 0, self.context.tp)
        # A model whose values do not matter draws none (`ModelConfig.with_zero_weights`).
        drawn_std = std if self.config.init_std else 0.0
        return parameter(self.context, [part], drawn_std, mean=mean)

    def _make_output(self, width: int, layer: int) -> RowParallelLinear:
        """Return the product of the layer's output of `width` features, whole."""
        return RowParallelLinear(
            self.context,
            width,
            self.config.hidden,
            name=f"{self.name}.output",
            bias=False,
            std=self.config.initial_std("output", layer),
        )

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
            partial(self._mix, documents=attn_mask),
            self._project(x),
            then=self.output,
        )

    def _project(self, x: Tensor) -> Tensor:
        """Return the projected features of this rank's heads, [s, b, features]. x: as in
        `forward`. Collective over tp."""
        return self.projection(x)

    @abstractmethod
    def _mix(self, projected: Tensor, documents: Tensor | Documents | None) -> Tensor:
        """Map projected features [s, b, features] to the output projection's input, [s, b, local
        features]."""

    def _convolve(self, mixed: Tensor, begins: Tensor | None) -> Tensor:
        """Return SiLU of the convolution of features [s, b, features].

        begins: bool [b, s], True where a document begins; None: nowhere.
        """
        weight = Widen.apply(self.convolution, mixed.dtype)
        bias = None
        if self.convolution_bias is not None:
            bias = Widen.apply(self.convolution_bias, mixed.dtype)
        before = self._tokens_before(mixed)
        refusal = kernel_choice.convolution_refusal(*weight.shape)
        if before is not None and begins is not None:
            refusal = "causal-conv1d knows no tokens before documents"
        kernel = self._choose(CONVOLUTION, mixed, refusal).kernel
        if kernel is not None:
            return kernel_calls.convolution(kernel, mixed, weight, bias, before, begins)
        return F.silu(short_convolution(mixed, weight, before, begins, bias))

    def _tokens_before(self, mixed: Tensor) -> Tensor | None:
        """Return the tokens before those that are convolved; None: there are none."""
        return None

    def _choose(self, package: Package, x: Tensor, refusal: str = "") -> KernelChoice:
        """Return what computes the package's part of this layer for tensors like x."""
        setting = KernelSetting(
            device=x.device.type,
            products=self.context.plan.compute,
            canonical=isinstance(self.context.tp, LaneAxis),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        refused = self.context.refused_kernels.get(package.name, "")
        return kernel_choice.choose(package, setting, refusal or refused)


def heads_of(features: Tensor, width: int) -> Tensor:
    """Return features [s, b, n * width] as heads [b, n, s, width]."""
    return features.unflatten(-1, (-1, width)).permute(1, 2, 0, 3)


def begins_of(documents: Tensor | Documents | None) -> Tensor | None:
    """Return bool [b, s], True where a document begins after the first; None without documents.

    documents: int64 [b, s], the number of each token's document, or the documents.
    """
    if documents is None:
        return None
    numbers = documents.numbers if isinstance(documents, Documents) else documents
    changes = numbers[:, 1:] != numbers[:, :-1]
    return F.pad(changes, (1, 0), value=False)


def starts_of(documents: Tensor | Documents | None) -> Tensor | None:
    """Return `Documents.starts`; None if only the documents' numbers are known, or nothing."""
    return documents.starts if isinstance(documents, Documents) else None
