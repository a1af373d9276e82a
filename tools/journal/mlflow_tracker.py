"""MLflow as a tracker: a run on the server of MLFLOW_TRACKING_URI, or in files in the folder of the
run.

Files are MLflow's own kind of store, which versions since 3.17 open only where
MLFLOW_ALLOW_FILE_STORE is set; it is set here for this process. MLflow's telemetry is off unless
MLFLOW_DISABLE_TELEMETRY says otherwise.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.journal.run_id import save_id, saved_id

EXPERIMENT = "megaprec"
FOLDER = "mlflow"  # in the folder of the run
MOST_METRICS = 1000  # of a request, as the server takes them
MOST_PARAMETERS = 100
COMPARED = "loss"  # the number of which every step has one
RUNNING = "RUNNING"
FINISHED = "FINISHED"
STOPPED = "KILLED"


class MLflow:
    """Sender of the numbers of a run to MLflow.

    A resumed run is the run before, and has each step once: those that are taken again are shown as
    they were first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = folder.absolute() / FOLDER
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (self._place / "mlruns").as_uri()
        from mlflow import entities, tracking  # noqa: PLC0415  # optional, and very slow to import

        self._entities = entities
        self._client = tracking.MlflowClient(tracking_uri=uri)

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Begin a run, or go on with that of this folder."""
        id_file = self._place / "id.txt"
        self._run = saved_id(id_file, step)
        if self._run:
            history = self._client.get_metric_history(self._run, COMPARED)
            self._last = max((metric.step for metric in history), default=0)
            self._client.update_run(self._run, status=RUNNING)
            return
        self._last = 0
        experiment = self._experiment()
        name = self._folder.resolve().name
        run = self._client.create_run(experiment, run_name=name)
        self._run = run.info.run_id
        save_id(id_file, self._run)
        parameters = [self._entities.Param(key, value) for key, value in _dotted(configuration)]
        for sent_at_once in _parts(parameters, MOST_PARAMETERS):
            self._client.log_batch(self._run, params=sent_at_once)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step, unless the run has them."""
        if step <= self._last:
            return
        now = int(1000 * time.time())  # milliseconds
        metrics = []
        for name, value in numbers.items():
            metric_name = _metric_name(name, numbers)
            metrics.append(self._entities.Metric(metric_name, value, now, step))
        for sent_at_once in _parts(metrics, MOST_METRICS):
            self._client.log_batch(self._run, metrics=sent_at_once)

    def finish(self, complete: bool) -> None:
        """End the run: as killed if it is not complete."""
        status = FINISHED if complete else STOPPED
        self._client.set_terminated(self._run, status)

    def _experiment(self) -> str:
        """Return the id of the experiment, which is made if it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            return experiment.experiment_id
        return self._client.create_experiment(name)


def _metric_name(name: str, numbers: Mapping[str, float]) -> str:
    """Return the name of a number in MLflow: `loss.web` for `loss/web` beside `loss`.

    In a store of files a metric is a file, and one whose name has a slash lies in a folder.
    """
    whole, _, part = name.partition("/")
    # a folder cannot have the name of a file
    is_beside_whole = part and whole in numbers
    return f"{whole}.{part}" if is_beside_whole else name


def _parts(entries: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Yield the entries in order, at most `most` at a time."""
    for first in range(0, len(entries), most):
        yield entries[first : first + most]


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield table.key and value of all keys of a run file. prefix: before them."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
