"""Many runs without a fault: no invariant may be called broken in one of them.

`python -m tests.training.clean_runs [COUNT] [FIRST]` (or `make campaign`) draws COUNT runs (200)
from the seeds FIRST, FIRST + 1, ...: families, initial weights, precisions, layouts of one and two
ranks, schedules of rates and batches, rules, groups, frozen tensors, masks, resumes. Draws that the
checks of a run file refuse are drawn again. Says which invariant was called broken, and how often
each was proven.
"""

import argparse
import io
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import UserError
from tests.covering.options import FAMILIES, OPTIONS
from tests.parity.oracle_runs import words_of
from tests.ranks import run_ranks
from tests.runs import rewind, write_run
from tools.config.rules.checking import check_all
from tools.config.run_file import load_run
from tools.journal.invariant_records import NAMES, WRONG, InvariantFinding, read_findings
from tools.journal.records import EVENTS, read_lines
from tools.training.branch import open_start
from tools.training.corpus import open_corpus
from tools.training.fp8_summary import check_fp8
from tools.training.trainer import Trainer

COUNT = 200
STEPS = 5
COMMON = [
    f"train.steps={STEPS}",
    "train.seq_length=16",
    "train.global_batch=8",
    "train.micro_batch=2",
    "data.vocab_size=330",
    "model.vocab=330",
    "checkpoint.every=2",
    "precision.patience=100",
    "log.every=1000",
]
TAKEN = ("sequence", "schedule", "zero", "overlap", "recompute", "numerics", "ema", "clip")
PRECISIONS: list[list[str]] = [
    [],
    [],
    ["precision.compute=bf16"],
    ["precision.compute=bf16"],
    ["precision.compute=bf16", "precision.masters=split"],
    ["precision.compute=bf16", "precision.masters=none", "precision.rounding=stochastic"],
    ["precision.compute=bf16", "precision.masters=none"],
    ["precision.compute=bf16", "precision.parameters=fp32"],
    ["precision.compute=fp16"],
    ["precision.compute=fp16", "precision.initial_scale=1e9"],
    ["precision.compute=fp16", "precision.initial_scale=1e12"],
    ["precision.compute=bf16", "fp8.kind=delayed", "fp8.pad=true"],
    ["precision.compute=bf16", "fp8.kind=current", "fp8.pad=true"],
    ["precision.compute=fp64"],
]
RATES: list[list[str]] = [
    ["lr.schedule=constant"],
    ["lr.schedule=constant", "lr.warmup=2"],
    ["lr.schedule=linear", "lr.warmup=1", "lr.final=1e-5"],
    ["lr.schedule=cosine", "lr.warmup=2", "lr.initial=1e-6"],
    ["lr.schedule=cosine", "lr.length=3"],
    ["lr.schedule=wsd", "lr.decay=2", "lr.wsd_decay=sqrt"],
    ["lr.schedule=wsd", "lr.decay=3", "lr.warmup=1"],
    ["lr.schedule=linear", "lr.unit=samples", "lr.warmup=12"],
    ["lr.schedule=cosine", "lr.unit=samples", "lr.warmup=3", "lr.final=1e-6"],
    ["lr.schedule=constant", "lr.warmup=5"],
]
PEAKS = ["lr.peak=1e-2", "lr.peak=1e-2", "lr.peak=1e-3", "lr.peak=1e-5", "lr.peak=1e-9"]
RULES: list[list[str]] = [
    [],
    [],
    [],
    ["optimizer.name=sgd"],
    ["optimizer.name=sgd", "optimizer.options={momentum = 0.9}"],
    ["optimizer.name=muon"],
    ["optimizer.name=RMSprop"],
    ["optimizer.weight_decay=0.0"],
]
GROUPS: list[list[str]] = [
    [],
    [],
    ['optimizer.groups=[{pattern = "embedding.*", lr = 0.0}]'],
    ['optimizer.groups=[{pattern = "*norm*", all_dims = true, lr = 3.0}]'],
    ['optimizer.frozen=["embedding.*"]'],
    ['optimizer.frozen=["*norm*"]'],
]
BATCHES: list[list[str]] = [[], [], ["train.batch_schedule=[[0,4],[12,8]]"]]
MASKS: list[list[str]] = [
    [],
    [],
    ["data.eod_mask_loss=true"],
    ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true"],
]
INITIAL: list[list[str]] = [
    [],
    [],
    [],
    ["model.init_std=0.2"],
    ["model.init_std=0.002"],
    ["model.init_std=1.0"],
    ["model.init={head = 0.1}"],
    ["model.init={embedding = 0.5}"],
    ["model.tied=true"],
    ["model.tied=true", "model.init_std=0.3"],
    ["model.tied=false"],
    ["model.dropout=0.2"],
    ["model.mup_base_hidden=8"],
    ["model.mup_base_hidden=12", "model.tied=true"],
    ["model.embedding_scale=5.0"],
    ["model.final_softcap=1.0"],
]
LAYOUTS: list[list[str]] = [
    *([] for _ in range(12)),
    ["parallel.data=2"],
    ["parallel.data=2"],
    ["parallel.tensor=2"],
    ["parallel.pipeline=2"],
    ["parallel.context=2"],
    ["parallel.data=2", "parallel.expert=2"],
]
RESUMES = (False, False, False, True)


class Run(NamedTuple):
    """Words of a command, and those of the layout in which it resumes; None: it does not."""

    words: list[str]
    layout: list[str]
    again: list[str] | None


def drawn(seed: int) -> Run:
    """The run of a seed: the first draw that the checks of a run file take."""
    dice = random.Random(seed)
    while True:
        run = _draw(dice)
        layouts = (run.layout, run.again or [])
        if all(_is_possible([*run.words, *layout]) for layout in layouts):
            return run


def _draw(dice: random.Random) -> Run:
    words = [*words_of(dice.choice(FAMILIES)), *COMMON, dice.choice(PEAKS)]
    for choices in (PRECISIONS, RATES, RULES, GROUPS, BATCHES, MASKS, INITIAL):
        words += dice.choice(choices)
    # most options at what the others leave alone, so that few draws are refused
    for option in dice.sample(TAKEN, 2):
        words += dice.choice(list(OPTIONS[option].values()))
    words.append(f"train.seed={dice.randrange(1000)}")
    again = dice.choice(LAYOUTS) if dice.choice(RESUMES) else None
    return Run(words, dice.choice(LAYOUTS), again)


def _is_possible(words: list[str]) -> bool:
    try:
        config = load_run(None, [*words, "train.folder=unused"])
        check_all(config, check_fp8)
    except UserError:
        return False
    # muon looks for embedding and head among what is trained, and asks for patterns without them
    lacks_names = config.optimizer.name == "muon" and bool(config.optimizer.frozen)
    return config.world_size <= 2 and not lacks_names


def findings(file: Path, run: Run, folder: Path) -> Mapping[str, InvariantFinding]:
    """What the run has found of its invariants."""
    shutil.rmtree(folder, ignore_errors=True)
    _train(file, [*run.words, *run.layout, f"train.folder={folder / 'first'}"])
    if run.again is None:
        return _read(folder / "first")
    _ = rewind(folder / "first", folder / "again", 2)
    _train(file, [*run.words, *run.again, f"train.folder={folder / 'again'}"])
    return _read(folder / "again")


def _read(folder: Path) -> Mapping[str, InvariantFinding]:
    lines = read_lines(folder / EVENTS)
    return read_findings([line.record for line in lines if line.record])


def _train(file: Path, words: list[str]) -> None:
    config = load_run(file, words)
    parallel = config.parallel
    if config.world_size == 1:
        train_rank(None, file, words)
        return
    axes = {"pp": parallel.pipeline, "dp": parallel.data, "cp": parallel.context}
    axes["tp"] = parallel.tensor
    run_ranks(train_rank, axes, file=file, words=words)


def train_rank(mesh: DeviceMesh | None, file: Path, words: list[str]) -> None:
    """A run on a rank of the mesh, without what it prints."""
    config = load_run(file, words)
    start = open_start(config)
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()):
        Trainer(config, open_corpus(config), mesh, start.path if start else None).run()


def alarms(found: Mapping[str, InvariantFinding]) -> Iterator[str]:
    """A line for each invariant that was called broken."""
    for name, finding in found.items():
        if finding.verdict == WRONG:
            yield f"{name}: {finding.why}"


def main(argv: list[str] | None = None) -> int:
    """The campaign; ends with 1 if a run was accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=COUNT)
    parser.add_argument("first", nargs="?", type=int, default=0)
    args = parser.parse_args(argv)
    verdicts = Counter[tuple[str, str]]()
    accused = 0
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder))
        for seed in range(args.first, args.first + args.count):
            run = drawn(seed)
            found = findings(file, run, Path(folder) / "run")
            for name in NAMES:
                verdicts[name, found[name].verdict] += 1
            lines = list(alarms(found))
            accused += bool(lines)
            for line in lines:
                print(f"seed {seed}: {line}", flush=True)
            if (seed + 1) % 25 == 0:
                print(f"until seed {seed}: {accused} accused", flush=True)
    for (name, verdict), count in sorted(verdicts.items()):
        print(f"{name:12} {verdict:10} {count}")
    print(f"{args.count} runs, {accused} accused")
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
