"""The parameters that received a gradient in a step, compared between ranks.

Every rank of a pipeline stage holds a part of the same parameters, and all of them must have
gradients for the same parameters. If only one rank ran a branch of the model, the sum over ranks is
not the gradient of the loss. No collective would detect this, so each rank's list is compared, as a
digest among the numbers that a step exchanges anyhow.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import gather_entries
from megaprec.comm.layout import layout_of
from megaprec.optim.consensus import DIGEST_BITS
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import has_gradient
from megaprec.optim.model_intake import Ranks

_MAX_NAMES = 3  # that the error line gives for each rank


class Presence(NamedTuple):
    """The numbers that a rank sends about its gradients: a digest of the parameters that have none,
    and the number of those that have one."""

    digest: float
    num_gradients: int


def missing(buffers: Sequence[Buffer], by_place: bool = False) -> list[str]:
    """Return the logical names of the parameters that received no gradient in this step.

    by_place: experts are numbered by their positions on this rank, so that ranks with other experts
        have the same names.
    """
    names: list[str] = []
    parameters = chain.from_iterable(buffer.parameters for buffer in buffers)
    # by position, because every rank of a stage holds its experts at the same ones
    for number, parameter in enumerate(parameters):
        if has_gradient(parameter):
            continue
        layout = layout_of(parameter)
        if by_place and layout.expert:
            names.append(f"expert {number}")
        else:
            names.append(layout.parts[0].name)
    return names


def summarize(buffers: Sequence[Buffer], settings: Sequence[str] = ()) -> Presence:
    """Return what this rank sends about its gradients. settings: lines that all ranks of a stage
    must share too."""
    names = missing(buffers, by_place=True)
    num_parameters = sum(len(buffer.parameters) for buffer in buffers)
    return Presence(digest([*names, *settings]), num_parameters - len(names))


def digest(names: Sequence[str]) -> float:
    """Return a number that identifies the list of names."""
    hashed = blake2b("\n".join(names).encode(), digest_size=4).digest()
    return int.from_bytes(hashed, "little") % (1 << DIGEST_BITS)


def explain(
    buffers: Sequence[Buffer], ranks: Ranks, any_gradient: bool, settings: Sequence[str] = ()
) -> str:
    """Return a line that says why no step can be made of the gradients. Collective over the world.

    any_gradient: True if a parameter of some rank has one.
    settings: as for `summarize`.
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
    names = missing(buffers)
    return disagreement(names, ranks.world, ranks.device, here)


def _settings_difference(settings: Sequence[str], ranks: Ranks) -> str:
    """Return which of the lines differ between ranks of a stage; empty if none do. Collective over
    the world."""
    local = {f"{ranks.world.rank}": [ranks.pp.rank, *settings]}
    of_stages: dict[int, list[str]] = {}
    for stage, *lines in gather_entries(local, ranks.world, ranks.device).values():
        of_stage = of_stages.setdefault(stage, lines)
        for mine, theirs in zip(of_stage, lines, strict=False):
            if mine != theirs:
                return (
                    f"{mine} on some ranks and {theirs} on others: set the same in param_groups "
                    "and optimizer on all of them; nothing was changed"
                )
    return ""


def disagreement(names: Sequence[str], world: Axis, device: torch.device, here: str) -> str:
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
