"""Any elementwise optimizer class of torch as an update rule.

A trial on a few numbers tells which tensors the class keeps as moments, and whether a slice of a
parameter is updated like the whole, without which its state could not be sharded over ranks.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.optim.rules.update_rules import Step

# settings of the trial: any others would show the same
_LEARNING_RATE = 1e-2
_WEIGHT_DECAY = 0.1
_NUM_WEIGHTS = 12
# odd: vectorized functions compute the elements beyond whole vectors with other instructions
_CUT_LENGTHS = [5, 7]


class _Trial(NamedTuple):
    """Results of a few steps of the optimizer class for a few numbers.

    full: weights that were updated as one tensor.
    parts: the same weights with the same gradients, updated as two tensors.
    padding: weights that were 0, with gradients of 0.
    state: what the optimizer keeps of `full`, by name.
    idle_state: what it keeps of `padding`, which was stepped with another learning rate and weight
        decay.
    """

    full: Tensor
    parts: list[Tensor]
    padding: Tensor
    state: dict[str, Tensor]
    idle_state: dict[str, Tensor]


class TorchRule:
    """Any elementwise optimizer class of torch, applied to slices with its state.

    names: of its moments, the tensors of a parameter's shape that it keeps.
    scalar_names: of the further numbers that it keeps, such as a step count. They must not depend
        on learning rate and weight decay, because they are the same for all groups.

    A trial on a few numbers, whole and cut, tells both. Raises UserError if the class is not
    elementwise, or if it changes zero weights with zero gradients: padding must stay zero. The host
    waits for the device once a step.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any] | None = None,
    ) -> None:
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise UserError.of("optimizer.torch_rule_kind", kind=kind)
        self.kind = kind
        self.options = dict(options or {})
        # each step has its own rates, and the optimizer its parameters
        step_options = {"lr", "weight_decay", "params"} & self.options.keys()
        if step_options:
            raise UserError.of(
                "optimizer.torch_rule_step_option", title=self._title, option=min(step_options)
            )
        self._has_decay = "weight_decay" in inspect.signature(kind).parameters
        # as the last applied step left them; empty before the first
        self._scalars: dict[str, Tensor] = {}
        self.names, self.scalar_names = self._probe()

    @property
    def scalars(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._scalars.items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        self._scalars = {name: torch.tensor(value) for name, value in scalars.items()}

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        """As `UpdateRule.update_`: by a step of the class on this slice alone. The scalars stay as
        they are; `advance` changes them after all slices."""
        if bool(step.skip):
            return
        grads = step.divided(grads)
        before = self._state_before(state, is_first=int(step.steps) == 1)
        after = self._step_once(weights, grads, before, step.lr, step.weight_decay)
        for name, values in zip(self.names, state, strict=True):
            if after[name] is not values:  # else updated in place
                values.copy_(after[name])

    def advance(self, skip: Tensor) -> None:
        """Advance the scalars by one step, after all elements were updated, by a step of the class
        on one element: also on a rank that holds no elements."""
        if bool(skip):
            return
        # zeros, because the scalars depend on no element
        weights, grads, *state = torch.zeros(2 + len(self.names), 1).unbind()
        before = self._state_before(state, is_first=not self._scalars)
        after = self._step_once(weights, grads, before, 1.0, 0.0)
        self._scalars = {name: after[name] for name in after if name not in self.names}

    def _state_before(self, state: Sequence[Tensor], is_first: bool) -> dict[str, Tensor] | None:
        """Return the state of a slice as it is before this step, by name: `state`, its moments in
        the order of `names`, and copies of the scalars, which other slices need too. None before
        the first step.

        Raises UserError if the loaded scalars are not those of the class.
        """
        if is_first:
            return None
        if self._scalars.keys() != self.scalar_names:
            needed = ", ".join(sorted(self.scalar_names)) or "nothing"
            loaded = ", ".join(sorted(self._scalars)) or "nothing"
            raise UserError.of(
                "optimizer.torch_rule_state", title=self._title, needed=needed, loaded=loaded
            )
        scalars = {name: value.clone() for name, value in self._scalars.items()}
        return dict(zip(self.names, state, strict=True)) | scalars

    def _step_once(
        self,
        weights: Tensor,
        grads: Tensor,
        state: dict[str, Tensor] | None,
        lr: float,
        weight_decay: float,
    ) -> dict[str, Tensor]:
        """Step `weights` [n] in place, and return by name what the optimizer then keeps of them.

        state: what it kept of them before; None for the first step.
        """
        # A new optimizer for each slice, with the state of the slice: torch's would find the state
        # by parameter, and here a parameter is in several slices.
        weights.grad = grads
        optimizer = self._optimizer(weights, lr, weight_decay)
        if state is not None:
            optimizer.state[weights] = state
        optimizer.step()
        weights.grad = None
        after: dict[str, Tensor] = {}
        for name, value in optimizer.state[weights].items():
            after[name] = value if isinstance(value, Tensor) else torch.tensor(value)
        return after

    def _optimizer(self, weights: Tensor, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return an optimizer of `weights` alone."""
        options: dict[str, Any] = {"lr": lr, **self.options}
        if self._has_decay:
            options["weight_decay"] = weight_decay
        return self.kind([weights], **options)

    def _require_options(self) -> None:
        """Raise UserError for options that the class itself refuses."""
        weight = torch.zeros(1)
        try:
            self._optimizer(weight, _LEARNING_RATE, _WEIGHT_DECAY)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise UserError.of(
                "optimizer.torch_rule_options", title=self._title, error=error
            ) from error

    @torch.no_grad()
    def _probe(self) -> tuple[tuple[str, ...], set[str]]:
        """Return the names of moments and scalars. Raise UserError unless a slice is updated like
        the whole."""
        self._require_options()
        try:
            trial = self._try()
        except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
            raise UserError.of(
                "optimizer.torch_rule_flat", title=self._title, error=error
            ) from error
        joined = torch.cat(trial.parts)
        # close, not equal: vectorized functions differ in the last bits at the end of a tensor
        if not torch.allclose(trial.full, joined, rtol=1e-12, atol=1e-14):
            raise UserError.of("optimizer.torch_rule_not_elementwise", title=self._title)
        if trial.padding.count_nonzero():
            raise UserError.of("optimizer.torch_rule_moves_zero", title=self._title)
        shape = trial.full.shape
        moments = [name for name, value in trial.state.items() if value.shape == shape]
        scalars = trial.state.keys() - set(moments)
        for name in sorted(scalars):
            if not torch.equal(trial.state[name], trial.idle_state[name]):
                raise UserError.of(
                    "optimizer.torch_rule_scalar_state", title=self._title, name=name
                )
        return tuple(moments), scalars

    def _try(self) -> _Trial:
        """Take three steps with gradients of different sizes, each on four tensors: the weights,
        their two slices, and padding."""
        generator = torch.Generator().manual_seed(0)
        full = torch.randn(_NUM_WEIGHTS, dtype=torch.float64, generator=generator)
        parts = [part.clone() for part in full.split(_CUT_LENGTHS)]
        padding = torch.zeros(3, dtype=torch.float64)
        tensors = [full, *parts, padding]
        states: list[dict[str, Tensor] | None] = [None] * len(tensors)
        # three: the first step has no state. Three sizes: a class may clip large gradients.
        for scale in (1.0, 1e-3, 1e3):
            grads = torch.randn(_NUM_WEIGHTS, dtype=torch.float64, generator=generator) * scale
            part_grads = [part.clone() for part in grads.split(_CUT_LENGTHS)]
            for number, tensor_grads in enumerate([grads, *part_grads]):
                states[number] = self._step_once(
                    tensors[number],
                    tensor_grads,
                    states[number],
                    lr=_LEARNING_RATE,
                    weight_decay=_WEIGHT_DECAY,
                )
            # with other rates, on which the scalars must not depend
            states[-1] = self._step_once(
                padding,
                torch.zeros_like(padding),
                states[-1],
                lr=1.0,
                weight_decay=0.0,
            )
        state_of_full = states[0] or {}
        state_of_padding = states[-1] or {}
        return _Trial(full, parts, padding, state_of_full, state_of_padding)

    @property
    def _title(self) -> str:
        return f"optimizer {self.kind.__module__}.{self.kind.__name__}"
