"""Deaths planted in the ranks of the real command: which rank, at which call of which function, and
how.

`planted` starts every rank with a program that plants the deaths named in the variable DEATHS. Each
happens once in a run, however often its ranks are started, unless it happens always.
"""

import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megaprec.errors import UserError
from tools.training import launch
from tools.training.ends import TrainingDiverged

PLACES = {
    "boot": ("tools.commands.train", "load_run"),
    "model": ("models.engine.engine", "Engine.__init__"),
    "forward": ("parallel.pipeline.executor", "Executor._forward"),
    "backward": ("parallel.pipeline.executor", "Executor._backward"),
    "gather": ("megaprec.optim.state.weight_buffer", "WeightBuffer.make_room"),
    "step": ("megaprec.optim.optimizer", "ParallelAMPOptimizer.step"),
    "evaluate": ("tools.training.trainer", "Trainer.evaluate"),
    "save": ("tools.training.trainer", "Trainer._save"),
    "sync": ("os", "fsync"),
    "leave": ("parallel.mesh", "_leave_world"),
}
DEATHS = "DEATHS"
START = "from megaprec.__main__ import main"
PLANTING = f"from tests.training.deaths import plant; plant()\n{START}"


@dataclass(frozen=True)
class Death:
    """The death of `rank` at the n-th call of a place since it was started.

    how: a signal, an exception, an exit code, or "slow": after the call the rank is cut off, and
    ends much later. always: at every start. after: number of the death that must have happened
    before, -1 for none.
    """

    rank: int
    place: str
    call: int
    how: str = "SIGKILL"
    always: bool = False
    after: int = -1


def planted(patch: pytest.MonkeyPatch, folder: Path, *deaths: Death) -> None:
    """Plant these deaths in all ranks that this process launches. folder: for marks of those that
    have happened."""
    assert START in launch.PROGRAM
    patch.setattr(launch, "PROGRAM", launch.PROGRAM.replace(START, PLANTING))
    patch.setenv(DEATHS, json.dumps([str(folder), *map(asdict, deaths)]))


def plant() -> None:
    """Plant the deaths of this rank."""
    folder, *deaths = json.loads(os.environ[DEATHS])
    for number, said in enumerate(deaths):
        death = Death(**said)
        due = death.after < 0 or (Path(folder) / f"death{death.after}").exists()
        if due and death.rank == int(os.environ["RANK"]):
            _plant(death, Path(folder) / f"death{number}")


def _plant(death: Death, mark: Path) -> None:
    module, path = PLACES[death.place]
    owner: Any = importlib.import_module(module)
    *names, name = path.split(".")
    for part in names:
        owner = getattr(owner, part)
    setattr(owner, name, _deadly(getattr(owner, name), death, mark))


def _deadly(function: Callable[..., Any], death: Death, mark: Path) -> Callable[..., Any]:
    calls = 0

    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == death.call and (death.always or not mark.exists()):
            mark.touch()
            if death.how == "slow":
                function(*arguments, **options)
                _end_late()
            _die(death.how)
        return function(*arguments, **options)

    return called


def _end_late() -> NoReturn:
    """Close this rank's connections to the others, as the end of its process does, and end a minute
    later."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    time.sleep(60)
    os._exit(1)


def _die(how: str) -> None:
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how.isdecimal():
        os._exit(int(how))
    else:
        errors: Sequence[type[Exception]] = (
            RuntimeError,
            OSError,
            MemoryError,
            UserError,
            TrainingDiverged,
        )
        raise next(kind for kind in errors if kind.__name__ == how)("planted")
