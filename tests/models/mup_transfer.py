"""The learning rate that is best at one width, and at four times that width, with muP and without.

    python -m tests.models.mup_transfer docs/mup.png

Models of two layers learn a language of 32 tokens in which a token depends on the two before it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path

import torch
from torch import Tensor

from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from parallel.context import Context
from tools.analysis.plots.charts import Chart, ChartRow, Series, draw_rows

VOCAB = 32
BATCH = 16
LENGTH = 24
BASE = 32
COLORS = ("#1f5fa8", "#2a9d55", "#e07b00", "#d62728")


@dataclass(frozen=True)
class Sweep:
    """Final losses by width and learning rate."""

    rates: tuple[float, ...]
    losses: dict[int, list[float]]

    def best(self, width: int) -> float:
        """The rate of the lowest loss."""
        losses = self.losses[width]
        return self.rates[losses.index(min(losses))]

    def ratio(self) -> float:
        """The best rate of the narrowest width over that of the widest."""
        return self.best(min(self.losses)) / self.best(max(self.losses))


@cache
def language() -> Tensor:
    """The probabilities of the next token after any two, [32, 32, 32]."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    after_one = torch.randn(VOCAB, 1, VOCAB, generator=generator)
    return (1.5 * logits + 2.0 * after_one).softmax(-1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [s, b]."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (2, BATCH), generator=generator)
    while len(tokens) < LENGTH + 1:
        probabilities = language()[tokens[-1], tokens[-2]]
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat((tokens, drawn.T))
    return tokens[:-1].contiguous(), tokens[1:].contiguous()


@cache
def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(step) for step in range(steps)]


def final_loss(width: int, mup: bool, rate: float, steps: int) -> float:
    """The mean loss over the last fifth of a run at a constant rate; infinity if it diverged."""
    model = ModelConfig(
        family="llama",
        layers=2,
        hidden=width,
        heads=width // 16,
        ffn=3 * width,
        vocab=VOCAB,
        max_positions=LENGTH,
        init_std=0.1,
        mup_base_hidden=BASE if mup else 0,
    )
    whole = Cut(0, range(2), first=True, last=True)
    stage = Stage(model, Context(plan("fp32"), seed=1), whole)
    optimizer = ParallelAMPOptimizer([stage], plan("fp32"))
    losses = []
    for tokens, targets in batches(steps):
        loss = stage.losses(stage(tokens), targets).mean()
        (loss * optimizer.scale).backward()
        optimizer.step(rate, loss.detach())
        losses.append(loss.item())
    last = losses[-steps // 5 :]
    mean = sum(last) / len(last)
    return mean if mean == mean else float("inf")


def sweep(
    mup: bool,
    widths: Sequence[int] = (BASE, 4 * BASE),
    rates: Sequence[float] = (),
    steps: int = 60,
) -> Sweep:
    """Train at all widths and rates."""
    chosen = tuple(rates) or tuple(2.0**power for power in range(-10, -1))
    losses = {width: [final_loss(width, mup, rate, steps) for rate in chosen] for width in widths}
    return Sweep(chosen, losses)


def chart(title: str, found: Sweep) -> Chart:
    x = [log2(rate) for rate in found.rates]
    series = []
    for (width, losses), color in zip(found.losses.items(), COLORS, strict=False):
        label = f"hidden {width}, best 2^{log2(found.best(width)):g}"
        series.append(Series(label, x, losses, color, marker="dot"))
    return Chart(title, series, x_label="log2 of the learning rate", y_range=(2.0, 3.6))


def main(path: Path) -> None:
    widths = (BASE, 2 * BASE, 4 * BASE)
    charts = []
    for title, mup in (("without muP: loss", False), (f"muP, base hidden {BASE}: loss", True)):
        found = sweep(mup, widths)
        print(title, {width: found.best(width) for width in widths}, found.losses)
        charts.append(chart(title, found))
    draw_rows("", [ChartRow(charts, 2, 260.0)]).save(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
