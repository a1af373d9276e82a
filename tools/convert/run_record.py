"""The record of a run in its checkpoint, read for the card of an exported model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaprec.checkpoint.reader import Store
from megaprec.tokens.places import is_remote
from megaprec.url_secrets import masked, masked_inside
from tools.console.toml import toml
from tools.convert.core.source import EvaluatedLoss, RunRecord, TrainedText
from tools.journal.yardsticks import read_yardsticks
from tools.saved.train_state import EVALUATED, read_table


def read_run_record(checkpoint: Store) -> RunRecord:
    """Return what a checkpoint says of its run; what it does not say, or what is no such record,
    is left out. Raises UserError for a damaged checkpoint."""
    keys = {key: masked(str(value)) for key, value in read_table(checkpoint, "run").items()}
    for table, stored in (("parallel", "layout"), ("precision", "precision")):
        for name, value in read_table(checkpoint, stored).items():
            keys[f"{table}.{name}"] = masked(toml(value))
    yardsticks = read_yardsticks(_run_folder(checkpoint.path, keys))
    return RunRecord(
        keys=keys,
        data=_trained_texts(read_table(checkpoint, "data")),
        evaluated=_evaluated(read_table(checkpoint, EVALUATED)),
        held_out_tokens=yardsticks.tokens if yardsticks else 0,
        held_out_bytes=yardsticks.nbytes if yardsticks else None,
        torch=str(checkpoint.index.get("torch", "")),
    )


def _run_folder(checkpoint: Path, keys: Mapping[str, str]) -> Path:
    """Return the folder of the run that has a checkpoint: of one at a URL that which its keys name,
    which may be of another machine."""
    if not is_remote(checkpoint):
        return checkpoint.parent.parent
    return Path(keys.get("train.folder", "").strip('"'))


def _trained_texts(identity: dict[str, Any]) -> tuple[TrainedText, ...]:
    """Return the texts that a checkpoint's record of its data names; damaged entries are left
    out."""
    texts: list[TrainedText] = []
    for data_set in masked_inside(identity.get("sets", [])):
        try:
            later_weights = [
                (int(changed["samples"]), float(changed["weight"]))
                for changed in data_set.get("later_weights", [])
            ]
            text = TrainedText(
                source=str(data_set["source"]),
                weight=float(data_set["weight"]),
                later_weights=tuple(later_weights),
                tokens=int(data_set["tokens"]),
                documents=int(data_set["documents"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        texts.append(text)
    return tuple(texts)


def _evaluated(table: dict[str, Any]) -> dict[str, EvaluatedLoss]:
    """Return the losses of an evaluation by name, those that can be read."""
    losses: dict[str, EvaluatedLoss] = {}
    for field, numbers in table.items():
        try:
            losses[field] = EvaluatedLoss(float(numbers["loss"]), int(numbers["tokens"]))
        except (KeyError, TypeError, ValueError):
            continue
    return losses
