"""The replay of a skipped step, which finds the micro-batch and the module in which it became
non-finite.

A skipped step changes no weight, and dropout depends only on the step's number and the samples, so
the replay computes the same gradients again. They are examined after each micro-batch and are never
reduced. Applied steps have no extra cost.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megaprec.diagnose.nonfinite_trace import Trace
from megaprec.optim.attribution import Onset
from megaprec.optim.step_report import Offender
from models.passes import Passes, Running, Share, require_steady_scales
from parallel.pipeline.instructions import Instruction, Message, Op


def trace_offenders(
    passes: Passes, offenders: Sequence[Offender], scale: float, skipped: Running
) -> tuple[Offender, ...]:
    """Run the skipped step again, with the loss scale it had, to find the origin of each offender.
    Collective."""
    optimizer = passes.optimizer
    run = passes.begin(skipped.given, skipped.step, torch.tensor(scale, device=optimizer.device))
    onset = Onset(offenders, optimizer.all_buffers(), run.loss)

    def look(instruction: Instruction) -> None:
        # Messages change no gradient. A moment counts micro-batches, and dp ranks within one.
        if Message.of(instruction) is None:
            onset.look(instruction.microbatch * optimizer.dp.size + optimizer.dp.rank)

    # Gradients are looked at and not reduced.
    program = [instruction for instruction in passes.program if instruction.op is not Op.REDUCE]
    with passes.gradients_aside(), passes.fp8.replayed():
        passes.executor(run, program, after=look).run()
    # Each dp rank knows only where its own share begins.
    first = torch.tensor([skipped.share.first], device=optimizer.device)
    first_samples = optimizer.dp.gather(first).tolist()
    moments = onset.agreed(optimizer.world)
    return tuple(
        _date_offender(offender, moment, first_samples, passes.micro_batch, passes.cp.size)
        for offender, moment in zip(offenders, moments, strict=True)
    )


def _date_offender(
    offender: Offender,
    moment: int | None,
    first_samples: Sequence[int],
    micro_batch: int,
    sharers: int,
) -> Offender:
    """Return the offender with its micro-batch and samples.

    moment: micro-batch times number of dp ranks plus dp rank; None: it did not become non-finite.
    first_samples: each dp rank's first sample in the global batch.
    micro_batch: samples of a micro-batch.
    sharers: neighbouring ranks of the optimizer's axis dp that share samples.
    """
    if moment is None:
        return replace(offender, traced=True)
    microbatch, dp_rank = divmod(moment, len(first_samples))
    first = first_samples[dp_rank] + microbatch * micro_batch
    return replace(
        offender,
        traced=True,
        microbatch=microbatch,
        dp_rank=dp_rank // sharers,
        samples=(first, first + micro_batch),
    )


def trace_modules(
    passes: Passes, share: Share, number: int, microbatch: int, scale: float
) -> Trace:
    """Run one micro-batch of step `number` alone, forward and backward, and observe all tensors in
    the model.

    For a model of one stage. No weight is changed and no gradient is left. Raises ValueError for
    more stages.
    """
    if passes.last:
        raise ValueError(f"a micro-batch is examined on one stage, not on {passes.last + 1}")
    require_steady_scales(passes.fp8, "look at a micro-batch alone")
    run = passes.begin(share, number, torch.tensor(scale, device=passes.optimizer.device))
    passes.fp8.roll()  # the replayed step has done this too
    with passes.gradients_aside(), passes.fp8.replayed(), Trace(passes.stages[0]) as trace:
        scaled = passes.forward(run, 0, microbatch, None)
        trace.look("the loss", run.loss)
        trace.look("the loss times its scale", scaled)
        scaled.backward()
    return trace
