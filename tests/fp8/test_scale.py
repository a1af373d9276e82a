"""Scales and histories of amaxes against tables made by hand from Transformer Engine's formulas."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.dialects import smp
from megaprec.fp8.formats import E4M3, E5M2
from megaprec.fp8.history import AmaxHistory
from megaprec.fp8.scaling import mx_inverse, scale_of
from megaprec.precision.fp8_recipe import FP8Recipe

INF = torch.inf
NAN = torch.nan
LARGEST = 3.4028234663852886e38

# amax -> scale for E4M3 where the scale before was 5: 448 / amax
TABLE = {
    448.0: 1.0,
    7.0: 64.0,
    1.0: 448.0,
    896.0: 0.5,
    0.0: 5.0,  # says nothing: the scale before
    INF: 5.0,
    NAN: 5.0,
    1e-37: LARGEST,  # 448 / 1e-37 is infinite
    1e-45: LARGEST,
    LARGEST: 448 / LARGEST,
}


def test_the_scale_puts_the_amax_on_the_largest_number_of_the_format() -> None:
    made = scale_of(torch.tensor(list(TABLE)), 448.0, torch.tensor(5.0))
    torch.testing.assert_close(made, torch.tensor(list(TABLE.values())), rtol=1e-7, atol=0)


def test_without_a_scale_before_it_is_one() -> None:
    assert scale_of(torch.tensor([0.0, INF, NAN]), 448.0).tolist() == [1.0, 1.0, 1.0]


def test_powers_of_two_are_rounded_down() -> None:
    table = {
        448.0: 1.0,
        449.0: 0.5,
        447.0: 1.0,
        300.0: 1.0,
        224.0: 2.0,
        1.0: 256.0,
        1e-45: 2.0**127,
        0.0: 5.0,
    }
    made = scale_of(torch.tensor(list(table)), 448.0, torch.tensor(5.0), power_2=True)
    assert made.tolist() == list(table.values())
    huge = scale_of(torch.tensor(LARGEST), 448.0 * 2.0**-20, power_2=True)
    assert huge.item() == 2.0**-126, "and stay above zero"


def test_mx_factors_are_rounded_up_so_that_nothing_saturates() -> None:
    """2 ** ceil(log2(amax / 448)), as code = exponent + 127."""
    table = {
        448.0: 127,
        448.00003: 128,  # its quotient is the next float32 after 1
        449.0: 128,
        447.0: 127,
        224.0: 126,
        225.0: 127,
        1.0: 119,  # 1 / 448 lies above 2**-9
        0.0: 0,
        448 * 2.0**-127: 0,
        450 * 2.0**-127: 1,
        INF: 254,
        NAN: 255,
        LARGEST: 247,
    }
    made = mx_inverse(torch.tensor(list(table)), 448.0)
    assert made.view(torch.uint8).tolist() == list(table.values())
    finite = torch.tensor([a for a in table if 0 < a < INF])
    assert (finite / mx_inverse(finite, 448.0).float() <= 448).all()


def bank(**recipe: Any) -> AmaxHistory:
    return AmaxHistory(FP8Recipe(**recipe), (E4M3, E5M2))


def alone(now: Tensor) -> None:
    """The agreement of a single rank."""


def run(
    history: AmaxHistory, *amaxes: float, agree: Callable[[Tensor], None] = alone
) -> list[float]:
    """A step in which tensor 0, 1, ... have these amaxes -> the scales after it."""
    for i, amax in enumerate(amaxes):
        history.record(i, torch.tensor([[amax]]))
    history.roll(agree)
    return history.scale.tolist()


def test_scales_begin_at_one_and_follow_the_largest_of_the_window() -> None:
    h = bank(history_length=3)
    assert h.scale.tolist() == [1.0, 1.0]
    told = [run(h, amax, amax) for amax in (7.0, 3.5, 1.75, 1.75, 0.875)]
    window = [7.0, 7.0, 7.0, 3.5, 1.75]  # the largest of the three last
    assert told == [[448 / amax, 57344 / amax] for amax in window]
    assert h.history[:, 0].tolist() == [1.75, 1.75, 0.875]


def test_the_most_recent_amax_decides_alone_and_a_window_of_one_is_the_same() -> None:
    for options in ({"amax_algo": "most_recent", "history_length": 4}, {"history_length": 1}):
        h = bank(**options)
        assert [run(h, amax)[0] for amax in (7.0, 3.5, 14.0)] == [64.0, 128.0, 32.0]


def test_a_function_of_the_history_may_decide() -> None:
    h = bank(history_length=2, amax_algo=lambda history: 2 * history.mean(0))
    assert [run(h, amax)[0] for amax in (7.0, 7.0, 21.0)] == [64.0, 32.0, 16.0]


@pytest.mark.parametrize(("margin", "scale"), [(0, 64.0), (1, 32.0), (3, 8.0), (-1, 128.0)])
def test_a_positive_margin_lowers_the_scale(margin: int, scale: float) -> None:
    assert run(bank(margin=margin), 7.0, 7.0) == [scale, scale * 128]


def test_delayed_scales_may_be_powers_of_two() -> None:
    assert run(bank(power_2_scales=True), 3.0) == [128.0, 1.0]


@pytest.mark.parametrize("amax", [0.0, INF, NAN])
def test_an_amax_that_says_nothing_keeps_scale_and_history_and_is_reported(amax: float) -> None:
    h = bank(history_length=2)
    before = run(h, 7.0, 3.5)
    assert run(h, amax, 1.75) == [before[0], 57344 / 3.5]
    assert h.history.tolist() == [[0.0, 3.5], [7.0, 1.75]]
    assert h.overflowed.tolist() == [amax != 0, False]
    assert run(h, 3.5, 1.75) == [64.0, 57344 / 1.75], "and leaves no trace"
    assert not h.overflowed.any()


def test_one_bad_micro_batch_spoils_the_step_whenever_it_comes() -> None:
    for order in itertools.permutations([NAN, 7.0, INF]):
        h = bank()
        for amax in order:
            h.record(0, torch.tensor(amax))
        h.roll(alone)
        assert (h.scale[0].item(), h.overflowed[0].item()) == (1.0, True)


def test_a_tiny_amax_makes_a_finite_scale() -> None:
    assert run(bank(), 1e-45, 1e-45) == [LARGEST, LARGEST]


def test_a_tensor_that_did_not_run_does_not_roll() -> None:
    h = bank(history_length=2)
    run(h, 7.0, 7.0)
    for _ in range(3):
        run(h, 3.5)
    assert h.history.tolist() == [[3.5, 0.0], [3.5, 7.0]]
    assert h.scale.tolist() == [128.0, 8192.0]


def test_micro_batches_count_once_by_their_largest() -> None:
    h = bank(history_length=2)
    for amax in (3.5, 7.0, 1.75):
        h.record(0, torch.tensor(amax))
    assert run(h)[0] == 64.0
    assert h.history[:, 0].tolist() == [0.0, 7.0]
    assert h.step_amax.tolist() == [0.0, 0.0]


def test_ranks_agree_on_the_largest_in_one_collective_even_on_what_ran_elsewhere_or_overflowed() -> (
    None
):
    calls = []

    def agree(now: Tensor) -> None:
        calls.append(now.clone())
        torch.maximum(now, torch.tensor([7.0, 0.0, 14.0, INF]), out=now)

    h = AmaxHistory(FP8Recipe(), (E4M3,) * 4)
    assert run(h, 3.5, 28.0, 0.0, NAN, agree=agree) == [64.0, 16.0, 32.0, 1.0]
    assert len(calls) == 1
    assert not calls[0].isnan().any(), "which a maximum over ranks could lose"
    assert h.overflowed.tolist() == [False, False, False, True]


def test_what_a_bank_keeps_is_changed_in_place() -> None:
    h = bank(history_length=2)
    held = (h.scale, h.history, h.step_amax)
    run(h, 7.0, 7.0)
    assert all(a is b for a, b in zip(held, (h.scale, h.history, h.step_amax), strict=True))
    assert held[0].tolist() == [64.0, 8192.0]


def test_functions_of_the_users_own_make_amaxes_and_scales() -> None:
    """Transformer Engine's `amax_compute_algo` and `scaling_factor_compute_algo`, as arguments of
    its recipe."""
    made = smp.DelayedScaling(
        amax_compute_algo=lambda history: history.mean(0),
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: (
            fp8_max / amax / 2**recipe.margin + scale
        ),
        margin=1,
        amax_history_len=2,
    )
    recipe = smp.resolve({"fp8_autocast": smp.fp8_autocast(fp8_recipe=made)}).plan.fp8
    assert recipe is not None
    history = AmaxHistory(recipe, [torch.float8_e4m3fn])
    for amax in (2.0, 6.0):
        history.record(0, torch.tensor([amax]))
        history.roll(lambda now: None)
    first = 448 / 1 / 2 + 1  # the mean of 0 and 2
    assert history.scale.item() == 448 / 4 / 2 + first
