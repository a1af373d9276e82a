"""Which parameters were given a gradient in a step.

Every rank of a pipeline stage holds a part of the same parameters and must have a gradient for the same ones: if a
branch of the model was taken on one rank only, the sum over ranks is of something else than the loss. No collective
would notice, so each rank's list is compared, as a digest in the numbers that a step exchanges anyway.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b

import torch

from megaprec.buffer import Buffer
from megaprec.comm import Axis
from megaprec.layout import layout_of

_LINE = 1024  # bytes of JSON that each rank may send
_BITS = 20  # of a digest, so few that sums of squares over thousands of ranks are exact in float64


def missing(buffers: Sequence[Buffer]) -> list[str]:
    """Logical names of the parameters that no gradient was added to since `forget`."""
    parameters = (parameter for buffer in buffers for parameter in buffer.parameters)
    return [layout_of(p).parts[0].name for p in parameters if not getattr(p, "megaprec_given", False)]


def forget(buffers: Sequence[Buffer]) -> None:
    """Begins a new step."""
    for buffer in buffers:
        for parameter in buffer.parameters:
            parameter.megaprec_given = False  # type: ignore[attr-defined]


def digest(names: Sequence[str]) -> float:
    """A number that stands for the names."""
    return int.from_bytes(blake2b("\n".join(names).encode(), digest_size=4).digest(), "little") % (1 << _BITS)


def disagreement(names: Sequence[str], world: Axis, device: torch.device, here: str) -> str:
    """A line that says who lacks which gradient. Collective over the world, called by all ranks.

    here: this rank's place, in words.
    """
    line = json.dumps([here, list(names)])
    if len(line) > _LINE:
        line = json.dumps([here, [*names[:3], f"and {len(names) - 3} more"]])[:_LINE]
    packed = torch.tensor(list(line.encode()[:_LINE].ljust(_LINE)), dtype=torch.uint8, device=device)
    rows = bytes(world.gather(packed).tolist())
    said = [json.loads(rows[n : n + _LINE]) for n in range(0, len(rows), _LINE)]
    lacks = [f"{place} has none for {', '.join(lacking)}" for place, lacking in said if lacking]
    return (
        "gradients are missing on some ranks of a stage only, so nothing was changed: "
        f"{'; '.join(lacks)}; every rank must run the same parts of the model in a step"
    )
