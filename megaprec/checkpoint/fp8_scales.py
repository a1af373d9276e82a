"""FP8 scales and amax histories in checkpoints, as plain tensors with logical names, for any
layout.

    fp8/<logical name of the weight>.<input, weight or gradient>.scale      [replicas]
    fp8/<logical name of the weight>.<input, weight or gradient>.history    [replicas, length],
                                                                            oldest first

If amaxes are reduced over the dp ranks, these have the same history, and replicas is 1; otherwise
each dp rank has a row. A run with FP8 can start from a checkpoint without these tensors, and one
without FP8 from a checkpoint with them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.snapshot import Snapshot
from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.fp8.state import FP8State


class ScaleAndHistory(NamedTuple):
    """Scale [] and amax history [length] of a tensor."""

    scale: Tensor
    history: Tensor


Scales = dict[int, ScaleAndHistory]
"""Scales and histories of tensors, by their column in `FP8State.bank`."""


def add_fp8(snapshot: Snapshot, state: FP8State, writes: bool) -> None:
    """Add the scales and histories to what this rank saves, if it is one that `writes`.

    Collective over the stage: amaxes recorded since the last roll are first reduced and rolled into
    the history.
    """
    state.roll()
    if not state.names:
        return
    bank = state.bank
    scales = state.dp.gather(bank.scale.unsqueeze(0)).cpu()  # [replicas, tensors]
    histories = state.dp.gather(bank.history.unsqueeze(0)).cpu()  # [replicas, length, tensors]
    if not writes:
        return
    for column, name in enumerate(state.names):
        scale = scales[:, column].clone()
        history = histories[:, :, column].clone()
        _add_tensor(snapshot, f"fp8/{name}.scale", scale)
        _add_tensor(snapshot, f"fp8/{name}.history", history)


def _add_tensor(snapshot: Snapshot, key: str, values: Tensor) -> None:
    """Add a tensor that this rank alone saves, as one chunk."""
    chunk = {"offset": [0] * values.dim(), "shape": list(values.shape)}
    snapshot.add("fp8", key, values, tuple(values.shape), chunk)


def read_fp8(store: Store, state: FP8State) -> Scales:
    """Return the scales and histories of this rank's tensors, as far as the checkpoint has them.
    Raises UserError if they are damaged."""
    scales: Scales = {}
    for column, name in enumerate(state.names):
        if f"fp8/{name}.scale" not in store.index["tensors"]:
            continue  # it was not in FP8 when it was saved
        scale = store.read("fp8", f"{name}.scale")
        history = store.read("fp8", f"{name}.history")
        has_dims = scale.dim() == 1 and history.dim() == 2
        # a row of each for every replica that had its own
        if not has_dims or len(scale) != len(history) or not history.numel():
            raise UserError.of(
                "checkpoint.fp8_scales_shape",
                path=store.path,
                name=name,
                scale_shape=[*scale.shape],
                history_shape=[*history.shape],
            )
        # of another number of replicas, the lowest scale and the largest amaxes are safe for all
        scales[column] = ScaleAndHistory(
            scale=_local_row(scale, state.dp, torch.amin),
            history=_local_row(history, state.dp, torch.amax),
        )
    return scales


def _local_row(rows: Tensor, dp: Axis, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the row of this replica; if the number of replicas has changed, `reduce` of all rows
    along dim 0."""
    if len(rows) == dp.size:
        return rows[dp.rank]
    return reduce(rows, 0)


@torch.no_grad()
def take_up(scales: Scales, rolls: int, state: FP8State) -> None:
    """Copy the result of `read_fp8` into the state. If the history length has changed, copy the
    newest amaxes. rolls: number of advances of the history that the checkpoint has counted."""
    if not scales:
        return
    bank = state.bank
    for column, (scale, history) in scales.items():
        length = min(len(history), len(bank.history))
        bank.scale[column] = scale
        bank.history[:, column] = 0  # as for steps that have not happened yet
        bank.history[-length:, column] = history[-length:].to(bank.history)
    state.rolls = rolls
