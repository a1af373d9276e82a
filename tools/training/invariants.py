"""Five invariants that hold in every run, whatever it trains, and are looked at while it does.

    first loss   that of the first weights lies where fresh weights put it
    tokens       losses were divided by the tokens of the batches that count, and the samples that
                 were read are those of the schedule of batches
    rate         each step had the learning rate of the schedule, and the optimizer has counted the
                 same steps as the run
    movement     an applied step moves each parameter that is trained and has a gradient; a skipped
                 one moves none, and nothing moves what is frozen
    copies       ranks that hold the same tensor hold the same bits

Rates and samples are compared in each step, on the host. All else is looked at in the first steps,
in those that are saved, and at the end: a read of the weights, and a sum over ranks. A check never
changes a run: what is broken is told in one line and in events.jsonl, and the run goes on.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from megaprec.comm.layout import Part
from megaprec.diagnose.movement import Moved, Movement
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.rules.param_groups import Group, factors
from models.config import ModelConfig
from models.engine.copies import differing_copies
from models.engine.engine import Engine
from models.engine.passes import Share
from models.logical_shapes import is_never_trained
from tools.config.own_rate import rate_of
from tools.config.run_file import RunConfig
from tools.console.units import counted
from tools.journal.invariant_records import (
    COPIES,
    FIRST_LOSS,
    MOVEMENT,
    NAMES,
    NOT_TRIED,
    PROVEN,
    RATE,
    TOKENS,
    WRONG,
    InvariantFinding,
    in_words,
)
from tools.parts import optional_parts
from tools.saved.train_state import TrainState

SAME_RATE = 1e-12  # of lr.peak, by which two formulas may differ
SAME_COUNT = 1e-9  # of the tokens, whose weights need not be whole numbers
NO_STEP = "no step was applied with a learning rate above 0"


class Invariants:
    """The invariants of one process of a run, from the state that it begins with.

    fresh: the weights are newly drawn. is_saved: tells if the run is saved after a step.
    Methods are collective over the world.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelConfig,
        engine: Engine,
        begin: TrainState,
        fresh: bool,
        is_saved: Callable[[int], bool],
    ) -> None:
        self._config = config
        self._model = model
        self._engine = engine
        self._begin = begin
        self._is_saved = is_saved
        self._is_first = True  # no step of this process was taken
        self._awaits_movement = True  # no step of this process has moved the weights
        self._has_compared_skip = False
        self._watches = False  # the movement of the present step is compared
        self._tokens_here = 0.0  # of this rank's shares, by their masks
        self._samples = begin.samples
        self._applied = begin.applied
        self._applied_samples = begin.applied_samples
        self._counted_before = engine.counted_tokens_so_far.item()
        self._steps_before = int(engine.optimizer.applied_steps.item())
        # what is known of each; a fault stays known
        self._findings = {name: InvariantFinding(NOT_TRIED, "no step was taken") for name in NAMES}
        if not fresh:
            self._findings[FIRST_LOSS] = InvariantFinding(NOT_TRIED, "the run began with weights")
        elif model.factory:
            why = "the initial weights of model.factory are its own"
            self._findings[FIRST_LOSS] = InvariantFinding(NOT_TRIED, why)
        self._awaits_first_loss = fresh and not model.factory
        groups = [Group(**group.model_dump()) for group in config.optimizer.groups]
        rule = engine.optimizer.rule

        def factor_of(part: Part) -> float:
            return factors(part, groups, rule).lr

        self._movement = Movement(engine.optimizer, [*engine.stages.values()], factor_of)
        self._movement.remember()

    @property
    def findings(self) -> dict[str, InvariantFinding]:
        """Return what is known of each invariant, by name."""
        return dict(self._findings)

    def before(self, step: int) -> None:
        """Prepare to compare the movement of the weights in the step of this number, from 1, if it
        is: in each step until one moves them, then in those that are saved."""
        if self._awaits_movement:
            self._watches = True
        elif self._is_saved(step):
            self._movement.remember()
            self._watches = True
        if self._watches:
            self._movement.watch()

    def after(
        self, report: StepReport, progress: TrainState, share: Share, ends: bool
    ) -> list[tuple[str, str]]:
        """Return (name, what is wrong) of each invariant that this step is the first to break.

        progress: after the step. share: of this rank. ends: it is the last step of this process.
        """
        step = progress.step
        in_samples = self._config.lr.unit == "samples"
        completed = self._applied_samples if in_samples else self._applied
        self._add(report, share)
        # sums over ranks and comparisons of copies take time: not after each step
        looks = self._is_first or ends or self._is_saved(step)
        problems = [(RATE, self._rate_problem(report, completed, looks))]
        problems.append((TOKENS, self._samples_problem(progress)))
        if self._awaits_first_loss:
            problems.append((FIRST_LOSS, self._first_loss_problem(report, share)))
        if self._watches:
            problems += [(MOVEMENT, said) for said in self._movement_problems(report)]
        if looks:
            problems.append((TOKENS, self._tokens_problem()))
            problems.append((COPIES, self._copies_problem()))
        self._is_first = False
        broken: list[tuple[str, str]] = []
        for name, said in problems:
            # told once: what is wrong in one step mostly is in all that follow
            if said and self._findings[name].verdict != WRONG:
                self._findings[name] = InvariantFinding(WRONG, said)
                broken.append((name, said))
        return broken

    def _add(self, report: StepReport, share: Share) -> None:
        """Add the step to the counts of samples and applied steps, of all ranks, and of tokens, of
        this rank."""
        samples = len(share.tokens) // share.pieces * self._engine.dp.size
        self._samples += samples
        if report.changed:
            self._applied += 1
            self._applied_samples += samples
        mask = share.mask
        self._tokens_here += share.targets.numel() if mask is None else mask.double().sum().item()

    def _prove(self, name: str, why: str = "") -> None:
        """Note that an invariant held, unless it was broken before."""
        if self._findings[name].verdict != WRONG:
            self._findings[name] = InvariantFinding(PROVEN, why)

    def _rate_problem(self, report: StepReport, completed: int, looks: bool) -> str:
        """Return what is wrong with the learning rate of the step, which comes after `completed`
        applied steps or samples; "" if nothing is. looks: compare the count of applied steps too,
        which is read from the device."""
        config = self._config
        if config.lr.unit == "samples":
            length = config.lr.length or config.total_samples
        else:
            length = config.lr.length or config.train.steps
        expected = rate_of(config.lr, completed, length)
        if abs(report.lr - expected) > SAME_RATE * max(config.lr.peak, config.lr.initial):
            return (
                f"the step had the learning rate {report.lr:.9g}, and after {completed:,} "
                f"{config.lr.unit} the schedule gives {expected:.9g}"
            )
        if looks:
            steps = int(self._engine.optimizer.applied_steps.item()) - self._steps_before
            taken = self._applied - self._begin.applied
            if steps != taken:
                return (
                    f"the optimizer has counted {counted(steps, 'applied step')} where the run "
                    f"has {taken:,}"
                )
        self._prove(RATE)
        return ""

    def _samples_problem(self, progress: TrainState) -> str:
        """Return how the samples of the run differ from those of its batches, or of the schedule of
        batches; "" if they do not."""
        steps = progress.step - self._begin.step
        of_schedule = self._config.batches.after(self._begin.samples, steps)
        if progress.samples == self._samples == of_schedule:
            return ""
        return (
            f"the run stands at sample {progress.samples:,}, its batches had samples up to "
            f"{self._samples:,}, and the schedule of batches gives {of_schedule:,}"
        )

    def _tokens_problem(self) -> str:
        """Return how the tokens that losses were divided by differ from the tokens of the batches
        that count; "" if they do not. Collective over the world."""
        engine = self._engine
        counted_here = engine.counted_tokens_so_far - self._counted_before
        # the count is 0 on ranks without the last stage
        by_engine = engine.optimizer.world.max_(counted_here).item()
        local = engine.counted_tokens_so_far.new_full((), self._tokens_here)
        by_batches = engine.dp.sum_(local).item()
        if abs(by_engine - by_batches) > SAME_COUNT * max(1.0, by_batches):
            return (
                f"losses were divided by {by_engine:,.6g} tokens since this process began, and "
                f"{by_batches:,.6g} tokens of its batches count"
            )
        self._prove(TOKENS)
        return ""

    def _first_loss_problem(self, report: StepReport, share: Share) -> str:
        """Return why the loss of the step is not that of fresh weights; "" if it may be, or is not
        finite and so tells nothing."""
        loss = report.loss
        if loss != loss or abs(loss) == float("inf"):
            why = f"the loss of the first step was {loss}"
            self._findings[FIRST_LOSS] = InvariantFinding(NOT_TRIED, why)
            # a skipped step leaves the weights fresh
            self._awaits_first_loss = not report.changed
            return ""
        self._awaits_first_loss = False
        expected = optional_parts.expected_first_loss(self._model, share)
        problem = expected.problem(loss)
        if not problem:
            limits = f"{loss:.4f} between {expected.low:.4f} and {expected.high:.4f}"
            self._prove(FIRST_LOSS, limits)
        return problem

    def _movement_problems(self, report: StepReport) -> Iterator[str]:
        """Yield what is wrong with the movement of the weights from those before the step, in a
        step in which it is compared (`before`)."""
        self._watches = False
        if not report.changed or not report.lr:
            yield from self._still_problems(report)
            return
        moved = self._movement.after(report)
        if self._awaits_movement:
            self._awaits_movement = False
            if untrained := self._movement.untrained(self._is_frozen):
                yield f"{in_words(untrained)} cannot move: no optimizer has what this run trains"
        if moved.unmoved:
            yield f"the step was applied, and {in_words(moved.unmoved)} did not move"
        if moved.frozen_moved:
            yield f"{in_words(moved.frozen_moved)} moved, though frozen"
        # `after` makes the finding WRONG if anything was yielded
        self._prove(MOVEMENT, _named(moved))

    def _still_problems(self, report: StepReport) -> Iterator[str]:
        """Yield a problem if tensors have moved in a step that was skipped, or had a rate of 0.

        Until a step has moved the weights, only the first such step is compared: a run may begin
        with many.
        """
        kind = "was skipped" if not report.changed else "had a learning rate of 0"
        if self._findings[MOVEMENT].verdict == NOT_TRIED:
            self._findings[MOVEMENT] = InvariantFinding(NOT_TRIED, NO_STEP)
        if self._has_compared_skip and self._awaits_movement:
            self._movement.unwatch()
            return
        self._has_compared_skip = True
        if changed := self._movement.changed(report.changed):
            yield f"the step {kind}, and {in_words(changed)} moved"

    def _is_frozen(self, name: str) -> bool:
        """Return True if the tensor of this name need not be trained."""
        if self._model.factory:  # which may freeze what it likes
            return True
        if is_never_trained(name):
            return True
        return any(fnmatchcase(name, pattern) for pattern in self._config.optimizer.frozen)

    def _copies_problem(self) -> str:
        """Return which tensors differ between ranks that hold the same ones; "" if none does.
        Collective over the world."""
        if self._config.train.numerics == "canonical":
            why = 'train.numerics = "canonical", whose ranks are virtual'
            self._findings[COPIES] = InvariantFinding(NOT_TRIED, why)
            return ""
        if self._engine.optimizer.world.size == 1:
            self._findings[COPIES] = InvariantFinding(NOT_TRIED, "one rank holds all")
            return ""
        if differing := differing_copies(self._engine):
            return f"ranks hold different copies of {in_words(differing)}"
        self._prove(COPIES)
        return ""


def _named(moved: Moved) -> str:
    """Return the tensors that have not moved and need not have, with the reason, in words."""
    reasons: list[str] = []
    if moved.without_gradient:
        reasons.append(f"without a gradient: {in_words(moved.without_gradient)}")
    if moved.lost:
        reasons.append(f"too small an update for their dtype: {in_words(moved.lost)}")
    return "; ".join(reasons)
