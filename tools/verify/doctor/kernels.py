"""Kernels that exist on this device, of torch and of other packages: each is called on small
tensors and compared with plain torch.

A name in torch says little: a kernel may refuse this device, or compute wrongly on it. A kernel
that is not here is no fault where the code does without; it is one if the run asks for it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.fp8.matmul import choose_kernel
from models.recurrent import kernel_choice
from models.recurrent.kernel_choice import (
    CONVOLUTION,
    DELTA_RULE,
    ROW_DECAY_RULE,
    STATE_SPACE,
    KernelSetting,
    Package,
)
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong
from tools.verify.doctor.questions import Answer, RankContext

# what torch raises where a kernel is not built in or does not support the device
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
TOLERANCE = 0.02  # relative, of bf16 products
# of layers: heads, features of a key and of a value, before them groups; features and taps
SIZES_OF_DELTA_RULE = (4, 128, 128)
SIZES_OF_STATE_SPACE = (2, 4, 128, 64)
SIZES_OF_CONVOLUTION = (512, 4)
TOKENS = 500  # of a sequence
HERE = "here"
ABSENT = "absent"
FAULTY = "faulty"


class Trial(NamedTuple):
    """The outcome of calling a kernel. state: HERE, ABSENT or FAULTY. reason: "" for HERE.

    A tuple, and so a list of two strings in the JSON that ranks exchange.
    """

    state: str
    reason: str


def probe(context: RankContext) -> Answer:
    """Try all kernels on the first rank of each host; the others return nothing."""
    # ranks of one host have the same device and the same torch
    if context.local:
        return {}
    device = torch.device(context.device)
    trials = {kernel_name: try_kernel(device) for kernel_name, try_kernel in KERNELS.items()}
    return {"host": context.host, "device": context.device, "tried": trials}


def _try_attention(backend: SDPBackend, device: torch.device) -> Trial:
    """Return if a backend of torch's attention computes what the plain formula does."""
    shape = (2, 4, 128, 64)  # batch, heads, tokens, head size
    query = _random_bf16(shape, 0, device)
    key = _random_bf16(shape, 1, device)
    value = _random_bf16(shape, 2, device)

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    # the plain formula, in float64
    products = query.double() @ key.double().transpose(-1, -2)
    scores = products / 8.0  # the root of the head size
    causal = torch.ones(128, 128, dtype=torch.bool, device=device).tril()
    masked = scores.masked_fill(~causal, -torch.inf)
    probabilities = masked.softmax(-1)
    expected = probabilities @ value.double()
    return _compare(attend, expected)


def _try_grouped_products(device: torch.device) -> Trial:
    """Return if torch's grouped products, one for each expert, are right."""
    tokens = _random_bf16((64, 32), 0, device)
    weights = _random_bf16((2, 32, 48), 1, device)
    ends = torch.tensor([16, 64], dtype=torch.int32, device=device)  # of each expert's tokens
    first = tokens[:16].double() @ weights[0].double()
    second = tokens[16:].double() @ weights[1].double()
    expected = torch.cat([first, second])
    return _compare(lambda: torch._grouped_mm(tokens, weights, offs=ends), expected)


def _try_fp8_products(device: torch.device) -> Trial:
    """Return if products of FP8 codes with one scale each are here."""
    return _try_scaled_products("current", device)


def _try_mx_products(device: torch.device) -> Trial:
    """Return if products of FP8 codes with MX scales are here."""
    return _try_scaled_products("mx", device)


def _try_scaled_products(kind: Any, device: torch.device) -> Trial:
    """Return whether a kernel for products of scaled FP8 is here, and right."""
    kernel, refusal_reason = choose_kernel(kind, torch.float8_e4m3fn, False, torch.bfloat16, device)
    # and it is right: `choose_kernel` has tried it
    if kernel is not None:
        return Trial(HERE, "")
    if "is wrong by" in refusal_reason:
        return Trial(FAULTY, refusal_reason)
    return Trial(ABSENT, refusal_reason)


def _try_package(package: Package, sizes: tuple[int, ...], device: torch.device) -> Trial:
    """Return if a package with kernels of recurrent layers is here and right. sizes: as its trial
    takes them."""
    # of a run with default settings
    setting = KernelSetting(device.type, torch.bfloat16, canonical=False, deterministic=False)
    kernel, name_or_reason = kernel_choice.choose(package, setting)
    if kernel is None:
        return Trial(ABSENT, name_or_reason)
    fault = package.trial(kernel, sizes, TOKENS, setting.products)
    if fault:
        return Trial(FAULTY, f"{name_or_reason} {fault}")
    return Trial(HERE, "")


def _random_bf16(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    # Drawn on the CPU: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def _compare(kernel: Callable[[], Tensor], expected: Tensor) -> Trial:
    """Call the kernel and return if its result is within the tolerance of `expected`, float64."""
    try:
        computed = kernel().double()
    except REFUSALS as error:
        return Trial(ABSENT, str(error).splitlines()[0])
    error_norm = (computed - expected).norm()
    relative_error = float(error_norm / expected.norm())
    if relative_error < TOLERANCE:
        return Trial(HERE, "")
    return Trial(FAULTY, f"wrong by {relative_error:.1%}")


KERNELS: dict[str, Callable[[torch.device], Trial]] = {
    "flash attention": partial(_try_attention, SDPBackend.FLASH_ATTENTION),
    "cuDNN attention": partial(_try_attention, SDPBackend.CUDNN_ATTENTION),
    "grouped products": _try_grouped_products,
    "FP8 products": _try_fp8_products,
    "MX products": _try_mx_products,
    DELTA_RULE.name: partial(_try_package, DELTA_RULE, SIZES_OF_DELTA_RULE),
    f"{ROW_DECAY_RULE.name} ({ROW_DECAY_RULE.function})": partial(
        _try_package, ROW_DECAY_RULE, SIZES_OF_DELTA_RULE
    ),
    STATE_SPACE.name: partial(_try_package, STATE_SPACE, SIZES_OF_STATE_SPACE),
    CONVOLUTION.name: partial(_try_package, CONVOLUTION, SIZES_OF_CONVOLUTION),
}


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the finding about each kernel."""
    hosts = [host_answer for host_answer in answers if host_answer]
    for kernel_name in KERNELS:
        yield from _judge_kernel(kernel_name, hosts)


def _judge_kernel(kernel_name: str, hosts: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about one kernel, which all hosts should have, or none."""
    faulty = dict[str, str]()  # the reason by host
    absent = dict[str, str]()
    for host_answer in hosts:
        trial = Trial(*host_answer["tried"][kernel_name])
        if trial.state == FAULTY:
            faulty[host_answer["host"]] = trial.reason
        elif trial.state == ABSENT:
            absent[host_answer["host"]] = trial.reason
    for host, refusal_reason in faulty.items():
        message = f"{kernel_name} on {host}: {refusal_reason}"
        yield wrong("kernels", message, "update it, torch and the driver; report it to who made it")
    # one that computes wrongly is worse than one that is absent elsewhere
    if faulty:
        return

    if absent and len(absent) < len(hosts):
        message = (
            f"{kernel_name} are not on {', '.join(absent)}, but on the others: ranks would compute "
            "differently"
        )
        remedy = "install the same packages and driver, and use GPUs of one kind"
        yield wrong("kernels", message, remedy)
    elif absent:
        refusal_reason = next(iter(absent.values()))  # all hosts lack it, for the same one
        yield not_tried("kernels", f"{kernel_name}: not on this device: {refusal_reason}")
    else:
        device = "GPU" if hosts[0]["device"] == "cuda" else "CPU"
        yield ok("kernels", f"{kernel_name}: here, and right on this {device}")
