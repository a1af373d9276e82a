"""Training steps in which no stage waits for the other ranks' verdict.

`megaprec/optim/post_validation.py` explains why that is sound.

`update` takes the step speculatively. The next `accumulate` learns whether the step was valid,
between its warm-up and its first backward pass. If it was not valid, the weights are corrected, and
the warm-up is abandoned and repeated with them. A step's report is therefore known during the next
step, or when `settle` asks for it.

The engine does not depend on this module: it only provides passes and explanations of skipped
steps.
"""

from collections.abc import Callable, Iterator

from megaprec.optim.post_validation import PostValidationOptimizer
from megaprec.optim.step_report import StepReport
from models.engine.engine import Engine
from models.engine.passes import Running, Share
from parallel.pipeline.executor import Executor
from parallel.pipeline.rollback import unread, warmup
from parallel.pipeline.simulation import Span
from parallel.pipeline.timeline import Recording


class PostValidation:
    """Takes the steps of `engine`, whose optimizer must be a PostValidationOptimizer.

    The trained model is the same as by `engine.step`, bit for bit. Raises UserError for a schedule
    whose warm-up cannot be abandoned, and TypeError for another optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.optimizer, PostValidationOptimizer):
            raise TypeError("build the engine with a PostValidationOptimizer")
        self.engine = engine
        self.optimizer = engine.optimizer
        self._warmup = len(warmup(engine.passes.program))
        self._unread = unread(engine.schedule)[engine.pp.rank]
        self._last_run: Running | None = None  # the passes of the last step

    def step(
        self,
        share: Share,
        number: int,
        lr: Callable[[], float],
        wants_outcome: Callable[[], bool],
        recording: Recording | None = None,
    ) -> Iterator[StepReport]:
        """Take one step. Yields the report of each step whose outcome becomes known, the report of
        the last step first.

        lr, wants_outcome: called after the first report, if any, has been consumed: the learning
            rate, and True if this step's own outcome is needed at its end.
        """
        # The last step's outcome becomes known within these passes.
        last_report = self.accumulate(share, number, recording)
        if last_report is not None:
            yield last_report
        report = self.update(lr())
        if report is None and wants_outcome():
            report = self.settle()
        if report is not None:
            yield report

    def accumulate(
        self, share: Share, number: int, recording: Recording | None = None
    ) -> StepReport | None:
        """Run all passes, the warm-up possibly twice. Returns the last step's report unless it is
        known already."""
        spans = recording.spans if recording else None
        with self.engine.fp8.autocast():
            run, executor = self._warm_up(share, number, spans)
            report: StepReport | None = None
            settled = self.optimizer.settle()
            if settled is not None and settled.stands:
                report = self._explain(settled.report)
            elif settled is not None:
                # The warm-up has read weights that the correction has changed.
                executor.abandon(self._unread)
                run.end()
                # Explaining a skipped step runs its passes, so the warm-up comes after it.
                report = self._explain(settled.report)
                if spans is not None:
                    spans.clear()
                run, executor = self._warm_up(share, number, spans)
            # The first backward pass begins here, with weights that stand.
            executor.carry_out(self._warmup, len(executor.program))
            executor.finish()
        self.engine.passes.position.at("gradient reduction")
        self._last_run = run
        return report

    def _warm_up(
        self, share: Share, number: int, spans: list[Span] | None
    ) -> tuple[Running, Executor]:
        """Run the passes before the first backward pass, and return the executor that runs the
        rest."""
        run, executor = self.engine.begin_passes(share, number, spans)
        executor.carry_out(0, self._warmup)
        return run, executor

    def update(self, lr: float) -> StepReport | None:
        """Apply or skip the step, or take it speculatively; the report is then not known yet, and
        None is returned."""
        run = self._last_run
        assert run is not None, "update comes after accumulate"
        report = self.optimizer.take(lr, run.loss, run.token_count.total)
        return None if report is None else self._explain(report)

    def settle(self) -> StepReport | None:
        """Return the report of the last step, or None if it was known before. Call this before
        evaluating or saving."""
        settled = self.optimizer.settle()
        return None if settled is None else self._explain(settled.report)

    def _explain(self, report: StepReport) -> StepReport:
        assert self._last_run is not None
        return self.engine.explain(report, self._last_run)
