"""Notes on the tokenizer of a run, and on data sets that another one, or the same with other
settings, has built."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaprec.data.files import with_suffix
from megaprec.data.tokenizer import FILE_DIGEST, TOKENS_DIGEST, Tokenizer, has_built
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
    is_same = has_built(tokenizer, record)
    # The file beside a data set must be its tokenizer; another one may have the same tokens.
    if not is_same and tokenizer.path == with_suffix(prefix, ".model"):
        raise UserError.of("training.tokenizer_of_data_differs", path=tokenizer.path)
    if is_same is None:
        yield (
            f"{tokenizer.path} is not the file that {prefix} was built with: their tokens must "
            "mean the same"
        )
    elif not is_same:
        yield (
            f"{tokenizer.path} is not the tokenizer that {prefix} was built with: equal ids mean "
            "other tokens"
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
    built = [(prefix, record) for prefix, record in records.items() if record]
    for prefix, record in built:
        first_prefix, first = built[0]
        same_file = record.get(FILE_DIGEST) == first.get(FILE_DIGEST)
        same_meaning = TOKENS_DIGEST in record and record[TOKENS_DIGEST] == first.get(TOKENS_DIGEST)
        if not same_file and not same_meaning:
            yield (
                f"{first_prefix} and {prefix} were built with different tokenizers: their tokens "
                "must mean the same"
            )
            return


def _describe_eos(eos: int | None) -> str:
    return "no token" if eos is None else f"token {eos}"
