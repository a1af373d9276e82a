"""The tracker Weights & Biases, over the network or, with WANDB_MODE=offline, into the folder wandb
of the run.

It is sent the run's configuration and numbers and nothing else: no environment, command line, code,
git remote, console output or facts of the machine. A resumed run has the id of the run before, and
its steps. Steps that were taken again are shown as they were first: the service keeps the first
value of a step.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaprec.durable import file_error
from megaprec.errors import UserError

PROJECT = "megaprec"
ID = "id.txt"  # in the folder wandb of the run
SECONDS = 60  # time limit of each exchange with the service
# settings that keep everything but configuration and numbers here
PRIVATE = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "",
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}


class Wandb:
    """Sender of the numbers of a run. See `tools.journal.trackers.Tracker`."""

    def __init__(self, folder: Path) -> None:
        import wandb  # noqa: PLC0415  # optional, and slow to import

        self._wandb = wandb
        self._folder = folder

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Begin a run, or go on with that of this folder."""
        settings = self._wandb.Settings(
            silent=True, init_timeout=SECONDS, finish_timeout=SECONDS, **PRIVATE
        )
        self._run = self._wandb.init(
            id=_run_id(self._folder / "wandb" / ID, step),
            name=self._folder.resolve().name,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=str(self._folder),
            config=dict(configuration),
            resume="allow",
            settings=settings,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def finish(self, complete: bool) -> None:
        """Send what waits, and end the run: as failed if it is not complete."""
        self._run.finish(exit_code=0 if complete else 1)


def require_account() -> None:
    """Raise UserError if the service would ask for an account in the middle of a run."""
    import wandb  # noqa: PLC0415  # optional, and slow to import

    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    try:
        has_account = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise UserError.of("journal.wandb_key", error=error) from error
    if not has_account:
        raise UserError.of("journal.wandb_account")


def _run_id(path: Path, step: int) -> str:
    """Return the id of the run in the file `path`, a new one for a run that begins."""
    try:
        if step and path.is_file():
            saved_id = path.read_text(encoding="utf-8").strip()
            if saved_id.isalnum():
                return saved_id
        path.parent.mkdir(exist_ok=True)
        new_id = uuid.uuid4().hex
        path.write_text(f"{new_id}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(file_error(error)) from error
    return new_id
