"""Layouts carried out: one launch of local ranks for all layouts of as many ranks, one after the other.

The parent leaves a folder for each run, with its run file and what is to be done; a rank reads them, and puts its
files beside them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.mesh import make_mesh, world
from tools.corpus import Corpus, open_made
from tools.launch import launch_local
from tools.parity.gather import Record, gather
from tools.parity.record import Plan, record
from tools.run import RunConfig, load_run

FLAG = "--as-rank"  # of `megaprec parity`: this process is a rank, and the argument a folder of runs


@dataclass(frozen=True)
class Run:
    """A run in one layout. folder: its own."""

    config: RunConfig
    plan: Plan
    folder: Path

    def write(self) -> None:
        """Leaves what a rank is to know."""
        self.config.save_resolved(self.folder)
        (self.folder / "plan").write_text(json.dumps(asdict(self.plan)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "Run":
        """What was left in `folder`."""
        return Run(load_run(folder / "run.toml"), Plan(**json.loads((folder / "plan").read_text())), folder)


def corpus_of(config: RunConfig) -> Corpus:
    """The data of a run whose sources are data sets that are there, and whose vocabulary is known."""
    sources = [part.source for part in config.data.blend] or [config.data.source]
    return open_made(config, [Path(source) for source in sources], None)


def run_alone(run: Run) -> Record:
    """A run on this process."""
    run.folder.mkdir(parents=True)
    with world():
        record(run.config, corpus_of(run.config), make_mesh(), run.plan, run.folder)
    return gather(run.folder)


def run_together(runs: Sequence[Run], folder: Path) -> int:
    """Runs of equally many ranks, each in a folder within `folder`, on local ranks. Returns their exit code."""
    for run in runs:
        run.folder.mkdir(parents=True)
        run.write()
    return launch_local(["parity", str(folder), FLAG], runs[0].config.world_size, threads=1)


def as_rank(folder: Path) -> int:
    """This rank's part in `run_together`."""
    torch.set_num_threads(1)
    with world():
        for run in (Run.read(inner) for inner in sorted(folder.iterdir())):
            p = run.config.parallel
            mesh = make_mesh(p.pipeline, p.data, p.tensor)
            record(run.config, corpus_of(run.config), mesh, run.plan, run.folder)
            dist.barrier()
    return 0


def done(run: Run) -> bool:
    """Whether every rank has left its files."""
    return all((run.folder / f"{rank}.json").is_file() for rank in range(run.config.world_size))


def with_vocabulary(config: RunConfig, corpus: Corpus) -> RunConfig:
    """The run on the data set that is open, its vocabulary known."""
    prefixes = [str(dataset.prefix) for dataset in corpus.datasets]
    parts = zip(config.data.blend, prefixes, strict=True) if config.data.blend else ()
    blend = tuple(part.model_copy(update={"source": prefix}) for part, prefix in parts)
    source = {"blend": blend} if blend else {"source": prefixes[0]}
    data = config.data.model_copy(update={**source, "tokenizer": ""})
    return config.model_copy(update={"model": corpus.model, "data": data})
