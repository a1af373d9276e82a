"""Update rules: elementwise formulas by which a step changes weights.

An elementwise rule may be applied to any slice of a parameter, in any pieces, with the same result as for the whole.
This allows a dp rank to keep a shard of the state, and a CPU to work in blocks that stay in its cache. A rule that
needs a whole matrix (Adafactor, Muon, LARS) cannot be sharded so and is refused.

A rule receives flat tensors of one dtype, FP32 or wider, and changes them in place; `state` holds its moments in the
order of `names`, all zero before the first step.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megaprec.errors import UserError


@dataclass(frozen=True)
class Step:
    """The numbers that all elements of a group share in one step.

    divisor: float64 [], the divisor of the gradients: loss scale over clip factor. found: float32 [], 1 if nothing may
    change. steps: float32 [], the number of this step among the applied ones, from 1 on.
    """

    lr: float
    weight_decay: float
    divisor: Tensor
    found: Tensor
    steps: Tensor


class UpdateRule(Protocol):
    """The interface of an update rule.

    names: of the moments that it keeps. scalars: further numbers that it keeps, the same for all elements.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def scalars(self) -> dict[str, float]: ...
    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None: ...
    def advance(self, found: Tensor) -> None: ...
    def load_scalars(self, scalars: dict[str, float]) -> None: ...


class _Stateless:
    """The part of a rule that keeps no numbers besides the optimizer's own step count."""

    @property
    def scalars(self) -> dict[str, float]:
        return {}

    def advance(self, found: Tensor) -> None:
        """Do nothing after all elements of a step are updated."""

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Do nothing: the rule has no scalars."""


@dataclass(frozen=True)
class AdamW(_Stateless):
    """Adam with decoupled weight decay: torch's fused kernel, which unscales and skips by itself."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas = {list(self.betas)} must be two numbers from 0 to below 1")
        if self.eps <= 0:
            raise UserError(f"eps = {self.eps} must be above 0: padding and unseen tokens have gradients of 0")

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        torch._fused_adamw_(
            [weights], [grads], [state[0]], [state[1]], [], [step.steps],
            lr=step.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=step.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, grad_scale=_folded(grads, step), found_inf=step.found,
        )  # fmt: skip


@dataclass(frozen=True)
class SGD(_Stateless):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient, as in torch."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum = {self.momentum} must lie from 0 to below 1")
        if self.nesterov and not self.momentum:
            raise UserError("nesterov needs a momentum above 0")

    @property
    def names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        torch._fused_sgd_(
            [weights], [grads], list(state), lr=step.lr, weight_decay=step.weight_decay, momentum=self.momentum,
            dampening=0.0, nesterov=self.nesterov, maximize=False, is_first_step=False,
            grad_scale=_folded(grads, step), found_inf=step.found,
        )  # fmt: skip


def _folded(grads: Tensor, step: Step) -> Tensor | None:
    """Return the divisor for a fused kernel, or None if this function has divided the gradients.

    A fused kernel reads the divisor in FP32. FP64 gradients need more precision and are divided here.
    """
    if grads.dtype != torch.float64:
        return step.divisor.clamp(max=torch.finfo(torch.float32).max).float()
    grads.div_(torch.where(step.found == 0, step.divisor, 1.0))
    return None


class Torch:
    """Any elementwise optimizer class of torch, applied to slices with its state.

    Its moments, and the property of being elementwise, are determined by a trial on a few numbers, whole and cut.
    Raises UserError if it is not elementwise, or if it changes zero weights with zero gradients: padding must stay
    zero. The further numbers that it keeps must not depend on learning rate and weight decay, because they are the same
    for all groups. It waits for the device once a step.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any] | None = None) -> None:
        self.kind, self.options = kind, dict(options or {})
        if given := {"lr", "weight_decay", "params"} & self.options.keys():
            raise UserError(f"{self._says}: {sorted(given)[0]} is not one of its options here; it comes with each step")
        self._decays = "weight_decay" in inspect.signature(kind).parameters
        self._scalars: dict[str, Tensor] = {}  # values from before this step; empty before the first step
        self.names, self._scalar_names = self._probe()

    @property
    def scalars(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._scalars.items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        self._scalars = {name: torch.tensor(value) for name, value in scalars.items()}

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        if bool(step.found):
            return
        grads.div_(step.divisor)
        made = self._step_once(weights, grads, self._kept(state, int(step.steps) == 1), step.lr, step.weight_decay)
        for name, values in zip(self.names, state, strict=True):
            if made[name] is not values:
                values.copy_(made[name])

    def advance(self, found: Tensor) -> None:
        """Advance the scalars after all elements of a step, once, also on a rank that has no elements."""
        if not bool(found):
            weights, grads, *state = torch.zeros(2 + len(self.names), 1).unbind()
            made = self._step_once(weights, grads, self._kept(state, not self._scalars), 1.0, 0.0)
            self._scalars = {name: value for name, value in made.items() if name not in self.names}

    def _kept(self, state: Sequence[Tensor], first: bool) -> dict[str, Tensor] | None:
        """Return all state from before this step; the scalars are copies, because other slices need them too."""
        if first:
            return None
        if self._scalars.keys() != self._scalar_names:
            had, needs = (", ".join(sorted(names)) or "nothing" for names in (self._scalars, self._scalar_names))
            raise UserError(f"{self._says} keeps {needs}, but the loaded state has {had}: it is of another optimizer")
        return dict(zip(self.names, state, strict=True)) | {n: value.clone() for n, value in self._scalars.items()}

    def _step_once(
        self, weights: Tensor, grads: Tensor, state: dict[str, Tensor] | None, lr: float, weight_decay: float
    ) -> dict[str, Tensor]:
        """Step `weights` in place and return the state that the optimizer keeps. Without `state`: its first step."""
        decay = {"weight_decay": weight_decay} if self._decays else {}
        weights.grad = grads
        optimizer = self.kind([weights], **{"lr": lr, **self.options, **decay})  # type: ignore[arg-type]
        if state is not None:
            optimizer.state[weights] = state
        optimizer.step()
        weights.grad = None
        return {name: v if isinstance(v, Tensor) else torch.tensor(v) for name, v in optimizer.state[weights].items()}

    @torch.no_grad()
    def _probe(self) -> tuple[tuple[str, ...], set[str]]:
        """Return the names of moments and scalars. Raise UserError unless a slice is updated like the whole."""
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(12, dtype=torch.float64, generator=generator)
        slices, nothing = [part.clone() for part in whole.split([5, 7])], torch.zeros(3, dtype=torch.float64)
        states: list[dict[str, Tensor] | None] = [None] * 4
        try:
            for size in (1.0, 1e-3, 1e3):
                grads = torch.randn(12, dtype=torch.float64, generator=generator) * size
                cut = [part.clone() for part in grads.split([5, 7])]
                for n, (weights, grad) in enumerate(zip([whole, *slices], [grads, *cut], strict=True)):
                    states[n] = self._step_once(weights, grad, states[n], 1e-2, 0.1)
                states[3] = self._step_once(nothing, torch.zeros_like(nothing), states[3], 1.0, 0.0)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise UserError(f"{self._says} cannot step a flat slice of a parameter: {error}") from error
        kept, unmoved = states[0] or {}, states[3] or {}
        names = tuple(name for name, value in kept.items() if value.shape == whole.shape)
        scalars = kept.keys() - set(names)
        if not torch.allclose(whole, torch.cat(slices), rtol=1e-12, atol=1e-14):
            raise UserError(
                f"{self._says} is not elementwise: a slice updated alone differs from the same slice of the whole, so "
                "its state cannot be sharded over ranks; use one like AdamW, RAdam or Adagrad"
            )
        if nothing.count_nonzero():
            raise UserError(f"{self._says} moves weights of 0 whose gradients are 0, so padding would not stay zero")
        if differing := [name for name in sorted(scalars) if not torch.equal(kept[name], unmoved[name])]:
            raise UserError(
                f"{self._says} keeps {differing[0]}, one number for all elements that depends on learning rate, weight "
                "decay or gradients; use one like AdamW, RAdam or Adagrad"
            )
        return names, scalars

    @property
    def _says(self) -> str:
        return f"optimizer {self.kind.__module__}.{self.kind.__name__}"


def rule(name: str, options: dict[str, Any] | None = None) -> UpdateRule:
    """Return the rule of that name: adamw, sgd, or an optimizer class of torch.optim.

    Raises UserError for an unknown name, and for options that the rule does not have.
    """
    known = {"adamw": AdamW, "sgd": SGD}
    kind = getattr(torch.optim, name, None)
    try:
        if name.lower() in known:
            return known[name.lower()](**(options or {}))
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            return Torch(kind, options)
    except TypeError as error:
        raise UserError(f"optimizer.options for {name!r}: {error}") from error
    raise UserError(f"optimizer.name = {name!r} is not known: use adamw, sgd or a class of torch.optim such as RAdam")
