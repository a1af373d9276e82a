"""Training steps in which no stage waits for the others to agree: see `megaprec/optim/post_validation.py`.

`update` takes the step on a guess, and the next `accumulate` learns whether it was right, between its warm-up and its
first backward pass. If it was wrong all weights are other ones now: the warm-up is abandoned and made again. A step's
report is thus known during the next step, or when `settle` asks for it.

The engine knows nothing of this: it is asked for passes and for an explanation of skipped steps, as anyone may.
"""

from collections.abc import Callable, Iterator

from megaprec.optim.post_validation import PostValidationOptimizer
from megaprec.optim.step_report import StepReport
from models.engine import Engine
from models.passes import Running, Share
from parallel.pipeline.executor import Executor
from parallel.pipeline.rollback import unread, warmup
from parallel.pipeline.simulation import Span
from parallel.pipeline.timeline import Recording


class PostValidation:
    """Takes the steps of `engine`, whose optimizer must be a PostValidationOptimizer; the model comes out the same as
    by `engine.step`, bit for bit. Raises UserError for a schedule whose warm-up cannot be abandoned."""

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.optimizer, PostValidationOptimizer):
            raise TypeError("build the engine with make_optimizer=PostValidationOptimizer")
        self.engine, self.optimizer = engine, engine.optimizer
        self._warmup = len(warmup(engine.passes.program))
        self._unread = unread(engine.schedule)[engine.pp.rank]
        self._run: Running | None = None  # of the last step

    def step(
        self,
        share: Share,
        number: int,
        lr: Callable[[], float],
        wants_outcome: Callable[[], bool],
        recording: Recording | None = None,
    ) -> Iterator[StepReport]:
        """Takes one step. Yields the report of each step whose outcome becomes known, that of the last one first.

        lr, wants_outcome: asked for when the first of them is taken note of: the learning rate, and whether this step's
        own outcome is needed at its end.
        """
        if before := self.accumulate(share, number, recording):
            yield before
        report = self.update(lr())
        if report is None and wants_outcome():
            report = self.settle()
        if report is not None:
            yield report

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> StepReport | None:
        """All passes, the warm-up perhaps twice. Returns the report of the step before, unless it is known already."""
        spans = recording.spans if recording else None
        with self.engine.fp8.autocast():
            run, executor = self._warm_up(share, number, spans)
            report = None
            if settled := self.optimizer.settle():
                report = settled.report
                if not settled.stands:
                    executor.abandon(self._unread)
                    report = self._explain(report)
                    if spans is not None:
                        spans.clear()
                    run, executor = self._warm_up(share, number, spans)
            executor.carry_out(self._warmup, len(executor.program))
            executor.finish()
        self._run = run
        return report

    def _warm_up(self, share: Share, number: int, spans: list[Span] | None) -> tuple[Running, Executor]:
        """The passes before the first backward pass, and what carries out the rest."""
        run = self.engine.passes.begin(share, number, self.optimizer.scale)
        executor = self.engine.passes.executor(run, spans=spans)
        executor.carry_out(0, self._warmup)
        return run, executor

    def update(self, lr: float) -> StepReport | None:
        """Applies or skips the step, or takes it on a guess; then its report, None, is not known yet."""
        assert self._run is not None, "update comes after accumulate"
        report = self.optimizer.take(lr, self._run.loss)
        return None if report is None else self._explain(report)

    def settle(self) -> StepReport | None:
        """The report of the last step, if it was not known. To be called before evaluating or saving."""
        settled = self.optimizer.settle()
        return None if settled is None else self._explain(settled.report)

    def _explain(self, report: StepReport) -> StepReport:
        assert self._run is not None
        return self.engine.explain(report, self._run)
