"""The pipeline schedule of [parallel]: built by its kind for the run's micro-batches, or read from
a file."""

import sys
from functools import lru_cache
from pathlib import Path

from megaprec.errors import UserError
from megaprec.parsing import read_text
from parallel.pipeline.builders import equal
from parallel.pipeline.instructions import Cost
from parallel.pipeline.kinds import KINDS, chunk_problems, schedule, schedule_problems
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.verify import check
from tools.config.tables.settings import Parallel

# forward passes of a schedule whose building takes so long that a line says so
ANNOUNCED_PASSES = 4096


# a search for layouts has schedules of each number of stages
@lru_cache(maxsize=64)
def equal_schedule(kind: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule for stages of equal cost. It is built once."""
    return schedule(kind, pipeline, microbatches, chunks)


@lru_cache(maxsize=8)
def plan_equal(kind: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule for stages of equal cost, and announce it if it takes some seconds to
    build."""
    passes = pipeline * microbatches * (chunks or 1)
    if passes > ANNOUNCED_PASSES and not schedule_problems(kind, pipeline, microbatches, chunks):
        print(f"planning a schedule of {passes:,} forward passes", file=sys.stderr, flush=True)
    return equal_schedule(kind, pipeline, microbatches, chunks)


def pipeline_schedule(
    parallel: Parallel, microbatches: int, cost: Cost = equal, quiet: bool = False
) -> Schedule:
    """Return the schedule of [parallel], planned for this cost. Raises UserError that names the
    keys.

    quiet: a schedule that takes seconds is not announced.
    """
    if parallel.schedule_file:
        return _schedule_of_file(parallel, microbatches)
    # otherwise the builder would raise without the name of the key
    _require_chunks(parallel)
    kind = parallel.schedule
    pipeline = parallel.pipeline
    # only schedules of split backward passes are planned by cost
    if cost is equal or not KINDS[kind].splits_backward:
        build = equal_schedule if quiet else plan_equal
        return build(kind, pipeline, microbatches, parallel.chunks)
    return schedule(kind, pipeline, microbatches, parallel.chunks, cost)


def _require_chunks(parallel: Parallel) -> None:
    """Raise UserError if the schedule cannot have so many stages per rank."""
    if problems := chunk_problems(parallel.schedule, parallel.chunks):
        raise UserError(*(f"parallel.chunks {parallel.chunks}: {problem}" for problem in problems))


def _schedule_of_file(parallel: Parallel, microbatches: int) -> Schedule:
    """Return the schedule of parallel.schedule_file. Raises UserError if it cannot run, or if it is
    for another number of ranks or micro-batches."""
    planned = read_schedule(parallel.schedule_file)
    check(planned)
    file = f"parallel.schedule_file {parallel.schedule_file}"
    ranks = len(planned.programs)
    if ranks != parallel.pipeline:
        raise UserError.of(
            "config.schedule_ranks", file=file, ranks=ranks, pipeline=parallel.pipeline
        )
    if planned.microbatches != microbatches:
        raise UserError.of(
            "config.schedule_microbatches",
            file=file,
            microbatches=planned.microbatches,
            microbatches_of_run=microbatches,
        )
    return planned


def read_schedule(path: str) -> Schedule:
    """Return the schedule of a text file, without checking that it can run. Raises UserError that
    names the file."""
    try:
        return Schedule.parse(read_text(Path(path)))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError.of("config.schedule_unreadable", path=path, reason=reason) from error
    except UserError as error:
        # problems of the text do not name the file
        raise UserError(
            *(problem.within(f"schedule {path}: ") for problem in error.problems)
        ) from error


def stage_count(parallel: Parallel, microbatches: int) -> int:
    """Return the number of stages. Raises UserError, as `pipeline_schedule` does; only a file's
    schedule is made."""
    if parallel.schedule_file:
        return len(_schedule_of_file(parallel, microbatches).rank_of_stage)
    # counted without the schedule, which takes seconds to plan for thousands of micro-batches
    _require_chunks(parallel)
    kind = parallel.schedule
    if problems := schedule_problems(kind, parallel.pipeline, microbatches, parallel.chunks):
        raise UserError(*problems)
    return parallel.pipeline * (parallel.chunks or KINDS[kind].chunks)
