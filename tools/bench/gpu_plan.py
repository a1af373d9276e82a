"""The plan of `python -m tools.bench gpu`: every measurement and law file, the most telling first.

A call of a few minutes takes the next ones, and so there are three parts, each useful alone: what
the machine can do and the steps beside other systems; the laws, and a run from end to end; what is
newer or rarer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tools.bench.llama_layers import Workload

ROOT = Path(__file__).parents[2]
LAWS = "tests/gpu"
LAWS_OF_FIRST_PART = ("test_training", "test_attention")
LAWS_OF_SEVERAL_PROCESSES = ("test_shared", "test_recurrent", "test_several")  # the longest
# 8 layers of Llama 3 8B with an eighth of its vocabulary, or all of it
LAYERS_8B = Workload(
    layers=8,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32768,
    tokens=8192,
    micro_batch=1,
    microbatches=4,
    device="cuda",
)
WITH_HEAD = replace(LAYERS_8B, vocab=128256)
WHOLE_1B = Workload(
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    ffn=8192,
    vocab=128256,
    tokens=8192,
    micro_batch=1,
    microbatches=4,
    device="cuda",
)
TRIAL = Workload(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=224,
    vocab=128,
    tokens=16,
    micro_batch=1,
    microbatches=2,
    device="cpu",
)
STEPS = ("--warmup=3", "--steps=5")
LIMIT = 110.0  # seconds of a measurement, unless it says otherwise
USUAL = 40.0  # seconds that it is thought to take
LIMIT_OF_LAWS = 300.0  # of a file
USUAL_OF_LAWS = 15.0  # what a test has told is kept when the rest of its file has no time left
BLOCK = "train.compile=block"
WHOLE_VOCABULARY = "whole vocabulary"


@dataclass(frozen=True)
class Measurement:
    """One process.

    arguments: of `python -m tools.bench`; none: the tests of the file that is its name.
    seconds: its limit.
    usual: seconds that it is thought to take: with less left of a call it is not begun.
    """

    name: str
    arguments: tuple[str, ...] = ()
    seconds: float = LIMIT
    usual: float = USUAL


def measurements(device: str) -> list[Measurement]:
    """Return all measurements, in the order in which they are taken."""
    gpus = torch.cuda.device_count() if device == "cuda" else 2
    return [*_first(device), *_second(device), *_third(device, gpus)]


def _first(device: str) -> Iterator[Measurement]:
    """Yield the measurements that tell most: of what the machine can do, whether training is right,
    and its speed."""
    layers = _layers(device)
    yield Measurement("machine", ("probe", f"--device={device}"), usual=25)
    for name in LAWS_OF_FIRST_PART:
        yield _laws(name)
    yield _ours("megaprec, block", layers, BLOCK, profile=True)
    yield _peer("torch", layers, profile=True)
    yield _peer("torchtitan-like", layers, profile=True)
    yield _ours("megaprec, off", layers, "train.compile=off")


def _second(device: str) -> Iterator[Measurement]:
    """Yield the other laws, and a run from end to end."""
    files = sorted(path.stem for path in (ROOT / LAWS).glob("test_*.py"))
    others = [name for name in files if name not in LAWS_OF_FIRST_PART]
    for name in others:
        if name not in LAWS_OF_SEVERAL_PROCESSES:
            yield _laws(name)
    small = () if device == "cuda" else ("--small",)
    yield Measurement(
        "a run with saves", ("saved-run", f"--device={device}", *small), seconds=180, usual=75
    )
    layers = _layers(device)
    few = replace(layers, layers=min(2, layers.layers))
    saves = ("save", f"--device={device}", *STEPS, *few.keys)
    yield Measurement("time of saves", saves)
    for name in LAWS_OF_SEVERAL_PROCESSES:
        yield _laws(name)


def _third(device: str, gpus: int) -> Iterator[Measurement]:
    """Yield FP8, experts, long sequences, Muon, what repeats bit for bit, and further peers."""
    on_gpu = device == "cuda"
    layers = _layers(device)
    few_layers = replace(layers, layers=min(3, layers.layers))
    two_layers = replace(layers, layers=2)
    long_sequences = TRIAL
    if on_gpu:
        long_sequences = replace(layers, layers=4, tokens=32768, microbatches=1)
    with_head = WITH_HEAD if on_gpu else TRIAL
    whole_1b = WHOLE_1B if on_gpu else TRIAL
    # without Transformer Engine Megatron-core keeps the scores of all tokens
    short_sequences = replace(layers, tokens=2048, micro_batch=4) if on_gpu else TRIAL
    for kind in ("current", "delayed"):
        yield _ours(f"megaprec, block, FP8 {kind}", layers, BLOCK, f"fp8.kind={kind}", profile=True)
    experts = ("model.family=mixtral", "model.experts=8")
    yield _ours("megaprec, block, 8 experts", two_layers, BLOCK, *experts, profile=True)
    yield _ours("megaprec, block, 32k tokens", long_sequences, BLOCK)
    yield _ours(f"megaprec, block, {WHOLE_VOCABULARY}", with_head, BLOCK, profile=True)
    yield _peer("torchtitan-like", with_head, f"torchtitan-like, {WHOLE_VOCABULARY}")
    cut = ("probe", f"--device={device}", "--only", "attention of a cut sequence")
    yield Measurement("attention of a cut sequence", cut)
    yield Measurement("optimizer", ("optimizer", f"--device={device}"))
    yield _ours("megaprec, block, Muon", few_layers, BLOCK, "optimizer.name=muon")
    yield _ours("megaprec, block, deterministic", layers, BLOCK, "train.deterministic=true")
    canonical = ("train.numerics=canonical", "train.threads=8", "train.compile=off")
    yield _ours("megaprec, canonical", few_layers, *canonical)
    yield Measurement("recurrent layers", ("recurrent", f"--device={device}"))
    yield _ours("megaprec, block, Llama 3.2 1B", whole_1b, BLOCK)
    yield _peer("torchtitan-like", whole_1b, "torchtitan-like, Llama 3.2 1B")
    yield _ours("megaprec, leaves", layers, "train.compile=leaves")
    yield _ours("megaprec, block, again", layers, BLOCK)
    yield _peer("torch, compiled", layers, seconds=180, usual=90)
    yield _peer("Megatron-core", short_sequences, "Megatron-core, 2048 tokens")
    yield _ours("megaprec, block, 2048 tokens", short_sequences, BLOCK)
    yield _peer("Transformer Engine", layers)
    yield _ours(f"megaprec, off, {WHOLE_VOCABULARY}", with_head, "train.compile=off")
    products = ("fp8", *few_layers.options)
    yield Measurement("FP8 products and steps", products, seconds=200, usual=90)
    if gpus > 1:
        yield from _over_tensor_ranks(device)


def _over_tensor_ranks(device: str) -> Iterator[Measurement]:
    """Yield transfers and steps over two tensor ranks, apart from products and fused with them."""
    small = ("--tokens=16", "--hidden=32", "--ffn=64", "--rounds=2")
    sizes = () if device == "cuda" else small
    yield Measurement("fused gathers", ("fused-gathers", f"--device={device}", *sizes))
    layers = _layers(device)
    keys = (BLOCK, "parallel.tensor=2", "parallel.sequence=true")
    yield _ours("megaprec, block, tensor 2", layers, *keys)
    yield _ours("megaprec, block, tensor 2, fused", layers, *keys, "parallel.async_tensor=true")


def _layers(device: str) -> Workload:
    return LAYERS_8B if device == "cuda" else TRIAL


def _laws(name: str) -> Measurement:
    return Measurement(f"{LAWS}/{name}.py", seconds=LIMIT_OF_LAWS, usual=USUAL_OF_LAWS)


def _ours(name: str, workload: Workload, *keys: str, profile: bool = False) -> Measurement:
    """Return the measurement of megaprec's steps. keys: of the run, beside those of the workload.
    profile: with the kernels of one step more."""
    options = (f"--device={workload.device}", *STEPS)
    if profile:
        options += ("--profile",)
    return Measurement(name, ("train", *options, *workload.keys, *keys))


def _peer(
    system: str,
    workload: Workload,
    name: str = "",
    seconds: float = LIMIT,
    usual: float = USUAL,
    profile: bool = False,
) -> Measurement:
    """Return the measurement of another system's steps. name: if it is not that of the system."""
    options = list(workload.options)
    if profile:
        options.append("--profile")
    return Measurement(name or system, ("peer", system, *options), seconds, usual)
