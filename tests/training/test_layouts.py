"""The largest layout that fits fewer ranks: it can be trained, never needs more, and no larger one
can be trained."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from models.config import ModelConfig
from tools.config.layouts import (
    FittingLayout,
    fit_layout,
    in_words,
    largest_fitting,
    layout_problems,
)
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel, Train

SIZES = st.sampled_from([1, 2, 3, 4])


def run(
    parallel: dict[str, Any], heads: int = 4, layers: int = 4, batch: int = 8, micro_batch: int = 1
) -> RunConfig:
    model = ModelConfig(layers=layers, heads=heads, kv_heads=heads, hidden=heads * 4, ffn=heads * 4)
    train = Train(steps=1, global_batch=batch, micro_batch=micro_batch, seq_length=12)
    return RunConfig(model=model, train=train, parallel=Parallel(**parallel))


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    parallel: dict[str, Any] = {axis: draw(SIZES) for axis in ("tensor", "pipeline", "data")}
    parallel |= {
        "schedule": draw(
            st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
        ),
        "sequence": draw(st.booleans()),
        "zero_size": draw(st.sampled_from([0, 1, 2, 3])),
    }
    micro_batch = draw(st.sampled_from([1, 2]))
    batch = micro_batch * draw(st.sampled_from([4, 6, 8, 12]))
    try:
        return run(
            parallel,
            draw(st.sampled_from([2, 3, 4, 6, 12])),
            draw(st.sampled_from([2, 4, 8])),
            batch,
            micro_batch,
        )
    except ValueError:
        assume(False)
        raise


def trainable(config: RunConfig, tensor: int, pipeline: int, data: int) -> bool:
    """Whether the run file's checks pass with these axes, without the keys that are for a number of
    ranks."""
    free = {
        "cuts": (),
        "schedule_file": "",
        "zero_size": 0,
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
    }
    return not layout_problems(config, config.parallel.model_copy(update=free))


@pytest.mark.slow
@given(runs(), st.integers(1, 70))
def test_the_largest_layout_passes_the_checks_within_the_ranks_and_no_larger_one_does(
    config: RunConfig, ranks: int
) -> None:
    found = largest_fitting(config, ranks)
    own = config.parallel
    if config.world_size <= ranks:
        assert found == FittingLayout(own)
        return
    axes = product(range(1, own.tensor + 1), range(1, own.pipeline + 1), range(1, ranks + 1))
    able = [a for a in axes if a[0] * a[1] * a[2] <= ranks and trainable(config, *a)]
    if found is None:
        assert not able
        return
    p = found.parallel
    assert layout_problems(config, p) == []
    assert found.ranks == p.tensor * p.pipeline * p.data <= ranks
    largest = max((tensor * pipeline, tensor, data) for tensor, pipeline, data in able)
    assert (p.tensor * p.pipeline, p.tensor, p.data) == largest


@pytest.mark.slow
@given(runs(), st.integers(1, 70))
def test_other_keys_stay_as_they_are_but_those_for_a_number_of_ranks(
    config: RunConfig, ranks: int
) -> None:
    if found := largest_fitting(config, ranks):
        own = config.parallel
        axes = {"tensor", "pipeline", "data"}
        differ = {key for key, value in found.parallel if value != getattr(own, key)}
        assert differ <= axes | set(found.left_out)
        assert set(found.left_out) <= {"cuts", "schedule_file", "zero_size"}
        # the ranks that are started find the same layout
        assert largest_fitting(config, found.ranks) == found


@pytest.mark.parametrize(
    ("parallel", "ranks", "fits"),
    [
        ({"tensor": 2, "pipeline": 2, "data": 2}, 8, (2, 2, 2)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 7, (2, 2, 1)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 3, (2, 1, 1)),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 1, (1, 1, 1)),
        ({"data": 8}, 7, (1, 1, 4)),  # of 8 micro-batches
        ({"tensor": 4, "data": 2}, 6, (4, 1, 1)),
        ({"tensor": 4}, 3, (2, 1, 1)),  # 4 heads are not cut in 3
    ],
)
def test_replicas_go_first_and_then_the_replica_becomes_smaller(
    parallel: dict[str, Any], ranks: int, fits: tuple[int, int, int]
) -> None:
    found = largest_fitting(run(parallel), ranks)
    assert found is not None
    assert (found.parallel.tensor, found.parallel.pipeline, found.parallel.data) == fits


def test_as_few_keys_as_possible_are_left_out() -> None:
    config = run({"pipeline": 2, "data": 4, "cuts": [1, 3], "zero_size": 4})
    found = largest_fitting(config, 5)
    assert found is not None
    assert (found.parallel.cuts, found.parallel.zero_size, found.left_out) == (
        (1, 3),
        0,
        ("zero_size",),
    )
    alone = largest_fitting(config, 1)
    assert alone is not None
    assert alone.left_out == ("cuts", "zero_size")


def test_one_tensor_rank_has_no_transfers_to_fuse_products_with() -> None:
    config = run({"tensor": 4, "sequence": True, "async_tensor": True})
    halved = largest_fitting(config, 3)
    assert halved is not None
    assert halved.parallel.async_tensor and not halved.left_out
    alone = largest_fitting(config, 1)
    assert alone is not None
    assert not alone.parallel.async_tensor and alone.left_out == ("async_tensor",)


def test_a_layout_that_the_run_cannot_have_is_none() -> None:
    assert fit_layout(run({}), {"tensor": 3}) is None


def test_a_run_in_another_layout_says_what_decided_it(tmp_path: Path) -> None:
    config = run({"data": 2})
    smaller = config.with_parallel(Parallel(), "parallel.elastic, 1 ranks")
    assert (smaller.world_size, config.world_size) == (1, 2)
    assert smaller.origin("parallel.data") == "parallel.elastic, 1 ranks"
    assert (smaller.origin("parallel.tensor"), config.origin("parallel.data")) == (
        "default",
        "default",
    )
    assert "data = 1  # parallel.elastic, 1 ranks\n" in smaller.save_resolved(tmp_path).read_text()


def test_a_layout_in_words() -> None:
    assert in_words(Parallel(tensor=2)) == "tensor 2 x pipeline 1 x data 1 = 2 ranks"
    assert in_words(Parallel()) == "tensor 1 x pipeline 1 x data 1 = 1 rank"
