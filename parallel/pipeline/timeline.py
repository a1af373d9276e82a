"""Recorded times of the instructions of a real step, on all ranks of a pipeline, on one clock.

Clocks of different machines need not agree, so each rank measures from the moment at which it
leaves a barrier of the pipeline; ranks leave the barrier within the time that a small message
takes.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch

from megaprec.comm.axis import Axis
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import Span


@dataclass
class Recording:
    """The recording of one step: pass `spans` to the executor that runs the step. Made by
    `Recording.start`."""

    pp: Axis
    zero: float
    spans: list[Span] = field(default_factory=list)

    @staticmethod
    def start(pp: Axis) -> "Recording":
        """Start a recording. Collective over `pp`, the pipeline axis."""
        pp.barrier()
        return Recording(pp, perf_counter())

    def gather(self, schedule: Schedule, device: torch.device) -> list[Span]:
        """Return the spans of all ranks, in seconds from the start. Collective over the pipeline
        axis."""
        times = torch.zeros(max(map(len, schedule.programs)), 2, dtype=torch.float64, device=device)
        local = [(span.start - self.zero, span.end - self.zero) for span in self.spans]
        times[: len(local)] = torch.tensor(local, dtype=torch.float64)
        # all ranks gather as many rows: those of shorter programs are padded with zeros
        times_of_ranks = self.pp.gather(times).view(self.pp.size, -1, 2).tolist()
        spans = []
        for rank, program in enumerate(schedule.programs):
            # not strict, because of the padding
            for instruction, (start, end) in zip(program, times_of_ranks[rank], strict=False):
                spans.append(Span(rank, instruction, start, end))
        return spans
