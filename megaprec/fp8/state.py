"""The FP8 state that all layers of a rank share: scales, the amaxes that determine them, and casts
of weights.

A *pass* lasts from entering to leaving the outermost `autocast`: a whole training step with all of
its micro-batches, or whatever a user's program puts inside. All of a pass sees the same scales, so
the result does not depend on the order of micro-batches in a layout or schedule, and recomputation
gives the same bits. Training passes record amaxes; evaluations and replays of a step do not. The
next training pass begins by advancing the history, and so does saving. A step that is then skipped
has advanced it too, because its amaxes are valid for the unchanged weights, and amaxes that
overflowed change no scale.

With the recipe's `history = "te"` the history advances within a pass, after each forward and each
backward pass of a micro-batch (`advance`). Each forward pass then stores its scales, and its
backward pass casts with the same scales.

Delayed amaxes are reduced when the history advances, in one all-reduce over the tp and dp ranks of
the stage, never over pp: no other stage has these tensors. Current amaxes are reduced over tp when
the tensor is cast, if it is sharded over tp. Thus each logical tensor has one scale, whatever the
layout.
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
from megaprec.fp8.eligibility import Eligibility, eligibility, unsupported_settings
from megaprec.fp8.formats import Role, format_of
from megaprec.fp8.history import AmaxHistory
from megaprec.fp8.nvfp4 import Microbatch
from megaprec.fp8.quantize import Codes, counts_lost
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.torch_private import num_writes

# the three tensors of a linear layer's products
ROLES: tuple[Role, ...] = get_args(Role)
Casts = tuple[Codes, Codes]
CastKey = tuple[int, int]  # a weight's version, and the `advances` of the state, when it was cast


@dataclass(frozen=True)
class Scope:
    """The settings of an autocast.

    computes: True if products run in FP8; otherwise amaxes are at most recorded.
    records: True if amaxes are recorded.
    """

    computes: bool = False
    records: bool = False


OFF = Scope()


class FP8State:
    """The FP8 state of all layers of a rank.

    Layers register when they are built, in the same order on all ranks of a stage.

    recipe: None for a model without FP8; the state then has no effect.
    layers: number of layers of the whole model.
    tp: the tensor-parallel axis.
    stage: the ranks over which delayed amaxes are reduced.
    dp: the ranks whose amaxes differ, if delayed amaxes are not reduced over dp.

    renew: an attribute that the owner of weights which are stored in FP8 only sets to a function.
        It is called at the start of a pass, computes their codes with the present scales, and
        records their amaxes if its argument is True.
    keeps_casts: an attribute; False if casts of weights are not to outlive their use, under ZeRO-3,
        where a rank has no memory for all of them.
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
        self.recipe = recipe
        self.layers = layers
        self.device = device
        self.tp = tp or Axis("tp")
        self.dp = dp or Axis("dp")
        self.stage = stage or self.tp
        self.registered: list[Eligibility] = []
        self.scope = OFF
        self.keeps_casts = True
        self.rolls = 0  # number of advances of the history between passes
        self.renew: Callable[[bool], None] | None = None
        # that of the layers which are computed at present; None in evaluation
        self.microbatch: Microbatch | None = None
        self.outdated = True  # True if masters have changed since the last call of `renew`
        # number of advances of the history within passes, with `history = "te"` only
        self.advances = 0
        # scales and history at the start of the last training pass, which `replayed` puts back
        self._pass_start: tuple[Tensor, Tensor] | None = None
        self._pending = False  # True if amaxes may have been recorded since the last roll
        self._in_autocast = False  # True within an autocast
        self._casts: dict[str, tuple[CastKey, Casts]] = {}  # of this pass, by weight
        self._lost: dict[str, Tensor] | None = None  # inside `watching` only

    @staticmethod
    def over(mesh: DeviceMesh | None, recipe: FP8Recipe | None, layers: int) -> "FP8State":
        """Return the state for a rank of a mesh. Collective over the world.

        Raises UserError for a recipe with settings that are not computed, or for a backend that is
        not available.
        """
        unsupported = unsupported_settings(recipe) if recipe is not None else {}
        if unsupported:
            lines = [f"fp8.{key} = true: {why}; use false" for key, why in unsupported.items()]
            raise UserError(*lines)
        if recipe is not None and recipe.backend == "transformer_engine":
            transformer_engine.require()
        tp = Axis.of(mesh, "tp")
        stage = tp
        dp: Axis | None = None  # delayed amaxes that are reduced over the stage differ nowhere
        if recipe is None or not recipe.scales.keeps_history:
            # without a history no tensor has a delayed amax, and this axis is without effect
            dp = Axis.of(mesh, "dp")
        elif not recipe.reduce_amax:
            dp = Axis.replicas(mesh)
        else:
            # overlapping passes of "te" reduce during other collectives, hence a separate group
            stage = Axis.stage(mesh, separate_group=recipe.history == "te")
        return FP8State(recipe, layers, tp, stage, dp, device_of(mesh))

    def register(self, parts: Sequence[Part]) -> Eligibility:
        """Register the weight that `parts` are stacked in, and return whether its products run in
        FP8."""
        if "names" in self.__dict__:  # the cached property has been read: the bank has its size
            raise RuntimeError(
                f"{parts[0].name} was registered after the first pass: build all layers before"
            )
        assert self.recipe is not None
        weight = eligibility(self.recipe, parts, self.layers)
        if weight not in self.registered:  # virtual ranks of one process have the same weights
            self.registered.append(weight)
        return weight

    def leave_out(self, weight: Eligibility, why: str) -> None:
        """Exclude a registered weight's products from FP8, for the reason `why`. To be called
        before the first pass."""
        self.registered[self.registered.index(weight)] = replace(weight, fallback_reason=why)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the tensors that have a delayed scale: "<logical name of the weight>.<role>"."""
        if self.recipe is None or not self.recipe.scales.keeps_history:
            return ()
        names: list[str] = []
        for weight in self.registered:
            if not weight.fallback_reason:
                names += [f"{weight.name}.{role}" for role in ROLES]
        return tuple(names)

    @cached_property
    def bank(self) -> AmaxHistory:
        """Return the scales and amaxes of the tensors in `names`."""
        assert self.recipe is not None
        formats = [format_of(self.recipe, role) for role in ROLES]  # of one weight, as in `names`
        return AmaxHistory(self.recipe, formats * self.num_delayed_weights, self.device)

    @property
    def weight_names(self) -> set[str]:
        """Return the weights whose products run in FP8, each by its first logical name."""
        return {weight.name for weight in self.registered if not weight.fallback_reason}

    @property
    def num_delayed_weights(self) -> int:
        """Return the number of weights that have a delayed scale."""
        return len(self.names) // len(ROLES)

    @cached_property
    def _columns(self) -> Mapping[str, int]:
        """Return the index in the bank of each tensor."""
        return {name: column for column, name in enumerate(self.names)}

    def scale(self, name: str, role: Role) -> Tensor:
        """Return the delayed scale of a tensor in this pass: float32 of one element."""
        return self.bank.scale[self._columns[f"{name}.{role}"]]

    def record(self, name: str, role: Role, amax: Tensor) -> None:
        """Record the amax, of one element, of a tensor in this pass."""
        self.bank.record(self._columns[f"{name}.{role}"], amax)

    def cast_of(
        self,
        name: str,
        weight: Tensor,
        advances: int,
        make: Callable[[], Casts],
    ) -> Casts:
        """Return the weight's casts of this pass, computed once for each version of the weight and
        each advance of the history within the pass, or in each use unless casts are kept.

        name: unique among the weights of this process. Every change of a weight must increment its
        version (`Buffer.start_all_gather` does so for the optimizers of this project).
        """
        if not self.keeps_casts:
            return make()
        key = (num_writes(weight), advances)
        cast_key, casts = self._casts.get(name, (None, None))
        if casts is None or cast_key != key:
            casts = make()
            self._casts[name] = (key, casts)
        return casts

    @contextmanager
    def autocast(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: FP8Recipe | None = None,
        fp8_group: Axis | None = None,
    ) -> Iterator[None]:
        """Run the products of the layers that share this state in FP8, as in Transformer Engine's
        `fp8_autocast`.

        enabled: True for FP8. calibrating: True to record amaxes even if FP8 is not enabled. Inner
        autocasts apply inside their block, and the outermost one is the pass; if gradients are
        enabled it is a training pass. Backward passes follow the settings of their forward passes,
        wherever they run. fp8_recipe, fp8_group: those of the state, if given. Raises ValueError
        for others.
        """
        # arguments of Transformer Engine's function, which may be given again
        if fp8_recipe not in (None, self.recipe) or fp8_group not in (None, self.stage):
            raise ValueError(
                "recipe and group are fixed when the layers are built: give others to FP8State"
            )
        records = torch.is_grad_enabled() and (enabled or calibrating)
        with self._entered(enabled, records):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Repeat the last training pass with its scales. Nothing is recorded, or all of it in the
        same way."""
        if self.by_microbatch and self._pass_start is not None and self.names:
            scale, history = self._pass_start
            self.bank.scale.copy_(scale)
            self.bank.history.copy_(history)
        with self._entered(True, self.by_microbatch):
            yield

    @contextmanager
    def watching(self) -> Iterator[dict[str, Tensor]]:
        """Yield the losses of casts inside: `counts_lost` by tensor ("<logical name of the
        weight>.<role>"), summed."""
        self._lost = {}
        try:
            yield self._lost
        finally:
            self._lost = None

    def note_lost(
        self,
        name: str,
        role: Role,
        x: Tensor,
        codes: Codes,
    ) -> None:
        """Count the losses of a cast, inside `watching` only."""
        if self._lost is None:
            return
        key = f"{name}.{role}"
        counts = counts_lost(x, codes)
        if key in self._lost:
            counts = counts + self._lost[key]
        self._lost[key] = counts

    @contextmanager
    def _entered(self, enabled: bool, records: bool) -> Iterator[None]:
        """Enter an autocast; the outermost one begins a pass and, if it records, ends it."""
        outer_scope = self.scope
        is_outermost = not self._in_autocast
        if is_outermost:
            self._begin(records)
        self._in_autocast = True
        self.scope = self._scope(enabled, records)
        try:
            yield
            if is_outermost and records:
                self.advance()
        finally:
            self._in_autocast = not is_outermost
            self.scope = outer_scope

    def _begin(self, records: bool) -> None:
        """Begin a pass: with scales from the amaxes of the passes before, if it is one that
        records."""
        self._casts.clear()  # scales may differ from those of the pass before
        if records and self.by_microbatch:
            self._pass_start = None
            if self.names:
                self._pass_start = (self.bank.scale.clone(), self.bank.history.clone())
        elif records:
            self.roll()
            self._pending = True
        # a training pass may have new scales: codes are recomputed, even of unchanged masters
        if self.renew is not None and (records or self.outdated):
            has_history = self.recipe is not None and self.recipe.scales.keeps_history
            self.renew(records and has_history)
            self.outdated = False

    def _scope(self, enabled: bool, records: bool) -> Scope:
        """Return the settings of an autocast: in the recipe's first steps products are not in
        FP8."""
        if self.recipe is None:
            return OFF
        # `rolls` counts training passes: the first `calibrate` of them only record
        calibrated = not self.recipe.calibrating and self.rolls >= self.recipe.calibrate
        return Scope(enabled and calibrated, records and self.recipe.scales.keeps_history)

    @torch.no_grad()
    def roll(self) -> None:
        """Compute the scales of the next training pass, if there was a training pass since the last
        call.

        Collective over `stage`.
        """
        if not self._pending:
            return
        self._pending = False
        self.rolls += 1  # on every rank, with or without tensors of its own
        self._casts.clear()
        if self.names:
            self.bank.roll(self._reduce_max)

    @torch.no_grad()
    def forget(self) -> None:
        """Forget the amaxes that were recorded since the last call of `roll`, as if there had been
        no pass."""
        self._pending = False
        if self.names:
            self.bank.step_amax.zero_()

    @property
    def differs_over_dp(self) -> bool:
        """Return True if data-parallel ranks have different scales."""
        return self.recipe is not None and self.recipe.scales.keeps_history and self.dp.size > 1

    @property
    def by_microbatch(self) -> bool:
        """Return True if the history advances with each micro-batch."""
        return self.recipe is not None and not self.recipe.repeatable

    @torch.no_grad()
    def advance(self) -> None:
        """End a micro-batch's forward or backward pass, if the history advances then. Collective
        over `stage`.

        To be called after each pass if passes of several micro-batches overlap; otherwise the end
        of an autocast is sufficient.
        """
        if self.by_microbatch and self.names:
            self.bank.roll(self._reduce_max)
            self.advances += 1

    def _reduce_max(self, amaxes: Tensor) -> None:
        self.stage.max_(amaxes)
