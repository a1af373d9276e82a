"""Kernels that exist on this device: each is called on small tensors and compared with plain
products.

A name in torch says little: a kernel may refuse this device, or compute wrongly on it. A kernel
that is not here is no fault where the code does without; it is one if the run asks for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.fp8.matmul import chosen
from tools.doctor.finding import Finding, not_tried, ok, wrong
from tools.doctor.place import Place

REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
TOLERANCE = 0.02  # relative, of bf16 products
HERE = "here"
ABSENT = "absent"
FAULTY = "faulty"
Tried = tuple[str, str]  # HERE, ABSENT or FAULTY, and why


def probe(place: Place) -> dict[str, Any]:
    """Try all kernels on the first rank of each host; the others return nothing."""
    if place.local:
        return {}
    device = torch.device(place.device)
    tried = {name: kernel(device) for name, kernel in KERNELS.items()}
    return {"host": place.host, "device": place.device, "tried": tried}


def _flash(device: torch.device) -> Tried:
    """Return if torch's flash attention computes what the plain formula does."""
    q, k, v = (_numbers((2, 4, 128, 64), seed, device) for seed in range(3))

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    scores = q.double() @ k.double().transpose(-1, -2) / 8.0
    mask = torch.ones(128, 128, dtype=torch.bool, device=device).tril()
    return _compared(flash, scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.double())


def _grouped(device: torch.device) -> Tried:
    """Return if torch's grouped products, one for each expert, are right."""
    a = _numbers((64, 32), 0, device)
    b = _numbers((2, 32, 48), 1, device)
    ends = torch.tensor([16, 64], dtype=torch.int32, device=device)
    right = torch.cat([a[:16].double() @ b[0].double(), a[16:].double() @ b[1].double()])
    return _compared(lambda: torch._grouped_mm(a, b, offs=ends), right)


def _fp8(device: torch.device) -> Tried:
    """Return if products of FP8 codes with one scale each are here."""
    return _chosen("current", device)


def _mx(device: torch.device) -> Tried:
    """Return if products of FP8 codes with MX scales are here."""
    return _chosen("mx", device)


def _chosen(kind: Any, device: torch.device) -> Tried:
    kernel, why = chosen(kind, torch.float8_e4m3fn, False, torch.bfloat16, device)
    if kernel is not None:
        return HERE, ""
    return (FAULTY if "is wrong by" in why else ABSENT), why


def _numbers(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        device, torch.bfloat16
    )


def _compared(kernel: Callable[[], Tensor], right: Tensor) -> Tried:
    try:
        made = kernel().double()
    except REFUSALS as error:
        return ABSENT, str(error).splitlines()[0]
    off = float((made - right).norm() / right.norm())
    return (HERE, "") if off < TOLERANCE else (FAULTY, f"wrong by {off:.1%}")


KERNELS: dict[str, Callable[[torch.device], Tried]] = {
    "flash attention": _flash,
    "grouped products": _grouped,
    "FP8 products": _fp8,
    "MX products": _mx,
}


def judge(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the finding about each kernel."""
    hosts = [one for one in answers if one]
    for name in KERNELS:
        yield from _kernel(name, hosts)


def _kernel(name: str, hosts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    states = {one["host"]: tuple(one["tried"][name]) for one in hosts}
    faulty = [host for host, (state, _) in states.items() if state == FAULTY]
    absent = [host for host, (state, _) in states.items() if state == ABSENT]
    for host in faulty:
        yield wrong(
            "kernels",
            f"{name} on {host}: {states[host][1]}",
            "update torch and the driver; report it to torch",
        )
    if faulty:
        return
    if absent and len(absent) < len(states):
        said = (
            f"{name} are not on {', '.join(absent)}, but on the others: ranks would compute "
            "differently"
        )
        yield wrong("kernels", said, "install the same torch and driver, and use GPUs of one kind")
    elif absent:
        yield not_tried("kernels", f"{name}: not on this device: {states[absent[0]][1]}")
    else:
        yield ok(
            "kernels",
            f"{name}: here, and right on this {'GPU' if hosts[0]['device'] == 'cuda' else 'CPU'}",
        )
