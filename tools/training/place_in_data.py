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
class _DataPosition:
    """The position of a run in its data.

    samples: the number of the next sample, of the length that it has now. repeated: tokens at the
    beginning of that sample that were read before. held_out: tokens that were trained on, and that
    belong to the held-out part now.
    """

    samples: int
    repeated: int = 0
    held_out: int = 0


def other_length(checkpoint: Store, config: RunConfig) -> Iterator[Difference]:
    """Yield a difference if another length of samples than the checkpoint's changes their order."""
    before = _saved_length(checkpoint, config)
    now = config.train.seq_length
    if before == now or not read_progress(checkpoint).samples:
        return
    if config.data.shuffle:
        reason = "its samples come in another order"
    elif config.data.blend:
        reason = "each set of a blend counts its samples"
    else:
        return
    effect = "so text of this epoch comes twice or not at all"
    yield Difference("seq_length", f"{KEY}: {before} -> {now}: {reason}, {effect}")


def resumed_progress(checkpoint: Store, config: RunConfig, corpus: Corpus) -> TrainState:
    """Return the progress that a run goes on with.

    The checkpoint's, its position in the data kept in tokens.
    """
    progress = read_progress(checkpoint)
    return replace(progress, samples=_data_position(checkpoint, config, corpus).samples)


def position_notes(checkpoint: Store, config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a note about the position in the data if the length of samples has changed."""
    before = _saved_length(checkpoint, config)
    now = config.train.seq_length
    if before == now:
        return
    position = _data_position(checkpoint, config, corpus)
    tokens = read_progress(checkpoint).samples * before
    line = (
        f"{KEY}: the place in the data is kept: {tokens:,} tokens are read, and sample "
        f"{position.samples:,} of {now} tokens is next"
    )
    if position.repeated:
        line += f"; its first {position.repeated:,} tokens come again"
    if position.held_out:
        held_out = f"{position.held_out:,} tokens that were trained on"
        line += f"; {held_out} belong to the held-out part now"
    yield line


def _data_position(checkpoint: Store, config: RunConfig, corpus: Corpus) -> _DataPosition:
    before = _saved_length(checkpoint, config)
    now = config.train.seq_length
    samples = read_progress(checkpoint).samples
    if before == now:
        return _DataPosition(samples)
    if not isinstance(corpus.train, Samples):  # a blend, which has no epochs of its own
        following, repeated = divmod(samples * before, now)
        return _DataPosition(following, repeated)

    old_epoch_samples = count_training_samples(corpus.train.dataset, before, config.data.held_out)
    new_epoch_samples = len(corpus.train)
    epoch, samples_in_epoch = divmod(samples, old_epoch_samples)
    following, repeated = divmod(samples_in_epoch * before, now)
    if following >= new_epoch_samples:  # what is left of the epoch is shorter than a sample
        following = new_epoch_samples
        repeated = 0
    held_out = 0
    if corpus.held_out is not None:
        # The border to the held-out part is at a whole sample, and so has moved, too.
        trained_samples = old_epoch_samples if epoch else samples_in_epoch
        held_out = max(0, trained_samples * before - new_epoch_samples * now)
    return _DataPosition(epoch * new_epoch_samples + following, repeated, held_out)


def _saved_length(checkpoint: Store, config: RunConfig) -> int:
    """Return the length of the samples of the checkpoint's run.

    The run's own if that is not known.
    """
    saved = saved_keys(checkpoint).get(KEY)
    if saved is None:
        return config.train.seq_length
    try:
        value = parse_toml(f"value = {saved}")["value"]
    except ValueError:
        return config.train.seq_length
    is_length = type(value) is int and value > 0  # not isinstance: true is no length
    return value if is_length else config.train.seq_length
