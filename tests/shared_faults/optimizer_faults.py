"""Faults of the update: of its rule, the gradient norm, the rate, and what is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaprec.optim import optimizer
from megaprec.optim.decision import consensus
from megaprec.optim.decision.decision import StepDecision, StepSettings
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules import load_balance, lr, param_groups
from megaprec.optim.rules.lr import LRSchedule
from megaprec.optim.rules.param_groups import Factors
from megaprec.optim.rules.row_factors import RowFactors
from megaprec.optim.rules.update_rules import AdamW, Step
from megaprec.optim.state import update_tile
from megaprec.optim.state.update_tile import Tile
from megaprec.optim.state.weight_average import AveragedTile, WeightAverage
from tests.shared_faults.fault import Fault, change

RULE_TESTS = ("tests/optim/test_optimizer.py", "tests/optim/test_rules.py")
STATE_TESTS = ("tests/optim/test_optimizer.py", "tests/optim/test_state_precision.py")
RATE_TESTS = ("tests/optim/test_lr.py",)
AVERAGE_TESTS = ("tests/optim/test_weight_average.py",)
DECAYED = ("optimizer.weight_decay=0.3",)
CLIPPED = ("optimizer.clip=0.01",)
DECAYING = ("lr.schedule=linear", "lr.warmup=1", "train.steps=5")


@dataclass(frozen=True)
class WrongAdam:
    """Adam's formula with one mistake."""

    eps_inside: bool = False
    eps_scaled: bool = False
    first_corrected: bool = True
    second_corrected: bool = True
    decay_in_gradient: bool = False
    decay_times_rate: bool = True
    steps_before: int = 0

    def update_(
        self, rule: AdamW, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step
    ) -> None:
        if step.skip:
            return
        gradient = grads / step.divisor.to(grads.dtype)
        first, second = state
        beta1, beta2 = rule.betas
        if self.decay_in_gradient:
            gradient = gradient + step.weight_decay * weights
        else:
            weights.mul_(1 - (step.lr if self.decay_times_rate else 1e-2) * step.weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        steps = step.steps.double() + self.steps_before
        mean = first / (1 - beta1**steps) if self.first_corrected else first
        square = second / (1 - beta2**steps) if self.second_corrected else second
        root = (square + rule.eps).sqrt() if self.eps_inside else square.sqrt()
        if self.eps_scaled:
            root = second.sqrt().add_(rule.eps) / (1 - beta2**steps).sqrt()
        elif not self.eps_inside:
            root = root + rule.eps
        weights.sub_((mean / root * step.lr).to(weights.dtype))


def adam(**mistakes: Any) -> Callable[[], None]:
    wrong = WrongAdam(**mistakes)
    return change(
        AdamW,
        "update_",
        lambda inner: (
            lambda self, weights, grads, state, step: wrong.update_(
                self, weights, grads, state, step
            )
        ),
    )


def norm_read(changed: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """The norm that a step goes by is another one."""

    def make(inner: Any) -> Any:
        def read(self: consensus.StepConsensus, summed: Tensor) -> consensus.StepNumbers:
            right = inner(self, summed)
            return {**right, "norm": changed(right["norm"])}

        return read

    return change(consensus.StepConsensus, "read", make)


def clip_factor(changed: Callable[[Any, ParallelAMPOptimizer, Tensor], Tensor]) -> Any:
    """The clip factor is changed(inner, self, norm)."""
    return change(
        ParallelAMPOptimizer,
        "_clip_factor",
        lambda inner: lambda self, norm: changed(inner, self, norm),
    )


def by_its_largest_tensor(inner: Any, self: ParallelAMPOptimizer, norm: Tensor) -> Tensor:
    norms: list[Tensor] = []
    for buffer in self.all_buffers():
        for piece in buffer.pieces:
            norms.append(torch.linalg.vector_norm(buffer.grads[piece.start : piece.stop].double()))
    return inner(self, torch.stack(norms).max() / self.scale)


def rate(changed: Callable[[Any, LRSchedule, int], float]) -> Callable[[], None]:
    return change(
        LRSchedule, "at", lambda inner: lambda self, completed: changed(inner, self, completed)
    )


def kept(name: str, rounded: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """What a tile keeps of moments or masters is rounded first."""

    def make(inner: Any) -> Any:
        def keep(self: Tile, values: Any, steps: Tensor | None = None) -> None:
            for each in values if isinstance(values, list | tuple) else (values,):
                each.copy_(rounded(each))
            inner(self, values, steps)

        return keep

    return change(update_tile.Tile, name, make)


def to_bf16(values: Tensor) -> Tensor:
    return values.bfloat16().to(values.dtype)


def average_before_the_update(inner: Any) -> Any:
    def apply(
        self: ParallelAMPOptimizer,
        decision: StepDecision,
        settings: StepSettings,
        row_factors: RowFactors | None,
    ) -> None:
        average = self._moving_average
        if average is not None:
            for buffer in self.all_buffers():
                average.follow(buffer, decision.skip)
        self._moving_average = None
        inner(self, decision, settings, row_factors)
        self._moving_average = average

    return apply


def average_twice(inner: Any) -> Any:
    def follow(self: WeightAverage, buffer: Any, skip: Tensor) -> None:
        inner(self, buffer, skip)
        inner(self, buffer, skip)

    return follow


FAULTS = {
    "epsilon inside the root": Fault(
        "Adam divides by sqrt(v + eps)", adam(eps_inside=True), "llama", RULE_TESTS
    ),
    "epsilon before the bias correction": Fault(
        "Adam divides by (sqrt(v of the buffer) + eps) / sqrt(1 - beta2^t)",
        adam(eps_scaled=True),
        "llama",
        RULE_TESTS,
        ("optimizer.eps=1e-4",),
    ),
    "first moment not corrected": Fault(
        "Adam's mean is not divided by 1 - beta1^t",
        adam(first_corrected=False),
        "llama",
        RULE_TESTS,
    ),
    "second moment not corrected": Fault(
        "Adam's mean of squares is not divided by 1 - beta2^t",
        adam(second_corrected=False),
        "llama",
        RULE_TESTS,
    ),
    "bias correction a step late": Fault(
        "Adam corrects by the number of the next step", adam(steps_before=1), "llama", RULE_TESTS
    ),
    "decay in the gradient": Fault(
        "weight decay is added to the gradient, as in Adam, not AdamW",
        adam(decay_in_gradient=True),
        "llama",
        RULE_TESTS,
        DECAYED,
    ),
    "decay not times the rate": Fault(
        "a step shrinks weights by a fixed rate times the decay",
        adam(decay_times_rate=False),
        "llama",
        RULE_TESTS,
        DECAYED,
    ),
    "norms and biases decay": Fault(
        "vectors have the weight decay of matrices",
        change(
            param_groups,
            "_group_factors",
            lambda inner: lambda part, groups: Factors(inner(part, groups).lr, 1.0),
        ),
        "gpt2",
        RULE_TESTS,
        DECAYED,
    ),
    "clip before the mean": Fault(
        "the clip is by the norm of the sum over micro-batches, not of the mean",
        clip_factor(lambda inner, self, norm: inner(self, norm * 2)),
        "llama",
        RULE_TESTS,
        CLIPPED,
    ),
    "clip by one tensor": Fault(
        "the clip is by the norm of the largest tensor alone",
        clip_factor(by_its_largest_tensor),
        "llama",
        RULE_TESTS,
        CLIPPED,
    ),
    "no clip": Fault(
        "gradients are not clipped",
        clip_factor(lambda inner, self, norm: torch.ones_like(norm)),
        "llama",
        RULE_TESTS,
        CLIPPED,
    ),
    "clip epsilon": Fault(
        "the clip adds 1e-3 to the norm, not 1e-6",
        change(optimizer, "_CLIP_EPSILON", lambda inner: 1e-3),
        "llama",
        RULE_TESTS,
        CLIPPED,
    ),
    "norm without a root": Fault(
        "the gradient norm is the sum of squares",
        norm_read(torch.square),
        "llama",
        RULE_TESTS,
        CLIPPED,
    ),
    "norm rounded to bf16": Fault(
        "the gradient norm is rounded to bf16", norm_read(to_bf16), "llama", RULE_TESTS, CLIPPED
    ),
    "warm-up off by one": Fault(
        "the warm-up is a step ahead",
        rate(lambda inner, self, n: inner(self, min(n + 1, max(n, self.warmup)))),
        "llama",
        RATE_TESTS,
    ),
    "rate a step late": Fault(
        "each step has the rate of the one before",
        rate(lambda inner, self, n: inner(self, max(0, n - 1))),
        "llama",
        RATE_TESTS,
    ),
    "schedule ends early": Fault(
        "the rate falls to its lowest a step too early",
        rate(lambda inner, self, n: inner(self, n + 1 if n > self.warmup else n)),
        "llama",
        RATE_TESTS,
        DECAYING,
    ),
    "cosine of half the angle": Fault(
        "a cosine falls by a quarter of a wave",
        change(
            lr,
            "_cosine",
            lambda inner: lambda fraction: inner(fraction / 2),
        ),
        "llama",
        RATE_TESTS,
        ("lr.schedule=cosine", "lr.warmup=1", "train.steps=5"),
    ),
    "moments in bf16": Fault(
        "moments are rounded to bf16 after each step",
        kept("store_moments", to_bf16),
        "llama",
        STATE_TESTS,
    ),
    "masters in bf16": Fault(
        "masters are rounded to bf16 after each step",
        kept("store_and_round_masters", to_bf16),
        "llama",
        STATE_TESTS,
    ),
    "average of old weights": Fault(
        "the moving average follows the weights before the step",
        change(ParallelAMPOptimizer, "_apply", average_before_the_update),
        "llama",
        AVERAGE_TESTS,
        ("optimizer.ema=0.9",),
    ),
    "average with the factors swapped": Fault(
        "the moving average keeps 1 - decay of itself",
        change(
            AveragedTile,
            "move",
            lambda inner: lambda self, decay, skip: inner(self, 1 - decay, skip),
        ),
        "llama",
        AVERAGE_TESTS,
        ("optimizer.ema=0.9",),
    ),
    "average moved twice": Fault(
        "the moving average moves twice a step",
        change(WeightAverage, "follow", average_twice),
        "llama",
        AVERAGE_TESTS,
        ("optimizer.ema=0.9",),
    ),
    "router correction the wrong way": Fault(
        "corrections of a router move towards experts that have many tokens",
        change(load_balance, "corrections", lambda inner: lambda counts: -inner(counts)),
        "deepseek_v3 yarn",
        ("tests/models/test_router.py",),
    ),
    "loss scale not divided out": Fault(
        "gradients keep the loss scale",
        change(
            ParallelAMPOptimizer,
            "_update",
            lambda inner: (
                lambda self, decision, settings, row_factors: inner(
                    self,
                    replace(decision, scale=decision.scale / self.scale),
                    settings,
                    row_factors,
                )
            ),
        ),
        "llama",
        RULE_TESTS,
        ("precision.compute=fp16",),
    ),
    "overflow applied": Fault(
        "a step whose gradients are not finite is applied",
        change(optimizer, "forbids", lambda inner: lambda numbers, on: inner(numbers, on) * 0),
        "llama",
        ("tests/optim/test_amp.py",),
        ("precision.compute=fp16",),
    ),
}
