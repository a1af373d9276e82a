"""The tensors of a model that a step moved, and those that it left as they were.

Digests of the masters before and after a step tell, for each logical tensor, if a bit of it has
changed. A tensor whose gradient was zero everywhere need not move: an expert that got no token, or
a tensor that the loss does not depend on. Any other must, as soon as its update is not lost to the
rounding of its masters. Gradients are read once, in the steps that are checked.

The reach of a tensor says how large its update is beside that rounding. It is the largest ratio of
a gradient, at most 1, to its weight, over the relative distance of neighbouring numbers of the
masters' dtype, times the tensor's factor of the learning rate. Times the rate, a reach above 1 is
an update that rounding does not lose.

Frozen parameters have no gradient and are in no buffer; their digests must stay the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import Part, has_layout, layout_of
from megaprec.diagnose.held_state import digest_frozen
from megaprec.diagnose.state_digest import WEIGHT, StateDigest
from megaprec.optim.decision.step_report import StepObserver, StepReport
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer

# An update is taken to be at least rate times clipped gradient, divided by this factor. Rules that
# divide by the size of gradients make the updates of small ones larger than that.
SAFETY = 8.0
TINY = 1e-30  # in place of a weight of zero, which any update moves
BLOCK = 1 << 20  # elements that are compared at once, so that temporaries are small
# In place of a reach, below all of them: of a tensor whose factor of the rate is 0, and of one that
# this rank does not hold.
STILL = -1.0
UNSEEN = -2.0


@dataclass(frozen=True)
class Moved:
    """The tensors of a checked step by logical name, the same on every rank.

    moved: those of which a bit has changed.
    unmoved: those that have not changed though their update was large enough to show.
    lost: those that have not changed, with a gradient so small that rounding may have lost it.
    without_gradient: those whose gradient was zero everywhere, whether decay has moved them or not.
    frozen_moved: those that are not trained, or have a rate of 0, and have changed anyway.
    """

    moved: tuple[str, ...]
    unmoved: tuple[str, ...]
    lost: tuple[str, ...]
    without_gradient: tuple[str, ...]
    frozen_moved: tuple[str, ...]


class Movement(StepObserver):
    """Compares the weights before and after steps.

    model_parts: the stages of this rank. factor_of: the factor of the learning rate of a logical
    tensor. Methods are collective over the world.
    """

    def __init__(
        self,
        optimizer: ParallelAMPOptimizer,
        model_parts: Sequence[nn.Module],
        factor_of: Callable[[Part], float],
    ) -> None:
        self._optimizer = optimizer
        self._parts = model_parts
        self._factor_of = factor_of
        self._digest = StateDigest(optimizer, weights_only=True)
        self._before: Mapping[str, str] = {}
        self._balanced = self._balanced_names()
        self._frozen = self._digest_frozen()
        self._reach: dict[str, Tensor] = {}  # of this rank's tensors, by logical name

    def remember(self) -> None:
        """Note the weights as they are, with which those after a step are compared."""
        self._before = self._weights()

    def watch(self) -> None:
        """Look at the gradients of the next step."""
        self._optimizer.observers.append(self)

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Note the reach of each tensor that this rank holds elements of."""
        self._reach = {}
        for buffer in buffers:
            if buffer.holds_loads:  # moved by counts, which may be equal
                continue
            for name, reach in _reaches(buffer, scale, self._factor_of):
                earlier = self._reach.get(name)
                self._reach[name] = reach if earlier is None else torch.maximum(earlier, reach)

    def after(self, report: StepReport) -> Moved:
        """Return what the step has moved, and remember the weights after it."""
        self.unwatch()
        now = self._weights()
        moved = [name for name, digits in now.items() if digits != self._before[name]]
        self._before = now
        # times a reach: the least update, in distances of neighbouring numbers
        rate = report.lr * self._clip_factor(report) / SAFETY
        unmoved: list[str] = []
        lost: list[str] = []
        without_gradient: list[str] = []
        still_moved: list[str] = []
        reach_by_name = self._reaches_of_all(list(now))
        for name, reach in reach_by_name.items():
            if reach == 0:
                without_gradient.append(name)
            elif reach == STILL and name in moved:
                still_moved.append(name)
            elif reach > 0 and name not in moved:
                is_large_enough = reach * rate > 1
                if is_large_enough:
                    unmoved.append(name)
                else:
                    lost.append(name)
        frozen_moved = (*still_moved, *self._moved_frozen())
        return Moved(
            moved=tuple(moved),
            unmoved=tuple(unmoved),
            lost=tuple(lost),
            without_gradient=tuple(without_gradient),
            frozen_moved=frozen_moved,
        )

    def changed(self, applied: bool) -> list[str]:
        """Return the tensors that have changed since `remember` though none should have, frozen
        ones included.

        applied: whether a step was applied. What balances loads may have changed then, because
            counts move it, whatever the learning rate.
        """
        self.unwatch()
        now = self._weights()
        changed = [name for name, digits in now.items() if digits != self._before[name]]
        if applied:
            changed = [name for name in changed if name not in self._balanced]
        self._before = now
        return [*changed, *self._moved_frozen()]

    def untrained(self, patterns_match: Callable[[str], bool]) -> list[str]:
        """Return the logical names of parameters that no step can move though the run trains them:
        frozen ones that match no pattern, and trained ones that are not in the optimizer.

        patterns_match: tells if the run freezes a logical name.
        """
        ids_in_optimizer: set[int] = set()
        for buffer in self._optimizer.all_buffers():
            ids_in_optimizer.update(map(id, buffer.parameters))
        names: dict[str, int] = {}
        for model_part in self._parts:
            for parameter in filter(has_layout, model_part.parameters()):
                if id(parameter) in ids_in_optimizer:
                    continue
                for part in layout_of(parameter).parts:
                    if parameter.requires_grad or not patterns_match(part.name):
                        names[part.name] = 1
        names_of_all = gather_entries(names, self._optimizer.world, self._optimizer.device)
        return sorted(names_of_all)

    def unwatch(self) -> None:
        """Look at no more gradients."""
        if self in self._optimizer.observers:
            self._optimizer.observers.remove(self)

    def _balanced_names(self) -> set[str]:
        """Return the logical names of what is moved by counts of tokens and not by gradients."""
        names: dict[str, int] = {}
        for buffer in self._optimizer.all_buffers():
            if buffer.holds_loads:
                own_names = [piece.part.name for piece in buffer.pieces]
                names |= dict.fromkeys(own_names, 1)
        names_of_all = gather_entries(names, self._optimizer.world, self._optimizer.device)
        return set(names_of_all)

    def _weights(self) -> Mapping[str, str]:
        """Return the digest of each tensor's masters by logical name, the same on every rank."""
        digests = self._digest.make()
        return digests[WEIGHT]

    def _clip_factor(self, report: StepReport) -> float:
        """Return the factor by which the step has clipped its gradients."""
        clip = self._optimizer.clip
        if not clip or not report.grad_norm > clip:
            return 1.0
        return clip / report.grad_norm

    def _reaches_of_all(self, names: Sequence[str]) -> dict[str, float]:
        """Return the largest reach on any rank by logical name; UNSEEN if no rank has one."""
        device = self._optimizer.device
        unseen = torch.full((), UNSEEN, dtype=torch.float64, device=device)
        rows = [self._reach.get(name, unseen) for name in names]
        self._reach = {}
        table = torch.stack(rows)
        largest = self._optimizer.world.max_(table)
        return dict(zip(names, largest.tolist(), strict=True))

    def _digest_frozen(self) -> dict[str, Tensor]:
        """Return the digests of this rank's frozen tensors, int64 [2] each, by their keys."""
        return {held.key: held.digest for held in digest_frozen(self._parts)}

    def _moved_frozen(self) -> tuple[str, ...]:
        """Return the names of frozen tensors that have changed since the last call."""
        now = self._digest_frozen()
        before = self._frozen
        self._frozen = now
        have_moved = [(now[key] != digest).any() for key, digest in before.items()]
        world = self._optimizer.world
        device = self._optimizer.device
        has_any = torch.stack(have_moved).any() if have_moved else torch.zeros((), dtype=torch.bool)
        has_any_here = has_any.to(device).float()
        # nearly always none has, and then names need not be exchanged
        if not world.max_(has_any_here).item():
            return ()
        names: dict[str, int] = {}
        for key, has_moved in zip(before, have_moved, strict=True):
            if has_moved:
                names[_name_of(key)] = 1
        names_of_all = gather_entries(names, world, device)
        return tuple(sorted(names_of_all))


def _name_of(key: str) -> str:
    """Return the logical name in a key of `HeldDigest`."""
    name_and_place = key.removeprefix(f"{WEIGHT} ")
    name, _, _ = name_and_place.partition(" [")
    return name


def _reaches(
    buffer: Buffer, scale: Tensor, factor_of: Callable[[Part], float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the logical name of each piece that this rank owns, with its reach: float64 []."""
    masters = buffer.masters
    for owned in buffer.owned_pieces():
        part = owned.piece.part
        factor = factor_of(part)
        # the relative distance of neighbouring numbers: smaller changes may be lost
        if masters is not None:
            weights = buffer.to_device(masters[owned.in_shard])
            distance = torch.finfo(masters.dtype).eps
        else:  # FP32, of which the weights are the upper bits
            weights = buffer.own_weights[owned.in_shard]
            distance = torch.finfo(torch.float32).eps
        gradients = buffer.local_grads[owned.in_shard]
        reach = torch.full((), STILL, dtype=torch.float64, device=weights.device)
        if factor:
            largest_ratio = _largest_ratio(gradients, weights, scale)
            reach = largest_ratio * factor / distance
        yield part.name, reach


def _largest_ratio(gradients: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """Return the largest ratio of a gradient, without the loss scale and at most 1, to its weight:
    float64 []."""
    largest = torch.zeros((), dtype=torch.float64, device=weights.device)
    blocks_of_gradients = gradients.detach().split(BLOCK)
    blocks_of_weights = weights.detach().split(BLOCK)
    blocks = zip(blocks_of_gradients, blocks_of_weights, strict=True)
    for some_gradients, some_weights in blocks:
        # nothing in place: `float` of FP32 is the weight itself
        sizes = (some_gradients.float() / scale).abs().clamp(max=1)
        weight_sizes = some_weights.float().abs().clamp(min=TINY)
        ratios = sizes / weight_sizes
        largest = torch.maximum(largest, ratios.amax().double())
    return largest
