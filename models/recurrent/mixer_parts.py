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
from parallel.sequence_exchange import exchange_for_features, exchange_for_tokens

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

    name: of the layer; the names of its tensors begin with it.
    stack: the matrices of the projection.
    convolved: those of them whose features pass the convolution over `kernel` tokens.
    heads: the number of heads of each of these, on all ranks.
    biased: the convolution has a bias.

    If sequences are cut over cp, what the convolution and the recurrence read is exchanged for
    whole sequences of some of this rank's heads, and their results are exchanged back
    (`parallel.sequence_exchange`). Where there are fewer heads of one kind than ranks, neighbouring
    ranks have the same one. Weights of heads are those of all of a rank's heads in any case: cp
    ranks hold the same, and each has the gradients of the heads that it computed.
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
        heads: Sequence[int],
        kernel: int,
        biased: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.name = name
        std = config.initial_std("qkv")
        slice_counts = [matrix.shards or context.tp.size for matrix in stack]
        self.local_widths = [
            matrix.rows // num_slices
            for matrix, num_slices in zip(stack, slice_counts, strict=True)
        ]
        # the features, and the heads, that this rank of tp has of each matrix that is convolved
        self.convolved_widths: list[int] = []
        self.convolved_heads: list[int] = []
        for matrix, count in zip(convolved, heads, strict=True):
            num_slices = matrix.shards or context.tp.size
            self.convolved_widths.append(matrix.rows // num_slices)
            self.convolved_heads.append(count // num_slices)
        self.projection = ColumnParallelLinear(context, config.hidden, stack, bias=False, std=std)
        kernels = []
        biases = []
        for matrix in convolved:
            convolution = f"{matrix.name}_convolution"
            kernel_shape = (matrix.rows, kernel)
            bias_shape = (matrix.rows,)
            tp = context.tp
            shards = matrix.shards
            kernels.append(Part.cut(f"{convolution}.weight", kernel_shape, 0, tp, shards))
            biases.append(Part.cut(f"{convolution}.bias", bias_shape, 0, tp, shards))
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

    def _exchange_for_tokens(
        self, mixed: Tensor, others: Sequence[Tensor], heads: int
    ) -> list[Tensor]:
        """Return `mixed` and `others` with all tokens of the heads that this rank computes, [whole
        s, b, features] each, in exchange for its own tokens of the other ranks' heads.

        mixed: [own s, b, features], what is convolved.
        others: [own s, b, features] each, of `heads` heads.
        Collective over cp. Without context parallelism the arguments are returned.
        """
        cp = self.context.cp
        if cp.size == 1:
            return [mixed, *others]
        # features by the rank that computes their heads, [own s, b, ranks, features]
        parts = mixed.split(self.convolved_widths, -1)
        mixed_by_rank = [
            by_rank(part, part_heads, cp.size)
            for part, part_heads in zip(parts, self.convolved_heads, strict=True)
        ]
        others_by_rank = [by_rank(x, heads, cp.size) for x in others]
        to_exchange = [torch.cat(mixed_by_rank, -1), *others_by_rank]
        widths = [features.shape[-1] for features in to_exchange]
        # one message for all of them
        exchanged = exchange_for_tokens(torch.cat(to_exchange, -1), cp)
        return [*exchanged.split(widths, -1)]

    def _own_convolved_widths(self) -> list[int]:
        """Return the number of features of each matrix that is convolved, of the heads that this
        rank of cp computes."""
        ranks = self.context.cp.size
        widths: list[int] = []
        for width, heads in zip(self.convolved_widths, self.convolved_heads, strict=True):
            # at least those of one head, which several ranks compute if heads are fewer than ranks
            width_of_head = width // heads
            widths.append(max(width // ranks, width_of_head))
        return widths

    def _own_part(self, vector: Tensor, heads: int) -> Tensor:
        """Return the part of a weight that belongs to the heads which this rank of cp computes.

        vector: [features, ...], of `heads` heads.
        """
        cp = self.context.cp
        if cp.size == 1:
            return vector
        weights_by_rank = by_rank(vector.movedim(0, -1), heads, cp.size)  # [..., ranks, features]
        return weights_by_rank[..., cp.rank, :].movedim(-1, 0)

    def _own_convolution(self, weight: Tensor) -> Tensor:
        """Return the rows of a weight of the convolution that belong to the heads which this rank
        of cp computes. weight: [features, ...], of all that is convolved."""
        if self.context.cp.size == 1:
            return weight
        parts = zip(weight.split(self.convolved_widths), self.convolved_heads, strict=True)
        return torch.cat([self._own_part(part, heads) for part, heads in parts])

    def _exchange_back(self, heads: Tensor) -> Tensor:
        """Return this rank's own tokens of all heads, [own s, b, n, v].

        heads: all tokens of the heads that this rank computes, [whole s, b, own n, v]. Collective
        over cp.
        """
        cp = self.context.cp
        if cp.size == 1:
            return heads
        width = heads.shape[-1]
        by_rank_of_head = exchange_for_features(
            heads.flatten(2), cp
        )  # [own s, b, ranks, own n * v]
        return by_rank_of_head.flatten(2).unflatten(-1, (-1, width))

    def _convolve(self, mixed: Tensor, begins: Tensor | None) -> Tensor:
        """Return SiLU of the convolution of `mixed` [s, b, features], features of the heads that
        this rank computes, by the kernel that there is.

        begins: bool [b, s], True where a document begins; None: nowhere.
        """
        weight = self._own_convolution(Widen.apply(self.convolution, mixed.dtype))
        bias = None
        if self.convolution_bias is not None:
            bias = self._own_convolution(Widen.apply(self.convolution_bias, mixed.dtype))
        before = self._tokens_before(mixed)
        refusal = kernel_choice.convolution_refusal(*weight.shape)
        if before is not None and begins is not None:
            refusal = "causal-conv1d knows no tokens before documents"
        kernel = self._choose(CONVOLUTION, mixed, refusal).kernel
        if kernel is not None:
            return kernel_calls.convolution(kernel, mixed, weight, bias, before, begins)
        return F.silu(short_convolution(mixed, weight, before, begins, bias))

    def _tokens_before(self, mixed: Tensor) -> Tensor | None:
        """Return the tokens before those that are convolved, [kernel - 1, b, features]; None: there
        are none, so that zeros count. A subclass that continues texts keeps them."""
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


def by_rank(features: Tensor, heads: int, ranks: int) -> Tensor:
    """Return features [..., heads * width] by the rank that computes their heads: [..., ranks,
    features of its heads]. Where there are fewer heads than ranks, neighbours have the same one."""
    if heads < ranks:
        by_head = features.unflatten(-1, (heads, -1))
        features = by_head.repeat_interleave(ranks // heads, -2).flatten(-2)
    return features.unflatten(-1, (ranks, -1))


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
