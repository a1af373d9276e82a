"""The training step of one other system, alone in its process: tokens a second, MFU and memory.

The systems are those of `tools/bench/gpu_peers.py`. A system that is not installed, or cannot do
the work, says so in its record.
"""

import argparse

import torch

from parallel.mesh import world
from tools.bench.gpu_peers import PEERS, Absent
from tools.bench.kernels import kernel_record, kernels_of
from tools.bench.llama_layers import Workload, add_workload
from tools.bench.measurement import print_record, require_gpu, rounded_median, seconds_of

SUBJECT = "training steps of another system"
WARMUP = 3  # steps that are not timed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("system", choices=PEERS, help="that is measured")
    add_workload(parser)
    parser.add_argument(
        "--profile", action="store_true", help="on a GPU: the kernels of one step more"
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench peer`. Exit code 1: the system was not measured."""
    require_gpu(args.device)
    workload = Workload.of(args)
    device = torch.device(args.device)
    record: dict[str, object] = {"system": args.system}
    with world(args.device):
        try:
            step = PEERS[args.system](workload)
        except Absent as error:
            print_record(record | {"refused": str(error)})
            return 1
        for _ in range(WARMUP):
            step()
        times = [seconds_of(step, device) for _ in range(args.rounds)]
    speed = workload.speed(rounded_median(times, 6))
    record |= {name: round(value, 4) for name, value in speed.items()}
    if args.device == "cuda":
        record["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print_record(record)
    if args.profile and args.device == "cuda":
        print_record({"profile": kernel_record(kernels_of(step, device))})
    return 0
