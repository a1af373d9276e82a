"""The journal of a process that trains, with events of its beginning and end.

The events say from where it resumed and with which changed keys, how it ended, and the memory that
it took.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.resources import peak_memory
from megaprec.url_secrets import masked_inside
from tools.config.run_file import RunConfig
from tools.console.units import date_now
from tools.journal.journal import Journal, LinesLost
from tools.journal.records import INITIAL, read_branching, read_events
from tools.parts import optional_parts
from tools.saved.train_state import TrainState
from tools.training.branch import is_branch
from tools.training.corpus import Corpus
from tools.training.saves import resume_point


@contextmanager
def record_run(
    config: RunConfig,
    corpus: Corpus,
    resumed: Path | None,
    progress: Callable[[], TrainState],
    optimizer: ParallelAMPOptimizer,
) -> Iterator[Journal]:
    """Yield the journal of a run and close it. A process that has no step to take records no event.

    resumed: the checkpoint from which the run resumes or branches. progress: returns that after the
    last step that is known. Raises UserError for a file that cannot be written, which ends with the
    newest whole checkpoint.
    """
    folder = Path(config.train.folder)
    total_steps = config.train.steps
    log_settings = config.log
    first_step = progress().step
    branches = resumed is not None and is_branch(config, resumed)
    settings = masked_inside(config.model_dump(mode="json"))
    feeds = [optional_parts.Feed(name, folder, settings, first_step) for name in log_settings.to]
    with (
        _naming_the_checkpoint(config, progress, first_step),
        Journal(
            folder=folder,
            start_step=first_step,
            total_steps=total_steps,
            print_every=log_settings.every,
            shows_bar=log_settings.progress,
            trackers=feeds,
            branches=branches,
            total_tokens=_total_tokens(config, progress()),
        ) as journal,
    ):
        # A process without a step to take leaves the records as they are.
        if first_step >= total_steps:
            yield journal
            return
        if resumed:
            event = optional_parts.resume_event(config, corpus, resumed)
            # Ranks that were started again before the first checkpoint branch once more.
            if not branches or event != read_branching(folder):
                journal.write_event(event)
        else:
            event = optional_parts.initial_event(config, corpus)
            # Ranks that were started again before the first checkpoint begin once more.
            if event and event not in read_events(folder, INITIAL):
                journal.write_event(event)
        began = date_now()
        failure = ""
        try:
            yield journal
        except BaseException as error:
            # Also a KeyboardInterrupt ends the run, and may have no text.
            failure = " ".join(str(error).split()) or type(error).__name__
            raise
        finally:
            journal.write_event(_end_event(progress(), total_steps, failure, optimizer, began))


def _total_tokens(config: RunConfig, progress: TrainState) -> int | None:
    """Return the tokens that a run with train.batch_schedule will have read at its end; None for a
    constant batch, with which all steps take as long."""
    if not config.train.batch_schedule:
        return None
    steps_left = max(0, config.train.steps - progress.step)
    samples_left = config.batches.after(progress.samples, steps_left) - progress.samples
    return progress.tokens + samples_left * config.train.seq_length


@contextmanager
def _naming_the_checkpoint(
    config: RunConfig, progress: Callable[[], TrainState], first_step: int
) -> Iterator[None]:
    """Within the context, add the newest whole checkpoint to the error of a file.

    An error that is raised while a run ends gets the reason of that end, too.

    first_step: the step after which this process began.
    """
    try:
        yield
    except LinesLost as error:
        problems = [*error.problems]
        cause = error.__context__
        while isinstance(cause, LinesLost):  # of another file, which was closed before
            problems = [*cause.problems, *problems]
            cause = cause.__context__
        if isinstance(cause, UserError):  # as of the last save, which names the checkpoint
            raise UserError(*problems, *cause.problems) from error
        if cause is not None:
            raise
        raise UserError(*problems, resume_point(config, progress().step)) from error
    except OSError as error:
        step = progress().step
        if error.filename is None or step == first_step:  # no step is lost
            raise
        raise UserError.of(
            "training.ended_with_checkpoint",
            file_error=file_error(error),
            resume_point=resume_point(config, step),
        ) from error


def _end_event(
    progress: TrainState,
    total_steps: int,
    failure: str,
    optimizer: ParallelAMPOptimizer,
    began: str,
) -> dict[str, Any]:
    """Return the event of the end of a run. failure: why it failed, "" if it did not. began: date
    of the first step of this process."""
    complete = progress.step >= total_steps
    if failure:
        reason = failure
    elif not complete:
        reason = "it was asked to stop"
    elif progress.skipped:
        reason = f"all steps are taken, but {progress.skipped:,} of {progress.step:,} were skipped"
    else:
        reason = "all steps are taken"
    # Not `is_available`: a run on the CPU of a machine with a GPU does not use it.
    on_gpu = torch.cuda.is_initialized()
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else peak_memory()
    return {
        "event": "end",
        "step": progress.step,
        "applied": progress.applied,
        "complete": complete,
        "why": reason,
        "began": began,
        "date": date_now(),
        "peak_memory": peak_bytes,
        "memory_of": "device" if on_gpu else "process",
        "held_memory": sum(buffer.num_bytes() for buffer in optimizer.all_buffers()),
    }
