"""Whether a run may go on from the checkpoints in its folder."""

import json
from collections.abc import Iterator
from pathlib import Path

from megaprec.checkpoint.folder import latest, remedy
from megaprec.checkpoint.intact import require_intact
from megaprec.checkpoint.store import Store
from megaprec.errors import UserError
from models.config import ModelConfig
from tools.checks import make_rule
from tools.corpus import Corpus
from tools.run import FREE, RunConfig
from tools.saved import kept


def check_resumable(config: RunConfig, corpus: Corpus | None = None) -> None:
    """Raises UserError if the run folder's newest checkpoint is none that the run can go on from.

    Without `corpus`, as far as it can be known before there is one.
    """
    path = latest(config.checkpoint_folder)
    if path is None:
        return
    if not config.checkpoint.resume:
        raise UserError(
            f"checkpoint.resume = false, but {path} is there from an earlier run: "
            "give another train.folder, or remove this one"
        )
    store = _open(path)
    for key in ("progress", "watch"):
        kept(store, key)
    problems = [*_other_model(store, corpus.model if corpus else config.model), *_no_state(store, config)]
    if corpus:
        problems += _other_tokenizer(store, corpus)
    if problems:
        raise UserError(*problems, f"this run cannot go on from {path}: give another train.folder")


def _open(path: Path) -> Store:
    try:
        store = Store(path)
    except UserError as error:
        raise UserError(*error.problems, f"{path} is damaged: {remedy(path)}") from error
    require_intact(store, (name for name in store.digests if not name.endswith(".safetensors")))  # loading checks those
    return store


def _other_model(store: Store, model: ModelConfig) -> Iterator[str]:
    """Keys that the checkpoint does not know yet have their default in it."""
    saved, asked = (json.loads(m.model_dump_json()) for m in (ModelConfig(**kept(store, "model")), model))
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


def _other_tokenizer(store: Store, corpus: Corpus) -> Iterator[str]:
    """Ids mean something else under another tokenizer, though the vocabulary may have the same size."""
    name, tokenizer = kept(store, "tokenizer"), corpus.tokenizer
    if name and tokenizer and store.file(name).read_bytes() != tokenizer.path.read_bytes():
        yield (
            f"{tokenizer.path} is not the tokenizer that the checkpoint was trained with: set data.tokenizer to "
            f"a copy of {store.file(name)}, or give the text that it was trained on"
        )
