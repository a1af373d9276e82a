"""Parity of the run's layout, as a check of the machine: the small run for 20 steps on one process
and on the ranks.

On local ranks it is `megaprec parity` of one layout. In a launched world the ranks that are there
take part, and the folder of the runs is one that all hosts share; one process is then a child of
rank 0.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaprec.durable import put_text
from megaprec.errors import UserError
from megaprec.scratch import scratch_folder
from tools.commands.parity import Options, certify
from tools.config.run_file import RunConfig, load_run
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong
from tools.verify.doctor.questions import RankContext, run_with_time_limit
from tools.verify.parity.certificate import NOT_TRIED, PROVEN
from tools.verify.parity.ranks import (
    PENDING,
    Failure,
    Launcher,
    RecordedRun,
    carry_out,
    run_together,
)
from tools.verify.parity.record import Record, gather

STEPS = 20
TIME_LIMIT = 60.0  # seconds that the ranks' part may take in a launched world
OWN_RUN = [
    "model.family=llama",
    "model.hidden=64",
    "model.heads=8",
    "model.kv_heads=4",
    "model.ffn=128",
    "model.vocab=512",
    "data.vocab_size=512",
    "train.steps=20",
    "train.micro_batch=1",
    "train.seq_length=32",
]
REMEDY = "run `megaprec parity` on this run file: its certificate says where the difference begins"


def own_run(pipeline: int, data: int, tensor: int) -> RunConfig:
    """Return a small run in this layout, for a machine without a run file."""
    sizes = [
        f"parallel.pipeline={pipeline}",
        f"parallel.data={data}",
        f"parallel.tensor={tensor}",
        f"model.layers={2 * pipeline}",
        f"train.global_batch={4 * data}",
    ]
    return load_run(None, [*OWN_RUN, *sizes])


def parity(config: RunConfig, file: str, folder: Path, launcher: Launcher | None = None) -> Finding:
    """Compare the run's layout with one process and return the finding. folder: an empty one for
    the runs."""
    if config.world_size == 1:
        return not_tried("parity", "the layout is one process, with which others are compared")
    layout = f"tp={config.parallel.tensor},pp={config.parallel.pipeline},dp={config.parallel.data}"
    if config.parallel.context > 1:
        layout += f",cp={config.parallel.context}"
    # as `megaprec parity FILE --layouts LAYOUT --steps STEPS` has them
    options = Options(file, [layout], steps=STEPS)
    try:
        certificate = certify(config, options, folder, lambda text: None, launcher or Launcher())
    except UserError as error:
        # the small run cannot have the layout
        return not_tried("parity", str(error.problems[0]), needed=True)
    (entry,) = certificate["layouts"]
    if entry["verdict"] == PROVEN:
        return _proven_finding(layout, entry, certificate["applied"])
    if entry["verdict"] == NOT_TRIED:
        return not_tried("parity", entry["why"], needed=True)
    first = entry["first"]
    reason = first.get("note") or first["place"]
    return wrong("parity", f"{layout} differs from one process: {reason}", REMEDY)


def _proven_finding(layout: str, entry: Mapping[str, Any], applied: int) -> Finding:
    """Return the finding about a layout that is proven, with its largest error as a part of the
    bound."""
    text = f"{layout} trains what one process trains: {applied} steps, float64"
    left_out = entry["left_out"]
    if left_out:
        keys = ", ".join(f"parallel.{key}" for key in left_out)
        text += f"; not tried with {keys}, which the small run cannot have"
    shares = [0.0]
    for quantity in entry["quantities"].values():
        if quantity["verdict"] == PROVEN and quantity["bound"]:
            shares.append(quantity["error"] / quantity["bound"])
    return ok("parity", text, layout=layout, left_out=left_out, worst_of_bound=max(shares))


def parity_here(config: RunConfig, file: str) -> Finding:
    """Return the finding of `parity` on local ranks."""
    with scratch_folder("doctor") as folder:
        return parity(config, file, Path(folder))


def parity_in_world(config: RunConfig, file: str, context: RankContext) -> Finding:
    """Return the finding of `parity` on the ranks of the world. For rank 0, while the others are in
    `follow`."""
    folder = Path(tempfile.mkdtemp(prefix=".megaprec_doctor_", dir=context.folder))
    launcher = Launcher(_run_in_child, partial(_run_on_world, context))
    try:
        return parity(config, file, folder, launcher)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in_child(run: RecordedRun) -> Record:
    """Carry out a run of one process beside the world."""
    # Torch can join one world per process, and this one has joined that of the doctor
    (failure,) = run_together([run], run.folder.parent)
    if failure is not None:
        raise UserError.of("command.reference_failed", why=failure.why)
    return gather(run.folder)


def _run_on_world(
    context: RankContext, runs: Sequence[RecordedRun], folder: Path
) -> list[Failure | None]:
    """Carry out the runs on all ranks of the world. Return for each why it failed, None if it did
    not; after a time limit or an error all have failed."""
    for run in runs:
        run.folder.mkdir(parents=True)
        run.write()
    names = "\n".join(run.folder.name for run in runs)
    put_text(folder / PENDING, names)
    context.publish("parity", str(folder.absolute()))  # the other ranks wait for it in `follow`
    answer = run_with_time_limit(TIME_LIMIT, carry_out, folder)
    if "value" in answer:
        dist.destroy_process_group()  # the comparison is of this process alone
        return [None] * len(runs)
    reason = answer.get("error", f"the ranks were not done within {TIME_LIMIT:g} s")
    return [Failure(reason)] * len(runs)


def follow(context: RankContext) -> None:
    """Take part in the comparison that rank 0 leads, if there is one."""
    if folder := context.wait_for("parity", 2 * TIME_LIMIT):
        run_with_time_limit(TIME_LIMIT, carry_out, Path(folder))
