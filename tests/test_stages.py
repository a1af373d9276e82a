"""A model is cut into stages so that the slowest is as fast as it can be, and no layer is lost."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import ModelConfig
from models.presets import preset
from models.stages import best_cut, cuts


def slowest(costs: list[int], counts: tuple[int, ...] | list[int], first: int, last: int) -> int:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    sums = [sum(costs[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(costs: list[int], first: int, last: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    counts = best_cut(costs, stages, first, last)
    assert len(counts) == stages
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    borders = combinations(range(1, len(costs)), stages - 1)
    every = [[b - a for a, b in zip((0, *chosen), (*chosen, len(costs)), strict=True)] for chosen in borders]
    assert slowest(costs, counts, first, last) == min(slowest(costs, other, first, last) for other in every)


def test_a_layer_count_that_does_not_divide_is_shared_out_and_the_head_counts() -> None:
    small = ModelConfig(family="llama", layers=30, hidden=64, heads=4, vocab=100)
    made = cuts(small, 4, 64)
    assert [n for cut in made for n in cut.layers] == list(range(30))
    assert sorted(len(cut.layers) for cut in made) == [7, 7, 8, 8]
    assert [cut.first for cut in made] == [True, False, False, False]
    assert [cut.last for cut in made] == [False, False, False, True]
    heavy_head = cuts(preset("gpt2"), 4, 1024)
    assert len(heavy_head[-1].layers) < len(heavy_head[0].layers)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 stages"):
        best_cut([1, 1], 3)
