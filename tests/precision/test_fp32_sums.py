"""A GPU adds the parts of a long sum in FP32, whatever torch or the user would let it do."""

import pytest
import torch

from megaprec.precision.gemm import fp32_sums

NAMES = (
    "bf16_reduced_precision_reduction",
    "fp16_reduced_precision_reduction",
    "fp16_accumulation",
)


def switches() -> list[object]:
    return [getattr(torch.backends.cuda.matmul, f"allow_{name}") for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_16_bits_are_forbidden_in_the_block_and_allowed_again_even_after_an_error(
    name: str,
) -> None:
    inside: list[list[object]] = []

    def fail() -> None:
        with fp32_sums():
            inside.append(switches())
            raise KeyError

    before = switches()
    setattr(torch.backends.cuda.matmul, f"allow_{name}", not before[NAMES.index(name)])
    try:
        outside = switches()
        with pytest.raises(KeyError):
            fail()
        assert inside == [[False] * 3]
        assert switches() == outside != before
    finally:
        setattr(torch.backends.cuda.matmul, f"allow_{name}", before[NAMES.index(name)])
