"""Muon's update: momentum where it is held, orthogonalization where a whole matrix is, weights
where they are held.

    1. average    each rank updates the momentum of its own slices, elementwise, and has the direction of its slices
    2. collect    each matrix's direction goes to its owner (`megaprec.optim.matrix_exchange`)
    3. compute    each owner orthogonalizes its matrices, one after the other
    4. return     every rank receives its slices of the results and updates its slices of the weights

All elements are given to the owner in the dtype of the iteration, so bf16 halves what is sent and
changes nothing: the iteration would round them first anyway. A matrix is computed by the same calls
on the same shape in every layout, and each elementwise operation here rounds once; so equal
gradients give equal bits whatever the layout.

A stacked parameter (query, key and value; gate and up) is several logical matrices, each of which
is computed alone. Gradients are only read. A buffer holds either matrices for Muon or tensors for
AdamW, because their moments differ.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.comm.layout import layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer, Piece
from megaprec.optim.group_factors import Factors, Group, factors
from megaprec.optim.matrix_exchange import MatrixExchange, Run
from megaprec.optim.model_intake import Ranks
from megaprec.optim.muon import MUON_MOMENTUM, NOT_HIDDEN, Muon, moments_of
from megaprec.optim.newton_schulz import iteration_flops, orthogonalized
from megaprec.optim.update_rules import Step, UpdateRule
from megaprec.optim.update_tile import Tile
from megaprec.precision.patterns import matched, require_used


@dataclass(frozen=True)
class Held:
    """Elements of a matrix's slice that this rank updates. tiles: in order. scale: of the learning
    rate.

    factors: of learning rate and weight decay.
    """

    run: Run
    tiles: tuple[Tile, ...]
    factors: Factors
    scale: float


class MatrixUpdates:
    """The updates of all buffers whose matrices Muon orthogonalizes. stage: all ranks of this
    pipeline stage.

    buffers: all of this rank. Collective over `stage`. Raises RuntimeError as `MatrixExchange`.
    """

    def __init__(
        self,
        rule: Muon,
        buffers: Sequence[Buffer],
        groups: Sequence[Group],
        stage: Axis,
        device: torch.device,
    ) -> None:
        self.rule = rule
        self.buffers = [buffer for buffer in buffers if MUON_MOMENTUM in buffer.state]
        own = {p.part.name: p.part.shape for buffer in self.buffers for p in buffer.pieces}
        # then other ranks have other matrices
        spread = any(buffer.of_experts for buffer in self.buffers)
        if spread:
            shapes = {name: tuple(s) for name, s in everyones(own, stage, device).items()}
        else:
            shapes = own
        numbers = {name: number for number, name in enumerate(shapes)}
        self._held = [
            list(self._held_of(turn, numbers, groups)) for turn in range(len(self.buffers))
        ]
        wide = any(buffer.plan.masters == torch.float64 for buffer in self.buffers)
        self._dtype = rule.iteration_dtype(torch.float64 if wide else torch.float32)
        costs = [iteration_flops(shape, rule.ns_steps) for shape in shapes.values()]
        runs = [held.run for some in self._held for held in some]
        self._exchange = MatrixExchange(
            shapes, costs, runs, len(self.buffers), stage, device, self._dtype
        )

    @staticmethod
    def of(
        rule: UpdateRule,
        buffers: Sequence[Buffer],
        groups: Sequence[Group],
        mesh: DeviceMesh | None,
        ranks: Ranks,
    ) -> "MatrixUpdates":
        """Return the updates of whole matrices: none unless the rule is Muon. Collective over the
        world if it is."""
        if not isinstance(rule, Muon):
            return MatrixUpdates(Muon(), (), (), Axis("stage"), ranks.device)
        return MatrixUpdates(
            rule, buffers, groups, ranks.dp if mesh is None else Axis.stage(mesh), ranks.device
        )

    def _held_of(
        self, turn: int, numbers: dict[str, int], groups: Sequence[Group]
    ) -> Iterator[Held]:
        """Yield what this rank holds of the matrices of buffer number `turn`."""
        buffer = self.buffers[turn]
        for piece in buffer.pieces:
            first = max(piece.start, buffer.first)
            last = min(piece.stop, buffer.last)
            if first < last:
                run = run_of(buffer, piece, numbers[piece.part.name], turn)
                tiles = tuple(buffer.blocks(first - buffer.first, last - buffer.first))
                yield Held(
                    run, tiles, factors(piece.part, groups), self.rule.factor(piece.part.shape)
                )

    def tiles(self) -> Iterator[Tile]:
        """Yield everything that an update changes."""
        return (tile for some in self._held for held in some for tile in held.tiles)

    def apply(self, step_of: Callable[[Factors], Step], done: Callable[[Buffer], None]) -> None:
        """Update all matrices. step_of: numbers of the step, by factors. done: called with each
        updated buffer.

        Collective over the stage.
        """
        results = self._collected(step_of)
        rule = self.rule
        for number, matrix in results.items():
            with torch.autocast(
                matrix.device.type, enabled=False
            ):  # a loop may step within its own
                results[number] = orthogonalized(
                    matrix, rule.ns_coefficients, rule.ns_steps, rule.ns_eps
                )
        for turn, buffer in enumerate(self.buffers):
            for held, result in zip(
                self._held[turn], self._exchange.start_return(turn, results)(), strict=True
            ):
                _move(held, result, step_of(held.factors))
            done(buffer)

    def _collected(self, step_of: Callable[[Factors], Step]) -> dict[int, Tensor]:
        """Update all momenta, and return the whole directions of this rank's own matrices, by
        number."""
        turns = range(len(self.buffers))
        arriving = [
            self._exchange.start_collect(turn, self._directions(turn, step_of)) for turn in turns
        ]
        return self._exchange.whole([*chain.from_iterable(finish() for finish in arriving)])

    def _directions(self, turn: int, step_of: Callable[[Factors], Step]) -> list[Tensor]:
        """Update the momentum of a buffer, and return the directions of its runs in the dtype of
        the iteration."""
        made = []
        for held in self._held[turn]:
            step = step_of(held.factors)
            made.append(
                torch.cat([self._direction(tile, step).to(self._dtype) for tile in held.tiles])
            )
        return made

    def _direction(self, tile: Tile, step: Step) -> Tensor:
        """Update the momentum of a tile, and return what is orthogonalized. Nothing changes if
        `step.found` is 1."""
        momentum, grads, (old,) = self.rule.momentum, tile.wide_gradients(), tile.wide_moments()
        fresh = (grads / step.divisor).mul_(1 - momentum)
        average = (old * momentum).add_(fresh)
        direction = fresh.add_(average * momentum) if self.rule.nesterov else average
        old.copy_(torch.where(step.found == 0, average, old))
        tile.keep_moments([old], step.steps)
        return direction


def run_of(buffer: Buffer, piece: Piece, matrix: int, turn: int) -> Run:
    """Return what this rank holds of a piece, of which it gives the owner what no other rank
    gives."""
    first = max(piece.start, buffer.first)
    last = min(piece.stop, buffer.last)
    given = max(first, buffer.share[0]), min(last, buffer.share[1])
    if piece.part.copy or given[0] >= given[1]:
        given = first, first
    part = piece.part
    from_start = [place - piece.start for place in (first, last, *given)]
    return Run(
        matrix, turn, -1 if part.dim is None else part.dim, part.shards, part.shard, *from_start
    )


def _move(held: Held, result: Tensor, step: Step) -> None:
    """Update the weights of a run by a flat result. Nothing changes if `step.found` is 1."""
    for tile, part in zip(
        held.tiles, result.split([len(tile.weights) for tile in held.tiles]), strict=True
    ):
        old = tile.wide_weights()
        new = (old * (1 - step.lr * step.weight_decay)).sub_(
            part.to(old.dtype) * (step.lr * held.scale)
        )
        old.copy_(torch.where(step.found == 0, new, old))
        tile.keep_masters(old, step.steps)


def require_understood(rule: UpdateRule, parts: Sequence[nn.Module], ranks: Ranks) -> None:
    """Raise UserError, on every rank, if Muon's patterns do not fit the model. Collective over the
    world.

    A pattern must match a parameter; of the default patterns one must, because a model of other
    names may have embeddings that they do not know. Logical tensors of one parameter must be
    updated by one rule.
    """
    if not isinstance(rule, Muon):
        return
    key = "optimizer.options by_adamw"
    world = ranks.world
    device = ranks.device
    names = sorted({part.name for p in parameters_of(parts) for part in layout_of(p).parts})
    if rule.by_adamw != NOT_HIDDEN:
        require_used(key, rule.by_adamw, names, world, device)
    elif not world.max_(torch.tensor(float(any(matched(NOT_HIDDEN, names))), device=device)):
        raise UserError(
            f"{key}: no parameter is called {' or '.join(NOT_HIDDEN)}, so Muon cannot tell "
            "embeddings and heads, which "
            "AdamW should update, from hidden layers: give their patterns, [] for none; "
            f"names are like {names[0]}"
        )
    if problems := everyones(dict.fromkeys(_split(rule, parts)), world, device):
        raise UserError(*problems)


def _split(rule: Muon, parts: Sequence[nn.Module]) -> Iterator[str]:
    for parameter in parameters_of(parts):
        try:
            moments_of(rule, parameter)
        except UserError as error:
            yield from error.problems
