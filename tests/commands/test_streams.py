"""Output that cannot be written is told in one line, and is never worth a run."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from tests.runs import write_run
from tools.console.streams import guard_streams, spare_output
from tools.training.ends import as_user_error

ROOT = Path(__file__).parents[2]
FULL = "standard output: No space left on device (ENOSPC): free some room there"


def said(
    program: Callable[[], None],
    output: int | None,
    errors: int | None = None,
    buffered: bool = True,
) -> str:
    """What a process writes on stderr whose standard output is `output`, None for closed. errors:
    instead of a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.dup2(writing if errors is None else errors, 2)
            os.close(1) if output is None else os.dup2(output, 1)
            streams = [None if output is None else opened(1, buffered), opened(2, buffered)]
            sys.stdout, sys.stderr = streams  # type: ignore[assignment]  # as Python leaves a closed one
            del streams  # an own stream that nothing refers to closes its file
            guard_streams()
            program()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as lines:
        found = lines.read()
    os.waitpid(child, 0)
    return found


def opened(number: int, buffered: bool) -> TextIO:
    """A standard stream as Python opens it."""
    return io.TextIOWrapper(open(number, "wb", -1 if buffered else 0), write_through=not buffered)


@pytest.fixture
def full() -> Iterator[int]:
    """A file on a full disk."""
    number = os.open("/dev/full", os.O_WRONLY)
    yield number
    os.close(number)


@pytest.fixture
def left() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def tell(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_is_lost_ends_a_command_with_an_error_that_names_it(
    buffered: bool, full: int
) -> None:
    def program() -> None:
        try:
            print("lost", flush=True)
        except OSError as error:
            tell(as_user_error(error))
        sys.stdout.flush()  # as Python does at the end

    assert said(program, full, buffered=buffered) == f"{FULL}\n"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_run_goes_on_without_its_output_and_says_so_once(buffered: bool, full: int) -> None:
    def program() -> None:
        spare_output()
        for n in range(3):
            print(n, flush=True)
        tell("went on")
        os.write(reached, b".")

    there, reached = os.pipe()
    assert (
        said(program, full, buffered=buffered)
        == f"warning    {FULL}; training goes on without it\nwent on\n"
    )
    assert said(program, full, full, buffered=buffered) == "", "there is no other place to tell it"
    assert os.read(there, 9) == b".."
    os.close(there)
    os.close(reached)


def test_a_run_whose_reader_has_gone_is_told_once_as_by_a_closed_terminal(left: int) -> None:
    def program() -> None:
        spare_output()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        print("not yet heard", flush=True)
        signal.signal(signal.SIGHUP, lambda *_: tell("hung up"))
        for n in range(3):
            print(n, flush=True)

    assert (
        said(program, left)
        == "note: nobody reads standard output any more: training stops\nhung up\n"
    )


def test_a_command_whose_reader_has_gone_still_meets_a_broken_pipe(left: int) -> None:
    def program() -> None:
        try:
            print("unread", flush=True)
        except BrokenPipeError:
            tell("broken")

    assert said(program, left) == "broken\n"


def test_a_command_whose_reader_has_gone_ends_as_by_the_signal_of_a_broken_pipe(left: int) -> None:
    command = [sys.executable, "-m", "megaprec", "keys"]
    ended = subprocess.run(command, stdout=left, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_closed_output_is_no_error_and_no_file_takes_its_place() -> None:
    def program() -> None:
        print("nowhere", flush=True)
        with open(os.devnull, "rb") as file:
            tell((sys.stdout.isatty(), file.fileno() > 2))

    assert said(program, None) == "(False, True)\n"


# A command in an interpreter of its own, which flushes its streams at its end, with forked
# processes as its ranks.
LAUNCHER = "import sys; sys.executable = {python!r}; from tools.cli import main; sys.exit(main())"


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_saves_its_state_when_its_reader_has_gone_and_is_complete_on_a_full_disk(
    ranks: int, tmp_path: Path, forks: Path
) -> None:
    file = write_run(tmp_path)
    if ranks == 1:
        program = ["-m", "megaprec"]
    else:
        program = ["-c", LAUNCHER.format(python=str(forks / "python"))]
    command = [
        sys.executable,
        *program,
        "train",
        str(file),
        f"parallel.data={ranks}",
        "train.restarts=0",
    ]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600
        )
    assert done.returncode == 0 and set(done.stderr.splitlines()[-1:]) == {
        f"warning    {FULL}; training goes on without it"
    }
    command += [f"train.folder={tmp_path}/endless", "train.steps=1000000", "checkpoint.every=0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stderr
    while "step 2/" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    lines = process.stderr.read().splitlines()
    process.stderr.close()
    assert process.wait(600) == 129
    assert lines[-2] == "note: nobody reads standard output any more: training stops"
    assert lines[-1].startswith("stopped by SIGHUP after step ") and "state saved" in lines[-1]
    assert len([*(tmp_path / "endless" / "checkpoints").glob("step_*")]) == 1


def test_standard_input_that_was_closed_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "stdin", None)  # as Python leaves a closed one
    guard_streams()
    with sys.stdin as given:
        assert given.read() == ""
