"""The parts of a checkpoint besides tensors: progress, overflow monitor, model and tokenizer."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import INDEX, checkpoint_at, latest, remedy
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store, newer_version
from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.diagnose.spike_monitor import SpikeMonitor
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_toml
from megaprec.precision.plan import LossScaling
from megaprec.text.tokenizer_files import SETTINGS, TEMPLATE
from megaprec.tokens.places import is_remote
from models.config import ModelConfig
from tools.config.tables.settings import Checkpoint
from tools.saved.model_fields import make_model

SPIKES = "spikes"  # the key of the SpikeMonitor's state
EVALUATED = "evaluated"  # the key of the losses after the step, each with its tokens, by field


@dataclass(frozen=True)
class TrainState:
    """The progress of a run. A skipped step consumes its samples, but does not advance the learning
    rate.

    Samples and tokens are counted, for a resumed run may have another batch size or sequence
    length.
    samples: the position in the data, of which a run with another sequence length keeps the tokens.
    skipped_tokens: those of skipped steps.
    """

    step: int = 0
    applied: int = 0
    samples: int = 0
    applied_samples: int = 0
    tokens: int = 0
    skipped_tokens: int = 0

    @property
    def skipped(self) -> int:
        return self.step - self.applied

    @property
    def learned_tokens(self) -> int:
        """Return the tokens of the applied steps."""
        return self.tokens - self.skipped_tokens


def open_newest_checkpoint(folder: Path) -> Store | None:
    """Open the newest checkpoint in `folder`; None if there is none. Raises UserError for a damaged
    one."""
    path = latest(folder)
    # A damaged checkpoint is named with its remedy, not taken for none.
    if path is None:
        return None
    try:
        checkpoint = Store(path)
    except UserError as error:
        raise UserError(
            *error.problems, Problem.of("convert.newest_damaged", path=path, remedy=remedy(path))
        ) from error
    # Loading checks the files of tensors, which take long.
    others = [name for name in checkpoint.digests if not name.endswith(".safetensors")]
    require_intact(checkpoint, others)
    return checkpoint


def stored_value(checkpoint: Store, key: str) -> Any:
    """Return the value stored as `key`. Raises UserError for a checkpoint of another program."""
    if key not in checkpoint.index:
        raise UserError.of("convert.run_keys_missing", path=checkpoint.path, key=key)
    return checkpoint.index[key]


def read_progress(checkpoint: Store) -> TrainState:
    """Return the progress of the run. Raises UserError if it is missing or damaged."""
    # Keys of newer versions are refused there, and those of older ones may be missing.
    saved = _read_counts(checkpoint, "progress", asdict(TrainState()), {"skipped_tokens"})
    progress = TrainState(**saved)
    if "skipped_tokens" in saved or not progress.samples:
        return progress
    # Checkpoints of earlier versions do not have it: their samples are taken to be of one length.
    skipped = max(0, progress.samples - progress.applied_samples)
    return replace(progress, skipped_tokens=progress.tokens * skipped // progress.samples)


def read_overflow_monitor(checkpoint: Store) -> dict[str, Any]:
    """Return the state of the OverflowMonitor. Raises UserError if it is damaged."""
    example = OverflowMonitor(LossScaling()).state_dict()
    return _read_counts(checkpoint, "watch", example, {"bad_losses"})


def read_spike_monitor(checkpoint: Store) -> dict[str, Any]:
    """Return the state of the SpikeMonitor, that of a new one if the checkpoint has none, as those
    of earlier versions. Raises UserError if it is damaged."""
    example = SpikeMonitor().state_dict()
    if SPIKES not in checkpoint.index:
        return example
    state = _read_counts(checkpoint, SPIKES, example)
    columns = (state["losses"], state["norms"], state["tokens"])
    numbers = [number for column in columns for number in column]
    is_whole = len({len(column) for column in columns}) == 1
    if not is_whole or not all(type(number) in (int, float) for number in numbers):
        raise _damaged(checkpoint, SPIKES)
    return state


def read_model(checkpoint: Store) -> ModelConfig:
    """Return the model. Raises UserError if it is damaged; keys that the checkpoint lacks have
    their defaults."""
    fields = stored_value(checkpoint, "model")
    _require_known(checkpoint, "model", fields, ModelConfig.model_fields)
    return make_model(fields, f"{checkpoint.path}/{INDEX}")


def read_tokenizer(checkpoint: Store) -> Path | None:
    """Return the file of the tokenizer, if there is one. Raises UserError if it is named but
    missing."""
    name = stored_value(checkpoint, "tokenizer")
    if not isinstance(name, str):
        raise _damaged(checkpoint, "tokenizer")
    return checkpoint.file(name) if name else None


def tokenizer_files(checkpoint: Store) -> list[str]:
    """Return the names of the tokenizer's file, if there is one, and of the settings and the chat
    template that were saved beside it.

    Raises UserError if the checkpoint does not say whether there is one.
    """
    tokenizer = read_tokenizer(checkpoint)
    if not tokenizer:
        return []
    beside = [name for name in (*SETTINGS, TEMPLATE) if name in checkpoint.index["files"]]
    return [tokenizer.name, *beside]


def read_table(checkpoint: Store, table_name: str) -> dict[str, Any]:
    """Return the table stored as `table_name`, empty if there is none. Raises UserError if it is no
    table."""
    stored_table = checkpoint.index.get(table_name) or {}
    if not isinstance(stored_table, dict):
        raise _damaged(checkpoint, table_name)
    return stored_table


def kept_evaluations(checkpoint: Store) -> dict[str, float]:
    """Return the evaluations whose best checkpoint the run keeps (checkpoint.keep_best), with their
    weights; none if it keeps none, or if what is stored is damaged."""
    stored = read_table(checkpoint, "run").get("checkpoint.keep_best", '""')
    with suppress(ValueError):
        # in TOML's grammar
        given = parse_toml(f"value = {stored}")["value"]
        return Checkpoint(keep_best=given).best
    return {}


def read_ids(checkpoint: Store, table_name: str) -> dict[str, int | list[int] | None]:
    """Return a stored table of token ids, empty if there is none: an id or several, as in
    config.json.

    Raises UserError if it holds something else.
    """
    stored_table = read_table(checkpoint, table_name)
    for value in stored_table.values():
        # Null is no token.
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(map(_is_id, ids)):
            raise _damaged(checkpoint, table_name)
    return stored_table


def _is_id(value: Any) -> bool:
    """Return True for the id of a token, or for -1, which stands for none."""
    return type(value) is int and abs(value) < 2**31


def read_documents(checkpoint: Store) -> dict[str, int | None]:
    """Return the ids "begin" and "end" of the tokens around documents in the run's training; empty
    if not recorded.

    Raises UserError if they are damaged.
    """
    saved = read_ids(checkpoint, "documents")
    if saved and saved.keys() != {"begin", "end"}:
        raise _damaged(checkpoint, "documents")
    ids = dict[str, int | None]()
    for name, value in saved.items():
        # Documents have one token at each end, and -1 is none of them.
        if isinstance(value, list) or (value is not None and value < 0):
            raise _damaged(checkpoint, "documents")
        ids[name] = value
    return ids


def _read_counts(
    checkpoint: Store, table_name: str, example: dict[str, Any], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return a stored table. Raises UserError unless it has the keys of `example`, but for those
    that are optional, with values of the same types."""
    stored_table = stored_value(checkpoint, table_name)
    _require_known(checkpoint, table_name, stored_table, example)
    for name, value in stored_table.items():
        # bool is an int to Python, so types are compared and not tested by isinstance.
        is_negative = isinstance(value, int) and value < 0
        if type(value) is not type(example[name]) or is_negative:
            raise _damaged(checkpoint, table_name)
    if example.keys() - stored_table.keys() - set(optional):
        raise _damaged(checkpoint, table_name)
    return stored_table


def _require_known(
    checkpoint: Store, table_name: str, stored_table: Any, known: Collection[str]
) -> None:
    """Raise UserError for what is no table, or has keys that only a newer version can have
    written."""
    if not isinstance(stored_table, dict):
        raise _damaged(checkpoint, table_name)
    # What an older program cannot know it would ignore, and go on with another run.
    unknown = sorted(stored_table.keys() - set(known))
    if unknown:
        names = ", ".join(f"{table_name}.{name}" for name in unknown)
        raise newer_version(checkpoint.path, f"says {names}")


def _damaged(checkpoint: Store, table_name: str) -> UserError:
    return UserError.of("convert.record_damaged", path=checkpoint.path, key=table_name, index=INDEX)


def find_checkpoint(path: Path) -> Path:
    """Return `path`, or the newest checkpoint of the run folder `path`. Raises UserError if there
    is none."""
    checkpoint = checkpoint_at(path)
    if checkpoint is not None:
        return checkpoint
    if is_remote(path) or path.is_dir():
        problem = "has no checkpoint"
    elif path.exists():
        problem = "is not a folder"
    else:
        problem = "does not exist"
    raise UserError.of("text.no_checkpoint", path=path, problem=problem)
