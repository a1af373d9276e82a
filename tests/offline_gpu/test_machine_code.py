"""Every leaf and region becomes machine code of an H100, in as many kernels as are written here."""

from typing import Any

import pytest

from parallel.leaves import LeafCall
from tests.offline_gpu.calls import FAMILIES, FP8_KINDS, LARGE, calls_of, fp8_calls_of

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
    # sums are made in two steps
    "squares and zeros": 3,
    "adamw": 1,
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


FP8_KERNELS = {
    # one reads the matrix and writes both sets of codes, one the scale; one finds the largest of the
    # rows' amaxes, or two where there are very many
    "delayed": {"fp8 casts and amax": {3, 4}},
    # one reads the matrix, two its many amaxes; one writes both sets of codes, one the scale
    "current": {"amax of": {3}, "fp8 casts": {2}},
    # columns of less than 8192 rows are few for a GPU: their amaxes are made in two steps
    "rowwise": {"fp8 casts": {2, 3}},
    # of a weight, and of others, whose transpose has scales of its own
    "blockwise": {"fp8 casts": {2, 3}},
    "mx": {"fp8 casts": {3}},
}


def numbers_of_kernels(h100: Any, calls: list[LeafCall]) -> dict[str, set[int]]:
    """The numbers of kernels of calls, by name, each of which becomes machine code."""
    numbers: dict[str, set[int]] = {}
    for call in calls:
        h100.compiled(call)
        numbers.setdefault(call.name, set()).add(len(h100.kernels))
        for kernel in h100.kernels:
            assert all(code.startswith(b"\x7fELF") for code in kernel.machine_code())
    return numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_and_regions_become_machine_code_in_so_many_kernels(h100: Any, family: str) -> None:
    expected = KERNELS | OF_FAMILY.get(family, {})
    numbers = numbers_of_kernels(h100, calls_of(LARGE, family))
    assert numbers == {name: {expected[name]} for name in numbers}


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_casts_become_machine_code_in_so_many_kernels(h100: Any, kind: str) -> None:
    assert numbers_of_kernels(h100, fp8_calls_of(LARGE, kind)) == FP8_KERNELS[kind]


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


def test_a_cast_with_a_delayed_scale_finds_the_amax_in_its_only_read(h100: Any) -> None:
    calls = fp8_calls_of(LARGE, "delayed")
    assert {call.name for call in calls} == {"fp8 casts and amax"}
    h100.compiled(calls[0])
    reader, *later = h100.kernels
    # the tensor and its scale are read, both sets of codes written
    assert reader.source.count("tl.load(") == 2
    assert reader.source.count("'*fp8") == 2
    # the others have a number for each row at most
    assert not any("*fp8" in kernel.source for kernel in later)
