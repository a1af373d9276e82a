"""A device that is not there: torch believes in it, this machine's CPU does its work, and it
forgives nothing.

Code that has only met CPUs hides what a GPU would not forgive: a tensor made without `device=`, a
tensor asked for `.numpy()`, a collective over host memory. Here such code meets a device "pretend"
and fails as it would on CUDA, while every number stays what it is on a CPU, for the same kernels
make it. So there are two laws to test by: nothing raises, and results are those of the CPU, bit for
bit, wherever our code does not ask for the device.

How it works. torch keeps one place free for a device of somebody else's (PrivateUse1). A tensor of
ours there is a real one, with sizes, strides, version and autograd of torch's own; only its storage
differs: its address is no address, so whoever reads that memory past torch dies of it, and
`storage.host` is a CPU storage where the numbers are. Views, `.data =`, in-place operators and
parameters that share one flat buffer need no care then: who shares a storage shares its host. An
operator (`_run`) turns tensors into CPU tensors over the same host storages, lets the CPU work, and
turns what comes back into tensors of the device, over the storage of an argument where it is a view
of that.

What raises: a CPU tensor among those of the device, a generator of the CPU, `.numpy()`. CUDA is
milder: it takes CPU tensors without dims in sums and products, and CPU indices, and waits for each.
Where deterministic algorithms are asked for, what CUDA has none for raises, as there.

What waits. The host of a GPU runs ahead of it until it asks for a value or a size, or copies
without `non_blocking` between the two. `waits` lists each operator that makes it wait: CUDA's
`bincount` twice, for the least and the largest.

Ranks (`join`) talk as over NCCL, and no milder: groups take tensors of the device only, contiguous
and of a dtype that NCCL has, tags mean nothing, so messages of two ranks match by order, results
are there when they have been waited for and not before, and until then nobody may write to what is
under way. (gloo carries it all.)

torch must know a device before its first backward pass and cannot forget it: this is for ranks of
    tests/ranks.py.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import backend_registration

from megaprec.precision import gemm
from parallel.mesh import make_mesh

NAME = "pretend"
_CPU = torch.device("cpu")
_NO_ADDRESS = 1 << 62  # set in an address, it is none
waits: list[
    str
] = []  # operators for which a host waits for its device, in the order of their calls
issued: set[str] = set()  # names of all operators that ran on the device
_SENT = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
"""What NCCL sends. It knows FP8 only for copies and from Hopper on, and int16 not at all."""
_WITHOUT_ORDER = (
    "adaptive_avg_pool2d_backward",
    "avg_pool3d_backward",
    "bincount",
    "ctc_loss_backward",
    "cumsum",
    "grid_sampler_2d_backward",
    "histc",
    "kthvalue",
    "max_pool3d_with_indices_backward",
    "median",
    "nll_loss2d_forward",
    "put_",
    "reflection_pad1d_backward",
    "replication_pad1d_backward",
    "upsample_linear1d_backward",
)
"""Operators of which CUDA has no deterministic kernel (torch.use_deterministic_algorithms)."""
_ASKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_ANY = torch._C.DispatchKey.CPU  # of kernels that only change sizes and strides, on whatever device


def install() -> None:
    """Makes the device "pretend" known to torch in this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CPU"
        ):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, functools.partial(_run, op), "PrivateUse1")
    library.impl("copy_", _copy_, "PrivateUse1")
    for key in (
        "PrivateUse1",
        "AutogradPrivateUse1",
    ):  # a CPU tensor's `.data` may become CUDA's, so it may here
        library.impl("_has_compatible_shallow_copy_type", lambda tensor, other: True, key)
    # the CPU computes bf16 as the device does, by torch's own products
    gemm._has_bf16_products = lambda: True
    # what is asked of it is done when it returns
    torch.accelerator.synchronize = lambda device=None: None
    # of autocast, which a loop may step within
    torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    torch.pretend.library = library  # type: ignore[attr-defined]  # which takes all back when it is collected


def join(mesh: DeviceMesh) -> DeviceMesh:
    """Leaves the world of `mesh` and joins one of the same ranks that compute on the device, which
    must be known.

    Returns its mesh, of the same shape. Collective over the world.
    """
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    size = dist.get_world_size()
    dist.destroy_process_group()
    dist.Backend.register_backend(NAME, _Group.make, devices=[NAME])
    store = dist.PrefixStore(NAME, store)
    dist.init_process_group(
        NAME, store=store, rank=rank, world_size=size, device_id=torch.device(NAME, 0)
    )
    return make_mesh(**dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)), device=NAME)


def on_host(tensor: Tensor) -> Tensor:
    """The CPU tensor over the numbers of a tensor of the device."""
    host: Any = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        host.host, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


class _Call:
    """One operator's arguments on their way down to the CPU, and its results on their way up."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op = op
        self.pairs: list[tuple[Tensor, Tensor]] = []  # a tensor of the device, and the CPU's
        self.strays: list[Tensor] = []  # tensors of the CPU
        self.storages: dict[int, torch.UntypedStorage] = {}  # of the device, by their hosts

    def down(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor_down(value)
        if isinstance(value, torch.Generator):
            raise RuntimeError(
                f"{self.op}: expected a generator of {NAME}, found one of {value.device}"
            )
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, list | tuple):
            return type(value)(map(self.down, value))
        return value

    def _tensor_down(self, tensor: Tensor) -> Tensor:
        if not _on_device(tensor):
            self.strays.append(tensor)
            return tensor
        storage: Any = tensor.untyped_storage()
        self.storages[storage.host._cdata] = storage
        self.pairs.append((tensor, on_host(tensor)))
        return self.pairs[-1][1]

    def require_one_device(self) -> None:
        if self.strays:
            found = [
                f"{t.device} {[*t.shape]}"
                for t in (*(device for device, _ in self.pairs), *self.strays)
            ]
            raise RuntimeError(
                f"{self.op}: expected all tensors to be on the same device, found "
                f"{', '.join(found)}"
            )

    def up(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            same = [device for device, host in self.pairs if host is value]
            return same[0] if same else self._tensor_up(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.up, value))
        return value

    def _tensor_up(self, host: Tensor) -> Tensor:
        below = host.untyped_storage()
        storage = self.storages.get(below._cdata) or _storage(below)
        self.storages[below._cdata] = storage
        return _lay(torch._C._acc.create_empty_tensor((), host.dtype), storage, host)  # type: ignore[attr-defined]

    def resize(self) -> None:
        """Lets tensors of the device follow those whose sizes or memory the operator has
        changed."""
        for device, host in self.pairs:
            moved = device.untyped_storage().nbytes() != host.untyped_storage().nbytes()
            if moved or device.shape != host.shape or device.stride() != host.stride():
                _lay(
                    device,
                    _storage(host.untyped_storage()) if moved else device.untyped_storage(),
                    host,
                )


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    waits.extend([op._opname] * _times_waited_for(op, args))
    issued.add(op.name())
    if torch.are_deterministic_algorithms_enabled() and _lacks_order(op, args, kwargs):
        raise RuntimeError(f"{op}: has no deterministic kernel on {NAME}")
    call = _Call(op)
    below = call.down(args)
    named = {name: call.down(value) for name, value in kwargs.items()}
    call.require_one_device()
    wanted = (argument.type.kind() for argument in op._schema.arguments)
    numbers = any(
        kind == "TensorType" and isinstance(x, int | float)
        for kind, x in zip(wanted, args, strict=False)
    )
    # torch hands numbers on as numbers
    made = (op.overloadpacket if numbers else op)(*below, **named)
    call.resize()
    return call.up(made)


def _lacks_order(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Any) -> bool:
    name = op._opname.strip("_")
    if name == "cumsum":  # of integers it has one
        return (kwargs.get("dtype") or args[0].dtype).is_floating_point
    if name == "bincount":  # without weights it has one
        return len(args) > 1 and args[1] is not None
    return op._opname in _WITHOUT_ORDER


def _times_waited_for(op: torch._ops.OpOverload, args: Sequence[Any]) -> int:
    if not any(tag in op.tags for tag in _ASKS):
        return 0
    if op._opname == "index":  # the number of True elements is asked for, no number of others
        return sum(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    return 2 if op._opname == "bincount" else 1


def _copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The one operator that goes from one device to the other."""
    issued.add("aten::copy_")
    if not non_blocking and _on_device(to) != _on_device(source):
        waits.append("copy_")
    below, above = (on_host(tensor) if _on_device(tensor) else tensor for tensor in (to, source))
    below.copy_(above)
    return to


def _storage(host: torch.UntypedStorage) -> Any:
    address = host.data_ptr() | _NO_ADDRESS
    device = torch.device(NAME, 0)
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, host.nbytes())
    storage.host = host  # lives as long as the storage does
    return storage


def _lay(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """`tensor`, now over `storage` with sizes, strides and offset of `like`."""
    lay = torch.ops.aten.set_.source_Storage_storage_offset
    return lay._op_dk(_ANY, tensor, storage, like.storage_offset(), like.shape, like.stride())


class _Work(dist.Work):
    """A transfer under way, of what is `given`. Who waits for it puts the result in place."""

    def __init__(self, work: dist.Work, given: Tensor | None, finish: Callable[[], object]) -> None:
        super().__init__()
        self.work = work
        self.finish = finish
        self.given = given
        self.kept = torch.empty(0) if given is None else _copy(given)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        if self.given is not None and not torch.equal(bits(on_host(self.given)), bits(self.kept)):
            raise RuntimeError(
                f"a tensor of {[*self.given.shape]} was written to while it was under way"
            )
        self.finish()
        self.given = None
        self.finish = lambda: None
        return True


def bits(values: Tensor) -> Tensor:
    """uint8, of a tensor on the CPU: equal where NaNs are too."""
    return values.contiguous().view(-1).view(torch.uint8)


class _Group(dist.ProcessGroup):
    """A process group for tensors of the device, by gloo over copies of theirs."""

    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    @staticmethod
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> "_Group":
        return _Group(store, rank, size, timeout)

    def _get_backend(self, device: torch.device) -> "_Group":
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (given,) = tensors
        result = _copy(given)
        return _Work(
            self.gloo.allreduce([result], opts), given, lambda: on_host(given).copy_(result)
        )

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any) -> dist.Work:
        result = _copy(whole)
        copy = _copy(part)
        work = self.gloo.allgather([[*result.view(self.size(), *part.shape).unbind()]], [copy])
        return _Work(work, part, lambda: on_host(whole).copy_(result))

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any) -> dist.Work:
        result = _copy(whole)
        reduction = dist.AllreduceOptions()
        reduction.reduceOp = opts.reduceOp
        work = self.gloo.allreduce([result], reduction)
        return _Work(
            work, whole, lambda: on_host(part).copy_(result.chunk(self.size())[self.rank()])
        )

    def all_to_all_single(
        self, whole: Tensor, part: Tensor, sizes: list[int], part_sizes: list[int], opts: Any
    ) -> dist.Work:
        result = _copy(whole)
        copy = _copy(part)
        work = self.gloo.alltoall_base(result, copy, sizes, part_sizes, opts)
        return _Work(work, part, lambda: on_host(whole).copy_(result))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        (given,) = tensors
        copy = _copy(given)
        return _Work(self.gloo.send([copy], to, 0), given, lambda: copy)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        (given,) = tensors
        result = _copy(given)
        return _Work(
            self.gloo.recv([result], source, 0), None, lambda: on_host(given).copy_(result)
        )

    def barrier(self, opts: Any) -> dist.Work:
        return self.gloo.barrier()

    _allgather_base: Any = all_gather_single  # its name before torch 2.13
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single


def _copy(tensor: Tensor) -> Tensor:
    if not _on_device(tensor):
        raise RuntimeError(f"this group has no backend for tensors on {tensor.device}")
    if tensor.dtype not in _SENT or not tensor.is_contiguous():
        raise RuntimeError(f"this group sends no {tensor.dtype} with the strides {tensor.stride()}")
    return on_host(tensor).clone()
