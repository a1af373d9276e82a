"""The optimizer step alone, against torch's own kernels on the same tensors.

50 million parameters with bfloat16 weights and FP32 gradients, masters and moments, as after a
backward pass. The steps are timed in turn, so that whatever disturbs the machine disturbs all of
them:

    bare     torch's fused AdamW on the FP32 tensors: no scaling, no check, no norm, no clipping,
             no weights to round
    ours     ParallelAMPOptimizer.step: statistics, scaler, clipping, AdamW, rounding into the
             weights; on a GPU compiled into two passes, as in a run
    naive    the same work in separate passes: unscale and check, norm, count of zeros, clip, fused
             AdamW, round
    foreach  the same with torch's for-each AdamW
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.comm.main_grad import begin_accumulation
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import AdamW
from megaprec.precision.plan import LossScaling, plan
from parallel.leaves import Leaves
from tools.bench.measurement import (
    Step,
    add_integers,
    extra_bytes,
    print_profile,
    print_record,
    seconds_in_turn,
)
from tools.config.tables.settings import Parallel
from tools.training.compiling import one_pass_calls, try_calls

SCALE = 1024.0
LEARNING_RATE = 1e-4
BUCKET = Parallel().bucket
PRECISION = plan("bf16", LossScaling("constant", SCALE))
RULE = AdamW()
SUBJECT = "time of the optimizer step"
RATIOS = (
    ("ours", "bare"),
    ("naive", "ours"),
    ("foreach", "ours"),
)


@dataclass(frozen=True)
class TimedStep:
    """A step that is timed. prepare: what is done before it, and is not."""

    prepare: Step
    step: Step


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_integers(
        parser,
        {
            "matrices": (12, "of width x width"),
            "width": (2048, "of a matrix"),
            "bucket": (BUCKET, "parallel.bucket of a run"),
            "threads": (1, "of the process"),
            "rounds": (9, "timed steps of each kind"),
        },
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--profile", action="store_true", help="print the operators of one step of ours by time"
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench optimizer`; return the exit code."""
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    sizes = (args.matrices, args.width)
    leaves = compiled_update(device.type)
    # tensors are made on the device
    with device:
        timed_steps = {
            "bare": bare(*sizes),
            "ours": ours(*sizes, args.bucket, leaves),
            "naive": naive(*sizes, foreach=False),
            "foreach": naive(*sizes, foreach=True),
        }
        prepare = {name: timed.prepare for name, timed in timed_steps.items()}
        steps = {name: timed.step for name, timed in timed_steps.items()}
        medians = seconds_in_turn(steps, args.rounds, device, prepare)
        num_parameters = args.matrices * args.width**2
        record = {
            "parameters": num_parameters,
            "bucket": args.bucket,
            "device": args.device,
            "threads": args.threads,
            "torch": torch.__version__,
            "extra_memory": _extra_memory(timed_steps["ours"], num_parameters),
        }
        if leaves is not None:
            record |= {"compiled": leaves.names, "uncompiled_calls": dict(leaves.misses)}
        print_record(record | _compare(medians))
        if args.profile:
            timed_steps["ours"].prepare()
            print_profile(timed_steps["ours"].step, rows=20)
    return 0


def _compare(medians: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each step in ms, and their ratios."""
    record = {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in medians.items()}
    for name, other_name in RATIOS:
        ratio = medians[name] / medians[other_name]
        record[f"{name}_over_{other_name}"] = round(ratio, 2)
    return record


def _extra_memory(timed: TimedStep, num_parameters: int) -> float | None:
    """Return the temporary memory of a step, as a share of the 18 bytes a parameter that stay; None
    if it is not known.
    """
    timed.prepare()
    # on a GPU this share is not measured
    device = torch.get_default_device()
    extra = extra_bytes(timed.step, device) if device.type == "cpu" else None
    if extra is None:
        return None
    # bf16 weights, and FP32 gradients, masters and two moments
    lasting_bytes = (2 + 4 * 4) * num_parameters
    return round(extra / lasting_bytes, 5)


def _random(length: int, scale: float) -> Tensor:
    return torch.randn(length) * scale


def bare(matrices: int, width: int) -> TimedStep:
    """Return a step of torch's fused AdamW alone, on flat FP32 tensors."""
    weights = _random(matrices * width**2, 0.02)
    gradients = _random(matrices * width**2, 1e-3)
    first_moment = torch.zeros_like(weights)
    second_moment = torch.zeros_like(weights)
    steps = torch.zeros(())

    def step() -> None:
        torch._fused_adamw_(
            [weights],
            [gradients],
            [first_moment],
            [second_moment],
            [],  # of AMSGrad, which is off
            [steps],
            lr=LEARNING_RATE,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    # The kernel takes the count of steps for AdamW's correction of the bias, and leaves it.
    return TimedStep(lambda: steps.add_(1), step)


def compiled_update(device_type: str) -> Leaves | None:
    """Return the compiled statistics and update that a run on this type of device has; None on a
    CPU, where it has none."""
    if device_type == "cpu":
        return None
    calls = [call.on(device_type) for call in one_pass_calls(PRECISION, RULE)]
    forms, reasons = try_calls(calls)
    compiled_names = {call.name for call in forms} - reasons.keys()
    forms = {call: form for call, form in forms.items() if call.name in compiled_names}
    return Leaves(forms, ", ".join(sorted(compiled_names)))


def ours(
    matrices: int, width: int, bucket: int = BUCKET, leaves: Leaves | None = None
) -> TimedStep:
    """Return a whole step of `ParallelAMPOptimizer`. leaves: its compiled parts, if it has any."""
    model = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(matrices))
    for parameter in model:
        nn.init.normal_(parameter, std=0.02)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], PRECISION, rule=RULE, bucket=bucket, leaves=leaves)
    buffers = optimizer.all_buffers()
    gradients = [_random(buffer.size, 1e-3 * SCALE) for buffer in buffers]
    loss = torch.tensor(1.0)  # any: it is checked and reported

    def prepare() -> None:
        for buffer, values in zip(buffers, gradients, strict=True):
            buffer.grads.copy_(values)
            # As a backward pass leaves them: their gradients are there.
            for parameter in buffer.parameters:
                begin_accumulation(parameter)

    return TimedStep(prepare, lambda: optimizer.step(LEARNING_RATE, loss))


def naive(matrices: int, width: int, foreach: bool) -> TimedStep:
    """Return a step that does the same work in separate passes. foreach: AdamW is torch's for-each
    one, not the fused one."""
    masters = list[nn.Parameter]()
    gradients = list[Tensor]()
    for _ in range(matrices):
        master = _random(width**2, 0.02)
        gradient = _random(width**2, 1e-3 * SCALE)
        masters.append(nn.Parameter(master.view(width, width)))
        gradients.append(gradient.view(width, width))
    weights = [master.detach().bfloat16() for master in masters]
    optimizer = torch.optim.AdamW(
        masters,
        LEARNING_RATE,
        (0.9, 0.95),
        weight_decay=0.1,
        foreach=foreach,
        fused=not foreach,
    )
    for master in masters:
        master.grad = torch.empty_like(master)

    def prepare() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            assert master.grad is not None
            master.grad.copy_(gradient)

    @torch.no_grad()
    def step() -> None:
        with_grad = [master.grad for master in masters if master.grad is not None]
        found_inf = torch.zeros(())
        inverse_scale = torch.tensor(1 / SCALE)
        torch._amp_foreach_non_finite_check_and_unscale_(with_grad, found_inf, inverse_scale)
        # The host waits here, as in torch's GradScaler.
        if found_inf:
            return
        zeros = [gradient.numel() - torch.count_nonzero(gradient) for gradient in with_grad]
        torch.stack(zeros).sum().item()  # for a report: our step counts them too
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master)

    return TimedStep(prepare, step)
