"""Rules on the batches of a run, the length of its sequences, and their schedules."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from megaprec.errors import Problem
from megaprec.optim.rules.lr import SCHEDULES
from models.config import ModelConfig
from tools.config.rules.checking import nearest_multiples, problems_of
from tools.config.tables.schedules import stage_count
from tools.config.tables.settings import LR, Parallel, Train

# each batch of a schedule has a pipeline schedule of its own, which is proven when a run begins
MOST_CHANGES = 1000


def microbatches_of(batch: int, train: Train, parallel: Parallel) -> int:
    """Return the micro-batches of a step with this batch; 1 if it does not divide, which `_batch`
    reports."""
    # a schedule needs one at least
    return max(1, batch // (train.micro_batch * parallel.data))


def changes_problems(train: Train) -> list[str]:
    """Return the problems of train.batch_schedule by itself."""
    changes = train.batch_schedule
    if not changes:
        return []
    if len(changes) > MOST_CHANGES:
        return [Problem.of("config.batch_schedule_long", count=len(changes), most=MOST_CHANGES)]
    problems = list[str]()
    first, _ = changes[0]
    if first:
        problems.append(Problem.of("config.batch_schedule_begin", samples=first))
    thresholds = [threshold for threshold, _ in changes]
    for earlier, later in pairwise(thresholds):
        if later <= earlier:
            problems.append(Problem.of("config.batch_schedule_order", earlier=earlier, later=later))
    return problems


def _batch_schedule(train: Train) -> Iterator[str]:
    """Yield the problems of train.batch_schedule, whose last batch must be train.global_batch."""
    yield from changes_problems(train)
    if not train.batch_schedule:
        return
    _, last_batch = train.batch_schedule[-1]
    if last_batch != train.global_batch:
        yield Problem.of(
            "config.batch_schedule_last", last=last_batch, global_batch=train.global_batch
        )


def _batch_schedule_of_file(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem if batches differ and the pipeline schedule is one of a file."""
    sizes = {batch for _, batch in train.batch_schedule}
    if parallel.schedule_file and len(sizes) > 1:
        yield Problem.of("config.batch_schedule_file", schedule_file=parallel.schedule_file)


def _pipeline_of_batches(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem for the first batch of train.batch_schedule whose micro-batches the pipeline
    schedule cannot have."""
    # `_stages` reports those of train.global_batch and of a file
    if parallel.schedule_file:
        return
    for samples, batch in train.batch_schedule:
        problems = problems_of(stage_count, parallel, microbatches_of(batch, train, parallel))
        if problems and batch != train.global_batch:
            for problem in problems:
                yield problem.within(f"train.batch_schedule [{samples}, {batch}]: ")
            return


def _rates_of_batches(lr: LR, train: Train) -> Iterator[str]:
    """Yield a problem if the learning rate is a function of steps, whose batches differ."""
    depends_on_unit = lr.warmup > 0 or SCHEDULES[lr.schedule].ends
    if train.batch_schedule and lr.unit == "steps" and depends_on_unit:
        yield Problem.of("config.batch_schedule_rates")


def _batch(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem for the first batch that the replicas cannot share in whole micro-batches."""
    # samples of one micro-batch of every replica
    unit = train.micro_batch * parallel.data
    undivided = [(samples, batch) for samples, batch in train.batch_schedule if batch % unit]
    if undivided:
        samples, batch = undivided[0]
        others = ""
        if len(undivided) > 1:
            others = f", and {len(undivided) - 1} more"
        yield Problem.of(
            "config.batch_schedule_undivided",
            samples=samples,
            batch=batch,
            others=others,
            micro_batch=train.micro_batch,
            data=parallel.data,
            product=unit,
            possible=nearest_multiples(batch, unit),
        )
    elif train.global_batch % unit:
        yield Problem.of(
            "config.global_batch",
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            data=parallel.data,
            product=unit,
            possible=nearest_multiples(train.global_batch, unit),
        )


def _length_schedule(train: Train) -> Iterator[str]:
    """Yield the problems of train.seq_schedule by itself."""
    changes = train.seq_schedule
    if not changes:
        return
    if len(changes) > MOST_CHANGES:
        yield Problem.of("config.seq_schedule_long", count=len(changes), most=MOST_CHANGES)
        return
    first, _ = changes[0]
    if first:
        yield Problem.of("config.seq_schedule_begin", samples=first)
    for (earlier, _), (later, _) in pairwise(changes):
        if later <= earlier:
            yield Problem.of("config.seq_schedule_order", earlier=earlier, later=later)
    _, last_length = changes[-1]
    if last_length != train.seq_length:
        yield Problem.of("config.seq_schedule_last", last=last_length, seq_length=train.seq_length)
    for samples, length in changes:
        if train.seq_length % length:
            yield Problem.of(
                "config.seq_schedule_undivided",
                samples=samples,
                length=length,
                seq_length=train.seq_length,
            )


def _positions(model: ModelConfig, train: Train) -> Iterator[str]:
    if train.seq_length > model.max_positions:
        yield Problem.of(
            "config.too_long", seq_length=train.seq_length, max_positions=model.max_positions
        )


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _batch,
    _batch_schedule,
    _length_schedule,
    _batch_schedule_of_file,
    _pipeline_of_batches,
    _rates_of_batches,
    _positions,
)
