"""Update rules: formulas by which a step changes weights.

An elementwise rule may be applied to any slice of a parameter, in any pieces, with the same result
as for the whole. This allows a dp rank to keep a shard of the state, and a CPU to work in blocks
that stay in its cache. A rule that needs a whole matrix cannot be sharded so. Adafactor and LARS
are refused; Muon (`megaprec.optim.rules.muon`), whose state is elementwise and whose update is not,
is applied to whole logical matrices. Any other elementwise class of torch.optim is a rule too
(`megaprec.optim.rules.torch_rule`).

A rule receives flat tensors of one dtype, FP32 or wider, and changes them in place; `state` holds
its moments in the order of `names`, all zero before the first step.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.kinds import NamedArguments, is_number
from megaprec.optim.names_elsewhere import RULE
from megaprec.torch_private import fused_adamw_, fused_sgd_

_CLAIMED = "_has_optimizer"  # attribute of a rule
_FP32_MAX = torch.finfo(torch.float32).max
VECTOR = 64  # elements: a multiple of every vector and of every unrolled loop over vectors


@dataclass(frozen=True)
class Step:
    """The numbers that all elements of a group share in one step.

    divisor: float64 [], the divisor of the gradients: loss scale over clip factor.
    skip: float32 [], 1 if nothing may change, else 0.
    applied: float32 [], the number of applied steps, this one included if it is applied. A GPU
        updates in skipped steps too: the numbers that are drawn are then those of the last applied
        step, which round weights to what they are.
    """

    lr: float
    weight_decay: float
    divisor: Tensor
    skip: Tensor
    applied: Tensor

    @cached_property
    def steps(self) -> Tensor:
        """Return the number of this step among the applied ones, from 1 on: a skipped first step
        must not divide by 1 - beta**0."""
        return self.applied.clamp(min=1)

    @cached_property
    def kernel_divisor(self) -> Tensor:
        """Return `divisor` as fused kernels read it, in FP32: its largest number for a larger
        one."""
        return self.divisor.clamp(max=_FP32_MAX).float()

    @cached_property
    def further_divisor(self) -> Tensor:
        """Return, in FP32, by what gradients are divided beside `kernel_divisor`: 1, but where a
        large scale and much clipping make a divisor that FP32 does not hold."""
        return (self.divisor / _FP32_MAX).clamp(min=1).float()

    @cached_property
    def _further_on_host(self) -> float:
        """Return `further_divisor`, read by the host, which waits for it on a GPU."""
        return float(self.further_divisor)

    def divided(self, grads: Tensor) -> Tensor:
        """Return gradients divided by `divisor`."""
        if grads.dtype == torch.float64:
            return grads / self.divisor
        return self._divide_further_(grads / self.kernel_divisor)

    def divide_before_kernel_(self, grads: Tensor) -> None:
        """Divide FP32 gradients in place by `further_divisor`, which a fused kernel does not divide
        by.

        A skipped step keeps them as they are: they are then searched for what was not finite. So
        does a GPU. Its host does not know the divisor, and this would read and write all gradients
        in every step. A gradient that needs a divisor beyond FP32 is then clipped too little, but
        to no more than 1.
        """
        if grads.device.type == "cpu" and self._further_on_host > 1 and self.skip == 0:
            grads.div_(self.further_divisor)

    def _divide_further_(self, grads: Tensor) -> Tensor:
        # on a CPU the host can look at the divisor, and saves a pass over the gradients
        if grads.device.type == "cpu" and self._further_on_host == 1:
            return grads
        return grads.div_(self.further_divisor)


class UpdateRule(Protocol):
    """The interface of an update rule.

    names: of the moments that it keeps.
    scalars: further numbers that it keeps, the same for all elements.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def scalars(self) -> dict[str, float]: ...
    def update_(
        self,
        weights: Tensor,
        grads: Tensor,
        state: Sequence[Tensor],
        step: Step,
    ) -> None:
        """Update weights and state in place by grads / step.divisor, which undoes the loss scale
        and clips; change nothing if step.skip is 1. Gradients may be overwritten."""
        ...

    def advance(self, skip: Tensor) -> None:
        """Bring `scalars` up to date, after all elements of a step; not if skip is 1."""
        ...

    def load_scalars(self, scalars: dict[str, float]) -> None: ...


class Stateless:
    """The part of a rule that keeps no numbers besides the optimizer's own step count."""

    @property
    def scalars(self) -> dict[str, float]:
        return {}

    def advance(self, skip: Tensor) -> None:
        """Do nothing after all elements of a step are updated."""

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Do nothing: the rule has no scalars."""


@dataclass(frozen=True)
class AdamW(Stateless, NamedArguments):
    """Adam with decoupled weight decay: torch's fused kernel, which unscales and skips by
    itself."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = RULE

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _require_betas(self.betas)
        if not is_number(self.eps) or self.eps <= 0:
            raise UserError.of("optimizer.eps", eps=self.eps)

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        """As `UpdateRule.update_`. state: the averages of gradients and of their squares."""
        average, average_of_squares = state
        beta1, beta2 = self.betas
        fused_adamw_(
            [weights],
            [grads],
            [average],
            [average_of_squares],
            [],  # the largest second moments, which amsgrad alone has
            [step.steps],
            lr=step.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=step.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=_kernel_divisor(grads, step),
            found_inf=step.skip,
        )


@dataclass(frozen=True)
class SGD(Stateless, NamedArguments):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient, as in
    torch."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = RULE

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not _is_fraction(self.momentum):
            raise UserError.of("optimizer.momentum", momentum=self.momentum)
        if not isinstance(self.nesterov, bool) or (self.nesterov and not self.momentum):
            raise UserError.of("optimizer.nesterov", nesterov=self.nesterov)

    @property
    def names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        """As `UpdateRule.update_`. state: the momentum; nothing without one."""
        fused_sgd_(
            [weights],
            [grads],
            list(state),
            lr=step.lr,
            weight_decay=step.weight_decay,
            momentum=self.momentum,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,  # momentum begins at 0, which gives what its copy would
            grad_scale=_kernel_divisor(grads, step),
            found_inf=step.skip,
        )


@dataclass(frozen=True)
class Lion(Stateless, NamedArguments):
    """Steps by the sign of a momentum, with decoupled weight decay ("Symbolic Discovery of
    Optimization Algorithms", arXiv 2302.06675, program 1).

    betas: the first mixes the gradient into the momentum whose sign is the step, the second into
        the one that is kept. All steps of an element are as large as the rate, so rates are three
        to ten times smaller than AdamW's, and decays as many times larger.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = RULE

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        _require_betas(self.betas)

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        """As `UpdateRule.update_`. state: the momentum."""
        (momentum,) = state
        beta_of_step, beta_of_momentum = self.betas
        is_applied = step.skip == 0
        # torch.where also keeps what is not finite in a skipped step out of the momentum
        gradients = torch.where(is_applied, step.divided(grads), 0.0)
        direction = torch.lerp(gradients, momentum, beta_of_step).sign_()
        new_weights = weights * (1 - step.lr * step.weight_decay)
        new_weights.sub_(direction, alpha=step.lr)
        weights.copy_(torch.where(is_applied, new_weights, weights))
        new_momentum = torch.lerp(gradients, momentum, beta_of_momentum)
        momentum.copy_(torch.where(is_applied, new_momentum, momentum))


def _require_betas(betas: tuple[float, float]) -> None:
    """Raise UserError unless these are two numbers from 0 to below 1."""
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not is_pair or not all(map(_is_fraction, betas)):
        quoted = list(betas) if is_pair else betas
        raise UserError.of("optimizer.betas", betas=quoted)


def _is_fraction(value: object) -> bool:
    """Return True for a number from 0 to below 1."""
    return isinstance(value, int | float) and is_number(value) and 0 <= value < 1


def _kernel_divisor(grads: Tensor, step: Step) -> Tensor | None:
    """Return the divisor for a fused kernel, or None if this function has divided the gradients.

    A fused kernel reads the divisor in FP32. FP64 gradients need more precision and are divided
    here, and FP32 gradients by what is beyond FP32.
    """
    if grads.dtype != torch.float64:
        step.divide_before_kernel_(grads)
        return step.kernel_divisor
    # a skipped step leaves them as they are: they are then searched for what was not finite
    grads.div_(torch.where(step.skip == 0, step.divisor, 1.0))
    return None


def update_padded(
    rule: UpdateRule,
    weights: Tensor,
    grads: Tensor,
    state: Sequence[Tensor],
    step: Step,
) -> None:
    """Do `rule.update_` so that the result for an element does not depend on the slice that it is
    in.

    torch's fused kernels compute the last elements of a tensor, fewer than a vector has, with other
    instructions. So tensors of other lengths are padded with zeros. The gradients are not changed
    then.
    """
    missing = -len(weights) % VECTOR
    if not missing:
        rule.update_(weights, grads, state, step)
        return
    padding = (0, missing)
    padded_grads = torch.nn.functional.pad(grads, padding)
    padded_weights = torch.nn.functional.pad(weights, padding)
    padded_state = [torch.nn.functional.pad(moments, padding) for moments in state]
    rule.update_(padded_weights, padded_grads, padded_state, step)
    updated = (padded_weights, *padded_state)
    for values, padded in zip((weights, *state), updated, strict=True):
        values.copy_(padded[: len(values)])


def claim_rule(rule: UpdateRule) -> None:
    """Mark a rule as that of one optimizer. Raise UserError if it is marked already: it may hold
    numbers of the other optimizer's steps.

    A frozen dataclass holds nothing that a step changes, so that optimizers may share it.
    """
    dataclass_settings = getattr(type(rule), "__dataclass_params__", None)
    if getattr(dataclass_settings, "frozen", False):
        return
    if getattr(rule, _CLAIMED, False):
        raise UserError.of("optimizer.rule_shared", kind=type(rule).__name__)
    with suppress(AttributeError):  # of a class with slots
        setattr(rule, _CLAIMED, True)
