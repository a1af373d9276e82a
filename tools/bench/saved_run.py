"""`megaprec train` from end to end on a device, with saves in the background; then the run goes on
from its last checkpoint on the CPU.

The records have the seconds of a usual step, of the slowest, and of both runs, and their losses.
The model has 340 million parameters, 12 layers of width 1536; with --small some thousands, to try
the program.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tools.bench.gpu_plan import ROOT
from tools.bench.measurement import add_device, print_record, require_gpu

SUBJECT = "a run from end to end with saves, resumed on the CPU"
STEPS = 24
EVERY = 8  # steps between two saves
WORDS = 500
LINES = 20_000
LARGE = (
    "model.layers=12",
    "model.hidden=1536",
    "model.heads=12",
    "model.ffn=6144",
    "train.seq_length=1024",
    "train.global_batch=8",
    "train.micro_batch=4",
    "precision.compute=bf16",
)
SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.ffn=64",
    "train.seq_length=32",
    "train.global_batch=2",
    "train.micro_batch=1",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_device(parser)
    parser.add_argument("--small", action="store_true", help="a model that takes no time")


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench saved-run`. Exit code 1: a run has failed."""
    require_gpu(args.device)
    sizes = SMALL if args.small else LARGE
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = folder / "text.txt"
        _write_text(text, LINES // 20 if args.small else LINES)
        run_file = folder / "run.toml"
        run_file.touch()  # all keys are given beside it
        keys = [
            str(run_file),
            *sizes,
            f"data.source={text}",
            "data.tokenizer=characters",
            "lr.warmup=2",
        ]
        keys += [f"checkpoint.every={EVERY}", f"train.folder={folder / 'run'}"]
        start = time.perf_counter()
        _train([*keys, f"train.steps={STEPS}", f"train.device={args.device}"])
        seconds = time.perf_counter() - start
        steps = _lines(folder / "run" / "metrics.jsonl")
        print_record({"seconds": round(seconds, 1), **_describe(steps)})
        start = time.perf_counter()
        _train([*keys, f"train.steps={STEPS + 1}", "train.device=cpu"])
        last = _lines(folder / "run" / "metrics.jsonl")[-1]
        record = {"resumed_on_cpu_at_step": last["step"], "loss": last["loss"]}
        print_record(record | {"seconds": round(time.perf_counter() - start, 1)})
    return 0


def _write_text(path: Path, lines: int) -> None:
    """Write lines of words, which have something to learn."""
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefgh", k=dice.randint(2, 7))) for _ in range(WORDS)]
    text = "\n".join(" ".join(dice.choices(words, k=12)) for _ in range(lines))
    path.write_text(text, encoding="utf-8")


def _train(keys: Sequence[str]) -> None:
    """Run `megaprec train`. Raises UserError if it fails."""
    command = [sys.executable, "-m", "megaprec", "train", *keys]
    # what it prints is no record
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode:
        raise UserError.of("bench.run_failed", code=done.returncode)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _describe(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first and the last loss of a run, and the seconds of its usual and slowest
    step."""
    seconds = [step["seconds"] for step in steps if "seconds" in step]
    usual = statistics.median(seconds)
    return {
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "usual_step_s": round(usual, 4),
        "slowest_step_s": round(max(seconds[1:]), 4),
    }
