"""Scales and amax histories of FP8 in checkpoints: plain tensors by logical names, for any layout.

    fp8/<logical name of the weight>.<input, weight or gradient>.scale      [replicas]
    fp8/<logical name of the weight>.<input, weight or gradient>.history    [replicas, length], oldest first

Ranks that agree on amaxes have the same ones, so replicas is 1; where dp ranks do not agree, each has a row. A
checkpoint without them can begin a run in FP8, and one with them can go on without.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.integrity import write_tensors
from megaprec.checkpoint.reader import Store
from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State

Scales = dict[int, tuple[Tensor, Tensor]]
"""Scale [] and history [length] of tensors, by their place in the bank."""


def write_fp8(folder: Path, name: str, state: FP8State, writes: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Writes a file of that name, on one rank of a stage; returns what is in it (key -> dtype, shape and chunk), and
    its digest by name.

    Collective over the stage: what was recorded since the last roll is agreed on, and rolls.
    """
    state.roll()
    if not state.names:
        return {}, {}
    scale, history = (state.dp.gather(x[None]).cpu() for x in (state.bank.scale, state.bank.history))
    if not writes:
        return {}, {}
    tensors: dict[str, Tensor] = {}
    for i, tensor in enumerate(state.names):
        tensors[f"fp8/{tensor}.scale"] = scale[:, i].contiguous()
        tensors[f"fp8/{tensor}.history"] = history[:, :, i].contiguous()
    digest = write_tensors(folder / name, tensors)
    return {key: _entry(name, values) for key, values in tensors.items()}, {name: digest}


def _entry(file: str, values: Tensor) -> dict[str, Any]:
    chunk = {"file": file, "offset": [0] * values.dim(), "shape": list(values.shape)}
    return {"dtype": "float32", "shape": list(values.shape), "chunks": [chunk]}


def read_fp8(store: Store, state: FP8State) -> Scales:
    """What this rank takes up. Raises UserError for what is damaged."""
    found: Scales = {}
    for i, name in enumerate(state.names):
        if f"fp8/{name}.scale" not in store.index["tensors"]:
            continue
        scale, history = (store.read("fp8", f"{name}.{what}") for what in ("scale", "history"))
        if (scale.dim(), history.dim(), len(scale)) != (1, 2, len(history)) or not history.numel():
            raise UserError(f"{store.path} is damaged: fp8/{name} has shapes {[*scale.shape]} and {[*history.shape]}")
        found[i] = _own(scale, state.dp, torch.amin), _own(history, state.dp, torch.amax)
    return found


def _own(rows: Tensor, dp: Axis, all_of: Any) -> Tensor:
    """The row of this replica; what leaves room for all of them if there were not as many as there are now."""
    return rows[dp.rank] if len(rows) == dp.size else all_of(rows, 0)


@torch.no_grad()
def take_up(found: Scales, rolls: int, state: FP8State) -> None:
    """Puts what `read_fp8` found into the state. Of a history of another length the newest are taken."""
    for i, (scale, history) in found.items():
        length = min(len(history), len(state.bank.history))
        state.bank.scale[i] = scale
        state.bank.history[:, i] = 0
        state.bank.history[-length:, i] = history[-length:].to(state.bank.history)
    state.rolls = rolls if found else state.rolls
