"""The table of `megaprec data inspect --seq-length N`: what samples do to documents."""

from rich.table import Table

from megaprec.tokens.best_fit import best_fit
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.truncations import (
    Truncations,
    truncations_in_order,
    truncations_of_packing,
)
from tools.console.units import counted

IN_ORDER = "none"  # the value of data.pack


def by_way(
    dataset: IndexedDataset, seq_length: int | None, pack: str | None
) -> dict[str, Truncations]:
    """Return how samples cut documents, by the value of data.pack: "none", for samples that follow
    each other in the text, and `pack`, if it is given.

    seq_length: tokens of a sample; None: nothing was asked for.
    """
    if seq_length is None:
        return {}
    lengths = dataset.document_lengths()
    ways = {IN_ORDER: truncations_in_order(lengths, seq_length)}
    if pack:
        pieces = best_fit(lengths, seq_length)
        ways[pack] = truncations_of_packing(lengths, seq_length, pieces)
    return ways


def table(seq_length: int, ways: dict[str, Truncations]) -> Table:
    """Return a column of counts for each way."""
    result = Table(f"samples of {counted(seq_length, 'token')}")
    for way in ways:
        result.add_column(f'data.pack = "{way}"', justify="right")
    rows: dict[str, list[str]] = {}
    for counts in ways.values():
        padding_share = counts.padding / max(1, counts.samples * seq_length)
        cells = {
            "samples": f"{counts.samples:,}",
            "padding": f"{padding_share:.2%}",
            "tokens in no sample": f"{counts.unread:,}",
            f"documents of at most {seq_length:,}, whole": f"{counts.short - counts.short_cut:,}",
            f"documents of at most {seq_length:,}, cut": f"{counts.short_cut:,}",
            f"documents of more than {seq_length:,}, cut": f"{counts.long:,}",
            "cuts of all documents": f"{counts.cuts:,}",
        }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    for name, row in rows.items():
        result.add_row(name, *row)
    return result
