"""A device that is not there: torch believes in it, this machine's CPU does its work, and it forgives nothing.

Code that has only met CPUs hides what a GPU would not forgive: a tensor made without `device=`, a number asked of
`.numpy()`, a collective over host memory. Here such code meets a device "pretend" and fails as it would on CUDA,
while every number stays what it is on a CPU, for the same kernels make it. So there are two laws to test by:
nothing raises, and results are those of the CPU, bit for bit, wherever our code does not branch on the device.

How it works. torch keeps one place free for a device of somebody else's (PrivateUse1). A tensor of ours there is a
real one, with sizes, strides, version and autograd of torch's own; only its storage differs: its address is no
address, so whoever reads the memory past torch dies of it, and `storage.host` is a CPU storage where the numbers
are. Views, `.data =`, in-place operators and parameters that share one flat buffer need no care then: who
shares a storage shares its host.
An operator (`_run`) turns tensors into CPU tensors over the same host storages, lets the CPU work, and turns what
comes back into tensors of the device, over the storage of an argument where it is a view of that.

What raises, as on CUDA: CPU tensors of one dimension or more among those of the device, CPU tensors that would be
written to, generators of the CPU, `.numpy()`. More is asked than on CUDA in one thing: an index must lie on the device.

Ranks (`join`) talk as over NCCL: groups take tensors of the device only, tags mean nothing, messages of two ranks
match by order. And results of a collective are there when it has been waited for and not before.

torch cannot forget a device: `join` in processes that end, those of tests/ranks.py.
"""

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import backend_registration

from parallel.mesh import make_mesh

NAME = "pretend"
CPU = torch.device("cpu")
_NO_ADDRESS = 1 << 62  # set in an address, it is none
_set = torch.ops.aten.set_.source_Storage_storage_offset


def join(mesh: DeviceMesh) -> DeviceMesh:
    """Makes the device, leaves the world of `mesh`, and joins one of the same ranks that compute on the device.

    Returns its mesh, of the same shape. Collective over the world.
    """
    pp, dp, tp = mesh.shape

    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.Backend.register_backend(NAME, _Group.make, devices=[NAME])
    store = dist.PrefixStore(NAME, store)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size, device_id=torch.device(NAME, 0))
    return make_mesh(pp, dp, tp, device=NAME)


def install() -> None:
    """Makes the device "pretend" known to torch in this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, functools.partial(_run, op), "PrivateUse1")
    library.impl("copy_", _copy_, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):  # a CPU tensor's `.data` may move to CUDA, so here too
        library.impl("_has_compatible_shallow_copy_type", lambda tensor, other: True, key)
    torch.pretend.library = library  # type: ignore[attr-defined]  # which forgets all when it is collected


class _Module:
    """What torch asks of a device's module; it becomes `torch.pretend`."""

    library: torch.library.Library

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


def on_host(tensor: Tensor) -> Tensor:
    """The CPU tensor over the numbers of a tensor of the device."""
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(tensor.untyped_storage().host, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[attr-defined]


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


class _Call:
    """One operator's arguments on their way down to the CPU and its results on their way up."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op = op
        self.pairs: list[tuple[Tensor, Tensor]] = []  # a tensor of the device, and the CPU's
        self.strays: list[Tensor] = []  # CPU tensors among the arguments
        self.storages: dict[int, torch.UntypedStorage] = {}  # of the device, by the host's

    def down(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor_down(value)
        if isinstance(value, torch.device):
            return CPU
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"{self.op}: expected a generator of {NAME}, found one of {value.device}")
        return type(value)(map(self.down, value)) if isinstance(value, list | tuple) else value

    def _tensor_down(self, tensor: Tensor) -> Tensor:
        if not _on_device(tensor):
            self.strays.append(tensor)
            return tensor
        storage = tensor.untyped_storage()
        self.storages[storage.host._cdata] = storage  # type: ignore[attr-defined]
        self.pairs.append((tensor, on_host(tensor)))
        return self.pairs[-1][1]

    def check(self) -> None:
        """Raises RuntimeError if tensors of the CPU are where they may not be."""
        for stray in self.strays:
            if stray.dim() or self.op._schema.is_mutable:
                found = [f"{t.device} {[*t.shape]}" for t in (*(device for device, _ in self.pairs), stray)]
                raise RuntimeError(f"{self.op}: expected all tensors to be on the same device, found {found}")

    def up(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            same = [device for device, host in self.pairs if host is value]
            return same[0] if same else self._tensor_up(value)
        return type(value)(map(self.up, value)) if isinstance(value, list | tuple) else value

    def _tensor_up(self, host: Tensor) -> Tensor:
        below = host.untyped_storage()
        storage = self.storages.setdefault(below._cdata, _storage(below))
        return _lay(torch._C._acc.create_empty_tensor((), host.dtype), storage, host)

    def resize(self) -> None:
        """Lets tensors of the device follow those whose size or memory the operator has changed."""
        for device, host in self.pairs:
            below = host.untyped_storage()
            if (device.shape, device.stride()) != (host.shape, host.stride()) or below.nbytes() != _bytes(device):
                _lay(device, _storage(below), host)


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    call = _Call(op)
    down = call.down(args), {name: call.down(value) for name, value in kwargs.items()}
    call.check()
    numbers = any(isinstance(x, int | float) and a.type.kind() == "TensorType" for x, a in zip(args, op._schema.arguments))
    made = (op.overloadpacket if numbers else op)(*down[0], **down[1])
    call.resize()
    return call.up(made)


def _copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The one operator that goes from one device to the other."""
    below = [on_host(tensor) if _on_device(tensor) else tensor for tensor in (to, source)]
    below[0].copy_(below[1])
    return to


def _storage(host: torch.UntypedStorage) -> torch.UntypedStorage:
    address, device = host.data_ptr() | _NO_ADDRESS, torch.device(NAME, 0)
    storage = torch._C._construct_storage_from_data_pointer(address, device, host.nbytes())
    storage.host = host  # lives as long as the storage does
    return storage


def _lay(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """`tensor`, now over `storage` with sizes, strides and offset of `like`."""
    below = torch._C.DispatchKey.CPU
    return _set._op_dk(below, tensor, storage, like.storage_offset(), like.shape, like.stride())


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class _Done(dist.Work):
    """A collective under way; who waits carries its result to where it belongs."""

    def __init__(self, work: dist.Work, finish: Callable[[], object]) -> None:
        super().__init__()
        self.work, self.finish = work, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        self.finish()
        self.finish = lambda: None
        return True


class _Group(dist.ProcessGroup):
    """A process group for tensors of the device, by gloo over copies of theirs."""

    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

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

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (copy,) = _copies(tensors)
        return _Done(self.gloo.allreduce([copy], opts), lambda: on_host(tensors[0]).copy_(copy))

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        into, copy = _copies([whole, part])
        work = self.gloo.allgather([[*into.view(self.size(), *copy.shape).unbind()]], [copy])
        return _Done(work, lambda: on_host(whole).copy_(into))

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        _, copy = _copies([part, whole])
        own = copy.chunk(self.size())[self.rank()]
        return _Done(self.gloo.allreduce([copy], opts and _reduction(opts)), lambda: on_host(part).copy_(own))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self.gloo.send(_copies(tensors), to, 0)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        copies = _copies(tensors)
        return _Done(self.gloo.recv(copies, source, 0), lambda: on_host(tensors[0]).copy_(copies[0]))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.gloo.barrier()

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # names before torch 2.13


def _reduction(opts: Any) -> dist.AllreduceOptions:
    made = dist.AllreduceOptions()
    made.reduceOp = opts.reduceOp
    return made


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        if not _on_device(tensor):
            raise RuntimeError(f"no backend for {tensor.device}: this group is for {NAME}")
    return [on_host(tensor).clone() for tensor in tensors]
