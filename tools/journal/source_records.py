"""Numbers of the data sets of a blend in metrics.jsonl, in fields NUMBER/NAME.

A step has the loss of each data set of which tokens of the step count, the share of each in its
samples, and the tokens that were read of each so far.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaprec.optim.decision.step_report import SourceReport
from tools.journal.records import (
    SOURCE_LOSS_PREFIX,
    SOURCE_SHARE_PREFIX,
    SOURCE_TOKENS_PREFIX,
)


def source_fields(
    names: Sequence[str],
    reports: Sequence[SourceReport],
    before: Sequence[int],
    after: Sequence[int],
    seq_length: int,
) -> dict[str, Any]:
    """Return the fields of a step's record about the data sets of its blend.

    before, after: the samples that each data set has given before and after the step.
    """
    batch = sum(after) - sum(before)
    fields = dict[str, Any]()
    for name, report, earlier, later in zip(names, reports, before, after, strict=True):
        if report.tokens:
            fields[f"{SOURCE_LOSS_PREFIX}{name}"] = report.loss
        fields[f"{SOURCE_SHARE_PREFIX}{name}"] = (later - earlier) / batch
        fields[f"{SOURCE_TOKENS_PREFIX}{name}"] = later * seq_length
    return fields


def source_names(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the name of each data set that records have numbers of, in their order."""
    names = dict[str, None]()  # a set that keeps the order
    for record in records:
        for field in record:
            if field.startswith(SOURCE_SHARE_PREFIX):
                names[field.removeprefix(SOURCE_SHARE_PREFIX)] = None
    yield from names
