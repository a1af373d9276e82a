"""The parameters that received a gradient in a step, compared between ranks.

Every rank of a pipeline stage holds a part of the same parameters, and all of them must have
gradients for the same parameters. If only one rank ran a branch of the model, the sum over ranks is
not the gradient of the loss. No collective would detect this, so each rank's list is compared, as a
digest among the numbers that a step exchanges anyhow.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.comm.layout import layout_of
from megaprec.optim.consensus import DIGEST_BITS
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import has_gradient
from megaprec.optim.model_intake import Ranks

_MOST = 3  # number of names that the error line gives for each rank


def missing(buffers: Sequence[Buffer], by_place: bool = False) -> list[str]:
    """Return the logical names of the parameters that received no gradient in this step.

    by_place: experts are numbered by their places on this rank, so that ranks with other experts
        have the same names.
    """
    lacking = [
        (number, p)
        for number, p in enumerate(p for b in buffers for p in b.parameters)
        if not has_gradient(p)
    ]
    return [
        f"expert {n}" if by_place and layout_of(p).expert else layout_of(p).parts[0].name
        for n, p in lacking
    ]


def summary(buffers: Sequence[Buffer], said: Sequence[str] = ()) -> tuple[float, int]:
    """Return a digest of the parameters of this rank without a gradient, and the number of those
    with one.

    said: lines that all ranks of a stage must share too.
    """
    names = missing(buffers, by_place=True)
    return digest([*names, *said]), sum(len(buffer.parameters) for buffer in buffers) - len(names)


def digest(names: Sequence[str]) -> float:
    """Return a number that identifies the list of names."""
    return int.from_bytes(blake2b("\n".join(names).encode(), digest_size=4).digest(), "little") % (
        1 << DIGEST_BITS
    )


def why(buffers: Sequence[Buffer], ranks: Ranks, any_given: bool, said: Sequence[str] = ()) -> str:
    """Return a line that says why no step can be made of the gradients. Collective over the world.

    any_given: True if a parameter of some rank has a gradient. said: as for `summary`.
    """
    if any_given and (line := _said_apart(said, ranks)):
        return line
    if any_given:
        here = f"stage {ranks.pp.rank}, dp rank {ranks.dp.rank}, tensor rank {ranks.tp.rank}"
        return disagreement(missing(buffers), ranks.world, ranks.device, here)
    return (
        "no parameter of the model has a gradient in this step, and moments and weight decay "
        "alone would move the "
        "weights: run backward before each step, and step once for it; nothing was changed"
    )


def _said_apart(said: Sequence[str], ranks: Ranks) -> str:
    """Return which of the lines differ between ranks of a stage; empty if none do. Collective over
    the world."""
    of_all = everyones({f"{ranks.world.rank}": [ranks.pp.rank, *said]}, ranks.world, ranks.device)
    first: dict[int, list[str]] = {}
    for stage, *lines in of_all.values():
        for mine, theirs in zip(first.setdefault(stage, lines), lines, strict=False):
            if mine != theirs:
                return (
                    f"{mine} on some ranks and {theirs} on others: set the same in "
                    "param_groups and optimizer on "
                    "all of them; nothing was changed"
                )
    return ""


def disagreement(names: Sequence[str], world: Axis, device: torch.device, here: str) -> str:
    """Return a line that says which ranks lack which gradients. Collective over the world, called
    by all ranks.

    here: this rank's place, in words.
    """
    said = everyones({here: list(names)}, world, device)
    ranks = Counter(name for lacking in said.values() for name in lacking)
    lacks = []
    for place, lacking in said.items():
        # a gradient that all ranks of a stage lack is no disagreement
        rarest = sorted(lacking, key=ranks.__getitem__)
        more = [f"{len(lacking) - _MOST} more"] if len(lacking) > _MOST else []
        lacks += [f"{place} has none for {', '.join(rarest[:_MOST] + more)}"] if lacking else []
    return (
        "gradients are missing on some ranks of a stage only, so nothing was changed: "
        f"{'; '.join(lacks)}; every rank must run the same parts of the model in a step"
    )
