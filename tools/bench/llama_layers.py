"""A stack of layers of Llama 3 8B as the work of a GPU: its sizes, data and speed.

A layer has hidden 4096, 32 heads, 8 key and value heads and feed-forward 14336; with --hidden it is
narrower in proportion. MFU is the time that a GPU would need at its full bf16 speed over what it
took, also for FP8:

    MFU = tokens a second x 3 x forward FLOPs of a token / FLOP/s of the GPU in bf16

where forward FLOPs are those of all matrix products, attention counted as if it were not causal.
"""

import argparse
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.estimate.gpus import gpu_named
from tools.bench.measurement import add_device, add_integers

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Workload:
    """The work of a training step.

    heads: 128 wide, unless hidden is small. tokens: of a sequence. micro_batch: sequences of a
    micro-batch. microbatches: of a step.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int
    micro_batch: int
    microbatches: int
    device: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Workload":
        """Return the work that the options of `add_workload` ask for."""
        heads = args.heads or max(4, args.hidden // 128)
        return cls(
            layers=args.layers,
            hidden=args.hidden,
            heads=heads,
            kv_heads=args.kv_heads or max(2, heads // 4),
            ffn=args.ffn or args.hidden * 7 // 2,  # 14336 of 4096
            vocab=args.vocab,
            tokens=args.tokens,
            micro_batch=args.micro_batch,
            microbatches=args.microbatches,
            device=args.device,
        )

    @property
    def options(self) -> list[str]:
        """Return the options of `add_workload` that ask for this work."""
        sizes = asdict(self)
        device = sizes.pop("device")
        options = [f"--device={device}"]
        for name, size in sizes.items():
            options.append(f"--{name.replace('_', '-')}={size}")
        return options

    @property
    def keys(self) -> list[str]:
        """Return the keys of a run with this work, for `python -m tools.bench train`."""
        return [
            "model.family=llama",
            f"model.layers={self.layers}",
            f"model.hidden={self.hidden}",
            f"model.heads={self.heads}",
            f"model.kv_heads={self.kv_heads}",
            f"model.ffn={self.ffn}",
            f"model.vocab={self.vocab}",
            f"model.max_positions={self.tokens}",
            f"data.vocab_size={self.vocab}",
            f"train.seq_length={self.tokens}",
            f"train.micro_batch={self.micro_batch}",
            f"train.global_batch={self.micro_batch * self.microbatches}",
        ]

    @property
    def model(self) -> ModelConfig:
        """Return the model as megaprec has it."""
        return ModelConfig(
            family="llama",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=self.vocab,
            tied=False,
        )

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return (tokens, targets) of each micro-batch, int64 [micro_batch, tokens], on the
        device.
        """
        rows = self.micro_batch * self.microbatches
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(0, self.vocab, (rows, self.tokens + 1), generator=generator)
        microbatches = token_ids.to(self.device).split(self.micro_batch)
        batches = list[tuple[Tensor, Tensor]]()
        for samples in microbatches:
            tokens = samples[:, :-1]
            targets = samples[:, 1:]
            batches.append((tokens, targets))
        return batches

    def speed(self, seconds: float) -> dict[str, float]:
        """Return tokens and TFLOP a second of a step, and MFU if the GPU's peak is known."""
        tokens_per_s = self.micro_batch * self.microbatches * self.tokens / seconds
        # The backward pass has twice the products of the forward pass.
        tflops = tokens_per_s * 3 * self.model.flops_per_token(self.tokens) / 1e12
        record = {"tokens_per_s": tokens_per_s, "step_s": seconds, "tflops": tflops}
        # A CPU has no peak that MFU could be a share of.
        gpu = gpu_named(torch.cuda.get_device_name()) if self.device == "cuda" else None
        if gpu is not None:
            record["mfu"] = tflops / gpu.tflops(plan("bf16"))
        return record


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the device and the sizes of the work as options."""
    add_device(parser)
    add_integers(
        parser,
        {
            "layers": (8, "layers"),
            "hidden": (4096, "width"),
            "heads": (0, "of attention; 0: as many as are 128 wide"),
            "kv-heads": (0, "key and value heads; 0: a quarter of the heads"),
            "ffn": (0, "width of the feed-forward; 0: 3.5 times the width"),
            "vocab": (8192, "vocabulary; small, for the layers are what is measured"),
            "tokens": (4096, "of a sequence"),
            "micro-batch": (2, "sequences"),
            "microbatches": (2, "of a step"),
            "rounds": (7, "timed steps"),
        },
    )
