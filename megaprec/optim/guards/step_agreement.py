"""Checks, as a loop goes on, that ranks have given one loss and have gradients of one model.

Ranks that compute one loss together must give `step` that loss, and have the same gradients of the
parameters that each of them holds whole. Every rank of a pipeline stage holds a part of the same
parameters, and all of them must have gradients for the same parameters. No collective would detect
a contradiction: copies of norms and biases drift apart, which no loss and no norm shows.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries
from megaprec.comm.layout import layout_of
from megaprec.comm.main_grad import received_gradient
from megaprec.errors import UserError
from megaprec.optim.decision.consensus import DIGEST_BITS
from megaprec.optim.ranks import Ranks
from megaprec.optim.state.flat_buffer import Buffer, OwnedPiece

# the share of a loss by which ranks may differ: products are rounded to bf16 or FP16
_RELATIVE_TOLERANCE = 1e-3
# what rounding may leave of a loss whose terms cancel, as those of a policy
_ABSOLUTE_TOLERANCE = 1e-6
# The largest difference between sums of gradients, as a share of their norm, that rounding may be
# the reason of.
_MAX_DIFFERENCE = 0.05
_MAX_NAMES = 3  # that the error line gives for each rank


def require_same_loss(loss: Tensor | None, tp: Axis, world: Axis, device: torch.device) -> None:
    """Raise UserError on every rank if the ranks of a tensor-parallel group have given different
    losses.

    Each rank compares its loss with that of the first rank, within rounding. A rank other than the
    first may give None or 0, which is not compared, nor is a loss that is not finite. But if the
    first rank gives none, no other may give one. Collective over the world.
    """
    if tp.size == 1:
        return
    local_loss = _total(loss, device)
    is_absent = loss is None or bool(tp.rank > 0 and local_loss == 0)
    compared = torch.full_like(local_loss, nan) if is_absent else local_loss
    # the maximum is the first rank's loss: all others give -inf
    has_first_loss = tp.rank == 0 and loss is not None
    shown_loss = local_loss.clone() if has_first_loss else torch.full_like(local_loss, -inf)
    first_loss = tp.max_(shown_loss)
    tolerance = _RELATIVE_TOLERANCE
    if loss is not None and loss.is_floating_point():
        tolerance = max(tolerance, 4 * torch.finfo(loss.dtype).eps)
    difference = (compared - first_loss).abs()
    allowed = (tolerance * first_loss.abs()).clamp(min=_ABSOLUTE_TOLERANCE)
    differs = difference > allowed
    # the first rank has none: a loss on another rank would not be counted
    lacks_first = first_loss.isneginf()
    differs |= lacks_first
    is_comparable = first_loss.isfinite() | lacks_first
    differs &= compared.isfinite() & is_comparable
    if world.max_(differs.double()):
        raise UserError.of("optimizer.losses_differ_over_tensor_ranks")


def require_loss_of_one_stage(
    loss: Tensor | None,
    pp: Axis,
    world: Axis,
    device: torch.device,
) -> None:
    """Raise UserError on every rank if all stages of a pipeline have given one and the same loss,
    not 0.

    Losses that differ are added, as those of the routers of each stage. Collective over the world.
    """
    if pp.size == 1:
        return
    losses = torch.zeros(pp.size, dtype=torch.float64, device=device)
    losses[pp.rank] = _total(loss, device)
    losses = pp.sum_(losses)  # each stage has filled in its own
    first = losses[0]
    is_repeated = first.isfinite() & (first != 0) & (losses == first).all()
    if world.max_(is_repeated.double()):
        raise UserError.of("optimizer.loss_on_all_stages")


def require_loss_of_all_replicas(
    loss: Tensor | None,
    dp: Axis,
    world: Axis,
    device: torch.device,
) -> None:
    """Raise UserError on every rank if some replicas have given a loss and others have not.

    The mean over replicas would be too small. Collective over the world.
    """
    if dp.size == 1:
        return
    gave_loss = torch.zeros(dp.size, dtype=torch.float64, device=device)
    gave_loss[dp.rank] = float(loss is not None)
    num_given = int((world.sum_(gave_loss) > 0).sum())
    if 0 < num_given < dp.size:
        raise UserError.of("optimizer.loss_on_some_replicas", num_given=num_given, size=dp.size)


def _total(loss: Tensor | None, device: torch.device) -> Tensor:
    """Return a loss, or the sum of those of micro-batches, as float64 []; 0 for None."""
    if loss is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    return loss.detach().to(device).double().sum()


def require_same_replicated_grads(
    buffers: Sequence[Buffer],
    tp: Axis,
    world: Axis,
    device: torch.device,
) -> None:
    """Raise UserError on every rank if copies have different gradients on ranks of tp. Collective
    over the world.

    buffers: with final gradients in their own slices. Gradients that are not finite, and those that
        are missing, are not compared.
    """
    if tp.size == 1:
        return
    pieces = list(_replicated_pieces(buffers, tp))
    # of each piece: the sum, and the sum of squares
    sums = torch.zeros(len(pieces), 2, dtype=torch.float64, device=device)
    for number, (buffer, owned) in enumerate(pieces):
        gradients = buffer.local_grads[owned.in_shard]
        sums[number, 0] = gradients.sum(dtype=torch.float64)
        sums[number, 1] = gradients.double().square().sum()
        # the parameter that the piece is a part of: the last one that starts there or before
        index = bisect_right(buffer.starts, owned.piece.start) - 1
        if not received_gradient(buffer.parameters[index]):
            sums[number] = nan  # no number, so that it is not compared
    # over the ranks of tp
    largest = tp.max_(sums.clone())
    smallest = -tp.max_(-sums)
    difference = largest[:, 0] - smallest[:, 0]  # of the sums
    norms = largest[:, 1].sqrt()
    are_finite = largest.isfinite().all(1) & smallest.isfinite().all(1)
    differs = (difference > _MAX_DIFFERENCE * norms) & are_finite
    if world.max_(differs.any().float()).item():
        name = "a parameter"  # of another tensor-parallel group
        for (_, owned), is_different in zip(pieces, differs.tolist(), strict=True):
            if is_different:
                name = owned.piece.part.name
                break
        raise UserError.of("optimizer.replicated_gradients_differ", name=name)


def _replicated_pieces(buffers: Sequence[Buffer], tp: Axis) -> Iterator[tuple[Buffer, OwnedPiece]]:
    """Yield this rank's elements of parameters that every rank of tp holds whole.

    All ranks of a tensor-parallel group own the same elements of them.
    """
    for buffer in buffers:
        if buffer.holds_loads or buffer.holds_experts:
            continue
        for owned in buffer.owned_pieces():
            if owned.piece.part.copies == tp.size:
                yield buffer, owned


class Presence(NamedTuple):
    """The numbers that a rank sends about its gradients: a digest of the parameters that have none,
    and the number of those that have one."""

    digest: float
    num_gradients: int


def missing_gradients(buffers: Sequence[Buffer], by_position: bool = False) -> list[str]:
    """Return the logical names of the parameters that received no gradient in this step.

    by_position: experts are numbered by their positions on this rank, so that ranks with other
        experts have the same names.
    """
    names: list[str] = []
    parameters = chain.from_iterable(buffer.parameters for buffer in buffers)
    # by position, because every rank of a stage holds its experts at the same ones
    for number, parameter in enumerate(parameters):
        if received_gradient(parameter):
            continue
        layout = layout_of(parameter)
        if by_position and layout.expert:
            names.append(f"expert {number}")
        else:
            names.append(layout.parts[0].name)
    return names


def summarize_presence(buffers: Sequence[Buffer], settings: Sequence[str] = ()) -> Presence:
    """Return what this rank sends about its gradients. settings: lines that all ranks of a stage
    must share too."""
    names = missing_gradients(buffers, by_position=True)
    num_parameters = sum(len(buffer.parameters) for buffer in buffers)
    digest = _digest_of_names([*names, *settings])
    return Presence(digest, num_parameters - len(names))


def _digest_of_names(names: Sequence[str]) -> float:
    """Return a number that identifies the list of names."""
    hashed = blake2b("\n".join(names).encode(), digest_size=4).digest()
    return int.from_bytes(hashed, "little") % (1 << DIGEST_BITS)


def explain_presence(
    buffers: Sequence[Buffer],
    ranks: Ranks,
    any_gradient: bool,
    settings: Sequence[str] = (),
) -> str:
    """Return a line that says why no step can be made of the gradients. Collective over the world.

    any_gradient: True if a parameter of some rank has one.
    settings: lines that all ranks of a stage must share too, as for `summarize_presence`.
    """
    if not any_gradient:
        return (
            "no parameter of the model has a gradient in this step, and moments and weight decay "
            "alone would move the weights: run backward before each step, and step once for it; "
            "nothing was changed"
        )
    line = _settings_difference(settings, ranks)
    if line:
        return line
    here = f"stage {ranks.pp.rank}, dp rank {ranks.dp.rank}, tensor rank {ranks.tp.rank}"
    names = missing_gradients(buffers)
    return describe_missing(names, ranks.world, ranks.device, here)


def _settings_difference(settings: Sequence[str], ranks: Ranks) -> str:
    """Return which of the lines differ between ranks of a stage; empty if none do. Collective over
    the world."""
    local = {f"{ranks.world.rank}": [ranks.pp.rank, *settings]}
    first_of_stage: dict[int, list[str]] = {}
    for stage, *lines in gather_entries(local, ranks.world, ranks.device).values():
        first_lines = first_of_stage.setdefault(stage, lines)
        for first_line, line in zip(first_lines, lines, strict=False):
            if first_line != line:
                return (
                    f"{first_line} on some ranks and {line} on others: set the same in "
                    "param_groups and optimizer on all of them; nothing was changed"
                )
    return ""


def describe_missing(names: Sequence[str], world: Axis, device: torch.device, here: str) -> str:
    """Return a line that says which ranks lack which gradients. Collective over the world, called
    by all ranks.

    here: this rank's coordinates, in words.
    """
    by_rank = gather_entries({here: list(names)}, world, device)
    num_ranks = Counter(chain.from_iterable(by_rank.values()))
    clauses: list[str] = []
    for rank, missing_names in by_rank.items():
        if not missing_names:
            continue
        # a gradient that all ranks of a stage lack is no disagreement: the rarest come first
        shown = sorted(missing_names, key=num_ranks.__getitem__)[:_MAX_NAMES]
        if len(missing_names) > _MAX_NAMES:
            shown.append(f"{len(missing_names) - _MAX_NAMES} more")
        clauses.append(f"{rank} has none for {', '.join(shown)}")
    return (
        "gradients are missing on some ranks of a stage only, so nothing was changed: "
        f"{'; '.join(clauses)}; every rank must run the same parts of the model in a step"
    )
