"""The replay of a skipped step, which finds where it became non-finite: micro-batch and module.

A skipped step changes no weight, and dropout depends only on the step's number and the samples, so
the replay computes the same gradients again. They are examined after each micro-batch and are never
reduced. Applied steps have no extra cost.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megaprec.comm.axis import Axis
from megaprec.diagnose.nonfinite_trace import Trace
from megaprec.diagnose.position import Phase
from megaprec.optim.decision.attribution import Onset
from megaprec.optim.decision.step_report import Offender
from models.engine.passes import Passes, PassState, Share, require_steady_scales
from parallel.pipeline.executor import Executor, PassObserver
from parallel.pipeline.instructions import Instruction, Message, Op


class _OnsetObserver(PassObserver):
    """Looks for the onset after each instruction that computes."""

    def __init__(self, onset: Onset, dp: Axis) -> None:
        self.onset = onset
        self.dp = dp

    def after(self, executor: Executor, instruction: Instruction) -> None:
        # transfers compute nothing
        if Message.of(instruction) is None:
            # one number for both, which orders the micro-batches of all dp ranks
            moment = instruction.microbatch * self.dp.size + self.dp.rank
            self.onset.look(moment)


def trace_offenders(
    passes: Passes,
    offenders: Sequence[Offender],
    scale: float,
    skipped: PassState,
) -> tuple[Offender, ...]:
    """Run the skipped step again, with the loss scale it had. Return its offenders with their
    origin: the micro-batch, the dp rank and the samples after which each was first not finite.
    Collective over the world.

    skipped: the state of the step's passes.
    """
    # it may take longer than a step: it has a time limit of its own
    with passes.position.in_phase(Phase.REPLAY):
        onset = _run_again(passes, offenders, scale, skipped)
        first_sample = torch.tensor([skipped.share.first], device=passes.optimizer.device)
        first_samples = passes.optimizer.dp.gather(first_sample).tolist()
        moments = onset.agreed(passes.optimizer.world)
    traced = [
        _with_origin(offender, moment, first_samples, passes)
        for offender, moment in zip(offenders, moments, strict=True)
    ]
    return tuple(traced)


def _run_again(
    passes: Passes,
    offenders: Sequence[Offender],
    scale: float,
    skipped: PassState,
) -> Onset:
    """Run the passes of the skipped step again. Return the onset that this rank has seen of each
    offender: when it was first not finite."""
    # All gradients have memory here: under ZeRO-2, where they have not, no step is replayed.
    optimizer = passes.optimizer
    loss_scale = torch.tensor(scale, device=optimizer.device)
    state = passes.begin(skipped.full_share, skipped.step, loss_scale)
    onset = Onset(offenders, optimizer.all_buffers(), state.loss)
    # Gradients that are reduced would no longer tell the ranks apart.
    program = [instruction for instruction in passes.program if instruction.op is not Op.REDUCE]
    with passes.scratch_gradients(), passes.fp8.replayed():
        passes.make_executor(state, program, [_OnsetObserver(onset, optimizer.dp)]).run()
    return onset


def _with_origin(
    offender: Offender,
    moment: int | None,
    first_samples: Sequence[int],
    passes: Passes,
) -> Offender:
    """Return the offender with its micro-batch, dp rank and samples.

    moment: when it was first not finite: after micro-batch m of dp rank r, as the number
        m * dp ranks + r; None if it stayed finite.
    first_samples: the number of the first sample of each dp rank in the global batch.
    """
    if moment is None:
        return replace(offender, traced=True)
    microbatch, dp_rank = divmod(moment, len(first_samples))
    first = first_samples[dp_rank] + microbatch * passes.micro_batch
    return replace(
        offender,
        traced=True,
        microbatch=microbatch,
        # Neighbouring ranks of the optimizer's dp share samples if these are cut over cp.
        dp_rank=dp_rank // passes.cp.size,
        samples=(first, first + passes.micro_batch),
    )


def trace_modules(
    passes: Passes,
    share: Share,
    number: int,
    microbatch: int,
    scale: float,
) -> Trace:
    """Run one micro-batch of step `number` alone, forward and backward, and return what was seen of
    inf and NaN in all tensors in the model.

    scale: the loss scale. No weight is changed and no gradient is left. Raises ValueError for a
    model of several stages.
    """
    if passes.last_stage:
        raise ValueError(f"a micro-batch is examined on one stage, not on {passes.last_stage + 1}")
    require_steady_scales(passes.fp8, "look at a micro-batch alone")
    state = passes.begin(share, number, torch.tensor(scale, device=passes.optimizer.device))
    # the scales of FP8 as at the start of the step
    passes.fp8.roll()
    # No executor: the instructions of one micro-batch on one stage are its two passes.
    with passes.scratch_gradients(), passes.fp8.replayed(), Trace(passes.stages[0]) as trace:
        scaled = passes.forward(state, 0, microbatch, None)
        trace.look("the loss", state.loss)
        trace.look("the loss times its scale", scaled)
        scaled.backward()
    return trace
