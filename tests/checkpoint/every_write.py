"""A program that does a job again and again on a failing disk: each time another operation on its
files fails.

    LD_PRELOAD=fail_one_write.so python -m tests.checkpoint.every_write JOB FOLDER EVERY

JOB: save, resume or data. EVERY: 1 for each operation, n for every n-th. Each case is a forked
process with a fresh copy of the job's folder. After it, the job is done again on a disk that works.
Prints a line of JSON for each case: number of the operation, errno, exit codes of both, and what
was said on stderr; then a line with the number of operations.
"""

import ctypes
import errno
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megaprec.checkpoint.atomic import checkpoints, latest
from megaprec.checkpoint.save_load import load
from megaprec.errors import UserError
from tests.checkpoint.test_checkpoint import holds, saved, small
from tests.runs import checkpoint, steps, tensors, write_run
from tools.cli import main

Job = Callable[[Path], int]


def save(folder: Path) -> int:
    """Saves step 2 over step 1. Whatever happens, one of them is whole."""
    try:
        saved(folder / "checkpoints", 2, value=2, keep=1)
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        ctypes.CDLL(None).disarm()
        newest = latest(folder / "checkpoints")
        optimizer = small()
        assert newest is not None, "no checkpoint is left"
        step = load(newest, optimizer)["step"]
        assert holds(optimizer, step)


def resume(folder: Path) -> int:
    """Goes on from step 3 to step 6, with a save at 4."""
    file = folder.parent / "text" / "my.toml"
    run = folder / "run"
    given = [f"train.folder={run}", "checkpoint.every=4", "checkpoint.keep=1"]
    code = main(["train", str(file), *given])
    ctypes.CDLL(None).disarm()
    assert checkpoints(run / "checkpoints"), "no checkpoint is left"
    if code == 0:
        assert latest(run / "checkpoints") == checkpoint(run, 6), (
            "a run that ends well has saved its last step"
        )
        whole = folder.parent / "whole"
        assert steps(run) == steps(whole)
        ours, theirs = (tensors(checkpoint(each, 6)) for each in (run, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return code


def data(folder: Path) -> int:
    """Builds a data set and its tokenizer."""
    text = folder.parent / "text" / "text.txt"
    prefix = folder / "sets" / "mine"
    code = main(["data", "build", str(text), str(prefix), "--vocab-size", "330", "--workers", "1"])
    ctypes.CDLL(None).disarm()
    if code == 0:
        whole = folder.parent / "whole"
        assert whole_set(folder) == (whole_set(whole) if whole.exists() else whole_set(folder))
    return code


def whole_set(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / "sets" / name).read_bytes()
        for name in ("mine.bin", "mine.idx", "mine.model", "mine.json")
    }


def prepare(job: str, folder: Path) -> None:
    """Makes the folder that each case has a copy of, and what an undisturbed run leaves."""
    folder.mkdir(parents=True)
    if job == "save":
        saved(folder / "checkpoints", 1, value=1)
        return
    (folder.parent / "text").mkdir()
    file = write_run(folder.parent / "text")
    if job == "resume":
        for count, into in ((3, folder / "run"), (6, folder.parent / "whole")):
            assert (
                main(
                    [
                        "train",
                        str(file),
                        f"train.folder={into}",
                        f"train.steps={count}",
                        "checkpoint.every=0",
                    ]
                )
                == 0
            )
    else:
        assert data(folder.parent / "whole") == 0


def apart(call: Callable[[], None]) -> None:
    """Calls it in a forked process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def in_process(job: Job, folder: Path, number: int, error: int) -> tuple[int, str, int]:
    """Exit code, stderr and number of operations of the job in a process of its own."""
    said = folder.parent / "said"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        with suppress(BaseException):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctypes.CDLL(None).arm(os.fsencode(folder), number, error, 0)
            code = guarded(job, folder)
            os.write(write, str(ctypes.CDLL(None).counted()).encode())
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as counted:
        count = counted.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, said.read_text(), int(count or 0)


def guarded(job: Job, folder: Path) -> int:
    try:
        code = job(folder)
        sys.stderr.flush()
        return code
    except BaseException:
        traceback.print_exc()
        return 1


def run(name: str, folder: Path, every: int) -> None:
    torch.set_num_threads(1)
    job: Job = {"save": save, "resume": resume, "data": data}[name]
    template = folder / "template"
    case = folder / "case"
    if (
        torch.version.cuda
    ):  # such a build cannot compute gradients in processes forked from one that has computed some
        apart(partial(prepare, name, template))
    else:  # what this process keeps of the first run saves each case a second
        prepare(name, template)
    import_module("tests.frozen")
    shutil.copytree(template, case)
    code, said, operations = in_process(job, case, -1, 0)
    assert code == 0 and "warning" not in said, said
    for number in range(0, operations, every):
        for error in (errno.ENOSPC, errno.EIO):
            shutil.rmtree(case)
            shutil.copytree(template, case)
            code, said, _ = in_process(job, case, number, error)
            again, said_again, _ = in_process(job, case, -1, 0)
            found: dict[str, Any] = {
                "number": number,
                "errno": errno.errorcode[error],
                "code": code,
                "said": said,
            }
            print(json.dumps(found | {"again": again, "said again": said_again}), flush=True)
    print(json.dumps({"operations": operations}))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
