"""Resuming a run: checks that it can resume from the newest checkpoint in its folder, and the lines
that it prints then.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.checkpoint.digests import file_digest
from megaprec.checkpoint.reader import Store
from megaprec.data.files import with_suffix
from megaprec.data.intact import read_record
from megaprec.data.tokenizer import FILE_DIGEST, has_built, same_tokens
from megaprec.errors import Problem, UserError
from megaprec.optim.torch_rule import Torch
from models.config import ModelConfig
from models.equivalence import TRAINING
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.convert.initial import initial_model
from tools.convert.train_state import (
    open_newest_checkpoint,
    read_model,
    read_progress,
    read_tokenizer,
    read_watch,
)
from tools.training.arithmetic import arithmetic_changes
from tools.training.changed_keys import (
    NOT_EXACT_MARK,
    changed_keys,
    keys_of,
    lr_jump,
    rates_around,
    saved_keys,
)
from tools.training.corpus import Corpus
from tools.training.data_identity import (
    ALLOW,
    Difference,
    other_sets,
    other_settings,
    read_identity,
)
from tools.training.launch import was_restarted
from tools.training.place_in_data import other_length, position_notes
from tools.training.validation_sets import validation_prefixes

RECORDS = {"the data": "data", "the keys": "run"}  # not in checkpoints of earlier versions


def check_resumable(
    config: RunConfig, corpus: Corpus | None = None, allowed: Collection[str] = ()
) -> None:
    """Raise UserError if the run cannot resume from the newest checkpoint in its folder.

    corpus: None before the data is open; then only keys are compared. allowed: differences that are
    accepted, of `ALLOW`.
    """
    checkpoint = open_newest_checkpoint(config.checkpoint_folder)
    if checkpoint is None:
        return
    # Ranks that a launcher has started again find the checkpoints of this very run.
    if not config.checkpoint.resume and not was_restarted():
        raise UserError.of("training.resume_false", path=checkpoint.path)
    step = read_progress(checkpoint).step
    read_watch(checkpoint)  # raises UserError if it is damaged
    problems = [
        *_other_model(checkpoint, corpus.model if corpus else config.model),
        *_missing_state(checkpoint, config),
        *_other_shards(checkpoint, config),
    ]
    refused = [
        difference
        for difference in data_differences(checkpoint, config, corpus)
        if difference.what not in allowed
    ]
    # All are told at once; problems cannot be accepted, and so decide the remedy.
    lines = [*problems, *(difference.line for difference in refused)]
    if problems:
        raise UserError(*lines, Problem.of("training.not_resumable", path=checkpoint.path))
    expected_name = checkpoint_path(config.checkpoint_folder, step).name
    if expected_name != checkpoint.path.name:
        raise UserError.of(
            "training.renamed_checkpoint",
            path=checkpoint.path,
            step=step,
            expected_name=expected_name,
        )
    if refused:
        refused_kinds = {difference.what for difference in refused}
        flags = " ".join(f"--allow {kind}" for kind in ALLOW if kind in refused_kinds)
        raise UserError(
            *lines,
            Problem.of("training.changes_on_resume", path=checkpoint.path, flags=flags),
        )


def data_differences(
    checkpoint: Store, config: RunConfig, corpus: Corpus | None = None
) -> list[Difference]:
    """Return the differences between the data of the run and of the checkpoint.

    As far as the checkpoint records its data.
    """
    identity = read_identity(checkpoint)
    changes = list[Difference]()
    if identity:
        changes += other_settings(identity, config.data, config.train)
    changes += other_length(checkpoint, config)
    if corpus:
        changes += _other_tokenizer(checkpoint, corpus)
        if identity and corpus.identity:
            changes += other_sets(identity, corpus.identity)
    return changes


class _Remark(NamedTuple):
    """A line of a resume. word: "changed" or "note"."""

    word: str
    text: str


def resume_lines(config: RunConfig, corpus: Corpus, path: Path) -> Iterator[str]:
    """Yield the lines that a resumed run prints: changed keys, warnings and notes."""
    for remark in _remarks(config, corpus, Store(path)):
        yield f"{remark.word:11}{remark.text}"


def resume_event(config: RunConfig, corpus: Corpus, path: Path) -> dict[str, Any]:
    """Return the record of a resume for events.jsonl.

    The same remarks, and the learning rates around it.
    """
    checkpoint = Store(path)
    remarks = [*_remarks(config, corpus, checkpoint)]
    progress = read_progress(checkpoint)
    rate_before, rate_after = rates_around(checkpoint, config, progress)
    return {
        "event": "resume",
        "step": progress.step,
        "checkpoint": str(path),
        "ranks": config.world_size,
        "changed": [remark.text for remark in remarks if remark.word == "changed"],
        "notes": [remark.text for remark in remarks if remark.word == "note"],
        "lr_before": rate_before,
        "lr_next": rate_after,
    }


def _remarks(config: RunConfig, corpus: Corpus, checkpoint: Store) -> Iterator[_Remark]:
    """Yield the remarks on a resume; none if no step is left."""
    progress = read_progress(checkpoint)
    if progress.step >= config.train.steps:
        return
    yield from _notes(_missing_records(checkpoint))

    # A change of the data has a line that says more than the one of its key.
    data_lines = [difference.line for difference in data_differences(checkpoint, config, corpus)]
    data_keys = {_key_of(line) for line in data_lines}
    all_key_lines = changed_keys(checkpoint, config, progress)
    key_lines = [line for line in all_key_lines if _key_of(line) not in data_keys]
    for line in data_lines:
        yield _Remark("changed", f"{line}{NOT_EXACT_MARK}")
    for line in key_lines:
        yield _Remark("changed", line)
    for line in arithmetic_changes(checkpoint):
        yield _Remark("changed", f"{line}{NOT_EXACT_MARK}")

    if any(line.startswith("train.init_from: ") for line in key_lines):
        weights = f"the run goes on with the weights of {checkpoint.path}"
        yield _Remark("note", f"train.init_from: not used, for {weights}")
    yield from _notes(position_notes(checkpoint, config, corpus))
    yield from _notes(lr_jump(checkpoint, config, progress))


def _notes(texts: Iterable[str]) -> Iterator[_Remark]:
    return (_Remark("note", text) for text in texts)


def _missing_records(checkpoint: Store) -> Iterator[str]:
    """Yield a note if an earlier version saved the checkpoint, which lacks what later ones have."""
    missing = [name for name, key in RECORDS.items() if key not in checkpoint.index]
    if missing:
        yield (
            f"{checkpoint.path} keeps no record of {' and '.join(missing)} that it was trained "
            "with, so what has changed is not known"
        )
    if not checkpoint.digests:
        yield (
            f"{checkpoint.path} has no digests (an earlier version saved it), so nothing tells "
            "whether its files are what was saved"
        )


def _key_of(line: str) -> str:
    """Return the run-file key that a line about a change is about."""
    return line.partition(":")[0]


def _other_model(checkpoint: Store, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each key of [model] that differs from the checkpoint.

    Keys that are new since have their default in it.
    """
    saved = json.loads(read_model(checkpoint).model_dump_json())
    current = json.loads(model.model_dump_json())
    free_keys = set(TRAINING)
    if model.positions == "rope":
        free_keys.add("max_positions")  # no weight of the model has that size
    if model.vocab == 0:
        free_keys.add("vocab")  # not known yet
    for key, value in current.items():
        if key not in free_keys and saved.get(key) != value:
            yield (
                f"model.{key} = {json.dumps(value)}, but it is {json.dumps(saved.get(key))} in "
                "the checkpoint"
            )


def _other_shards(checkpoint: Store, config: RunConfig) -> Iterator[str]:
    """Yield a problem if a canonical run would go on in another number of pieces.

    Its bits would be others.
    """
    before = saved_keys(checkpoint)
    now = keys_of(config)
    canonical = toml("canonical")
    if not before.get("train.numerics") == now["train.numerics"] == canonical:
        return
    key = "train.canonical_shards"
    if before.get(key) != now[key]:
        yield (
            f"{key} = {now[key]}, but it is {before.get(key)} in the checkpoint: sums in another "
            'number of pieces have other bits; keep it, or set train.numerics = "fast"'
        )


def _missing_state(checkpoint: Store, config: RunConfig) -> Iterator[str]:
    """Yield a problem if the checkpoint lacks state of the optimizer.

    One of another rule or of Hugging Face does.
    """
    rule = make_rule(config.optimizer)
    numbers = checkpoint.index.get("optimizer")
    missing = [name for name in rule.names if not checkpoint.shapes(name)]
    # Numbers of a rule of torch begin with the first applied step.
    if isinstance(rule, Torch) and read_progress(checkpoint).applied and isinstance(numbers, dict):
        missing += sorted(rule.scalar_names.difference(numbers.get("rule") or ()))
    if missing:
        yield (
            f"{checkpoint.path} holds no {' and no '.join(missing)}, which the optimizer goes on "
            f'with: a run begins with weights alone by train.init_from = "{checkpoint.path}"'
        )


def check_tokens(config: RunConfig, corpus: Corpus, allowed: Collection[str] = ()) -> None:
    """Raise UserError if ids of weights or of a data set mean other tokens than the tokenizer's.

    allowed: differences that are accepted, of `ALLOW`.
    """
    if "tokenizer" in allowed:
        return
    if problems := [*other_tokens(config, corpus)]:
        raise UserError(*problems)


def other_tokens(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a problem for weights and data sets that have another tokenizer than the run.

    These are the weights of train.init_from and each data set.
    """
    if corpus.tokenizer is None:
        return
    tokenizer = corpus.tokenizer.path
    accept = "or accept it with --allow tokenizer"
    # A run that resumes does not use the weights of train.init_from.
    if config.train.init_from and open_newest_checkpoint(config.checkpoint_folder) is None:
        weights_tokenizer = initial_model(Path(config.train.init_from)).tokenizer
        if weights_tokenizer and not same_tokens(weights_tokenizer, tokenizer):
            yield (
                f"data.tokenizer: {tokenizer} is not the tokenizer that the weights of "
                f"train.init_from were trained with, {weights_tokenizer}, so equal ids mean other "
                f"tokens: set data.tokenizer = {toml(str(weights_tokenizer))}, {accept}"
            )
    prefixes = [dataset.prefix for dataset in corpus.datasets]
    for prefix in [*prefixes, *validation_prefixes(config)]:
        record = read_record(prefix)
        if record is None:  # its tokenizer is not known
            continue
        built_with = with_suffix(prefix, ".model")
        has_copy = built_with.is_file() and record.get(FILE_DIGEST) == file_digest(built_with)
        is_same = has_built(corpus.tokenizer, record)
        if is_same is None and has_copy:
            is_same = same_tokens(built_with, tokenizer)
        if is_same is False:
            built_by = f"{prefix}, {built_with}" if has_copy else f"{prefix}"
            yield (
                f"data.tokenizer: {tokenizer} is not the tokenizer of {built_by}, so equal ids "
                f"mean other tokens: build the data set again with --tokenizer {tokenizer}, "
                f"{accept}"
            )


def _other_tokenizer(checkpoint: Store, corpus: Corpus) -> Iterator[Difference]:
    """Yield a difference if the tokenizer is another one.

    Equal token ids then mean different tokens.
    """
    saved = read_tokenizer(checkpoint)
    tokenizer = corpus.tokenizer
    if saved and (tokenizer is None or not same_tokens(saved, tokenizer.path)):
        subject = f"{tokenizer.path} is not" if tokenizer else "there is none, which is not"
        line = (
            f"data.tokenizer: {subject} the tokenizer that the checkpoint was trained with, of "
            f"which {saved} is a copy"
        )
        yield Difference("tokenizer", line)
