"""Loops of a user's own, as docs/optimizer.md prints them and as examples/pretrain.py has one, run
as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_docs import blocks
from tests.project.test_readme import ROOT

BLOCKS = blocks(ROOT / "docs" / "optimizer.md", "python")
EXAMPLE = str(ROOT / "examples" / "pretrain.py")
SHORTER = f"""
code = open({EXAMPLE!r}).read().replace("range(60)", "range(12)")  # it trains on its own text, which stays as it is
exec(compile(code, {EXAMPLE!r}, "exec"), {{"__name__": "__main__", "__file__": {EXAMPLE!r}}})
"""
LAUNCHED = re.compile(r"# torchrun --nproc-per-node (\d+) \w+\.py\n")


def launched_by(ranks: int | str) -> list[str]:
    """torchrun, with a port of its own."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]


def run(words: list[str], here: Path) -> list[str]:
    """The lines that a program prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=here, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def run_block(code: str, here: Path) -> list[str]:
    (here / "block.py").write_text(code)
    launched = LAUNCHED.match(code)
    return run([*(launched_by(launched[1]) if launched else [sys.executable]), "block.py"], here)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("number", [n for n, code in enumerate(BLOCKS) if not LAUNCHED.match(code)])
@pytest.mark.usefixtures("forked_python")
def test_a_loop_of_the_page_runs_as_printed_in_one_process(number: int, tmp_path: Path) -> None:
    lines = run_block(BLOCKS[number], tmp_path)
    losses = [float(line.split()[1]) for line in lines]
    assert len(lines) == 10
    assert losses[-1] < losses[0]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("number", [n for n, code in enumerate(BLOCKS) if LAUNCHED.match(code)])
@pytest.mark.usefixtures("forked_python")
def test_a_loop_of_the_page_runs_as_printed_under_torchrun(number: int, tmp_path: Path) -> None:
    lines = run_block(BLOCKS[number], tmp_path)
    losses = [float(line.split()[1]) for line in lines if line.startswith("applied")]
    assert len(lines) in (10, 30)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_the_example_trains_the_same_model_however_many_replicas_share_the_batch(
    tmp_path: Path,
) -> None:
    """The first loss is that of guessing one of 256 bytes: were replicas added up, it would be
    twice as high."""
    (tmp_path / "shorter.py").write_text(SHORTER)
    one, two = (
        [
            float(line.split()[4])
            for line in run([*launched_by(4 * replicas), program, "fp32"], tmp_path)
        ]
        for replicas, program in ((1, EXAMPLE), (2, "shorter.py"))
    )
    assert (len(one), len(two)) == (60, 12)
    assert one[0] == pytest.approx(5.5, abs=0.6)
    assert one[-1] < 0.8 * one[0]
    assert two == pytest.approx(one[:12], abs=2e-3)
    assert two[:10] == pytest.approx(one[:10], abs=1.1e-4)
