"""Rules on train.seq_schedule: each length must be one that the run could have throughout."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from megaprec.errors import Problem
from models.config import ModelConfig
from tools.config.rules.batches import MOST_CHANGES
from tools.config.rules.canonical import virtual_sizes
from tools.config.rules.layout import cut_sequences, predicted_ahead, shared_sequence
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.settings import Parallel, Train


def _changes(train: Train) -> Iterator[str]:
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
    _, last = changes[-1]
    if last != train.seq_length:
        yield Problem.of("config.seq_schedule_last", last=last, seq_length=train.seq_length)
    for samples, length in changes:
        if train.seq_length % length:
            yield Problem.of(
                "config.seq_schedule_undivided",
                samples=samples,
                length=length,
                seq_length=train.seq_length,
            )


def _shorter(
    model: ModelConfig, train: Train, parallel: Parallel, precision: Precision, fp8: FP8
) -> Iterator[str]:
    """Yield the problems of the first length that the layout or the model cannot have."""
    for samples, length in train.seq_schedule:
        if length == train.seq_length:
            continue
        of_length = train.model_copy(update={"seq_length": length, "seq_schedule": ()})
        problems = [
            *shared_sequence(of_length, parallel),
            *cut_sequences(model, of_length, parallel, precision, fp8),
            *predicted_ahead(model, of_length),
            *virtual_sizes(of_length, model),
        ]
        for problem in problems:
            before = f"train.seq_schedule [{samples}, {length}]: "
            # every rule yields problems, which are texts
            yield problem.within(before) if isinstance(problem, Problem) else before + problem
        if problems:
            return


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (_changes, _shorter)
