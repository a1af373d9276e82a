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
from megaprec.tokens.indexed import IndexedDataset
from megaprec.url_secrets import masked
from tools.config.rules.derived import blend_phases
from tools.config.run_file import RunConfig
from tools.saved.train_state import read_progress
from tools.training.branch import open_start
from tools.training.changed_keys import saved_length
from tools.training.data_identity import DataSet, Identity, read_identity
from tools.training.data_sources import DataSource, training_sources


def stretches_of(config: RunConfig, datasets: Sequence[IndexedDataset]) -> list[WeightedStretch]:
    """Return the stretches of the run in order: ranges of its samples, each with the weights that
    the data sets have there.

    A run that resumes or branches has those of its checkpoint up to the checkpoint's sample, and
    from there on those of its own run file. datasets: as their files have them, in the order of the
    run file. Raises UserError for a damaged checkpoint.
    """
    phases = blend_phases(config.data)
    checkpoint = open_start(config)
    identity = read_identity(checkpoint) if checkpoint else None
    if checkpoint is None or identity is None:
        return phases.stretches()

    before = saved_stretches(identity)
    samples = read_progress(checkpoint).samples
    # for each data set of the run the number of the checkpoint's data set that it goes on from
    goes_on_from = _sets_before(identity.sets, training_sources(config), datasets)
    has_same_sets = goes_on_from == list(range(len(identity.sets)))
    has_same_length = saved_length(checkpoint, config) == config.train.seq_length
    if identity.phases == phases and (has_same_length or len(before) == 1):
        return before
    # how many samples each data set has given until the checkpoint: of its sets, and of the run's
    saved_taken = taken_before(before, samples)
    taken = [0 if number is None else saved_taken[number] for number in goes_on_from]
    if not has_same_length:
        return _in_other_length(checkpoint, config, phases, taken)
    present = phases.stretches(samples, taken)
    # Earlier stretches have weights of the earlier data sets, which other sets cannot take over.
    if not has_same_sets:
        return present
    past = [stretch for stretch in before if stretch.begin <= samples]
    return [*past, *present]


def saved_stretches(identity: Identity) -> list[WeightedStretch]:
    """Return the stretches of a saved run: those that its checkpoint states, or else those that its
    run file planned."""
    if not identity.stretches:
        return identity.phases.stretches()
    return [
        WeightedStretch(saved.begin, tuple(saved.weights), tuple(saved.taken))
        for saved in identity.stretches
    ]


def _sets_before(
    saved: Sequence[DataSet], sources: Sequence[DataSource], datasets: Sequence[IndexedDataset]
) -> list[int | None]:
    """Return the number of the saved data set that each data set of the run goes on from; None if
    it begins.

    It is the one of the same name, in any order of the blend: of equal names the first goes on from
    the first. Data may have been moved, so a set of another name goes on from one of another name
    that has as many tokens and documents. A run of one set resumes at its place in any text.
    """
    if len(saved) == len(sources) == 1:
        return [0]
    unpaired = dict(enumerate(saved))  # by number
    saved_number_of = dict[int, int]()  # by the number of the run's data set
    for number, source in enumerate(sources):
        name = masked(source.name)  # as it is saved
        of_this_name = [before for before, data_set in unpaired.items() if data_set.source == name]
        _pair(number, of_this_name, unpaired, saved_number_of)
    for number, dataset in enumerate(datasets):
        size = (dataset.num_tokens, dataset.num_documents)
        of_this_size = [
            before
            for before, data_set in unpaired.items()
            if (data_set.tokens, data_set.documents) == size
        ]
        _pair(number, of_this_size, unpaired, saved_number_of)
    return [saved_number_of.get(number) for number in range(len(sources))]


def _pair(
    number: int,
    candidates: Sequence[int],
    unpaired: dict[int, DataSet],
    saved_number_of: dict[int, int],
) -> None:
    """Let a data set of the run go on from the first of the candidates, unless there is none, or it
    has one already.

    number: of the run's data set. candidates: numbers of saved data sets, all among the unpaired.
    """
    if number in saved_number_of or not candidates:
        return
    before = candidates[0]
    saved_number_of[number] = before
    del unpaired[before]


def _in_other_length(
    checkpoint: Store, config: RunConfig, phases: BlendPhases, taken: Sequence[int]
) -> list[WeightedStretch]:
    """Return the stretches to come if samples have another length than in the checkpoint's run.

    taken: samples of the old length that each data set has given. Each goes on after as many
    tokens, counted in samples of the new length.
    """
    old_length = saved_length(checkpoint, config)
    length = config.train.seq_length
    begin = read_progress(checkpoint).samples * old_length // length
    return phases.stretches(begin, [count * old_length // length for count in taken])
