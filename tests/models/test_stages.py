"""A model is cut into stages so that the slowest is as fast as it can be, and no layer is lost."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import ModelConfig
from models.decoder.cutting import best_cut, cuts
from models.estimate.flops import stage_costs
from models.presets import preset
from parallel.activation_checkpoint import KEEP, Recompute


def busiest(
    counts: Sequence[int], cost: int, rank_of_stage: Sequence[int], first: int, last: int
) -> int:
    costs = [n * cost for n in counts]
    costs[0] += first
    costs[-1] += last
    return max(
        sum(c for c, r in zip(costs, rank_of_stage, strict=True) if r == rank)
        for rank in rank_of_stage
    )


def every_cut(layers: int, stages: int) -> list[list[int]]:
    borders = combinations(range(1, layers), stages - 1)
    return [
        [b - a for a, b in zip((0, *chosen), (*chosen, layers), strict=True)] for chosen in borders
    ]


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 90), st.integers(0, 90), st.data())
def test_no_other_cut_has_a_less_busy_busiest_rank(
    layers: int, cost: int, first: int, last: int, data: st.DataObject
) -> None:
    rank_of_stage = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=layers))
    counts = best_cut([cost] * layers, rank_of_stage, first, last)
    assert (len(counts), sum(counts), min(counts) >= 1) == (len(rank_of_stage), layers, True)
    others = [
        busiest(other, cost, rank_of_stage, first, last)
        for other in every_cut(layers, len(rank_of_stage))
    ]
    assert busiest(counts, cost, rank_of_stage, first, last) == min(others)


def test_a_rank_shares_its_layers_out_over_its_stages() -> None:
    assert best_cut([1.0] * 16, [0, 1, 0, 1]) == [4, 4, 4, 4]
    # zb-v: the head lies with the embedding
    assert best_cut([1.0] * 16, [0, 1, 1, 0], last_extra=4.0) == [
        5,
        5,
        5,
        1,
    ]


def test_a_layer_count_that_does_not_divide_is_shared_out_and_the_head_counts() -> None:
    small = ModelConfig(family="llama", layers=30, hidden=64, heads=4, vocab=100)
    made = cuts(small, 4, 64)
    assert [n for cut in made for n in cut.layers] == list(range(30))
    assert sorted(len(cut.layers) for cut in made) == [7, 7, 8, 8]
    assert [cut.first for cut in made] == [True, False, False, False]
    assert [cut.last for cut in made] == [False, False, False, True]
    heavy_head = cuts(preset("gpt2"), 4, 1024)
    assert len(heavy_head[-1].layers) < len(heavy_head[0].layers)


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize(
    "recompute", [KEEP, Recompute(fraction=1.0), Recompute(("attention",))], ids=str
)
def test_the_busiest_stage_has_least_to_do_in_both_passes_and_in_what_is_made_again(
    recompute: Recompute, stages: int
) -> None:
    config = ModelConfig(family="llama", layers=12, hidden=64, heads=4, vocab=4000)

    def busiest_cost(counts: Sequence[int]) -> float:
        made = cuts(config, stages, 64, counts, recompute=recompute)
        return max(
            c.forward + c.input + c.weight for c in stage_costs(config, made, 64, 1, recompute)
        )

    chosen = [len(cut.layers) for cut in cuts(config, stages, 64, recompute=recompute)]
    assert busiest_cost(chosen) == min(map(busiest_cost, every_cut(12, stages)))


def test_recomputation_moves_layers_to_the_stage_with_the_head_which_makes_nothing_again() -> None:
    config = ModelConfig(family="llama", layers=32, hidden=64, heads=4, vocab=16_000)
    kept, again = (
        len(cuts(config, 2, 64, recompute=r)[-1].layers) for r in (KEEP, Recompute(fraction=1.0))
    )
    assert again > kept


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
        best_cut([1.0] * 2, range(3))
