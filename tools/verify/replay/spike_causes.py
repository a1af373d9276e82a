"""The likely cause of a spike, judged from the numbers of its repetition.

Each cause is proven, wrong or not tried; at most one is proven, and if none is the cause is not
known:

- hardware: the step repeated is ordinary, so that what the run has recorded was not computed from
  these weights and these samples.
- data: the step repeated spikes, other batches at the same weights are ordinary, and so is the
  batch without a few samples: at most a quarter, or those of one document.
- batch: the same, but it is not a few samples: its make-up, or its size.
- learning rate: the step repeated spikes, and other batches at the same weights do too; repeated
  without the raised learning rate it is ordinary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tools.console.units import counted
from tools.verify.replay.spike_measures import BatchNumbers
from tools.verify.replay.spike_replay import RAISED, Examination, are_above, is_above
from tools.verify.replay.spikes import RecordedSpike

Verdict = Literal["proven", "wrong", "not tried"]
NOT_KNOWN = "not known"
MOST_OF_A_BATCH = 0.25  # the share of a batch that still counts as a few samples
CAUSES_OF_SPIKES = ("data", "learning rate", "batch")  # of a spike that shows up again


@dataclass(frozen=True)
class Cause:
    """A possible cause with its verdict, and the numbers that it rests on, in words."""

    name: str
    verdict: Verdict
    evidence: str


def likely(causes: Sequence[Cause]) -> str:
    """Return the name of the proven cause; "not known" if none is."""
    for cause in causes:
        if cause.verdict == "proven":
            return cause.name
    return NOT_KNOWN


def causes_not_tried(reason: str) -> list[Cause]:
    """Return all causes of a spike that was not repeated, for a reason."""
    return [Cause(name, "not tried", reason) for name in (*CAUSES_OF_SPIKES, "hardware")]


def judge(spike: RecordedSpike, seen: Examination) -> list[Cause]:
    """Return the verdicts on all causes of a spike that was repeated."""
    hardware = _hardware(spike, seen)
    spikes_again = is_above(seen.again, spike)
    if not spikes_again and hardware.verdict != "proven":
        return [*_all_but_hardware("not tried", hardware.evidence), hardware]
    if not spikes_again:
        is_ordinary = f"the step repeated is ordinary: {_in_words(seen.again)}"
        return [*_all_but_hardware("wrong", is_ordinary), hardware]
    if are_above(seen.others, spike):
        num_spiking = sum(is_above(other, spike) for other in seen.others)
        num_others = counted(len(seen.others), "other batch", "es")
        of_others = f"{num_spiking} of {num_others}"
        others_spike = f"{of_others} spike at the same weights: {_list(seen.others)}"
        return [
            Cause("data", "wrong", others_spike),
            _learning_rate(spike, seen, others_spike),
            Cause("batch", "wrong", others_spike),
            hardware,
        ]
    if not seen.others:
        reason = "no batch of the same size follows, with which it could be compared"
        return [*_all_but_hardware("not tried", reason), hardware]
    others_ordinary = f"other batches at the same weights are ordinary: {_list(seen.others)}"
    rates_and_others = f"{_rates(spike)}, but {others_ordinary}"
    learning_rate = Cause("learning rate", "wrong", rates_and_others)
    data = _data(spike, seen)
    batch = _batch(spike, data, others_ordinary)
    return [data, learning_rate, batch, hardware]


def _all_but_hardware(verdict: Verdict, evidence: str) -> list[Cause]:
    """Return the other causes with one verdict."""
    return [Cause(name, verdict, evidence) for name in CAUSES_OF_SPIKES]


def _hardware(spike: RecordedSpike, seen: Examination) -> Cause:
    """Return the verdict on hardware: proven if the recorded step spikes and the repeated one, of
    the same weights and samples, does not."""
    recorded_numbers = BatchNumbers(spike.numbers.loss, spike.numbers.norm)
    recorded = _in_words(recorded_numbers)
    evidence = f"recorded {recorded}; repeated {_in_words(seen.again)}"
    if is_above(seen.again, spike):
        return Cause("hardware", "wrong", evidence)
    if seen.changed_data:
        first_change = seen.changed_data[0]
        reason = f"the data are not those of the run: {first_change}"
        return Cause("hardware", "not tried", reason)
    if seen.departed is not None:
        evidence += f"; recorded numbers are others than repeated ones from step {seen.departed} on"
    elif seen.repeated:
        evidence += f"; the {seen.repeated} steps before it gave the recorded numbers"
    return Cause("hardware", "proven", evidence)


def _learning_rate(spike: RecordedSpike, seen: Examination, others_spike: str) -> Cause:
    """Return the verdict on the learning rate: proven if the spike goes away with the usual rate.

    others_spike: evidence, in words, that other batches spike too.
    """
    rates = _rates(spike)
    if seen.held is None:
        # without a usual rate it is not known whether it was raised
        may_be_raised = spike.usual_lr is None or spike.highest_lr > RAISED * spike.usual_lr
        verdict: Verdict = "not tried" if may_be_raised else "wrong"
        return Cause("learning rate", verdict, f"{rates}: {seen.not_held}")
    held = seen.held  # the repetition in which the rate was held at the usual one
    usual_rate = f"{held.rate:.3g} from step {held.since} on"
    repeated = f"repeated with {usual_rate}: {_in_words(held.numbers)}"
    if is_above(held.numbers, spike):
        return Cause("learning rate", "wrong", f"{rates}; {repeated}, which spikes too")
    return Cause("learning rate", "proven", f"{rates}; {repeated}; {others_spike}")


def _data(spike: RecordedSpike, seen: Examination) -> Cause:
    """Return the verdict on the data: proven if the spike goes away without the samples that stand
    out, and these are few or have a document in common."""
    if seen.left_out is None or not seen.outliers:
        stand_out = f"{seen.num_high} of {seen.num_samples} samples stand out"
        reason = f"{stand_out}: not a few" if seen.num_high else f"{stand_out} alone"
        return Cause("data", "wrong", reason)
    share = f"{seen.num_high} of {seen.num_samples} samples"
    line = f"{share} stand out; without them the batch has {_in_words(seen.left_out)}"
    if is_above(seen.left_out, spike):
        return Cause("data", "wrong", f"{line}, which spikes too")
    document = _shared_document(seen)
    if document is not None:
        return Cause("data", "proven", f"{line}; document {document} is in all of them")
    # one sample is always few
    most_few = max(1.0, MOST_OF_A_BATCH * seen.num_samples)
    if seen.num_high > most_few:
        return Cause("data", "wrong", f"{line}; that is not a few but the batch")
    return Cause("data", "proven", line)


def _shared_document(seen: Examination) -> int | None:
    """Return the number of a document that has a part in all of several samples that stand out;
    None for none."""
    documents_of_samples = list[set[int]]()
    for sample in seen.outliers:
        numbers = {document.number for document in sample.documents}
        documents_of_samples.append(numbers)
    # of many that stand out not all are named
    are_all_named = len(seen.outliers) >= seen.num_high
    if len(documents_of_samples) < 2 or not are_all_named:
        return None
    shared = set.intersection(*documents_of_samples)
    return min(shared, default=None)


def _batch(spike: RecordedSpike, data: Cause, others_ordinary: str) -> Cause:
    """Return the verdict on the batch as a whole: proven if a few samples are not the cause.

    data: the verdict on these.
    others_ordinary: evidence, in words, that other batches do not spike.
    """
    size = f"{spike.tokens:,} tokens"
    if spike.usual_tokens is not None:
        size += f", usually {spike.usual_tokens:,.0f}"
    if data.verdict == "proven":
        return Cause("batch", "wrong", f"{size}; without a few samples it is ordinary")
    return Cause("batch", "proven", f"{size}; {data.evidence}; {others_ordinary}")


def _rates(spike: RecordedSpike) -> str:
    """Return the learning rate of a spike beside those before it, in words."""
    if spike.usual_lr is None:
        return f"learning rate {spike.lr:.3g}"
    return (
        f"learning rate {spike.lr:.3g}, at most {spike.highest_lr:.3g} in the 16 steps before and "
        f"usually {spike.usual_lr:.3g} before them"
    )


def _in_words(numbers: BatchNumbers) -> str:
    """Return the loss and the gradient norm of a batch."""
    return f"loss {numbers.loss:.4g}, gradient norm {numbers.norm:.3g}"


def _list(others: Sequence[BatchNumbers]) -> str:
    """Return the losses and the gradient norms of several batches."""
    losses = [f"{numbers.loss:.4g}" for numbers in others]
    norms = [f"{numbers.norm:.3g}" for numbers in others]
    return f"losses {', '.join(losses)}, norms {', '.join(norms)}"
