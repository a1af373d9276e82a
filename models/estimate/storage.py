"""Tensors without storage, on which a model is built and run to count its bytes.

That takes no memory and little time. The tensors have shapes and dtypes only. On a CPU they say so
(`models.estimate.on_cpu`), so operators are those that this machine's processor would run; meta
tensors stand for a GPU's, where attention is torch's fused kernel. What they cannot say is answered
here: which kernel a GPU takes, and how many tokens a router sends to each expert.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.torch_private import (
    efficient_attention,
    flash_attention_by_heads,
    storage_address,
    without_torch_functions,
)
from models.estimate.on_cpu import OnCPU, tensors_of
from models.estimate.results import result_on_meta

Device = Literal["cpu", "cuda"]


@contextmanager
def without_storage(device: Device) -> Iterator[None]:
    """Make all tensors without storage, which operators take for tensors of `device`."""
    no_storage = torch.device("meta") if device == "cuda" else OnCPU()
    with no_storage, _Answers(device):
        yield


class _Answers(TorchFunctionMode):
    """Answers what tensors without storage cannot: which kernel a GPU takes, and how many tokens
    each expert gets."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Return the result of a function of torch, answered here if the tensors do not tell."""
        kwargs = kwargs or {}
        # the sum in `models.feed_forward.moe.count_choices`, the only one of integers by index
        if func is torch.Tensor.index_add_ and args[0].dtype == torch.int64:
            return _EvenCounts(args[2].numel(), args[0].numel())
        if func is F.scaled_dot_product_attention and self._device == "cuda":
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _EvenCounts:
    """The counts of `choices` among `experts`, as equal as they can be."""

    choices: int
    experts: int

    def tolist(self) -> list[int]:
        least, remainder = divmod(self.choices, self.experts)
        return [least + 1] * remainder + [least] * (self.experts - remainder)

    def cumsum(self, dim: int) -> Tensor:
        """Return the ends of the experts' rows, int64 [experts], which grouped products read: a
        tensor without storage. dim: of the only dimension."""
        return torch.empty(self.experts, dtype=torch.int64)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of the kernel that torch chooses on a GPU.

    That is flash attention in half precision without a mask, and otherwise the memory-efficient
    kernel.
    """
    if attn_mask is None and query.dtype.itemsize == 2:
        output, *_ = flash_attention_by_heads(query, key, value, 0.0, is_causal, scale=scale)
        return output
    if attn_mask is not None:
        # torch makes a bias of a mask of booleans.
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype)
        attn_mask = bias.expand(*query.shape[:3], key.shape[2])
    output, *_ = efficient_attention(
        query,
        key,
        value,
        attn_mask,
        query.requires_grad,
        0.0,
        is_causal,
        scale=scale,
    )
    return output


class SimulatedAxis(Axis):
    """An axis without its other ranks: the results of its collectives have the right shapes and
    arbitrary values."""

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        return lambda: gathered

    def start_exchange(self, tensor: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(tensor)
        return lambda: received

    def start_exchange_of_counts(self, counts: Any) -> Callable[[], tuple[list[int], list[int]]]:
        sent = counts.tolist()  # rows by expert of all ranks
        experts_of_rank = len(sent) // self.size
        # every rank's router sends as many rows to this rank's experts
        received = sent[:experts_of_rank] * self.size
        return lambda: (sent, received)

    def start_exchange_of_rows(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Callable[[], Tensor]:
        # as on a CPU: over gloo each rank's rows are a tensor of their own
        if not rows.is_meta:
            return super().start_exchange_of_rows(rows, sent, received)
        incoming = rows.new_empty((sum(received), rows.shape[1]))
        return lambda: incoming

    def start_uneven_exchange(
        self, outgoing: Sequence[Tensor], sizes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        received = [outgoing[0].new_empty(size) for size in sizes]
        return lambda: received

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        # As on a CPU: received from all ranks, then summed.
        received = torch.empty_like(tensor)
        return lambda: received.unflatten(0, (self.size, -1)).sum(0)

    def start_shift(self, tensor: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(tensor)
        return lambda: received

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        return lambda: tensor


def simulated_experts(
    tp: int,
    expert: int,
    expert_tensor: int,
) -> ExpertAxes | None:
    """Return the axes of experts as the first of the ranks that share them has them, without the
    other ranks; None if each rank has slices of all experts.

    tp: tensor-parallel ranks. expert: ranks over which experts are spread. expert_tensor: slices of
    each expert; 0: as many as there are tp ranks.
    """
    slices = expert_tensor or tp
    if expert == 1 and slices == tp:
        return None
    return ExpertAxes(
        SimulatedAxis("expert", 0, expert), SimulatedAxis("tp", 0, slices), Axis("replicas")
    )


class LiveMemory(TorchDispatchMode):
    """Counts the live bytes of tensors that are created inside.

    now: the live bytes.
    peak: their largest number since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        # By address.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # what is asked of tensors here needs no answers of `_Answers`
        with without_torch_functions():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator, and count the memory that it created."""
        arguments = tensors_of((*args, *kwargs.values()))
        argument_storages = {storage_address(tensor) for tensor in arguments}
        result = result_on_meta(func, args, kwargs)
        for tensor in tensors_of((result,)):
            address = storage_address(tensor)
            # The result of a view or of an operator in place has the storage of an argument.
            if address not in argument_storages:
                self._count(address, tensor.untyped_storage())
        return result

    def _count(self, address: int, storage: torch.UntypedStorage) -> None:
        """Count a storage as live until its last reference is dropped."""
        size = storage.nbytes()
        # An operator may return several views of one new storage.
        if address not in self._storages:
            reference = weakref.ref(storage, lambda _: self._forget(address, size))
            self._storages[address] = reference
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, address: int, size: int) -> None:
        del self._storages[address]
        self.now -= size

    def begin(self) -> int:
        """Return the bytes that are live now, and restart the peak from there."""
        self.peak = self.now
        return self.now
