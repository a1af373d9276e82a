"""Many runs without a fault, each in several layouts: `megaprec parity` must not accuse one of them.

`python -m tests.parity_campaign [COUNT] [FIRST]` (or `make campaign`) draws COUNT configurations (200) from the seeds
FIRST, FIRST + 1, ...: family, sizes, biases, dropout, windows, experts, schedules, optimizer, precision and layouts.
Each goes the whole way of the command, but for its ranks, which are forked and not started. Says what was accused, and
of what.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import UserError
from tests.ranks import run_ranks
from tools.parity import command
from tools.parity.ranks import TODO, Run, carry_out
from tools.run import load_run

FAMILIES = ("gpt2", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "mixtral")  # the first is most at risk
LAYOUTS = ("dp=2", "pp=2", "tp=2", "tp=2,pp=2", "pp=2,dp=2", "tp=2,dp=2", "dp=4", "tp=4", "pp=4",
           "tp=2,sequence=true", "tp=2,pp=2,sequence=true", "pp=2,schedule=zb-v", "pp=2,schedule=interleaved",
           "pp=2,schedule=zb-h1", "pp=2,schedule=gpipe", "dp=2,zero=false", "dp=2,overlap=true,bucket=500")  # fmt: skip


def drawn(seed: int) -> tuple[list[str], list[str]]:
    """Keys of a run, and layouts in the order in which they are to be tried."""
    dice = random.Random(seed)
    family = dice.choice(FAMILIES)
    kv_heads = dice.choice((4, 2, 1)) if family != "gpt2" else 4
    model: dict[str, Any] = {
        "family": f'"{family}"',
        "layers": dice.choice((2, 4)),
        "hidden": dice.choice((16, 24, 32)),
    }
    model |= {"heads": 4, "head_dim": 8, "kv_heads": kv_heads, "ffn": dice.choice((24, 48, 64))}
    model |= {"tied": dice.choice(("true", "false")), "bias": dice.choice(("true", "false"))}
    model |= {"dropout": dice.choice((0.0, 0.0, 0.1)), "attention_dropout": dice.choice((0.0, 0.0, 0.1))}
    model |= {"window": dice.choice((0, 0, 3, 1)), "init_std": dice.choice((0.02, 0.02, 0.2, 0.002))}
    if family == "mixtral":
        model |= {"bias": "false", "experts": 4, "experts_per_token": dice.choice((1, 2))}
    others = {
        "data.vocab_size": dice.choice((61, 64, 96)),
        "train.seed": seed,
        "train.steps": 9,
        "train.global_batch": 8,
        "train.micro_batch": dice.choice((1, 2)),
        "train.seq_length": dice.choice((16, 32)),
        "lr.peak": dice.choice((1e-2, 1e-3, 1e-4)),
        "optimizer.clip": dice.choice((0.0, 1.0)),
        "optimizer.norm": dice.choice((2.0, 2.0, "inf")),
        "precision.compute": '"' + dice.choice(("fp32", "bf16", "bf16", "fp16")) + '"',
        "parallel.recompute": '"' + dice.choice(("none", "none", "selective", "full")) + '"',
    }
    keys = {f"model.{key}": value for key, value in model.items()} | others
    return [f"{key}={value}" for key, value in keys.items()], dice.sample(LAYOUTS, len(LAYOUTS))


def forked(runs: Sequence[Run], folder: Path) -> list[None]:
    """As `run_together`, with ranks that are forked."""
    for run in runs:
        run.folder.mkdir(parents=True)
        run.write()
    (folder / TODO).write_text("\n".join(run.folder.name for run in runs))
    p = runs[0].config.parallel
    run_ranks(of_all, {"tp": p.tensor, "pp": p.pipeline, "dp": p.data}, folder=folder)
    return [None] * len(runs)


def of_all(mesh: DeviceMesh, folder: Path) -> None:
    carry_out(folder)


def accused(seed: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many layouts of the run that `seed` draws were compared, and those that were found wrong."""
    keys, layouts = drawn(seed)
    config = load_run(None, [*keys, f"train.folder={folder}/run"])
    fits = [one for one in layouts if _fits(config, one)]
    precision = "both" if seed % 4 == 0 else "float64"
    args = argparse.Namespace(layouts=fits[:3], full=False, steps=3, precision=precision, file="drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run_together", forked)
        made = command.proven(config, args, folder, lambda text: None)
    compared = [one for one in made["layouts"] if one["quantities"]]
    return len(compared), [one for one in compared if one["verdict"] != "proven"]


def _fits(config: Any, layout: str) -> bool:
    most = command.Most(4, 4, 4)
    ready = command.made_ready(config, most, False, 3, Path("unused"))
    try:
        return bool(command.fitting(ready, command.asked([layout], config.parallel), asked=True)[0])
    except UserError:
        return False


def main() -> int:
    """Says which runs were accused. Returns 1 if one was."""
    count, first = (int(text) for text in [*sys.argv[1:], *("200", "0")[len(sys.argv) - 1 :]])
    torch.set_num_threads(1)
    compared, wrong = 0, 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            number, some = accused(seed, Path(folder))
        compared, wrong = compared + number, wrong + len(some)
        for one in some:
            print(seed, {key: value for key, value in one.items() if key not in ("quantities", "way")}, flush=True)
        if (seed + 1 - first) % 10 == 0 or seed + 1 == first + count:
            print(f"{seed + 1 - first} runs, {compared} comparisons, {wrong} accused", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
