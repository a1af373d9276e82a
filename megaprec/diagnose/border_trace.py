"""Digests of the activations at the borders of modules, and of their gradients, in order of
computation.

Two runs of the same computation give the same list. The first entry that differs tells where they
parted: the output of a module differs although its inputs did not, so the module computed something
else. Digests stay on the device until they are read, so tracing does not wait for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megaprec.diagnose.bit_digest import digest
from megaprec.precision.nested import tensors

FORWARD = 0
BACKWARD = 1
AFTER = 1_000_000  # index of the first entry after a pass; no pass has as many


class Moment(NamedTuple):
    """The time of an entry; moments of one micro-batch on all its pipeline ranks are in order of
    computation.

    direction: FORWARD or BACKWARD. stage: number of the stage, negative in the backward pass.
        index: within the stage.
    """

    direction: int
    stage: int
    index: int


@dataclass(frozen=True)
class Entry:
    """One traced tensor. module: path of the module whose border it is; "" at the ends of a
    stage."""

    moment: Moment
    what: str
    module: str
    digest: Tensor


class _Digested(NamedTuple):
    """The tensor of the newest entry, its version when it was digested, and the digest."""

    tensor: Tensor | None
    version: int
    digest: Tensor


_NOTHING = _Digested(None, 0, torch.zeros(0))


class BorderTrace:
    """Traces the forward pass of each stage whose turn it is, and the backward pass that follows
    from it.

    stages: by number. turns: by stage, which of its forward passes inside `recording` is traced,
        from 0.
    """

    def __init__(self, stages: Mapping[int, nn.Module], turns: Mapping[int, int]) -> None:
        self._stages = stages
        self._turns_left = dict(turns)
        self._counts: dict[tuple[int, int], int] = {}
        self._inside: int | None = None  # the stage whose forward pass is being traced
        self._newest = _NOTHING
        self._entries: list[Entry] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Trace within the context; outside of it the modules have no hooks."""
        hooks: list[RemovableHandle] = []
        for number, stage in self._stages.items():
            hooks += self._hooks(number, stage)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def entries(self) -> list[Entry]:
        """Return the entries so far, in order of their moments."""
        return sorted(self._entries, key=lambda entry: entry.moment)

    def note(
        self,
        direction: int,
        stage: int,
        what: str,
        tensor: Tensor,
        module: str = "",
        after: int = -1,
    ) -> None:
        """Add the digest of a tensor, at the present moment.

        after: from 0 on, the tensor's moment is after the whole pass of the stage, in the order of
            these numbers.
        """
        if after >= 0:
            index = AFTER + after
        else:
            index = self._counts.get((direction, stage), 0)
            self._counts[direction, stage] = index + 1
        moment = Moment(direction, stage if direction == FORWARD else -stage, index)
        self._entries.append(Entry(moment, what, module, self._digest(tensor)))

    @torch.no_grad()
    def _digest(self, tensor: Tensor) -> Tensor:
        """Return the digest of a tensor, that of the entry before if it is of the same tensor.

        A module often returns what its last submodule has returned.
        """
        newest = self._newest
        if newest.tensor is not tensor or newest.version != tensor._version:
            self._newest = newest = _Digested(tensor, tensor._version, digest(tensor))
        return newest.digest

    def _hooks(self, number: int, stage: nn.Module) -> Iterator[RemovableHandle]:
        yield stage.register_forward_pre_hook(partial(self._enter, number))
        for path, module in stage.named_modules():
            is_container = type(module).forward is nn.Module.forward  # it has no forward pass
            if path and not is_container:
                yield module.register_forward_hook(partial(self._leave, path))
        yield stage.register_forward_hook(partial(self._end, number))

    def _enter(self, number: int, stage: nn.Module, args: tuple[Any, ...]) -> None:
        self._turns_left[number] -= 1
        if self._turns_left[number] == -1:  # turns are counted from 0
            self._inside = number
            for tensor in tensors(args[:1]):
                if not tensor.is_floating_point():
                    self.note(FORWARD, number, "the token ids", tensor)

    def _leave(
        self,
        path: str,
        module: nn.Module,
        args: object,
        output: object,
    ) -> None:
        if self._inside is not None:
            self._note_output(self._inside, f"the output of {path}", path, output)

    def _end(
        self,
        number: int,
        stage: nn.Module,
        args: object,
        output: object,
    ) -> None:
        if self._inside == number:
            self._note_output(number, f"the output of stage {number}", "", output)
            self._inside = None
            self._newest = _NOTHING  # the last tensor would keep the graph alive

    def _note_output(
        self,
        number: int,
        what: str,
        path: str,
        output: object,
    ) -> None:
        for tensor in filter(Tensor.is_floating_point, tensors(output)):
            self.note(FORWARD, number, what, tensor, path)
            # the backward pass computes in the reverse order; each hook notes its own moment
            if tensor.requires_grad:
                tensor.register_hook(self._note_gradient(number, f"the gradient of {what}", path))

    def _note_gradient(self, number: int, what: str, path: str) -> Callable[[Tensor], None]:
        """Return a hook that notes a gradient."""
        return lambda grad: self.note(BACKWARD, number, what, grad, path)
