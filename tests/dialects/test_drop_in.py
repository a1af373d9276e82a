"""Colossal-AI's TORCH mode around an ordinary module is torch's own mixed precision, bit for
bit."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.dialects import colossalai
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import AdamW

STEPS = 40
LR = 3e-3
DECAY = 0.1
BETAS = (0.9, 0.95)
EPS = 1e-8
VECTOR = 16  # elements of FP32, or a multiple of what a CPU takes at a time
OVERFLOWS = {6: 1e30, 7: float("inf"), 21: float("nan")}  # step -> what the loss is multiplied by
SCALER = {"init_scale": 2.0**9, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 5}


@dataclass
class Log:
    """Of every step: the scale it was taken with and the weights after it."""

    scales: list[float] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)

    def note(self, scale: float, model: nn.Module) -> None:
        self.scales.append(scale)
        self.weights.append([parameter.detach().clone() for parameter in model.parameters()])

    @property
    def skipped(self) -> list[int]:
        """Steps that changed nothing."""
        pairs = zip(self.weights[:-1], self.weights[1:], strict=True)
        return [n for n, (a, b) in enumerate(pairs, 1) if all(map(torch.equal, a, b))]


def make_model(vocab: int) -> nn.Module:
    """Of `vocab` tokens, and otherwise of widths that are multiples of VECTOR."""
    torch.manual_seed(0)
    inner = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 48)]
    return nn.Sequential(nn.Embedding(vocab, 32), *inner, nn.Linear(48, vocab))


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, 48, (2, 16), generator=random)
    return ids, targets


def loss_of(model: nn.Module, step: int) -> Tensor:
    ids, targets = batch(step)
    with torch.autocast("cpu", torch.float16):
        return nn.functional.cross_entropy(model(ids), targets) * OVERFLOWS.get(step, 1.0)


def trained_by_torch(model: nn.Module) -> Log:
    decays = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    scaler, log = torch.amp.GradScaler("cpu", **SCALER), Log()  # type: ignore[arg-type]
    for step in range(STEPS):
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        log.note(scale, model)
    return log


def trained_by_us(model: nn.Module) -> Log:
    plan = colossalai.resolve({"fp16": {"mode": "TORCH", **SCALER}}).plan
    attach_whole(model)
    optimizer = ParallelAMPOptimizer(
        [model], plan, rule=AdamW(BETAS, EPS), weight_decay=DECAY, clip=0.0
    )
    log = Log()
    for step in range(STEPS):
        scale = optimizer.scale.item()
        (loss_of(model, step) * optimizer.scale).backward()
        assert optimizer.step(LR).changed == (step not in OVERFLOWS)
        log.note(scale, model)
    return log


def test_torch_mode_is_autocast_gradscaler_and_fused_adamw_bit_for_bit() -> None:
    mine = trained_by_us(make_model(48))
    expected = trained_by_torch(make_model(48))
    assert mine.scales == expected.scales
    assert expected.skipped == mine.skipped == [*OVERFLOWS]
    assert all(torch.equal(a, b) for a, b in pairs(mine, expected))
    assert max(mine.scales) > mine.scales[0] > min(mine.scales), (
        "the scale did not both grow and fall"
    )


def test_elements_that_do_not_fill_a_vector_are_all_that_torch_may_round_otherwise() -> None:
    """torch's kernel updates the last few elements of a tensor one by one, with other roundings
    than the rest of it. In a flat buffer a parameter that is no multiple of `VECTOR` has no such
    last elements.
    """
    mine = trained_by_us(make_model(51))
    expected = trained_by_torch(make_model(51))
    assert mine.scales == expected.scales and mine.skipped == expected.skipped
    for ours, theirs in zip(mine.weights, expected.weights, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            whole = a.numel() - a.numel() % VECTOR
            assert torch.equal(a.flatten()[:whole], b.flatten()[:whole])
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        if not all(map(torch.equal, ours, theirs)):
            break  # what follows is computed from other weights


def pairs(one: Log, other: Log) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(one.weights, other.weights, strict=True):
        yield from zip(a, b, strict=True)
