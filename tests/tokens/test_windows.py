"""Random windows are drawn evenly from all of the training text, by position and seed alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.tokens.blend import Blend, WeightedStretch
from megaprec.tokens.held_out import HeldOutRule
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.order import draw
from megaprec.tokens.samples import NO_RESETS, Resets, Samples, split
from tests.tokens.test_samples import joined, stream

LENGTH = 8
DRAWN = 20_000


def random_windows(dataset: IndexedDataset, seed: int = 3, resets: Resets = NO_RESETS) -> Samples:
    return Samples(dataset, LENGTH, seed, True, resets=resets, windows="random")


def chi_square(counts: np.ndarray) -> float:
    """Return the statistic of counts that should be equal, in standard deviations from its mean."""
    expected = counts.mean()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [7, 64, 393])
def test_each_number_is_drawn_equally_often(n: int, seed: int) -> None:
    drawn = draw(np.arange(1000, 1000 + 50 * n), n, seed)
    counts = np.bincount(drawn, minlength=n)
    assert len(counts) == n
    # Far too even a draw, as of a permutation, is none with replacement.
    assert -3.5 < chi_square(counts) < 3.5


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    n = 16
    positions = np.arange(100 * n * n)
    drawn = draw(positions, n, 1)
    for other in (draw(positions + 1, n, 1), draw(positions, n, 2), draw(positions + n, n, 1)):
        pairs = np.bincount(drawn * n + other, minlength=n * n)
        assert -3.5 < chi_square(pairs) < 3.5


@pytest.mark.parametrize("rule", ["end", "everywhere"])
def test_windows_begin_at_every_token_of_the_training_part_equally_often_and_never_leave_it(
    rule: HeldOutRule, tmp_path: Path
) -> None:
    dataset = stream(tmp_path, 801)
    train, held_out = split(dataset, LENGTH, 0.1, seed=3, rule=rule, windows="random")
    assert held_out is not None and held_out.windows == "tiled"
    of_evaluation = held_out.batch(0, len(held_out))
    evaluated = set(of_evaluation.targets.flatten().tolist())
    is_free = np.array([token not in evaluated for token in range(801)])
    # The first targets of windows of which no target is evaluated; token i of the text is i.
    possible = [
        start for start in range(801 - LENGTH) if is_free[start + 1 : start + 1 + LENGTH].all()
    ]
    batch = train.batch(0, DRAWN)
    assert torch.equal(batch.tokens[:, 0], batch.ids)
    starts, counts = np.unique(batch.ids.numpy(), return_counts=True)
    assert starts.tolist() == possible
    assert train.num_different == len(possible)
    assert -3.5 < chi_square(counts) < 3.5


@settings(deadline=None, max_examples=30)
@given(position=st.integers(0, 10**9), seed=st.integers(0, 2**40))
def test_each_window_is_the_tokens_of_the_file_from_its_id_on(
    tmp_path_factory: pytest.TempPathFactory, position: int, seed: int
) -> None:
    dataset = stream(tmp_path_factory.mktemp("file"), 500)
    stored = np.fromfile(f"{dataset.prefix}.bin", np.uint16)
    resets = Resets(attention_mask=True, position_ids=True, eod_mask_loss=True)
    samples = random_windows(dataset, seed, resets=resets)
    batch = samples.batch(position, 5)
    assert batch.documents is not None and batch.positions is not None and batch.mask is not None
    for row, start in enumerate(batch.ids.tolist()):
        window = stored[start : start + LENGTH + 1].astype(np.int64)
        assert len(window) == LENGTH + 1
        assert batch.tokens[row].tolist() == window[:-1].tolist()
        assert batch.targets[row].tolist() == window[1:].tolist()
        # documents have 7 tokens
        assert batch.mask[row].tolist() == (window[1:] % 7 > 0).tolist()
        assert batch.documents[row].tolist() == (window[:-1] // 7 - start // 7).tolist()
        within = np.minimum(window[:-1] % 7, window[:-1] - start)
        assert batch.positions[row].tolist() == within.tolist()
        span = start, start + LENGTH + 1
        assert samples.location_of(position + row) == (dataset, start, (span,))


@settings(deadline=None, max_examples=30)
@given(
    position=st.integers(0, 10**7),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_a_batch_of_windows_is_the_same_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, position: int, cuts: list[int]
) -> None:
    samples = random_windows(stream(tmp_path_factory.mktemp("cut"), 100))
    starts = position + np.cumsum([0, *cuts[:-1]])
    parts = [samples.batch(int(start), count) for start, count in zip(starts, cuts, strict=True)]
    assert joined(parts) == joined([samples.batch(position, sum(cuts))])


def test_windows_without_a_counted_target_are_counted_among_all_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = Resets(eod_mask_loss=True)
    dataset = stream(tmp_path, 101)
    # Windows of one target: none counts where the target is the first token of a document.
    samples = Samples(dataset, 1, 0, True, resets=resets, windows="random")
    expected = sum(token % 7 == 0 for token in range(1, 101))
    for chunk in (1 << 20, 7, 1):
        monkeypatch.setattr("megaprec.tokens.samples.CHUNK", chunk)
        assert samples.count_without_target() == expected
        assert samples.tiled.count_without_target() == expected
        assert random_windows(dataset, resets=resets).count_without_target() == 0


def test_a_blend_names_a_window_by_its_set_and_first_token(tmp_path: Path) -> None:
    parts = []
    for name, tokens in (("a", 200), ("b", 333)):
        (tmp_path / name).mkdir()
        parts.append(random_windows(stream(tmp_path / name, tokens)))
    blend = Blend(parts, [WeightedStretch.first([2.0, 1.0])], ["a", "b"])
    batch = blend.batch(5, 60)
    labels = blend.labels(batch.ids)
    assert {label.partition(":")[0] for label in labels} == {"a", "b"}
    for position, label in enumerate(labels):
        name, _, first = label.partition(":")
        assert int(first) == int(batch.tokens[position, 0])
        location = blend.location_of(5 + position)
        assert location.dataset.prefix.parent.name == name
        assert location.first_token == int(first)
    tiles = blend.tiled.batch(0, 30)
    assert (tiles.tokens[:, 0] % LENGTH == 0).all()
