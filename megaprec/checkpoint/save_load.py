"""Saving and loading of the optimizer state: each rank writes what it owns of the logical tensors
and reads its slices.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from megaprec.checkpoint.arguments import require_saveable, required_path
from megaprec.checkpoint.fp8_scales import Scales, read_fp8, take_up
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.keeping import Keep
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.saving import Saving
from megaprec.comm.layout import Part
from megaprec.errors import Problem, UserError
from megaprec.fp8.state import FP8State
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import EMA, Buffer
from megaprec.precision.plan import DTYPES, PrecisionPlan, dtype_name

SHOWN_TENSORS = 5  # in an error about another model; more tell no more

T = TypeVar("T")


def save(
    folder: Path | str,
    step: int,
    optimizer: ParallelAMPOptimizer,
    extra: dict[str, Any],
    keep: int | Literal["all"] = 2,
    files: Sequence[Path] = (),
    fp8: FP8State | None = None,
    keep_every: int = 0,
) -> Path:
    """Write a checkpoint of `step` into `folder` and remove older ones. Collective over the world.

    keep: how many of the newest checkpoints stay; "all": none is removed. keep_every: those of each
    multiple of this step stay too; 0: of none. Only checkpoints that saves into this folder have
    made are removed, and no links.
    extra: more JSON values for checkpoint.json, the same on every rank, such as a scheduler's
        state_dict().
    files: files to copy into the checkpoint.
    fp8: state whose scales and amax histories are saved, if there is any. Returns the checkpoint's
    path. Raises UserError on every rank, with nothing left of the checkpoint, if one of them could
    not write. Rank 0 warns of an old checkpoint that cannot be removed.
    """
    folder = required_path(folder, optimizer, "folder")
    require_saveable(step, extra, keep, keep_every)
    rule = Keep.of(keep, keep_every)
    outcome = Saving(
        folder=folder, step=step, optimizer=optimizer, extra=extra, keep=rule, files=files, fp8=fp8
    ).finish()
    for warning in outcome.warnings:
        warnings.warn(warning, stacklevel=2)
    if outcome.problem:
        raise UserError.of("checkpoint.not_saved", path=outcome.path, problem=outcome.problem)
    return outcome.path


def load(
    path: Path | str,
    optimizer: ParallelAMPOptimizer,
    fp8: FP8State | None = None,
    begin_ema: bool = False,
) -> dict[str, Any]:
    """Load weights, moments, step count and scaler into an optimizer of any layout, and return
    checkpoint.json.

    fp8: state into which scales and amax histories are loaded, as far as the checkpoint has them.
    begin_ema: True if the optimizer's moving average may begin with the weights of a checkpoint
        that has no average; such a checkpoint is otherwise refused.

    Collective over the world: if a byte of the checkpoint has changed since it was saved, or if one
    rank finds that it is of another model, every rank raises UserError before anything is changed.
    Each file is hashed once, by one rank. Rank 0 warns if the weights in the checkpoint are
    narrower than the masters, and if it has an average that the optimizer does not keep.
    """
    path = required_path(path, optimizer, "path")
    optimizer.require_own_weights("a load")
    store, scales = _open_on_all_ranks(path, optimizer, fp8 or FP8State(), begin_ema)
    # Every rank has found the checkpoint loadable: from here on the state changes.
    if optimizer.world.rank == 0:
        for loss in (_precision_loss(store, optimizer.plan), _average_loss(store, optimizer)):
            if loss:
                warnings.warn(loss, stacklevel=2)
    has_average = bool(store.shapes(EMA))
    optimizer.restart_ema()  # an average that is not loaded begins with the loaded weights
    for buffer in optimizer.all_buffers():
        for kind in buffer.saved_names:
            if kind != EMA or has_average:
                _read_into(store, kind, buffer)
    _read_frozen(store, optimizer)
    optimizer.load_saved_numbers(store.index["optimizer"])
    if fp8 is not None:
        take_up(scales, store.index.get("fp8", {"rolls": 0})["rolls"], fp8)
    return store.index


def _precision_loss(store: Store, plan: PrecisionPlan) -> str:
    """Return a warning if weights in the checkpoint are narrower than the masters, so that
    precision is lost; else an empty text."""
    saved_dtypes: dict[str, str] = {}  # of weights, by logical name
    for key, entry in store.index["tensors"].items():
        kind, _, name = key.partition("/")
        if kind == "weight" and not entry.get("frozen"):
            saved_dtypes[name] = entry["dtype"]
    itemsizes: dict[str, int] = {}
    for dtype in DTYPES.values():
        itemsizes[str(dtype).removeprefix("torch.")] = dtype.itemsize
    narrow: list[str] = []
    for name, saved_dtype in saved_dtypes.items():
        # a dtype that no plan has, such as FP8, counts as narrow
        saved_itemsize = itemsizes.get(saved_dtype, 0)
        if saved_itemsize < _master_dtype(plan, name).itemsize:
            narrow.append(name)
    if not narrow:
        return ""
    first_dtype = saved_dtypes[narrow[0]]
    masters = dtype_name(_master_dtype(plan, narrow[0]))
    num_narrow = f"{len(narrow)} of {len(saved_dtypes)}"
    return (
        f"{store.path} holds {num_narrow} weights rounded to {first_dtype} only: "
        f"{masters} masters begin at these, accumulated updates smaller than their last bit are "
        "lost, and the run does not resume bit for bit"
    )


def _average_loss(store: Store, optimizer: ParallelAMPOptimizer) -> str:
    """Return a warning if the optimizer does not keep the checkpoint's average of the weights; else
    an empty text."""
    if optimizer.ema or not store.shapes(EMA):
        return ""
    return (
        f"{store.path} holds an average of the weights (ema), which this optimizer does not keep: "
        "later checkpoints have none"
    )


def _master_dtype(plan: PrecisionPlan, name: str) -> torch.dtype:
    """Return the dtype of the masters of the parameter of this logical name."""
    return max(plan.masters, plan.param_dtype(name), key=lambda dtype: dtype.itemsize)


class Weights(Protocol):
    """A source of slices of logical tensors, by kind ("weight")."""

    def read_range(
        self,
        kind: str,
        part: Part,
        first: int,
        last: int,
    ) -> Tensor: ...


@torch.no_grad()
def load_weights(weights: Weights, optimizer: ParallelAMPOptimizer) -> None:
    """Load only weights, from any source; moments, step count and scaler stay, and a moving average
    begins anew with these weights. Each rank reads its own slices.

    weights: for a checkpoint, `Store(path)` of `megaprec.checkpoint.reader`.
    """
    # a state_dict is the likeliest mistake
    if not callable(getattr(weights, "read_range", None)):
        raise UserError.of("checkpoint.weights_only_from_store", kind=type(weights).__name__)
    optimizer.require_own_weights("a load")
    for buffer in optimizer.all_buffers():
        _read_into(weights, "weight", buffer)
    optimizer.restart_ema()
    _read_frozen(weights, optimizer)
    # its own numbers: a load of them rounds the masters to the layers' weights
    optimizer.load_saved_numbers(optimizer.saved_numbers())


def _open_on_all_ranks(
    path: Path,
    optimizer: ParallelAMPOptimizer,
    fp8: FP8State,
    begin_ema: bool,
) -> tuple[Store, Scales]:
    """Return the checkpoint and its FP8 scales, after every rank has found that it can load it.
    begin_ema: as for `load`. Collective."""

    def open_store() -> Store:
        return Store(path, optimizer.world)

    def check_and_read_scales() -> Scales:
        check_same_model(store, optimizer, begin_ema)
        return read_fp8(store, fp8)

    # The index first: it says which files there are to hash, and which tensors to look for.
    store = _on_all_ranks(path, optimizer, open_store)
    require_intact(store, store.digests, optimizer.world, optimizer.device)
    return store, _on_all_ranks(path, optimizer, check_and_read_scales)


def _on_all_ranks(path: Path, optimizer: ParallelAMPOptimizer, make: Callable[[], T]) -> T:
    """Return the result of `make`, which does not communicate. If it raises UserError on one rank,
    every rank raises one. Collective over the world."""
    # A rank that raised alone would leave the others waiting in the next collective.
    problem: UserError | None = None
    results: list[T] = []  # of this rank: one, or none after an error
    try:
        results.append(make())
    except UserError as error:
        problem = error
    failed_here = torch.tensor(float(problem is not None), device=optimizer.device)
    failed_somewhere = optimizer.world.max_(failed_here)
    if problem is not None:
        raise problem
    if failed_somewhere:
        raise UserError.of("checkpoint.load_failed_elsewhere", path=path)
    return results[0]


def check_same_model(
    store: Store,
    optimizer: ParallelAMPOptimizer,
    begin_ema: bool = False,
) -> None:
    """Raise UserError unless the checkpoint has the model's parameter count and all tensors that
    this rank reads. begin_ema: as for `load`."""
    saved = store.shapes("weight")
    local = _local_shapes(optimizer)
    different = [name for name, shape in local.items() if saved.get(name) != shape]
    if different:
        problems = [
            Problem.of(
                "checkpoint.other_model_tensors",
                path=store.path,
                num_different=len(different),
                num_local=len(local),
            )
        ]
        for name in different[:SHOWN_TENSORS]:
            problems.append(
                Problem.of(
                    "checkpoint.other_model_shape",
                    path=store.path,
                    name=name,
                    shape=list(local[name]),
                    saved_shape=list(saved[name]) if name in saved else "not",
                )
            )
        raise UserError(*problems)
    expected = optimizer.num_elements + optimizer.num_frozen
    elements = sum(map(prod, saved.values()))
    if elements != expected:
        raise UserError.of(
            "checkpoint.other_model_size", path=store.path, elements=elements, expected=expected
        )
    if optimizer.ema and not begin_ema and not store.shapes(EMA):
        raise UserError.of("checkpoint.ema_missing", path=store.path)
    _require_state(store, optimizer)


def _local_shapes(optimizer: ParallelAMPOptimizer) -> dict[str, tuple[int, ...]]:
    """Return the shape of each logical tensor of which this rank has a slice, frozen ones too."""
    shapes: dict[str, tuple[int, ...]] = {}
    for buffer in optimizer.all_buffers():
        for piece in buffer.pieces:
            shapes[piece.part.name] = piece.part.shape
    for frozen in optimizer.frozen.slices():
        shapes[frozen.part.name] = frozen.part.shape
    return shapes


def _require_state(store: Store, optimizer: ParallelAMPOptimizer) -> None:
    """Raise UserError unless the checkpoint has all parts of the weights and moments that this rank
    reads, and, if it has an average of the weights, of that."""
    needed: dict[str, None] = {}
    for buffer in optimizer.all_buffers():
        needed |= dict.fromkeys(buffer.state)
    # a kind that is not there at all is named once, not for each tensor
    lacking = [kind for kind in needed if not store.shapes(kind)]
    if lacking:
        raise UserError.of(
            "checkpoint.state_missing", path=store.path, lacking=" and no ".join(lacking)
        )
    has_average = bool(store.shapes(EMA))
    for buffer in optimizer.all_buffers():
        kinds = [kind for kind in buffer.saved_names if kind != EMA or has_average]
        for kind, owned in product(kinds, buffer.owned_pieces()):
            part = owned.piece.part
            _require_same_rule(store, kind, part.name, buffer)
            store.require(f"{kind}/{part.name}", part.shape)


def _require_same_rule(
    store: Store,
    kind: str,
    name: str,
    buffer: Buffer,
) -> None:
    """Raise UserError, with the reason, if the checkpoint lacks the moment `kind` of the tensor
    `name` because that was not trained or was trained by another update rule."""
    tensors = store.index["tensors"]
    if f"{kind}/{name}" in tensors:
        return
    if tensors[f"weight/{name}"].get("frozen"):
        raise UserError.of(
            "checkpoint.state_of_frozen_missing", path=store.path, kind=kind, name=name
        )
    saved_kinds = dict.fromkeys(key.partition("/")[0] for key in tensors)
    others: list[str] = []
    for other_kind in saved_kinds:
        if other_kind not in buffer.saved_names and f"{other_kind}/{name}" in tensors:
            others.append(other_kind)
    if others:
        raise UserError.of(
            "checkpoint.state_of_other_rule",
            path=store.path,
            others=" and ".join(others),
            name=name,
            kind=kind,
        )


def _read_into(store: Weights, kind: str, buffer: Buffer) -> None:
    """Read this rank's shard of a buffer. kind: "weight" for the masters, "ema", or the name of a
    moment."""
    for owned in buffer.owned_pieces():
        in_part = owned.in_part
        values = store.read_range(kind, owned.piece.part, in_part.start, in_part.stop)
        buffer.restore(kind, owned.in_shard.start, values)


@torch.no_grad()
def _read_frozen(store: Weights, optimizer: ParallelAMPOptimizer) -> None:
    """Read this rank's slices of the parameters that are not trained, which are in no buffer."""
    for frozen in optimizer.frozen.slices():
        num_elements = frozen.values.numel()
        # a tensor of few rows leaves the last ranks none
        if num_elements:
            saved_values = store.read_range("weight", frozen.part, 0, num_elements)
            frozen.values.copy_(saved_values)
