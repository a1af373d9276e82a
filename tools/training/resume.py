"""Whether a run may go on from the checkpoints in its folder, and what it says of itself if it does."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path

from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from models.config import ModelConfig
from tools.config.checks import make_rule
from tools.config.run_file import FREE, RunConfig
from tools.convert.train_state import newest, read_model, read_progress, read_tokenizer, read_watch
from tools.training.changed_keys import MARK, changed_keys, lr_jump
from tools.training.corpus import Corpus
from tools.training.data_identity import ALLOW, Difference, other_sets, other_settings, read_identity

KEPT = {"the data": "data", "the keys": "run"}  # what earlier versions did not keep


def check_resumable(config: RunConfig, corpus: Corpus | None = None, allowed: Collection[str] = ()) -> None:
    """Raises UserError if the run folder's newest checkpoint is none that the run can go on from.

    Without `corpus`, as far as it can be known before there is one. allowed: what may be another one, of ALLOW.
    """
    store = newest(config.checkpoint_folder)
    if store is None:
        return
    if not config.checkpoint.resume:
        raise UserError(
            f"checkpoint.resume = false, but {store.path} is there from an earlier run: "
            "give another train.folder, or remove this one"
        )
    read_progress(store)
    read_watch(store)
    problems = [*_other_model(store, corpus.model if corpus else config.model), *_no_state(store, config)]
    refused = [found for found in differences(store, config, corpus) if found.what not in allowed]
    lines = [*problems, *(found.line for found in refused)]
    if problems:
        raise UserError(*lines, f"this run cannot go on from {store.path}: give another train.folder")
    if refused:
        flags = " ".join(f"--allow {what}" for what in ALLOW if what in {found.what for found in refused})
        raise UserError(
            *lines,
            f"this run cannot go on from {store.path} so: take it back, give {flags} to go on all the same, or give "
            "another train.folder",
        )


def differences(store: Store, config: RunConfig, corpus: Corpus | None = None) -> list[Difference]:
    """In what the run's data is other than what the checkpoint was trained on; nothing of what an earlier version did
    not keep."""
    identity = read_identity(store)
    found = [*other_settings(identity, config.data, config.train)] if identity else []
    if corpus:
        found += _other_tokenizer(store, corpus)
        found += other_sets(identity, corpus.identity) if identity and corpus.identity else []
    return found


def resume_lines(config: RunConfig, corpus: Corpus, checkpoint: Path) -> Iterator[str]:
    """What is to be said of a run that goes on: every key that is another one now, and what is not as it seems."""
    store = Store(checkpoint)
    progress = read_progress(store)
    if progress.step >= config.train.steps:
        return
    if missing := [what for what, key in KEPT.items() if key not in store.index]:
        lacks = f"keeps no record of {' and '.join(missing)} that it was trained with"
        yield f"note       {checkpoint} {lacks}, so what has changed is not known"
    if not store.digests:
        unchecked = "(an earlier version saved it), so nothing tells whether its files are what was saved"
        yield f"note       {checkpoint} has no digests {unchecked}"
    told = [found.line for found in differences(store, config, corpus)]
    keys = [line for line in changed_keys(store, config, progress) if not any(same_key(line, other) for other in told)]
    yield from (f"changed    {line}{MARK}" for line in told)
    yield from (f"changed    {line}" for line in keys)
    yield from (f"note       {line}" for line in lr_jump(store, config, progress))


def same_key(line: str, other: str) -> bool:
    """Whether two lines speak of one key."""
    return line.partition(":")[0] == other.partition(":")[0]


def _other_model(store: Store, model: ModelConfig) -> Iterator[str]:
    """Keys that the checkpoint does not know yet have their default in it."""
    saved, asked = (json.loads(m.model_dump_json()) for m in (read_model(store), model))
    free = set(FREE)
    if model.positions == "rope":
        free.add("max_positions")  # nothing in the model has that size
    if model.vocab == 0:
        free.add("vocab")  # not known yet
    for key in asked:
        if key not in free and saved.get(key) != asked[key]:
            yield f"model.{key} = {json.dumps(asked[key])}, but it is {json.dumps(saved.get(key))} in the checkpoint"


def _no_state(store: Store, config: RunConfig) -> Iterator[str]:
    """A checkpoint made of a Hugging Face folder has weights alone."""
    if lacking := [name for name in make_rule(config.optimizer).names if not store.shapes(name)]:
        yield (
            f"{store.path} holds no {' and no '.join(lacking)}, which the optimizer goes on with: a run begins with "
            f'weights alone by train.init_from = "{store.path}"'
        )


def _other_tokenizer(store: Store, corpus: Corpus) -> Iterator[Difference]:
    """Ids mean something else under another tokenizer, though the vocabulary may have the same size."""
    was, tokenizer = read_tokenizer(store), corpus.tokenizer
    if was and (tokenizer is None or was.read_bytes() != tokenizer.path.read_bytes()):
        is_not = f"{tokenizer.path} is not" if tokenizer else "there is none, which is not"
        yield Difference(
            "tokenizer",
            f"data.tokenizer: {is_not} the tokenizer that the checkpoint was trained with, of which {was} is a copy",
        )
