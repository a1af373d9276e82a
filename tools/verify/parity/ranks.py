"""Running a configuration on a group of local ranks, or alone on this process, to record it.

All runs of the same number of ranks share one launch, one after the other.

The parent writes a folder for each run, with its run file and its plan; the ranks read them and add
their files.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.durable import put_text
from parallel.mesh import make_mesh, world
from tools.config.run_file import RunConfig, saved_run
from tools.training.corpus import Corpus, open_built
from tools.training.ends import require_not_stopped
from tools.training.launch import launch_local
from tools.training.stopping import note_failure
from tools.verify.parity.hang_watch import (
    PATIENCE,
    Trail,
    Watch,
    describe_position,
    odd_ranks,
    recorded_position,
)
from tools.verify.parity.record import Plan, Record, gather, record

PENDING = "pending"  # file with the names of the pending runs
# option of `megaprec parity`: this process is a rank, and its argument a folder of runs
FLAG = "--as-rank"


@dataclass(frozen=True)
class RecordedRun:
    """A run in one layout. folder: where its ranks write their files."""

    config: RunConfig
    plan: Plan
    folder: Path

    def write(self) -> None:
        """Write the files that the ranks read."""
        self.config.save_resolved(self.folder)
        put_text(self.folder / "plan", json.dumps(asdict(self.plan)))

    @staticmethod
    def read(run_folder: Path) -> "RecordedRun":
        """Read the files that `write` wrote to `run_folder`."""
        plan = Plan(**json.loads((run_folder / "plan").read_text()))
        return RecordedRun(saved_run(run_folder), plan, run_folder)


def corpus_of(run_config: RunConfig) -> Corpus:
    """Open the data of a run whose sources are existing data sets and whose vocabulary is known."""
    sources = run_config.data.sources
    return open_built(run_config, [Path(source) for source in sources], None)


def run_alone(recorded_run: RecordedRun) -> Record:
    """Carry out a run on this process, and return its record."""
    recorded_run.folder.mkdir(parents=True)
    with world():
        record(
            recorded_run.config,
            corpus_of(recorded_run.config),
            make_mesh(),
            recorded_run.plan,
            recorded_run.folder,
        )
    return gather(recorded_run.folder)


@dataclass(frozen=True)
class Failure:
    """The reason why a run did not finish. where: position of each rank, if all waited."""

    why: str
    where: tuple[str, ...] = ()


def run_together(
    runs: Sequence[RecordedRun], run_folder: Path, patience: float = PATIENCE
) -> list[Failure | None]:
    """Carry out runs of equally many ranks, each in a folder within `run_folder`; return why each
    failed, None if it did not.

    After a failed run the others are launched anew. patience: seconds after which ranks that all
    wait are ended. Raises Stopped for a signal.
    """
    for recorded_run in runs:
        recorded_run.folder.mkdir(parents=True)
        recorded_run.write()
    failures: list[Failure | None] = []
    # each launch ends with all runs done, or with the first one that failed
    while len(failures) < len(runs):
        pending = runs[len(failures) :]
        failure = _launch(pending, run_folder, patience)
        num_done = 0
        while num_done < len(pending) and done(pending[num_done]):
            num_done += 1
        failures += [None] * num_done
        if num_done == len(pending):
            break
        failures.append(failure)
    return failures


class RunFailed(Exception):
    """A run that did not finish; the text says why."""


def run_and_gather(recorded_run: RecordedRun) -> Record:
    """Carry out one run, on as many ranks as it has, and return its record. Raises RunFailed."""
    if recorded_run.config.world_size == 1:
        return run_alone(recorded_run)
    group_folder = recorded_run.folder.parent
    group_folder.mkdir(parents=True, exist_ok=True)
    (failure,) = run_together([recorded_run], group_folder)
    if failure is not None:
        raise RunFailed("; ".join([failure.why, *failure.where]))
    return gather(recorded_run.folder)


@dataclass(frozen=True)
class Launcher:
    """The functions that carry out runs: on this process alone, and on several ranks."""

    alone: Callable[[RecordedRun], Record] = run_alone
    together: Callable[[Sequence[RecordedRun], Path], list[Failure | None]] = run_together


def _launch(runs: Sequence[RecordedRun], run_folder: Path, patience: float) -> Failure:
    """Launch the ranks once; return the failure of the first run that did not finish. Raises
    Stopped for a signal, whose runs say nothing about their layout."""
    folders = [recorded_run.folder for recorded_run in runs]
    names = "\n".join(folder.name for folder in folders)
    put_text(run_folder / PENDING, names)
    ranks = runs[0].config.world_size
    # each rank is `megaprec parity` again, which the option turns into `as_rank`
    command = ["parity", str(run_folder), FLAG]
    with Watch(run_folder, ranks, patience) as watch:
        exit_code = launch_local(command, ranks, threads=1)
    # before the exit code, which is that of the signal that ended them
    if watch.stuck:
        return _hang(watch.stuck, patience)
    require_not_stopped(exit_code)
    if exit_code > 128:
        how_it_ended = f"a rank was ended by signal {exit_code - 128}"
    else:
        how_it_ended = f"its ranks ended with code {exit_code}"
    notes = chain.from_iterable(folder.glob("*.failed") for folder in folders)
    # the rank that failed first is the cause; the others fail for want of it
    first_note = min(notes, key=lambda path: path.stat().st_mtime_ns, default=None)
    if first_note is None:
        return Failure(how_it_ended)
    return Failure(f"{how_it_ended}: {first_note.read_text(encoding='utf-8')}")


def _hang(stuck: Mapping[int, Mapping[str, Any]], patience: float) -> Failure:
    """Return the failure of ranks that all waited. stuck: the last position of each."""
    positions = tuple(describe_position(rank, stuck[rank]) for rank in sorted(stuck))
    odd_ranks_text = ", ".join(map(str, odd_ranks(stuck)))
    if odd_ranks_text:
        hint = f"; rank {odd_ranks_text} waits for something else than the others, or for nothing"
    else:
        hint = ""
    why = f"its ranks hang: for {patience:g} s none moved or computed, until they were ended{hint}"
    return Failure(why, positions)


def as_rank(run_folder: Path) -> int:
    """Act as a rank of `run_together`; return the exit status."""
    torch.set_num_threads(1)  # threads of a product cut its sum
    with (
        recorded_position(run_folder / f"{os.environ['RANK']}.at") as trail,
        world(failed=note_failure),
    ):
        carry_out(run_folder, trail)
    return 0


def carry_out(run_folder: Path, trail: Trail | None = None) -> None:
    """Take part in each pending run within `run_folder`, in a world that has been joined. trail:
    told where the rank is."""
    for name in (run_folder / PENDING).read_text(encoding="utf-8").splitlines():
        recorded_run = RecordedRun.read(run_folder / name)
        parallel = recorded_run.config.parallel
        try:
            mesh = make_mesh(parallel.pipeline, parallel.data, parallel.tensor, cp=parallel.context)
            record(
                recorded_run.config,
                corpus_of(recorded_run.config),
                mesh,
                recorded_run.plan,
                recorded_run.folder,
                trail,
            )
        except Exception as error:
            rank_number = dist.get_rank()
            message = f"rank {rank_number}: {type(error).__name__}: {error}".splitlines()[0]
            put_text(recorded_run.folder / f"{rank_number}.failed", message)
            raise
        # the next run may have another mesh, which all ranks must make together
        dist.barrier()


def done(recorded_run: RecordedRun) -> bool:
    """Return True if every rank has written its files."""
    ranks = range(recorded_run.config.world_size)
    # the last that a rank writes
    return all((recorded_run.folder / f"{rank}.json").is_file() for rank in ranks)


def with_vocabulary(run_config: RunConfig, corpus: Corpus) -> RunConfig:
    """Return the run on the open data set, with its vocabulary size."""
    prefixes = [str(dataset.prefix) for dataset in corpus.datasets]
    update: dict[str, Any] = {
        "tokenizer": "",
        "begin": "none" if corpus.begin_token is None else corpus.begin_token,
    }
    if run_config.data.blend:
        blended = zip(run_config.data.blend, prefixes, strict=True)
        update["blend"] = tuple(
            dataset.model_copy(update={"source": prefix}) for dataset, prefix in blended
        )
    else:
        update["source"] = prefixes[0]
    data = run_config.data.model_copy(update=update)
    return run_config.model_copy(update={"model": corpus.model, "data": data})
