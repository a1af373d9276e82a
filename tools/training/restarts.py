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

from megaprec.checkpoint.atomic import latest
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

ASKED = (*SIGNALS, signal.SIGQUIT)  # signals that ask a run to stop


class Restarts:
    """Decides after each failure on how many local ranks a run goes on; `again` is for
    `launch_local`.

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
        self._mark()

    def again(self, loss: Loss) -> int:
        """Return the number of ranks to start after `loss`, 0 if the run ends; print the
        decision."""
        if not self.config.train.restarts or ended_by_choice(loss.exitcode):
            return 0
        try:
            ranks = self._ranks_again()
            if ranks:
                self._go_on(loss, ranks)
        except UserError as error:
            return _not_restarted("; ".join(error.problems))
        return ranks

    def _ranks_again(self) -> int:
        if not self.left:
            return _not_restarted(
                f"the restarts are used up (train.restarts = {self.config.train.restarts})"
            )
        if self._applied():
            return self.ranks
        smaller = self._smaller() if self.restarted and self.config.parallel.elastic else 0
        return smaller or _not_restarted("no step was applied since the last start")

    def _go_on(self, loss: Loss, ranks: int) -> None:
        """Announce and record the restart."""
        step = newest_step(self.config)
        if ranks < self.ranks:
            lost = f", without rank {loss.rank}, which could not be started again"
        else:
            lost = ""
        self.left = self.left - 1
        self.ranks = ranks
        self.restarted = True
        with self.alone():
            rewind(
                Path(self.config.train.folder),
                step,
                restart_event(step, ranks, loss.said, self.left),
            )
        where = f"from the checkpoint of step {step}" if step else "from the start"
        left = f"{counted(self.left, 'restart')} left"
        print(
            f"restart    {loss.said}: training goes on {where}{lost}; {left}",
            file=sys.stderr,
            flush=True,
        )
        self._mark()

    def _smaller(self) -> int:
        """Return the number of ranks of the largest layout with one rank less than the last; 0 if
        there is none."""
        fitting = largest_fitting(self.config, self.ranks - 1)
        return fitting.ranks if fitting else 0

    def _mark(self) -> None:
        """Remember the state of the run before its ranks are started."""
        records = read_metrics(Path(self.config.train.folder))
        self._last = records[-1] if records else None
        self._step = newest_step(self.config)

    def _applied(self) -> bool:
        """Return True if the ranks have applied a step since they were started."""
        records = read_metrics(Path(self.config.train.folder))
        if not records or records[-1] == self._last:  # not cut yet, nor added to
            return False
        return any(
            record["step"] > self._step and record["outcome"] == "applied" for record in records
        )


def ended_by_choice(exitcode: int) -> bool:
    """Return True if a rank ended on purpose: wrong input, a run that stopped itself, a signal that
    asked it to."""
    return exitcode in CODES.values() or exitcode in {
        code for number in ASKED for code in (-number, 128 + number)
    }


def newest_step(config: RunConfig) -> int:
    """Return the step of the newest checkpoint, 0 if there is none. Raises UserError for a damaged
    one."""
    newest = latest(config.checkpoint_folder)
    return int(newest.name.removeprefix("step_")) if newest else 0


def restart_event(step: int, ranks: int, why: str, left: int | None) -> dict[str, Any]:
    """Return the event of a restart after `step`. left: restarts that are left, None if another
    program counts."""
    return {"event": "restart", "step": step, "ranks": ranks, "why": why, "left": left}


def _not_restarted(why: str) -> int:
    print(f"not restarted: {why}", file=sys.stderr, flush=True)
    return 0


def reason_to_end(environ: Mapping[str, str] = os.environ) -> str:
    """Return the reason why ranks of this host ended on purpose before torchrun restarted them;
    empty if they crashed.

    torchrun gives the attempts of a host folders side by side, and each rank a file for its reason.
    A new attempt with the same number, after a host has joined, replaces its folder.
    """
    own = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    count = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not count or own.parent.parent.name != f"attempt_{count}":
        return ""
    before = own.parent.parent.with_name(f"attempt_{count - 1}")
    reasons = (_reason(note) for note in sorted(before.glob("*/error.json")))
    return next(filter(ended_on_purpose, reasons), "")


def _reason(note: Path) -> str:
    """Return the reason that `note_failure` has stored; empty if it is not whole."""
    try:
        return str(json.loads(read_whole(note))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
