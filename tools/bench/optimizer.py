"""The optimizer step alone, against torch's own kernels on the same tensors.

50 million parameters with bfloat16 weights and FP32 gradients, masters and moments, as after a backward pass. The
steps are timed in turn, so that whatever disturbs the machine disturbs all of them:

    bare     torch's fused AdamW on the FP32 tensors: no scaling, no check, no norm, no clipping, no weights to round
    ours     ParallelAMPOptimizer.step: statistics, scaler, clipping, AdamW, rounding into the weights, clearing
    native   the same with native=True, if --native is given
    naive    the same work in separate passes: unscale and check, norm, count of zeros, clip, fused AdamW, round
    foreach  the same with torch's for-each AdamW
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.layout import attach_whole
from megaprec.optimizer import ParallelAMPOptimizer
from megaprec.plan import LossScaling, plan

WIDTH, SCALE, LR = 2048, 1024.0, 1e-4


def add_parser(subparsers: Any) -> None:
    """Adds `optimizer`."""
    parser = subparsers.add_parser("optimizer", help="time of the optimizer step", description=__doc__)
    parser.add_argument("--matrices", type=int, default=12, metavar="N", help=f"of {WIDTH} x {WIDTH} (default: 12)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="timed rounds (default: 9)")
    parser.add_argument("--native", action="store_true", help="time ours with native kernels too; needs a C compiler")
    parser.add_argument("--profile", action="store_true", help="print the operators of one step of ours by time")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs `python -m tools.bench optimizer`."""
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    steps = {"bare": bare(args.matrices), "ours": ours(args.matrices)}
    steps |= {"native": ours(args.matrices, native=True)} if args.native else {}
    steps |= {name: naive(args.matrices, name == "foreach") for name in ("naive", "foreach")}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 1):
        for name, (prepare, step) in steps.items():
            prepare()
            took = _seconds(step)
            seconds[name] += [took] if number else []  # the first is a warm-up
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    record: dict[str, Any] = {"parameters": args.matrices * WIDTH**2, "device": args.device, "threads": args.threads}
    record |= {"torch": torch.__version__, "extra_memory": _extra_memory(*steps["ours"], args.matrices)}
    record |= {f"{name}_ms": round(median * 1e3, 1) for name, median in medians.items()}
    record |= {
        "ours_over_bare": round(medians["ours"] / medians["bare"], 2),
        "naive_over_ours": round(medians["naive"] / medians["ours"], 2),
        "foreach_over_ours": round(medians["foreach"] / medians["ours"], 2),
    }
    if args.native:
        record["native_over_bare"] = round(medians["native"] / medians["bare"], 2)
        record["naive_over_native"] = round(medians["naive"] / medians["native"], 2)
    print(json.dumps(record), flush=True)
    if args.profile:
        prepare, step = steps["ours"]
        prepare()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            step()
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    return 0


def _seconds(step: Callable[[], object]) -> float:
    if torch.get_default_device().type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    step()
    if torch.get_default_device().type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _extra_memory(prepare: Callable[[], object], step: Callable[[], object], matrices: int) -> float | None:
    """Memory that a step of ours takes for a while, over the 18 bytes a parameter that it keeps; None if unknown."""
    prepare()
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if torch.get_default_device().type != "cpu" or not reset.exists():
        return None
    reset.write_text("5")  # Linux: forget the highest memory use so far
    before = _kilobytes(status, "VmRSS")
    step()
    return round((_kilobytes(status, "VmHWM") - before) * 1024 / (18 * matrices * WIDTH**2), 5)


def _kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{name}:"))


Timed = tuple[Callable[[], object], Callable[[], object]]  # what is done before each step, and the step


def _values(length: int, scale: float) -> Tensor:
    return torch.randn(length) * scale


def bare(matrices: int) -> Timed:
    """Torch's fused AdamW alone, on flat FP32 tensors."""
    weights, grads = _values(matrices * WIDTH**2, 0.02), _values(matrices * WIDTH**2, 1e-3)
    state = [torch.zeros_like(weights) for _ in range(2)]
    steps = torch.zeros(())

    def step() -> None:
        torch._fused_adamw_(
            [weights], [grads], [state[0]], [state[1]], [], [steps], lr=LR, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip

    return lambda: steps.add_(1), step


def ours(matrices: int, native: bool = False) -> Timed:
    """A whole step of `ParallelAMPOptimizer`."""
    model = nn.ParameterList(nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(matrices))
    for parameter in model:
        nn.init.normal_(parameter, std=0.02)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("bf16", LossScaling("constant", SCALE)), native=native)
    buffers = optimizer.all_buffers()
    grads = [_values(buffer.size, 1e-3 * SCALE) for buffer in buffers]
    loss = torch.tensor(1.0)

    def prepare() -> None:
        for buffer, values in zip(buffers, grads, strict=True):
            buffer.grads.copy_(values)

    return prepare, lambda: optimizer.step(LR, loss)


def naive(matrices: int, foreach: bool) -> Timed:
    """The same work, a pass for each part of it."""
    masters = [nn.Parameter(_values(WIDTH**2, 0.02).view(WIDTH, WIDTH)) for _ in range(matrices)]
    weights = [p.detach().bfloat16() for p in masters]
    grads = [_values(WIDTH**2, 1e-3 * SCALE).view(WIDTH, WIDTH) for _ in range(matrices)]
    optimizer = torch.optim.AdamW(
        masters, LR, (0.9, 0.95), weight_decay=0.1, **({"foreach": True} if foreach else {"fused": True})
    )
    for p in masters:
        p.grad = torch.empty_like(p)

    def prepare() -> None:
        for p, grad in zip(masters, grads, strict=True):
            assert p.grad is not None
            p.grad.copy_(grad)

    @torch.no_grad()
    def step() -> None:
        given = [p.grad for p in masters if p.grad is not None]
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(given, found, torch.tensor(1 / SCALE))
        if found:
            return
        torch.stack([g.numel() - torch.count_nonzero(g) for g in given]).sum().item()
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for p, weight in zip(masters, weights, strict=True):
            weight.copy_(p)

    return prepare, step
