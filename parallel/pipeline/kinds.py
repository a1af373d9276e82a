"""The kinds of pipeline schedules by name, with what others must know of each: one row a kind.

Costs with p ranks and m micro-batches (F, I, W: time of a forward, an input gradient, a weight
gradient):

    kind         stages a rank  idle time of a rank      activations held by a rank, at most
    gpipe        1              (p - 1)(F + I + W)       m micro-batches
    1f1b         1              (p - 1)(F + I + W)       p
    interleaved  v              (p - 1)(F + I + W) / v   p + (p - 1) / v, or a little more
    zb-h1        1              (p - 1)(F + I - W)       p
    zb-h2        1              (p - 1)(F + I - 2 W)     2 p - 1
    zb-v         2              0 (F = I = W)            p
    dualpipe-v   2              (p - 1)(F + I - W) / 2   p + 1/2

The little more of interleaved schedules is there if p does not divide m. The idle time of
dualpipe-v is that for F = I = W. DeepSeek says (p - 1)(F&B + B - 3 W) of stages half as large,
where F&B is a forward and a backward at the same time, whose results leave at the end of both. Here
a forward sends its result before the backward begins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaprec.errors import Problem, UserError
from parallel.pipeline.builders import (
    dualpipe_v,
    equal,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from parallel.pipeline.formulas import Formula
from parallel.pipeline.instructions import Cost
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import simulate

# forward passes of a step; building and checking a schedule takes about 0.1 ms for each
MOST_PASSES = 2**16
# more are a slip: a rank would pass each of them through its stages one after the other
MOST_MICROBATCHES = 2**14


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of pipeline schedule.

    build: makes the schedule of (ranks, micro-batches, chunks, cost); all builders take the same
        arguments, also those that their kind has no use for.
    bubble: the longest wait of a rank between its first and last instruction, over the time it
        computes.
    held: the largest number of micro-batches whose activations, of all its stages, a rank holds.
    chunks: the number of stages on each rank; with any_chunks the default, which may be changed.
    splits_backward: whether input and weight gradients, of all micro-batches or of some, are
        instructions of their own; the builder may place weight gradients by their cost.
    keeps_all: whether a rank holds the activations of all micro-batches at once.
    is_1f1b: whether it is 1F1B over one or several stages a rank: a planner may take one such kind
        for another.
    until_regular, period: functions of the number of ranks that return numbers of micro-batches.
        From `until_regular` micro-batches on, each further `period` of them make the step longer by
        the same time.
    """

    build: Callable[[int, int, int, Cost], Schedule]
    bubble: Formula
    held: Formula
    chunks: int = 1
    any_chunks: bool = False
    splits_backward: bool = False
    keeps_all: bool = False
    is_1f1b: bool = False
    until_regular: Callable[[int], int] = lambda ranks: 2 * ranks
    period: Callable[[int], int] = lambda ranks: ranks


# of schedules that fill the pipeline once and drain it once
_FULL = Formula("(p - 1) / m", lambda s: (s.p - 1) / s.m)
_DEPTH = Formula("p", lambda s: min(s.p, s.m))

KINDS: Mapping[str, ScheduleKind] = {
    "gpipe": ScheduleKind(
        gpipe,
        bubble=_FULL,
        held=Formula("m", lambda s: s.m),
        keeps_all=True,
        until_regular=lambda ranks: ranks + 4,
        period=lambda ranks: 8,
    ),
    "1f1b": ScheduleKind(
        one_f_one_b,
        bubble=_FULL,
        held=_DEPTH,
        is_1f1b=True,
        until_regular=lambda ranks: ranks + 4,
        period=lambda ranks: 8,
    ),
    # takes micro-batches in groups of as many as there are ranks
    "interleaved": ScheduleKind(
        interleaved,
        bubble=Formula("(p - 1) / (v m)", lambda s: (s.p - 1) / (s.v * s.m)),
        held=Formula("p + (p - 1) / v", lambda s: min(s.p + (s.p - 1) / s.v, s.m)),
        chunks=2,
        any_chunks=True,
        is_1f1b=True,
    ),
    "zb-h1": ScheduleKind(
        zb_h1,
        bubble=Formula(
            "(p - 1)(F + I - W) / (m (F + I + W))",
            lambda s: (s.p - 1) * (s.F + s.I - s.W) / s.work,
        ),
        held=_DEPTH,
        splits_backward=True,
    ),
    "zb-h2": ScheduleKind(
        zb_h2,
        bubble=Formula(
            "(p - 1)(F + I - 2 W) / (m (F + I + W))",
            lambda s: (s.p - 1) * max(0, s.F + s.I - 2 * s.W) / s.work,
        ),
        held=Formula("2 p - 1", lambda s: min(2 * s.p - 1, s.m)),
        splits_backward=True,
    ),
    "zb-v": ScheduleKind(
        zb_v, bubble=Formula("0", lambda s: 0.0), held=_DEPTH, chunks=2, splits_backward=True
    ),
    "dualpipe-v": ScheduleKind(
        dualpipe_v,
        bubble=Formula(
            "(p - 1)(F + I - W) / (2 m (F + I + W))",
            lambda s: (s.p - 1) * (s.F + s.I - s.W) / (2 * s.work),
        ),
        held=Formula("p + 1/2", lambda s: min(s.p + 0.5, s.m)),
        chunks=2,
        splits_backward=True,
    ),
}


def schedule(
    kind: str,
    ranks: int,
    microbatches: int,
    chunks: int = 0,
    cost: Cost = equal,
) -> Schedule:
    """Return the schedule named `kind`, a key of `KINDS`.

    chunks: stages on each rank; 0: the default of the kind.
    cost: the time of each instruction, by which weight gradients are placed; as if all costs were
        equal, if that schedule ends earlier.
    Raises UserError that lists every argument that does not fit.
    """
    if problems := schedule_problems(kind, ranks, microbatches, chunks):
        raise UserError(*problems)
    build = KINDS[kind].build
    chunks = chunks or KINDS[kind].chunks
    of_equal_costs = build(ranks, microbatches, chunks, equal)
    # without split backwards there is nothing to place
    if not KINDS[kind].splits_backward or cost is equal:
        return of_equal_costs
    of_cost = build(ranks, microbatches, chunks, cost)

    def step_time(candidate: Schedule) -> float:
        return max(span.end for span in simulate(candidate, cost))

    # the first one if both take as long
    return min((of_cost, of_equal_costs), key=step_time)


def schedule_problems(
    kind: str,
    ranks: int,
    microbatches: int,
    chunks: int = 0,
) -> list[Problem]:
    """Return the problems with the arguments of `schedule`, without building it."""
    counts = {"pipeline ranks": ranks, "micro-batches": microbatches}
    problems = [
        Problem.of("pipeline.count_below_one", name=name, count=count)
        for name, count in counts.items()
        if count < 1
    ]
    problems += chunk_problems(kind, chunks)
    if microbatches > MOST_MICROBATCHES:
        problems.append(
            Problem.of(
                "pipeline.too_many_microbatches", count=microbatches, limit=MOST_MICROBATCHES
            )
        )
    # the product below is of valid numbers only
    if problems:
        return problems
    stages_of_rank = chunks or KINDS[kind].chunks
    passes = ranks * stages_of_rank * microbatches
    if passes > MOST_PASSES:
        problems.append(
            Problem.of(
                "pipeline.too_many_passes",
                ranks=ranks,
                stages=stages_of_rank,
                microbatches=microbatches,
                passes=passes,
                limit=MOST_PASSES,
            )
        )
    return problems


def chunk_problems(kind: str, chunks: int) -> list[Problem]:
    """Return the problems with `chunks` stages on each rank in a schedule of this kind, or with the
    kind itself."""
    if kind not in KINDS:
        return [Problem.of("pipeline.no_such_kind", kind=kind, kinds=", ".join(KINDS))]
    if chunks < 0:
        return [Problem.of("pipeline.chunks_below_one", chunks=chunks, kind=kind)]
    needed = KINDS[kind].chunks
    if chunks in (0, needed) or KINDS[kind].any_chunks:
        return []
    return [Problem.of("pipeline.other_chunks", kind=kind, needed=needed, chunks=chunks)]
