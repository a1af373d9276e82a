"""The saves of a run: at most one is under way beside the steps, and one that fails does not end
the run.

A save that fails costs a warning: the run goes on, and the next save is a new attempt. Only if the
last save of a run fails does the run end with an error, which names the checkpoint that the same
command goes on from.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import latest, step_of
from megaprec.checkpoint.saving import Outcome, Saving, unsaved_buffers
from megaprec.data.tokenizer_files import settings_of
from megaprec.errors import UserError
from models.engine import Engine
from tools.config.run_file import RunConfig
from tools.training.arithmetic import arithmetic
from tools.training.changed_keys import keys_of
from tools.training.corpus import Corpus


class Saves:
    """The saves of the run of `config`. All methods are collective over the world."""

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self._config = config
        self._optimizer = engine.optimizer
        self._fp8 = engine.fp8
        self._leaves = {"compiled": engine.leaves.names} if config.train.compile != "off" else {}
        self._saving: Saving | None = None
        self._problem = ""  # of the newest save, if it failed
        self._looked = False  # True when the model's buffers were looked at
        self._told: set[str] = set()  # warnings

    @property
    def under_way(self) -> bool:
        """Return True if a save is not finished yet. The same on every rank."""
        return self._saving is not None

    def start(self, step: int, extra: dict[str, Any], files: Sequence[Path]) -> None:
        """Save the state after `step`. Waits for the save before, if that is not finished. extra,
        files: see `save`."""
        self._wait()
        settings = self._config.checkpoint
        self._saving = Saving(
            self._config.checkpoint_folder,
            step,
            self._optimizer,
            extra | self._leaves,
            settings.kept,
            files,
            self._fp8,
            background=settings.background,
        )
        if not settings.background:
            self._wait()

    def require_whole(self) -> None:
        """Raise UserError on every rank if the model has state that training changes and that no
        checkpoint can hold.

        Looks once, after the first step, which is the first moment at which it shows.
        """
        left_out = [] if self._looked else unsaved_buffers(self._optimizer)
        self._looked = True
        if left_out:
            raise UserError(
                f"model.factory: {left_out[0]} is a buffer that training "
                f"changes{f' ({len(left_out) - 1} others too)' if left_out[1:] else ''}; "
                "checkpoints hold parameters only, so a resumed run would begin with another "
                "value: leave it out (a BatchNorm: track_running_stats=False), or register it "
                "with persistent=False if it may begin anew"
            )

    def poll(self) -> None:
        """Take note of the outcome of the save that is under way, if there is one."""
        if self._saving is not None and (outcome := self._saving.poll()) is not None:
            self._note(outcome)

    def finish(self, step: int, stopped: str = "") -> None:
        """Wait for the last save of the run. Raises UserError on every rank if it failed.

        step: the last one that was taken. stopped: the reason why the run ends before its last
            step.
        """
        self._wait()
        if self._problem:
            lines = [f"{self._problem}; {goes_on(self._config.checkpoint_folder, step)}"]
            raise UserError(*([f"training stopped: {stopped}"] if stopped else []), *lines)

    def _wait(self) -> None:
        if self._saving is not None:
            self._note(self._saving.finish())

    def _note(self, outcome: Outcome) -> None:
        self._saving = None
        self._problem = f"{outcome.path} is not saved: {outcome.problem}" if outcome.problem else ""
        self._warn(outcome.warnings)
        if self._problem and self._optimizer.world.rank == 0:
            again = "training goes on, and the next save is a new attempt"
            print(f"warning    {self._problem}; {again}", file=sys.stderr, flush=True)

    def _warn(self, warnings: Sequence[str]) -> None:
        """Print each warning once, and again if it was gone in the meantime."""
        for line in (line for line in warnings if line not in self._told):
            print(f"warning    {line}", file=sys.stderr, flush=True)
        self._told = set(warnings)


def beside_the_state(
    config: RunConfig, corpus: Corpus, progress: dict[str, Any], watch: dict[str, Any]
) -> dict[str, Any]:
    """Return what a checkpoint has besides the optimizer's state. watch: the state of the overflow
    monitor."""
    extra = {
        "model": json.loads(corpus.model.model_dump_json()),
        "progress": progress,
        "watch": watch,
        "layout": config.parallel.model_dump(),
        "precision": config.precision.model_dump(),
        "tokenizer": corpus.tokenizer.path.name if corpus.tokenizer else "",
        "documents": asdict(corpus.documents),
        **arithmetic(),
        "run": keys_of(config),
    }
    return extra | ({"data": corpus.identity.model_dump()} if corpus.identity else {})


def tokenizer_files(corpus: Corpus) -> list[Path]:
    """Return the tokenizer's file, and the settings beside it, which name the token that ends a
    document."""
    if not corpus.tokenizer:
        return []
    path = corpus.tokenizer.path
    return [file for file in (path, *settings_of(path)) if file.is_file()]


def goes_on(folder: Path, step: int) -> str:
    """Return the place from which the same command goes on, and the steps that are lost. step: the
    last one taken."""
    try:
        newest = latest(folder)
    except UserError as error:
        return str(error)
    if newest is None:
        kept = 0
        line = f"there is no whole checkpoint in {folder}: the same command starts anew"
    else:
        kept = step_of(newest)
        line = f"the newest whole checkpoint is {newest}: the same command goes on from it"
    if kept < step:
        steps = f"step {step}" if kept + 1 == step else f"steps {kept + 1} to {step}"
        line += f" and takes {steps} again"
    return line
