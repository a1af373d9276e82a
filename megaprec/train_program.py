"""`megaprec.train`: a training run within a Python program, as a child process.

The child is the command `megaprec train`, so checks, bits and output are the command's. The
caller's process stays as it is: its signal handlers, threads, default dtype, environment, process
groups and CUDA context. A script needs no `if __name__ == "__main__":`. The command's modules are
not imported here; the child writes how the run ended to a file (`tell_end`).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any, TextIO

from megaprec.durable import put_text
from megaprec.errors import Problem, UserError
from megaprec.parsing import is_unicode
from megaprec.scratch import scratch_folder

ROOT = Path(__file__).resolve().parents[1]  # the folder of all packages
END_FILE = "--end-file"  # hidden option of the command: where it tells how it ended
WRONG_INPUT = 2  # exit code of the command
# If the caller is killed, the run saves its state and ends: prctl's option 1 is PR_SET_PDEATHSIG,
# which Linux alone has.
PROGRAM = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = "megaprec"
from megaprec.__main__ import main
sys.exit(main())
"""

Tables = Mapping[str, Mapping[str, Any]]  # keys and values of a run file, by table


@dataclass(frozen=True)
class TrainingResult:
    """The state in which a run has ended.

    folder: of the run, absolute. step: the newest step; 0 if there is none. loss: the training loss
    of that step. eval_loss: the newest loss on the held-out part. checkpoint: the newest one, as
    text if it is at a URL (checkpoint.folder). The last three are None if there is none.
    """

    folder: Path
    step: int
    loss: float | None
    eval_loss: float | None
    checkpoint: Path | str | None


class TrainingStopped(RuntimeError):
    """A run that `megaprec.train` began has ended before its last step.

    exit_code: of the command: 1 after a fault, 3 if the run stopped itself, 128 + n by signal n.
    result: what the run has left until then; None if it has not begun.
    """

    def __init__(self, reason: str, exit_code: int, result: TrainingResult | None) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.result = result


@dataclass(frozen=True)
class _End:
    """The end of the command: problems of wrong input, the reason of another end, the result."""

    problems: tuple[Problem, ...] = ()
    reason: str = ""
    result: TrainingResult | None = None


def train(
    run: str | os.PathLike[str] | Tables,
    *overrides: str,
    allow: str | Sequence[str] = (),
    strict: bool = False,
    verify: bool = True,
    export_hf: str | os.PathLike[str] | None = None,
    export_ema: bool = False,
    **keys: Any,
) -> TrainingResult:
    """Train as `megaprec train` does, with the same checks, and return what the run has left.

    run: a run file, or its tables as a dict: {"model": {"layers": 2, ...}, "train": {...}}.
    overrides: "table.key=value", which are stronger.
    keys: overrides by their names, as **{"train.steps": 3} gives them; a name of another trainer is
        refused with the key that has its meaning.
    The other keywords are the options of the command:
    allow: a difference that is accepted, or several, `--allow`.
    strict: notes are errors.
    verify: compare with transformers the model of train.init_from and of export_hf.
    export_hf: folder for the trained model in Hugging Face format.
    export_ema: its weights are their moving average.

    Blocks until all ranks have ended. What they print appears on this program's stdout and stderr.
    On Ctrl-C the run finishes its step and saves its state before KeyboardInterrupt is raised; on a
    second one, at least a second later, it ends at once.

    Raises UserError with all problems of the input, nothing of which the run prints, and
    TrainingStopped if the run ends before its last step.
    """
    differences = [allow] if isinstance(allow, str) else allow
    options = [f"--allow={difference}" for difference in differences]
    if strict:
        options.append("--strict")
    if not verify:
        options.append("--no-verify")
    if export_hf is not None:
        options.append(f"--export-hf={os.fspath(export_hf)}")
    if export_ema:
        options.append("--export-ema")
    with scratch_folder("train") as scratch:
        words = [*_words_of_run(run, Path(scratch)), *overrides, *_words_of_keys(keys.items())]
        _require_words(words)
        end_file = Path(scratch, "end.json")
        command = ["train", *words, *options, f"{END_FILE}={end_file}"]
        exit_code = _run_program(command)
        end = _read_end(end_file)
    if exit_code == WRONG_INPUT:
        raise UserError(*(end.problems or [end.reason]))
    if exit_code or end.result is None:
        reason = end.reason or _describe(exit_code)
        raise TrainingStopped(reason, exit_code, end.result)
    return end.result


def tell_end(
    file: Path, problems: Sequence[Problem], reason: str, result: TrainingResult | None
) -> None:
    """Write how the command ended, for the `train` that has started it."""
    # as `_read_end` reads it
    content = {
        "problems": [[problem, problem.code, problem.fields] for problem in problems],
        "reason": reason,
        "result": None if result is None else asdict(result),
    }
    put_text(file, json.dumps(content, default=str))


def end_file_in(words: Sequence[str]) -> Path | None:
    """Return the file in which a command of these words tells how it ended; None if in none."""
    prefix = f"{END_FILE}="
    for word in words:
        if word.startswith(prefix):
            return Path(word.removeprefix(prefix))
    return None


def _read_end(file: Path) -> _End:
    """Return what `tell_end` wrote; nothing if the command was killed before."""
    if not file.is_file():
        return _End()
    content = json.loads(file.read_text(encoding="utf-8"))
    problems = tuple(Problem(*problem) for problem in content["problems"])
    fields = content["result"]
    if fields is None:
        return _End(problems, content["reason"])
    result = TrainingResult(
        Path(fields["folder"]),
        fields["step"],
        fields["loss"],
        fields["eval_loss"],
        _place(fields["checkpoint"]),
    )
    return _End(problems, content["reason"], result)


def _place(name: str | None) -> Path | str | None:
    """Return the path of a name, and a URL as it is."""
    if name is None or "://" in name:
        return name
    return Path(name)


def _words_of_run(run: str | os.PathLike[str] | Tables, scratch: Path) -> list[str]:
    """Return the words of the command that name the run: a file, and keys as overrides.

    scratch: a folder for the file of a run that has none.
    """
    if not isinstance(run, Mapping):
        return [os.fspath(run)]
    file = scratch / "run.toml"
    file.touch()
    return [str(file), *_words_of_keys(_by_dotted_key(run))]


def _words_of_keys(keys: Iterable[tuple[str, Any]]) -> list[str]:
    """Return keys with their values as words of the command. Raises UserError for those that it
    cannot be given."""
    problems: list[str] = []
    words: list[str] = []
    for key, value in keys:
        text = _toml(value)
        if text is None:
            problems.append(Problem.of("training.python_value", key=key, value=repr(value)))
        elif not key.replace(".", "_").replace("-", "_").isidentifier():
            problems.append(Problem.of("training.python_key", key=repr(key)))
        else:
            words.append(f"{key}={text}")
    if problems:
        raise UserError(*problems)
    return words


def _by_dotted_key(tables: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of tables by "table.key". What is no table stays as it is, and the command
    refuses its key."""
    for table, values in tables.items():
        if not isinstance(values, Mapping):
            yield str(table), values
            continue
        for name, value in values.items():
            yield f"{table}.{name}", value


def _toml(value: Any) -> str | None:
    """Return a value in TOML's grammar; None if TOML has no form for it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):  # also NumPy's float64, which shows itself in another way
        return float.__repr__(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        if not is_unicode(value):
            return None
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return _list(value)
    if isinstance(value, Mapping):
        return _inline_table(value)
    return None


def _list(values: Sequence[Any]) -> str | None:
    """Return a list in TOML's grammar; None if it has a value without a form."""
    items: list[str] = []
    for value in values:
        text = _toml(value)
        if text is None:
            return None
        items.append(text)
    return f"[{', '.join(items)}]"


def _inline_table(table: Mapping[Any, Any]) -> str | None:
    """Return a table on one line in TOML's grammar; None if it has a value without a form."""
    pairs: list[str] = []
    for key, value in table.items():
        text = _toml(value)
        name = _toml(str(key))
        if text is None or name is None:
            return None
        pairs.append(f"{name} = {text}")
    return f"{{{', '.join(pairs)}}}"


def _require_words(words: Sequence[object]) -> None:
    """Raise UserError for words that a command cannot be given, or would take for an option."""
    problems: list[str] = []
    for word in words:
        if not _is_word(word):
            problems.append(Problem.of("training.python_word", word=ascii(word)))
    if problems:
        raise UserError(*problems)


def _is_word(word: object) -> bool:
    """Return True for a text that a command can be given, and that it takes for no option."""
    if not isinstance(word, str) or not is_unicode(word):
        return False
    return "\0" not in word and not word.startswith("-")


def _run_program(arguments: Sequence[str]) -> int:
    """Run `megaprec <arguments>` in a child process and return its exit code, 128 + n if signal n
    ended it.

    Raises KeyboardInterrupt if one came, after the child has ended.
    """
    # -P: a file of the working directory must not hide a module.
    command = [sys.executable, "-P", "-c", PROGRAM, str(ROOT), *arguments]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # A stream that was replaced, as in a notebook, is not where a child process writes.
    stdout = None if sys.stdout is sys.__stdout__ else subprocess.PIPE
    stderr = None if sys.stderr is sys.__stderr__ else subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
    ) as process:
        copiers: list[Thread] = []
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                copier = Thread(target=_copy_lines, args=(pipe, stream), daemon=True)
                copier.start()
                copiers.append(copier)
        exit_code = _wait_for(process, copiers)
    return 128 - exit_code if exit_code < 0 else exit_code


def _wait_for(process: subprocess.Popen[str], copiers: Sequence[Thread]) -> int:
    """Wait until the process has ended and all that it wrote is copied; return its exit code."""
    interrupted = False
    while True:
        try:
            exit_code = process.wait()
            break
        except KeyboardInterrupt:
            # A terminal has sent it to the child too, which takes both for one.
            interrupted = True
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    for copier in copiers:
        copier.join()
    if interrupted:
        raise KeyboardInterrupt
    return exit_code


def _copy_lines(pipe: IO[str], stream: TextIO | None) -> None:
    """Copy what a child process writes to a stream of this program. A stream that takes no more
    does not stop the child."""
    for line in pipe:
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.write(line)
                stream.flush()


def _describe(exit_code: int) -> str:
    """Return in words how a command ended that gave no reason."""
    with suppress(ValueError):
        return f"training was stopped by {signal.Signals(exit_code - 128).name}"
    return f"training ended with exit code {exit_code}"
