"""Resuming a run: checks that it can resume from the newest checkpoint in its folder, and the lines
that it prints then.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.checkpoint.digests import file_digest
from megaprec.checkpoint.reader import Store
from megaprec.data.files import beside
from megaprec.data.intact import read_record
from megaprec.data.tokenizer import same_tokens
from megaprec.errors import UserError
from megaprec.optim.torch_rule import Torch
from models.computed import TRAINING
from models.config import ModelConfig
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.convert.initial import initial_model
from tools.convert.train_state import newest, read_model, read_progress, read_tokenizer, read_watch
from tools.training.arithmetic import moved
from tools.training.changed_keys import (
    MARK,
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
from tools.training.launch import restarted
from tools.training.place_in_data import other_length, place_notes

KEPT = {"the data": "data", "the keys": "run"}  # not in checkpoints of earlier versions


def check_resumable(
    config: RunConfig, corpus: Corpus | None = None, allowed: Collection[str] = ()
) -> None:
    """Raise UserError if the run cannot resume from the newest checkpoint in its folder.

    corpus: None before the data is open; then only keys are compared. allowed: differences that are
    accepted, of `ALLOW`.
    """
    store = newest(config.checkpoint_folder)
    if store is None:
        return
    if not config.checkpoint.resume and not restarted():
        raise UserError(
            f"checkpoint.resume = false, but {store.path} is there from an earlier run: set "
            "another train.folder, or remove that checkpoint"
        )
    step = read_progress(store).step
    read_watch(store)
    problems = [
        *_other_model(store, corpus.model if corpus else config.model),
        *_no_state(store, config),
    ]
    problems += _other_shards(store, config)
    refused = [found for found in differences(store, config, corpus) if found.what not in allowed]
    lines = [*problems, *(found.line for found in refused)]
    if problems:
        raise UserError(
            *lines, f"this run cannot resume from {store.path}: set another train.folder"
        )
    if (place := checkpoint_path(config.checkpoint_folder, step)).name != store.path.name:
        raise UserError(
            f"{store.path} holds the state after step {step}: it was renamed; name it "
            f"{place.name} again"
        )
    if refused:
        flags = " ".join(
            f"--allow {what}" for what in ALLOW if what in {found.what for found in refused}
        )
        raise UserError(
            *lines,
            f"this run cannot resume from {store.path} with these changes: undo them, accept them "
            f"with {flags}, or set another train.folder",
        )


def differences(store: Store, config: RunConfig, corpus: Corpus | None = None) -> list[Difference]:
    """Return the differences between the data of the run and of the checkpoint, as far as the
    checkpoint records its data.
    """
    identity = read_identity(store)
    found = [*other_settings(identity, config.data, config.train)] if identity else []
    found += other_length(store, config)
    if corpus:
        found += _other_tokenizer(store, corpus)
        found += other_sets(identity, corpus.identity) if identity and corpus.identity else []
    return found


def resume_lines(config: RunConfig, corpus: Corpus, checkpoint: Path) -> Iterator[str]:
    """Yield the lines that a resumed run prints: changed keys, warnings and notes."""
    yield from (f"{word:11}{said}" for word, said in _remarks(config, corpus, Store(checkpoint)))


def resume_event(config: RunConfig, corpus: Corpus, checkpoint: Path) -> dict[str, Any]:
    """Return the record of a resume for events.jsonl: the same remarks, and the learning rates
    around it."""
    store = Store(checkpoint)
    remarks = [*_remarks(config, corpus, store)]
    progress = read_progress(store)
    before, after = rates_around(store, config, progress)
    return {
        "event": "resume",
        "step": progress.step,
        "checkpoint": str(checkpoint),
        "ranks": config.world_size,
        "changed": [said for word, said in remarks if word == "changed"],
        "notes": [said for word, said in remarks if word == "note"],
        "lr_before": before,
        "lr_next": after,
    }


def _remarks(config: RunConfig, corpus: Corpus, store: Store) -> Iterator[tuple[str, str]]:
    """Yield ("changed" or "note", text) of a resume; nothing if no step is left."""
    progress = read_progress(store)
    if progress.step >= config.train.steps:
        return
    if missing := [what for what, key in KEPT.items() if key not in store.index]:
        lacks = f"keeps no record of {' and '.join(missing)} that it was trained with"
        yield "note", f"{store.path} {lacks}, so what has changed is not known"
    if not store.digests:
        unchecked = (
            "(an earlier version saved it), so nothing tells whether its files are what was saved"
        )
        yield "note", f"{store.path} has no digests {unchecked}"
    told = [found.line for found in differences(store, config, corpus)]
    keys = [
        line
        for line in changed_keys(store, config, progress)
        if not any(same_key(line, other) for other in told)
    ]
    yield from (("changed", f"{line}{MARK}") for line in told)
    yield from (("changed", line) for line in keys)
    yield from (("changed", f"{line}{MARK}") for line in moved(store))
    if any(line.startswith("train.init_from: ") for line in keys):
        yield (
            "note",
            f"train.init_from: not used, for the run goes on with the weights of {store.path}",
        )
    yield from (("note", line) for line in place_notes(store, config, corpus))
    yield from (("note", line) for line in lr_jump(store, config, progress))


def same_key(line: str, other: str) -> bool:
    """Return True if both lines are about one key."""
    return line.partition(":")[0] == other.partition(":")[0]


def _other_model(store: Store, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each key of [model] that differs from the checkpoint. Keys that are new
    since have their default in it.
    """
    saved, asked = (json.loads(m.model_dump_json()) for m in (read_model(store), model))
    free = set(TRAINING)
    if model.positions == "rope":
        free.add("max_positions")  # no weight of the model has that size
    if model.vocab == 0:
        free.add("vocab")  # not known yet
    for key in asked:
        if key not in free and saved.get(key) != asked[key]:
            yield (
                f"model.{key} = {json.dumps(asked[key])}, but it is {json.dumps(saved.get(key))} "
                "in the checkpoint"
            )


def _other_shards(store: Store, config: RunConfig) -> Iterator[str]:
    """Yield a problem if a canonical run would go on in another number of pieces: its bits would be
    others."""
    was = saved_keys(store)
    now = keys_of(config)
    names = ("train.numerics", "train.canonical_shards")
    canonical = toml("canonical")
    if was.get(names[0]) == now[names[0]] == canonical and was.get(names[1]) != now[names[1]]:
        yield (
            f"{names[1]} = {now[names[1]]}, but it is {was.get(names[1])} in the checkpoint: sums "
            "in another number of "
            'pieces have other bits; keep it, or set train.numerics = "fast"'
        )


def _no_state(store: Store, config: RunConfig) -> Iterator[str]:
    """Yield a problem if the checkpoint lacks state of the optimizer, as one of another rule or of
    Hugging Face."""
    rule = make_rule(config.optimizer)
    numbers = store.index.get("optimizer")
    lacking = [name for name in rule.names if not store.shapes(name)]
    if isinstance(rule, Torch) and read_progress(store).applied and isinstance(numbers, dict):
        lacking += sorted(rule.scalar_names.difference(numbers.get("rule") or ()))
    if lacking:
        yield (
            f"{store.path} holds no {' and no '.join(lacking)}, which the optimizer goes on with: "
            "a run begins with "
            f'weights alone by train.init_from = "{store.path}"'
        )


def check_tokens(config: RunConfig, corpus: Corpus, allowed: Collection[str] = ()) -> None:
    """Raise UserError if the ids of weights or of a data set mean other tokens than the run's
    tokenizer has.

    allowed: differences that are accepted, of `ALLOW`.
    """
    problems = [] if "tokenizer" in allowed else [*other_tokens(config, corpus)]
    if problems:
        raise UserError(*problems)


def other_tokens(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a problem for the weights of train.init_from and each data set that has another
    tokenizer than the run."""
    if corpus.tokenizer is None:
        return
    tokenizer = corpus.tokenizer.path
    accept = "or accept it with --allow tokenizer"
    begins = config.train.init_from and newest(config.checkpoint_folder) is None
    weights = initial_model(Path(config.train.init_from)).tokenizer if begins else None
    if weights and not same_tokens(weights, tokenizer):
        yield (
            f"data.tokenizer: {tokenizer} is not the tokenizer that the weights of "
            f"train.init_from were trained with, {weights}, so equal ids mean other tokens: set "
            f"data.tokenizer = {toml(str(weights))}, {accept}"
        )
    for dataset in corpus.datasets:
        built_with = beside(dataset.prefix, ".model")
        record = read_record(dataset.prefix)
        if record is None or not built_with.is_file():
            continue
        is_its_own = record.get("tokenizer_sha256") == file_digest(built_with)
        if is_its_own and not same_tokens(built_with, tokenizer):
            yield (
                f"data.tokenizer: {tokenizer} is not the tokenizer of {dataset.prefix}, "
                f"{built_with}, so equal ids mean other tokens: build the data set again with "
                f"--tokenizer {tokenizer}, {accept}"
            )


def _other_tokenizer(store: Store, corpus: Corpus) -> Iterator[Difference]:
    """Return a difference if the tokenizer is another one: equal token ids then mean different
    tokens."""
    was = read_tokenizer(store)
    tokenizer = corpus.tokenizer
    if was and (tokenizer is None or not same_tokens(was, tokenizer.path)):
        is_not = f"{tokenizer.path} is not" if tokenizer else "there is none, which is not"
        yield Difference(
            "tokenizer",
            (
                f"data.tokenizer: {is_not} the tokenizer that the checkpoint was trained with, of "
                f"which {was} is a copy"
            ),
        )
