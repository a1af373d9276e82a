"""The calls of leaves and regions in training steps on a GPU, of models of the size of Llama-3 8B
and of small ones."""

import torch

from parallel.leaves import LeafCall
from tools.config.run_file import load_run
from tools.training.compiling import leaf_calls

LARGE = [
    "model.hidden=4096",
    "model.heads=32",
    "model.ffn=14336",
    "model.vocab=128256",
    "data.vocab_size=128256",
    "train.seq_length=8192",
    "model.max_positions=8192",
    "train.micro_batch=1",
    "train.global_batch=1",
]
# no size is a multiple of a kernel's blocks
SMALL = [
    "model.hidden=48",
    "model.heads=3",
    "model.ffn=56",
    "model.vocab=1061",
    "data.vocab_size=1061",
    "train.seq_length=11",
    "train.micro_batch=2",
    "train.global_batch=2",
]
FAMILIES = {
    "llama by leaf": ["model.kv_heads=1", "train.compile=leaves"],
    "llama": ["model.kv_heads=1", "train.compile=block"],
    "gpt2": ["model.family=gpt2", "model.dropout=0.1", "train.compile=block"],
    "gemma3": ["model.family=gemma3", "model.kv_heads=1", "model.window=5", "train.compile=block"],
}
FP8_LEAVES = ("amax of", "fp8 casts", "fp8 casts and amax")
FP8_KINDS = ("delayed", "current", "rowwise", "blockwise", "mx")
# of which a kind of FP8 with blocks of 128 can cut a weight, and no block of tokens
SMALL_FP8 = [
    *SMALL,
    "model.hidden=128",
    "model.heads=4",
    "model.ffn=256",
]


def fp8_calls_of(size: list[str], kind: str) -> list[LeafCall]:
    """The calls of FP8 casts: of inputs, weights and gradients."""
    fp8 = ["model.kv_heads=4", "train.compile=leaves", f"fp8.kind={kind}"]
    calls = calls_of([*size, *fp8], "llama")
    return [call for call in calls if call.name in FP8_LEAVES]


def calls_of(size: list[str], family: str) -> list[LeafCall]:
    """The calls of a rank that is alone."""
    run = load_run(
        None,
        [
            "train.steps=1",
            "model.layers=3",
            "precision.compute=bf16",
            *FAMILIES[family],
            *size,
        ],
    )
    return leaf_calls(run, run.model, None, torch.device("cuda"))
