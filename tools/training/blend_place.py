"""The place of a run in each data set of its blend, if the weights change on a resume.

The place in the data is one number of samples. Under other weights that number would mean other
samples of each data set: some would come twice and others never. So each data set goes on with the
sample after its last one, and checkpoints keep from where on which weights hold.
"""

from collections.abc import Sequence

from megaprec.checkpoint.reader import Store
from megaprec.tokens.blend import WeightedStretch, taken_before
from tools.config.run_file import RunConfig
from tools.saved.train_state import read_progress
from tools.training.branch import open_start
from tools.training.changed_keys import saved_length
from tools.training.data_identity import Identity, read_identity
from tools.training.data_sources import DataSource, training_sources


def stretches_of(config: RunConfig) -> list[WeightedStretch]:
    """Return the weights of the run's data sets, by position: those of its checkpoint, and from
    there on its own. Raises UserError for a damaged checkpoint."""
    sources = training_sources(config)
    weights = tuple(source.weight for source in sources)
    checkpoint = open_start(config)
    identity = read_identity(checkpoint) if checkpoint else None
    if checkpoint is None or identity is None:
        return [WeightedStretch.first(weights)]

    before = saved_stretches(identity)
    samples = read_progress(checkpoint).samples
    has_same_sets = len(identity.sets) == len(sources)
    has_same_length = saved_length(checkpoint, config) == config.train.seq_length
    if has_same_sets and before[-1].weights == weights and (has_same_length or len(before) == 1):
        return before
    taken = taken_before(before, samples)
    if not has_same_sets:
        taken = _taken_by_name(identity, taken, sources)
    if not has_same_length:
        return [_in_other_length(checkpoint, config, weights, taken)]
    present = WeightedStretch(samples, weights, tuple(taken))
    # What came before cannot be said of other data sets.
    return [*before, present] if has_same_sets else [present]


def saved_stretches(identity: Identity) -> list[WeightedStretch]:
    """Return the weights of the data sets of a run, by position."""
    if not identity.stretches:
        return [WeightedStretch.first([data_set.weight for data_set in identity.sets])]
    return [
        WeightedStretch(saved.begin, tuple(saved.weights), tuple(saved.taken))
        for saved in identity.stretches
    ]


def _taken_by_name(
    identity: Identity, taken: Sequence[int], sources: Sequence[DataSource]
) -> list[int]:
    """Return how many samples each data set of the run has given: none of those that are new."""
    by_name = dict(zip((saved.source for saved in identity.sets), taken, strict=True))
    return [by_name.get(source.name, 0) for source in sources]


def _in_other_length(
    checkpoint: Store, config: RunConfig, weights: tuple[float, ...], taken: Sequence[int]
) -> WeightedStretch:
    """Return the present stretch if samples have another length than before: of each data set as
    many tokens count as taken."""
    old_length = saved_length(checkpoint, config)
    length = config.train.seq_length
    begin = read_progress(checkpoint).samples * old_length // length
    return WeightedStretch(begin, weights, tuple(count * old_length // length for count in taken))
