"""The optimizer step alone, against torch's own kernels on the same tensors.

50 million parameters with bfloat16 weights and FP32 gradients, masters and moments, as after a
backward pass. The steps are timed in turn, so that whatever disturbs the machine disturbs all of
them:

    bare     torch's fused AdamW on the FP32 tensors: no scaling, no check, no norm, no clipping,
             no weights to round
    ours     ParallelAMPOptimizer.step: statistics, scaler, clipping, AdamW, rounding into the
             weights
    naive    the same work in separate passes: unscale and check, norm, count of zeros, clip, fused
             AdamW, round
    foreach  the same with torch's for-each AdamW
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.main_grad import begin_accumulation
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import LossScaling, plan
from tools.config.settings import Parallel

SCALE = 1024.0
LR = 1e-4
BUCKET = Parallel().bucket
# what is done before each step, and the step
Timed = tuple[Callable[[], object], Callable[[], object]]


def add_parser(subparsers: Any) -> None:
    """Add `optimizer` to the measurements."""
    parser = subparsers.add_parser(
        "optimizer", help="time of the optimizer step", description=__doc__
    )
    parser.add_argument(
        "--matrices", type=int, default=12, metavar="N", help="of width x width (default: 12)"
    )
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="(default: 2048)")
    parser.add_argument(
        "--bucket",
        type=int,
        default=BUCKET,
        metavar="N",
        help=f"parallel.bucket of a run (default: {BUCKET:_})",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--rounds", type=int, default=9, metavar="N", help="timed rounds (default: 9)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the operators of one step of ours by time"
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench optimizer`."""
    torch.set_num_threads(args.threads)
    with torch.device(args.device):
        steps = _steps(args)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(args.rounds + 1):
            for name, (prepare, step) in steps.items():
                prepare()
                duration = _seconds(step)
                if number > 0:  # the first is a warm-up
                    seconds[name].append(duration)
        parameters = args.matrices * args.width**2
        record: dict[str, Any] = {
            "parameters": parameters,
            "bucket": args.bucket,
            "device": args.device,
            "threads": args.threads,
            "torch": torch.__version__,
            "extra_memory": _extra_memory(*steps["ours"], parameters),
            **_compare(seconds),
        }
        print(json.dumps(record), flush=True)
        if args.profile:
            _profile(*steps["ours"])
    return 0


def _steps(args: argparse.Namespace) -> dict[str, Timed]:
    """Return the measured steps, by name."""
    sizes = args.matrices, args.width
    return {
        "bare": bare(*sizes),
        "ours": ours(*sizes, args.bucket),
        "naive": naive(*sizes, foreach=False),
        "foreach": naive(*sizes, foreach=True),
    }


def _compare(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return medians in ms, and their ratios."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    record = {f"{name}_ms": round(median * 1e3, 3) for name, median in medians.items()}
    for name, other in [("ours", "bare"), ("naive", "ours"), ("foreach", "ours")]:
        record[f"{name}_over_{other}"] = round(medians[name] / medians[other], 2)
    return record


def _profile(prepare: Callable[[], object], step: Callable[[], object]) -> None:
    prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def _seconds(step: Callable[[], object]) -> float:
    if torch.get_default_device().type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    step()
    if torch.get_default_device().type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _extra_memory(
    prepare: Callable[[], object], step: Callable[[], object], parameters: int
) -> float | None:
    """Return the temporary memory of a step, beyond the 18 bytes a parameter that stay; None if
    unknown."""
    prepare()
    reset = Path("/proc/self/clear_refs")
    status = Path("/proc/self/status")
    if torch.get_default_device().type != "cpu" or not reset.exists():
        return None
    reset.write_text("5")  # Linux: forget the highest memory use so far
    before = _kilobytes(status, "VmRSS")
    step()
    return round((_kilobytes(status, "VmHWM") - before) * 1024 / (18 * parameters), 5)


def _kilobytes(status: Path, name: str) -> int:
    return next(
        int(line.split()[1])
        for line in status.read_text().splitlines()
        if line.startswith(f"{name}:")
    )


def _values(length: int, scale: float) -> Tensor:
    return torch.randn(length) * scale


def bare(matrices: int, width: int) -> Timed:
    """Return a step of torch's fused AdamW alone, on flat FP32 tensors."""
    weights = _values(matrices * width**2, 0.02)
    grads = _values(matrices * width**2, 1e-3)
    state = [torch.zeros_like(weights) for _ in range(2)]
    steps = torch.zeros(())

    def step() -> None:
        torch._fused_adamw_(
            [weights],
            [grads],
            [state[0]],
            [state[1]],
            [],
            [steps],
            lr=LR,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    return lambda: steps.add_(1), step


def ours(matrices: int, width: int, bucket: int = BUCKET) -> Timed:
    """Return a whole step of `ParallelAMPOptimizer`."""
    model = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(matrices))
    for parameter in model:
        nn.init.normal_(parameter, std=0.02)
    attach_whole(model)
    precision = plan("bf16", LossScaling("constant", SCALE))
    optimizer = ParallelAMPOptimizer([model], precision, bucket=bucket)
    buffers = optimizer.all_buffers()
    grads = [_values(buffer.size, 1e-3 * SCALE) for buffer in buffers]
    loss = torch.tensor(1.0)

    def prepare() -> None:
        for buffer, values in zip(buffers, grads, strict=True):
            buffer.grads.copy_(values)
            for parameter in buffer.parameters:
                begin_accumulation(parameter)

    return prepare, lambda: optimizer.step(LR, loss)


def naive(matrices: int, width: int, foreach: bool) -> Timed:
    """Return a step that does the same work in separate passes."""
    masters = [nn.Parameter(_values(width**2, 0.02).view(width, width)) for _ in range(matrices)]
    weights = [master.detach().bfloat16() for master in masters]
    grads = [_values(width**2, 1e-3 * SCALE).view(width, width) for _ in range(matrices)]
    optimizer = torch.optim.AdamW(
        masters,
        LR,
        (0.9, 0.95),
        weight_decay=0.1,
        **({"foreach": True} if foreach else {"fused": True}),
    )
    for master in masters:
        master.grad = torch.empty_like(master)

    def prepare() -> None:
        for master, grad in zip(masters, grads, strict=True):
            assert master.grad is not None
            master.grad.copy_(grad)

    @torch.no_grad()
    def step() -> None:
        with_grad = [master.grad for master in masters if master.grad is not None]
        found_inf = torch.zeros(())
        inverse_scale = torch.tensor(1 / SCALE)
        torch._amp_foreach_non_finite_check_and_unscale_(with_grad, found_inf, inverse_scale)
        if found_inf:
            return
        zeros = [grad.numel() - torch.count_nonzero(grad) for grad in with_grad]
        torch.stack(zeros).sum().item()
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master)

    return prepare, step
