"""`megaprec.train` trains what the command trains, says what the command says, and leaves the
program that calls it as it was."""

import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megaprec
from megaprec.checkpoint.atomic import latest
from tests.refusals import raises
from tests.runs import steps, train, train_on, write_run
from tools.config.run_file import load_run

ROOT = Path(__file__).parents[2]
LONG = ("train.steps=100000", "checkpoint.every=100000", "log.plot=false")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def tables_of(run_file: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(run_file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_tables_train_the_same_bits_as_the_command(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'a "folder" of mine'
    tables = tables_of(run_file)
    tables["train"] |= {"folder": folder, "eval_every": 3}
    tables["optimizer"] = {"betas": (0.9, 0.95), "groups": [{"pattern": "*norm*", "lr": 0.5}]}
    result = megaprec.train(tables)

    expected = tmp_path / "command"
    overrides = [f"train.folder={expected}", "train.eval_every=3", "optimizer.betas=[0.9, 0.95]"]
    overrides.append('optimizer.groups=[{pattern = "*norm*", lr = 0.5}]')
    assert train(run_file, *overrides) == 0
    assert steps(folder) == steps(expected)
    assert load_run(folder / "run.toml").optimizer == load_run(expected / "run.toml").optimizer
    last = steps(expected)[-1]
    assert result == megaprec.TrainingResult(
        folder, 6, last["loss"], last["eval_loss"], folder / "checkpoints/step_00000006"
    )


@pytest.mark.usefixtures("forked_python")
def test_a_keyword_of_another_trainer_is_answered_with_the_key_of_the_run_file(
    run_file: Path,
) -> None:
    with pytest.raises(megaprec.UserError) as raised:
        megaprec.train(run_file, learning_rate=1e-3, max_steps=3, out_dir=Path("here"))
    hints = [problem.rpartition("; ")[2] for problem in raised.value.problems]
    assert hints == [f"did you mean {key}?" for key in ("lr.peak", "train.steps", "train.folder")]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_several_ranks_train_as_those_of_the_command(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    expected = tmp_path / "command"
    megaprec.train(run_file, "parallel.tensor=2", f"train.folder={folder}")
    train_on(run_file, f"train.folder={expected}", tensor=2)
    assert steps(folder) == steps(expected)


SCRIPT = """
import sys
import megaprec

result = megaprec.train(sys.argv[1], "train.folder=" + sys.argv[2], "parallel.tensor=" + sys.argv[3])
print(result.step)
"""


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_script_trains_without_a_guard_of_its_main_module(
    tensor: int, run_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = [str(run_file), "program", str(tensor)]
    done = subprocess.run(
        [sys.executable, "mine.py", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "6"
    assert done.stdout.count("step 6/6") == 1
    expected = train_on(run_file, f"train.folder={tmp_path / 'command'}", tensor=tensor)
    assert steps(tmp_path / "program") == steps(expected)


@pytest.mark.usefixtures("forked_python")
def test_all_problems_are_raised_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises("config.key_missing", table="train", name="steps") as caught:
        megaprec.train({"train": {"stps": 12}, "lr": {"warmup": -1}})
    assert "did you mean train.steps?" in str(caught.value)
    assert "lr.warmup = -1" in str(caught.value)
    assert not [*tmp_path.iterdir()]
    assert capfd.readouterr() == ("", "")


def test_values_and_words_that_the_command_cannot_be_given_are_refused() -> None:
    with raises("training.python_value", key="train.steps", value="None") as caught:
        megaprec.train({"train": {"steps": None}, "lr": {"peak": [1, {"a": object()}]}})
    assert len(caught.value.problems) == 2
    with raises("training.python_value", key="train.folder"):
        megaprec.train({"train": {"folder": "\ud800"}})
    with raises("training.python_key", key=r"'train.steps=1\n'"):
        megaprec.train({"train": {"steps=1\n": 2}})
    with raises("training.python_word", word="'--strict'"):
        megaprec.train("run.toml", "--strict")
    number: Any = 3
    with raises("training.python_word", word="3"):
        megaprec.train("run.toml", number)
    with raises("training.python_word", word=r"'run\x00.toml'"):
        megaprec.train("run\0.toml")


@pytest.mark.usefixtures("forked_python")
def test_the_options_of_the_command_are_keywords(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noted = ("optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]", f"train.folder={tmp_path / 'run'}")
    with pytest.raises(megaprec.UserError, match=r"betas.*--strict"):
        megaprec.train(run_file, *noted, strict=True)
    with pytest.raises(megaprec.UserError, match=r"--allow.*'nonsense'.*rope_base"):
        megaprec.train(run_file, *noted, allow="nonsense")
    with pytest.raises(megaprec.UserError, match=r"--allow.*'nonsense'.*rope_base"):
        megaprec.train(run_file, *noted, allow=["seed", "nonsense"])
    assert not (tmp_path / "run").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("WORLD_SIZE", "4", "parallel.variables_incomplete"),
        ("MKL_NUM_THREADS", "many", "megaprec.thread_count"),
    ],
)
def test_an_environment_that_no_command_takes_is_raised(
    name: str,
    value: str,
    code: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    with raises(code):
        megaprec.train(run_file)
    assert capfd.readouterr() == ("", "")


def state_of_process() -> dict[str, Any]:
    """What a library may change of the process that calls it."""
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": sorted(os.listdir("/proc/self/fd")),
        "threads": {thread.name for thread in threading.enumerate()},
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), dist.is_initialized()),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "path": list(sys.path),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_the_process_stays_as_it_was_and_replaced_streams_have_the_output(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (f"train.folder={tmp_path}", "optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]")
    before = state_of_process()
    output = io.StringIO()
    errors = io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        megaprec.train(run_file, *words)
    assert state_of_process() == before
    assert "step 6/6" in output.getvalue()
    assert "note: optimizer.betas" in errors.getvalue()
    assert capfd.readouterr() == ("", "")


def after_steps(folder: Path, act: Callable[[], object]) -> threading.Thread:
    """A thread that acts once the run has taken some steps."""

    def watch() -> None:
        metrics = folder / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if metrics.is_file() and metrics.read_bytes().count(b"\n") >= 3:
                act()
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.usefixtures("forked_python")
def test_ctrl_c_is_raised_after_the_state_was_saved(run_file: Path, tmp_path: Path) -> None:
    interrupt(run_file, tmp_path)


@pytest.mark.slow
def test_ctrl_c_reaches_every_rank(run_file: Path, tmp_path: Path) -> None:
    # real interpreters: the launcher blocks Ctrl-C while one starts, which unblocks it itself
    interrupt(run_file, tmp_path, "parallel.data=2")


def interrupt(run_file: Path, folder: Path, *overrides: str) -> None:
    """Trains until Ctrl-C comes; all steps must be in the newest checkpoint."""
    watcher = after_steps(folder, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        megaprec.train(run_file, *LONG, f"train.folder={folder}", *overrides)
    watcher.join()
    newest = latest(folder / "checkpoints")
    assert newest and int(newest.name.removeprefix("step_")) == steps(folder)[-1]["step"] < 100000


def child_of_this_process() -> int:
    """The process that `megaprec.train` has started here."""
    for folder in Path("/proc").glob("[0-9]*"):
        words = (folder / "cmdline").read_bytes()
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        if int(parent) == os.getpid() and b"--end-file" in words:
            return int(folder.name)
    raise AssertionError("no child")


@pytest.mark.usefixtures("forked_python")
def test_a_run_that_a_signal_ends_says_so_and_what_it_has_left(
    run_file: Path, tmp_path: Path
) -> None:
    watcher = after_steps(tmp_path, lambda: os.kill(child_of_this_process(), signal.SIGTERM))
    with pytest.raises(megaprec.TrainingStopped, match="SIGTERM") as caught:
        megaprec.train(run_file, *LONG, f"train.folder={tmp_path}")
    watcher.join()
    result = caught.value.result
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert result and result.step == steps(tmp_path)[-1]["step"] < 100000
    assert result.checkpoint == latest(tmp_path / "checkpoints")


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_stops_itself_is_raised_with_its_reason(
    ranks: int, run_file: Path, tmp_path: Path
) -> None:
    overflowing = (
        "precision.compute=fp16",
        "precision.initial_scale=1e30",
        "precision.on_nonfinite=raise",
    )
    with pytest.raises(megaprec.TrainingStopped, match="step 1") as caught:
        megaprec.train(run_file, *overflowing, f"train.folder={tmp_path}", f"parallel.data={ranks}")
    assert caught.value.exit_code == 3
    assert caught.value.result and caught.value.result.folder == tmp_path


@pytest.mark.slow
def test_a_run_saves_its_state_when_its_program_is_killed(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import megaprec\nmegaprec.train({str(run_file)!r}, 'train.folder=run', *{LONG!r})"
    )
    program = subprocess.Popen(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    after_steps(tmp_path / "run", program.kill).join()
    assert program.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not latest(tmp_path / "run/checkpoints"):
        time.sleep(0.1)
    assert latest(tmp_path / "run/checkpoints")
