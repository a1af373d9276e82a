"""The place in the data from which a resumed run goes on, if its samples have another length than
the checkpoint's.

The place is kept in tokens. Without data.shuffle the same tokens were read, and the next ones
follow. A shuffled order is an order of samples: with another length it is another one, so that text
of the epoch comes twice or not at all. Such a change is refused unless --allow accepts it. A blend
counts the samples of each of its sets, alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaprec.checkpoint.reader import Store
from megaprec.data.samples import Samples, count_training_samples
from megaprec.parsing import parse_toml
from tools.config.run_file import RunConfig
from tools.convert.train_state import TrainState, read_progress
from tools.training.changed_keys import saved_keys
from tools.training.corpus import Corpus
from tools.training.data_identity import Difference

KEY = "train.seq_length"


@dataclass(frozen=True)
class Place:
    """The place of a run in its data. samples: the number of the next sample, of the length that it
    has now.

    repeated: tokens at the beginning of that sample that were read before. held_out: tokens that
    were trained on, and that belong to the held-out part now.
    """

    samples: int
    repeated: int = 0
    held_out: int = 0


def other_length(store: Store, config: RunConfig) -> Iterator[Difference]:
    """Yield a difference if samples of another length come in another order than those of the
    checkpoint."""
    before = _length_before(store, config)
    now = config.train.seq_length
    if before == now or not read_progress(store).samples:
        return
    if config.data.blend or config.data.shuffle:
        if config.data.shuffle:
            why = "its samples come in another order"
        else:
            why = "each set of a blend counts its samples"
        yield Difference(
            "seq_length",
            f"{KEY}: {before} -> {now}: {why}, so text of this epoch comes twice or not at all",
        )


def resumed_progress(store: Store, config: RunConfig, corpus: Corpus) -> TrainState:
    """Return the progress that a run goes on with: the checkpoint's, its place in the data kept in
    tokens."""
    progress = read_progress(store)
    return replace(progress, samples=_place(store, config, corpus).samples)


def place_notes(store: Store, config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a note about the place in the data if the length of samples has changed."""
    before = _length_before(store, config)
    now = config.train.seq_length
    if before == now:
        return
    place = _place(store, config, corpus)
    tokens = read_progress(store).samples * before
    line = (
        f"{KEY}: the place in the data is kept: {tokens:,} tokens are read, and sample "
        f"{place.samples:,} of {now} "
    )
    line += "tokens is next"
    if place.repeated:
        line += f"; its first {place.repeated:,} tokens come again"
    if place.held_out:
        line += f"; {place.held_out:,} tokens that were trained on belong to the held-out part now"
    yield line


def _place(store: Store, config: RunConfig, corpus: Corpus) -> Place:
    before = _length_before(store, config)
    now = config.train.seq_length
    samples = read_progress(store).samples
    if before == now:
        return Place(samples)
    if not isinstance(corpus.train, Samples):
        following, repeated = divmod(samples * before, now)
        return Place(following, repeated)
    of_an_epoch = count_training_samples(corpus.train.dataset, before, config.data.held_out)
    epoch, inside = divmod(samples, of_an_epoch)
    following, repeated = divmod(inside * before, now)
    if following >= len(corpus.train):  # what is left of the epoch is shorter than a sample
        following = len(corpus.train)
        repeated = 0
    held_out = 0
    if corpus.held_out is not None:
        trained = of_an_epoch if epoch else inside
        held_out = max(0, trained * before - len(corpus.train) * now)
    return Place(epoch * len(corpus.train) + following, repeated, held_out)


def _length_before(store: Store, config: RunConfig) -> int:
    """Return the length of the samples of the checkpoint's run; if that is not known, it is taken
    for the run's own."""
    saved = saved_keys(store).get(KEY)
    if saved is None:
        return config.train.seq_length
    try:
        value = parse_toml(f"value = {saved}")["value"]
    except ValueError:
        return config.train.seq_length
    return value if type(value) is int and value > 0 else config.train.seq_length
