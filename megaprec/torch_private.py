"""Private names of torch, which any release may change, under names of this project.

Every name was seen in torch 2.11, 2.13 and 2.14: the oldest and the two newest releases that the
tests pass with. A new release of torch is tried against this module first.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

without_dispatch_modes = _disable_current_modes
"""Return a context without fake tensors and other dispatch modes."""

without_torch_functions = torch._C.DisableTorchFunction
"""Return a context in which no `TorchFunctionMode` is told of calls of torch's functions."""

StatisticsNorm = _NormBase
"""The base of batch and instance norms, which may hold running statistics."""

# Kernels. The fused ones divide gradients by `grad_scale` and change nothing if `found_inf` is 1.

fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
scaled_product: Callable[..., Tensor] = torch._scaled_mm
softmax_gradient: Callable[..., Tensor] = torch._softmax_backward_data

# Fused attention with the logs of sums, which torch's public function neither returns nor takes.

_ATEN = torch.ops.aten
fused_attention_backend: Callable[..., int] = torch._fused_sdp_choice
flash_attention: Callable[..., Any] = _ATEN._flash_attention_forward
flash_attention_by_heads: Callable[..., Any] = _ATEN._scaled_dot_product_flash_attention
flash_attention_gradients: Callable[..., Any] = _ATEN._scaled_dot_product_flash_attention_backward
efficient_attention: Callable[..., Any] = _ATEN._scaled_dot_product_efficient_attention
efficient_attention_gradients: Callable[..., Any] = (
    _ATEN._scaled_dot_product_efficient_attention_backward
)
cpu_attention: Callable[..., Any] = _ATEN._scaled_dot_product_flash_attention_for_cpu
cpu_attention_gradients: Callable[..., Any] = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
)


def has_grouped_products() -> bool:
    """Return True if torch has products of rows with the matrices of their groups."""
    return hasattr(torch, "_grouped_mm")


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix; int32 `ends` are the groups'
    ends."""
    return torch._grouped_mm(rows, matrices, offs=ends)


def has_amx() -> bool:
    """Return True if the CPU multiplies bf16 matrices in tiles (AMX)."""
    return torch.cpu._is_amx_tile_supported()


def has_avx512_bf16() -> bool:
    """Return True if the CPU has the bf16 instructions of AVX512."""
    return torch.cpu._is_avx512_bf16_supported()


def has_bf16_products() -> bool:
    """Return True if the CPU has bf16 matrix products that oneDNN uses."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return True if torch has a kernel of an operator for a dispatch key, such as "CPU"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key)


def fused_products(device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return torch's product of a matrix with what it gathers, and its product whose rows it sums
    over ranks; for the CPU, which has no kernels of them, the unfused forms that torch keeps.

    device: a type of device.
    """
    # the module registers the operators
    module: Any = importlib.import_module("torch.distributed._symmetric_memory")
    if device == "cpu":
        gather_product = module._fused_all_gather_matmul_fallback
        product_sum = module._fused_matmul_reduce_scatter_fallback
        return gather_product, product_sum
    operators = torch.ops.symm_mem
    return operators.fused_all_gather_matmul, operators.fused_matmul_reduce_scatter


# Tensors, parameters and autograd.


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass of Tensor whose results are plain tensors."""


def tensor_on_device(kind: type[Tensor], tensor: Tensor, device: torch.device) -> Any:
    """Return a tensor of a subclass `kind`, over the storage of `tensor`, that operators take for
    one on `device`."""
    return Tensor._make_subclass(kind, tensor, dispatch_device=True, device_for_backend_keys=device)


def storage_address(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share, and no others while one of them lives."""
    return tensor.untyped_storage()._cdata


def num_writes(tensor: Tensor) -> int:
    """Return torch's counter of writes to a tensor; writes through `data` are not in it."""
    return tensor._version


def has_hooks(parameter: Tensor) -> bool:
    """Return True if `register_hook` was called for the parameter."""
    return bool(parameter._backward_hooks)


def has_any_hook(target: nn.Module | Tensor) -> bool:
    """Return True if a module or a parameter has a hook of any kind."""
    tables = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_post_accumulate_grad_hooks",
    )
    return any(getattr(target, table, None) for table in tables)


def record_memory_history(on: bool) -> None:
    """Let torch remember the Python stack of each live allocation on a GPU from now on, or no
    longer."""
    torch.cuda.memory._record_memory_history(
        "state" if on else None, context="state", stacks="python"
    )


def memory_snapshot() -> Mapping[str, Any]:
    """Return what torch's allocators of GPUs hold: "segments", each with its "blocks", and of those
    allocated within a history the stack as "frames"."""
    return torch.cuda.memory._snapshot()


def parameters_everywhere(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules and of those within, in any order; several times what is
    in several places.

    It calls few functions, for what each step asks. torch's own iterators call several for each
    module, on each level.
    """
    parameters: list[nn.Parameter | None] = []
    reached: set[nn.Module | None] = {None}  # a module that was removed leaves None behind
    level: set[nn.Module | None] = set(modules)
    while level:
        reached |= level
        inner: list[nn.Module | None] = []
        for module in level:
            if module is not None:
                inner += module._modules.values()
                parameters += module._parameters.values()
        # What was reached before is not entered again: a module may know the one that holds it.
        level = set(inner) - reached
    return [parameter for parameter in parameters if parameter is not None]


def reshaped_result(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a contiguous tensor in another shape, as the result of an operator and not as a view.

    `tensor` must not be used afterwards.
    """
    return torch.ops.aten._unsafe_view.default(tensor, shape)


def unsaved_buffer_names(module: nn.Module) -> Collection[str]:
    """Return the names of the buffers of a module that are in no state_dict."""
    return module._non_persistent_buffers_set


def backward_pass_executes(node: Any) -> bool:
    """Return True if the backward pass that runs now executes an autograd node.

    Raises RuntimeError if the node is a leaf's whose gradient torch.autograd.grad is to return.
    """
    return torch._C._will_engine_execute_node(node)


def is_backward_running() -> bool:
    """Return True in a backward pass, where torch.utils.checkpoint computes activations again."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Return a context in which subclasses of Tensor are plain tensors, without __torch_function__."""


# Process groups.


def process_group_counts() -> tuple[int, int]:
    """Return the number of process groups that this rank is in, and the number of its calls that
    made one.

    torch names a group that only its members make by its ranks and one of these numbers: the first
    in 2.11 to 2.13, the second in 2.14.
    """
    world = distributed_c10d._world
    return len(world.pg_names), world.group_count


def can_split(group: dist.ProcessGroup) -> bool:
    """Return True if one call can split a group, as with NCCL if it is bound to a device."""
    device = group.bound_device_id
    return device is not None and group._get_backend(device).supports_splitting


def time_limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a group's operations; torch's default if its backend has none."""
    # the CPU's backend first: it has a limit in every build
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    if not devices:
        return distributed_c10d.default_pg_timeout
    options = getattr(group._get_backend(devices[0]), "options", None)
    return distributed_c10d.default_pg_timeout if options is None else options._timeout


def transfers_under_way() -> bytes:
    """Return what NCCL's groups of this process are doing, as torch's own record in JSON; nothing
    in a build without NCCL."""
    library: Any = importlib.import_module("torch._C._distributed_c10d")
    record = getattr(library, "_dump_nccl_trace_json", None)
    return record(includeCollectives=True, onlyActive=True) if record else b""
