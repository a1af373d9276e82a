"""Rules on data, evaluation and initial weights."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from megaprec.checkpoint.object_store import require_saved_to
from megaprec.errors import Problem
from megaprec.tokens.places import is_url
from models.config import ModelConfig
from tools.config.rules.checking import problems_of
from tools.config.rules.derived import blend_phases
from tools.config.tables.data_settings import LONGEST_NAME, Data
from tools.config.tables.precision_settings import FP8
from tools.config.tables.settings import Checkpoint, Log, Train
from tools.console.toml import toml

MOST_POINTS = 1000  # of a weight of a blend


def _vocabulary(model: ModelConfig, data: Data, train: Train) -> Iterator[str]:
    # the tokenizer that is trained has data.vocab_size tokens, but for one of characters
    if not data.tokenizer and data.has_text() and 0 < model.vocab < data.vocab_size:
        yield small_vocabulary(model.vocab, data.vocab_size, train.branch_from)


def small_vocabulary(vocab: int, vocab_size: int, branch: str) -> Problem:
    """Return the line on a tokenizer that would be trained with more tokens than the model has.

    branch: train.branch_from, which has a tokenizer.
    """
    if not branch:
        return Problem.of("config.small_vocab", vocab=vocab, vocab_size=vocab_size)
    return Problem.of(
        "config.tokenizer_of_branch_missing",
        vocab=vocab,
        vocab_size=vocab_size,
        branch=toml(branch),
    )


def _first_state(train: Train) -> Iterator[str]:
    if train.branch_from and train.init_from:
        yield Problem.of("config.init_and_branch")


def _blend(data: Data) -> Iterator[str]:
    """Yield the problems of data.blend: of its weights, and of a data.source beside it."""
    if data.blend and data.source != "python":
        yield Problem.of("config.source_and_blend", source=data.source)
    problems_of_weights = [*_blend_points(data)]
    yield from problems_of_weights
    # phases follow from weights whose samples are in order
    if not problems_of_weights:
        yield from _phases(data)


def _blend_points(data: Data) -> Iterator[str]:
    """Yield the problems of each weight of a blend by itself."""
    for number, part in enumerate(data.blend):
        key = f"data.blend[{number}].weight"
        points = part.points
        if len(points) > MOST_POINTS:
            yield Problem.of("config.blend_points", key=key, count=len(points), most=MOST_POINTS)
            continue
        begin, _ = points[0]
        if begin:
            yield Problem.of("config.blend_begin", key=key, samples=begin)
        for (earlier, _), (later, _) in pairwise(points):
            if later <= earlier:
                yield Problem.of("config.blend_order", key=key, earlier=earlier, later=later)
        if not any(weight for _, weight in points):
            yield Problem.of("config.blend_zero", key=key)


def _phases(data: Data) -> Iterator[str]:
    """Yield the problems of the weights of a blend together."""
    phases = blend_phases(data)
    empty = phases.empty_phase()
    if empty is not None:
        yield Problem.of("config.blend_phase_empty", samples=empty)
        return
    for problem in problems_of(phases.require_short_patterns):
        yield problem.within("data.blend: ")


def _windows(data: Data) -> Iterator[str]:
    if data.windows == "random" and not data.shuffle:
        yield Problem.of("config.windows_in_order")


def _pack(train: Train, data: Data) -> Iterator[str]:
    if data.pack == "none":
        return
    if data.windows == "random":
        yield Problem.of("config.pack_windows", pack=data.pack)
    if train.seq_schedule:
        yield Problem.of("config.pack_seq_schedule", pack=data.pack)


def _evaluation(train: Train, data: Data) -> Iterator[str]:
    if train.evaluates and not (data.held_out or data.validation or data.lm_eval):
        key = "eval_every" if train.eval_every else "eval_first"
        value = toml(getattr(train, key))
        yield Problem.of("config.eval_without_text", key=key, value=value)


def _best_checkpoint(train: Train, data: Data, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a problem if there is no evaluation by which the best checkpoint is chosen."""
    if not checkpoint.best:
        return
    evaluations = [f"eval_loss/{dataset.name}" for dataset in data.validation]
    if data.held_out:
        evaluations.insert(0, "eval_loss")
    unknown = [name for name in checkpoint.best if name not in evaluations]
    if unknown:
        known = ", ".join(evaluations) or "nothing: set data.held_out or data.validation"
        yield Problem.of("config.keep_best_unknown", name=unknown[0], known=known)
        return
    # with eval_every the last step is evaluated and saved, so there is a best checkpoint
    if not train.eval_every:
        value = toml(checkpoint.keep_best)
        yield Problem.of("config.keep_best_never_evaluated", name=value)


def _checkpoint_place(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a problem for a kind of URL to which no checkpoint is saved, before its server is
    asked for one, and for one that ends with the run."""
    if checkpoint.folder.lower().startswith("memory://"):
        yield Problem.of("config.checkpoints_in_memory", folder=toml(checkpoint.folder))
    elif is_url(checkpoint.folder):
        yield from problems_of(require_saved_to, checkpoint.folder)


def _is_name(text: str) -> bool:
    """Return True if a text may become part of keys in metrics.jsonl, of tags of trackers and of
    their files, where dots alone would name another folder."""
    is_word = bool(re.fullmatch(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}", text))
    return is_word and bool(text.strip("."))


def _blend_names(data: Data) -> Iterator[str]:
    """Yield a problem for each name of a blend that no field can have, or that is there twice."""
    names = [part.name for part in data.blend if part.name]
    for name in dict.fromkeys(names):
        if not _is_name(name):
            yield Problem.of("config.blend_name", name=name)
        elif names.count(name) > 1:
            yield Problem.of("config.blend_name_twice", count=names.count(name), name=name)


def _validation_names(data: Data) -> Iterator[str]:
    """Yield a problem for each name of data.validation that no field can have, or that is there
    twice."""
    names = [dataset.name for dataset in data.validation]
    for name in dict.fromkeys(names):
        if not _is_name(name):
            yield Problem.of("config.validation_name", name=name)
        elif names.count(name) > 1:
            yield Problem.of("config.validation_name_twice", count=names.count(name), name=name)


def _lm_eval_keys(data: Data) -> Iterator[str]:
    for key in ("lm_eval_folder", "lm_eval_limit"):
        if getattr(data, key) and not data.lm_eval:
            yield Problem.of("config.lm_eval_key", key=key)


def _lm_eval_steps(train: Train, data: Data) -> Iterator[str]:
    if data.lm_eval and not train.evaluates:
        yield Problem.of("config.lm_eval_never")


def _lm_eval_family(model: ModelConfig, data: Data) -> Iterator[str]:
    if data.lm_eval and model.factory:
        yield Problem.of("config.lm_eval_factory")


def _lm_eval_products(data: Data, fp8: FP8) -> Iterator[str]:
    if data.lm_eval and fp8.kind != "none":
        yield Problem.of("config.lm_eval_fp8")


def _sample(model: ModelConfig, log: Log) -> Iterator[str]:
    if model.factory and log.sample:
        yield Problem.of("config.sample_factory", factory=model.factory)


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _vocabulary,
    _first_state,
    _blend,
    _windows,
    _pack,
    _evaluation,
    _blend_names,
    _validation_names,
    _best_checkpoint,
    _checkpoint_place,
    _lm_eval_keys,
    _lm_eval_steps,
    _lm_eval_family,
    _lm_eval_products,
    _sample,
)
