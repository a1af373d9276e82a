"""Every operator that training issues on a device has a kernel in torch's build for CUDA."""

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import pretend
from tests.layouts import Run, train_rank
from tests.models.test_other_device import ALONE, TOGETHER, emulate
from tests.ranks import run_ranks

pytestmark = pytest.mark.campaign

# the kernels of operators that are composed of others are theirs
KEYS = (
    "CUDA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
# issued on GPUs only: another device is given others in their place
ON_GPUS_ONLY = {
    "aten::_scaled_mm",
    "aten::_scaled_mm.out",
    "aten::_scaled_mm_v2",
    "aten::_grouped_mm",
    "aten::addmm.dtype_out",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
    "aten::_foreach_norm.Scalar",
    "aten::_flash_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
}


def has_kernel(operator: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator, key) for key in KEYS)


def operators_of(mesh: DeviceMesh, runs: Sequence[Run]) -> set[str]:
    pretend.install()
    emulate()
    mesh = pretend.join(mesh)
    pretend.issued.clear()
    with sdpa_kernel(SDPBackend.MATH):
        train_rank(mesh, runs)
    return set(pretend.issued)


@pytest.mark.usefixtures("build_for_cuda")
@pytest.mark.parametrize(
    ("axes", "runs"),
    [*(({}, runs) for runs in ALONE.values()), *TOGETHER.values()],
    ids=[*ALONE, *TOGETHER],
)
def test_every_operator_that_a_step_issues_has_a_kernel_for_cuda(
    axes: dict[str, int], runs: Sequence[Run]
) -> None:
    issued = set[str]().union(*run_ranks(operators_of, axes, runs=runs))
    assert "aten::mm" in issued
    assert {operator for operator in issued if not has_kernel(operator)} == set()


@pytest.mark.usefixtures("build_for_cuda")
def test_every_operator_that_only_gpus_are_given_has_a_kernel_for_cuda() -> None:
    assert {operator for operator in ON_GPUS_ONLY if not has_kernel(operator)} == set()
    assert not has_kernel("aten::_scaled_dot_product_flash_attention_for_cpu")
