"""A spike taken again: what the step gives when it is repeated, what other batches give at the same
weights, which samples and tensors are outside of the ordinary."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megaprec.checkpoint.atomic import step_of
from megaprec.checkpoint.reader import Store
from megaprec.diagnose.spike_monitor import NORMAL
from megaprec.optim.decision.step_report import StepReport
from models.engine.passes import Share
from tools.training.corpus import identified
from tools.training.data_identity import other_sets, read_identity
from tools.verify.replay.repeated_run import RepeatedTrainer, SavedRun, catch_up, require_repeatable
from tools.verify.replay.spike_measures import (
    BatchNumbers,
    GradientNorms,
    Measures,
    NamedSample,
    finite_or_lowest,
    name_sample,
    only,
    without,
)
from tools.verify.replay.spikes import RECENT, RecordedSpike

OTHER_BATCHES = 4  # that follow the step, measured at the same weights
ORDINARY_STEPS = 3  # before the step, with whose tensors its tensors are compared
DEVIATIONS = 6.0  # of a sample's loss or gradient from the median of ordinary ones
SAMPLE_FACTOR = 1.2  # and at least by this factor
MOST_SEARCHED = 64  # samples whose gradients are measured one by one
MOST_NAMED = 4  # samples that are named
MOST_TENSORS = 6
MOVED = 2.0  # factor by which a tensor's magnitude is outside of the ordinary
LOSS_DEPARTURE = 0.02  # relative difference of a loss from the recorded one: not of rounding
NORM_DEPARTURE = 0.3
RAISED = 1.5  # a learning rate over the usual one


class MovedTensor(NamedTuple):
    """A tensor that is larger in the spike. what: its description. ordinary: the median of ordinary
    steps."""

    what: str
    spiking: float
    ordinary: float

    @property
    def factor(self) -> float:
        return self.spiking / self.ordinary if self.ordinary else math.inf


@dataclass(frozen=True)
class HeldRate:
    """The numbers of the step, repeated with at most the learning rate `rate` from `since` on."""

    since: int
    rate: float
    numbers: BatchNumbers


@dataclass(frozen=True)
class Examination:
    """The evidence of a repeated spike.

    start: name of the checkpoint, "" for the initial weights. repeated: number of steps before.
    layout: of the run, in words; "" for one process.
    again: the numbers of the step, repeated.
    departed: the first repeated step whose numbers are not the recorded ones; None for none.
    others: the next batches at the same weights.
    num_samples: of the batch. num_high: of these, with a loss or gradient that is an outlier among
        those of other batches.
    outliers: those that were left out, worst first. left_out: the numbers of the batch without
        them; None if none stands out.
    highest: the samples of the highest loss.
    first_moved: tensors of the worst micro-batch that are outside of the ordinary, in the order of
        computation; gradients: of parameters, the largest factor first. compared_with: in words.
        All three are empty if the step repeated is ordinary.
    held: with the usual learning rate; None if that was not tried, for the reason `not_held`.
    changed_data: lines about data that are not those of the run.
    """

    start: str
    repeated: int
    layout: str
    again: BatchNumbers
    departed: int | None
    others: Sequence[BatchNumbers]
    num_samples: int
    num_high: int
    outliers: Sequence[NamedSample]
    left_out: BatchNumbers | None
    highest: Sequence[NamedSample]
    first_moved: Sequence[MovedTensor]
    gradients: Sequence[MovedTensor]
    compared_with: str
    held: HeldRate | None
    not_held: str
    changed_data: Sequence[str]


def is_above(numbers: BatchNumbers, spike: RecordedSpike) -> bool:
    """Return True if a batch's loss, or its gradient norm, is above the spike's limit for it. Only
    the one of both that was above its limit in the recorded step counts. NaN is above."""
    limits = spike.numbers.limits
    above_loss = spike.numbers.in_loss and not numbers.loss <= limits.loss
    above_norm = spike.numbers.in_norm and not numbers.norm <= limits.norm
    return above_loss or above_norm


def are_above(others: Sequence[BatchNumbers], spike: RecordedSpike) -> bool:
    """Return True if at least half of the batches are above the band of a spike."""
    return 2 * sum(is_above(numbers, spike) for numbers in others) >= len(others) > 0


def steps_to_repeat(run: SavedRun, step: int) -> int:
    """Return how many steps have to be repeated before a step. Raises UserError if the checkpoint
    from which the run branched is gone."""
    start = run.start_before(step)
    return step - 1 - (0 if start is None else step_of(start))


def examine(run: SavedRun, spike: RecordedSpike, most_steps: int) -> Examination:
    """Repeat the run up to a spike, take measures there, and return them as evidence.

    most_steps: that are repeated with another learning rate. Raises UserError if the run cannot be
    repeated.
    """
    start = run.start_before(spike.step)
    with run.trainer(start) as trainer:
        caught_up = _catch_up(run, trainer, spike, start)
        seq_length = run.config.train.seq_length
        first = trainer.progress.samples
        event = {
            "step": spike.step,
            "first_sample": first,
            "num_samples": spike.tokens // seq_length,
        }
        require_repeatable(run.config, event, run.folder)
        measures = Measures(trainer, spike.step - 1, _loss_scale(run, spike))
        share = trainer.share(first)
        again = measures.batch(share)
        other_shares = _following(trainer, first)
        others = [measures.batch(other) for other in other_shares]
        samples = _Samples(measures, share, [*other_shares])
        reproduced = is_above(again, spike)
        left_out = None
        if reproduced:
            left_out = samples.search(spike)

        def named(positions: Sequence[int]) -> list[NamedSample]:
            """Return the first of some samples of the batch, with their documents."""
            return [
                name_sample(measures, run.corpus, share, first, position, samples.losses[position])
                for position in positions[:MOST_NAMED]
            ]

        worst = samples.by_loss()
        outliers = named(samples.outliers)
        highest = outliers or named(worst)
        # where the repetition is ordinary, a tensor that differs does so by chance
        moved = _NOTHING_MOVED
        if reproduced:
            position = (samples.outliers or worst)[0]
            moved = _compare_tensors(measures, share, position, caught_up, other_shares)
    held = None
    not_held = "other batches are ordinary at the same weights"
    if reproduced and are_above(others, spike):
        held, not_held = _with_usual_rate(run, spike, most_steps)
    return Examination(
        start="" if start is None else start.name,
        repeated=caught_up.steps,
        layout=run.layout,
        again=again,
        departed=caught_up.departed,
        others=others,
        num_samples=len(share.tokens),
        num_high=samples.num_high,
        outliers=outliers,
        left_out=left_out,
        highest=highest,
        first_moved=moved.magnitudes,
        gradients=moved.gradients,
        compared_with=moved.compared_with,
        held=held,
        not_held=not_held,
        changed_data=[] if reproduced else _changed_data(run, start),
    )


class _Ordinary(NamedTuple):
    """The tensors of ordinary steps: for each the magnitudes and the norms of gradients, by name.

    steps: that were repeated. departed: the first whose numbers are not the recorded ones.
    """

    magnitudes: Sequence[Mapping[str, float]]
    gradients: Sequence[Mapping[str, float]]
    steps: int = 0
    departed: int | None = None


class _MovedTensors(NamedTuple):
    """The tensors of a repeated spike that are outside of the ordinary. compared_with: in words."""

    magnitudes: Sequence[MovedTensor]
    gradients: Sequence[MovedTensor]
    compared_with: str


_NOTHING_MOVED = _MovedTensors((), (), "")


def _compare_tensors(
    measures: Measures,
    share: Share,
    position: int,
    caught_up: _Ordinary,
    other_shares: Sequence[Share],
) -> _MovedTensors:
    """Return the tensors of a batch that are larger than in the steps before; if none was repeated,
    larger than in other batches.

    position: of the sample in whose micro-batch activations are measured.
    """
    ordinary = caught_up
    compared_with = f"the {len(caught_up.gradients)} steps before"
    if not caught_up.gradients:
        ordinary = _of_batches(measures, other_shares)
        compared_with = f"the {len(other_shares)} batches after it, at the same weights"
    microbatch = position // measures.micro_batch
    magnitudes = _moved(measures.magnitudes(share, microbatch), ordinary.magnitudes)
    gradients = _by_factor(_moved(measures.gradients(share), ordinary.gradients))
    return _MovedTensors(magnitudes[:MOST_TENSORS], gradients[:MOST_TENSORS], compared_with)


def _catch_up(
    run: SavedRun, trainer: RepeatedTrainer, spike: RecordedSpike, start: Path | None
) -> _Ordinary:
    """Take the steps before a spike; return the measures of the last of them, which are
    ordinary."""
    gradients = GradientNorms(ORDINARY_STEPS)
    magnitudes: deque[Mapping[str, float]] = deque(maxlen=ORDINARY_STEPS)
    departed: list[int] = []
    trainer.engine.optimizer.observers.append(gradients)
    first_step = trainer.progress.step

    def before_each() -> None:
        if spike.step - 1 - trainer.progress.step <= ORDINARY_STEPS:
            measures = Measures(trainer, trainer.progress.step, _loss_scale(run, spike))
            share = trainer.share(trainer.progress.samples)
            magnitudes.append(measures.magnitudes(share, 0))

    def after_each(report: StepReport) -> None:
        record = run.records.get(trainer.progress.step)
        if record is not None and _departs(report, record):
            departed.append(trainer.progress.step)

    catch_up(trainer, spike.step, start, before_each, after_each)
    trainer.engine.optimizer.observers.remove(gradients)
    steps = trainer.progress.step - first_step
    return _Ordinary(magnitudes, gradients.newest, steps, departed[0] if departed else None)


def _departs(report: StepReport, record: Mapping[str, Any]) -> bool:
    """Return True if the loss or the norm of a repeated step is not that of its record."""
    loss = float(record["loss"])
    norm = float(record["grad_norm"])
    by_loss = _is_other(report.loss, loss, LOSS_DEPARTURE)
    return by_loss or _is_other(report.grad_norm, norm, NORM_DEPARTURE)


def _is_other(repeated: float, recorded: float, departure: float) -> bool:
    """Return True if one of two numbers is finite and the other is not, or if they are further
    apart than rounding explains. departure: the relative difference that it does not explain."""
    if math.isfinite(repeated) and math.isfinite(recorded):
        return abs(repeated - recorded) > departure * abs(recorded)
    return math.isfinite(repeated) != math.isfinite(recorded)


def _loss_scale(run: SavedRun, spike: RecordedSpike) -> float:
    return float(run.records[spike.step]["loss_scale"])


def _following(trainer: RepeatedTrainer, first: int) -> list[Share]:
    """Return the shares of the next batches of the run that have as many samples."""
    batches = trainer.config.batches
    size = batches.at(first)
    shares: list[Share] = []
    position = first + size
    for _ in range(OTHER_BATCHES):
        if batches.at(position) != size:
            break
        shares.append(trainer.share(position))
        position += size
    return shares


def _of_batches(measures: Measures, shares: Sequence[Share]) -> _Ordinary:
    magnitudes = [measures.magnitudes(share, 0) for share in shares]
    gradients = [measures.gradients(share) for share in shares]
    return _Ordinary(magnitudes, gradients)


class _Samples:
    """The samples of a batch, compared with those of other batches.

    losses: of the batch's samples. outliers: positions of those that were left out. num_high: how
    many have a loss, or after `search` a gradient, that is an outlier.
    """

    def __init__(self, measures: Measures, share: Share, others: Sequence[Share]) -> None:
        self._measures = measures
        self._share = share
        self.losses = measures.sample_losses(share)
        self._ordinary: list[float] = []
        for other in others:
            self._ordinary += measures.sample_losses(other)
        self.outliers: list[int] = []
        high = _outliers(self.losses, self._ordinary)
        self.num_high = len(high)
        self._high = high

    def by_loss(self) -> list[int]:
        """Return the positions of all samples, the highest loss first."""
        positions = range(len(self.losses))
        return sorted(positions, key=lambda position: -finite_or_lowest(self.losses[position]))

    def search(self, spike: RecordedSpike) -> BatchNumbers | None:
        """Look for the samples without which the batch is ordinary, by their losses, and if these
        do not explain it by their gradients. Set `outliers` to them.

        Return the numbers of the batch without them, which may still be above the spike's limits;
        None if no sample stands out.
        """
        by_loss = self._leave_out(self._high)
        if by_loss is not None and not is_above(by_loss, spike):
            return by_loss
        if len(self.losses) > MOST_SEARCHED or not spike.numbers.in_norm:
            return by_loss
        norms = [
            self._measures.batch(only(self._share, position)).norm
            for position in range(len(self.losses))
        ]
        high = _outliers(norms, norms)
        by_gradient = self._leave_out(high)
        if by_gradient is None:
            return self._leave_out(self._high)  # again: the last call has cleared `outliers`
        self.num_high = max(self.num_high, len(high))
        return by_gradient

    def _leave_out(self, positions: Sequence[int]) -> BatchNumbers | None:
        """Set `outliers` to these positions and return the numbers of the batch without them; None,
        and no outliers, if they are none or all of its samples."""
        self.outliers = []
        if not positions or len(positions) == len(self.losses):
            return None
        self.outliers = [*positions]
        return self._measures.batch(without(self._share, positions))


def _outliers(values: Sequence[float], ordinary: Sequence[float]) -> list[int]:
    """Return the positions of the values that are far above ordinary ones, the highest first."""
    finite = [value for value in ordinary if math.isfinite(value)]
    if not finite:
        return []
    center = median(finite)
    width = NORMAL * median(abs(value - center) for value in finite)
    limit = max(center + DEVIATIONS * width, SAMPLE_FACTOR * center)
    positions = [position for position, value in enumerate(values) if value > limit]
    return sorted(positions, key=lambda position: -values[position])


def _moved(
    spiking: Mapping[str, float], ordinary: Sequence[Mapping[str, float]]
) -> list[MovedTensor]:
    """Return the tensors whose magnitude is outside of the ordinary, in their order."""
    moved: list[MovedTensor] = []
    for what, magnitude in spiking.items():
        values = [magnitudes[what] for magnitudes in ordinary if what in magnitudes]
        if not values:
            continue
        tensor = MovedTensor(what, magnitude, median(values))
        if magnitude > MOVED * tensor.ordinary:
            moved.append(tensor)
    return moved


def _by_factor(moved: Sequence[MovedTensor]) -> list[MovedTensor]:
    return sorted(moved, key=lambda tensor: -tensor.factor)


def _with_usual_rate(
    run: SavedRun, spike: RecordedSpike, most_steps: int
) -> tuple[HeldRate | None, str]:
    """Repeat the run up to the spike with at most its usual learning rate.

    Return the numbers of the step and "", or None and the reason why that was not tried.
    """
    usual = spike.usual_lr
    if usual is None:
        return None, "the run has too few steps before to tell its usual learning rate"
    if spike.highest_lr <= RAISED * usual:
        return None, "the learning rate was not raised"
    since = min(
        step
        for step, record in run.records.items()
        if spike.step - RECENT <= step < spike.step and record["lr"] > RAISED * usual
    )
    start = run.start_before(since)
    saved_step = 0 if start is None else step_of(start)
    needed = spike.step - 1 - saved_step
    if needed > most_steps:
        return None, f"{needed:,} steps would have to be repeated: give --repeat {needed}"
    with run.trainer(start) as trainer:
        trainer.hold_rate(usual, since)
        catch_up(trainer, spike.step, start)
        measures = Measures(trainer, spike.step - 1, _loss_scale(run, spike))
        numbers = measures.batch(trainer.share(trainer.progress.samples))
    return HeldRate(since, usual, numbers), ""


def _changed_data(run: SavedRun, start: Path | None) -> list[str]:
    """Return lines about data sets that are not those of the checkpoint any more."""
    saved = None if start is None else read_identity(Store(start))
    if saved is None:
        return []
    now = identified(run.config, run.corpus).identity
    return [] if now is None else [difference.line for difference in other_sets(saved, now)]
