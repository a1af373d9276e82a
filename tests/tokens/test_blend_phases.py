"""Weights of a blend that change with the samples: exact in each phase, and no sample is lost or
comes twice where they change."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megaprec.tokens.blend import Blend, pattern, taken_before
from megaprec.tokens.blend_phases import LINEAR_STEPS, BlendPhases, Points
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Samples
from tests.refusals import raises

LENGTH = 8
SETS = (100, 33, 260)  # tokens of each data set


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Samples]:
    folder = tmp_path_factory.mktemp("phases")
    parts = list[Samples]()
    for number, count in enumerate(SETS):
        with IndexedWriter(folder / f"{number}", 60_000) as writer:
            writer.add_document(np.arange(count) + 1000 * number)
        parts.append(Samples(IndexedDataset(folder / f"{number}"), LENGTH, 3, True))
    return parts


def read(parts: list[Samples], phases: BlendPhases, total: int) -> list[tuple[int, int]]:
    """The data set and the id of each of the first samples, as a run reads them."""
    names = [f"set{number}" for number in range(len(parts))]
    blend = Blend(parts, phases.stretches(), names)
    labels = blend.labels(blend.batch(0, total).ids)
    named = [label.partition(":") for label in labels]
    return [(int(name.removeprefix("set")), int(number)) for name, _, number in named]


def counts_of(order: list[tuple[int, int]], sets: int) -> NDArray[np.int64]:
    """How many of the first n samples each data set has given, [n + 1, sets]."""
    given_by = np.array([part for part, _ in order])
    ones = given_by[:, None] == np.arange(sets)
    return np.concatenate((np.zeros((1, sets), np.int64), np.cumsum(ones, axis=0)))


def assert_no_sample_is_lost(order: list[tuple[int, int]], parts: list[Samples]) -> None:
    """Each epoch of each data set has each of its samples once, in the data set's own order."""
    for number, part in enumerate(parts):
        own = [sample for part_number, sample in order if part_number == number]
        assert not own or own == part.batch(0, len(own)).ids.tolist()
        whole_epochs, begun = divmod(len(own), len(part))
        times = Counter(own)
        assert all(times[sample] - whole_epochs in (0, 1) for sample in range(len(part)))
        assert sum(times[sample] - whole_epochs for sample in range(len(part))) == begun


@st.composite
def points(draw: st.DrawFn) -> Points:
    begins = draw(st.lists(st.integers(1, 120), max_size=3, unique=True))
    weights = draw(st.lists(st.integers(0, 9), min_size=4, max_size=4))
    # a data set without any weight is refused, and so is a phase without any
    return tuple(
        (begin, weight / 10) for begin, weight in zip([0, *sorted(begins)], weights, strict=False)
    )


@settings(deadline=None, max_examples=30)
@given(changing=st.lists(points(), min_size=2, max_size=2), constant=st.integers(1, 9))
def test_each_phase_has_its_exact_proportions_and_no_sample_is_lost(
    parts: list[Samples], changing: list[Points], constant: int
) -> None:
    weights = (*changing, ((0, constant / 10),))
    phases = BlendPhases(weights)
    total = 200
    order = read(parts, phases, total)
    assert_no_sample_is_lost(order, parts)
    counts = counts_of(order, 3)
    # a plain loop over the samples, which looks up each weight
    begin = 0
    for position in range(total):
        now = [_weight_there(of_set, position) for of_set in weights]
        before = [_weight_there(of_set, position - 1) for of_set in weights]
        if now != before:
            begin = position
        taken = counts[position + 1] - counts[begin]
        for number, weight in enumerate(now):
            wanted = (position + 1 - begin) * weight / sum(now)
            assert abs(int(taken[number]) - wanted) < 1


def _weight_there(of_set: Points, position: int) -> Fraction:
    found = Fraction(0)
    for begin, weight in of_set:
        if begin <= position:
            found = Fraction(repr(weight))
    return found


@pytest.mark.parametrize("length", [1, 7, 99, 1000, 12_345, 250_000])
def test_a_line_is_followed_to_one_sample_or_a_hundred_thousandth(length: int) -> None:
    first = (0.7, 0.3, 0.0)
    last = (0.1, 0.3, 0.6)
    given = [((0, a), (50, a), (50 + length, b)) for a, b in zip(first, last, strict=True)]
    stretches = BlendPhases(tuple(given), linear=True).stretches()
    for part in range(LINEAR_STEPS + 1):
        position = length * part // LINEAR_STEPS
        taken = taken_before(stretches, 50 + position)
        assert sum(taken) == 50 + position
        for number in range(3):
            start, end = Fraction(repr(first[number])), Fraction(repr(last[number]))
            line = start * position + (end - start) * position**2 / (2 * length)
            wanted = 50 * start + line
            # the plain steps before have an error of less than one too
            assert abs(taken[number] - wanted) < 2 + length / 100_000
    after = taken_before(stretches, 50 + length + 1000)
    at_end = taken_before(stretches, 50 + length)
    assert [b - a for a, b in zip(at_end, after, strict=True)] == [100, 300, 600]


def test_shares_on_a_line_come_evenly(parts: list[Samples]) -> None:
    """Nowhere in a phase of 1,000 samples has any tenth of it another share than the line."""
    weights = (((0, 1.0), (1000, 0.0)), ((0, 0.0), (1000, 1.0)), ((0, 1.0),))
    order = read(parts, BlendPhases(weights, linear=True), 1200)
    assert_no_sample_is_lost(order, parts)
    counts = counts_of(order, 3)
    for begin in range(900):
        middle = (begin + 50) / 1000
        taken = counts[begin + 100] - counts[begin]
        assert np.allclose(taken, [50 * (1 - middle), 50 * middle, 50], atol=2.5)


@settings(deadline=None, max_examples=20)
@given(
    weights=st.lists(points(), min_size=3, max_size=3),
    linear=st.booleans(),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_a_batch_is_the_same_wherever_it_is_cut(
    parts: list[Samples],
    weights: list[Points],
    linear: bool,
    cuts: list[int],
) -> None:
    phases = BlendPhases((*weights[:2], ((0, 0.5),)), linear)
    names = ["a", "b", "c"]
    whole = Blend(parts, phases.stretches(), names).batch(0, sum(cuts)).ids.tolist()
    pieces = list[int]()
    for count in cuts:
        # opened anew, as by a resumed run
        blend = Blend(parts, phases.stretches(), names)
        pieces += blend.batch(len(pieces), count).ids.tolist()
    assert pieces == whole


def test_weights_that_never_change_are_one_stretch() -> None:
    plain = BlendPhases.constant([0.7, 0.3]).stretches()
    repeated = (((0, 0.7), (10, 0.7)), ((0, 0.3), (40, 0.3)))
    assert BlendPhases(repeated).stretches() == plain
    assert BlendPhases(repeated, linear=True).stretches() == plain
    doubled = (((0, 0.7), (10, 1.4)), ((0, 0.3), (10, 0.6)))
    assert len(BlendPhases(doubled, linear=True).stretches()) == 2


def test_a_data_set_without_weight_is_in_no_pattern() -> None:
    assert pattern([0, 2, 1]).tolist() == pattern([2, 1]).__add__(1).tolist()


def test_phases_with_long_patterns_are_refused() -> None:
    fine = tuple((begin, round(0.3 + begin / 1e5, 5)) for begin in range(20))
    with raises("data.blend_phases_too_fine"):
        BlendPhases((fine, ((0, 0.70001),))).require_short_patterns()
    many = tuple((begin * 1000, 0.1 + begin % 2) for begin in range(12))
    with raises("data.blend_phases_too_fine"):
        BlendPhases((many, ((0, 1.0),)), linear=True).require_short_patterns()


def test_a_phase_without_any_weight_is_found_where_it_begins_also_the_first() -> None:
    def empty(*points: tuple[tuple[int, float], ...]) -> int | None:
        return BlendPhases(points).empty_phase()

    assert empty(((0, 1.0),), ((0, 0.0),)) is None
    assert empty(((0, 0.0), (5, 1.0)), ((0, 0.0), (7, 1.0))) == 0
    assert empty(((0, 1.0), (5, 0.0), (9, 1.0)), ((0, 0.0), (9, 1.0))) == 5


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("begin", [0, 3, 5, 9, 20])
def test_stretches_go_on_from_each_other_and_none_is_empty(linear: bool, begin: int) -> None:
    points = (((0, 0.2), (5, 0.9), (9, 0.4)), ((0, 1.0),))
    stretches = BlendPhases(points, linear).stretches(begin)
    begins = [stretch.begin for stretch in stretches]
    assert begins[0] == begin
    assert begins == sorted(set(begins))
