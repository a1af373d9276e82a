"""The learning rates of a run, which are a function of its applied steps or of their samples."""

from collections.abc import Iterator
from dataclasses import dataclass

from megaprec.optim.rules.lr import LRSchedule
from tools.config.rules.derived import lr_schedule
from tools.config.tables.batch_schedule import BatchSchedule
from tools.config.tables.settings import LR, Train
from tools.saved.train_state import TrainState


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run.

    batches: of its steps if the schedule is a function of samples; None if it is one of steps.
    """

    schedule: LRSchedule
    batches: BatchSchedule | None

    @classmethod
    def of(cls, lr: LR, train: Train) -> "LearningRates":
        """Return the rates of a run with these tables. Raises UserError."""
        batches = BatchSchedule.of(train) if lr.unit == "samples" else None
        return cls(lr_schedule(lr, train), batches)

    def at(self, progress: TrainState, steps: int = 0) -> float:
        """Return the rate of the next step, or of the one that is `steps` later."""
        # Only applied steps move the schedule, and all consume samples.
        if self.batches is None:
            return self.schedule.at(progress.applied + steps)
        following = self.batches.after(progress.samples, steps) - progress.samples
        return self.schedule.at(progress.applied_samples + following)

    def of_last(self, progress: TrainState) -> float:
        """Return the rate of the last step, which was applied."""
        if self.batches is None:
            return self.schedule.at(progress.applied - 1)
        batch = self.batches.before(progress.samples)
        return self.schedule.at(max(0, progress.applied_samples - batch))

    def steps_of_skipped(self, progress: TrainState, skipped_samples: int) -> int:
        """Return how many more steps the run needs for the schedule to reach its end, because only
        applied steps move it. skipped_samples: those of skipped steps."""
        if self.batches is None:
            return progress.skipped
        batch = self.batches.at(progress.samples)
        return -(-skipped_samples // batch)  # rounded up

    def ends(self, progress: TrainState) -> Iterator[int]:
        """Yield the step at which each part of the schedule ends, warm-up, stable phase and the
        whole, and the step after it. Steps are counted as by `at`, where 0 is the next one.
        """
        schedule = self.schedule
        for count in (schedule.warmup, schedule.total - schedule.decay, schedule.total):
            if self.batches is None:
                step = max(0, count - progress.applied)
            else:
                target = progress.samples + count - progress.applied_samples
                step = self.batches.steps_until(progress.samples, target)
            yield from (step, step + 1)
