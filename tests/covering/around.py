"""What a row asks for besides the steps of its layout: evaluations between them, and a resume.

A resume is within the recorded run: after `RESUMED_AFTER` steps all weights and moments become NaN,
and are read from a checkpoint, of the layout itself or of one process. What is not read stays NaN.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megaprec.checkpoint.save_load import load, save
from tools.training.trainer import Trainer
from tools.verify.parity.record import RecordedTrainer

FILE = "around.json"  # in the folder of a row
RESUMED_AFTER = 2
EVALUATION = "evaluation"
OWN = "its own"
ONE = "one process's"


def write_around(folder: Path, names: Sequence[str]) -> None:
    """Leave what the trainers of a row are to do besides."""
    (folder / FILE).write_text(json.dumps(list(names)))


@contextmanager
def obeyed() -> Iterator[None]:
    """Trainers of this process do what `write_around` has left."""
    with patch.object(RecordedTrainer, "step", _step):
        yield


def _step(self: RecordedTrainer) -> Any:
    folder = Path(self.config.train.folder).parent
    names: list[str] = json.loads((folder / FILE).read_text()) if (folder / FILE).exists() else []
    if EVALUATION in names:
        _ = self.evaluate(self.samples.samples)
    report = Trainer.step(self)
    if self.progress.step != RESUMED_AFTER or self.recorder.plan.shaken:
        return report
    one = folder / "one"
    if self.config.world_size == 1 and ONE in names and not one.exists():
        save(one, RESUMED_AFTER, self.engine.optimizer, {})
    if self.config.world_size == 1:
        return report
    if OWN in names:
        _resume(self, save(folder / "own", RESUMED_AFTER, self.engine.optimizer, {}))
    if ONE in names:
        (checkpoint,) = one.glob("step_*")
        _resume(self, checkpoint)
    return report


def _resume(trainer: RecordedTrainer, checkpoint: Path) -> None:
    optimizer = trainer.engine.optimizer
    optimizer.wait()
    for buffer in optimizer.all_buffers():
        weights = buffer.own_weights if buffer.shards_weights else buffer.weights
        for values in (weights, *buffer.state.values()):
            # what pads a buffer is zero for good, and is in no checkpoint
            values.masked_fill_(values != 0, torch.nan)
    load(checkpoint, optimizer, trainer.engine.fp8)
