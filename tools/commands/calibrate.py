"""`megaprec calibrate`: measure the speeds of this machine for `megaprec plan --calibrated`.

Measured are matrix products by shape, attention, whole layers, memory, and the collectives of local
ranks by size: as many as there are GPUs, or cores (at most 8). On a CPU the first rank measures
once more alone, with the threads of all. It takes less than two minutes of a machine that has no
other work; the fastest of several tries counts.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megaprec.comm.axis import Axis
from megaprec.durable import put_text, read_whole
from megaprec.errors import UserError
from megaprec.precision.plan import DTYPES
from megaprec.resources import cores
from megaprec.scratch import scratch_folder
from megaprec.tokens.files import write_whole
from models.estimate.storage import Device
from parallel.described_world import read_number
from parallel.mesh import make_mesh, world
from tools.analysis.calibration.collectives import collectives
from tools.analysis.calibration.measure import all_rows, process_bytes
from tools.analysis.calibration.record import COMMENT, VERSION, Calibration, machine_name
from tools.console.json_output import add_json
from tools.training.launch import run_local
from tools.training.launched import share_of_cores
from tools.training.machine import keep_freed_memory

BUSY = 0.5  # load of a core in the last minute from which on a machine has other work
MAX_RANKS = 8
CHOICES = ("fp32", "bf16", "fp16")
# option: this process is a local rank, and rank 0 writes its measurements to the file named
ANSWER = "--as-rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.description = __doc__
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("calibration.toml"),
        metavar="FILE",
        help="file that is written (default: calibration.toml)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the ranks"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=CHOICES,
        help="dtype of products, which may be given several times (default: all)",
    )
    add_json(parser)
    parser.add_argument(ANSWER, metavar="FILE", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec calibrate`; return the exit code."""
    device = _device(args.device)
    dtypes = args.dtype or [*CHOICES]
    if args.as_rank is not None:
        return _as_local_rank(args.as_rank, device, dtypes)
    _require_own_file(args.output)
    ranks = torch.cuda.device_count() if device == "cuda" else min(MAX_RANKS, cores())
    _warn_of_load(device)
    rows = _measure(device, dtypes, ranks)
    calibration = Calibration(
        version=VERSION,
        device=device,
        machine=machine_name(device),
        cores=cores(),
        ranks=ranks,
        torch=torch.__version__,
        date=date.today().isoformat(),
        **rows,
    )
    text = "\n".join(calibration.lines()) + "\n"
    write_whole(args.output, text.encode())
    if args.json:
        print(json.dumps({"file": str(args.output), **calibration.model_dump(mode="json")}))
        return 0
    print("\n".join(_summary(calibration)))
    print(f"written    {args.output}")
    return 0


def _device(name: str) -> Device:
    """Return the type of the ranks' devices. Raises UserError."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError.of("planning.calibration_no_gpu")
    if name == "cpu" or not has_gpu:
        return "cpu"
    return "cuda"


def _require_own_file(path: Path) -> None:
    """Raise UserError if a file is there that this command has not written."""
    if os.path.lexists(path):
        is_own = path.is_file() and read_whole(path).startswith(COMMENT.encode())
        if not is_own:
            raise UserError.of("planning.calibration_output", path=path)


def _warn_of_load(device: Device) -> None:
    """Say on stderr that the machine has other work, if it has."""
    load, _, _ = os.getloadavg()
    if device == "cpu" and load > BUSY * cores():
        print(
            f"warning: the machine has other work (load {load:.1f} on {cores()} cores): what "
            "several ranks or threads take will be measured as longer than it is",
            file=sys.stderr,
        )


def _measure(device: Device, dtypes: list[str], ranks: int) -> dict[str, Any]:
    """Return the measurements of local ranks. Raises RanksFailed if they do not end well."""
    with scratch_folder("calibrate") as folder:
        answer = Path(folder) / "rows"
        command = ["calibrate", "--device", device, ANSWER, str(answer)]
        for dtype in dtypes:
            command += ["--dtype", dtype]
        run_local(command, ranks)
        return json.loads(read_whole(answer))


def _as_local_rank(answer: Path, device: Device, dtypes: list[str]) -> int:
    """Be one of the local ranks; rank 0 writes its measurements to `answer`."""
    ranks = read_number("WORLD_SIZE")
    threads = share_of_cores(ranks)
    torch.set_num_threads(threads)
    keep_freed_memory()
    names = {name: DTYPES[name] for name in dtypes}
    with world(device):
        axis = Axis.world(make_mesh(1, ranks, 1, device))
        torch_device = torch.device(device)
        tell = _teller(axis.rank)
        axis.barrier()
        # a rank of a training run has its modules in memory too
        import_module("tools.training.trainer")
        process = process_bytes(device, names[dtypes[0]])
        # measurements by kind, as the tables of the file
        rows: dict[str, Any] = all_rows(device, [*names.values()], threads, tell)
        axis.barrier()
        tell("collectives")
        rows["collectives"] = [dict(row) for row in collectives(axis, torch_device)]
        axis.barrier()
        if axis.rank == 0:
            if device == "cpu" and ranks > 1:
                torch.set_num_threads(cores())
                alone = all_rows(device, [*names.values()], cores(), tell)
                for kind, measurements in alone.items():
                    rows[kind].extend(measurements)
            rows["process"] = process
            # renamed when it is complete, for the parent reads whatever has the name
            unfinished = answer.with_suffix(".part")
            put_text(unfinished, json.dumps(rows))
            unfinished.rename(answer)
        axis.barrier()
    return 0


def _teller(rank: int) -> Callable[[str], None]:
    """Return a function that prints what is measured, on the first rank; elsewhere nothing."""

    def tell(text: str) -> None:
        if rank == 0:
            print(f"measuring  {text}", file=sys.stderr, flush=True)

    return tell


def _summary(calibration: Calibration) -> Iterator[str]:
    """Yield lines on the fastest of what was measured."""
    yield f"machine    {calibration.machine}, {calibration.cores} cores, torch {calibration.torch}"
    fastest: dict[tuple[str, int], float] = {}
    for row in calibration.products:
        key = (row.dtype, row.threads)
        fastest[key] = max(fastest.get(key, 0.0), row.flops / row.seconds)
    for (dtype, threads), speed in fastest.items():
        yield f"products   {dtype}, threads {threads}: up to {speed / 1e9:,.1f} GFLOP/s"
    least = math.inf
    for row in calibration.memory:
        least = min(least, row.seconds / row.bytes)
    yield f"memory     up to {1 / least / 1e9:,.1f} GB/s"
    if not calibration.collectives:
        yield "links      not tried: there is one rank"
        return
    large = max(calibration.collectives, key=lambda row: row.bytes / row.seconds)
    yield f"links      {large.kind}: up to {large.bytes / large.seconds / 1e9:,.2f} GB/s"
