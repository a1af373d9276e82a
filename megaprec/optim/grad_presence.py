"""Which parameters were given a gradient in a step.

Every rank of a pipeline stage holds a part of the same parameters and must have a gradient for the same ones: if a
branch of the model was taken on one rank only, the sum over ranks is of something else than the loss. No collective
would notice, so each rank's list is compared, as a digest in the numbers that a step exchanges anyway.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones
from megaprec.comm.layout import layout_of
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import has_gradient

_MOST = 3  # names that are said of each rank
_BITS = 20  # of a digest, so few that sums of squares over thousands of ranks are exact in float64


def missing(buffers: Sequence[Buffer]) -> list[str]:
    """Logical names of the parameters that no gradient of this step came for."""
    parameters = (parameter for buffer in buffers for parameter in buffer.parameters)
    return [layout_of(p).parts[0].name for p in parameters if not has_gradient(p)]


def digest(names: Sequence[str]) -> float:
    """A number that stands for the names."""
    return int.from_bytes(blake2b("\n".join(names).encode(), digest_size=4).digest(), "little") % (1 << _BITS)


def disagreement(names: Sequence[str], world: Axis, device: torch.device, here: str) -> str:
    """A line that says who lacks which gradient. Collective over the world, called by all ranks.

    here: this rank's place, in words.
    """
    said = everyones({here: list(names)}, world, device)
    ranks = Counter(name for lacking in said.values() for name in lacking)
    lacks = []
    for place, lacking in said.items():
        rarest = sorted(lacking, key=ranks.__getitem__)  # what all ranks of a stage lack is no disagreement
        more = [f"{len(lacking) - _MOST} more"] if len(lacking) > _MOST else []
        lacks += [f"{place} has none for {', '.join(rarest[:_MOST] + more)}"] if lacking else []
    return (
        "gradients are missing on some ranks of a stage only, so nothing was changed: "
        f"{'; '.join(lacks)}; every rank must run the same parts of the model in a step"
    )
