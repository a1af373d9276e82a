"""The pipeline schedule of [parallel]: built by its kind for the run's micro-batches, or read from
a file."""

import sys
from functools import lru_cache
from pathlib import Path

from megaprec.errors import UserError
from megaprec.parsing import read_text
from parallel.pipeline.builders import (
    SPLIT,
    chunk_problems,
    default_chunks,
    equal,
    schedule,
    schedule_problems,
)
from parallel.pipeline.instructions import Cost
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.verify import check
from tools.config.settings import Parallel

TELLING = 4096  # forward passes of a schedule whose building takes so long that a line says so


@lru_cache(maxsize=8)
def plan_equal(kind: str, pipeline: int, microbatches: int, chunks: int) -> Schedule:
    """Return the schedule for stages of equal cost. It is built once, and announced if that takes
    some seconds."""
    if (passes := pipeline * microbatches * (chunks or 1)) > TELLING and not schedule_problems(
        kind, pipeline, microbatches, chunks
    ):
        print(f"planning a schedule of {passes:,} forward passes", file=sys.stderr, flush=True)
    return schedule(kind, pipeline, microbatches, chunks)


def pipeline_schedule(parallel: Parallel, microbatches: int, cost: Cost = equal) -> Schedule:
    """Return the schedule of [parallel], planned for this cost. Raises UserError that names the
    keys."""
    p = parallel
    if not p.schedule_file:
        if problems := chunk_problems(p.schedule, p.chunks):
            raise UserError(*(f"parallel.chunks {p.chunks}: {problem}" for problem in problems))
        if cost is equal or p.schedule not in SPLIT:
            return plan_equal(p.schedule, p.pipeline, microbatches, p.chunks)
        return schedule(p.schedule, p.pipeline, microbatches, p.chunks, cost)
    made = read_schedule(p.schedule_file)
    check(made)
    here = f"parallel.schedule_file {p.schedule_file}"
    if len(made.programs) != p.pipeline:
        raise UserError(
            f"{here}: has {len(made.programs)} ranks, but parallel.pipeline is {p.pipeline}"
        )
    if made.microbatches != microbatches:
        raise UserError(
            f"{here}: has {made.microbatches} micro-batches, but train.global_batch over "
            f"train.micro_batch x parallel.data is {microbatches}"
        )
    return made


def read_schedule(path: str) -> Schedule:
    """Read a schedule from a text file without checking that it can run. Raises UserError that
    names the file."""
    try:
        return Schedule.parse(read_text(Path(path)))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"schedule {path}: cannot be read ({reason})") from error
    except UserError as error:
        raise UserError(*(f"schedule {path}: {problem}" for problem in error.problems)) from error


def stage_count(parallel: Parallel, microbatches: int) -> int:
    """Return the number of stages. Raises UserError, as `pipeline_schedule` does; only a file's
    schedule is made."""
    p = parallel
    if p.schedule_file:
        return len(pipeline_schedule(p, microbatches).rank_of_stage)
    if problems := chunk_problems(p.schedule, p.chunks):
        raise UserError(*(f"parallel.chunks {p.chunks}: {problem}" for problem in problems))
    if problems := schedule_problems(p.schedule, p.pipeline, microbatches, p.chunks):
        raise UserError(*problems)
    return p.pipeline * (p.chunks or default_chunks(p.schedule))
