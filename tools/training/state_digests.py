"""digests.jsonl: in every `log.digests`-th step, digests of the state by logical tensor, the same
in every layout.

A line is written after the step, and once after a resume for the state that was loaded. Two runs
that ought to be the same have the same lines; the first that differs names the step and the
tensors.
"""

from dataclasses import asdict
from typing import Any

from megaprec.diagnose.state_digest import StateDigest, fold_digests
from megaprec.optim.step_report import StepReport
from models.engine.engine import Engine
from tools.config.run_file import RunConfig
from tools.convert.train_state import TrainState
from tools.journal.records import DIGEST

STEP_FIELDS = ("outcome", "loss", "grad_norm", "loss_scale")


class Digests:
    """The digests of a run.

    Without log.digests none are computed. Methods that return events are collective.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        self._every = config.log.digests
        self._optimizer = engine.optimizer
        self._state = StateDigest(engine.optimizer, engine.fp8)

    def due(self, step: int) -> bool:
        """Return True if the state after step `step`, counted from 1, is digested."""
        return bool(self._every) and step % self._every == 0

    def of_step(self, report: StepReport, progress: TrainState) -> list[dict[str, Any]]:
        """Return the event of a step that was taken: one if it is due, else none."""
        if not self.due(progress.step):
            return []
        step_fields = {name: getattr(report, name) for name in STEP_FIELDS}
        return [self._event(progress, step_fields)]

    def of_loaded(self, progress: TrainState, resumed: object) -> list[dict[str, Any]]:
        """Return the event of a state that was loaded, if there is one.

        resumed: the checkpoint, or None.
        """
        if self._every and resumed:  # whatever the step: it shows that the load was exact
            return [self._event(progress, {"loaded": str(resumed)})]
        return []

    def _event(self, progress: TrainState, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the event of the state as it is now. fields: about the step or the load."""
        tensor_digests = self._state.make()
        numbers = self._optimizer.numbers()
        progress_fields = asdict(progress)
        return {
            "event": DIGEST,
            "step": progress.step,
            **fields,
            "state": fold_digests(tensor_digests, numbers, progress_fields),
            "numbers": numbers,
            "progress": progress_fields,
            "tensors": tensor_digests,
        }
