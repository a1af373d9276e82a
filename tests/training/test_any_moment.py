"""A signal at any moment: the command ends by it, or as if there had been none, and prints no
traceback."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.runs import write_run

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "one rank": [],
    "two ranks": ["parallel.tensor=2"],
    "compiled": ["train.compile=block", "precision.compute=bf16"],
}
KEYS = ["train.steps=4", "checkpoint.every=2", "train.eval_every=2", "log.plot=false"]
NUMBERS = (signal.SIGINT, signal.SIGTERM)
# A layout, a signal, and the moment: a share of the time that an undisturbed command takes.
DRAWN = [
    (layout, number, random.Random(f"{layout} {number} {draw}").random() * 1.05)
    for draw in range(40)
    for layout in LAYOUTS
    for number in NUMBERS
]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def seconds(run_file: Path) -> dict[str, float]:
    """The seconds that commands have taken, by layout."""
    return {}


def started(run_file: Path, folder: Path, keys: Sequence[str]) -> subprocess.Popen[str]:
    """The command, as soon as Ctrl-C is answered by it: Python's own start is not ours."""
    words = ["-m", "megaprec", "train", str(run_file), f"train.folder={folder}", *keys, *KEYS]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pythons_own = False
    while process.poll() is None:
        caught = handles_interrupts(process.pid)
        if pythons_own and not caught:
            break
        pythons_own |= caught
        time.sleep(0.0005)
    return process


def handles_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = re.search(r"SigCgt:\s*(\w+)", status)
    return bool(mask and int(mask[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.cases(0, sample=1)
@pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /proc to know when Python itself has started"
)
@pytest.mark.parametrize("what", DRAWN, ids=lambda what: f"{what[0]}-{what[1].name}-{what[2]:.3f}")
def test_a_signal_at_any_moment_ends_the_command_without_a_traceback(
    what: tuple[str, signal.Signals, float],
    run_file: Path,
    tmp_path: Path,
    seconds: dict[str, float],
) -> None:
    layout, number, moment = what
    if layout not in seconds:
        start = time.monotonic()
        whole = started(run_file, tmp_path / "whole", LAYOUTS[layout])
        error = whole.communicate(timeout=600)[1]
        assert (whole.returncode, error) == (0, "")
        seconds[layout] = time.monotonic() - start
    process = started(run_file, tmp_path / "run", LAYOUTS[layout])
    time.sleep(moment * seconds[layout])
    process.send_signal(number)
    said = "\n".join(process.communicate(timeout=600))
    assert process.returncode in (0, -number, 128 + number), said
    assert "Traceback" not in said and "Exception ignored" not in said, said
    assert (
        not os.path.exists(tmp_path / "run" / "checkpoints")
        or process.returncode
        or "step 4/4" in said
    )
