"""Your own model and your own loop, tensor 2 x pipeline 2, without the trainer:

torchrun --nproc-per-node 4 examples/pretrain.py

Twice as many processes train two replicas of it, each on windows of its own, and so on.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from megaprec import Axis, ParallelAMPOptimizer
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from parallel.context import Context
from parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.loss import cross_entropy
from parallel.mesh import make_mesh, world
from parallel.norms import RMSNorm
from parallel.pipeline.builders import one_f_one_b
from parallel.pipeline.executor import Executor
from parallel.pipeline.p2p import P2P

HIDDEN, LENGTH, MICROBATCHES = 64, 32, 4


class Half(nn.Module):
    """Half of a byte-level model: embedding and a layer, or a layer and the head."""

    def __init__(self, stage: int, context: Context) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(context, 256, HIDDEN, name="embedding") if stage == 0 else None
        self.norm = RMSNorm(context, HIDDEN, name=f"{stage}.norm")
        self.up = ColumnParallelLinear(context, HIDDEN, 4 * HIDDEN, name=f"{stage}.up")
        self.down = RowParallelLinear(context, 4 * HIDDEN, HIDDEN, name=f"{stage}.down")
        self.head = ColumnParallelLinear(context, HIDDEN, 256, name="head", bias=False) if stage == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))[0]))[0]
        return x if self.head is None else self.head(x)[0]


def main() -> None:
    """One rank's part."""
    mesh = make_mesh(pp=2, dp=torch.distributed.get_world_size() // 4, tp=2)
    pp, dp, tp = Axis.of(mesh, "pp"), Axis.of(mesh, "dp"), Axis.of(mesh, "tp")
    precision = plan("fp16")
    half = Half(pp.rank, Context(precision, tp))
    optimizer = ParallelAMPOptimizer([half], precision, mesh, average=True)  # over dp: each replica's loss is a mean
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

    def forward(stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        window = text[starts[microbatch] : starts[microbatch] + LENGTH + 1, None]  # [sequence, batch of 1]
        y = half(window[:-1] if received is None else received)
        if half.head is None:
            return y
        loss = cross_entropy(y, window[1:], layout_of(half.head.weight).parts[0], tp).mean() / MICROBATCHES
        losses.append(loss.detach())
        return loss * optimizer.scale

    schedule = one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    links = P2P.open(pp, schedule.rank_of_stage, (LENGTH, 1, HIDDEN), precision.compute, optimizer.device)
    executor = Executor(schedule.programs[pp.rank], links, forward, reduce=lambda stage: optimizer.reduce())
    for step in range(60):
        drawn = torch.Generator().manual_seed(step * dp.size + dp.rank)
        starts = torch.randint(len(text) - LENGTH, (MICROBATCHES,), generator=drawn).tolist()
        losses: list[Tensor] = []
        executor.run()
        report = optimizer.step(lr=3e-3, loss=torch.stack(losses).sum() if losses and tp.rank == 0 else None)
        if torch.distributed.get_rank() == 0:
            print(f"step {step}  {report.outcome}  loss {report.loss:.3f}  loss scale {report.loss_scale:g}")


if __name__ == "__main__":
    with world():
        main()
