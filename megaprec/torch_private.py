"""Private names of torch, which any release may change, under names of this project.

Every name was seen in torch 2.11 and 2.13, the oldest and the newest release that the tests pass
with. A new release of torch is tried against this module first.
"""

from collections.abc import Callable, Collection, Sequence
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

StatisticsNorm = _NormBase
"""The base of batch and instance norms, which may hold running statistics."""

# Kernels. The fused ones divide gradients by `grad_scale` and change nothing if `found_inf` is 1.

fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
scaled_product: Callable[..., Tensor] = torch._scaled_mm


def has_bf16_products() -> bool:
    """Return True if the CPU has bf16 matrix products that oneDNN uses."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return True if torch has a kernel of an operator for a dispatch key, such as "CPU"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key)


# Tensors, parameters and autograd.


def num_writes(tensor: Tensor) -> int:
    """Return torch's counter of writes to a tensor; writes through `data` are not in it."""
    return tensor._version


def has_hooks(parameter: Tensor) -> bool:
    """Return True if `register_hook` was called for the parameter."""
    return bool(parameter._backward_hooks)


def unsaved_buffer_names(module: nn.Module) -> Collection[str]:
    """Return the names of the buffers of a module that are in no state_dict."""
    return module._non_persistent_buffers_set


def backward_pass_executes(node: Any) -> bool:
    """Return True if the backward pass that runs now executes an autograd node.

    Raises RuntimeError if the node is a leaf's whose gradient torch.autograd.grad is to return.
    """
    return torch._C._will_engine_execute_node(node)


# Process groups.


def num_process_groups() -> int:
    """Return how many process groups this rank has made; torch names some groups by this number."""
    return len(distributed_c10d._world.pg_names)


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
