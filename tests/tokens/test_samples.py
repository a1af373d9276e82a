"""A batch depends on nothing but the positions asked for, and held-out text is never trained on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.errors import UserError
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Batch, Resets, Samples, count_samples, split
from tests.refusals import raises, sentence


def stream(folder: Path, tokens: int) -> IndexedDataset:
    """A data set whose token i is i, in documents of 7 tokens."""
    with IndexedWriter(folder / "x", 60000) as writer:
        for start in range(0, tokens, 7):
            writer.add_document(list(range(start, min(start + 7, tokens))))
    return IndexedDataset(folder / "x")


def joined(batches: list[Batch]) -> list[list]:
    return [
        torch.cat([getattr(b, name) for b in batches]).tolist()
        for name in ("tokens", "targets", "ids")
    ]


def test_all_that_a_batch_reads_is_prepared_at_once_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the times that a server takes do not add up."""
    dataset = stream(tmp_path, 41)
    prepared: list[tuple[list[int], int]] = []
    read = list[tuple[int, int]]()
    tokens = dataset.tokens
    monkeypatch.setattr(
        dataset, "prepare", lambda starts, length: prepared.append((list(starts), length))
    )
    monkeypatch.setattr(
        dataset,
        "tokens",
        lambda start, length: (read.append((start, length)), tokens(start, length))[1],
    )
    Samples(dataset, seq_length=8, seed=0, shuffle=True).batch(1, 3)
    ((starts, length),) = prepared
    assert [(start, length) for start in starts] == read


def test_sample_i_is_the_ith_stretch_of_the_stream(tmp_path: Path) -> None:
    samples = Samples(stream(tmp_path, 41), seq_length=8, seed=0, shuffle=False)
    batch = samples.batch(0, 5)
    assert len(samples) == 5
    assert batch.tokens.tolist() == [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    assert batch.targets.tolist() == [list(range(8 * i + 1, 8 * i + 9)) for i in range(5)]
    assert batch.ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.mask is None
    assert {batch.tokens.dtype, batch.targets.dtype, batch.ids.dtype} == {torch.int64}


@pytest.mark.parametrize(
    ("tokens", "samples"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (24, 2), (25, 3)]
)
def test_the_last_target_needs_a_token_too(tmp_path: Path, tokens: int, samples: int) -> None:
    assert count_samples(stream(tmp_path, tokens), 8) == samples


@settings(deadline=None, max_examples=50)
@given(
    position=st.integers(0, 200),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    shuffle=st.booleans(),
)
def test_a_batch_is_the_same_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, position: int, cuts: list[int], shuffle: bool
) -> None:
    samples = Samples(stream(tmp_path_factory.mktemp("cut"), 100), 4, seed=11, shuffle=shuffle)
    starts = position + np.cumsum([0, *cuts[:-1]])
    parts = [samples.batch(int(start), count) for start, count in zip(starts, cuts, strict=True)]
    assert joined(parts) == joined([samples.batch(position, sum(cuts))])


def test_every_epoch_trains_on_every_target_once_in_another_order(tmp_path: Path) -> None:
    samples = Samples(stream(tmp_path, 401), 8, seed=1, shuffle=True)
    epochs = [samples.batch(50 * epoch, 50) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch.targets.flatten().tolist()) == list(range(1, 401))
        assert torch.equal(epoch.tokens[:, 0], 8 * epoch.ids)
    assert len({tuple(epoch.ids.tolist()) for epoch in epochs}) == 3


def test_the_first_token_of_a_document_is_no_target_in_the_loss(tmp_path: Path) -> None:
    batch = Samples(
        stream(tmp_path, 41), 8, 0, shuffle=False, resets=Resets(eod_mask_loss=True)
    ).batch(0, 5)
    assert batch.mask is not None and batch.mask.dtype == torch.float32
    assert batch.targets[batch.mask == 0].tolist() == [7, 14, 21, 28, 35]
    assert (batch.documents, batch.positions) == (None, None)


def test_documents_and_positions_are_told_as_they_lie_in_the_stream(tmp_path: Path) -> None:
    resets = Resets(attention_mask=True, position_ids=True)
    batch = Samples(stream(tmp_path, 41), 8, 4, shuffle=True, resets=resets).batch(0, 5)
    assert batch.documents is not None and batch.positions is not None and batch.mask is None
    for tokens, documents, positions in zip(
        batch.tokens, batch.documents, batch.positions, strict=True
    ):
        assert torch.equal(documents, tokens // 7 - tokens[0] // 7)
        assert torch.equal(positions, torch.minimum(tokens % 7, tokens - tokens[0]))


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8))
def test_a_document_may_be_empty_or_many_sequences(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    expected = list[int]()
    with IndexedWriter(folder / "x", 100) as writer:
        for number, sequences in enumerate(lengths):
            for length in sequences:
                writer.extend([1] * length, np.zeros(0, np.int64))
                writer._write_lengths(np.array([length]))  # so that it is a sequence of its own
                writer._open = 0
            writer._documents.write(np.array([writer._sequences], "<i8").tobytes())
            expected += [number] * sum(sequences)
    dataset = IndexedDataset(folder / "x")
    for start in range(len(expected)):
        for length in range(1, len(expected) - start + 1):
            assert dataset.documents_of(start, length).tolist() == expected[start : start + length]


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_no_target_is_both_trained_on_and_held_out(tmp_path: Path, fraction: float) -> None:
    train, held = split(stream(tmp_path, 801), 8, fraction, seed=3)
    assert held is not None
    assert len(train) + len(held) == 100
    assert len(held) == min(max(round(100 * fraction), 1), 99)
    trained = train.batch(0, 3 * len(train))
    kept = held.batch(0, 3 * len(held))
    assert trained.targets.max() < kept.targets.min()
    # the end of the text, in file order
    assert kept.ids[: len(held)].tolist() == list(range(len(train), 100))
    assert set(trained.ids.tolist()) == set(range(len(train)))


def test_nothing_held_out_trains_on_everything(tmp_path: Path) -> None:
    train, held = split(stream(tmp_path, 81), 8, 0, seed=3)
    assert (len(train), held) == (10, None)


@pytest.mark.parametrize(
    ("held_out", "tokens", "needed"), [(0.1, 16, 17), (0, 8, 9), (0.99, 9, 17), (0.1, 0, 17)]
)
def test_a_text_too_short_says_what_it_has_and_needs(
    tmp_path: Path, held_out: float, tokens: int, needed: int
) -> None:
    with pytest.raises(
        UserError, match=sentence("data.data_too_short", num_tokens=tokens, needed_tokens=needed)
    ):
        split(stream(tmp_path, tokens), 8, held_out, seed=0)


@pytest.mark.parametrize("held_out", [-0.1, 1, 1.5, float("nan")])
def test_a_fraction_that_is_none_is_refused(tmp_path: Path, held_out: float) -> None:
    with raises("data.held_out_fraction"):
        split(stream(tmp_path, 81), 8, held_out, seed=0)
