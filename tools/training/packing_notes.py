"""Packed data: notes on what became of the documents, and how much of a step is padding."""

from collections.abc import Iterator, Sequence

from megaprec.tokens.blend import Blend
from megaprec.tokens.packed_samples import PackedSamples
from megaprec.tokens.samples import Samples
from megaprec.tokens.truncations import truncations_of_packing
from megaprec.url_secrets import masked
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.console.units import counted
from tools.journal.records import PADDING


def packing_notes(config: RunConfig, parts: Sequence[Samples]) -> Iterator[str]:
    """Yield a note on each packed data set: how many of its documents are cut, and how much of its
    samples is padding. parts: the training samples of each data set."""
    seq_length = config.train.seq_length
    for name, samples in zip(config.data.sources, parts, strict=True):
        assert isinstance(samples, PackedSamples), "the run packs all of its data sets"
        lengths = samples.dataset.document_lengths()
        packed = truncations_of_packing(lengths, seq_length, samples.pieces)
        share = packed.padding / (packed.samples * seq_length)
        yield (
            f"data.pack = {toml(config.data.pack)}: {counted(packed.short, 'document')} of "
            f"{masked(name)} whole, {packed.long:,} of more than {seq_length:,} "
            f"tokens cut; {counted(packed.samples, 'sample')}, {share:.2%} padding"
        )


def padding_fields(samples: Samples | Blend, step: range, seq_length: int) -> dict[str, float]:
    """Return the field of a step's record with the share of its tokens that are padding.

    samples: packed ones. step: the positions of its samples.
    """
    spans = [(samples, step.start, step.stop)]
    if isinstance(samples, Blend):
        # the samples of a data set follow each other in a blend
        before = samples.samples_taken(step.start)
        after = samples.samples_taken(step.stop)
        spans = [*zip(samples.parts, before, after, strict=True)]
    padding = 0
    for packed, start, stop in spans:
        assert isinstance(packed, PackedSamples), "the run packs all of its data sets"
        padding += packed.padding(start, stop - start)
    return {PADDING: padding / (len(step) * seq_length)}
