"""FP8 against bf16 on a GPU: the products of a Llama layer one by one, then training steps of a
stack of such layers (`llama_layers`).

Products are timed with the casts that FP8 needs, plain and fused by torch.compile. Steps are those
of runs, with compiled casts on a GPU and with the optimizer, in turn for each precision.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megaprec.fp8.matmul import describe_kernels
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS, FP8Recipe, Kind
from parallel.mesh import world
from tools.analysis.planning.fp8_timing import Shape, linear_times
from tools.bench.llama_layers import Workload, add_workload
from tools.bench.measurement import Step, print_record, seconds_in_turn
from tools.bench.train import Bench, mesh_of, settings_of_run
from tools.config.run_file import RunConfig, load_run

SUBJECT = "FP8 against bf16, on a GPU"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_workload(parser)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=EIGHT_BIT_KINDS,
        default=["current", "delayed"],
        help="of scales",
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench fp8`. Without layers only the products are timed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU here, so there is nothing to compare: FP8 on a CPU is emulated (--device "
            "cpu tries the script)"
        )
        return 0
    workload = Workload.of(args)
    for kind in args.kinds:
        for name, shape in shapes(workload).items():
            print_record(product_record(name, shape, kind, workload))
    if args.layers:
        with world(args.device):
            for record in _step_records(workload, args.kinds, args.rounds):
                print_record(record)
    return 0


def shapes(workload: Workload) -> dict[str, Shape]:
    """Return the products of a layer on a micro-batch, with stacked weights."""
    rows = workload.micro_batch * workload.tokens
    hidden = workload.hidden
    kv_width = hidden // workload.heads * workload.kv_heads
    return {
        "query, key, value": Shape(rows, hidden, hidden + 2 * kv_width),
        "attention output": Shape(rows, hidden, hidden),
        "gate, up": Shape(rows, hidden, 2 * workload.ffn),
        "down": Shape(rows, workload.ffn, hidden),
    }


def product_record(name: str, shape: Shape, kind: Kind, workload: Workload) -> dict[str, Any]:
    """Return the milliseconds of the three products with one weight, and their speedup in FP8."""
    device = torch.device(workload.device)
    recipe = FP8Recipe(kind)
    times = linear_times(shape, recipe, torch.bfloat16, device)
    record: dict[str, Any] = {
        "what": name,
        "shape": str(shape),
        "kind": kind,
        "bf16_ms": _milliseconds(times.wide),
        # forward, gradient of the input, gradient of the weight: each has as many FLOPs
        "tflops_bf16": round(3 * shape.flops / times.wide / 1e12, 2),
        "fp8_products_ms": _milliseconds(times.products),
        "casts_ms": _milliseconds(times.casts),
        "weight_cast_ms": _milliseconds(times.weight),
        "gain": round(times.gain(workload.microbatches), 3),
    }
    if device.type == "cuda":
        fused = linear_times(shape, recipe, torch.bfloat16, device, compiled=True)
        record["fused_casts_ms"] = _milliseconds(fused.casts)
        record["fused_weight_cast_ms"] = _milliseconds(fused.weight)
        record["fused_gain"] = round(fused.gain(workload.microbatches), 3)
    kernels = describe_kernels(recipe, device, torch.bfloat16, torch.float32)
    record["made"] = sorted({*kernels.values()})
    return record


def _step_records(workload: Workload, kinds: list[Kind], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the speed of training steps in bf16, and with each kind of scales: those of runs whose
    other keys are the defaults."""
    device = workload.device
    configs = {"bf16": _run(workload)}
    for kind in kinds:
        configs[kind] = _run(workload, f"fp8.kind={kind}")
    with settings_of_run(configs["bf16"], device):
        steps: dict[str, Step] = {}
        for name, config in configs.items():
            steps[name] = Bench(config, mesh_of(config, device)).step
        yield from _timed_records(workload, steps, rounds)


def _run(workload: Workload, *keys: str) -> RunConfig:
    """Return the run with this work."""
    bf16 = 'precision.compute="bf16"'
    return load_run(None, [*workload.keys, "train.steps=1", bf16, *keys]).on_device(workload.device)


def _timed_records(
    workload: Workload, steps: Mapping[str, Step], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a record of each step, timed in turn."""
    medians = seconds_in_turn(steps, rounds, torch.device(workload.device))
    for name, seconds in medians.items():
        yield {
            "what": "training steps",
            "precision": name,
            "layers": workload.layers,
            "hidden": workload.hidden,
            "ffn": workload.ffn,
            "seq_length": workload.tokens,
            "gain": round(medians["bf16"] / seconds, 3),
            **{field: round(value, 4) for field, value in workload.speed(seconds).items()},
            "torch": torch.__version__,
        }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
