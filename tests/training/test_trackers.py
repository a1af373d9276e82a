"""Trackers get the numbers of metrics.jsonl, and nothing that they do or fail to do changes the
training."""

import json
import re
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import Problem, UserError
from tests.project.test_readme import ROOT
from tests.refusals import raises, shows
from tests.runs import rewind, steps, train, write_run
from tools.config.run_file import load_run
from tools.journal.trackers import Feed, require_trackers

RECORD = {
    "step": 1,
    "loss": 2.0,
    "outcome": "applied",
    "stage_zeros": [1],
    "loss_scale": float("inf"),
}
OWN = """
import json
from pathlib import Path

class Lines:
    def __init__(self, folder):
        self.path = folder / "own.jsonl"
    def start(self, configuration, step):
        self.say("start", step, configuration["train"]["steps"])
    def log(self, step, numbers):
        self.say("log", step, numbers["loss"])
        if (self.path.parent / "break").exists():
            raise {error}
    def finish(self, complete):
        self.say("finish", complete)
    def say(self, *said):
        with self.path.open("a") as file:
            file.write(json.dumps(said) + "\\n")
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("trackers"))


def own(folder: Path, error: str = "ValueError('no\\nroom')") -> str:
    """A tracker of the user's in a file of its own; returns the override that names it."""
    (folder / "my_tracker.py").write_text(OWN.replace("{error}", error))
    return f'log.to=["{folder}/my_tracker.py:Lines"]'


def said(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "own.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_tracker_of_the_users_is_started_fed_and_finished_and_again_after_a_resume(
    run_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    to = own(tmp_path)
    assert train(run_file, to, f"train.folder={run}") == 0
    losses = [["log", record["step"], record["loss"]] for record in steps(run)]
    assert said(run) == [["start", 0, 6], *losses, ["finish", True]]
    again = rewind(run, tmp_path / "again", 3)
    (again / "own.jsonl").unlink()
    assert train(run_file, to, f"train.folder={again}") == 0
    assert said(again) == [["start", 3, 6], *losses[3:], ["finish", True]]


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    "error", ["ValueError('no\\nroom')", "OSError(28, 'No space left on device')", "SystemExit(3)"]
)
def test_a_tracker_that_fails_is_a_warning_by_name_and_the_training_is_the_same(
    error: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    to = own(tmp_path, error)
    run.mkdir()
    (run / "break").touch()
    assert train(run_file, to, f"train.folder={run}", "train.steps=3") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert (
        f"no more numbers for {tmp_path}/my_tracker.py:Lines: {error.partition('(')[0]}"
        in warnings[0]
    )
    assert [record["step"] for record in steps(run)] == [1, 2, 3]
    assert said(run)[-1][0] == "log", "a tracker that has failed is not called again"


class Stuck:
    """A tracker whose start returns when it is told to."""

    go = threading.Event()
    started = threading.Event()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        self.go.wait(300)
        self.started.set()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        (self.folder / f"{step}.json").write_text(json.dumps(sorted(numbers)))

    def finish(self, complete: bool) -> None: ...


def test_nothing_waits_for_a_tracker_that_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Stuck.go = threading.Event()
    Stuck.started = threading.Event()
    feed = Feed(f"{__name__}:Stuck", tmp_path, {}, 0)
    for _ in range(1000):
        feed.log(RECORD)
    assert not Stuck.started.is_set()
    feed.finish(True, patience=0.05)
    assert f"{__name__}:Stuck did not end within 0.05 s" in capsys.readouterr().err
    Stuck.go.set()


class Broken:
    """A tracker whose end fails."""

    def __init__(self, folder: Path) -> None: ...

    def start(self, configuration: Mapping[str, Any], step: int) -> None: ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, complete: bool) -> None:
        raise OSError(28, "No space left on device")


def test_a_tracker_whose_end_fails_is_one_warning_and_the_end_of_the_run_does_not_wait_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = Feed(f"{__name__}:Broken", tmp_path, {}, 0)
    feed.log(RECORD)
    feed.finish(True, patience=20)
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"{__name__}:Broken did not end well: OSError: [Errno 28]" in warning
    assert warning.endswith("its last numbers may be missing")


@pytest.mark.parametrize("steps_of_run", [0, 1])
def test_tensorboards_own_thread_that_cannot_write_is_one_warning_and_no_traceback(
    steps_of_run: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")

    def disk_is_full(self: object, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.RecordWriter, "write", disk_is_full)
    printed = list[object]()
    monkeypatch.setattr("threading.excepthook", printed.append)
    feed = Feed("tensorboard", tmp_path, {}, 0)
    for _ in range(steps_of_run):
        feed.log(RECORD)
    feed.finish(True)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "tensorboard" in warning
    assert "OSError: [Errno 28] No space left on device" in warning
    assert printed == []


def test_a_thread_of_the_programs_own_that_fails_has_its_traceback_beside_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    printed = list[threading.ExceptHookArgs]()
    monkeypatch.setattr("threading.excepthook", printed.append)
    feed = Feed("tensorboard", tmp_path, {}, 0)
    feed.finish(True)
    fails = threading.Thread(target=lambda: 1 // 0)
    fails.start()
    fails.join()
    assert [args.exc_type for args in printed] == [ZeroDivisionError]


def test_a_tracker_gets_numbers_alone_and_those_that_are_not_finite_too(tmp_path: Path) -> None:
    Stuck.go = threading.Event()
    Stuck.go.set()
    feed = Feed(f"{__name__}:Stuck", tmp_path, {}, 0)
    feed.log(RECORD)
    feed.finish(True)
    assert json.loads((tmp_path / "1.json").read_text()) == ["loss", "loss_scale"]


def test_a_tracker_that_is_far_behind_lacks_numbers_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.journal.trackers.MOST_WAITING", 4)
    Stuck.go = threading.Event()
    feed = Feed(f"{__name__}:Stuck", tmp_path, {}, 0)
    for step in range(1, 10):
        feed.log(RECORD | {"step": step})
    Stuck.go.set()
    feed.finish(True)
    warned = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning    \S+:Stuck is 4 steps behind: .*", warned[0])
    assert warned[1].endswith("was too slow for 5 steps: it lacks their numbers")
    assert len(list(tmp_path.iterdir())) == 4


def test_only_what_can_be_is_accepted_and_all_that_is_wrong_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.journal.trackers.find_spec", lambda name: None)
    (tmp_path / "mine.py").write_text("x = 1\n")
    names = (
        "tensorboard",
        "wandb",
        "wandb",
        "mlflow",
        "comet",
        "tensorbord",
        f"{tmp_path}/mine.py:x",
        "nowhere.py:f",
        "a:",
    )
    with pytest.raises(UserError) as refused:
        require_trackers(names)
    lines = refused.value.problems
    assert lines[0] == 'log.to: "wandb" is named twice'
    assert lines[1] == Problem.of(
        "journal.tracker_missing", name="tensorboard", package="tensorboard"
    )
    assert lines[2] == Problem.of("journal.tracker_missing", name="wandb", package="wandb")
    assert shows(lines[3], "journal.tracker_missing", name="mlflow", package="mlflow-skinny")
    assert shows(
        lines[4],
        "journal.tracker_unknown",
        name="comet",
        choices='tensorboard, wandb, mlflow, trackio, or "file.py:function"',
    )
    assert lines[5].endswith("did you mean tensorboard?")
    assert shows(lines[6], "megaprec.function_missing", location=re.compile(r"mine\.py$"), name="x")
    assert shows(
        lines[7], "megaprec.function_not_imported", location="nowhere.py", kind="FileNotFoundError"
    )
    assert lines[8] == Problem.of("megaprec.function_form", key="log.to", named="a:")


@pytest.mark.parametrize("value", ["true", "1"])
def test_the_key_of_other_trainers_is_answered_with_the_key_that_has_its_meaning(
    value: str, run_file: Path
) -> None:
    line = f"log.tensorboard = {value} (command line): no such key; did you mean log.to?"
    with pytest.raises(UserError, match=re.escape(line)):
        load_run(run_file, [f"log.tensorboard={value}"])


def test_a_folder_that_a_tracker_left_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with raises("journal.tracker_missing", name="wandb", package="wandb"):
        require_trackers(("wandb",))


def test_the_tracker_of_the_documentation_runs(run_file: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "runs.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(example)
    run = tmp_path / "run"
    name = re.findall(r'log.to=\["my_tracker.py:(\w+)"\]', page)[0]
    assert (
        train(run_file, f'log.to=["{tmp_path}/my_tracker.py:{name}"]', f"train.folder={run}") == 0
    )
    rows = [line.split(",") for line in (run / "losses.csv").read_text().splitlines()]
    assert rows == [[str(record["step"]), str(record["loss"])] for record in steps(run)]


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log in LevelDB's format, of blocks of 32 KiB, after 7 bytes
    of its own."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    at = 7
    whole = b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = proto.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(path: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step in a .wandb file."""
    found = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                i.key or ".".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            found[items.pop("_step")] = {k: v for k, v in items.items() if not k.startswith("_")}
    return found


@pytest.mark.slow
def test_wandb_offline_holds_the_numbers_and_the_configuration_and_no_secret_and_a_resumed_run_is_the_same_run(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    secrets = {"MY_TOKEN": "hunter2hunter2", "WANDB_API_KEY": "k" * 40, "PASSWORD": "correct-horse"}
    for name, value in (secrets | {"WANDB_MODE": "offline"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--token=in-the-command-line"])
    run = tmp_path / "run"
    to = 'log.to=["wandb"]'
    assert train(run_file, to, f"train.folder={run}", "train.eval_every=3") == 0
    assert train(run_file, to, f"train.folder={run}", "train.eval_every=3", "train.steps=8") == 0
    first, second = sorted(
        run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    )
    numbers = {
        r["step"]: {k: v for k, v in r.items() if type(v) in (int, float)} for r in steps(run)
    }
    found = history(first) | history(second)
    assert sorted(history(first)) == [1, 2, 3, 4, 5, 6] and sorted(history(second)) == [7, 8]
    for step, expected in numbers.items():
        assert {k: found[step][k] for k in expected if k != "step"} == {
            k: v for k, v in expected.items() if k != "step"
        }
    begun = [
        next(r.run for r in records(path) if r.WhichOneof("record_type") == "run")
        for path in (first, second)
    ]
    assert begun[0].run_id == begun[1].run_id
    told = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert told["train"]["seq_length"] == 16 and told["log"]["to"] == ["wandb"]
    assert not begun[0].host
    for path in (path for path in run.rglob("*") if path.is_file()):
        for secret in (*secrets.values(), "in-the-command-line"):
            assert secret.encode() not in path.read_bytes(), path


def numbers_of(run: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step in metrics.jsonl."""
    return {
        record["step"]: {
            name: value
            for name, value in record.items()
            if type(value) in (int, float) and name != "step"
        }
        for record in steps(run)
    }


def in_mlflow(run: Path) -> tuple[dict[int, list[dict[str, float]]], Any]:
    """What MLflow's store in the folder of a run has of each step, and the run."""
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient((run.absolute() / "mlflow/mlruns").as_uri())
    experiment = client.get_experiment_by_name("megaprec")
    (found,) = client.search_runs([experiment.experiment_id])
    logged: dict[int, list[dict[str, float]]] = {}
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            logged.setdefault(metric.step, []).append({name: metric.value})
    return logged, found


def in_trackio(run: Path) -> tuple[dict[int, list[dict[str, float]]], Any]:
    """What trackio's database has of each step of a run, and its configuration."""
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    name = (run / "trackio/name.txt").read_text().strip()
    assert storage.get_runs("megaprec") == [name]
    logged: dict[int, list[dict[str, float]]] = {}
    for entry in storage.get_logs("megaprec", name):
        step = entry.pop("step")
        entry.pop("timestamp")
        logged.setdefault(step, []).extend({key: value} for key, value in entry.items())
    return logged, storage.get_run_config("megaprec", name)


READERS = {"mlflow": in_mlflow, "trackio": in_trackio}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_holds_the_numbers_of_metrics_and_a_resumed_run_is_the_same_run_with_no_step_twice(
    name: str, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trackio looks at it when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    to = f'log.to=["{name}"]'
    assert train(run_file, to, f"train.folder={run}") == 0
    # As after a crash: steps 4 to 6 are taken again, and two more.
    again = rewind(run, tmp_path / "again", 3)
    assert train(run_file, to, f"train.folder={again}", "train.steps=8") == 0
    logged, _ = READERS[name](again)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6, 7, 8]
    first = numbers_of(run)
    expected = first | {step: numbers_of(again)[step] for step in (7, 8)}
    for step, entries in logged.items():
        names = [key for entry in entries for key in entry]
        assert len(names) == len(set(names)), f"step {step} is there twice"
        values = {key: value for entry in entries for key, value in entry.items()}
        # Those that a clock measures are of one of the two runs.
        found = {key: values[key] for key in expected[step]}
        assert found == pytest.approx(expected[step], rel=0, nan_ok=True)
        assert {"seconds", "tokens_per_s"} <= values.keys()


def test_mlflow_holds_numbers_and_those_of_their_parts(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of data sets beside the loss of all, and of sets beside that of the held-out part."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    source = load_run(run_file).data.source
    given = [
        'log.to=["mlflow"]',
        f"train.folder={run}",
        "data.source=python",  # as if it was left out
        f'data.blend=[{{source="{source}", weight=1, name="x"}}, {{source="{source}", weight=1}}]',
        f'data.validation=[{{name="v", source="{source}"}}]',
        "data.held_out=0.2",
        "train.eval_every=2",
        "train.steps=3",
    ]
    assert train(run_file, *given) == 0
    logged, _ = in_mlflow(run)
    expected = numbers_of(run)
    assert {"loss/x", "tokens/x", "eval_loss", "eval_loss/v"} <= expected[2].keys()
    for step, numbers in expected.items():
        values = {key: value for entry in logged[step] for key, value in entry.items()}
        for key, value in numbers.items():
            whole, _, part = key.partition("/")
            is_part = part and whole in numbers
            assert values[f"{whole}.{part}" if is_part else key] == value


@pytest.mark.slow
def test_mlflow_holds_the_configuration_and_whether_the_run_is_complete(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tmp_path / "run"
    assert train(run_file, 'log.to=["mlflow"]', f"train.folder={run}", "train.steps=2") == 0
    _, found = in_mlflow(run)
    assert found.info.status == "FINISHED"
    assert found.data.params["train.seq_length"] == "16"
    assert found.data.params["log.to"] == "['mlflow']"


@pytest.mark.slow
def test_a_server_that_is_not_there_is_a_warning_and_the_training_goes_on(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = tmp_path / "run"
    assert train(run_file, 'log.to=["mlflow"]', f"train.folder={run}", "train.steps=2") == 0
    assert [record["step"] for record in steps(run)] == [1, 2]
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len([line for line in warned if "no more numbers for mlflow" in line]) == 1
