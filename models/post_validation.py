"""An engine whose stages do not wait for each other to agree on a step: see `megaprec/optim/post_validation.py`.

`update` takes the step on a guess, and the next `accumulate` learns whether it was right, between its warm-up and its
first backward pass. If it was wrong all weights are other ones now: the warm-up is abandoned and made again. A step's
report is thus known during the next step, or when `settle` asks for it.
"""

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.post_validation import PostValidationOptimizer
from megaprec.optim.step_report import StepReport
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.engine import Engine, MakeOptimizer, Share
from parallel.pipeline.instructions import Schedule
from parallel.pipeline.rollback import unread, warmup
from parallel.pipeline.timeline import Recording

SUMMING = partial(PostValidationOptimizer, average=False)


class PostValidationEngine(Engine):
    """An Engine with the same arguments that trains the same model, bit for bit.

    make_optimizer: must build an PostValidationOptimizer.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        mesh: DeviceMesh | None,
        schedule: Schedule,
        *,
        make_optimizer: MakeOptimizer = SUMMING,
        **options: Any,
    ) -> None:
        super().__init__(config, plan, mesh, schedule, make_optimizer=make_optimizer, **options)
        assert isinstance(self.optimizer, PostValidationOptimizer)
        self._optimistic = self.optimizer
        self._warmup = len(warmup(self._train.program))
        self._unread = unread(schedule)[self.pp.rank]

    def accumulate(self, share: Share, number: int, recording: Recording | None = None) -> StepReport | None:
        """As before. Returns the report of the step before, unless `update` or `settle` has given it."""
        self._running = self._begin(share, number, self.optimizer.scale)
        with self.fp8.autocast():
            return self._carry_out(share, number, recording)

    def _carry_out(self, share: Share, number: int, recording: Recording | None) -> StepReport | None:
        """All passes, the warm-up perhaps twice."""
        self._train.spans = spans = recording.spans if recording else None
        self._train.carry_out(0, self._warmup)
        report = None
        if settled := self._optimistic.settle():
            report = settled.report
            if not settled.stands:
                self._train.abandon(self._unread)
                report = self._explained(report, self._taken)
                self._running = self._begin(share, number, self.optimizer.scale)
                if spans is not None:
                    spans.clear()
                self._train.carry_out(0, self._warmup)
        self._train.carry_out(self._warmup, len(self._train.program))
        self._train.finish()
        return report

    def update(self, lr: float) -> StepReport | None:
        """As before. Returns None where the step is taken on a guess."""
        self._taken = self._running
        report = self._optimistic.take(lr, self._taken.loss)
        return None if report is None else self._explained(report, self._taken)

    def settle(self) -> StepReport | None:
        """As before."""
        settled = self._optimistic.settle()
        return None if settled is None else self._explained(settled.report, self._taken)

    def evaluate(self, share: Share) -> float:
        """As before; raises RuntimeError while the last step is not settled."""
        self._optimistic.require_settled()
        return super().evaluate(share)
