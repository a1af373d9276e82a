"""trackio as a tracker: a run in trackio's own database, which `trackio show` shows.

The database is in TRACKIO_DIR or where trackio has it, and on the server of TRACKIO_SERVER_URL or
the Space of TRACKIO_SPACE_ID if one is set. Measurements of the machine are off.
"""

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.journal.run_id import save_id, saved_id

PROJECT = "megaprec"
NAME = Path("trackio") / "name.txt"  # in the folder of the run
SHOWN = 8  # random characters in a name, for folders of two runs may have one name


class Trackio:
    """Sender of the numbers of a run to trackio.

    A resumed run is the run before, and has each step once: those that are taken again are shown as
    they were first.
    """

    def __init__(self, folder: Path) -> None:
        import trackio  # noqa: PLC0415  # optional, and slow to import
        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415

        self._trackio = trackio
        self._storage = SQLiteStorage
        self._folder = folder

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Begin a run, or go on with that of this folder."""
        name_file = self._folder / NAME
        name = saved_id(name_file, step)
        if not name:
            name = _new_name(self._folder)
            save_id(name_file, name)
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        # Of a run that is elsewhere than here nothing is known, and steps may be there twice.
        self._last = self._storage.get_max_step_for_run(project, name) or 0
        self._run = self._trackio.init(
            project,
            name=name,
            config=dict(configuration),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step, unless the run has them."""
        if step > self._last:
            self._run.log(dict(numbers), step=step)

    def finish(self, complete: bool) -> None:
        """Send what waits, and end the run; trackio has no word for one that is not complete."""
        self._run.finish()


def _new_name(folder: Path) -> str:
    """Return a name that no other run has: that of the folder, and some random characters."""
    readable = re.sub(r"[^\w-]", "_", folder.resolve().name)
    return f"{readable}-{uuid.uuid4().hex[:SHOWN]}"
