"""The lines that training runs execute: small runs of the command, each process of which is traced."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runs import write_run

TRACING = Path(__file__).parent / "tracing"
Lines = frozenset[tuple[str, int]]
# Together they have each axis of the layout, half precision, FP8, experts, Muon, an average of the
# weights, another schedule, recomputation, documents and a resume.
RUNS = (
    ("train.folder=plain", "optimizer.ema=0.99", "train.eval_every=3"),
    ("train.folder=plain", "optimizer.ema=0.99", "train.eval_every=3", "train.steps=8"),
    ("parallel.tensor=2", "parallel.pipeline=2", "precision.compute=fp16", "model.tied=true"),
    ("parallel.data=2", "parallel.zero=2", "precision.compute=bf16", "fp8.kind=delayed"),
    ("model.experts=4", "parallel.data=2", "parallel.expert=2", "optimizer.name=muon"),
    ("parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"),
    ("train.numerics=canonical", "parallel.tensor=2"),
    ("parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.recompute=full"),
    (
        "parallel.pipeline=2",
        "parallel.schedule=interleaved",
        "model.layers=4",
        "model.mtp_layers=1",
        "data.reset_attention_mask=true",
    ),
)


def trained_lines(root: Path, runs: tuple[tuple[str, ...], ...] = RUNS) -> Lines:
    """Return path and number of the lines of the tree at `root` that training runs execute."""
    with tempfile.TemporaryDirectory(prefix="trained_") as temporary:
        folder = Path(temporary)
        run_file = write_run(folder)
        noted = folder / "noted"
        noted.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TRACING), str(root)]),
            "MUTANTS_TRACED_ROOT": str(root),
            "MUTANTS_TRACED_FOLDER": str(noted),
        }
        for number, run in enumerate(runs):
            words = [f"train.folder={folder}/run{number}", *run]
            words = [word.replace("=plain", f"={folder}/plain") for word in words]
            command = [sys.executable, "-m", "megaprec", "train", str(run_file), *words]
            subprocess.run(command, env=environment, cwd=root, check=True, capture_output=True)
        lines = [line for file in noted.iterdir() for line in file.read_text().splitlines()]
    places = (line.rpartition(":") for line in lines)
    return frozenset((path, int(number)) for path, _, number in places)
