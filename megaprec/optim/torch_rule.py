"""Any elementwise optimizer class of torch as an update rule.

A trial on a few numbers tells which tensors the class keeps as moments, and whether a slice of a
parameter is updated like the whole, without which its state could not be sharded over ranks.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.optim.update_rules import Step


class Torch:
    """Any elementwise optimizer class of torch, applied to slices with its state.

    Its moments, and the property of being elementwise, are determined by a trial on a few numbers,
    whole and cut. Raises UserError if it is not elementwise, or if it changes zero weights with
    zero gradients: padding must stay zero. The further numbers that it keeps, `scalar_names`, must
    not depend on learning rate and weight decay, because they are the same for all groups. It waits
    for the device once a step.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], options: dict[str, Any] | None = None
    ) -> None:
        if not isinstance(kind, type) or not isinstance(options, dict | None):
            raise UserError(
                f"TorchRule({kind!r:.40}, {options!r:.40}): give a class of torch.optim and a dict"
            )
        self.kind = kind
        self.options = dict(options or {})
        if given := {"lr", "weight_decay", "params"} & self.options.keys():
            raise UserError(
                f"{self._says}: {sorted(given)[0]} is not one of its options here; it comes "
                "with each step"
            )
        self._decays = "weight_decay" in inspect.signature(kind).parameters
        self._scalars: dict[
            str, Tensor
        ] = {}  # values from before this step; empty before the first step
        self.names, self.scalar_names = self._probe()

    @property
    def scalars(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._scalars.items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        self._scalars = {name: torch.tensor(value) for name, value in scalars.items()}

    def update_(self, weights: Tensor, grads: Tensor, state: Sequence[Tensor], step: Step) -> None:
        if bool(step.skip):
            return
        grads.div_(step.divisor)
        made = self._step_once(
            weights, grads, self._kept(state, int(step.steps) == 1), step.lr, step.weight_decay
        )
        for name, values in zip(self.names, state, strict=True):
            if made[name] is not values:
                values.copy_(made[name])

    def advance(self, skip: Tensor) -> None:
        """Advance the scalars after all elements of a step, once, also on a rank that has no
        elements."""
        if not bool(skip):
            weights, grads, *state = torch.zeros(2 + len(self.names), 1).unbind()
            made = self._step_once(weights, grads, self._kept(state, not self._scalars), 1.0, 0.0)
            self._scalars = {name: value for name, value in made.items() if name not in self.names}

    def _kept(self, state: Sequence[Tensor], first: bool) -> dict[str, Tensor] | None:
        """Return all state from before this step; the scalars are copies, because other slices need
        them too."""
        if first:
            return None
        if self._scalars.keys() != self.scalar_names:
            had, needs = (
                ", ".join(sorted(names)) or "nothing"
                for names in (self._scalars, self.scalar_names)
            )
            raise UserError(
                f"{self._says} keeps {needs}, but the loaded state has {had}: it is of "
                "another optimizer"
            )
        return dict(zip(self.names, state, strict=True)) | {
            n: value.clone() for n, value in self._scalars.items()
        }

    def _step_once(
        self,
        weights: Tensor,
        grads: Tensor,
        state: dict[str, Tensor] | None,
        lr: float,
        weight_decay: float,
    ) -> dict[str, Tensor]:
        """Step `weights` in place and return the state that the optimizer keeps. Without `state`:
        its first step."""
        decay = {"weight_decay": weight_decay} if self._decays else {}
        weights.grad = grads
        optimizer = self.kind([weights], **{"lr": lr, **self.options, **decay})  # type: ignore[arg-type]
        if state is not None:
            optimizer.state[weights] = state
        optimizer.step()
        weights.grad = None
        return {
            name: v if isinstance(v, Tensor) else torch.tensor(v)
            for name, v in optimizer.state[weights].items()
        }

    @torch.no_grad()
    def _probe(self) -> tuple[tuple[str, ...], set[str]]:
        """Return the names of moments and scalars. Raise UserError unless a slice is updated like
        the whole."""
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(12, dtype=torch.float64, generator=generator)
        slices = [part.clone() for part in whole.split([5, 7])]
        nothing = torch.zeros(3, dtype=torch.float64)
        states: list[dict[str, Tensor] | None] = [None] * 4
        try:
            for size in (1.0, 1e-3, 1e3):
                grads = torch.randn(12, dtype=torch.float64, generator=generator) * size
                cut = [part.clone() for part in grads.split([5, 7])]
                for n, (weights, grad) in enumerate(
                    zip([whole, *slices], [grads, *cut], strict=True)
                ):
                    states[n] = self._step_once(weights, grad, states[n], 1e-2, 0.1)
                states[3] = self._step_once(nothing, torch.zeros_like(nothing), states[3], 1.0, 0.0)
        except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
            raise UserError(
                f"{self._says} cannot step a flat slice of a parameter: {error}"
            ) from error
        kept = states[0] or {}
        unmoved = states[3] or {}
        names = tuple(name for name, value in kept.items() if value.shape == whole.shape)
        scalars = kept.keys() - set(names)
        if not torch.allclose(whole, torch.cat(slices), rtol=1e-12, atol=1e-14):
            raise UserError(
                f"{self._says} is not elementwise: a slice updated alone differs from the "
                "same slice of the whole, so "
                "its state cannot be sharded over ranks; use one like AdamW, RAdam or Adagrad"
            )
        if nothing.count_nonzero():
            raise UserError(
                f"{self._says} moves weights of 0 whose gradients are 0, so padding would not "
                "stay zero"
            )
        if differing := [
            name for name in sorted(scalars) if not torch.equal(kept[name], unmoved[name])
        ]:
            raise UserError(
                f"{self._says} keeps {differing[0]}, one number for all elements that depends "
                "on learning rate, weight "
                "decay or gradients; use one like AdamW, RAdam or Adagrad"
            )
        return names, scalars

    @property
    def _says(self) -> str:
        return f"optimizer {self.kind.__module__}.{self.kind.__name__}"
