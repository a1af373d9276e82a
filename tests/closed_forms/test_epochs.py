"""What an epoch of shuffled samples is, by counting: no order of ours is asked."""

from pathlib import Path

import torch

from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Samples, split

LENGTH = 4
SAMPLES = 200
HELD_OUT = 0.2


def text_of_distinct_tokens(folder: Path) -> IndexedDataset:
    """A text in which each token is its own place, so that a sample says where it is from."""
    tokens = SAMPLES * LENGTH + 1
    with IndexedWriter(folder / "text", tokens) as writer:
        writer.add_document(list(range(tokens)))
    return IndexedDataset(folder / "text")


def places(samples: Samples, epoch: int) -> torch.Tensor:
    """The targets of an epoch, [samples, s]."""
    return samples.batch(epoch * len(samples), len(samples)).targets


def test_each_epoch_has_each_target_once_and_none_that_is_held_out(tmp_path: Path) -> None:
    training, held_out = split(text_of_distinct_tokens(tmp_path), LENGTH, HELD_OUT, seed=3)
    assert held_out is not None
    kept = set(places(held_out, 0).flatten().tolist())
    for epoch in range(3):
        trained = places(training, epoch).flatten().tolist()
        assert len(set(trained)) == len(trained), "a target comes twice"
        assert kept.isdisjoint(trained), "a held-out target is trained on"
        assert kept | set(trained) == set(range(1, SAMPLES * LENGTH + 1)), "a target is lost"


def test_two_epochs_have_as_many_samples_in_the_same_place_as_chance_gives_them(
    tmp_path: Path,
) -> None:
    """One in the mean, whatever the number of samples; more than ten once in 10^8."""
    training, _ = split(text_of_distinct_tokens(tmp_path), LENGTH, HELD_OUT, seed=3)
    first, second = (places(training, epoch)[:, 0] for epoch in range(2))
    assert int((first == second).sum()) <= 10
    in_file_order = first.sort().values
    assert int((first == in_file_order).sum()) <= 10


def test_each_target_is_the_token_after_its_input(tmp_path: Path) -> None:
    training, _ = split(text_of_distinct_tokens(tmp_path), LENGTH, HELD_OUT, seed=3)
    batch = training.batch(0, len(training))
    assert torch.equal(batch.targets, batch.tokens + 1)
