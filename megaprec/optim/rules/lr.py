"""The learning rate as a function of training progress.

`at(n)` returns the rate of the next step after n steps, or samples, of training. The caller chooses
one of the two, and `warmup`, `total` and `decay` must count the same unit. Nothing is remembered
between calls, so a resumed run and a run in another layout see the same rates.

The formulas are Megatron-LM's, including its first step: the warm-up rate is
initial + (peak - initial) * n / warmup, so with initial = 0 the step after n = 0 has rate 0 and
changes only Adam's moments. After `total` the rate is `final`. A warm-up that others write as
peak * (n + 1) / (warmup + 1), as nanoGPT does, is that of initial = peak / (warmup + 1).

- constant: the peak.
- linear, cosine: from the peak, at the end of warm-up, down to final at `total`.
- wsd (warm-up, stable, decay): the peak until `decay` before `total`, then down to final in the
  shape `tail`. With r, the completed fraction of the decay, the factors are Megatron's: exponential
  2 * 0.5**r - 1, linear 1 - r, cosine (cos(pi * r) + 1) / 2, sqrt 1 - sqrt(r).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from megaprec.errors import Problem, UserError
from megaprec.kinds import NamedArguments, wrong_kinds
from megaprec.optim.names_elsewhere import SCHEDULE

Kind = Literal["constant", "linear", "cosine", "wsd"]
Tail = Literal["exponential", "linear", "cosine", "sqrt"]


@dataclass(frozen=True)
class LRSchedule(NamedArguments):
    """A learning-rate schedule; `warmup`, `total` and `decay` are all in steps or all in samples.

    `peak` and `final` are the highest and the lowest learning rate; `decay` and `tail` are the
    length and the shape of the final phase of "wsd", and are ignored by the other kinds. `initial`
    is the rate that warm-up begins with. Raises UserError that names all inconsistent values.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = SCHEDULE

    kind: Kind
    peak: float
    final: float
    warmup: int
    total: int
    decay: int
    tail: Tail = "exponential"
    initial: float = 0.0

    def __post_init__(self) -> None:
        # values of a wrong kind cannot be compared with their ranges
        if problems := wrong_kinds(self) or list(self._problems()):
            raise UserError(*problems)

    def at(self, completed: int) -> float:
        """Return the learning rate of the next step after `completed` steps (or samples)."""
        # "<=": the step after the last of warm-up has the peak itself, as in Megatron
        if self.warmup > 0 and completed <= self.warmup:
            rise = self.peak - self.initial
            return self.initial + rise * completed / self.warmup
        kind = SCHEDULES[self.kind]
        if not kind.ends:
            return self.peak
        if completed > self.total:
            return self.final
        height = kind.height(self, completed)
        return self.final + height * (self.peak - self.final)

    def after_warmup(self, completed: int) -> float:
        """Return the fraction of the steps after warm-up that are completed."""
        completed_after_warmup = completed - self.warmup
        return completed_after_warmup / (self.total - self.warmup)

    def _problems(self) -> Iterator[Problem]:
        """Yield a problem for each value that is out of its range or contradicts another one."""
        longest_decay = self.total - self.warmup
        has_decay = "decay" in SCHEDULES[self.kind].keys
        if self.total < 1:
            yield Problem.of("optimizer.schedule_total", total=self.total)
        elif not 0 <= self.warmup <= self.total:
            yield Problem.of("optimizer.schedule_warmup", warmup=self.warmup, total=self.total)
        elif has_decay and not 1 <= self.decay <= longest_decay:
            yield Problem.of("optimizer.schedule_decay", decay=self.decay, longest=longest_decay)
        # without a warm-up it has no effect
        if self.warmup and not 0 <= self.initial <= self.peak:
            yield Problem.of("optimizer.schedule_initial", initial=self.initial, peak=self.peak)
        if not 0 <= self.final <= self.peak:
            yield Problem.of("optimizer.schedule_final", final=self.final, peak=self.peak)


def _linear(fraction: float) -> float:
    """Return the height of a straight line after a fraction of its length, from 1 down to 0."""
    return 1 - fraction


def _cosine(fraction: float) -> float:
    """Return the height of half a wave of the cosine, from 1 down to 0."""
    return 0.5 * (math.cos(math.pi * fraction) + 1)


def _sqrt(fraction: float) -> float:
    """Return the height of 1 - sqrt, which falls fast at first."""
    return 1 - math.sqrt(fraction)


def _exponential(fraction: float) -> float:
    """Return the height of Megatron's exponential decay, from 1 down to 0."""
    return 2 * 0.5**fraction - 1


TAILS: Mapping[Tail, Callable[[float], float]] = {
    "exponential": _exponential,
    "linear": _linear,
    "cosine": _cosine,
    "sqrt": _sqrt,
}
"""The heights, from 1 down to 0, after a fraction of the decay of "wsd"."""


def _stable_then_decay(schedule: LRSchedule, completed: int) -> float:
    """Return the height of "wsd": 1, the peak, and in the last `decay` steps that of the tail."""
    begin_of_decay = schedule.total - schedule.decay
    completed_of_decay = completed - begin_of_decay
    if completed_of_decay <= 0:
        return 1.0
    height_of_tail = TAILS[schedule.tail]
    fraction = completed_of_decay / schedule.decay
    return height_of_tail(fraction)


class LRKind(NamedTuple):
    """A schedule of the learning rate.

    height: the position of the rate between final (0) and peak (1) after warm-up, of the schedule
        and the number of completed steps.
    ends: whether the rate falls to `final`, so that it depends on the length of the schedule.
    keys: the keys of [lr] that it has besides those of its ends.
    said: a few words for users beside its name; "" if the name says all.
    """

    height: Callable[[LRSchedule, int], float]
    ends: bool = True
    keys: tuple[str, ...] = ()
    said: str = ""


SCHEDULES: Mapping[Kind, LRKind] = {
    "constant": LRKind(lambda schedule, completed: 1.0, ends=False, said="none"),
    "linear": LRKind(lambda schedule, done: _linear(schedule.after_warmup(done))),
    "cosine": LRKind(lambda schedule, done: _cosine(schedule.after_warmup(done))),
    "wsd": LRKind(_stable_then_decay, keys=("decay", "wsd_decay"), said="warmup, stable, decay"),
}


def schedules_in_words() -> str:
    """Return a list of all schedules for users, as "a, b (in other words), or c"."""
    described: list[str] = []
    for name, kind in SCHEDULES.items():
        in_words = f"{name} ({kind.said})" if kind.said else name
        described.append(in_words)
    *most, last = described
    return f"{', '.join(most)}, or {last}"
