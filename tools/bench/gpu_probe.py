"""Probes of a GPU and of torch's build for it: versions, ceilings of speed, the backends of
attention, and what NCCL takes.

Each probe prints a line as soon as it is done; one that fails says why, and the others go on.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.tested_versions import installed_version
from models.attention.backends import NAMES
from parallel.mesh import world
from tools.analysis.planning.fp8_timing import seconds
from tools.bench.measurement import add_device, print_record, require_gpu

SUBJECT = "what a GPU and torch's build for it can do"
PACKAGES = ("torch", "triton", "numpy", "pydantic", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
# of Llama 3 8B: output and input features
PRODUCTS = {
    "query, key, value": (6144, 4096),
    "attention output": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
}
# of attention: head width, heads, key and value heads, tokens, samples
ATTENTION = (
    (128, 32, 8, 8192, 1),
    (64, 32, 8, 8192, 1),
    (128, 32, 8, 4096, 2),
    (128, 32, 8, 200, 2),
)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
TERA = 1e12
CUT_SEQUENCE = "attention of a cut sequence"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_device(parser)
    parser.add_argument("--only", metavar="PROBE", help="this one alone")


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench probe`; return the exit code."""
    require_gpu(args.device)
    device = torch.device(args.device)
    # tensors of a CPU are small: they try the program
    shrink = 1 if args.device == "cuda" else 64
    probes: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": lambda: _versions(device),
        "ceilings": lambda: _ceilings(device, shrink),
        "products": lambda: _products(device, shrink),
        "attention": lambda: _attention(device, shrink),
        "collectives": lambda: _collectives(device, args.device),
    }
    further = {CUT_SEQUENCE: lambda: _cut_attention(device, shrink)}
    if args.only:
        all_probes = probes | further
        probes = {args.only: all_probes[args.only]}
    for name, probe in probes.items():
        _print_outcome(name, probe)
    return 0


def _print_outcome(name: str, probe: Callable[[], dict[str, Any]]) -> None:
    """Print what a probe returns, or why it has failed, and the seconds that it took."""
    start = time.perf_counter()
    try:
        outcome = probe()
    except Exception as error:
        # the next probe may work all the same
        outcome = {"failed": _first_line(error)}
    took = time.perf_counter() - start
    print_record({"probe": name, **outcome, "seconds": round(took, 1)})


def _first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text, at most 200 characters."""
    text = f"{type(error).__name__}: {error}"
    first, *_ = text.splitlines()
    return first[:200]


def _versions(device: torch.device) -> dict[str, Any]:
    """Return the versions of packages, None for one that is not installed, the number of CPUs and,
    on a GPU, its name and the versions of its libraries."""
    versions: dict[str, Any] = {}
    for package in PACKAGES:
        versions[package] = installed_version(package) or None
    versions["cpus"] = os.cpu_count()
    if device.type == "cuda":
        versions["device"] = torch.cuda.get_device_name()
        versions["cudnn"] = torch.backends.cudnn.version()
        version_numbers = map(str, nccl.version())
        versions["nccl"] = ".".join(version_numbers)
    return versions


def _ceilings(device: torch.device, shrink: int) -> dict[str, Any]:
    """Return the speed of bf16 products, one alone and without a pause, and of copies."""
    side = 8192 // shrink
    first = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    second = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    num_copied = (1 << 30) // shrink**3
    source = torch.empty(num_copied, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    flops = 2 * side**3
    alone = seconds(lambda: first @ second, device)
    copied = seconds(lambda: target.copy_(source), device)
    # longer than a GPU's power limit takes to lower its clock
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < 2:
        seconds(lambda: first @ second, device, rounds=20)
        count += 1
        if device.type == "cpu":
            break
    sustained = seconds(lambda: first @ second, device, rounds=20)
    moved = 2 * source.nbytes  # a copy reads and writes
    return {
        "product_tflops": _tera(flops, alone),
        "sustained_tflops": _tera(flops, sustained),
        "copy_tb_per_s": round(moved / copied / TERA, 2),
    }


def _tera(flops: float, took: float) -> float:
    """Return TFLOP/s, to one decimal. took: seconds."""
    return round(flops / took / TERA, 1)


def _products(device: torch.device, shrink: int) -> dict[str, Any]:
    """Return TFLOP/s of a layer's products at 8192 tokens: forward, gradient of the input, gradient
    of the weight, and that added to an FP32 total."""
    tokens = 8192 // shrink
    speeds: dict[str, Any] = {}
    for name, (outputs, inputs) in PRODUCTS.items():
        outputs //= shrink
        inputs //= shrink
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        grad = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
        total = torch.zeros(outputs, inputs, device=device)
        kinds: dict[str, Callable[[], object]] = {
            "forward": lambda x=x, weight=weight: x @ weight.t(),
            "input gradient": lambda grad=grad, weight=weight: grad @ weight,
            "weight gradient": lambda grad=grad, x=x: grad.t() @ x,
        }
        if device.type == "cuda":
            kinds["added in FP32"] = lambda total=total, grad=grad, x=x: torch.addmm(
                total, grad.t(), x, out_dtype=torch.float32, out=total
            )
        flops = 2 * tokens * outputs * inputs
        speed_of_kind = dict[str, float]()
        for kind, product in kinds.items():
            took = seconds(product, device)
            speed_of_kind[kind] = _tera(flops, took)
        speeds[name] = speed_of_kind
    return {"tflops": speeds}


def _attention(device: torch.device, shrink: int) -> dict[str, Any]:
    """Return TFLOP/s of causal attention by backend, forward and backward."""
    speeds: dict[str, Any] = {}
    for width, heads, key_heads, tokens, samples in ATTENTION:
        tokens = max(8, tokens // shrink)
        name = f"head {width}, {heads} / {key_heads} heads, {samples} x {tokens} tokens"
        shape = (width, heads, key_heads, tokens, samples)
        speeds[name] = dict(_backends_of(shape, device))
    return speeds


def _backends_of(
    shape: tuple[int, int, int, int, int], device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Yield the kernel that torch takes by itself, and for each backend of attention its TFLOP/s
    forward and backward, or why it refuses.

    shape: head width, heads, key and value heads, tokens, samples.
    """
    width, heads, key_heads, tokens, samples = shape

    def random(count: int) -> Tensor:
        """Return random [samples, count, tokens, width]. count: of heads."""
        # the strides that a layer passes: tokens come first in memory
        made = torch.randn(tokens, samples, count, width, device=device, dtype=torch.bfloat16)
        return made.permute(1, 2, 0, 3)

    query = random(heads).requires_grad_()
    key = random(key_heads).requires_grad_()
    value = random(key_heads).requires_grad_()
    grad = random(heads)
    # causal: half of all products of tokens; forward has two products, backward five
    flops = 2 * samples * heads * tokens**2 * width

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    default = attend().grad_fn
    yield "default", type(default).__name__
    for backend, name in NAMES.items():
        # scores of all tokens do not fit
        if backend is SDPBackend.MATH and tokens > 2048:
            continue
        with sdpa_kernel(backend):
            try:
                output = attend()
                inputs = (query, key, value)
                forward = seconds(attend, device)

                def backward(output: Tensor = output, inputs: Any = inputs) -> None:
                    torch.autograd.grad(output, inputs, grad, retain_graph=True)

                backward_seconds = seconds(backward, device)
            except RuntimeError as error:
                yield name, _first_line(error)
                continue
        speeds = {
            "forward_tflops": _tera(flops, forward),
            "backward_tflops": _tera(2.5 * flops, backward_seconds),
        }
        yield name, speeds


def _cut_attention(device: torch.device, shrink: int) -> dict[str, Any]:
    """Return TFLOP/s of attention without a mask that returns the log of its sums too, as for the
    keys of other ranks: by torch's flash attention, and by cuDNN's."""
    width, heads, _, tokens, samples = ATTENTION[0]
    tokens = max(8, tokens // shrink)
    flops = 4 * samples * heads * tokens**2 * width
    shape = (samples, heads, tokens, width)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    aten = torch.ops.aten
    calls: dict[str, Callable[[], object]] = {
        "flash": lambda: aten._scaled_dot_product_flash_attention(query, key, value),
        "cuDNN": lambda: aten._scaled_dot_product_cudnn_attention(query, key, value, None, True),
    }
    speeds: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            took = seconds(call, device)
        except RuntimeError as error:
            speeds[name] = _first_line(error)
        else:
            speeds[name] = {"forward_tflops": _tera(flops, took)}
    return {"speeds": speeds}


def _collectives(device: torch.device, device_type: str) -> dict[str, Any]:
    """Return what a world of one rank refuses of each dtype: every collective goes through NCCL."""
    outcomes: dict[str, Any] = {}
    with world(device_type):
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            outcomes[name] = _refused(dtype, device)
    return outcomes


def _refused(dtype: torch.dtype, device: torch.device) -> list[str] | str:
    """Return the collectives that refuse a dtype, each with its reason, or "all taken"."""
    tensor = torch.ones(64, device=device).to(dtype)
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: dist.all_reduce(tensor),
        "max": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        "gather": lambda: dist.all_gather_into_tensor(tensor, tensor),
        "scatter": lambda: dist.reduce_scatter_tensor(tensor, tensor),
        "exchange": lambda: dist.all_to_all_single(
            torch.empty_like(tensor),
            tensor,
            output_split_sizes=[64],
            input_split_sizes=[64],
        ),
        "broadcast": lambda: dist.broadcast(tensor, 0),
    }
    problems = list[str]()
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, TypeError) as error:
            problems.append(f"{name}: {_first_line(error)}")
    return problems or "all taken"
