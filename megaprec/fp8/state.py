"""What the FP8 products of a rank share: scales, the amaxes that make them, casts of weights, and when each is renewed.

A *pass* is what lies between entering and leaving the outermost `autocast`: a whole training step with all of its
micro-batches, or whatever a program of one's own puts inside. All of a pass sees the same scales, so no layout and no
schedule can tell in which order its micro-batches came, and whatever is computed again gives the same bits. Training
passes record amaxes; evaluations and replays of a step do not. The next training pass begins by rolling the history
over, and so does saving; a step that is then skipped has rolled too, for its amaxes are true of the weights that
stay, and those that overflowed move no scale.

With the recipe's `history = "te"` the history advances within a pass, after each forward and each backward pass of a
micro-batch (`advance`). Then each forward pass notes the scales that it saw, and its backward pass casts by the same.

Delayed amaxes are agreed on when the history rolls, in one collective over the tp and dp ranks of the stage, never over
pp: no other stage has these tensors. Current ones are agreed on over tp, as the tensor is cast, where it is cut over
tp. Thus each logical tensor has one scale, whatever the layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.layout import Part
from megaprec.errors import UserError
from megaprec.fp8 import transformer_engine
from megaprec.fp8.eligibility import Eligibility, eligibility, not_computed
from megaprec.fp8.formats import Role, format_of
from megaprec.fp8.history import AmaxHistory
from megaprec.fp8.quantize import Codes, counts_lost
from megaprec.precision.fp8_recipe import FP8Recipe

ROLES: tuple[Role, ...] = get_args(Role)
Casts = tuple[Codes, Codes]


@dataclass(frozen=True)
class Scope:
    """What an autocast says. computes: products are in FP8; else amaxes are at most recorded. records: they are."""

    computes: bool = False
    records: bool = False


OFF = Scope()


class FP8State:
    """One for all layers of a rank; they register as they are built, which is in the same order on all ranks of a
    stage.

    renew: of whoever owns weights that are kept in FP8 alone. It makes their codes, of the present scales, and records
    their amaxes if it is told to. Called when a pass begins.
    recipe: None for a model without FP8; nothing here then has an effect. layers: of the whole model.
    tp: the tensor-parallel axis. stage: the ranks that agree on delayed amaxes. dp: where they do not, the ranks whose
    amaxes differ.
    """

    def __init__(
        self,
        recipe: FP8Recipe | None = None,
        layers: int = 0,
        tp: Axis | None = None,
        stage: Axis | None = None,
        dp: Axis | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.recipe, self.layers, self.device = recipe, layers, device
        self.tp, self.dp = tp or Axis("tp"), dp or Axis("dp")
        self.stage = stage or self.tp
        self.reached: list[Eligibility] = []
        self.scope = OFF
        self.rolls = 0  # how often the history has advanced
        self.renew: Callable[[bool], None] | None = None
        self.outdated = True  # whether masters have changed since `renew` was called
        self.moment = 0  # how often the history has advanced within passes
        self._before: tuple[Tensor, Tensor] | None = None  # scales and history as the last training pass began
        self._pending = False  # whether amaxes may have been recorded since
        self._inside = False
        self._casts: dict[str, tuple[tuple[int, int], Casts]] = {}
        self._lost: dict[str, Tensor] | None = None

    @staticmethod
    def over(mesh: DeviceMesh | None, recipe: FP8Recipe | None, layers: int) -> "FP8State":
        """The one of a rank of a (pp, dp, tp) mesh. Collective over the world.

        Raises UserError for a recipe that asks for what is not computed, or for a backend that is not there.
        """
        if recipe is not None and (lacking := not_computed(recipe)):
            raise UserError(*(f"fp8.{key} = true: {why}; use false" for key, why in lacking.items()))
        if recipe is not None and recipe.backend == "transformer_engine":
            transformer_engine.require()
        tp, dp = Axis.of(mesh, "tp"), Axis.of(mesh, "dp")
        if recipe is None or recipe.kind != "delayed" or not recipe.reduce_amax:
            return FP8State(recipe, layers, tp, tp, dp, device_of(mesh))
        return FP8State(recipe, layers, tp, Axis.stage(mesh, own=recipe.history == "te"), device=device_of(mesh))

    def register(self, parts: Sequence[Part]) -> Eligibility:
        """Notes the weight that `parts` are stacked in, and says whether its products are to be in FP8."""
        if "bank" in self.__dict__:
            raise RuntimeError(f"{parts[0].name} came after the first pass: build all layers before")
        assert self.recipe is not None
        self.reached.append(eligibility(self.recipe, parts, self.layers))
        return self.reached[-1]

    def leave_out(self, reached: Eligibility, why: str) -> None:
        """Has the products with a registered weight made wide after all; to be called before the first pass."""
        self.reached[self.reached.index(reached)] = replace(reached, fallback_reason=why)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that have a delayed scale: "<logical name of the weight>.<role>"."""
        delayed = self.recipe is not None and self.recipe.kind == "delayed"
        return tuple(
            f"{one.name}.{role}" for one in self.reached if delayed and not one.fallback_reason for role in ROLES
        )

    @cached_property
    def bank(self) -> AmaxHistory:
        """Their scales and amaxes."""
        assert self.recipe is not None
        return AmaxHistory(self.recipe, [format_of(self.recipe, role) for role in ROLES] * self.products, self.device)

    @property
    def narrow(self) -> set[str]:
        """The weights whose products are in FP8, each by its first logical name."""
        return {one.name for one in self.reached if not one.fallback_reason}

    @property
    def products(self) -> int:
        """How many weights have a delayed scale."""
        return len(self.names) // len(ROLES)

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def scale(self, name: str, role: Role) -> Tensor:
        """The delayed scale of a tensor in this pass: float32 of one element."""
        return self.bank.scale[self._place[f"{name}.{role}"]]

    def record(self, name: str, role: Role, amax: Tensor) -> None:
        """Notes the largest magnitude, of one element, that a tensor has in this pass."""
        self.bank.record(self._place[f"{name}.{role}"], amax)

    def cast_of(self, name: str, weight: Tensor, moment: int, make: Callable[[], Casts]) -> Casts:
        """The weight's casts of this pass, made once for every moment and change of the weight: all that changes one
        counts up its version (`Buffer.start_collect` does it for the parameters of this project's optimizers)."""
        made, casts = self._casts.get(name, ((-1, -1), None))
        if casts is None or made != (weight._version, moment):
            made, casts = (weight._version, moment), make()
            self._casts[name] = made, casts
        return casts

    @contextmanager
    def autocast(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: FP8Recipe | None = None,
        fp8_group: Axis | None = None,
    ) -> Iterator[None]:
        """Products of the layers that share this state are in FP8 inside, as in Transformer Engine's `fp8_autocast`.

        enabled: they are. calibrating: if not, amaxes are recorded all the same. Inner autocasts are heeded inside,
        the outermost one is the pass; where gradients are enabled it is a training pass. Backward passes follow their
        forward passes, wherever they are made. fp8_recipe, fp8_group: those that the state was made with, if given.
        Raises ValueError for others.
        """
        if fp8_recipe not in (None, self.recipe) or fp8_group not in (None, self.stage):
            raise ValueError("recipe and group are decided where the layers are built: give FP8State others there")
        with self._entered(enabled, torch.is_grad_enabled() and (enabled or calibrating)):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """The last training pass once more, with its scales; nothing is recorded, or all of it in the same way."""
        if self.by_microbatch and self._before is not None and self.names:
            for kept, before in zip((self.bank.scale, self.bank.history), self._before, strict=True):
                kept.copy_(before)
        with self._entered(True, self.by_microbatch):
            yield

    @contextmanager
    def watching(self) -> Iterator[dict[str, Tensor]]:
        """What casts inside lose: `counts_lost` by tensor ("<logical name of the weight>.<role>"), summed."""
        self._lost = {}
        try:
            yield self._lost
        finally:
            self._lost = None

    def note_lost(self, name: str, role: Role, x: Tensor, codes: Codes) -> None:
        """Counts what a cast loses, if that is watched."""
        if self._lost is not None:
            counts = counts_lost(x, codes)
            self._lost[f"{name}.{role}"] = counts + self._lost.get(f"{name}.{role}", torch.zeros_like(counts))

    @contextmanager
    def _entered(self, enabled: bool, records: bool) -> Iterator[None]:
        outer, inside = self.scope, self._inside
        if not inside:
            self._begin(records)
        self._inside, self.scope = True, self._scope(enabled, records)
        try:
            yield
            if not inside and records:
                self.advance()
        finally:
            self._inside, self.scope = inside, outer

    def _begin(self, records: bool) -> None:
        self._casts.clear()
        if records and self.by_microbatch:
            self._before = (self.bank.scale.clone(), self.bank.history.clone()) if self.names else None
        elif records:
            self.roll()
            self._pending = True
        if self.renew is not None and (records or self.outdated):
            self.renew(records and self.recipe is not None and self.recipe.kind == "delayed")
            self.outdated = False

    def _scope(self, enabled: bool, records: bool) -> Scope:
        if self.recipe is None:
            return OFF
        calibrated = not self.recipe.calibrating and self.rolls >= self.recipe.calibrate
        return Scope(enabled and calibrated, records and self.recipe.kind == "delayed")

    @torch.no_grad()
    def roll(self) -> None:
        """Makes the scales of the next training pass, if there was one since the last time. Collective over `stage`."""
        if not self._pending:
            return
        self._pending = False
        self.rolls += 1
        self._casts.clear()
        if self.names:
            self.bank.roll(self._agree)

    @property
    def by_microbatch(self) -> bool:
        """Whether the history advances with each micro-batch."""
        return self.recipe is not None and self.recipe.history == "te"

    @torch.no_grad()
    def advance(self) -> None:
        """Ends a micro-batch's forward or backward pass, if that is when the history advances. To be called after each
        where passes of several micro-batches overlap; else the end of an autocast will do. Collective over `stage`."""
        if self.by_microbatch and self.names:
            self.bank.roll(self._agree)
            self.moment += 1

    def _agree(self, amaxes: Tensor) -> None:
        self.stage.max_(amaxes)
