"""Trackers: programs beside metrics.jsonl that receive a run's numbers, as `log.to` names them.

A tracker is any object with the three methods of `Tracker`. Rank 0 alone has trackers. Each runs in
a thread of its own, so that training neither waits for one that is slow nor ends with one that
fails: that is a warning, and the numbers are in metrics.jsonl in any case.

TensorBoard gets event files in the folder tensorboard of the run. Weights & Biases is sent the
run's configuration and numbers, over the network or, with WANDB_MODE=offline, into the folder
wandb of the run, and nothing else: no environment, command line, code, git remote, console output
or facts of the machine. MLflow and trackio have modules of their own.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from megaprec.errors import UserError, did_you_mean
from megaprec.url_secrets import masked
from megaprec.user_functions import find_function
from tools.journal.mlflow_tracker import MLflow
from tools.journal.router_records import router_scalars
from tools.journal.run_id import run_id_at
from tools.journal.trackio_tracker import Trackio

# steps whose numbers wait for a slow tracker; those of further ones are left out
MOST_WAITING = 100_000
FINISH_SECONDS = 60.0  # that a tracker may take at the end of a run for what still waits
LONGEST_MESSAGE = 300  # characters of a tracker's error that are printed

WANDB_PROJECT = "megaprec"
WANDB_ID = "id.txt"  # in the folder wandb of the run
WANDB_SECONDS = 60  # time limit of each exchange with the service
# settings that keep everything but configuration and numbers here
WANDB_PRIVATE = {
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

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """Receiver of a run's numbers. All three methods are called in one thread, which is not that of
    the training.
    """

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Begin, before any numbers.

        configuration: the tables of the run file with all their keys, without secrets of URLs.
        step: 0 for a new run, or the step from which the run resumes; what was logged of later
        steps is void, for these steps are taken again.
        """

    def log(self, step: int, numbers: Numbers) -> None:
        """Receive the numbers of a step, by the field's name in metrics.jsonl.

        They may be inf or NaN.
        """

    def finish(self, complete: bool) -> None:
        """End.

        complete: all steps of the run are taken; False if it stopped before, and may resume.
        """


class _TensorBoard:
    """Writer of the numbers of a run as scalars of TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and slow to import

        self._make_writer = SummaryWriter
        self._folder = folder / "tensorboard"

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Open a file. TensorBoard then hides the events of an earlier, longer run after
        `step`."""
        self._errors = _errors_of_threads("tensorboard")
        self._writer = self._make_writer(str(self._folder), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, complete: bool) -> None:
        """Write what waits, and close the file. Raises what has ended the writer's own thread, for
        the writer tells it only to those who write later."""
        self._writer.close()
        if self._errors:
            raise self._errors[0]


def _errors_of_threads(package: str) -> list[BaseException]:
    """Return a list that gets the errors that end threads of a package's own classes from now on,
    in place of the tracebacks that Python prints of them."""
    errors = list[BaseException]()
    print_traceback = threading.excepthook

    def keep(ended: threading.ExceptHookArgs) -> None:
        package_of_thread = type(ended.thread).__module__.partition(".")[0]
        if package_of_thread == package and ended.exc_value is not None:
            errors.append(ended.exc_value)
        else:
            print_traceback(ended)

    threading.excepthook = keep
    return errors


class _Wandb:
    """Sender of the numbers of a run to Weights & Biases.

    A resumed run has the id of the run before, and its steps. Steps that were taken again are shown
    as they were first: the service keeps the first value of a step.
    """

    def __init__(self, folder: Path) -> None:
        import wandb  # noqa: PLC0415  # optional, and slow to import

        self._wandb = wandb
        self._folder = folder

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Begin a run, or go on with that of this folder."""
        settings = self._wandb.Settings(
            silent=True, init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS, **WANDB_PRIVATE
        )
        self._run = self._wandb.init(
            id=run_id_at(self._folder / "wandb" / WANDB_ID, step),
            name=self._folder.resolve().name,
            project=os.environ.get("WANDB_PROJECT") or WANDB_PROJECT,
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


def _require_wandb_account() -> None:
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


Factory = Callable[[Path], Tracker]
BUILT_IN: dict[str, Factory] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}

PACKAGES = {"mlflow": "mlflow-skinny"}  # that have a tracker, if not those of its name


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise UserError for names of `log.to` that name no installed tracker, with a line each."""
    problems = list[str]()
    for tracker_name in sorted(set(names)):
        if names.count(tracker_name) > 1:
            problems.append(f'log.to: "{tracker_name}" is named twice')
    for tracker_name in dict.fromkeys(names):
        try:
            _require_tracker(tracker_name)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _require_tracker(tracker_name: str) -> None:
    """Raise UserError unless the tracker is installed, or a function of the user's own is there."""
    if tracker_name in BUILT_IN:
        if not _is_installed(tracker_name):
            package = PACKAGES.get(tracker_name, tracker_name)
            raise UserError.of("journal.tracker_missing", name=tracker_name, package=package)
        if tracker_name == "wandb":
            _require_wandb_account()
    elif ":" not in tracker_name:
        choices = f'{", ".join(BUILT_IN)}, or "file.py:function" of your own'
        hint = did_you_mean(tracker_name, BUILT_IN)
        raise UserError.of("journal.tracker_unknown", name=tracker_name, choices=choices, hint=hint)
    else:
        find_function("log.to", tracker_name)


def _is_installed(tracker_name: str) -> bool:
    """Return True if the package is there; a folder of its name, as trackers leave it, is none."""
    try:
        spec = find_spec(tracker_name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


class Feed:
    """The numbers of a run on their way to one tracker."""

    def __init__(
        self, tracker_name: str, folder: Path, configuration: Mapping[str, Any], step: int
    ) -> None:
        self._name = tracker_name
        self._failed = False
        self._left_out = 0
        # steps with their numbers; the last item says whether the run is complete
        self._queue: Queue[tuple[int, Numbers] | bool] = Queue(MOST_WAITING)
        arguments = (folder, configuration, step)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name=f"tracker {tracker_name}", daemon=True
        )
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of the record of a step."""
        numbers = dict[str, float]()
        for name, value in record.items():
            # not isinstance: true is no number
            if name != "step" and type(value) in (int, float):
                numbers[name] = value
        numbers |= router_scalars(record)
        try:
            # never waits: training must not be as slow as a tracker
            self._queue.put_nowait((record["step"], numbers))
        except Full:
            self._left_out += 1
            if self._left_out == 1 and not self._failed:
                _warn(
                    f"{self._name} is {MOST_WAITING:,} steps behind: it gets no numbers until it "
                    "has caught up"
                )

    def finish(self, complete: bool, patience: float = FINISH_SECONDS) -> None:
        """End the tracker, which has `patience` seconds for it."""
        with suppress(Full):
            self._queue.put(complete, timeout=patience)
        self._thread.join(patience)
        if self._thread.is_alive():
            _warn(
                f"{self._name} did not end within {patience:g} s: its last numbers may be missing"
            )
        elif self._left_out and not self._failed:
            _warn(f"{self._name} was too slow for {self._left_out:,} steps: it lacks their numbers")

    def _run(self, folder: Path, configuration: Mapping[str, Any], step: int) -> None:
        """Make the tracker and call its methods, until it has ended or failed."""
        item: tuple[int, Numbers] | bool | None = None
        try:
            make_tracker = _factory(self._name)
            tracker = make_tracker(folder)
            tracker.start(configuration, step)
            while not isinstance(item := self._queue.get(), bool):
                tracker.log(*item)
            # The last item says whether the run is complete.
            tracker.finish(complete=item)
        except BaseException as error:  # a tracker that calls sys.exit ends itself alone
            self._failed = True
            reason = _in_a_line(error)
            if isinstance(item, bool):
                _warn(f"{self._name} did not end well: {reason}; its last numbers may be missing")
            else:
                _warn(f"no more numbers for {self._name}: {reason}; training goes on")
            # Empties the queue, so that the end of the run need not wait for room in it.
            while not isinstance(item, bool):
                item = self._queue.get()


def _factory(tracker_name: str) -> Factory:
    if tracker_name in BUILT_IN:
        return BUILT_IN[tracker_name]
    return find_function("log.to", tracker_name)


def _in_a_line(error: BaseException) -> str:
    """Return type and text of an error in one line of bounded length, without secrets of URLs."""
    kind = type(error).__name__
    message = masked(" ".join(str(error).split()))
    if not message:
        return kind
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]}..."
    return f"{kind}: {message}"


def _warn(line: str) -> None:
    print(f"warning    {line}", file=sys.stderr, flush=True)
