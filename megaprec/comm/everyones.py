"""All-gather of JSON values, for values that do not fit into tensors."""

import json
from typing import Any

import torch

from megaprec.comm.axis import Axis

_ROUND = 1 << 16  # bytes of JSON gathered by one collective


def everyones(mine: dict[str, Any], world: Axis, device: torch.device) -> dict[str, Any]:
    """All-gather the entries of every rank and return them merged in rank order, later ranks winning. Collective.

    The entries travel as JSON, in as many all-gathers as the longest text needs.
    """
    text = json.dumps(mine).encode()
    longest = int(world.max_(torch.tensor(len(text), device=device)))
    texts = [b""] * world.size
    for start in range(0, longest, _ROUND):
        packed = torch.tensor(list(text[start : start + _ROUND].ljust(_ROUND)), dtype=torch.uint8, device=device)
        rows = bytes(world.gather(packed).tolist())
        texts = [said + rows[n * _ROUND : (n + 1) * _ROUND] for n, said in enumerate(texts)]
    merged: dict[str, Any] = {}
    for said in texts:
        merged |= json.loads(said)
    return merged
