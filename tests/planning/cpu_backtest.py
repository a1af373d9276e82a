"""Predicted and measured steps and memory of small runs on this machine's CPU.

`python -m tests.planning.cpu_backtest CALIBRATION.toml ... [--rounds N]` runs the configurations of
`RUNS`, none of which `megaprec calibrate` measures, in turn, each `rounds` times; the fastest step
and the least memory count, for other work of the machine only adds to them. For the same reason
the fastest row counts of several calibrations, made before, between and after the rounds. Of one rank with one
thread the time is that of the process, as `megaprec calibrate` measures; of others it is the
clock's. It prints the table of docs/planning.md, with the machine's load beside it. `--nice` starts
each run with such a priority, if this user may.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel

from tools.analysis.calibration.record import Calibration, read_calibration
from tools.analysis.calibration.speeds import UNKNOWN_CPU, calibrated
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.search import plan_run
from tools.bench.train import WORKLOAD
from tools.config.run_file import RunConfig, load_run

SMALL = "model.hidden=192 model.heads=6 model.ffn=512 model.layers=4 model.vocab=2048 data.vocab_size=2048"
MIDDLE = "model.hidden=384 model.heads=6 model.ffn=1024 model.layers=4 model.vocab=4096"
LARGE = "model.hidden=640 model.heads=10 model.ffn=1728 model.layers=4 model.vocab=4096"
BATCH = "train.global_batch=8"
# keys beside those of the benchmark's own run, in FP32
RUNS = (
    f"{SMALL} {BATCH} train.seq_length=256",
    f"{MIDDLE} {BATCH} train.seq_length=256",
    f"{LARGE} {BATCH} train.seq_length=256",
    f"{MIDDLE} {BATCH} train.seq_length=128 train.micro_batch=4",
    f"{MIDDLE} {BATCH} train.seq_length=1024 train.micro_batch=1",
    f"{SMALL} {BATCH} train.seq_length=64 train.micro_batch=8",
    f"{MIDDLE} {BATCH} train.seq_length=256 parallel.recompute=full",
    f"{LARGE} {BATCH} train.seq_length=256 parallel.recompute=selective",
    f"{MIDDLE} {BATCH} train.seq_length=256 model.layers=8",
    f"{MIDDLE} {BATCH} train.seq_length=512 model.kv_heads=2",
    f"{SMALL} {BATCH} train.seq_length=256 parallel.tensor=2",
    f"{MIDDLE} {BATCH} train.seq_length=256 parallel.tensor=2",
    f"{LARGE} {BATCH} train.seq_length=256 parallel.tensor=2 parallel.sequence=true",
    f"{MIDDLE} {BATCH} train.seq_length=256 parallel.pipeline=2",
    f"{LARGE} {BATCH} train.seq_length=256 parallel.pipeline=2 train.micro_batch=1",
    f"{MIDDLE} {BATCH} train.seq_length=256 parallel.data=2",
    f"{LARGE} {BATCH} train.seq_length=256 parallel.data=2 parallel.zero=false",
    f"{MIDDLE} {BATCH} train.seq_length=512 parallel.context=2",
    f"{MIDDLE} {BATCH} train.seq_length=256 parallel.tensor=2 parallel.pipeline=2",
    f"{MIDDLE} {BATCH} train.seq_length=256 parallel.data=2 parallel.pipeline=2",
)


@dataclass(frozen=True)
class Comparison:
    """One configuration.

    seconds, bytes: predicted, and measured: of the fastest step, and of the fullest rank.
    load: the machine's load average before the run.
    """

    keys: str
    seconds: float
    measured_seconds: float
    bytes: int
    measured_bytes: int
    load: float

    @property
    def error(self) -> float:
        """The relative error of the predicted step."""
        return self.seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        """The relative error of the predicted memory."""
        return self.bytes / self.measured_bytes - 1


def config_of(keys: str) -> RunConfig:
    """Return the run of a configuration."""
    words = [*WORKLOAD, 'precision.compute="fp32"', "train.steps=4", *keys.split()]
    return load_run(None, words).on_device("cpu")


def measure(keys: str, steps: int, priority: int) -> tuple[float, int]:
    """Return the seconds of the fastest step, and the bytes of the fullest rank, of a run that is
    started here."""
    command = [sys.executable, "-m", "tools.bench", "train"]
    command += ['precision.compute="fp32"', *keys.split()]
    command += ["--warmup", "1", "--steps", str(steps)]
    if priority:
        command = ["nice", "-n", str(priority), *command]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    record = json.loads(output.splitlines()[-1])
    seconds = record["fastest_s"]
    config = config_of(keys)
    if config.world_size == 1 and config.train.threads == 1:
        seconds = min(seconds, record["cpu_s"])
    return seconds, max(record["peak_rss_mb"]) * 2**20


def fastest_of(calibrations: Sequence[Calibration]) -> Calibration:
    """Return the first of calibrations of one machine, each of its rows as fast as the fastest of
    the others."""
    first, *others = calibrations
    changed = dict[str, Any]()
    for kind in ("products", "attention", "layers", "loss", "memory", "collectives"):
        rows = [getattr(one, kind) for one in (first, *others)]
        changed[kind] = [_fastest_row(alike) for alike in zip(*rows, strict=True)]
    return first.model_copy(update=changed)


def _fastest_row(alike: Sequence[BaseModel]) -> BaseModel:
    """Return the row of one measurement, taken several times, with the least of each time."""
    times = dict[str, float]()
    for name, value in alike[0]:
        # shapes and names are the same in all of them
        if isinstance(value, float):
            times[name] = min(getattr(row, name) for row in alike)
    return alike[0].model_copy(update=times)


def compare(
    calibration: Calibration, rounds: int, steps: int, priority: int, runs: Sequence[str]
) -> list[Comparison]:
    """Return the comparisons of all configurations, measured in turn."""
    found = dict[str, Comparison]()
    for number in range(rounds):
        for keys in runs:
            load, _, _ = os.getloadavg()
            seconds, nbytes = measure(keys, steps, priority)
            if number == 0:
                config = config_of(keys)
                speeds = calibrated(config, calibration, UNKNOWN_CPU).assumed
                planned = plan_run(config, MemoryModel("cpu", calibration.process), speeds)
                assert planned.prediction is not None
                # nothing is saved by the benchmark
                fullest = planned.ranks[planned.fullest]
                needed = planned.total - fullest.save
                predicted = planned.prediction.seconds
                found[keys] = Comparison(keys, predicted, seconds, needed, nbytes, load)
            best = found[keys]
            found[keys] = replace(
                best,
                measured_seconds=min(best.measured_seconds, seconds),
                measured_bytes=min(best.measured_bytes, nbytes),
                load=min(best.load, load),
            )
            print(found[keys], file=sys.stderr, flush=True)
    return [*found.values()]


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the table of docs/planning.md."""
    lines = [
        "| run | load | measured, s | predicted, s | error | measured, MiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        keys = one.keys.replace("model.", "").replace("train.", "").replace("parallel.", "")
        megabytes = f"{one.measured_bytes / 2**20:,.0f} | {one.bytes / 2**20:,.0f}"
        lines.append(
            f"| {keys} | {one.load:.0f} | {one.measured_seconds:.3f} | {one.seconds:.3f} | "
            f"{one.error:+.0%} | {megabytes} | {one.memory_error:+.0%} |"
        )
    for name, errors in (
        ("seconds", [abs(one.error) for one in comparisons]),
        ("memory", [abs(one.memory_error) for one in comparisons]),
    ):
        lines.append(f"{name}: median {median(errors):.1%}, worst {max(errors):.1%}")
    return lines


def main() -> None:
    """Run `python -m tests.planning.cpu_backtest`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calibrations", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--nice", type=int, default=0, metavar="N")
    args = parser.parse_args()
    calibration = fastest_of([read_calibration(path) for path in args.calibrations])
    comparisons = compare(calibration, args.rounds, args.steps, args.nice, RUNS)
    print("\n".join(table(comparisons)))


if __name__ == "__main__":
    main()
