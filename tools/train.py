"""`megaprec train RUN.toml [table.key=value ...]`: pretrains a model and leaves a run directory.

Started by hand it checks everything that can be known beforehand, prepares the data and starts local ranks;
started by torchrun, Slurm or itself it is one rank of the world it finds. One file, the same everywhere.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.checkpoint.folder import latest
from megaprec.checkpoint.store import Store
from megaprec.errors import UserError
from parallel.mesh import make_mesh, world
from tools.corpus import Corpus, open_corpus
from tools.launch import joined_world, launch_local, share_of_cores
from tools.plots import plot_run
from tools.run import RunConfig, check_world, load_run
from tools.trainer import Trainer, checkpoint_folder
from tools.write import print_outcome


def add_parser(subparsers: Any) -> None:
    """Adds `train`."""
    parser = subparsers.add_parser("train", help="pretrain a model", description=__doc__)
    parser.add_argument("file", metavar="RUN.toml", help="the run file (`megaprec keys` lists its keys)")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value", help="keys that differ from the file")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs `megaprec train`."""
    config = load_run(args.file, args.overrides)
    if joined_world():
        return _run_rank(config)
    corpus = open_corpus(config)
    check_resumable(config, corpus)
    if config.world_size == 1:
        return _run_rank(config)
    return launch_local(["train", args.file, *args.overrides], config.world_size, config.train.threads)


def _run_rank(config: RunConfig) -> int:
    device = _device(config)
    torch.set_num_threads(config.train.threads or share_of_cores(config.world_size))
    with world(device):
        check_world(config, dist.get_world_size())
        mesh = make_mesh(config.parallel.pipeline, config.parallel.data, config.parallel.tensor, device)
        corpus = _shared_corpus(config)
        check_resumable(config, corpus)
        Trainer(config, corpus, mesh).run()
        first = dist.get_rank() == 0
    if first:
        print_outcome(config, plot_run(Path(config.train.folder)) if config.log.plot else None)
    return 0


def _device(config: RunConfig) -> str:
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise UserError('train.device = "cuda", but torch sees no CUDA device here: use "auto" or "cpu"')
    return "cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu"


def _shared_corpus(config: RunConfig) -> Corpus:
    """Rank 0 builds what is missing, then the others find it."""
    corpus = open_corpus(config) if dist.get_rank() == 0 else None
    dist.barrier()
    return corpus or open_corpus(config)


def check_resumable(config: RunConfig, corpus: Corpus) -> None:
    """Raises UserError if the checkpoint that the run would go on from is of another model."""
    path = latest(checkpoint_folder(config)) if config.checkpoint.resume else None
    if path is None:
        return
    saved, asked = Store(path).index["model"], json.loads(corpus.model.model_dump_json())
    if differ := [f"model.{k} is {asked[k]} in the run, {saved.get(k)} in the checkpoint" for k in asked if saved.get(k) != asked[k]]:
        raise UserError(*differ, f"{path} is of another model: give another train.folder, or checkpoint.resume = false")
