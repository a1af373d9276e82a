"""A rank of `megaprec train` that stops, sleeps or ends at a chosen place.

python -m tests.training.planted ACTION RANK PHASE STEP WORDS FILE train run.toml ...: rank RANK
does ACTION when it begins an instruction or action whose words begin with WORDS, in a phase and a
step. FILE then has the time.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from megaprec.diagnose.position import Position, in_words
from models.decoder.layer import DecoderLayer
from parallel import mesh
from parallel.hangs import heartbeat, watchdog
from tools.cli import main

# the first step imports much, which takes a busy machine long
LONG = 60.0
NEWS = 1.0
WINDOW = 4.0
SKIPS = "leave out layer"  # and its number: the next time that the model comes to it
ACTIONS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1e6),
    "leave": lambda: os._exit(7),
    "raise": lambda: 1 / 0,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "hang up": lambda: os.kill(os.getpid(), signal.SIGHUP),
}
# in every step from STEP on this rank sleeps three times as long as the step has taken it
SLOW = "slow"


def leave_out(number: int) -> None:
    """Have the model pass by a layer when it comes to it, once."""
    call = DecoderLayer.__call__
    num_called = 0

    def passing_by(self: DecoderLayer, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_called
        num_called += 1
        return x if num_called == number + 1 else call(self, x, *args, **kwargs)

    DecoderLayer.__call__ = passing_by


def plant(ending: str, rank: str, phase: str, step: int, words: str, file: Path) -> None:
    """Has this rank do `ending`, once, if it is `rank`."""
    at = Position.note_action

    def planted(self: Position, action: object) -> None:
        at(self, action)
        again = ending == SLOW
        when = self.step == step or (again and self.step > step)
        there = self.phase == phase and when and in_words(action).startswith(words)
        if there and os.environ.get("RANK", "0") == rank and (again or not file.exists()):
            file.write_text(str(time.time()))
            if ending.startswith(SKIPS):
                leave_out(int(ending.removeprefix(SKIPS)))
            elif again:
                time.sleep(max(0.2, 3 * (time.monotonic() - self._since)))
            else:
                ACTIONS[ending]()

    Position.note_action = planted


if __name__ == "__main__":
    watchdog.LONG = LONG
    mesh.NEWS = NEWS
    heartbeat.WINDOW = WINDOW
    action, rank, phase, step, words, file, *command = sys.argv[1:]
    plant(action, rank, phase, int(step), words, Path(file))
    sys.exit(main(command))
