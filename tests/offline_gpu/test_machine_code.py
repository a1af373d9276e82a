"""Every leaf and region becomes machine code of an H100, in as many kernels as are written here."""

from collections import defaultdict
from typing import Any

import pytest

from tests.offline_gpu.calls import FAMILIES, LARGE, calls_of

pytestmark = pytest.mark.campaign

# of a leaf, and of both passes of a region together
KERNELS = {
    "norm": 1,
    "norm gradients": 1,
    "rotary": 1,
    "swiglu": 1,
    "swiglu gradient": 1,
    "geglu": 1,
    "geglu gradient": 1,
    # one for coordinates, one for all else
    "dropout": 2,
    "dropout gradient": 1,
    # one reads all logits, the other the targets' alone
    "loss sums": 2,
    "scaled loss sums": 1,
    "losses": 1,
    "loss gradient": 1,
    # queries, keys and values forward and backward
    "split heads": 6,
    # backward one sums over features and one over tokens, for the weight
    "add norm": 3,
}
OF_FAMILY = {
    # without rotation one kernel joins the gradients; a LayerNorm's sums are fused
    "gpt2": {"split heads": 4, "add norm": 2},
    # with norms of queries and keys, and their weights
    "gemma3": {"split heads": 11},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_and_regions_become_machine_code_in_so_many_kernels(h100: Any, family: str) -> None:
    expected = KERNELS | OF_FAMILY.get(family, {})
    numbers = defaultdict[str, set[int]](set)
    for call in calls_of(LARGE, family):
        h100.compiled(call)
        numbers[call.name].add(len(h100.kernels))
        for kernel in h100.kernels:
            assert all(code.startswith(b"\x7fELF") for code in kernel.machine_code())
    assert numbers == {name: {expected[name]} for name in numbers}


def test_the_loss_reads_all_logits_once_and_overwrites_them_in_one_pass(h100: Any) -> None:
    forward, backward = (
        call for call in calls_of(LARGE, "llama") if call.name in ("loss sums", "loss gradient")
    )
    h100.compiled(forward)
    reduction, of_targets = h100.kernels
    assert reduction.source.count("tl.load(") == 1
    assert "online_softmax" in reduction.source and "online_softmax" not in of_targets.source
    h100.compiled(backward)
    (kernel,) = h100.kernels
    assert kernel.source.count("tl.load(in_ptr0") == kernel.source.count("tl.store(") == 1
