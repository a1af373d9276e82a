"""The call stack of the main thread, as another thread reads it."""

import ast
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from megaprec.diagnose.call_stack import (
    RunningCall,
    calls_of,
    failed_calls,
    main_calls,
    summarize_calls,
)

ROOT = Path(__file__).parents[2]
FRAMES = {"_current_frames", "_current_exceptions", "f_back"}
# `_getframe` of the thread's own stack is walked here, by the thread itself, while it stands still
# in it.
OWN_STACK = {"tools/verify/parity/hang_watch.py"}


def read_by_another_thread() -> tuple[bool, list[str]]:
    read = []
    other = threading.Thread(target=lambda: read.append(summarize_calls(main_calls())))
    other.start()
    other.join()
    return read[0]


def test_another_thread_reads_where_the_main_thread_is() -> None:
    waits, lines = read_by_another_thread()
    assert not waits
    assert lines[0].startswith("tests/diagnose/test_call_stack.py:")
    assert lines[0].endswith(" read_by_another_thread")
    assert lines[1].endswith(" test_another_thread_reads_where_the_main_thread_is")


def lose_connection() -> None:
    raise RuntimeError("Connection reset by peer")


def run_instruction() -> None:
    try:
        lose_connection()
    except RuntimeError as error:
        raise RuntimeError("the instruction failed") from error


def test_a_failure_is_where_it_was_raised_and_not_where_it_is_told() -> None:
    with pytest.raises(RuntimeError, match="the instruction failed") as raised:
        run_instruction()
    waits, lines = summarize_calls(failed_calls(raised.value))
    assert not waits
    functions = [line.split()[-1] for line in lines]
    assert functions == ["lose_connection", "run_instruction", "run_instruction"]


def test_without_memory_files_the_stack_is_read_as_well_and_without_any_file_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert read_by_another_thread()[1]

    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert main_calls() == []


def test_paths_that_are_not_ascii_are_read_as_they_are() -> None:
    dump = (
        "Thread 0x00000000000000ff [pt_autograd] (most recent call first):\n"
        '  File "/elsewhere/a.py", line 1 in other\n'
        "\n"
        "Current thread 0x0000000000000010 (most recent call first):\n"
        '  File "/home/j\\xf6rg/\\u0439 \\U0001f600/x.py", line 12 in schn\\xf6rkel\n'
        "  ...\n"
    )
    assert calls_of(dump, 16) == [RunningCall("/home/jörg/й 😀/x.py", 12, "schnörkel")]


def test_a_transfer_that_the_users_own_code_makes_is_a_wait() -> None:
    calls = [
        RunningCall("torch/distributed/distributed_c10d.py", 1, "barrier"),
        RunningCall("mine.py", 7, "f"),
    ]
    assert summarize_calls(calls) == (True, ["mine.py:7 f"])
    assert summarize_calls([RunningCall("mine.py", 7, "f"), *calls]) == (
        False,
        ["mine.py:7 f", "mine.py:7 f"],
    )


@pytest.mark.slow
def test_no_watcher_walks_the_frames_of_a_running_thread() -> None:
    """Python frees a frame while another thread walks it: a rank that was healthy died of
    SIGSEGV."""
    walking = {
        str(path.relative_to(ROOT))
        for package in ("megaprec", "parallel", "models", "tools")
        for path in (ROOT / package).rglob("*.py")
        if FRAMES
        & {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
    }
    assert walking == OWN_STACK


# Deep and short calls of Python from torch's C++, of which the stack is written as often as can be.
# Garbage whose finalizers release the interpreter's lock is collected all the time: whoever walks
# `f_back` here, 4,000 times a second, dies of SIGSEGV within 20 seconds on Python 3.11.
WATCHED = """
import gc, sys, threading, time
import torch
from megaprec.diagnose.call_stack import main_calls
torch.set_num_threads(1)
gc.set_threshold(50, 10, 10)

class Garbage:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)

class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return deep(gradient, 5)

def deep(x, depth):
    Garbage()
    return deep(x, depth - 1) if depth else sum(part for part in x.chunk(2)).repeat(2)

over = threading.Event()
looks = 0

def watch():
    global looks
    while not over.is_set():
        looks += bool(main_calls())

watcher = threading.Thread(target=watch)
watcher.start()
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for _ in range(40):
        Garbage()
    x = y = torch.ones(8, requires_grad=True)
    for _ in range(40):
        y = Deep.apply(y) + sum(part for part in (y, y))
    y.sum().backward()
over.set()
watcher.join()
print(looks)
"""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("seconds", [1, pytest.param(300, marks=pytest.mark.campaign)])
def test_a_thread_that_is_watched_as_often_as_can_be_goes_on(seconds: int) -> None:
    command = [sys.executable, "-c", WATCHED, str(seconds)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 120, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert int(run.stdout) > 0
