"""Hooks that trace the modules of a model, and digests of what passes between its modules.

`trace_modules` is the one place that hooks modules. Its callers look for the first inf or NaN
(`megaprec.diagnose.nonfinite_trace`), record activations to compare layouts
(`tools.verify.parity.borders`) or, here, digest the activations of one micro-batch and their
gradients in order of computation.

Two runs of the same computation give the same list of digests. The first entry that differs tells
where they parted: the output of a module differs although its inputs did not, so the module
computed something else. Digests stay on the device until they are read, so tracing does not wait
for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megaprec.comm.tensor_digests import digest
from megaprec.precision.nested import tensors

OnInput = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
OnOutput = Callable[[str, Any], Any]

FORWARD = 0
BACKWARD = 1
AFTER = 1_000_000  # index of the first entry after a pass; no pass has as many


def trace_modules(
    modules: Mapping[str, nn.Module],
    on_output: OnOutput,
    on_input: OnInput | None = None,
    running: list[str] | None = None,
) -> list[RemovableHandle]:
    """Hook modules until the returned handles are removed.

    modules: by name.
    on_output: called with the name and the output after each forward pass; what it returns replaces
        the output, unless it is None.
    on_input: called with the name, the positional and the keyword arguments before each forward
        pass; a pair that it returns replaces them.
    running: where the names of the modules whose forward pass is under way are kept, innermost
        last. During both calls a module itself is not among them, so that the last one is its
        caller.
    """
    names = [] if running is None else running

    def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replacement = on_input(name, args, kwargs) if on_input else None
        names.append(name)
        return replacement

    def leave(name: str, _module: nn.Module, _args: object, output: Any) -> Any:
        # empty where `running` was cleared since, for a forward pass that ended by an exception
        if names:
            names.pop()
        return on_output(name, output)

    handles: list[RemovableHandle] = []
    for name, module in modules.items():
        handles += [
            module.register_forward_pre_hook(partial(enter, name), with_kwargs=True),
            module.register_forward_hook(partial(leave, name)),
        ]
    return handles


class TracePoint(NamedTuple):
    """The place of an entry in the computation.

    The points of one micro-batch on all its pipeline ranks are in order of computation.

    direction: FORWARD or BACKWARD.
    stage: number of the stage, negative in the backward pass.
    index: within the stage.
    """

    direction: int
    stage: int
    index: int


@dataclass(frozen=True)
class TraceEntry:
    """One traced tensor.

    description: what it is, in words.
    module: path of the module that it leaves; "" at the ends of a stage.
    """

    point: TracePoint
    description: str
    module: str
    digest: Tensor


class _NewestDigest(NamedTuple):
    """The tensor of the newest entry, its version when it was digested, and the digest."""

    tensor: Tensor | None
    version: int
    digest: Tensor


_NO_DIGEST = _NewestDigest(None, 0, torch.zeros(0))


class DigestTrace:
    """Trace of the forward pass of each stage whose turn it is, and of the backward pass that
    follows from it.

    stages: by number.
    turns: by stage, which of its forward passes inside `recording` is traced, from 0.
    """

    def __init__(self, stages: Mapping[int, nn.Module], turns: Mapping[int, int]) -> None:
        self._stages = stages
        self._turns_left = dict(turns)
        self._counts: dict[tuple[int, int], int] = {}  # of entries, by direction and stage
        self._traced_stage: int | None = None  # the stage whose forward pass is being traced
        self._newest = _NO_DIGEST
        self._entries: list[TraceEntry] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Trace within the context; outside of it the modules have no hooks."""
        handles: list[RemovableHandle] = []
        for number, stage in self._stages.items():
            modules = {
                path: module
                for path, module in stage.named_modules()
                if type(module).forward is not nn.Module.forward  # containers have no forward pass
            }
            handles += trace_modules(
                {"": stage} | modules,  # "" is the path of the stage itself
                partial(self._leave_module, number),
                partial(self._enter_module, number),
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def entries(self) -> list[TraceEntry]:
        """Return the entries so far, in order of computation."""
        return sorted(self._entries, key=lambda entry: entry.point)

    def note(
        self,
        direction: int,
        stage: int,
        description: str,
        tensor: Tensor,
        module: str = "",
        after: int = -1,
    ) -> None:
        """Add the digest of a tensor, at the present point of the computation.

        after: from 0 on, the tensor's point is after the whole pass of the stage, in the order of
            these numbers.
        """
        if after >= 0:
            index = AFTER + after
        else:
            index = self._counts.get((direction, stage), 0)
            self._counts[direction, stage] = index + 1
        # the backward pass goes from the last stage to the first
        point = TracePoint(direction, stage if direction == FORWARD else -stage, index)
        self._entries.append(TraceEntry(point, description, module, self._digest(tensor)))

    @torch.no_grad()
    def _digest(self, tensor: Tensor) -> Tensor:
        """Return the digest of a tensor, that of the entry before if it is of the same tensor.

        A module often returns what its last submodule has returned.
        """
        is_same_tensor = self._newest.tensor is tensor
        if not is_same_tensor or self._newest.version != tensor._version:
            self._newest = _NewestDigest(tensor, tensor._version, digest(tensor))
        return self._newest.digest

    def _enter_module(self, stage: int, path: str, args: tuple[Any, ...], _: object) -> None:
        """Begin to trace, if the stage's turn has come. path: of the module, "" for the stage
        itself. args: its positional arguments."""
        if path:
            return
        self._turns_left[stage] -= 1
        if self._turns_left[stage] == -1:  # turn 0 is the first pass
            self._traced_stage = stage
            for tensor in tensors(args[:1]):
                if not tensor.is_floating_point():
                    self.note(FORWARD, stage, "the token ids", tensor)

    def _leave_module(self, stage: int, path: str, output: Any) -> None:
        """Note what a module returns, and its gradient when that is computed. With the return of
        the stage itself, whose path is empty, the trace of its forward pass ends."""
        # modules return within the traced stage; of stages only that one ends its trace
        if self._traced_stage is None or (not path and self._traced_stage != stage):
            return
        description = f"the output of {path or f'stage {stage}'}"
        for tensor in filter(Tensor.is_floating_point, tensors(output)):
            self.note(FORWARD, self._traced_stage, description, tensor, path)
            # the backward pass computes in the reverse order; each hook notes its own point
            if tensor.requires_grad:
                gradient = f"the gradient of {description}"
                tensor.register_hook(
                    partial(self._note_gradient, self._traced_stage, gradient, path)
                )
        if not path:
            self._traced_stage = None
            self._newest = _NO_DIGEST  # the last tensor would keep the graph alive

    def _note_gradient(self, stage: int, description: str, path: str, gradient: Tensor) -> None:
        self.note(BACKWARD, stage, description, gradient, path)
