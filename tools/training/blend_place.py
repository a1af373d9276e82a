"""The place of a run in each data set of its blend.

The place in the data is one number of samples. Under other weights that number would mean other
samples of each data set: some would come twice and others never. So each data set goes on with the
sample after its last one, and checkpoints keep from where on which weights hold: those of the plan
of the run file (`BlendPhases`), and those of earlier run files.
"""

from collections.abc import Sequence

from megaprec.checkpoint.reader import Store
from megaprec.tokens.blend import WeightedStretch, taken_before
from megaprec.tokens.blend_phases import BlendPhases
from tools.config.rules.derived import blend_phases
from tools.config.run_file import RunConfig
from tools.saved.train_state import read_progress
from tools.training.branch import open_start
from tools.training.changed_keys import saved_length
from tools.training.data_identity import Identity, read_identity
from tools.training.data_sources import DataSource, training_sources


def stretches_of(config: RunConfig) -> list[WeightedStretch]:
    """Return the weights of the run's data sets, by position: those of its checkpoint, and from
    there on its own. Raises UserError for a damaged checkpoint."""
    phases = blend_phases(config.data)
    checkpoint = open_start(config)
    identity = read_identity(checkpoint) if checkpoint else None
    if checkpoint is None or identity is None:
        return phases.stretches()

    before = saved_stretches(identity)
    samples = read_progress(checkpoint).samples
    sources = training_sources(config)
    has_same_sets = len(identity.sets) == len(sources)
    has_same_length = saved_length(checkpoint, config) == config.train.seq_length
    if identity.phases == phases and (has_same_length or len(before) == 1):
        return before
    taken = taken_before(before, samples)
    if not has_same_sets:
        taken = _taken_by_name(identity, taken, sources)
    if not has_same_length:
        return _in_other_length(checkpoint, config, phases, taken)
    present = phases.stretches(samples, taken)
    # What came before cannot be said of other data sets.
    if not has_same_sets:
        return present
    past = [stretch for stretch in before if stretch.begin <= samples]
    return [*past, *present]


def saved_stretches(identity: Identity) -> list[WeightedStretch]:
    """Return the weights of the data sets of a run, by position."""
    if not identity.stretches:
        return identity.phases.stretches()
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
    checkpoint: Store, config: RunConfig, phases: BlendPhases, taken: Sequence[int]
) -> list[WeightedStretch]:
    """Return the stretches to come if samples have another length than before: of each data set as
    many tokens count as taken."""
    old_length = saved_length(checkpoint, config)
    length = config.train.seq_length
    begin = read_progress(checkpoint).samples * old_length // length
    return phases.stretches(begin, [count * old_length // length for count in taken])
