"""`python -m tools.bench fused-gathers` compares ways that compute the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from tests.ranks import run_ranks
from tests.refusals import raises
from tools.bench import __main__ as bench
from tools.bench.fused_gathers import compare, ways_of

TOKENS = 12
HIDDEN = 6
FFN = 8


def both_ways(mesh: DeviceMesh) -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    cpu = torch.device("cpu")
    made = {}
    for place, ways in ways_of(
        Axis.of(mesh, "tp"), cpu, TOKENS, HIDDEN, FFN, torch.float64
    ).items():
        made[place] = (ways.apart(), ways.fused(), compare(ways, 1, cpu))
    return made


def tensors_of(rank: int, ranks: int) -> list[Tensor]:
    """Own tokens, own features, and this rank's slices of both weights."""
    generator = torch.Generator().manual_seed(rank)
    part = FFN // ranks
    shapes = ((TOKENS // ranks, HIDDEN), (TOKENS, part), (part, HIDDEN), (HIDDEN, part))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_ways_are_the_product_that_one_process_computes_of_all_ranks_tensors(
    ranks: int,
) -> None:
    tokens, features, ups, downs = zip(*(tensors_of(r, ranks) for r in range(ranks)), strict=True)
    whole = torch.cat(tokens)
    total = torch.stack([x @ down.t() for x, down in zip(features, downs, strict=True)]).sum(0)
    for rank, made in enumerate(run_ranks(both_ways, {"tp": ranks})):
        expected = {
            "gather, product": whole @ ups[rank].t(),
            "product, sum": total.chunk(ranks)[rank],
            "gather that is kept, product": whole @ downs[rank],
        }
        assert made.keys() == expected.keys()
        for place, (apart, fused, record) in made.items():
            torch.testing.assert_close(apart, expected[place], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(fused, expected[place], rtol=1e-12, atol=1e-12)
            assert record["difference"] <= 1e-12
            assert record["apart_ms"] > 0 and record["fused_ms"] > 0


def test_one_rank_has_no_transfer() -> None:
    args = bench.parser().parse_args(["fused-gathers", "--device", "cpu", "--ranks", "1"])
    with raises("bench.too_small", name="ranks", least=2):
        args.run(args)
