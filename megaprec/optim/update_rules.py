"""Update rules: formulas by which a step changes weights.

An elementwise rule may be applied to any slice of a parameter, in any pieces, with the same result as for the whole.
This allows a dp rank to keep a shard of the state, and a CPU to work in blocks that stay in its cache. A rule that
needs a whole matrix cannot be sharded so. Adafactor and LARS are refused; Muon, whose state is elementwise and whose
update is not, is applied to whole logical matrices by `megaprec.optim.matrix_updates`.

A rule receives flat tensors of one dtype, FP32 or wider, and changes them in place; `state` holds its moments in the
order of `names`, all zero before the first step.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Part, layout_of
from megaprec.errors import UserError
from megaprec.kinds import is_number
from megaprec.optim.newton_schulz import PUBLISHED, Coefficients

MUON_MOMENTUM = "muon_momentum"
"""Name of Muon's moment in checkpoints; SGD's momentum is another average of gradients."""
NOT_HIDDEN = ("embedding.*", "positions.*", "head.*")
"""Logical names of the matrices that are not hidden layers of a model of ours."""

VECTOR = 64  # elements: a multiple of every vector and of every unrolled loop over vectors


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
        two = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not two or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas = {list(self.betas) if two else self.betas} must be two numbers from 0 to below 1")
        if not is_number(self.eps) or self.eps <= 0:
            raise UserError(f"eps = {self.eps!r} must be above 0: padding and unseen tokens have gradients of 0")

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        torch._fused_adamw_(
            [weights], [grads], [state[0]], [state[1]], [], [step.steps],
            lr=step.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=step.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, grad_scale=_folded(grads, step), found_inf=step.found,
        )  # fmt: skip


Scale = Literal["moonshot", "keller-jordan"]


@dataclass(frozen=True)
class Muon(_Stateless):
    """Momentum orthogonalized by Newton-Schulz for logical matrices, AdamW for all other tensors.

    With gradient G of a logical matrix [m, n], momentum B and weights W, in a step of learning rate r and decay d:

        B  <-  momentum * B + (1 - momentum) * G
        O   =  orthogonalized(momentum * B + (1 - momentum) * G), without nesterov orthogonalized(B)
        W  <-  (1 - r * d) * W - r * factor * O

    Products of `orthogonalized` are rounded to `ns_dtype`: bf16, fp32, fp64, or "" for bf16, which is fp64 if the
    masters are FP64. scale: name of the factor, "moonshot" for 0.2 * sqrt(max(m, n)) or "keller-jordan" for
    sqrt(max(1, m / n)). by_adamw: patterns of logical names of matrices that `adamw` updates, as it updates every
    tensor that has not two dims. The rule is elementwise only in B; `update_` is that of `adamw`.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Coefficients = PUBLISHED
    ns_steps: int = 5
    ns_eps: float = 1e-7
    ns_dtype: str = ""
    scale: Scale = "moonshot"
    by_adamw: tuple[str, ...] = NOT_HIDDEN
    adamw: AdamW = AdamW()

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_adamw", _texts("by_adamw", self.by_adamw))
        object.__setattr__(self, "ns_coefficients", _numbers("ns_coefficients", self.ns_coefficients))
        problems = {
            f"momentum = {self.momentum!r} must lie from 0 to below 1": is_number(self.momentum)
            and 0 <= self.momentum < 1,
            f"nesterov = {self.nesterov!r} must be true or false": isinstance(self.nesterov, bool),
            f"ns_steps = {self.ns_steps!r} must be a whole number from 1 to 99": type(self.ns_steps) is int
            and 1 <= self.ns_steps < 100,
            f"ns_eps = {self.ns_eps!r} must be above 0: gradients of a matrix may all be 0": is_number(self.ns_eps)
            and self.ns_eps > 0,
            f"ns_dtype = {self.ns_dtype!r} is not known: use bf16, fp32 or fp64": self.ns_dtype in ("", *_ITERATES),
            f"scale = {self.scale!r} is not known: use {' or '.join(FACTORS)}": self.scale in tuple(FACTORS),
        }
        if wrong := [f"optimizer.options for 'muon': {said}" for said, right in problems.items() if not right]:
            raise UserError(*wrong)

    @property
    def names(self) -> tuple[str, ...]:
        return (MUON_MOMENTUM, *self.adamw.names)

    def updates(self, part: Part) -> bool:
        """Return True if this logical tensor is updated by orthogonalized momentum, False if by `adamw`."""
        return len(part.shape) == 2 and not any(fnmatchcase(part.name, pattern) for pattern in self.by_adamw)

    def factor(self, shape: Sequence[int]) -> float:
        """Return the factor of the learning rate for a logical matrix of this shape."""
        return FACTORS[self.scale](*shape)

    def iteration_dtype(self, masters: torch.dtype) -> torch.dtype:
        """Return the dtype to which the products of the iteration are rounded."""
        usual = torch.float64 if masters == torch.float64 else torch.bfloat16
        return _ITERATES.get(self.ns_dtype, usual)

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        self.adamw.update_(weights, grads, state, step)


FACTORS: dict[str, Callable[[int, int], float]] = {
    "moonshot": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "keller-jordan": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""Factors of Muon's learning rate for a matrix [rows, columns], by name.

moonshot: "Muon is Scalable for LLM Training" (arXiv 2502.16982): an update has the root mean square of a usual one by
AdamW, so both have one learning rate. keller-jordan: muon.py of github.com/KellerJordan/Muon.
"""
_ITERATES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def _texts(key: str, values: object) -> tuple[str, ...]:
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return tuple(values)
    raise UserError(f"optimizer.options for 'muon': {key} = {values!r} must be a list of patterns")


def _numbers(key: str, values: object) -> Coefficients:
    if isinstance(values, list | tuple) and len(values) == 3 and all(map(is_number, values)):
        first, second, third = map(float, values)
        return first, second, third
    raise UserError(f"optimizer.options for 'muon': {key} = {values!r} must be three numbers")


def moments_of(rule: UpdateRule, parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names of the moments that a rule keeps of a parameter.

    Raises UserError if Muon updates some of the logical tensors that are stacked in the parameter, and AdamW others.
    """
    if layout_of(parameter).balancing is not None:
        return ()
    if not isinstance(rule, Muon):
        return rule.names
    parts = layout_of(parameter).parts
    by_muon = [part.name for part in parts if rule.updates(part)]
    if by_muon and len(by_muon) < len(parts):
        others = " and ".join(part.name for part in parts if part.name not in by_muon)
        raise UserError(
            f"optimizer.options by_adamw: {' and '.join(by_muon)} and {others} are one parameter, which Muon and AdamW "
            "would share: match all or none"
        )
    return rule.names[:1] if by_muon else rule.names[1:]


def least_moments(rule: UpdateRule) -> int:
    """Return the smallest number of moments that a rule keeps of a parameter."""
    return 1 if isinstance(rule, Muon) else len(rule.names)


@dataclass(frozen=True)
class SGD(_Stateless):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient, as in torch."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise UserError(f"momentum = {self.momentum!r} must lie from 0 to below 1")
        if not isinstance(self.nesterov, bool) or (self.nesterov and not self.momentum):
            raise UserError(f"nesterov = {self.nesterov!r}: True or False, and nesterov needs a momentum above 0")

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
        if not isinstance(kind, type) or not isinstance(options, dict | None):
            raise UserError(f"TorchRule({kind!r:.40}, {options!r:.40}): give a class of torch.optim and a dict")
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
        except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
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


def update_padded(rule: UpdateRule, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
    """Do `rule.update_` so that the result for an element does not depend on the slice that it is in.

    torch's fused kernels compute the last elements of a tensor, fewer than a vector has, with other instructions. So
    tensors of other lengths are padded with zeros. The gradients are not changed then.
    """
    missing = -len(weights) % VECTOR
    if not missing:
        rule.update_(weights, grads, state, step)
        return
    kept = (weights, *state)
    padded = [torch.nn.functional.pad(values, (0, missing)) for values in (grads, *kept)]
    rule.update_(padded[1], padded[0], padded[2:], step)
    for values, updated in zip(kept, padded[1:], strict=True):
        values.copy_(updated[: len(values)])


def rule(name: str, options: dict[str, Any] | None = None) -> UpdateRule:
    """Return the rule of that name: adamw, sgd, muon, or an optimizer class of torch.optim.

    Options of muon are the fields of `Muon`, and betas and eps of its AdamW.

    Raises UserError for an unknown name, and for options that the rule does not have.
    """
    known = {"adamw": AdamW, "sgd": SGD, "muon": _muon}
    kind = getattr(torch.optim, name, None)
    try:
        if name.lower() in known:
            return known[name.lower()](**(options or {}))
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            return Torch(kind, options)
    except TypeError as error:
        raise UserError(f"optimizer.options for {name!r}: {error}") from error
    raise UserError(
        f"optimizer.name = {name!r} is not known: use adamw, sgd, muon or a class of torch.optim such as RAdam"
    )


def _muon(**options: Any) -> Muon:
    own = {key: options.pop(key) for key in ("betas", "eps") if key in options}
    return Muon(**options, adamw=AdamW(**own))
