"""Many runs without a fault, each in several layouts: `megaprec parity` must not accuse one of
them.

`python -m tests.parity.campaign [COUNT] [FIRST]` (or `make campaign`) draws COUNT configurations
(200) from the seeds FIRST, FIRST + 1, ...: family, sizes, biases, dropout, windows, experts,
schedules, optimizer, precision and layouts. Each goes the whole way of the command, but for its
ranks, which are forked and not started. Says what was accused, and of what.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tests.ranks
from megaprec.errors import UserError
from tests.covering.around import obeyed
from tests.ranks import run_ranks
from tools.commands import parity
from tools.config.run_file import load_run
from tools.verify.parity.ranks import PENDING, RecordedRun, carry_out

# the first is most at risk
FAMILIES = (
    "gpt2",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
)
LAYOUTS = ("dp=2", "pp=2", "tp=2", "tp=2,pp=2", "pp=2,dp=2", "tp=2,dp=2", "dp=4", "tp=4", "pp=4",
           "tp=2,sequence=true", "tp=2,pp=2,sequence=true", "pp=2,schedule=zb-v", "pp=2,schedule=interleaved",
           "pp=2,schedule=zb-h1", "pp=2,schedule=gpipe", "dp=2,zero=false",
           "dp=2,zero=2,bucket=500", "dp=2,zero=3", "dp=2,zero=3,overlap=true,zero_keep=1",
           "dp=2,overlap=true,bucket=500")  # fmt: skip
TOGETHER = 10  # runs, after which ranks are started anew


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
    model |= {
        "dropout": dice.choice((0.0, 0.0, 0.1)),
        "attention_dropout": dice.choice((0.0, 0.0, 0.1)),
    }
    model |= {
        "window": dice.choice((0, 0, 3, 1)),
        "init_std": dice.choice((0.02, 0.02, 0.2, 0.002)),
    }
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


Together = Callable[[Sequence[RecordedRun], Path], Sequence[None]]


def forked(runs: Sequence[RecordedRun], folder: Path) -> list[None]:
    """As `run_together`, with ranks that are forked."""
    left(runs, folder)
    run_ranks(of_all, {"tp": runs[0].config.world_size}, folder=folder)
    return [None] * len(runs)


def left(runs: Sequence[RecordedRun], folder: Path) -> None:
    """Leaves what ranks are to know."""
    for run in runs:
        run.folder.mkdir(parents=True)
        run.write()
    (folder / PENDING).write_text("\n".join(run.folder.name for run in runs))


def of_all(mesh: DeviceMesh, folder: Path) -> None:
    with obeyed():
        carry_out(folder)


class Pool:
    """Ranks that stay for many runs: most of the time goes into starting them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.asked = 0
        self.folder = Path(tempfile.mkdtemp(prefix="megaprec_campaign_"))
        body = partial(run_ranks, serve, {"tp": ranks}, folder=self.folder)
        self.thread = Thread(target=body, daemon=True)
        self.thread.start()

    def together(self, runs: Sequence[RecordedRun], folder: Path) -> list[None]:
        """As `run_together`."""
        left(runs, folder)
        self._ask(str(folder))
        done = [self.folder / f"{self.asked}.{rank}" for rank in range(self.ranks)]
        while not all(path.exists() for path in done):
            if not self.thread.is_alive():
                raise RuntimeError(f"a rank failed in {folder}")
            time.sleep(0.02)
        return [None] * len(runs)

    def close(self) -> None:
        """The ranks end."""
        self._ask("")
        self.thread.join()

    def _ask(self, text: str) -> None:
        self.asked += 1
        unfinished = self.folder / "next"
        unfinished.write_text(text)
        unfinished.rename(self.folder / str(self.asked))


def serve(mesh: DeviceMesh, folder: Path) -> None:
    for number in count(1):
        while not (folder / str(number)).exists():
            time.sleep(0.02)
        asked = (folder / str(number)).read_text()
        if not asked:
            return
        with obeyed():
            carry_out(Path(asked))
        (folder / f"{number}.{dist.get_rank()}").touch()


def accused(
    seed: int, folder: Path, together: Together = forked, most: int = 3
) -> tuple[int, list[dict[str, Any]]]:
    """How many layouts of the run that `seed` draws, of `most`, were compared, and those that were
    found wrong."""
    keys, layouts = drawn(seed)
    config = load_run(None, [*keys, f"train.folder={folder}/run"])
    fits = [one for one in layouts if _fits(config, one)]
    precision = "both" if seed % 4 == 0 else "float64"
    args = parity.Options("drawn", fits[:most], precision)
    made = parity.certify(
        config, args, folder, lambda text: None, replace(parity.LOCAL_LAUNCHER, together=together)
    )
    tried = [one for one in made["layouts"] if one["verdict"] != "not tried"]
    return len(tried), [one for one in tried if one["verdict"] == "wrong"]


def _fits(config: Any, layout: str) -> bool:
    most = parity.LayoutLimits(4, 4, 4)
    ready = parity.made_ready(config, most, False, 3, Path("unused"))
    try:
        return bool(
            parity.fitting_layouts(
                ready, parity.requested_layouts([layout], config.parallel), explicit=True
            )[0]
        )
    except UserError:
        return False


def main() -> int:
    """Says which runs were accused. Returns 1 if one was."""
    number, first = (int(text) for text in [*sys.argv[1:], *("200", "0")[len(sys.argv) - 1 :]])
    torch.set_num_threads(1)
    tests.ranks.SECONDS = 3600.0
    compared = 0
    wrong = 0
    for start in range(first, first + number, TOGETHER):
        seeds = range(start, min(start + TOGETHER, first + number))
        for some in of_seeds(seeds):
            compared = compared + some[0]
            wrong = wrong + len(some[1])
        print(f"{seeds.stop - first} runs, {compared} comparisons, {wrong} accused", flush=True)
    return int(wrong > 0)


def of_seeds(seeds: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """`accused` of each, with the same ranks."""
    pools = {ranks: Pool(ranks) for ranks in (2, 4)}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = accused(
                seed,
                Path(folder),
                lambda runs, f: pools[runs[0].config.world_size].together(runs, f),
            )
        for one in found[1]:
            print(
                seed,
                {key: value for key, value in one.items() if key not in ("quantities", "way")},
                flush=True,
            )
        yield found
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
