"""Kernels of other packages for layers with a recurrent state, and the choice between them and
plain torch.

    flash-linear-attention   the gated delta rule (`models.recurrent.delta_rule`), with a decay of
                             each head or of each row of a state, in Triton
    mamba-ssm                the recurrence of Mamba-2 (`models.recurrent.state_space`), in Triton
    causal-conv1d            the convolution before both, with its SiLU, in CUDA

All three are optional, and compute on a GPU what plain torch computes everywhere. A run takes them
if its products are in 16 bits, but for two settings:

    train.deterministic            mamba-ssm and causal-conv1d add gradients by atomic operations
                                   (releases since 2026 can do without); in flash-linear-attention
                                   and mamba-ssm Triton chooses blocks by their time, so that two
                                   runs may sum in other orders
    train.numerics = "canonical"   for the same reason

An engine tries the kernels before its ranks take them (`refused_kernels`), for releases of Triton
have compiled such kernels wrongly for some GPUs. All ranks take the same.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from models.config import ModelConfig

if TYPE_CHECKING:
    from models.recurrent.kernel_trials import Trial

NARROW = (torch.bfloat16, torch.float16)
# Features of a head's query and key that flash-linear-attention takes.
WIDEST_KEY = 256
# Its releases before 0.6 take fewer tokens than heads, such as a short prompt, for tensors of
# another layout, and warn.
FEWER_TOKENS_THAN_HEADS = "Input tensor shape suggests potential format mismatch"
# Tokens that the convolution of causal-conv1d may see, and a divisor of its features.
CONVOLVED_TOKENS = (2, 3, 4)
FEATURES_DIVIDE_BY = 8


TRIALS = "models.recurrent.kernel_trials"  # loaded when a model has layers to be tried


@dataclass(frozen=True)
class Package:
    """A package whose `function` of `module` computes a part of a layer.

    part: in words.
    release: the first one that has all arguments that are used here.
    trial_name: of the function of TRIALS that compares it with plain torch.
    """

    name: str
    part: str
    module: str
    function: str
    release: tuple[int, int]
    trial_name: str

    @property
    def trial(self) -> "Trial":
        """The comparison with plain torch."""
        return getattr(import_module(TRIALS), self.trial_name)


DELTA_RULE = Package(
    "flash-linear-attention",
    "gated delta rule",
    "fla.ops.gated_delta_rule",
    "chunk_gated_delta_rule",
    (0, 3),
    "delta_rule_fault",
)
ROW_DECAY_RULE = Package(
    "flash-linear-attention",
    "delta rule of Kimi Delta Attention",
    "fla.ops.kda",
    "chunk_kda",
    (0, 4),
    "row_decay_rule_fault",
)
STATE_SPACE = Package(
    "mamba-ssm",
    "state space",
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined",
    (2, 2),
    "state_space_fault",
)
CONVOLUTION = Package(
    "causal-conv1d",
    "convolution",
    "causal_conv1d",
    "causal_conv1d_fn",
    (1, 4),
    "convolution_fault",
)


class KernelSetting(NamedTuple):
    """The facts of a run that decide whether it takes kernels.

    device: type of the tensors' device; meta stands for a GPU that is not here.
    products: the dtype of products.
    canonical, deterministic: sums must have an order that is always the same.
    """

    device: str
    products: torch.dtype
    canonical: bool
    deterministic: bool


class KernelChoice(NamedTuple):
    """A kernel, or plain torch in its place, for a part of a layer.

    kernel: the function of the package; None: plain torch does.
    name: the package and its release, or plain torch and the reason.
    """

    kernel: Callable[..., Any] | None
    name: str


def choose(package: Package, setting: KernelSetting, refusal: str = "") -> KernelChoice:
    """Return what computes the package's part of a layer: its kernel, or plain torch.

    refusal: the reason why the package does not take this call; "" if it does.
    """
    if reason := _objection(setting) or refusal:
        return _plain(reason)
    # meta stands for a GPU of another machine, of which it is not known what is installed
    if setting.device == "meta":
        return KernelChoice(None, f"{package.name} where it is installed, else plain torch")
    return find(package)


def _objection(setting: KernelSetting) -> str:
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


def _plain(reason: str) -> KernelChoice:
    return KernelChoice(None, f"plain torch ({reason})")


@cache
def find(package: Package) -> KernelChoice:
    """Return the kernel of an installed package; plain torch, with the reason, if it is not
    installed, cannot be imported or is too old."""
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
    return KernelChoice(kernel, f"{package.name} {release}")


class Use(NamedTuple):
    """A package that computes a part of a model's layers.

    refusal: why it does not take these layers; "" if it does.
    sizes: of a rank's part of a layer, as the package's trial takes them.
    """

    package: Package
    refusal: str
    sizes: tuple[int, ...]


def uses(model: ModelConfig, ranks: int) -> list[Use]:
    """Return the packages for the parts of a model's layers that have a recurrent state; none if no
    layer has one.

    ranks: those that share the heads of a layer: of tp, and of cp if sequences are cut.
    """
    packages: list[Use] = []
    if delta := model.delta_net:
        # heads of keys that are fewer than ranks are held by several ranks each
        key_ranks = min(ranks, delta.key_heads)
        queries_and_keys = 2 * delta.key_width // key_ranks
        features = queries_and_keys + delta.value_width // ranks
        sizes = (delta.value_heads // ranks, delta.key_dim, delta.value_dim)
        package = ROW_DECAY_RULE if delta.gate_rank else DELTA_RULE
        packages.append(Use(package, delta_rule_refusal(delta.key_dim), sizes))
        packages.append(_convolution_use(features, delta.kernel))
    if mamba := model.mamba:
        group_ranks = min(ranks, mamba.groups)
        groups = mamba.groups // group_ranks
        sizes = (groups, mamba.heads // ranks, mamba.state_dim, mamba.head_dim)
        queries_and_keys = 2 * mamba.key_width // group_ranks
        features = mamba.width // ranks + queries_and_keys
        packages.append(Use(STATE_SPACE, "", sizes))
        packages.append(_convolution_use(features, mamba.kernel))
    return packages


def _convolution_use(features: int, tokens: int) -> Use:
    return Use(CONVOLUTION, convolution_refusal(features, tokens), (features, tokens))


def refused_kernels(
    model: ModelConfig,
    ranks: int,
    setting: KernelSetting,
    tokens: int,
    world: Axis,
    device: torch.device,
) -> dict[str, str]:
    """Try the kernels that the layers of a model would take. Return the packages whose kernels are
    not to be taken by any rank, each with the reason: it is wrong on a rank, fails there, or is not
    installed there.

    ranks: those that share the heads of a layer. tokens: of a sequence. Collective over the world.
    """
    uses_of_layers = uses(model, ranks)
    if not uses_of_layers or setting.device == "meta" or _objection(setting):
        return {}
    own_reasons: dict[str, str] = {}
    for package, refusal, sizes in uses_of_layers:
        if refusal:
            continue
        kernel, name = choose(package, setting)
        if kernel is None:
            # the reason in "plain torch (reason)"
            own_reasons[package.name] = name.removeprefix("plain torch (").removesuffix(")")
            continue
        # gradients are tried too, whatever mode the engine is built in
        with torch.inference_mode(False), torch.enable_grad():
            fault = package.trial(kernel, sizes, tokens, setting.products)
        if fault:
            own_reasons[package.name] = f"{name} {fault} of rank {world.rank}"
    return gather_entries(own_reasons, world, device)


def describe(
    model: ModelConfig, ranks: int, setting: KernelSetting, refused: Mapping[str, str]
) -> list[str]:
    """Return a line for each part of the layers with a recurrent state, with what computes it; none
    if no layer has such a state.

    ranks: those that share the heads of a layer. refused: the result of `refused_kernels`.
    """
    lines: list[str] = []
    for package, refusal, _ in uses(model, ranks):
        choice = choose(package, setting, refusal or refused.get(package.name, ""))
        lines.append(f"{package.part} by {choice.name}")
    return lines


def delta_rule_refusal(key_dim: int) -> str:
    """Return why flash-linear-attention does not take heads of these sizes; "" if it does."""
    if key_dim > WIDEST_KEY:
        return f"flash-linear-attention has keys of at most {WIDEST_KEY} features"
    return ""


def convolution_refusal(features: int, tokens: int) -> str:
    """Return why causal-conv1d does not convolve so many features over so many tokens; "" if it
    does."""
    if tokens not in CONVOLVED_TOKENS:
        return f"causal-conv1d sees {CONVOLVED_TOKENS[0]} to {CONVOLVED_TOKENS[-1]} tokens"
    if features % FEATURES_DIVIDE_BY:
        return f"causal-conv1d takes features in multiples of {FEATURES_DIVIDE_BY}"
    return ""
