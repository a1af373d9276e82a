"""Muon's update of matrices whose slices are spread over ranks.

    1. average  each rank updates the momentum of its own slices, elementwise. The result is the
                direction of its slices: the momentum, with `nesterov` one step further
    2. collect  each matrix's direction goes to one rank, its owner (`matrix_exchange`)
    3. compute  each owner orthogonalizes its matrices, one after the other
    4. return   every rank receives its slices of the results and updates its slices of the weights

All elements are given to the owner in the dtype of the iteration, so bf16 halves what is sent and
changes nothing: the iteration would round them first anyway. A matrix is computed by the same calls
on the same shape in every layout, and each elementwise operation here rounds once; so equal
gradients give equal bits whatever the layout.

A stacked parameter (query, key and value; gate and up) is several logical matrices, each of which
is computed alone; with `per_head` each head of one is, on the owner of all. Gradients are only
read. A buffer holds either matrices for Muon or tensors for AdamW, because their moments differ.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import has_layout, layout_of, parameters_of
from megaprec.errors import Problem, UserError
from megaprec.optim.ranks import Ranks
from megaprec.optim.rules.muon.matrix_exchange import HeldSpan, MatrixExchange, ReceivedElements
from megaprec.optim.rules.muon.newton_schulz import MatrixStack, orthogonalized
from megaprec.optim.rules.muon.rule import MUON_MOMENTUM, NOT_HIDDEN, Muon, moments_of
from megaprec.optim.rules.param_groups import Factors, Group, StepOf, factors
from megaprec.optim.rules.update_rules import Step, UpdateRule
from megaprec.optim.state.flat_buffer import Buffer, Piece
from megaprec.optim.state.update_tile import Tile
from megaprec.precision.patterns import match_patterns, require_used


@dataclass(frozen=True)
class LocalElements:
    """Elements of a matrix's slice that this rank updates.

    span: their place in the matrix, and which of them this rank sends to its owner.
    tiles: the elements, in order.
    factors: of learning rate and weight decay, by the parameter group.
    scale: Muon's own factor of the learning rate, which the shape of the matrix decides, with
        `per_head` the shape of one head's rows.
    """

    span: HeldSpan
    tiles: tuple[Tile, ...]
    factors: Factors
    scale: float


class _Move(NamedTuple):
    """Tensors that update the weights of one tile of n elements, see `_move`.

    direction: [n], of the orthogonalized matrix, in the dtype of the iteration.
    step: the numbers of the step for the tile's group.
    scale: Muon's own factor of the learning rate.
    """

    direction: Tensor
    step: Step
    scale: float


class MatrixUpdates:
    """The updates of all buffers whose matrices Muon orthogonalizes.

    buffers: all of this rank.
    stage: all ranks of this pipeline stage.
    Collective over `stage`. Raises RuntimeError as `MatrixExchange`.
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
        stacks = self._stacks(stage, device)
        # ranks call a matrix by its number in this order, which all of the stage share
        self._stack_of_matrix = list(stacks.values())
        matrix_numbers = {name: number for number, name in enumerate(stacks)}
        self._local: list[list[LocalElements]] = []  # of each buffer
        for number in range(len(self.buffers)):
            of_buffer = self._local_elements(number, matrix_numbers, groups)
            self._local.append(list(of_buffer))
        has_fp64 = any(buffer.plan.masters == torch.float64 for buffer in self.buffers)
        widest_masters = torch.float64 if has_fp64 else torch.float32
        self._dtype = rule.iteration_dtype(widest_masters)
        of_all_buffers = chain.from_iterable(self._local)
        self._exchange = MatrixExchange(
            shapes={name: stack.whole for name, stack in stacks.items()},
            costs=[stack.flops(rule.ns_steps) for stack in self._stack_of_matrix],
            held_spans=[local.span for local in of_all_buffers],
            num_buffers=len(self.buffers),
            stage=stage,
            device=device,
            dtype=self._dtype,
        )

    def _stacks(self, stage: Axis, device: torch.device) -> dict[str, MatrixStack]:
        """Return, for each logical matrix of the stage by its name, how many matrices of which
        shape it is orthogonalized as: one, or with `per_head` one for each head. Collective over
        `stage` if a buffer holds experts."""
        local: dict[str, MatrixStack] = {}
        for buffer in self.buffers:
            for piece in buffer.pieces:
                local[piece.part.name] = self.rule.matrices_of(piece.part)
        # Without experts on ranks of their own, all ranks of a stage have the same matrices in the
        # same order. With them each has others: the gather brings all into one order.
        if not any(buffer.holds_experts for buffer in self.buffers):
            return local
        of_stage = gather_entries(local, stage, device)
        # JSON made lists of them
        return {name: MatrixStack(*sizes) for name, sizes in of_stage.items()}

    def _local_elements(
        self,
        buffer_number: int,
        matrix_numbers: dict[str, int],
        groups: Sequence[Group],
    ) -> Iterator[LocalElements]:
        """Yield, for each matrix of a buffer, the elements that this rank updates: those in its
        shard of the buffer, whichever rank orthogonalizes the matrix.

        matrix_numbers: by logical name.
        """
        buffer = self.buffers[buffer_number]
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            matrix_number = matrix_numbers[part.name]
            span = held_span_of(buffer, owned.piece, matrix_number, buffer_number)
            in_shard = owned.in_shard
            tiles = tuple(buffer.tiles(in_shard.start, in_shard.stop))
            group_factors = factors(part, groups, self.rule)
            stack = self.rule.matrices_of(part)
            scale = self.rule.factor(stack.shape)
            yield LocalElements(span, tiles, group_factors, scale)

    def apply(self, step_of: StepOf, done: Callable[[Buffer], None]) -> None:
        """Update all matrices.

        step_of: returns the numbers of the step for factors of learning rate and weight decay.
        done: called with each updated buffer.
        Collective over the stage.
        """
        matrices = self._collect_directions(step_of)
        for number, direction in matrices.items():
            matrices[number] = self._orthogonalize(number, direction)
        for number, buffer in enumerate(self.buffers):
            # without names, which would keep what was sent and received until the next exchange
            self._move_buffer(number, self._exchange.start_return(number, matrices)(), step_of)
            done(buffer)  # starts the buffer's all-gather, which overlaps with the next exchange

    def _orthogonalize(self, matrix_number: int, direction: Tensor) -> Tensor:
        """Return the orthogonalized direction [m, n] of a matrix, or of each of its heads."""
        stack = self._stack_of_matrix[matrix_number]
        rule = self.rule
        # a loop may step within its own autocast
        with torch.autocast(direction.device.type, enabled=False):
            result = orthogonalized(
                stack.apart(direction), rule.ns_coefficients, rule.ns_steps, rule.ns_eps
            )
        return result.view_as(direction)

    def _move_buffer(self, buffer_number: int, results: Sequence[Tensor], step_of: StepOf) -> None:
        """Update the weights of a buffer that this rank holds.

        results: the flat elements of the orthogonalized matrices, in the order of the buffer's
            `LocalElements`.
        """
        moves: list[_Move] = []
        tiles: list[Tile] = []
        for local, result in zip(self._local[buffer_number], results, strict=True):
            step = step_of(local.factors)
            directions = result.split([len(tile.weights) for tile in local.tiles])
            moves += [_Move(direction, step, local.scale) for direction in directions]
            tiles += [tile.without_moments() for tile in local.tiles]
        on_device = self.buffers[buffer_number].on_device(tiles)
        for tile, move in zip(on_device, moves, strict=True):
            _move(tile, *move)

    def _collect_directions(self, step_of: StepOf) -> dict[int, Tensor]:
        """Update the momenta of all slices that this rank holds, and return the whole directions
        [m, n] of the matrices that it owns, by number. Collective over the stage."""
        # every exchange starts before the first wait, so that they overlap with the updates
        waits: list[Callable[[], list[ReceivedElements]]] = []
        for number in range(len(self.buffers)):
            # without a name, which would keep the directions after they were sent
            wait = self._exchange.start_collect(number, self._directions(number, step_of))
            waits.append(wait)
        received: list[ReceivedElements] = []
        for wait in waits:
            received += wait()
        return self._exchange.assemble(received)

    def _directions(self, buffer_number: int, step_of: StepOf) -> list[Tensor]:
        """Update the momentum of a buffer, and return the direction of each of its `LocalElements`:
        a flat tensor in the dtype of the iteration."""
        tiles: list[Tile] = []
        steps: list[Step] = []  # of each tile
        for local in self._local[buffer_number]:
            tiles += [tile.without_masters() for tile in local.tiles]
            steps += [step_of(local.factors)] * len(local.tiles)
        on_device = self.buffers[buffer_number].on_device(tiles)
        tile_directions = [
            self._direction(tile, step) for tile, step in zip(on_device, steps, strict=True)
        ]
        # an exchange takes one flat tensor for each slice of a matrix
        remaining = iter(tile_directions)
        directions: list[Tensor] = []
        for local in self._local[buffer_number]:
            of_slice = list(islice(remaining, len(local.tiles)))
            directions.append(torch.cat(of_slice))
        return directions

    def _direction(self, tile: Tile, step: Step) -> Tensor:
        """Update the momentum of a tile of n elements, and return [n], what is orthogonalized of
        them, in the dtype of the iteration. If `step.skip` is 1, the momentum stays as it is."""
        momentum = self.rule.momentum
        (average,) = tile.wide_moments()
        gradients = step.divided(tile.wide_gradients())
        weighted_gradients = gradients.mul_(1 - momentum)
        new_average = (average * momentum).add_(weighted_gradients)
        direction = new_average
        if self.rule.nesterov:
            direction = weighted_gradients.add_(new_average * momentum)
        # selected, not multiplied by 0: the new average of a skipped step may be NaN
        average.copy_(torch.where(step.skip == 0, new_average, average))
        tile.store_moments([average], step.applied)
        return direction.to(self._dtype)


def held_span_of(buffer: Buffer, piece: Piece, matrix: int, buffer_number: int) -> HeldSpan:
    """Return which elements of a piece of the buffer, a slice of a matrix, this rank holds, and
    which of these it sends to the owner of the matrix: ranks that hold the same elements divide
    them, so that each element is sent once.

    matrix: its number among the matrices of the stage.
    """
    part = piece.part
    held = piece.overlap(buffer.start, buffer.stop)
    sent = piece.overlap(*buffer.share)  # within those that are held
    # of a part that several tp ranks hold, the one with copy 0 sends
    if part.copy or not sent:
        sent = range(held.start, held.start)  # none
    dim = -1 if part.dim is None else part.dim  # a table of integers has no None
    return HeldSpan(
        matrix=matrix,
        buffer=buffer_number,
        dim=dim,
        shards=part.shards,
        shard=part.shard,
        start=held.start - piece.start,
        stop=held.stop - piece.start,
        sent_start=sent.start - piece.start,
        sent_stop=sent.stop - piece.start,
    )


def _move(tile: Tile, direction: Tensor, step: Step, scale: float) -> None:
    """Update the weights of a tile of n elements by its orthogonalized direction [n]. Nothing
    changes if `step.skip` is 1. scale: Muon's own factor of the learning rate."""
    weights = tile.wide_masters()
    decayed = weights * (1 - step.lr * step.weight_decay)
    move = direction.to(weights.dtype) * (step.lr * scale)
    updated = decayed.sub_(move)
    weights.copy_(torch.where(step.skip == 0, updated, weights))
    tile.store_and_round_masters(weights, step.applied)


def require_muon_patterns(rule: UpdateRule, model_parts: Sequence[nn.Module], ranks: Ranks) -> None:
    """Raise UserError, on every rank, if Muon's patterns do not fit the model. Collective over the
    world.

    A pattern must match a parameter; of the default patterns one must, because a model of other
    names may have embeddings that they do not know. With `per_head` a matrix must have heads.
    Logical tensors of one parameter must be updated by one rule.
    """
    if not isinstance(rule, Muon):
        return
    key = "optimizer.options by_adamw"
    names: set[str] = set()
    for parameter in parameters_of(model_parts):
        names |= {part.name for part in layout_of(parameter).parts}
    sorted_names = sorted(names)
    if rule.by_adamw == NOT_HIDDEN:
        # embeddings and heads that are frozen are told from hidden layers too
        frozen_names = _frozen_names(model_parts)
        _require_default_match(key, sorted_names, frozen_names, ranks)
    else:
        require_used(key, rule.by_adamw, sorted_names, ranks.world, ranks.device)
    _require_heads(rule, model_parts, ranks)
    # The ranks exchange JSON, which has no `Problem`: a problem travels as its sentence, with the
    # code and the fields of which it is made again.
    local_problems: dict[str, Any] = {}
    for problem in _problems_of_split_parameters(rule, model_parts):
        local_problems[str(problem)] = (problem.code, problem.fields)
    entries = gather_entries(local_problems, ranks.world, ranks.device)
    problems = [Problem(text, code, fields) for text, (code, fields) in entries.items()]
    if problems:
        raise UserError(*problems)


def _frozen_names(model_parts: Sequence[nn.Module]) -> set[str]:
    """Return the logical names of this rank's parameters that are not trained."""
    names: set[str] = set()
    for module in model_parts:
        for parameter in module.parameters():
            if has_layout(parameter) and not parameter.requires_grad:
                names |= {part.name for part in layout_of(parameter).parts}
    return names


def _require_default_match(
    key: str, names: Sequence[str], frozen_names: Collection[str], ranks: Ranks
) -> None:
    """Raise UserError, on every rank, if none of the default patterns matches a parameter of any
    rank. Collective over the world.

    names: logical names of this rank's parameters, sorted. frozen_names: of those not trained.
    """
    all_names = [*names, *frozen_names]
    is_local_match = any(match_patterns(NOT_HIDDEN, all_names))
    is_match = torch.tensor(float(is_local_match), device=ranks.device)
    if ranks.world.max_(is_match):
        return
    # one of each rank, for the message
    first_name = dict.fromkeys(names[:1])
    first_names = gather_entries(first_name, ranks.world, ranks.device)
    if first_names:  # else nothing is trained, which the optimizer refuses for every rule
        raise UserError.of(
            "optimizer.muon_without_names",
            key=key,
            not_hidden=" or ".join(NOT_HIDDEN),
            names=min(first_names),
        )


def _require_heads(rule: Muon, model_parts: Sequence[nn.Module], ranks: Ranks) -> None:
    """Raise UserError, on every rank, if the rule has `per_head` and no rank has a matrix of
    several heads that Muon updates. Collective over the world if the rule has `per_head`."""
    if not rule.per_head:
        return
    has_heads = False
    for parameter in parameters_of(model_parts):
        for part in layout_of(parameter).parts:
            if not rule.orthogonalizes(part):
                continue
            stack = rule.matrices_of(part)
            if stack.count > 1:
                has_heads = True
    has_heads_here = torch.tensor(float(has_heads), device=ranks.device)
    if not ranks.world.max_(has_heads_here):
        raise UserError.of("optimizer.muon_without_heads")


def _problems_of_split_parameters(
    rule: Muon, model_parts: Sequence[nn.Module]
) -> Iterator[Problem]:
    """Yield a problem for each parameter whose logical tensors would be updated by two rules."""
    for parameter in parameters_of(model_parts):
        try:
            moments_of(rule, parameter)
        except UserError as error:
            yield from error.problems
