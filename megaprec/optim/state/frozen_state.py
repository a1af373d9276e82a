"""The state of a model that is not trained: frozen parameters, and torch's persistent buffers.

A checkpoint holds frozen parameters as it holds trained ones, by logical slice, but without
moments. It does not hold buffers, because a buffer has no layout: nothing says whether ranks hold
the same values, or slices of them. The code that builds the model fills a buffer that never
changes; one that changes in training, like the running statistics of a BatchNorm, would begin anew
on each resume. It is therefore named.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megaprec.comm.layout import Layout, Part, has_layout, layout_of
from megaprec.errors import UserError
from megaprec.optim.torch_wrappers import is_dtensor
from megaprec.torch_private import num_writes, unsaved_buffer_names

_IN_NO_FILE = (
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class FrozenSlice:
    """A rank's slice of a logical tensor that is not trained.

    values: its elements, a flat view without padding.
    saved: True if this rank's copy is the one that checkpoints hold.
    """

    part: Part
    values: Tensor
    saved: bool


class FrozenState:
    """The state of `model_parts` that is not trained, as of the moment at which this is made.

    pp_rank: of this rank.
    is_first_replica: returns True if this rank is the first replica of a parameter with such a
        layout.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        pp_rank: int,
        is_first_replica: Callable[[Layout], bool],
    ) -> None:
        self._model_parts = model_parts
        self._pp_rank = pp_rank
        self._is_first_replica = is_first_replica
        # with the buffer itself, because the id of one that is gone may be given again
        self._versions: dict[int, tuple[Tensor, int]] = {}
        for _, _, buffer in self._buffers():
            self._versions[id(buffer)] = (buffer, num_writes(buffer))

    def require_savable(self) -> None:
        """Raise UserError if a frozen parameter cannot be saved."""
        for _ in self.slices():
            pass

    def slices(self) -> Iterator[FrozenSlice]:
        """Yield the slices of all frozen parameters. Raises UserError for one that no checkpoint
        can hold."""
        for name, parameter in self._frozen():
            obstacle = _obstacle(parameter)
            if obstacle:
                raise UserError.of("optimizer.frozen_tensor_in_state", name=name, obstacle=obstacle)
            layout = layout_of(parameter)
            values = parameter.data.view(-1)
            counts = self._counts(layout)
            # without padding, and each logical element is saved by one rank
            for part, start, stop in layout.spans():
                is_saved = counts and part.copy == 0
                yield FrozenSlice(part, values[start:stop], is_saved)

    def _counts(self, layout: Layout) -> bool:
        """Return True if this pipeline rank and this replica save a parameter."""
        return layout.counts(self._pp_rank) and self._is_first_replica(layout)

    def num_saved(self) -> int:
        """Return the number of frozen elements that this rank saves."""
        num_elements = 0
        for _, parameter in self._frozen():
            if not has_layout(parameter) or is_dtensor(parameter):
                continue
            layout = layout_of(parameter)
            if not self._counts(layout):
                continue
            for part in layout.parts:
                if part.copy == 0:
                    num_elements += prod(part.local)
        return num_elements

    def changed_buffers(self) -> list[str]:
        """Return the paths of the persistent buffers that were written to, or exchanged, since this
        was made.

        torch's kernels write to the running statistics of a batch norm without a new version: if it
        has counted a batch, they have changed too.
        """
        changed = set[str]()  # paths
        batch_norms = set[nn.Module]()
        for module, name, buffer in self._buffers():
            if not self._is_unchanged(buffer):
                changed.add(name)
                if isinstance(module, _BATCH_NORMS):
                    batch_norms.add(module)
        return [
            name for module, name, _ in self._buffers() if name in changed or module in batch_norms
        ]

    def _is_unchanged(self, buffer: Tensor) -> bool:
        original, version = self._versions.get(id(buffer), (None, None))
        return original is buffer and version == num_writes(buffer)

    def _frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter that is not trained once, with its path in the first part that has
        it."""
        seen = set[nn.Parameter]()  # a tied parameter may be in several parts
        for model_part in self._model_parts:
            for name, parameter in model_part.named_parameters():
                if not parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yield torch's persistent buffers: the module that has it, its path, and the buffer."""
        for model_part in self._model_parts:
            for path, module in model_part.named_modules():
                for name, buffer in module.named_buffers(path, recurse=False):
                    # torch saves no others either
                    if name.rpartition(".")[2] not in unsaved_buffer_names(module):
                        yield module, name, buffer


def _obstacle(parameter: nn.Parameter) -> str:
    """Return why no checkpoint can hold the parameter; empty if one can."""
    if is_dtensor(parameter):
        return (
            "fully_shard cuts it, and only trained ones are put together; leave it out of "
            "fully_shard"
        )
    if parameter.dtype in _IN_NO_FILE:
        return (
            f"files hold no {str(parameter.dtype).removeprefix('torch.')}; make it a buffer, or "
            "of another dtype"
        )
    if not has_layout(parameter):
        return "it has no layout; give it one with megaprec.comm.layout.attach_whole(model)"
    return ""
