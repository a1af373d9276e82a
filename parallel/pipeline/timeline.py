"""Recorded times of the instructions of a real step, on all ranks of a pipeline, on one clock.

Clocks of different machines need not agree, so each rank measures from the moment at which it
leaves a barrier of the pipeline; ranks leave the barrier within the time that a small message
takes.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch

from megaprec.comm.axis import Axis
from parallel.pipeline.executor import Executor, PassObserver
from parallel.pipeline.instructions import Instruction
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span


@dataclass
class Recording(PassObserver):
    """The time span of each instruction of one step, in seconds of this process's clock: an
    observer of the executor that runs it. Made by `Recording.start`.

    A GPU is synchronized after each instruction; otherwise the spans would be launch times.
    """

    pp: Axis
    zero: float
    spans: list[Span] = field(default_factory=list)
    _begin: float = 0.0  # of the instruction under way

    @staticmethod
    def start(pp: Axis) -> "Recording":
        """Start a recording. Collective over `pp`, the pipeline axis."""
        pp.barrier()
        return Recording(pp, perf_counter())

    def before(self, executor: Executor, instruction: Instruction) -> None:
        self._begin = perf_counter()

    def after(self, executor: Executor, instruction: Instruction) -> None:
        _synchronize(executor.links.device)
        span = Span(executor.links.axis.rank, instruction, self._begin, perf_counter())
        self.spans.append(span)

    def gather(self, schedule: Schedule, device: torch.device) -> list[Span]:
        """Return the spans of all ranks, in seconds from the start of the recording. Collective
        over the pipeline axis.

        schedule: whose programs were recorded. device: on which the axis communicates.
        """
        # all ranks gather equally many rows: those of shorter programs are padded with zeros
        most_instructions = max(map(len, schedule.programs))
        times = torch.zeros(most_instructions, 2, dtype=torch.float64, device=device)
        own_times = [(span.start - self.zero, span.end - self.zero) for span in self.spans]
        times[: len(own_times)] = torch.tensor(own_times, dtype=torch.float64)
        times_of_ranks = self.pp.gather(times).view(self.pp.size, -1, 2).tolist()
        spans = []
        for rank, program in enumerate(schedule.programs):
            # not strict, because of the padding
            for instruction, (start, end) in zip(program, times_of_ranks[rank], strict=False):
                spans.append(Span(rank, instruction, start, end))
        return spans


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished the computation it was given.

    Messages in flight are not waited for, because they may depend on later work.
    """
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
