"""The line by which a run says, before its first step, which checkpoints its saves will delete."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megaprec.checkpoint.atomic import damaged_beside, step_of, whole_checkpoints
from megaprec.checkpoint.keeping import Keep, made_here
from tools.config.run_file import RunConfig
from tools.config.settings import Checkpoint
from tools.console.units import counted

MOST_LISTED = 4  # names in the line


def deletion_lines(config: RunConfig, done: int) -> Iterator[str]:
    """Yield a line if saves of the run will delete checkpoints, and one for each that is damaged.

    done: the number of steps that the run has taken before.
    """
    checkpoints = whole_checkpoints(config.checkpoint_folder)
    if checkpoints:
        for line in damaged_beside(checkpoints[-1]):
            yield f"note       {line}"
    if done < config.train.steps:
        yield from _keeping_line(config, done, checkpoints)


def _keeping_line(config: RunConfig, done: int, checkpoints: Sequence[Path]) -> Iterator[str]:
    """Yield the line about deletions, none if the saves to come delete nothing.

    checkpoints: those in the run's folder, whoever has made them.
    """
    saved_steps = [step_of(path) for path in made_here(config.checkpoint_folder)]
    following = _saves_after(done, config)
    rule = config.checkpoint.kept
    expiring = rule.expired(saved_steps, len(following))
    if not expiring and not _later_ones_expire(following, rule):
        return

    line = f"keeps      {_describe_rule(config.checkpoint)} that it saves; older ones are deleted"
    if expiring:
        names = [f"step_{step:08d}" for step in expiring]
        line += f", {_enumerate_names(names)} too"
    copied = [path.name for path in checkpoints if step_of(path) not in saved_steps]
    if copied:
        verb, pronoun = ("stays", "it") if len(copied) == 1 else ("stay", "them")
        line += f"; {_enumerate_names(copied)} {verb}, for no save into this folder made {pronoun}"
    yield line


def _saves_after(done: int, config: RunConfig) -> Sequence[int]:
    """Return the steps after which the run will save, beginning after `done`.

    They may be many, and are not stored.
    """
    steps = config.train.steps
    every = config.checkpoint.every
    if not every:
        return (steps,)
    first = done - done % every + every
    if steps % every == 0:
        return range(first, steps + 1, every)
    # The last save, after an unequal rest, is as good as one at the next multiple of `every`: it is
    # the newest.
    return range(first, steps + every, every)


def _later_ones_expire(following: Sequence[int], rule: Keep) -> bool:
    """Return True if checkpoints of saves that follow will be deleted by saves after them."""
    if rule.newest is None:
        return False
    older = following[: max(0, len(following) - rule.newest)]
    # Of two neighbours one is no multiple of checkpoint.keep_every, or all of them are.
    return bool(rule.expired(older[:2], rule.newest))


def _describe_rule(settings: Checkpoint) -> str:
    if settings.keep == 1:
        newest = "the newest checkpoint"
    else:
        newest = f"the newest {counted(int(settings.keep), 'checkpoint')}"
    if settings.keep_every:
        return f"{newest} and those of each multiple of {settings.keep_every} steps"
    return newest


def _enumerate_names(names: Sequence[str]) -> str:
    """Return "a, b and c"; of many names the first ones and the number of the others."""
    listed = list(names[:MOST_LISTED])
    if len(names) > MOST_LISTED:
        listed.append(f"{len(names) - MOST_LISTED} more")
    *first_ones, last = listed
    return f"{', '.join(first_ones)} and {last}" if first_ones else last
