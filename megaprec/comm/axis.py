"""One axis of the device mesh as one rank sees it, and the collectives along that axis.

An `Axis` is a value: its name, this rank's index along it, its size and its process group.
Functions that communicate take an `Axis` as an argument; no group is looked up in global state. An
axis of size one has no group and its collectives do nothing, so the same code runs in a plain
process without `torch.distributed`.

Every collective here is a sum, a maximum or a concatenation in rank order, and every rank of the
axis gets the same bits; only an exchange and a shift give each rank what others have for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm import gloo
from megaprec.comm.groups import make_groups
from megaprec.comm.waiting import Pending, waiting
from megaprec.errors import UserError

AXES = ("pp", "dp", "cp", "tp")  # pipeline, data, context and tensor parallel


@dataclass(frozen=True)
class Axis:
    """A mesh axis as this rank sees it: rank `rank` of `size` along it.

    group: the process group along the axis; None exactly when `size` is 1.
    rank_groups: the world ranks of all groups of this axis, [groups, size], if the axis is one of a
        mesh.
    """

    name: str
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    rank_groups: Tensor | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(mesh: DeviceMesh | None, name: str) -> "Axis":
        """Return the axis `name` of `mesh`; an axis of size one without a mesh, or if the mesh has
        no such axis.

        Raises UserError for another name than those in AXES, which every mesh would lack, and if
        the mesh has such an axis, or has its axes in another order.
        """
        if name not in AXES:
            raise UserError.of("comm.axis_unknown", name=name, axes=", ".join(AXES))
        if mesh is None or name not in _axes_of(mesh):
            return Axis(name)
        dim = _axes_of(mesh).index(name)
        size = mesh.mesh.shape[dim]
        rank = mesh.get_local_rank(name)
        group = mesh.get_group(name) if size > 1 else None
        # a row for each position on the other axes
        rank_groups = mesh.mesh.movedim(dim, -1).reshape(-1, size)
        return Axis(name, rank, size, group, rank_groups)

    @staticmethod
    def world(mesh: DeviceMesh | None) -> "Axis":
        """Return the axis over all ranks of `mesh`.

        Raises UserError unless these are all ranks of the world.
        """
        if mesh is None or mesh.size() == 1:
            return Axis("world")
        world_size = dist.get_world_size()
        if mesh.size() != world_size:
            raise UserError.of("comm.mesh_is_not_world", size=mesh.size(), world_size=world_size)
        return Axis("world", dist.get_rank(), mesh.size(), dist.group.WORLD)

    @staticmethod
    def replicas(mesh: DeviceMesh | None) -> "Axis":
        """Return the axis "dp" of an optimizer: the ranks with equal weights, dp and cp together.

        Ranks that share a sequence are neighbours. Collective over the world if both are larger
        than one.
        """
        return Axis._joined(mesh, "dp", ("dp", "cp"))

    @staticmethod
    def stage(mesh: DeviceMesh | None, separate_group: bool = False) -> "Axis":
        """Return the axis over all ranks of this pipeline stage: dp, cp and tp. Collective over the
        world.

        separate_group: create a process group of its own, for collectives that run while others
            are in flight over these axes.
        """
        return Axis._joined(mesh, "stage", ("dp", "cp", "tp"), separate_group)

    @staticmethod
    def _joined(
        mesh: DeviceMesh | None,
        name: str,
        axis_names: tuple[str, ...],
        separate_group: bool = False,
    ) -> "Axis":
        """Return the axes of these names as one axis, of which the last varies fastest.

        separate_group: create a process group even if the mesh has one of the same ranks.
        """
        every_axis = [Axis.of(mesh, axis_name) for axis_name in axis_names]
        axes = [axis for axis in every_axis if axis.size > 1]
        if mesh is None or not axes:
            return Axis(name)
        # the mesh has a group of these ranks already
        if len(axes) == 1 and not separate_group:
            (only,) = axes
            return replace(only, name=name)
        dims = [_axes_of(mesh).index(axis.name) for axis in axes]
        size = prod(axis.size for axis in axes)
        # a row for each position on the other axes
        last_dims = [*range(-len(dims), 0)]
        rank_groups = mesh.mesh.movedim(dims, last_dims).reshape(-1, size)
        rank = 0
        for axis in axes:  # as digits of a number, each in the base of its axis
            rank = rank * axis.size + axis.rank
        group = make_groups(rank_groups)
        return Axis(name, rank, size, group, rank_groups)

    def subaxis(self, size: int, new_name: str, separate_group: bool = False) -> "Axis":
        """Split this axis into runs of `size` neighbouring ranks and return this rank's run.

        separate_group: create a process group even if the run is the whole axis.
        Raises UserError unless `size` divides the axis. Collective over the world.
        """
        if self.size % size:
            raise UserError.of(
                "comm.runs_do_not_divide", ranks=self.size, axis=self.name, run_length=size
            )
        if self.rank_groups is None or size == 1:
            return Axis(new_name)
        if size == self.size and not separate_group:
            return Axis(new_name, self.rank, size, self.group, self.rank_groups)
        rank_groups = self.rank_groups.reshape(-1, size)
        group = make_groups(rank_groups)
        rank_in_run = self.rank % size
        return Axis(new_name, rank_in_run, size, group, rank_groups)

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce SUM over this axis, in place."""
        self.start_sum_(tensor)()
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """All-reduce MAX over this axis, in place."""
        # direct messages are faster than gloo's ring for small tensors (docs/performance.md)
        if self.group is not None and _on_cpu(tensor):
            gloo.max_(tensor, self.rank, self.group)
        elif self.group is not None:
            with waiting():
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather over this axis: each rank's [n, ...] becomes [size * n, ...] in rank order."""
        return self.start_gather(tensor)()

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter SUM over this axis: [size * n, ...] becomes this rank's [n, ...]."""
        return self.start_scatter_sum(tensor)()

    def exchange(self, tensor: Tensor) -> Tensor:
        """All-to-all over this axis: rank i receives chunk i of dim 0 of each rank's tensor, in
        rank order."""
        return self.start_exchange(tensor)()

    def start_exchange(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `exchange`; the returned function waits for the result and returns it."""
        if self.group is None:
            return Pending((), tensor)
        self._require_divides(tensor, 0)
        tensor = tensor.contiguous()
        if _on_cpu(tensor):
            return gloo.start_exchange(tensor, self.rank, self.group)
        received = torch.empty_like(tensor)
        work = dist.all_to_all_single(received, tensor, group=self.group, async_op=True)
        assert work is not None
        return Pending([work], received)

    def start_shift(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start sending `tensor` to the next rank of the ring that the axis closes to.

        The returned function waits for the previous rank's tensor, of the same shape, and returns
        it. Until then, do not write `tensor`.
        """
        if self.group is None:
            return Pending((), tensor)
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        next_rank = (self.rank + 1) % self.size
        previous_rank = (self.rank - 1) % self.size
        receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous_rank)
        send = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=next_rank)
        # As one batch, so that with NCCL no rank waits for another's receive.
        works = dist.batch_isend_irecv([receive, send])
        return Pending(works, received, keep=(tensor,))

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        """Start `sum_`; the returned function waits for its end.

        Do not read or write `tensor` until that function has returned.
        """
        if self.group is None:
            return Pending((), None)
        if _on_cpu(tensor):
            return gloo.start_sum_(tensor, self.rank, self.group)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return Pending([work], None)

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `gather`; the returned function waits for the result and returns it."""
        if self.group is None:
            return Pending((), tensor)
        tensor = tensor.contiguous()
        if _on_cpu(tensor):
            return gloo.start_gather(tensor, self.rank, self.group)
        full_shape = (self.size * tensor.shape[0], *tensor.shape[1:])
        full = tensor.new_empty(full_shape)
        work = _all_gather(full, tensor, group=self.group, async_op=True)
        return Pending([work], full)

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `scatter_sum`; the returned function waits for the result and returns it."""
        if self.group is None:
            return Pending((), tensor)
        self._require_divides(tensor, 0)
        tensor = tensor.contiguous()
        if _on_cpu(tensor):
            return gloo.start_scatter_sum(tensor, self.rank, self.group)
        chunk_shape = (tensor.shape[0] // self.size, *tensor.shape[1:])
        summed = tensor.new_empty(chunk_shape)
        work = _reduce_scatter(summed, tensor, group=self.group, async_op=True)
        return Pending([work], summed)

    def start_scatter_sum_(self, flat: Tensor) -> Callable[[], object]:
        """Start a reduce-scatter SUM in place.

        When the returned function has returned, this rank's chunk of `flat` contains the sum, and
        the other chunks are undefined.
        """
        if self.group is None:
            return Pending((), None)
        self._require_divides(flat, 0)
        if _on_cpu(flat):
            return gloo.start_scatter_sum_(flat, self.rank, self.group)
        work = _reduce_scatter(self.chunk(flat), flat, group=self.group, async_op=True)
        return Pending([work], None)

    def start_gather_(self, flat: Tensor) -> Callable[[], object]:
        """Start an all-gather in place, of which this rank's chunk of `flat` is the input.

        The other chunks are filled in when the returned function has returned.
        """
        if self.group is None:
            return Pending((), None)
        if _on_cpu(flat):
            return gloo.start_gather(self.chunk(flat), self.rank, self.group, into=flat)
        work = _all_gather(flat, self.chunk(flat), group=self.group, async_op=True)
        return Pending([work], None)

    def start_gather_from(self, own: Tensor, whole: Tensor, tag: int = 0) -> Callable[[], object]:
        """Start an all-gather of this rank's `own` [n] into `whole` [size * n], in rank order.

        tag: on CPU ranks only gathers with the same one are matched: ranks that gather different
            tensors wait, and do not take each other's. NCCL matches them by order alone.
        Until the returned function has returned, do not write `own`, nor read or write `whole`.
        """
        own_chunk = self.chunk(whole)
        if self.group is None or not _on_cpu(whole):
            own_chunk.copy_(own)
            return self.start_gather_(whole)
        wait = gloo.start_gather(own, self.rank, self.group, into=whole, tag=tag)
        # while the transfers are under way
        own_chunk.copy_(own)
        return wait

    def start_uneven_exchange(
        self,
        outgoing: Sequence[Tensor],
        sizes: Sequence[int],
    ) -> Callable[[], list[Tensor]]:
        """Start an all-to-all of flat tensors of one dtype: outgoing[r] goes to rank r.

        sizes: the number of elements that come from each rank. The returned function waits for the
        received tensors, by rank, and returns them.
        """
        if self.group is None:
            return Pending((), list(outgoing))
        first = outgoing[0]  # its dtype and device are those of all
        if _on_cpu(first):
            incoming = [first.new_empty(size) for size in sizes]
            return gloo.start_uneven_exchange(list(outgoing), incoming, self.rank, self.group)
        received = first.new_empty(sum(sizes))
        sent_sizes = [len(tensor) for tensor in outgoing]
        packed = torch.cat(list(outgoing))
        received_sizes = list(sizes)
        work = dist.all_to_all_single(
            received,
            packed,
            received_sizes,
            sent_sizes,
            group=self.group,
            async_op=True,
        )
        assert work is not None
        by_rank = list(received.split(received_sizes))
        return Pending([work], by_rank)

    def start_exchange_of_rows(
        self,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Callable[[], Tensor]:
        """Start an all-to-all of rows [n, h]; the returned function waits for those that come, and
        returns them: [m, h], by rank.

        sent, received: the numbers of rows that go to each rank, and come from it.
        """
        rows = rows.contiguous()
        width = rows.shape[1]
        if self.group is None or _on_cpu(rows):
            # by way of flat tensors, which a CPU's exchange takes
            rows_for_ranks = rows.split(list(sent))
            outgoing = [rows_for_rank.reshape(-1) for rows_for_rank in rows_for_ranks]
            sizes = [count * width for count in received]
            wait = self.start_uneven_exchange(outgoing, sizes)
            return lambda: torch.cat(wait()).view(-1, width)
        # One tensor each way: nothing is put together or taken apart.
        incoming = rows.new_empty((sum(received), width))
        work = dist.all_to_all_single(
            incoming,
            rows,
            list(received),
            list(sent),
            group=self.group,
            async_op=True,
        )
        assert work is not None
        return Pending([work], incoming)

    def start_exchange_of_counts(self, counts: Tensor) -> Callable[[], tuple[list[int], list[int]]]:
        """Start to exchange counts; the returned function returns those sent and those received, in
        the order of ranks.

        counts: int64 [size * n]; chunk r counts what goes to rank r. In the returned function the
        host waits for the device, but not for what the device was given since.
        """
        received = self.exchange(counts)
        # one copy to the host for both
        wait_for_both = start_copy_to_host(torch.stack((counts, received)))

        def finish() -> tuple[list[int], list[int]]:
            outgoing, incoming = wait_for_both().tolist()
            return outgoing, incoming

        return finish

    def barrier(self) -> None:
        """Wait until every rank of this axis has called `barrier`."""
        if self.group is not None:
            with waiting():
                dist.barrier(group=self.group)

    def chunk(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's chunk of `tensor`: one of `size` equal chunks along `dim` (a view)."""
        self._require_divides(tensor, dim)
        return tensor.chunk(self.size, dim)[self.rank]

    def _require_divides(self, tensor: Tensor, dim: int) -> None:
        """Raise ValueError unless the ranks can have equal chunks of a dim."""
        if tensor.shape[dim] % self.size:
            raise ValueError(
                f"{tensor.shape[dim]} elements of dim {dim} do not divide by the {self.size} ranks "
                f"of {self.name}"
            )


def _axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh's axes. Raises UserError unless each is in AXES, in the order of
    AXES."""
    names = mesh.mesh_dim_names or ()
    in_order = tuple(name for name in AXES if name in names)
    if names != in_order or not names:
        raise UserError.of(
            "comm.mesh_axes_unnamed",
            names=", ".join(names) or "without names",
            axes=", ".join(AXES),
        )
    return names


# torch 2.13 renamed these two functions and warns about the old names.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def device_of(mesh: DeviceMesh | None) -> torch.device:
    """Return the device on which this rank computes."""
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` copied to `device`.

    The copy to a GPU goes through pinned memory and is asynchronous; otherwise the host would wait
    until the GPU has finished all work queued before it.
    """
    if device.type == "cuda" and _on_cpu(values):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device, non_blocking=_on_cpu(values))


def start_copy_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy `values` to the host; the returned function waits for them and returns them.

    From a GPU they go to pinned memory, and the host waits for the copy alone. From another device
    the values themselves are returned, and whoever reads them waits.
    """
    if values.device.type != "cuda":
        return lambda: values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return on_host

    return wait
