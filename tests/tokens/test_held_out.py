"""The held-out part of a stream: no target of it is trained on, and it is from everywhere or from
the end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprec.tokens.held_out import PIECES, HeldOutRule, divide, taken_in_turn

sizes = st.integers(2, 3000).flatmap(
    lambda total: st.tuples(st.just(total), st.integers(1, total - 1))
)


@given(sizes, st.sampled_from(["everywhere", "end"]))
def test_each_sample_is_trained_on_or_held_out(size: tuple[int, int], rule: HeldOutRule) -> None:
    total, held_out = size
    training, evaluation = divide(total, held_out, rule)
    trained = training.numbers(np.arange(len(training)))
    kept = evaluation.numbers(np.arange(len(evaluation)))
    assert len(evaluation) == held_out
    assert sorted([*trained.tolist(), *kept.tolist()]) == list(range(total))
    assert trained.tolist() == sorted(trained.tolist())  # without data.shuffle the file's order
    for index in range(0, len(training), 7):
        number = int(trained[index])
        assert training.index_of(number) == index


@given(sizes)
def test_the_part_from_everywhere_has_the_same_share_of_every_stretch(
    size: tuple[int, int],
) -> None:
    total, held_out = size
    _, evaluation = divide(total, held_out, "everywhere")
    kept = np.sort(evaluation.numbers(np.arange(held_out)))
    # Half of the stream has half of the part, but for one piece of it.
    piece = -(-held_out // min(PIECES, held_out))
    for share in (0.25, 0.5, 0.8):
        assert abs(int((kept < total * share).sum()) - held_out * share) <= piece + 1


@pytest.mark.parametrize(("total", "held_out"), [(100_000, 2_000), (1_000, 20), (4_000, 128)])
def test_any_beginning_of_an_evaluation_is_from_everywhere(total: int, held_out: int) -> None:
    """Also one of fewer samples than there are pieces."""
    _, evaluation = divide(total, held_out, "everywhere")
    for numbers, end in ((evaluation, total), (taken_in_turn(held_out), held_out)):
        order = numbers.numbers(np.arange(held_out))
        assert order.tolist() == [int(numbers.numbers(np.int64(n))) for n in range(held_out)]
        for count in range(1, min(PIECES, held_out) + 1):
            for share in (0.2, 0.5, 0.8):
                found = int((order[:count] < share * end).sum())
                assert abs(found - share * count) <= 2.5, (count, share)
        again = order[PIECES : 2 * PIECES]
        if held_out >= 2 * PIECES:
            assert (again == order[:PIECES] + 1).all()


def test_the_part_of_a_stream_stays_what_it_is() -> None:
    """Runs rely on it: other samples would be trained on after a resume."""
    _, evaluation = divide(1000, 20, "everywhere")
    kept = evaluation.numbers(np.arange(20)).tolist()
    assert sorted(kept) == [
        30, 61, 142, 173, 204, 285, 316, 397, 428, 459, 539, 570, 601, 682, 713, 794, 825, 856, 937,
        968,
    ]  # fmt: skip


@pytest.mark.parametrize("rule", ["everywhere", "end"])
def test_tokens_of_two_lengths_that_are_shared_are_counted(rule: HeldOutRule) -> None:
    trained, _ = divide(160, 16, rule)
    _, held_out = divide(80, 8, rule)
    was_trained = np.repeat(np.isin(np.arange(160), trained.numbers(np.arange(144))), 8)
    is_held_out = np.repeat(np.isin(np.arange(80), held_out.numbers(np.arange(8))), 16)
    expected = int((was_trained & is_held_out).sum())
    assert trained.shared_tokens(8, held_out, 16) == expected
