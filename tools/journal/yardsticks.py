"""The numbers that a run's held-out loss is measured against, kept as yardsticks.json."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaprec.durable import read_whole
from megaprec.parsing import parse_json
from megaprec.tokens.files import write_whole

YARDSTICKS = "yardsticks.json"
LARGEST_FILE = 100_000  # bytes


@dataclass(frozen=True)
class Yardsticks:
    """Losses of models that need no training, on the tokens that a run evaluates, and sizes.

    of: digest of the data and keys that the numbers follow from. guessing: the loss, in nats a
    token, if all tokens of the vocabulary are equally likely. unigram, bigram: those of counts of
    single tokens and of pairs in the training text. counted_tokens: of the training text, that the
    counts are of. samples, tokens: of the evaluated part, targets that count. nbytes: of their
    text; None if they are not known, for the reason `no_bytes`. parameters: of the model, 0 if not
    known. epoch_tokens: of the training text, seen once.
    """

    of: str
    guessing: float
    unigram: float
    bigram: float
    counted_tokens: int
    samples: int
    tokens: int
    nbytes: int | None
    no_bytes: str
    parameters: int
    epoch_tokens: int

    def save(self, folder: Path) -> None:
        """Write the file of a run folder. Raises OSError."""
        content = json.dumps(asdict(self), indent=2, allow_nan=False)
        write_whole(folder / YARDSTICKS, f"{content}\n".encode())


def read_yardsticks(folder: Path) -> Yardsticks | None:
    """Return the yardsticks of a run folder; None if there are none that can be read."""
    path = folder / YARDSTICKS
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            return None
        fields = parse_json(read_whole(path))
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict) or not _is_whole(fields):
        return None
    return Yardsticks(**fields)


def _is_whole(fields: dict[str, Any]) -> bool:
    """Return True if the fields are those of `Yardsticks`, as this version writes them."""
    if fields.keys() != Yardsticks.__dataclass_fields__.keys():
        return False
    for name in ("guessing", "unigram", "bigram"):
        if not isinstance(fields[name], float) or not math.isfinite(fields[name]):
            return False
    for name in ("counted_tokens", "samples", "tokens", "parameters", "epoch_tokens"):
        if type(fields[name]) is not int:
            return False
    if fields["nbytes"] is not None and type(fields["nbytes"]) is not int:
        return False
    return isinstance(fields["of"], str) and isinstance(fields["no_bytes"], str)
