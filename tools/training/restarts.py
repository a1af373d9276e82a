"""Starting lost ranks again: whether a failed run goes on by itself, and from where.

`Restarts` decides for the launcher of local ranks. Ranks are started again after a crash, whether
of the machine or of the program, not after an error of the user (exit code 2), a run that stopped
itself (3) or a signal that asked it to stop. If no step was applied since the last start, another
would end in the same way: the run ends, unless parallel.elastic allows a smaller layout without the
rank that could not be started.

The ranks resume from the newest checkpoint as after a restart by hand. Records of later steps are
removed before, so that no step is recorded twice, and events.jsonl receives an event "restart".

torchrun restarts ranks after any failure. Ranks that ended on purpose must not train again, so each
restarted rank looks for the reasons that the ranks of its host noted in the attempt before
(`reason_to_end`).
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import latest, step_of
from megaprec.durable import read_whole
from megaprec.errors import UserError
from tools.config.layouts import largest_fitting
from tools.config.run_file import RunConfig
from tools.console.units import counted
from tools.journal.journal import rewind
from tools.journal.records import read_metrics
from tools.training.endings import CODES, ended_on_purpose
from tools.training.launch import Loss
from tools.training.signals import SIGNALS

STOP_SIGNALS = (*SIGNALS, signal.SIGQUIT)  # signals that ask a run to stop


class Restarts:
    """Decides after each failure on how many local ranks a run goes on.

    Its method `again` is the argument of `launch_local`.

    alone: returns a lock on the run folder.
    """

    def __init__(
        self, config: RunConfig, alone: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.config = config
        self.alone = alone
        self.left = config.train.restarts
        self.ranks = config.world_size
        self.restarted = False
        self._remember_start()

    def again(self, loss: Loss) -> int:
        """Print and return how many ranks are started after `loss`; 0 if the run ends."""
        if not self.config.train.restarts or ended_by_choice(loss.exitcode):
            return 0
        try:
            ranks = self._ranks_to_start()
            if ranks:
                self._record_restart(loss, ranks)
        except UserError as error:
            return _refuse_restart("; ".join(error.problems))
        return ranks

    def _ranks_to_start(self) -> int:
        if not self.left:
            return _refuse_restart(
                f"the restarts are used up (train.restarts = {self.config.train.restarts})"
            )
        if self._has_applied_a_step():
            return self.ranks
        # A second start in vain: the rank that was lost may be one that cannot be started.
        if self.restarted and self.config.parallel.elastic:
            fitting = largest_fitting(self.config, self.ranks - 1)
            if fitting and fitting.ranks:
                return fitting.ranks
        return _refuse_restart("no step was applied since the last start")

    def _record_restart(self, loss: Loss, ranks: int) -> None:
        """Announce and record the restart."""
        step = newest_step(self.config)
        lost = ""
        if ranks < self.ranks:
            lost = f", without rank {loss.rank}, which could not be started again"
        self.left -= 1  # counted before the record, which names the restarts that are left
        self.ranks = ranks
        self.restarted = True
        event = restart_event(step, ranks, loss.message, self.left)
        with self.alone():  # raises UserError if another run has begun in the folder
            rewind(Path(self.config.train.folder), step, event)
        origin = f"from the checkpoint of step {step}" if step else "from the start"
        left = f"{counted(self.left, 'restart')} left"
        print(
            f"restart    {loss.message}: training goes on {origin}{lost}; {left}",
            file=sys.stderr,
            flush=True,
        )
        self._remember_start()

    def _remember_start(self) -> None:
        """Remember the state of the run before its ranks are started."""
        records = read_metrics(Path(self.config.train.folder))
        self._last_record = records[-1] if records else None
        self._start_step = newest_step(self.config)

    def _has_applied_a_step(self) -> bool:
        """Return True if the ranks have applied a step since they were started."""
        records = read_metrics(Path(self.config.train.folder))
        # Ranks remove the records of steps after the checkpoint when they resume; until then, and
        # until they have added one, the last record is the old one.
        if not records or records[-1] == self._last_record:
            return False
        return any(
            record["step"] > self._start_step and record["outcome"] == "applied"
            for record in records
        )


def ended_by_choice(exitcode: int) -> bool:
    """Return True if a rank ended on purpose.

    By wrong input, a run that stopped itself, or a signal that asked it to.
    """
    by_signal = {-number for number in STOP_SIGNALS}
    after_signal = {128 + number for number in STOP_SIGNALS}
    return exitcode in CODES.values() or exitcode in by_signal | after_signal


def newest_step(config: RunConfig) -> int:
    """Return the step of the newest checkpoint, 0 if there is none.

    Raises UserError for a damaged one.
    """
    newest = latest(config.checkpoint_folder)
    return step_of(newest) if newest else 0


def restart_event(step: int, ranks: int, reason: str, left: int | None) -> dict[str, Any]:
    """Return the event of a restart after `step`.

    left: restarts that are left, None if another program counts.
    """
    return {"event": "restart", "step": step, "ranks": ranks, "why": reason, "left": left}


def _refuse_restart(reason: str) -> int:
    """Print why the run is not restarted; return 0, the number of ranks to start."""
    print(f"not restarted: {reason}", file=sys.stderr, flush=True)
    return 0


def reason_to_end(environ: Mapping[str, str] = os.environ) -> str:
    """Return why ranks of this host ended on purpose before torchrun restarted them.

    Empty if they crashed.

    torchrun gives the attempts of a host folders side by side, and each rank a file for its reason.
    A new attempt with the same number, after a host has joined, replaces its folder.
    """
    error_file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    attempt_folder = error_file.parent.parent
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or attempt_folder.name != f"attempt_{attempt}":
        return ""
    attempt_before = attempt_folder.with_name(f"attempt_{attempt - 1}")
    for note in sorted(attempt_before.glob("*/error.json")):
        reason = _read_reason(note)
        if ended_on_purpose(reason):
            return reason
    return ""


def _read_reason(note: Path) -> str:
    """Return the reason that `note_failure` has stored; empty if it is not whole."""
    try:
        return str(json.loads(read_whole(note))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
