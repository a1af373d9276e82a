"""A process group for ranks that share one GPU, which NCCL refuses and gloo half supports.

Every message goes through the host's memory over gloo. Messages match by order, as over NCCL, and
what NCCL would not send raises. All else runs on the GPU: each kernel, dtype, stride and stream of
a layout of several ranks.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from parallel.mesh import make_mesh

BACKEND = "through_host"


class Work(dist.Work):
    """A message under way on the host; its result reaches the device when it is waited for."""

    def __init__(self, work: dist.Work, finish: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.work = work
        self.finish = finish

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        finish = self.finish
        self.finish = lambda: None
        finish()
        return True


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory; waits for the stream of the GPU."""
    if not tensor.is_contiguous():
        raise RuntimeError(f"NCCL sends no tensor with the strides {tensor.stride()}")
    return tensor.detach().to("cpu", copy=True)


class ThroughHost(dist.ProcessGroup):
    """Collectives and messages of tensors on any device, over gloo."""

    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _get_backend(self, device: torch.device) -> "ThroughHost":
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Work:  # type: ignore[override]
        (tensor,) = tensors
        result = on_host(tensor)
        work = self.gloo.allreduce([result], options)
        return Work(work, lambda: tensor.copy_(result))

    def all_gather_single(self, whole: Tensor, part: Tensor, options: Any = None) -> Work:
        result = on_host(whole)
        parts = [*result.view(self.size(), *part.shape).unbind()]
        work = self.gloo.allgather([parts], [on_host(part)])
        return Work(work, lambda: whole.copy_(result))

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, options: Any) -> Work:
        result = on_host(whole)
        reduction = dist.AllreduceOptions()
        reduction.reduceOp = options.reduceOp
        work = self.gloo.allreduce([result], reduction)
        return Work(work, lambda: part.copy_(result.chunk(self.size())[self.rank()]))

    def all_to_all_single(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
        options: Any = None,
    ) -> Work:
        result = on_host(received)
        work = self.gloo.alltoall_base(
            result, on_host(sent), received_sizes, sent_sizes, dist.AllToAllOptions()
        )
        return Work(work, lambda: received.copy_(result))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Work:  # type: ignore[override]
        (tensor,) = tensors
        copy = on_host(tensor)
        # the work keeps the copy until it is sent
        return Work(self.gloo.send([copy], to, 0), lambda: copy)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:  # type: ignore[override]
        (tensor,) = tensors
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        work = self.gloo.recv([result], source, 0)
        return Work(work, lambda: tensor.copy_(result))

    def barrier(self, options: Any = None) -> Any:  # type: ignore[override]
        return self.gloo.barrier()

    # the names of the same in torch 2.11
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ThroughHost:
    return ThroughHost(store, rank, size, timeout)


def share_device(mesh: DeviceMesh, device: str) -> DeviceMesh:
    """Leave the world of `mesh` and join one of the same ranks, whose tensors lie on one device.

    Collective over the world.
    """
    store = _get_default_store()
    rank = dist.get_rank()
    size = dist.get_world_size()
    degrees = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    dist.destroy_process_group()
    dist.Backend.register_backend(BACKEND, _make, devices=[device])
    own_device = None
    if device == "cuda":
        torch.cuda.set_device(0)
        own_device = torch.device("cuda", 0)
    dist.init_process_group(
        BACKEND,
        store=dist.PrefixStore(BACKEND, store),
        rank=rank,
        world_size=size,
        device_id=own_device,
    )
    return make_mesh(**degrees, device=device)
