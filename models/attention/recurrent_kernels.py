"""Kernels of other packages for layers with a recurrent state, and the choice between them and
plain torch.

    flash-linear-attention   the gated delta rule (`models.attention.delta_rule`), in Triton
    mamba-ssm                the recurrence of Mamba-2 (`models.attention.state_space`), in Triton
    causal-conv1d            the convolution before both, with its SiLU, in CUDA

All three are optional, and compute on a GPU what plain torch computes everywhere. A run takes them
if its products are in 16 bits, but for two settings:

    train.deterministic            mamba-ssm and causal-conv1d add gradients by atomic operations
                                   (releases since 2026 can do without); in flash-linear-attention
                                   and mamba-ssm Triton chooses blocks by their time, so that two
                                   runs may sum in other orders
    train.numerics = "canonical"   for the same reason

The kernels of recurrences take queries, keys and values in the dtype of products and keep the
states between chunks in it; they sum in FP32, and take decays, strengths, time steps and the state
before the first token in FP32. The kernel of the convolution takes FP32.

Arguments, layouts and dtypes are those of flash-linear-attention 0.5.2, mamba-ssm 2.3.2 and
causal-conv1d 1.6.1, whose sources were read.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.delta_rule import DeltaInputs
from models.attention.state_space import StateSpaceInputs
from models.config import ModelConfig

NARROW = (torch.bfloat16, torch.float16)
# Features of a head's query and key that flash-linear-attention takes.
WIDEST_KEY = 256
# Its releases before 0.6 take fewer tokens than heads, such as a short prompt, for tensors of
# another layout, and warn.
FEWER_TOKENS_THAN_HEADS = "Input tensor shape suggests potential format mismatch"
# Tokens that the convolution of causal-conv1d may see, and a divisor of its features.
CONVOLVED_TOKENS = (2, 3, 4)
FEATURES_DIVIDE_BY = 8
# Tokens of a chunk of mamba-ssm, as in Nemotron-H.
MAMBA_CHUNK = 128


@dataclass(frozen=True)
class Package:
    """A package whose `function` of `module` computes a part of a layer.

    part: in words.
    release: the first one that has all arguments that are used here.
    """

    name: str
    part: str
    module: str
    function: str
    release: tuple[int, int]


DELTA_RULE = Package(
    "flash-linear-attention",
    "gated delta rule",
    "fla.ops.gated_delta_rule",
    "chunk_gated_delta_rule",
    (0, 3),
)
STATE_SPACE = Package(
    "mamba-ssm",
    "state space",
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined",
    (2, 2),
)
CONVOLUTION = Package("causal-conv1d", "convolution", "causal_conv1d", "causal_conv1d_fn", (1, 4))


class Setting(NamedTuple):
    """The facts of a run that decide whether it takes kernels.

    device: type of the tensors' device; meta stands for a GPU that is not here.
    products: the dtype of products.
    canonical, deterministic: sums must have an order that is always the same.
    """

    device: str
    products: torch.dtype
    canonical: bool
    deterministic: bool


class Choice(NamedTuple):
    """A kernel, or plain torch in its place, for a part of a layer.

    kernel: the function of the package; None: plain torch does.
    name: the package and its release, or plain torch and the reason.
    """

    kernel: Callable[..., Any] | None
    name: str


def choose(package: Package, setting: Setting, limit: str = "") -> Choice:
    """Return what computes the package's part of a layer.

    limit: the reason why the package does not take this call; "" if it does.
    """
    if reason := _objection(setting) or limit:
        return _plain(reason)
    # What is installed there is not known here.
    if setting.device == "meta":
        return Choice(None, f"{package.name} where it is installed, else plain torch")
    return find(package)


def _objection(setting: Setting) -> str:
    """Return why a run takes no kernel of any package; "" if it does."""
    if setting.device not in ("cuda", "meta"):
        return "not on a GPU"
    if setting.products not in NARROW:
        return "products are not in 16 bits"
    if setting.canonical:
        return "canonical numerics"
    if setting.deterministic:
        return "train.deterministic"
    return ""


def _plain(reason: str) -> Choice:
    return Choice(None, f"plain torch ({reason})")


@cache
def find(package: Package) -> Choice:
    """Return the kernel of an installed package, or plain torch if there is none."""
    top_module = package.module.partition(".")[0]
    if find_spec(top_module) is None:
        return _plain(f"{package.name} is not installed")
    try:
        release = import_module(top_module).__version__
        kernel = getattr(import_module(package.module), package.function)
    # Triton and compiled extensions raise errors of many kinds.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return _plain(f"{package.name} cannot be imported: {reason}")
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if numbers < package.release:
        first = ".".join(map(str, package.release))
        return _plain(f"{package.name} {release} is older than {first}")
    warnings.filterwarnings("ignore", FEWER_TOKENS_THAN_HEADS)
    return Choice(kernel, f"{package.name} {release}")


def describe(model: ModelConfig, tp: int, setting: Setting) -> list[str]:
    """Return what computes the parts of the layers of a model that have a recurrent state; none if
    no layer has one.

    tp: tensor-parallel ranks.
    """
    limits = dict[Package, str]()
    if sizes := model.delta_net:
        keys = 2 * sizes.key_width // min(tp, sizes.key_heads)
        features = keys + sizes.value_width // tp
        limits[DELTA_RULE] = delta_rule_limit(sizes.key_dim)
        limits[CONVOLUTION] = convolution_limit(features, sizes.kernel)
    if sizes := model.mamba:
        limits[STATE_SPACE] = ""
        limits[CONVOLUTION] = convolution_limit(sizes.convolved_width // tp, sizes.kernel)
    return [
        f"{package.part} by {choose(package, setting, limit).name}"
        for package, limit in limits.items()
    ]


def delta_rule_limit(key_dim: int) -> str:
    """Return why flash-linear-attention does not take heads of these sizes; "" if it does."""
    if key_dim > WIDEST_KEY:
        return f"flash-linear-attention has keys of at most {WIDEST_KEY} features"
    return ""


def convolution_limit(features: int, tokens: int) -> str:
    """Return why causal-conv1d does not convolve so many features over so many tokens; "" if it
    does."""
    if tokens not in CONVOLVED_TOKENS:
        return f"causal-conv1d sees {CONVOLVED_TOKENS[0]} to {CONVOLVED_TOKENS[-1]} tokens"
    if features % FEATURES_DIVIDE_BY:
        return f"causal-conv1d takes features in multiples of {FEATURES_DIVIDE_BY}"
    return ""


def delta_rule(
    kernel: Callable[..., Any], inputs: DeltaInputs, state: Tensor | None, products: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return what `models.attention.delta_rule.chunked` does, by flash-linear-attention.

    The last state is None if there are documents: after these nothing goes on.
    """
    # [b, n, s, ...] -> [b, s, n, ...]
    query = inputs.query.transpose(1, 2).to(products)
    key = inputs.key.transpose(1, 2).to(products)
    value = inputs.value.transpose(1, 2).to(products)
    log_decay = inputs.log_decay.transpose(1, 2)
    strength = inputs.strength.transpose(1, 2)
    starts = document_starts(inputs)
    samples, length = query.shape[:2]
    tensors = [query, key, value, log_decay, strength]
    # Documents are sequences of their own in samples laid end to end: [1, b * s, n, ...].
    if starts is not None:
        tensors = [x.flatten(0, 1).unsqueeze(0) for x in tensors]
    outputs, last = kernel(
        *tensors,
        scale=1.0,  # queries have their scale
        initial_state=state,
        output_final_state=starts is None,
        cu_seqlens=starts,
    )
    outputs = outputs.view(samples, length, *outputs.shape[2:])
    return outputs.transpose(1, 2).to(inputs.value.dtype), last


def document_starts(inputs: DeltaInputs) -> Tensor | None:
    """Return where documents begin in samples laid end to end, and where the last one ends: int32
    [documents + 1]; None if there are none. Waits for the GPU if the inputs do not say it."""
    if inputs.begins is None or inputs.starts is not None:
        return inputs.starts
    begins = inputs.begins.clone()
    begins[:, 0] = True
    (starts,) = begins.flatten().nonzero(as_tuple=True)
    return F.pad(starts, (0, 1), value=begins.numel()).int()


def state_space(
    kernel: Callable[..., Any],
    inputs: StateSpaceInputs,
    state: Tensor | None,
    products: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what `models.attention.state_space.chunked` does, by mamba-ssm, whose states are
    transposed."""
    # [b, n, s, ...] -> [b, s, n, ...]
    outputs, last = kernel(
        inputs.value.transpose(1, 2).to(products),
        inputs.step.transpose(1, 2),
        -inputs.rate,
        inputs.key.transpose(1, 2).to(products),
        inputs.query.transpose(1, 2).to(products),
        MAMBA_CHUNK,
        initial_states=None if state is None else state.mT,
        seq_idx=document_numbers(inputs.begins),
        return_final_states=True,
    )
    return outputs.transpose(1, 2).to(inputs.value.dtype), last.mT


def convolution(
    kernel: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    begins: Tensor | None,
) -> Tensor:
    """Return SiLU of what `models.attention.short_convolution` does, by causal-conv1d.

    There are no tokens before those of documents.
    """
    convolved = kernel(
        _features_inside(x),
        weight,
        bias,
        seq_idx=document_numbers(begins),
        initial_states=None if before is None else _features_inside(before),
        activation="silu",
    )
    return convolved.permute(2, 0, 1)


def _features_inside(x: Tensor) -> Tensor:
    """Return x [s, b, features] as [b, features, s], of which features are next to each other in
    memory: documents and tokens before need that. There is no copy if x is contiguous."""
    # The package also reads the strides of dims of one element, which are any if not made anew.
    return x.flatten().view(x.shape).permute(1, 2, 0)


def document_numbers(begins: Tensor | None) -> Tensor | None:
    """Return the number of each token's document in its sample, int32 [b, s]; None without
    documents. The state before the first token is that of number 0."""
    if begins is None:
        return None
    return begins.cumsum(1, dtype=torch.int32)
