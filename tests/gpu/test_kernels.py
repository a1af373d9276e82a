"""Kernels of the device are right wherever it has them, and it has those that its generation
has."""

import pytest
import torch

from megaprec.fp8.matmul import EMULATED, describe_kernels
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS, FP8Recipe, Kind
from tools.verify.doctor.kernels import FAULTY, HERE, KERNELS

SINCE = {
    "flash attention": (8, 0),
    "grouped products": (9, 0),
    "FP8 products": (8, 9),
    "MX products": (10, 0),
}
"""Compute capabilities from which a GPU has the kernel, by NVIDIA's and torch's documentation."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_right_where_it_is(name: str, device: str) -> None:
    state, why = KERNELS[name](torch.device(device))
    assert state != FAULTY, why
    if device == "cuda" and torch.cuda.get_device_capability() >= SINCE[name]:
        assert state == HERE, why


@pytest.mark.parametrize("kind", EIGHT_BIT_KINDS)
def test_every_kind_of_fp8_is_a_kernel_or_emulated_for_a_reason(kind: Kind, device: str) -> None:
    recipe = FP8Recipe(kind, history_length=4) if kind == "delayed" else FP8Recipe(kind)
    for said in describe_kernels(
        recipe, torch.device(device), torch.bfloat16, torch.float32
    ).values():
        assert said.endswith(" kernel") or (
            said.startswith(f"{EMULATED}: ") and "is wrong by" not in said
        )
