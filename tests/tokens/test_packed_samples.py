"""Packed samples hold every token of every document once an epoch, and no document is cut that fits
one."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megaprec.tokens.blend import Blend, WeightedStretch
from megaprec.tokens.document_tokens import with_begin
from megaprec.tokens.held_out import HeldOutRule
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.packed_samples import PADDING, PackedSamples, split_packed
from megaprec.tokens.samples import Batch, Resets
from tests.refusals import raises
from tests.tokens.test_best_fit import plain_best_fit

LENGTH = 8
LENGTHS = [3, 8, 21, 5, 1, 0, 16, 2, 7, 4, 9, 6, 1]
ALL = Resets(attention_mask=True, position_ids=True)


def documents(
    folder: Path, lengths: list[int] = LENGTHS, counted: list[bool] | None = None
) -> IndexedDataset:
    """A data set of documents of these lengths, whose token i is i + 1."""
    ids = np.arange(1, sum(lengths) + 1)
    mask = None if counted is None else np.array(counted)
    with IndexedWriter(folder / "x", 60000, has_mask=counted is not None) as writer:
        writer.extend(ids, np.cumsum(lengths), mask)
    return IndexedDataset(folder / "x")


def packed(
    dataset: IndexedDataset, resets: Resets = ALL, seed: int = 3, shuffle: bool = True
) -> PackedSamples:
    samples, held_out = split_packed(dataset, LENGTH, 0.0, seed, shuffle, resets, "end")
    assert held_out is None
    return samples


def inputs_of(batch: Batch) -> list[int]:
    return [token for token in batch.tokens.flatten().tolist() if token != PADDING]


def targets_of(batch: Batch) -> list[int]:
    assert batch.mask is not None
    return batch.targets[batch.mask > 0].tolist()


def test_each_token_is_once_an_epoch_an_input_and_behind_the_first_a_target(tmp_path: Path) -> None:
    dataset = documents(tmp_path)
    firsts = {int(dataset.document(i)[0]) for i, length in enumerate(LENGTHS) if length}
    everything = range(1, sum(LENGTHS) + 1)
    samples = packed(dataset, Resets(eod_mask_loss=True))
    for epoch in range(3):
        batch = samples.batch(epoch * len(samples), len(samples))
        assert sorted(inputs_of(batch)) == [*everything]
        assert sorted(targets_of(batch)) == sorted({*everything} - firsts)
        # of each target that counts, the input is the token before it
        assert batch.mask is not None
        is_target = batch.mask > 0
        assert (batch.targets[is_target] == batch.tokens[is_target] + 1).all()


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_padding_of_samples_is_what_no_document_fills(tmp_path: Path, shuffle: bool) -> None:
    samples = packed(documents(tmp_path), shuffle=shuffle)
    for position, count in [(0, 1), (4, 3), (9, 5), (2, 0)]:
        tokens = samples.batch(position, count).tokens if count else torch.empty(0)
        assert samples.padding(position, count) == (tokens == PADDING).sum()


def test_a_sample_is_the_pieces_of_a_plain_loop_and_padding(tmp_path: Path) -> None:
    batch = packed(documents(tmp_path), shuffle=False).batch(0, 11)
    assert batch.documents is not None and batch.positions is not None
    plain = plain_best_fit(LENGTHS, LENGTH)
    assert len(plain) == 11
    for row, pieces in enumerate(plain):
        tokens, numbers, places = [], [], []
        for number, (start, length) in enumerate(pieces):
            tokens += range(start + 1, start + length + 1)
            numbers += [number] * length
            places += range(length)
        padding = LENGTH - len(tokens)
        assert batch.tokens[row].tolist() == tokens + [PADDING] * padding
        assert batch.documents[row].tolist() == numbers + [len(pieces)] * padding
        assert batch.positions[row].tolist() == [*places, *range(padding)]
    assert batch.ids.tolist() == [*range(11)]


def test_first_tokens_are_targets_behind_another_document_alone(tmp_path: Path) -> None:
    dataset = documents(tmp_path)
    firsts = {int(dataset.document(i)[0]) for i, length in enumerate(LENGTHS) if length}
    batch = packed(dataset, shuffle=False).batch(0, 11)
    seen = {*targets_of(batch)} & firsts
    behind = set()
    for row in batch.tokens.tolist():
        behind |= {token for token in row[1:] if token in firsts}
    assert seen == behind and seen
    # what goes on in another sample is no target there: it was one where the document was cut
    assert max(Counter(targets_of(batch)).values()) == 1


@pytest.mark.parametrize("eod", [False, True])
def test_targets_that_count_are_those_of_the_loss_mask(eod: bool, tmp_path: Path) -> None:
    total = sum(LENGTHS)
    counted = [token % 3 == 0 and token < 40 for token in range(1, total + 1)]
    dataset = documents(tmp_path, counted=counted)
    free = packed(dataset, Resets(eod_mask_loss=eod))
    masked = packed(dataset, Resets(eod_mask_loss=eod, loss_mask=True))
    expected = [t for t in targets_of(free.batch(0, len(free))) if counted[t - 1]]
    batch = masked.batch(0, len(masked))
    assert targets_of(batch) == expected
    assert batch.mask is not None
    without = int((batch.mask.sum(1) == 0).sum())
    assert masked.count_without_target() == without > 0


@pytest.mark.parametrize("chunk", [1, 10, 1 << 20])
def test_counted_targets_are_found_in_pieces_of_any_size(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaprec.tokens.packed_samples.CHUNK", chunk)
    for number, resets in enumerate((Resets(), Resets(eod_mask_loss=True, loss_mask=True))):
        (tmp_path / str(number)).mkdir()
        counted = [token % 5 == 0 for token in range(sum(LENGTHS))]
        samples = packed(documents(tmp_path / str(number), counted=counted), resets)
        batch = samples.batch(0, len(samples))
        assert batch.mask is not None
        assert samples.count_without_target() == int((batch.mask.sum(1) == 0).sum())


def test_data_in_which_no_target_counts_are_refused(tmp_path: Path) -> None:
    dataset = documents(tmp_path, [1] * 20)
    packed(dataset).require_counted("training samples")
    with raises("data.no_token_counts"):
        packed(dataset, Resets(eod_mask_loss=True)).require_counted("training samples")


@pytest.mark.parametrize("rule", ["end", "everywhere"])
def test_no_token_of_the_held_out_part_is_in_training(rule: HeldOutRule, tmp_path: Path) -> None:
    dataset = documents(tmp_path, LENGTHS * 20)
    trained, held_out = split_packed(dataset, LENGTH, 0.2, 1, True, ALL, rule)
    assert held_out is not None
    everything = packed(dataset)
    assert len(trained) + len(held_out) == len(everything)
    of_training = {*inputs_of(trained.batch(0, len(trained)))}
    of_evaluation = {*inputs_of(held_out.batch(0, len(held_out)))}
    assert not of_training & of_evaluation
    assert of_training | of_evaluation == {*range(1, sum(LENGTHS) * 20 + 1)}
    lengths = dataset.document_lengths()
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    counts = Counter(numbers[token - 1] for token in of_training)
    expected = [counts[number] for number in range(len(lengths))]
    assert trained.tokens_by_document(lengths).tolist() == expected


def test_a_batch_is_the_same_however_it_is_cut(tmp_path: Path) -> None:
    samples = packed(documents(tmp_path))
    whole = samples.batch(5, 20)
    cut = [samples.batch(5, 3), samples.batch(8, 1), samples.batch(9, 16)]
    for name in ("tokens", "targets", "ids", "mask", "documents", "positions"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(one, name) for one in cut]))


def test_what_a_batch_reads_is_prepared_and_is_where_its_samples_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = documents(tmp_path)
    prepared: list[tuple[int, int]] = []
    monkeypatch.setattr(dataset, "prepare_spans", lambda spans: prepared.extend(spans))
    samples = packed(dataset)
    batch = samples.batch(2, 4)
    locations = [samples.location_of(position) for position in range(2, 6)]
    assert prepared == [span for location in locations for span in location.spans]
    for row, location in enumerate(locations):
        tokens = [token + 1 for start, stop in location.spans for token in range(start, stop)]
        assert location.sample == int(batch.ids[row])
        text = [*batch.tokens[row].tolist(), int(batch.targets[row, -1])]
        assert text == tokens + [PADDING] * (LENGTH + 1 - len(tokens))


def test_begin_tokens_are_packed_with_their_documents(tmp_path: Path) -> None:
    dataset = with_begin(documents(tmp_path), 5000)
    lengths = [length + 1 for length in LENGTHS]
    samples = packed(dataset, shuffle=False)
    batch = samples.batch(0, len(samples))
    assert Counter(inputs_of(batch))[5000] == len(LENGTHS)
    assert len(samples) == len(plain_best_fit(lengths, LENGTH))
    assert sorted(inputs_of(batch))[: sum(LENGTHS)] == [*range(1, sum(LENGTHS) + 1)]


def test_each_data_set_of_a_blend_packs_its_own(tmp_path: Path) -> None:
    parts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        parts.append(packed(documents(tmp_path / name, LENGTHS * (2 if name == "a" else 1))))
    blend = Blend(parts, [WeightedStretch.first([2.0, 1.0])], ["a", "b"])
    batch = blend.batch(0, 3 * len(parts[1]))
    labels = blend.labels(batch.ids)
    own = parts[1].batch(0, len(parts[1]))
    rows = [row for row, label in enumerate(labels) if label.startswith("b:")]
    assert torch.equal(batch.tokens[rows], own.tokens)
    assert batch.mask is not None and own.mask is not None
    assert torch.equal(batch.mask[rows], own.mask)
    assert blend.tiled.batch(0, 6).tokens.tolist() == batch.tokens[:6].tolist()


def test_too_few_documents_are_refused_with_their_numbers(tmp_path: Path) -> None:
    dataset = documents(tmp_path, [3, 0, 4])
    with raises("data.too_few_packed", samples=1, needed=2, documents=3):
        split_packed(dataset, LENGTH, 0.1, 0, True, ALL, "end")
    (tmp_path / "empty").mkdir()
    with raises("data.too_few_packed", samples=0, needed=1):
        packed(documents(tmp_path / "empty", [0, 0]))
