"""The runs of a proof: `megaprec train` in processes of their own, each in a folder of a temporary
one.

Steps, numbers, data and precision are the user's. Left out is what changes no number: evaluations,
trackers, plots, the sample text. The learning rate is that of the whole run, although few of its
steps are taken.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import checkpoint_path, latest
from megaprec.checkpoint.object_store import fetch_folder
from megaprec.checkpoint.reader import Store
from megaprec.durable import put_text
from megaprec.optim.decision.step_report import SKIPPED
from megaprec.tokens.places import is_remote
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel
from tools.console.units import counted
from tools.journal.records import read_digests, read_metrics
from tools.saved.train_state import read_progress
from tools.training.data_sources import data_folder
from tools.training.launch import own_program
from tools.verify.parity.ranks import RunFailed

# exit code of a run that stopped itself, or of whose steps none was applied: its records are
# complete
HELD_BACK = 3


@dataclass(frozen=True)
class ProofRuns:
    """The place of a proof. config: the user's run. folder: an empty one. start: checkpoint
    that all runs begin with.

    step: of that checkpoint, 0 without one.
    """

    config: RunConfig
    folder: Path
    start: Path | None = None

    @property
    def step(self) -> int:
        return read_progress(Store(self.start)).step if self.start else 0

    def begin(self, run_name: str) -> None:
        """Make the folder of a run, with the checkpoint that it starts from."""
        run_folder = self.folder / run_name
        (run_folder / "checkpoints").mkdir(parents=True)
        if self.start and is_remote(self.start):
            fetch_folder(self.start, self._start_copy(run_name, self.start))
        elif self.start:
            # linked, not copied: a checkpoint may be as large as the disk has room for once
            shutil.copytree(self.start, self._start_copy(run_name, self.start), copy_function=_link)

    def _start_copy(self, run_name: str, start: Path) -> Path:
        """Return the copy of the checkpoint that a run starts from."""
        step = read_progress(Store(start)).step
        return checkpoint_path(self.folder / run_name / "checkpoints", step)

    def _message(self, run_name: str) -> str:
        """Return the last line of a run, which names the user's checkpoint in place of its copy."""
        last_line = _last_line(self.folder / f"{run_name}.log")
        if self.start:
            return last_line.replace(str(self._start_copy(run_name, self.start)), str(self.start))
        return last_line

    def copy(self, run_name: str, to: str) -> Path:
        """Copy a run that has ended, without sharing files; return its newest checkpoint."""
        shutil.copytree(self.folder / run_name, self.folder / to)
        newest = latest(self.folder / to / "checkpoints")
        assert newest is not None
        return newest

    def take(self, run_name: str, last: int, parallel: Parallel | None = None) -> None:
        """Train the run `run_name` up to step `last`, from where it is. Raises RunFailed.

        parallel: another layout.
        """
        run_folder = self.folder / run_name
        run_config = _ready(self.config, run_folder, self.folder / "data", last, parallel)
        file = self.folder / f"{run_name}.toml"
        put_text(file, run_config.resolved_text())
        _tell(f"{run_name}: to step {last}, {counted(run_config.world_size, 'rank')}")
        began = time.monotonic()
        # appended: a run is taken in several parts
        with (self.folder / f"{run_name}.log").open("ab") as log:
            command = own_program(["train", str(file)])
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if code not in (0, HELD_BACK):
            raise RunFailed(f"{run_name}: exit code {code}: {self._message(run_name)}")
        _tell(f"{run_name}: {time.monotonic() - began:.0f} s")

    def digests(self, run_name: str) -> list[dict[str, Any]]:
        """Return the digests that a run has written."""
        return read_digests(self.folder / run_name)

    def applied(self, run_name: str) -> list[int]:
        """Return the steps of a run that changed its weights."""
        records = read_metrics(self.folder / run_name)
        return [record["step"] for record in records if record["outcome"] not in SKIPPED]


def _ready(
    run_config: RunConfig, folder: Path, data: Path, last: int, parallel: Parallel | None
) -> RunConfig:
    """Return the user's run up to step `last`, in another folder. data: folder of data sets that
    are built for it."""
    # data sets that the user has built are not built again
    user_cache = data_folder(run_config)
    cache = user_cache if user_cache.is_dir() else data
    train = {
        "steps": last,
        "folder": str(folder),
        "branch_from": "",  # a branch begins with the checkpoint of the proof
        "eval_every": 0,
        "eval_first": False,
        "restarts": 0,
    }
    tables: dict[str, Any] = {
        "train": run_config.train.model_copy(update=train),
        "checkpoint": run_config.checkpoint.model_copy(
            update={"folder": "", "every": 0, "keep": 1, "resume": True, "export": "none"}
        ),
        "log": type(run_config.log)(
            digests=1, plot=False, progress=False, peak_tflops=run_config.log.peak_tflops
        ),
        # the schedule of the user's run, of which the first steps are taken
        "lr": run_config.lr.model_copy(update={"length": run_config.lr_schedule.total}),
        "data": run_config.data.model_copy(
            update={"cache": str(cache.absolute()), "validation": ()}
        ),
        # a run that went on with fewer ranks would be another one
        "parallel": (parallel or run_config.parallel).model_copy(update={"elastic": False}),
    }
    return run_config.model_copy(update=tables)


def _link(source: str, target: str) -> None:
    """Link a file of a checkpoint, which no run changes, or copy it if the folders are on different
    filesystems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _tell(text: str) -> None:
    print(f"prove      {text}", file=sys.stderr, flush=True)


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
