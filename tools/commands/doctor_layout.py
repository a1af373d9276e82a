"""Parity of the run's layout, as a check of the machine: the small run for 20 steps on one process
and on the ranks.

On local ranks it is `megaprec parity` of one layout. In a launched world the ranks that are there
take part, and the folder of the runs is one that all hosts share; one process is then a child of
rank 0.
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaprec.errors import UserError
from tools.commands.parity import certify
from tools.config.run_file import RunConfig, load_run
from tools.doctor.finding import Finding, not_tried, ok, wrong
from tools.doctor.place import Place
from tools.doctor.questions import within
from tools.parity.certificate import NOT_TRIED, PROVEN
from tools.parity.gather import Record, gather
from tools.parity.ranks import PENDING, Failure, Hands, Run, carry_out, run_together

STEPS = 20
SECONDS = 60.0  # time limit of the ranks' part in a launched world
OWN = [
    "model.family=llama",
    "model.hidden=64",
    "model.heads=8",
    "model.kv_heads=4",
    "model.ffn=128",
]
OWN += [
    "model.vocab=512",
    "data.vocab_size=512",
    "train.steps=20",
    "train.micro_batch=1",
    "train.seq_length=32",
]
SEE = "run `megaprec parity` on this run file: its certificate says where the difference begins"


def own_run(pipeline: int, data: int, tensor: int) -> RunConfig:
    """Return a small run in this layout, for a machine without a run file."""
    layout = [f"parallel.pipeline={pipeline}", f"parallel.data={data}", f"parallel.tensor={tensor}"]
    return load_run(
        None, [*OWN, f"model.layers={2 * pipeline}", f"train.global_batch={4 * data}", *layout]
    )


def parity(config: RunConfig, file: str, folder: Path, hands: Hands | None = None) -> Finding:
    """Compare the run's layout with one process and return the finding. folder: an empty one for
    the runs."""
    p = config.parallel
    layout = f"tp={p.tensor},pp={p.pipeline},dp={p.data}" + (
        f",cp={p.context}" if p.context > 1 else ""
    )
    if config.world_size == 1:
        return not_tried("parity", "the layout is one process, with which others are compared")
    options = {
        "file": file,
        "layouts": [layout],
        "full": False,
        "steps": STEPS,
        "precision": "float64",
    }
    try:
        made = certify(
            config, argparse.Namespace(**options), folder, lambda text: None, hands or Hands()
        )
    except UserError as error:
        return not_tried("parity", str(error.problems[0]), needed=True)
    (entry,) = made["layouts"]
    if entry["verdict"] == PROVEN:
        return _well(layout, entry, made["applied"])
    if entry["verdict"] == NOT_TRIED:
        return not_tried("parity", entry["why"], needed=True)
    first = entry["first"]
    return wrong(
        "parity", f"{layout} differs from one process: {first.get('note') or first['place']}", SEE
    )


def _well(layout: str, entry: Mapping[str, Any], applied: int) -> Finding:
    """Return the finding about a layout that is proven, with its largest error as a part of the
    bound."""
    said = f"{layout} trains what one process trains: {applied} steps, float64"
    if entry["left_out"]:
        said += (
            f"; not tried with parallel.{', parallel.'.join(entry['left_out'])}, which the small "
            "run cannot have"
        )
    bounded = [q for q in entry["quantities"].values() if q["verdict"] == PROVEN and q["bound"]]
    worst = max((q["error"] / q["bound"] for q in bounded), default=0.0)
    return ok("parity", said, layout=layout, left_out=entry["left_out"], worst_of_bound=worst)


def parity_here(config: RunConfig, file: str) -> Finding:
    """Compare on local ranks."""
    with tempfile.TemporaryDirectory(prefix="megaprec_doctor_") as folder:
        return parity(config, file, Path(folder))


def parity_in_world(config: RunConfig, file: str, place: Place) -> Finding:
    """Compare on the ranks of the world; called on rank 0, while the others are in `follow`."""
    folder = Path(tempfile.mkdtemp(prefix=".megaprec_doctor_", dir=place.folder))
    try:
        return parity(
            config, file, folder, Hands(_in_child, lambda runs, within: _led(runs, within, place))
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_child(run: Run) -> Record:
    """Carry out a run of one process beside the world."""
    (failure,) = run_together([run], run.folder.parent)
    if failure is not None:
        raise UserError(f"one process, with which layouts are compared, failed: {failure.why}")
    return gather(run.folder)


def _led(runs: Sequence[Run], folder: Path, place: Place) -> list[Failure | None]:
    """Carry out the runs on all ranks of the world."""
    for run in runs:
        run.folder.mkdir(parents=True)
        run.write()
    (folder / PENDING).write_text("\n".join(run.folder.name for run in runs), encoding="utf-8")
    place.tell("parity", str(folder.absolute()))
    answer = within(SECONDS, carry_out, folder)
    if "value" in answer:
        dist.destroy_process_group()  # the comparison is of this process alone
        return [None] * len(runs)
    return [Failure(answer.get("error", f"the ranks were not done within {SECONDS:g} s"))] * len(
        runs
    )


def follow(place: Place) -> None:
    """Take part in the comparison that rank 0 leads, if there is one."""
    if folder := place.told("parity", 2 * SECONDS):
        within(SECONDS, carry_out, Path(folder))
