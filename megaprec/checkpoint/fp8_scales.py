"""FP8 scales and amax histories in checkpoints, as plain tensors with logical names, for any
layout.

    fp8/<logical name of the weight>.<input, weight or gradient>.scale      [replicas]
    fp8/<logical name of the weight>.<input, weight or gradient>.history    [replicas, length], oldest first

If amaxes are reduced over the dp ranks, these have the same history, and replicas is 1; otherwise
each dp rank has a row. A run with FP8 can start from a checkpoint without these tensors, and one
without FP8 from a checkpoint with them.
"""

from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.snapshot import Snapshot
from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State

Scales = dict[int, tuple[Tensor, Tensor]]
"""Scale [] and history [length] of tensors, by their index in the bank."""


def add_fp8(snapshot: Snapshot, state: FP8State, writes: bool) -> None:
    """Add the scales and histories to what this rank saves, if it is one that `writes`.

    Collective over the stage: amaxes recorded since the last roll are first reduced and rolled into
    the history.
    """
    state.roll()
    if not state.names:
        return
    scale, history = (
        state.dp.gather(x[None]).cpu() for x in (state.bank.scale, state.bank.history)
    )
    for i, tensor in enumerate(state.names if writes else ()):
        for what, values in (("scale", scale[:, i].clone()), ("history", history[:, :, i].clone())):
            chunk = {"offset": [0] * values.dim(), "shape": list(values.shape)}
            snapshot.add("fp8", f"fp8/{tensor}.{what}", values, tuple(values.shape), chunk)


def read_fp8(store: Store, state: FP8State) -> Scales:
    """Return the scales and histories of this rank's tensors. Raises UserError if they are
    damaged."""
    found: Scales = {}
    for i, name in enumerate(state.names):
        if f"fp8/{name}.scale" not in store.index["tensors"]:
            continue
        scale, history = (store.read("fp8", f"{name}.{what}") for what in ("scale", "history"))
        if (scale.dim(), history.dim(), len(scale)) != (1, 2, len(history)) or not history.numel():
            raise UserError(
                f"{store.path} is damaged: fp8/{name} has shapes {[*scale.shape]} and "
                f"{[*history.shape]}"
            )
        found[i] = _own(scale, state.dp, torch.amin), _own(history, state.dp, torch.amax)
    return found


def _own(rows: Tensor, dp: Axis, all_of: Any) -> Tensor:
    """Return the row of this replica; if the number of replicas has changed, the reduction of all
    rows by `all_of`."""
    return rows[dp.rank] if len(rows) == dp.size else all_of(rows, 0)


@torch.no_grad()
def take_up(found: Scales, rolls: int, state: FP8State) -> None:
    """Copy the result of `read_fp8` into the state. If the history length has changed, copy the
    newest amaxes."""
    for i, (scale, history) in found.items():
        length = min(len(history), len(state.bank.history))
        state.bank.scale[i] = scale
        state.bank.history[:, i] = 0
        state.bank.history[-length:, i] = history[-length:].to(state.bank.history)
    state.rolls = rolls if found else state.rolls
