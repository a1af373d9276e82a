"""An update has the same bits for an element in whatever slice it is, at odd places too, on one
thread and on two."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.optim.canonical import numerics as module
from megaprec.optim.model_buffers import buckets
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.rules.update_rules import VECTOR
from megaprec.precision.plan import plan

SIZES = (70_001, 33, 257 * 5)
PLANS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16"},
    "remainders": {"compute": "bf16", "masters": "split"},
    "stochastic": {"compute": "bf16", "rounding": "stochastic", "moments": "bf16"},
    "bf16 gradients": {"compute": "bf16", "gradients": "bf16"},
}
RULES = ["adamw", "sgd", "RAdam", "NAdam", "Adagrad", "RMSprop"]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def updated(name: str, numbers: dict[str, Any], cuts: int | None) -> dict[str, Tensor]:
    """Return the state after two steps from large gradients; cuts: a seed of odd places at which
    slices are cut."""
    torch.manual_seed(0)
    net = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])
    attach_whole(net)
    chosen = rule(name)
    optimizer = ParallelAMPOptimizer([net], plan(**numbers), lr=0.1, rule=chosen, canonical=True)
    if cuts is not None:
        cut_tiles(optimizer, random.Random(cuts))
    for _ in range(2):
        for parameter in net:
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
        optimizer.end_microbatch(0, 1)
        optimizer.step()
    return optimizer.state_dict()["tensors"]


def cut_tiles(optimizer: ParallelAMPOptimizer, chance: random.Random) -> None:
    for buffer, parts in optimizer._buffer_spans:
        for s, tiles in parts:
            places = sorted(
                {s.start, s.stop, *(chance.randint(s.start, s.stop) for _ in range(40))}
            )
            tiles[:] = [tile for a, b in pairwise(places) for tile in buffer.tiles(a, b)]
    assert any(
        len(tile.grads) % VECTOR
        for _, parts in optimizer._buffer_spans
        for _, tiles in parts
        for tile in tiles
    )


def differing(name: str, numbers: dict[str, Any], number_of_threads: int) -> list[str]:
    with threads(1):
        whole = updated(name, numbers, None)
    with threads(number_of_threads):
        cut = updated(name, numbers, 7)
    assert whole.keys() == cut.keys()
    return [key for key in whole if not torch.equal(whole[key], cut[key])]


CASES = [("adamw", "bf16"), ("sgd", "fp32"), ("adamw", "stochastic")]
CASES += [(name, numbers) for name in RULES for numbers in PLANS if (name, numbers) not in CASES]


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_an_update_does_not_depend_on_the_slices(name: str, numbers: str) -> None:
    for number in (1, 2):
        assert differing(name, PLANS[numbers], number) == []


def test_without_padding_the_end_of_a_slice_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "update_padded", lambda rule, *rest: rule.update_(*rest))
    assert differing("adamw", PLANS["fp32"], 1)


def test_the_cut_into_buckets_looks_at_each_parameter_once() -> None:
    looks = 0

    class Counted(nn.Parameter):
        def numel(self) -> int:
            nonlocal looks
            looks += 1
            return super().numel()

    model = nn.ParameterList([Counted(torch.zeros(3, 3)) for _ in range(200)])
    attach_whole(model)
    looks = 0
    assert [len(alike) for alike in buckets([*model.parameters()], plan("fp32"), 900)] == [100, 100]
    assert looks == 200
