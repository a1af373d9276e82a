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
    """Yield notes on a data set and the tokenizer of a run.

    record: what its build has recorded, if anything. Raises UserError if the data set was built
    with another tokenizer than the one that lies beside it.
    """
    if tokenizer:
        yield from tokenizer.notes
    if record is None:
        return
    if unknown := record.get("unknown"):
        yield f"{prefix}: {unknown:,} of {record.get('tokens', 0):,} tokens stand for unknown text"
    if tokenizer is None:
        return
    if record.get("tokenizer_sha256") != file_digest(tokenizer.path):
        # The file beside a data set must be its tokenizer; another one may have the same tokens.
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
        built_with = _describe_eos(record["eos"])
        now = _describe_eos(tokenizer.eos)
        yield (
            f"{prefix} was built with {built_with} at the end of each document, but "
            f"{tokenizer.path} and the settings beside it now say {now}: build it again, or set "
            "them back"
        )


def different_tokenizer_notes(records: Mapping[Path, dict[str, Any] | None]) -> Iterator[str]:
    """Yield a note if data sets were built with different tokenizers.

    records: by prefix; without a record they may be.
    """
    built = [
        (prefix, record.get("tokenizer_sha256")) for prefix, record in records.items() if record
    ]
    if not built:
        return
    first_prefix, first_digest = built[0]
    for prefix, digest in built:
        if digest != first_digest:
            yield (
                f"{first_prefix} and {prefix} were built with different tokenizers: their tokens "
                "must mean the same"
            )
            return


def _describe_eos(eos: int | None) -> str:
    return "no token" if eos is None else f"token {eos}"
