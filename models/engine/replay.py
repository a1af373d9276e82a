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
from models.engine.passes import Passes, Running, Share, require_steady_scales
from parallel.pipeline.instructions import Instruction, Message, Op


def trace_offenders(
    passes: Passes, offenders: Sequence[Offender], scale: float, skipped: Running
) -> tuple[Offender, ...]:
    """Run the skipped step again, with the loss scale it had, to find the origin of each offender.
    Collective."""
    optimizer = passes.optimizer
    loss_scale = torch.tensor(scale, device=optimizer.device)
    run = passes.begin(skipped.full_share, skipped.step, loss_scale)
    onset = Onset(offenders, optimizer.all_buffers(), run.loss)

    def look(i: Instruction) -> None:
        if Message.of(i) is None:
            onset.look(i.microbatch * optimizer.dp.size + optimizer.dp.rank)

    program = [i for i in passes.program if i.op is not Op.REDUCE]
    with passes.gradients_aside(), passes.fp8.replayed():
        passes.executor(run, program, after=look).run()
    first = torch.tensor([skipped.share.first], device=optimizer.device)
    firsts = optimizer.dp.gather(first).tolist()
    moments = onset.agreed(optimizer.world)
    return tuple(
        _with_origin(offender, moment, firsts, passes)
        for offender, moment in zip(offenders, moments, strict=True)
    )


def _with_origin(
    offender: Offender, moment: int | None, firsts: Sequence[int], passes: Passes
) -> Offender:
    """Return the offender with its micro-batch and samples.

    moment: micro-batch * dp ranks + dp rank after which it was not finite first; None if it stayed
        finite.
    firsts: each dp rank's first sample in the global batch.
    """
    if moment is None:
        return replace(offender, traced=True)
    microbatch, dp_rank = divmod(moment, len(firsts))
    first = firsts[dp_rank] + microbatch * passes.micro_batch
    # neighbouring ranks of the optimizer's dp share samples if these are cut over cp
    replica = dp_rank // passes.cp.size
    samples = first, first + passes.micro_batch
    return replace(offender, traced=True, microbatch=microbatch, dp_rank=replica, samples=samples)


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
