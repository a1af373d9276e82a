"""The line by which a run says, before its first step, which checkpoints its saves will delete."""

from collections.abc import Collection, Iterator, Sequence

from megaprec.checkpoint.atomic import damaged_beside, step_of, whole_checkpoints
from megaprec.checkpoint.keeping import Keep, made_here
from tools.config.run_file import RunConfig
from tools.config.settings import Checkpoint
from tools.console.units import counted

SHOWN = 4  # names in the line


def deletion_lines(config: RunConfig, done: int) -> Iterator[str]:
    """Yield a line if saves of the run will delete checkpoints, and one for each that is damaged.

    done: the number of steps that the run has taken before.
    """
    whole = whole_checkpoints(config.checkpoint_folder)
    if whole:
        yield from (f"note       {line}" for line in damaged_beside(whole[-1]))
    if done >= config.train.steps:
        return
    made = [step_of(path) for path in made_here(config.checkpoint_folder)]
    others = [path.name for path in whole if step_of(path) not in made]
    following = _saves_after(done, config)
    rule = config.checkpoint.kept
    going = rule.expired(made, len(following))
    if not going and not _later_ones_go(following, rule):
        return
    line = f"keeps      {_rule(config.checkpoint)} that it saves; older ones are deleted"
    if going:
        line += f", {_names([f'step_{step:08d}' for step in going])} too"
    if others:
        stay = "stays" if len(others) == 1 else "stay"
        line += f"; {_names(others)} {stay}, for no save into this folder made {_them(others)}"
    yield line


def _saves_after(done: int, config: RunConfig) -> Sequence[int]:
    """Return the steps after which the run will save, beginning after `done`; many, but not
    stored."""
    steps = config.train.steps
    every = config.checkpoint.every
    if not every:
        return (steps,)
    due = range(done - done % every + every, steps + 1, every)
    # The last save, after an unequal rest, is as good as one at the next multiple of `every`: it is
    # the newest.
    return due if steps % every == 0 else range(due.start, steps + every, every)


def _later_ones_go(following: Sequence[int], rule: Keep) -> bool:
    """Return True if checkpoints of saves that follow will be deleted by saves after them."""
    if rule.newest is None:
        return False
    older = following[: max(0, len(following) - rule.newest)]
    # Of two neighbours one is no multiple of checkpoint.keep_every, or all of them are.
    return bool(rule.expired(older[:2], rule.newest))


def _rule(settings: Checkpoint) -> str:
    if settings.keep == 1:
        newest = "the newest checkpoint"
    else:
        newest = f"the newest {counted(int(settings.keep), 'checkpoint')}"
    if settings.keep_every:
        return f"{newest} and those of each multiple of {settings.keep_every} steps"
    return newest


def _names(names: Sequence[str]) -> str:
    shown = [*names[:SHOWN], *([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _them(names: Collection[str]) -> str:
    return "it" if len(names) == 1 else "them"
