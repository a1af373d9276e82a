"""Tensors without storage: a model is built and run on them to count its bytes, in no memory and
little time.

They have shapes and dtypes only. On a CPU they say so (`models.estimate.on_cpu`), so operators are
those that this machine's processor would run; meta tensors stand for a GPU's, where attention is
torch's fused kernel. What they cannot say is answered here: which kernel a GPU takes, and how many
tokens a router sends to each expert.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from models.estimate.on_cpu import OnCPU, tensors_of

Device = Literal["cpu", "cuda"]


@contextmanager
def without_storage(device: Device) -> Iterator[None]:
    """Make all tensors without storage, which operators take for tensors of `device`."""
    with ExitStack() as held:
        if device == "cuda":
            held.enter_context(torch.device("meta"))
        else:
            held.enter_context(OnCPU())
        held.enter_context(_Answers(device))
        yield


class _Answers(TorchFunctionMode):
    """Answers what tensors without storage cannot: which kernel a GPU takes, and how many tokens
    each expert gets."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.index_add_ and args[0].dtype == torch.int64:
            return _Even(args[2].numel(), args[0].numel())
        if func is F.scaled_dot_product_attention and self._device == "cuda":
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Even:
    """The counts of `total` choices among `among` experts, as equal as they can be."""

    total: int
    among: int

    def tolist(self) -> list[int]:
        least, more = divmod(self.total, self.among)
        return [least + (n < more) for n in range(self.among)]


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
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).expand(
            *query.shape[:3], key.shape[2]
        )
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, 0.0, is_causal, scale=scale
    )[0]


class Alone(Axis):
    """An axis without its other ranks: the results of its collectives have the right shapes and
    arbitrary values."""

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        whole = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        return lambda: whole

    def exchanged_counts(self, counts: Any) -> tuple[list[int], list[int]]:
        own = counts.tolist()
        return own, own[: len(own) // self.size] * self.size  # every rank's router sends as many

    def start_uneven_exchange(
        self, outgoing: Sequence[Tensor], sizes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        received = [outgoing[0].new_empty(size) for size in sizes]
        return lambda: received

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(tensor)  # as on a CPU: received from all ranks, then summed
        return lambda: received.unflatten(0, (self.size, -1)).sum(0)

    def start_shift(self, tensor: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(tensor)
        return lambda: received

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        return lambda: tensor


def lone_experts(tp: int, expert: int, expert_tensor: int) -> ExpertAxes | None:
    """Return the axes of the first of the ranks that share experts; None if these lie as other
    feed-forwards do.

    expert_tensor: slices of each expert; 0: as many as there are tp ranks.
    """
    in_slices = expert_tensor or tp
    if expert == 1 and in_slices == tp:
        return None
    return ExpertAxes(Alone("expert", 0, expert), Alone("tp", 0, in_slices), Axis("replicas"))


class Alive(TorchDispatchMode):
    """Counts the live bytes of tensors that are created inside. most: the peak since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_of((*args, *(kwargs or {}).values()))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result if isinstance(result, list | tuple) else (result,)):
            if tensor.untyped_storage()._cdata not in given:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        size = storage.nbytes()
        if place not in self._known:
            self._known[place] = weakref.ref(storage, lambda _: self._forget(place, size))
            self.now += size
            self.most = max(self.most, self.now)

    def _forget(self, place: int, size: int) -> None:
        del self._known[place]
        self.now -= size

    def begin(self) -> int:
        """Return the bytes that are live now, and restart the peak from there."""
        self.most = self.now
        return self.now
