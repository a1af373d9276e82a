"""The optimistic step: applied on a guess while the ranks still agree, and undone if the guess was
wrong.

The all-reduce of `megaprec.optim.optimizer` makes every stage of a pipeline wait for the slowest.
An optimistic step instead guesses its result: all gradients are finite, no two ranks disagree, and
nothing is clipped. The guess needs no communication and is equal on all ranks, so either all ranks
were right or all undo the step. The numbers are reduced during the next step's first forward
passes. The caller must call `settle` before the first backward pass, because the gradients are
needed until then.

Undoing is exact to the last bit. Arithmetic cannot invert an update, so each tile is copied before
its update, and the copy is restored. Then the step is applied, or skipped, without a guess. The
cost is this copy: as much memory again as weights, masters and moments of this rank's slices.

A run that clips every step would always guess wrong. So a step is guessed only if the last guess
was right, or would have been right: after a clipped or skipped step the next one waits for the
all-reduce, as in the base class.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.optim.consensus import Consensus
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.step_report import StepReport
from megaprec.optim.update_rules import Step
from megaprec.optim.update_tile import Tile
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import OnNonfinite


@dataclass(frozen=True)
class _Guessed:
    """A step that is applied but not validated. wait: for `numbers`. The others are from before the
    step."""

    numbers: Tensor
    wait: Callable[[], object]
    scale: Tensor
    counters: list[Tensor]
    scalars: dict[str, float]


@dataclass(frozen=True)
class SettledStep:
    """A step whose outcome is known. stands: True if the guess was right; else weights and scale
    have changed again."""

    report: StepReport
    stands: bool


def post_validation_conflicts(on_nonfinite: OnNonfinite, recipe: FP8Recipe | None) -> Iterator[str]:
    """Yield a line for each setting of precision that is incompatible with post-validation."""
    after = 'optimizer.validation = "after" finds a bad step when the next one has begun'
    if on_nonfinite == "raise":
        yield (
            f'{after}, too late for precision.on_nonfinite = "raise": use "skip", or '
            'optimizer.validation = "before"'
        )
    if recipe is not None and recipe.kind == "delayed":
        yield (
            f'{after}, and delayed scales have advanced: use fp8.kind = "current", or '
            'optimizer.validation = "before"'
        )
    if recipe is not None and recipe.parameters:
        yield (
            'optimizer.validation = "after" undoes a bad step, but weights that are kept in FP8 '
            "are then rounded a second time: use fp8.parameters = false, or "
            'optimizer.validation = "before"'
        )


class PostValidationOptimizer(ParallelAMPOptimizer):
    """A ParallelAMPOptimizer whose steps have two halves, `take` and `settle`; its arguments are
    the same.

    `step`, which does both at once, is available as well, and the results are equal bit for bit.
    Observers see a guess as a decision, and see the true decision afterwards if the guess was
    wrong. Between the two halves no gradient may be accumulated and no state saved. Raises
    UserError for a plan that raises on non-finite steps, because by then the next step has begun.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if "lr" in self.param_groups[0]:
            raise UserError.of("optimizer.rate_of_optimistic_step")
        problems = list(post_validation_conflicts(self.plan.on_nonfinite, self.plan.fp8))
        if problems:
            raise UserError(*problems)
        self._guessed: _Guessed | None = None
        self._guesses = True  # True if the last guess was right, or would have been
        self._copies_of: dict[int, list[Tensor]] = {}  # by tile: its tensors before the guess

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients; raise RuntimeError while a step is not settled, because it still
        needs them."""
        self.require_settled()
        super().zero_grad(set_to_none)

    def expect(self, chunk: int = 0) -> None:
        """Announce the last backward pass; raise RuntimeError while the step before is not
        settled."""
        self.require_settled()
        super().expect(chunk)

    def reduce(self, chunk: int = 0) -> None:
        """Reduce a chunk; raise RuntimeError while the step before is not settled."""
        self.require_settled()
        super().reduce(chunk)

    @torch.no_grad()
    def take(
        self, lr: float, loss: Tensor | None = None, counted_tokens: Tensor | None = None
    ) -> StepReport | None:
        """Run the first half of a step; arguments as in `step`. Return the report, or None if the
        step was guessed.

        Raises RuntimeError as `step` does, if the step was not guessed, and if the step before is
        not settled.
        """
        self.require_settled()
        self._prepare(lr, loss)
        numbers = self._local_numbers(loss, counted_tokens)
        wait = self.world.start_sum_(numbers)
        if not self._guesses:
            wait()
            self._guesses = self._is_as_guessed(self._consensus.read(numbers), self.scaler.scale)
            return self._conclude(numbers)
        self._guessed = _Guessed(
            numbers=numbers,
            wait=wait,
            scale=self.scaler.scale.clone(),
            counters=[counter.clone() for counter in self._counters()],
            scalars=self.rule.scalars,
        )
        # the guess: 0 is neither a skipped step nor an overflow, and the divisor does not clip
        no_overflow = torch.zeros((), dtype=torch.float32, device=self.device)
        for observer in self.observers:
            observer.decided(self.all_buffers(), self._guessed.scale, no_overflow)
        self.steps += 1
        # elementwise tiles are copied one by one, just before their update: they are in the cache
        for tile in self._whole_tiles():
            self._copy(tile)
        self._apply(self.scaler.scale.double(), no_overflow, self._update_copied)
        self.scaler.update(no_overflow)
        for observer in self.observers:
            observer.updated(self.all_buffers())
        return None

    @torch.no_grad()
    def settle(self) -> SettledStep | None:
        """Run the second half of a step, if one is not settled; otherwise return None.

        It may wait for the first halves of other ranks. Raises RuntimeError as `step` does, with
        nothing changed by the step.
        """
        guessed = self._guessed
        self._guessed = None
        if guessed is None:
            return None
        guessed.wait()
        agreed = self._consensus.read(guessed.numbers)
        self._guesses = self._is_as_guessed(agreed, guessed.scale)
        if self._guesses:
            report = self._report(agreed, agreed.norm / guessed.scale, guessed.scale)
            self._memory.forget_gradients()
            for observer in self.observers:
                observer.outcome(report)
            return SettledStep(report, stands=True)
        self._go_back(guessed)
        return SettledStep(self._conclude(guessed.numbers), stands=False)

    def num_copied_bytes(self) -> int:
        """Return the memory of the copies on this rank, in bytes; it is kept from the first guess
        on."""
        changed = chain.from_iterable(tile.changed() for tile in self._tiles())
        return sum(values.nbytes for values in changed)

    def wait(self) -> None:
        """Wait for the weights; raise RuntimeError while a step is not settled, because its weights
        may be wrong."""
        self.require_settled()
        super().wait()

    def numbers(self) -> dict[str, Any]:
        """Return the plain state; raise RuntimeError while a step is not settled, because the
        numbers may be wrong."""
        self.require_settled()
        return super().numbers()

    def require_settled(self) -> None:
        """Raise RuntimeError if the last step is not settled."""
        if self._guessed is not None:
            raise RuntimeError("the last step is not settled: call `settle` first")

    def _is_as_guessed(self, agreed: Consensus, scale: Tensor) -> bool:
        """Return True if the guess is valid. scale: loss scale of the step."""
        unclipped = self._clip_factor(agreed.norm / scale) == 1
        return bool((agreed.forbids("skip") == 0) & unclipped)

    def _tiles(self) -> Iterator[Tile]:
        """Yield everything that an update changes."""
        for buffer_slices in self._buffer_slices:
            for slice_tiles in buffer_slices.slices:
                yield from slice_tiles.tiles
        yield from self._whole_tiles()

    def _whole_tiles(self) -> Iterator[Tile]:
        """Yield what the updates of whole matrices, and those from counts, change."""
        for updates in self._whole_updates:
            yield from updates.tiles()

    def _counters(self) -> list[Tensor]:
        """Return the tensors that a step changes besides those of the tiles; the scalars of the
        rule are separate."""
        return [self.steps, *self.scaler.tensors()]

    def _update_copied(self, tile: Tile, step: Step) -> None:
        """Copy everything that an update of the tile changes, then update it. The gradients are not
        changed."""
        self._copy(tile)
        # the C kernels do not write to the gradients
        if self.kernels is None or not self.kernels.updates(tile):
            tile = replace(tile, grads=tile.grads.clone())
        self._update_tile(tile, step)

    def _copy(self, tile: Tile) -> None:
        changed = tile.changed()
        copies = self._copies_of.setdefault(id(tile), [])
        if not copies:
            copies += map(torch.empty_like, changed)
        for copy, values in zip(copies, changed, strict=True):
            copy.copy_(values)

    def _go_back(self, guessed: _Guessed) -> None:
        """Restore the state before the guess, bit for bit, on this rank and in the weights of the
        others."""
        self.wait()
        for tile in self._tiles():
            copies = self._copies_of[id(tile)]
            for values, copy in zip(tile.changed(), copies, strict=True):
                values.copy_(copy)
        # other ranks have this rank's weights of the guess
        for buffer in self.all_buffers():
            wait = buffer.start_collect()
            wait()
        for counter, value in zip(self._counters(), guessed.counters, strict=True):
            counter.copy_(value)
        self.rule.load_scalars(guessed.scalars)
