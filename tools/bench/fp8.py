"""FP8 against bf16 on a GPU: the products of a Llama layer one by one, then training steps of a
stack of such layers.

The layer is that of Llama 3 8B (hidden 4096, 32 heads, 8 key and value heads, feed-forward 14336),
narrower in proportion with --hidden. Products are timed with the casts that FP8 needs, plain and
fused by torch.compile. Steps are whole ones, with plain casts and the optimizer, in turn for each
precision. MFU is the time that a GPU would need at its full bf16 speed over what it took, also for
FP8:

    MFU = tokens a second x 3 x forward FLOPs of a token / FLOP/s of the GPU in bf16

where forward FLOPs are those of all matrix products, attention counted as if it were not causal.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch

from megaprec.fp8.matmul import describe_kernels
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.mesh import make_mesh, world
from parallel.pipeline.builders import schedule
from tools.commands.fp8_timing import Shape, linear_times, synchronize

VOCAB = 8192  # small: the stack's layers are what is measured
LR = 1e-4
# FLOP/s of dense bf16 products, from NVIDIA's data sheets, by what the device's name contains.
PEAKS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


def add_parser(subparsers: Any) -> None:
    """Add `fp8` to the measurements."""
    parser = subparsers.add_parser("fp8", help="FP8 against bf16, on a GPU", description=__doc__)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: to try the script (emulated)",
    )
    parser.add_argument("--hidden", type=int, default=4096, metavar="N", help="(default: 4096)")
    parser.add_argument(
        "--layers", type=int, default=8, metavar="N", help="of the stack; 0: no stack (default: 8)"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="of a sequence (default: 4096)"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=2, metavar="N", help="sequences (default: 2)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=2, metavar="N", help="of a step (default: 2)"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("delayed", "current", "rowwise", "blockwise", "mx"),
        default=["current", "delayed"],
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="timed steps (default: 5)"
    )
    parser.add_argument(
        "--peak",
        type=float,
        metavar="FLOPS",
        help="bf16 FLOP/s of the device, if it is not known here",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench fp8`."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU here, so there is nothing to compare: FP8 on a CPU is emulated (--device "
            "cpu tries the script)"
        )
        return 0
    config = layer_stack(args)
    for kind in args.kinds:
        for name, shape in shapes(config, args.micro_batch * args.tokens).items():
            print(json.dumps(product_record(name, shape, kind, args)), flush=True)
    if args.layers:
        with world(args.device):
            for record in stack_records(config, args):
                print(json.dumps(record), flush=True)
        print("MFU = tokens/s x 3 x forward FLOPs a token / bf16 FLOP/s of the device")
    return 0


def layer_stack(args: argparse.Namespace) -> ModelConfig:
    """Return a model of layers like those of Llama 3 8B, or narrower ones."""
    heads = max(4, args.hidden // 128)
    return ModelConfig(
        family="llama",
        layers=max(1, args.layers),
        hidden=args.hidden,
        heads=heads,
        kv_heads=max(1, heads // 4),
        ffn=args.hidden * 7 // 2,
        vocab=VOCAB,
        max_positions=args.tokens,
    )


def shapes(config: ModelConfig, tokens: int) -> dict[str, Shape]:
    """Return the products of a layer, with stacked weights."""
    width = config.heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    return {
        "query, key, value": Shape(tokens, config.hidden, width + 2 * kv_width),
        "attention output": Shape(tokens, width, config.hidden),
        "gate, up": Shape(tokens, config.hidden, 2 * config.ffn),
        "down": Shape(tokens, config.ffn, config.hidden),
    }


def product_record(name: str, shape: Shape, kind: Kind, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of the three products with one weight, and their speedup in FP8."""
    device = torch.device(args.device)
    recipe = FP8Recipe(kind)
    times = linear_times(shape, recipe, torch.bfloat16, device)
    record: dict[str, Any] = {
        "what": name,
        "shape": str(shape),
        "kind": kind,
        "bf16_ms": _ms(times.wide),
        "tflops_bf16": round(3 * shape.flops / times.wide / 1e12, 2),
        "fp8_products_ms": _ms(times.products),
        "casts_ms": _ms(times.casts),
        "weight_cast_ms": _ms(times.weight),
        "gain": round(times.gain(args.microbatches), 3),
    }
    if device.type == "cuda":
        fused = linear_times(shape, recipe, torch.bfloat16, device, compiled=True)
        record |= {"fused_casts_ms": _ms(fused.casts), "fused_weight_cast_ms": _ms(fused.weight)}
        record["fused_gain"] = round(fused.gain(args.microbatches), 3)
    record["made"] = sorted(
        {*describe_kernels(recipe, device, torch.bfloat16, torch.float32).values()}
    )
    return record


def stack_records(config: ModelConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per second and MFU of training steps, in bf16 and with each kind of scales; the
    steps alternate."""
    mesh = make_mesh(device=args.device)
    recipes = {"bf16": None} | {kind: FP8Recipe(kind, history_length=16) for kind in args.kinds}
    engines = {
        name: Engine.build(
            config,
            plan("bf16", fp8=recipe),
            mesh,
            schedule("1f1b", 1, args.microbatches),
            EngineOptions(args.micro_batch, args.tokens),
        )
        for name, recipe in recipes.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(args.rounds + 1):
        for name, engine in engines.items():
            duration = _step_seconds(engine, _share(args, engine.device), number)
            if number > 0:  # the first is a warm-up
                seconds[name].append(duration)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    tokens = args.microbatches * args.micro_batch * args.tokens
    return [_stack_record(name, config, args, tokens / medians[name], medians) for name in engines]


def _stack_record(
    name: str,
    config: ModelConfig,
    args: argparse.Namespace,
    speed: float,
    medians: dict[str, float],
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "what": "training steps",
        "precision": name,
        "layers": config.layers,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "seq_length": args.tokens,
        "tokens_per_s": round(speed, 1),
        "gain": round(medians["bf16"] / medians[name], 3),
    }
    if peak := args.peak or _peak(args.device):
        record["mfu"] = round(speed * 3 * config.flops_per_token(args.tokens) / peak, 4)
        record["peak_tflops"] = peak / 1e12
    return record | {"step_s": round(medians[name], 4), "torch": torch.__version__}


def _step_seconds(engine: Engine, share: Share, number: int) -> float:
    synchronize(engine.device)
    start = time.perf_counter()
    engine.step(share, LR, number)
    synchronize(engine.device)
    return time.perf_counter() - start


def _share(args: argparse.Namespace, device: torch.device) -> Share:
    rows = args.microbatches * args.micro_batch
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (rows, args.tokens + 1), generator=generator).to(device)
    return Share(ids[:, :-1], ids[:, 1:])


def _peak(device: str) -> float | None:
    """Return the FLOP/s of the device; None if they are not known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
