"""The parameters that received a gradient in a step, compared between ranks.

Every rank of a pipeline stage holds a part of the same parameters, and all of them must have gradients for the same
parameters. If only one rank ran a branch of the model, the sum over ranks is not the gradient of the loss. No
collective would detect this, so each rank's list is compared, as a digest among the numbers that a step exchanges
anyhow.
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

_MOST = 3  # number of names that the error line gives for each rank
_BITS = 20  # of a digest: sums of squares over thousands of ranks are exact in float64


def missing(buffers: Sequence[Buffer]) -> list[str]:
    """Return the logical names of the parameters that received no gradient in this step."""
    parameters = (parameter for buffer in buffers for parameter in buffer.parameters)
    return [layout_of(p).parts[0].name for p in parameters if not has_gradient(p)]


def digest(names: Sequence[str]) -> float:
    """Return a number that identifies the list of names."""
    return int.from_bytes(blake2b("\n".join(names).encode(), digest_size=4).digest(), "little") % (1 << _BITS)


def disagreement(names: Sequence[str], world: Axis, device: torch.device, here: str) -> str:
    """Return a line that says which ranks lack which gradients. Collective over the world, called by all ranks.

    here: this rank's place, in words.
    """
    said = everyones({here: list(names)}, world, device)
    ranks = Counter(name for lacking in said.values() for name in lacking)
    lacks = []
    for place, lacking in said.items():
        rarest = sorted(lacking, key=ranks.__getitem__)  # a gradient that all ranks of a stage lack is no disagreement
        more = [f"{len(lacking) - _MOST} more"] if len(lacking) > _MOST else []
        lacks += [f"{place} has none for {', '.join(rarest[:_MOST] + more)}"] if lacking else []
    return (
        "gradients are missing on some ranks of a stage only, so nothing was changed: "
        f"{'; '.join(lacks)}; every rank must run the same parts of the model in a step"
    )
