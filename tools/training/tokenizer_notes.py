"""Notes on the tokenizer of a run, and on data sets that another one, or the same with other
settings, has built."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaprec.checkpoint.digests import file_digest
from megaprec.data.files import beside
from megaprec.data.tokenizer import Tokenizer
from megaprec.errors import UserError


def tokenizer_notes(
    prefix: Path, record: dict[str, Any] | None, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yield notes on a data set and the tokenizer of a run. record: what its build has recorded, if
    anything.

    Raises UserError if the data set was built with another tokenizer than the one that lies beside
    it.
    """
    yield from tokenizer.notes if tokenizer else ()
    if record is None:
        return
    if unknown := record.get("unknown"):
        yield f"{prefix}: {unknown:,} of {record.get('tokens', 0):,} tokens stand for unknown text"
    if tokenizer is None:
        return
    if record.get("tokenizer_sha256") != file_digest(tokenizer.path):
        if tokenizer.path == beside(prefix, ".model"):
            raise UserError(
                f"{tokenizer.path} is not the one that the data set was built with: copy both "
                "again or build again"
            )
        yield (
            f"{tokenizer.path} is not the file that {prefix} was built with: their tokens must "
            "mean the same"
        )
    if "eos" in record and record["eos"] != tokenizer.eos:
        yield (
            f"{prefix} was built with {_end(record['eos'])} at the end of each document, but "
            f"{tokenizer.path} and the settings beside it now say {_end(tokenizer.eos)}: build it "
            "again, or set them back"
        )


def unlike_notes(records: Mapping[Path, dict[str, Any] | None]) -> Iterator[str]:
    """Yield a note if data sets (prefix: record) were built with different tokenizers; without a
    record they may be."""
    built = [
        (prefix, record.get("tokenizer_sha256")) for prefix, record in records.items() if record
    ]
    for prefix, digest in built:
        if digest != built[0][1]:
            yield (
                f"{built[0][0]} and {prefix} were built with different tokenizers: their tokens "
                "must mean the same"
            )
            return


def _end(eos: int | None) -> str:
    return "no token" if eos is None else f"token {eos}"
