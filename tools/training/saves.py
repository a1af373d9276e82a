"""The saves of a run: at most one is under way beside the steps, and one that fails does not end
the run.

A save that fails costs a warning: the run goes on, and the next save is a new attempt. Only if the
last save of a run fails does the run end with an error, which names the checkpoint that the same
command goes on from.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import latest, step_of
from megaprec.checkpoint.host_copies import PinnedAhead, block_sizes
from megaprec.checkpoint.saving import HeldFile, Outcome, Saving, changed_module_buffers
from megaprec.checkpoint.snapshot import copied_bytes
from megaprec.durable import file_error, read_whole
from megaprec.errors import UserError
from megaprec.text.tokenizer_files import files_beside
from models.engine.engine import Engine
from tools.config.run_file import RunConfig
from tools.parts import optional_parts
from tools.saved.train_state import EVALUATED, SPIKES, read_progress
from tools.training.branch import open_start
from tools.training.changed_keys import arithmetic, keys_of
from tools.training.corpus import Corpus


class Saves:
    """The saves of the run of `config`. All methods are collective over the world."""

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self._config = config
        self._optimizer = engine.optimizer
        self._fp8 = engine.fp8
        # the entry of each checkpoint that names the functions that torch has compiled
        # (`parallel.leaves`), if there are any
        self._compiled: dict[str, Any] = {}
        if engine.leaves.names:
            self._compiled = {"compiled": engine.leaves.names}
        self._pinned = PinnedAhead([])
        self._saving: Saving | None = None
        self._problem = ""  # of the newest save, if it failed
        self._checked_buffers = False  # True when the model's buffers were looked at
        self._printed_warnings: set[str] = set()

    def pinned_ahead(self, steps_done: int) -> PinnedAhead:
        """Return a context within which a thread pins the memory that the next save of a GPU's
        state copies to, until that save begins.

        Nothing is pinned if the run saves at its end only, when no step waits for it.
        """
        every = self._config.checkpoint.every
        if not every:
            return self._pinned
        next_save = steps_done - steps_done % every + every
        if next_save < self._config.train.steps:
            self._pinned = PinnedAhead(block_sizes(copied_bytes(self._optimizer)))
        return self._pinned

    def start(
        self,
        step: int,
        extra: dict[str, Any],
        files: Sequence[HeldFile],
        losses: Mapping[str, float],
    ) -> None:
        """Save the state after `step`, when the save before is finished. extra, files, losses: see
        `Saving`.
        """
        self._wait()  # at most one save is under way
        self._pinned.release()  # the copies find it there
        settings = self._config.checkpoint
        self._saving = Saving(
            folder=self._config.checkpoint_folder,
            step=step,
            optimizer=self._optimizer,
            extra=extra | self._compiled,
            keep=settings.kept,
            files=files,
            fp8=self._fp8,
            background=settings.background,
            losses=losses,
            leave_beside=optional_parts.export_kept if settings.export == "hf" else None,
        )
        # Training waits; the outcome is known before the next step.
        if not settings.background:
            self._wait()

    def require_savable_once(self) -> None:
        """Raise UserError on every rank if no checkpoint can hold all state that training changes.

        Looks once, after the first step, which is the first moment at which it shows.
        """
        if self._checked_buffers:
            return
        self._checked_buffers = True
        unsaved = changed_module_buffers(self._optimizer)
        # A buffer that is not trained is remade from the configuration; one that changes would be
        # lost.
        if unsaved:
            others = f" (and {len(unsaved) - 1} more)" if len(unsaved) > 1 else ""
            raise UserError.of("training.buffer_changes", unsaved=unsaved[0], others=others)

    def poll(self) -> None:
        """Take note of the outcome of the save that is under way, if there is one."""
        outcome = None if self._saving is None else self._saving.poll()
        if outcome is not None:
            self._record_outcome(outcome)

    def finish(self, step: int, stopped: str = "") -> None:
        """Wait for the last save of the run. Raises UserError on every rank if it failed.

        step: the last one that was taken. stopped: the reason why the run ends before its last
            step.
        """
        self._wait()
        if self._problem:
            lines = [f"training stopped: {stopped}"] if stopped else []
            lines.append(f"{self._problem}; {resume_point(self._config, step)}")
            raise UserError(*lines)

    def _wait(self) -> None:
        if self._saving is not None:
            self._record_outcome(self._saving.finish())

    def _record_outcome(self, outcome: Outcome) -> None:
        """Note that no save is under way, keep its problem if it failed, and print that (rank 0
        alone) and its warnings."""
        self._saving = None
        self._print_warnings(outcome.warnings)
        self._problem = ""
        if outcome.problem:
            self._problem = f"{outcome.path} is not saved: {outcome.problem}"
        if self._problem and self._optimizer.world.rank == 0:
            effect = "training goes on, and the next save is a new attempt"
            print(f"warning    {self._problem}; {effect}", file=sys.stderr, flush=True)

    def _print_warnings(self, warnings: Sequence[str]) -> None:
        """Print each warning once, and again if it was gone in the meantime."""
        for warning in warnings:
            if warning not in self._printed_warnings:
                print(f"warning    {warning}", file=sys.stderr, flush=True)
        # A warning that is gone is forgotten, so that it is printed if it comes back.
        self._printed_warnings = set(warnings)


def extra_entries(
    config: RunConfig,
    corpus: Corpus,
    progress: dict[str, Any],
    watch: dict[str, Any],
    spikes: dict[str, Any],
    first_ids: dict[str, Any],
    evaluated: dict[str, Any],
) -> dict[str, Any]:
    """Return what a checkpoint has besides the optimizer's state.

    watch, spikes: the states of the monitors of overflows and of spikes. first_ids: entries of
        `tools.convert.kept_ids`. evaluated: see `evaluated_entries`.
    """
    extra = {
        "model": json.loads(corpus.model.model_dump_json()),
        "progress": progress,
        "watch": watch,
        SPIKES: spikes,
        "layout": config.parallel.model_dump(),
        "precision": config.precision.model_dump(),
        "tokenizer": corpus.tokenizer.path.name if corpus.tokenizer else "",
        "documents": asdict(corpus.documents),
        **first_ids,
        **arithmetic(),
        "run": keys_of(config),
        EVALUATED: evaluated,
    }
    if corpus.identity:
        extra["data"] = corpus.identity.model_dump()
    return extra


def evaluated_entries(
    losses: Mapping[str, float], tokens: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Return the losses of an evaluation, each with the number of its tokens, by field; without
    those that are not finite, for which JSON has no form."""
    entries: dict[str, dict[str, float]] = {}
    for field, loss in losses.items():
        if math.isfinite(loss):
            entries[field] = {"loss": loss, "tokens": tokens[field]}
    return entries


def tokenizer_files(corpus: Corpus) -> list[Path]:
    """Return the tokenizer's file and the settings beside it, which name the token that ends a
    document.
    """
    if not corpus.tokenizer:
        return []
    path = corpus.tokenizer.path
    return [file for file in (path, *files_beside(path)) if file.is_file()]


def resume_point(config: RunConfig, step: int) -> str:
    """Return where the same command goes on from, and the steps that are lost, in words.

    step: the last one taken.
    """
    folder = config.checkpoint_folder
    try:
        newest = latest(folder)
        origin = None if newest else open_start(config)
    except UserError as error:
        return str(error)
    if newest is None:
        saved_step = read_progress(origin).step if origin else 0
        begins = f"branches anew from {origin.path}" if origin else "starts anew"
        message = f"there is no whole checkpoint in {folder}: the same command {begins}"
    else:
        saved_step = step_of(newest)
        message = f"the newest whole checkpoint is {newest}: the same command goes on from it"
    if saved_step < step:
        steps = f"step {step}"
        if saved_step + 1 < step:
            steps = f"steps {saved_step + 1} to {step}"
        message += f" and takes {steps} again"
    return message


def held_tokenizer(corpus: Corpus) -> list[HeldFile]:
    """Read the files of the tokenizer, for all saves of the run: one that is moved or replaced
    while the run goes on is not what the model was trained with. Raises UserError."""
    try:
        return [HeldFile(file.name, read_whole(file)) for file in tokenizer_files(corpus)]
    except OSError as error:
        raise UserError(file_error(error)) from error
