"""Small runs of the command for end-to-end tests: a text, a run file, and ways to train it and read
what it left."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import INDEX
from megaprec.checkpoint.digests import INDEX_DIGEST, seal_index
from megaprec.checkpoint.reader import Store
from tests.ranks import run_ranks
from tools import cli
from tools.config.resolved_run import resolve_run
from tools.journal.records import read_metrics
from tools.training.branch import open_start
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer

WORDS = [
    "the",
    "model",
    "learns",
    "to",
    "say",
    "what",
    "it",
    "has",
    "seen",
    "in",
    "this",
    "text",
    "and",
    "über",
    "Öl",
]
RUN = """
[model]
layers = 2
hidden = 16
heads = 4
kv_heads = 2
ffn = 32
dropout = 0.1
[data]
source = "{folder}/text.txt"
vocab_size = 330
cache = "{folder}/data"
held_out = 0.1
[lr]
peak = 1e-2
schedule = "constant"
[train]
steps = 6
global_batch = 8
micro_batch = 2
seq_length = 16
threads = 1
folder = "{folder}/run"
[checkpoint]
every = 3
[log]
plot = false
"""
TIMES = ("seconds", "tokens_per_s", "tflops", "mfu")


def write_run(folder: Path) -> Path:
    """A text and a run file for it; returns the latter. The data set is shared by all runs of the
    file."""
    dice = random.Random(0)
    lines = [" ".join(dice.choices(WORDS, k=9)) for _ in range(385)]
    # about what is held out
    lines += ["".join(dice.choices("0123456789", k=30)) for _ in range(15)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    path = folder / "my.toml"
    path.write_text(RUN.format(folder=folder))
    open_corpus(resolve_run(path))
    return path


def train(file: Path, *overrides: str) -> int:
    """`megaprec train` in this process; returns the exit code."""
    threads = torch.get_num_threads()
    try:
        return cli.main(["train", str(file), *overrides])
    finally:
        torch.set_num_threads(threads)


def train_on(
    file: Path, *overrides: str, tensor: int = 1, pipeline: int = 1, data: int = 1
) -> Path:
    """Trains on forked ranks, in a tenth of the time that the command takes to start them; returns
    the folder."""
    layout = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"parallel.data={data}"]
    run_ranks(
        _train_rank,
        {"tp": tensor, "pp": pipeline, "dp": data},
        file=file,
        overrides=[*layout, *overrides],
    )
    return Path(resolve_run(file, [*layout, *overrides]).train.folder)


def train_each_on(file: Path, runs: Sequence[Sequence[str]], tensor: int = 1) -> None:
    """Several runs, each with its overrides, one after the other on the same forked ranks."""
    overrides = [[f"parallel.tensor={tensor}", *run] for run in runs]
    run_ranks(_train_each_rank, {"tp": tensor}, file=file, runs=overrides)


def _train_each_rank(mesh: DeviceMesh, file: Path, runs: list[list[str]]) -> None:
    for overrides in runs:
        _train_rank(mesh, file, overrides)


def _train_rank(mesh: DeviceMesh, file: Path, overrides: list[str]) -> None:
    config = resolve_run(file, overrides)
    start = open_start(config)
    Trainer(config, open_corpus(config), mesh, start.path if start else None).run()


def steps(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of each step, without times. NaN is put as text, so that it equals
    itself."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def rewind(folder: Path, to: Path, step: int) -> Path:
    """A copy of a run as if it had been ended right after the checkpoint of `step`. Its metrics go
    further."""
    shutil.copytree(folder, to)
    for later in (to / "checkpoints").glob("step_*"):
        if int(later.name.removeprefix("step_")) > step:
            shutil.rmtree(later)
    return to


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All logical tensors, weights and moments."""
    store = Store(checkpoint)
    return {key: store.read(*key.split("/", 1)) for key in store.index["tensors"]}


def edit_index(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what checkpoint.json says; its digest then is that of what it says now."""
    file = checkpoint / INDEX
    index = json.loads(file.read_bytes())
    change(index)
    file.write_bytes(
        seal_index({key: value for key, value in index.items() if key != INDEX_DIGEST})
    )


def assert_close(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float
) -> None:
    """The same steps but for rounding."""
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            if isinstance(one[key], float):
                torch.testing.assert_close(
                    one[key], other[key], rtol=tolerance, atol=0, msg=f"{key}: {one} {other}"
                )
            elif key == "stage_zeros":
                assert sum(one[key]) == one["num_zeros"] == sum(other[key])
            else:
                assert one[key] == other[key]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]
