"""Your own model and your own loop on tensor 2 x pipeline 2, without the trainer:

torchrun --nproc-per-node 4 examples/pretrain.py

With 8 processes two replicas of the model share the work and train the same model.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from megaprec import Axis, ParallelAMPOptimizer, plan
from parallel import Context, Pipeline, make_mesh, parallelize, vocab_parallel_loss, world

HIDDEN = 64
LENGTH = 32
SAMPLES = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Half(nn.Module):
    """Half of a byte-level model, in plain torch: embedding and a layer, or a layer and the
    head."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN) if stage == 0 else nn.Identity()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 256, bias=False) if stage == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x)


def main() -> None:
    """Train for 60 steps; every rank runs this."""
    mesh = make_mesh(pp=2, tp=2, dp=torch.distributed.get_world_size() // 4, device=DEVICE)
    pp = Axis.of(mesh, "pp")
    dp = Axis.of(mesh, "dp")
    precision = plan(sys.argv[1] if len(sys.argv) > 1 else "fp16")

    torch.manual_seed(0)  # the same values on all ranks, of which each keeps its slice
    styles = {"up": "column", "down": "row"} | (
        {"head": "column"} if pp.rank else {"embedding": "vocab"}
    )
    half = parallelize(
        Half(pp.rank), Context(precision, Axis.of(mesh, "tp")), styles, prefix=f"half{pp.rank}."
    )
    optimizer = ParallelAMPOptimizer([half], precision, mesh, average=False)
    pipeline = Pipeline(
        [half],
        optimizer,
        vocab_parallel_loss(half.head)
        if pp.rank
        else nn.functional.cross_entropy,  # only the last stage calls it
        microbatches=SAMPLES // dp.size,
        activation=(LENGTH, 1, HIDDEN),
    )

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(60):
        starts = torch.randint(
            len(text) - LENGTH, (SAMPLES,), generator=torch.Generator().manual_seed(step)
        )
        windows = torch.stack(
            [text[s : s + LENGTH + 1] for s in starts.chunk(dp.size)[dp.rank]], dim=1
        )
        report = pipeline.step(windows[:-1], windows[1:], lr=3e-3)
        if torch.distributed.get_rank() == 0:
            print(
                f"step {step}  {report.outcome}  loss {report.loss:.4f}  loss scale "
                f"{report.loss_scale:g}"
            )


if __name__ == "__main__":
    with world(DEVICE):
        main()
