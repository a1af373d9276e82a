"""Resuming from a checkpoint: what must not have changed, the place in the data, and notes.

The place in the data is kept in tokens if samples have another length than the checkpoint's.
Without data.shuffle the same tokens were read, and the next ones follow. A shuffled order is an
order of samples: with another length it is another one, so that text of the epoch comes twice or
not at all. Such a change is refused unless --allow accepts it. A blend counts the samples of each
of its sets, alike. Random windows have no epochs: from then on windows of the other length are
drawn.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megaprec.checkpoint.atomic import INDEX, checkpoint_path, step_of, whole_checkpoints
from megaprec.checkpoint.digests import file_digest
from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem, UserError
from megaprec.optim.rules.torch_rule import TorchRule
from megaprec.optim.state.flat_buffer import EMA
from megaprec.text.tokenizer import FILE_DIGEST, Tokenizer, has_built, load_tokenizer, same_tokens
from megaprec.tokens.blend import Blend
from megaprec.tokens.copies import file_here
from megaprec.tokens.intact import read_record
from megaprec.tokens.places import is_remote, path_of
from megaprec.tokens.samples import Samples, training_numbers
from models.config import ModelConfig
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.console.units import enumerated
from tools.journal.records import BRANCHED
from tools.parts import optional_parts
from tools.saved.train_state import (
    TrainState,
    open_newest_checkpoint,
    read_model,
    read_overflow_monitor,
    read_progress,
    read_spike_monitor,
    read_tokenizer,
)
from tools.training.branch import is_branch, open_start, run_of
from tools.training.changed_keys import (
    LENGTH_KEY,
    NOT_EXACT_MARK,
    arithmetic_changes,
    changed_keys,
    keys_of,
    lr_jump,
    other_length,
    rates_around,
    saved_keys,
    saved_length,
)
from tools.training.corpus import Corpus, held_out_rule
from tools.training.data_identity import (
    DataDifference,
    other_sets,
    other_settings,
    read_identity,
)
from tools.training.data_sources import validation_sources
from tools.training.launched import was_restarted
from tools.training.other_model import allow_flags, context_differences, other_keys

RECORDS = {"the data": "data", "the keys": "run"}  # not in checkpoints of earlier versions
AVERAGE_KEY = "optimizer.ema"
MOST_REASONS = 4  # that the line about a checkpoint that a run cannot branch from names


def check_resumable(
    config: RunConfig, corpus: Corpus | None = None, allowed: Collection[str] = ()
) -> None:
    """Raise UserError if the run cannot resume from the newest checkpoint in its folder.

    corpus: None before the data is open; then only keys are compared, and former folders of the
    run's checkpoints are looked at. allowed: differences that are accepted, of
    `data_identity.ALLOW`.
    """
    # once is enough: a former place may be at a URL that does not answer
    checkpoint, branches = _checked_start(config, looks_at_former=corpus is None)
    if checkpoint is None:
        return
    # Ranks that a launcher has started again find the checkpoints of this very run.
    if not branches and not config.checkpoint.resume and not was_restarted():
        raise UserError.of("training.resume_false", path=checkpoint.path)
    step = read_progress(checkpoint).step
    read_overflow_monitor(checkpoint)  # raises UserError if it is damaged, as does the next
    read_spike_monitor(checkpoint)
    model = corpus.model if corpus else config.model
    problems = [
        *other_keys(read_model(checkpoint), model, str(checkpoint.path / INDEX)),
        *_missing_state(checkpoint, config),
        *_other_canonical_shards(checkpoint, config),
    ]
    refused = list[DataDifference]()
    for difference in allowable_differences(checkpoint, config, corpus):
        if difference.option not in allowed:
            refused.append(difference)
    # All are told at once; problems cannot be accepted, and so decide the remedy.
    lines = [*problems, *(difference.line for difference in refused)]
    path = checkpoint.path
    if branches:
        _require_origin(config, path, step, lines, "" if problems else allow_flags(refused))
        return
    if problems:
        raise UserError(*lines, _way_out(config, model, path))
    _require_name_of_step(config, path, step)
    if refused:
        flags = allow_flags(refused)
        raise UserError(*lines, Problem.of("training.changes_on_resume", path=path, flags=flags))


def _way_out(config: RunConfig, model: ModelConfig, path: Path) -> Problem:
    """Return the line on what to do about the newest checkpoint, at `path`, from which the run
    cannot resume. One below it may be the run's own: merged weights may stand beside it."""
    for older in reversed(whole_checkpoints(path.parent)):
        if step_of(older) >= step_of(path):
            continue
        store = Store(older)
        hindrances = [*other_keys(read_model(store), model, ""), *_missing_state(store, config)]
        if not hindrances:
            return Problem.of(
                "training.resumable_below", path=path, folder=path.parent, older=older.name
            )
        break
    return Problem.of("training.not_resumable", path=path)


def _checked_start(config: RunConfig, looks_at_former: bool) -> tuple[Store | None, bool]:
    """Return the checkpoint that the run goes on from, and whether it is another run's. Raises
    UserError if the run would leave its own ones in a former folder.

    looks_at_former: look for these.
    """
    checkpoint = open_start(config)
    branches = checkpoint is not None and is_branch(config, checkpoint.path)
    if looks_at_former and (checkpoint is None or branches):
        optional_parts.require_no_former_checkpoint(config)
    return checkpoint, branches


def _require_name_of_step(config: RunConfig, path: Path, step: int) -> None:
    """Raise UserError for a checkpoint whose name is not that of its step."""
    expected_name = checkpoint_path(config.checkpoint_folder, step).name
    if expected_name != path.name:
        raise UserError.of(
            "training.renamed_checkpoint", path=path, step=step, expected_name=expected_name
        )


def _require_origin(
    config: RunConfig, path: Path, step: int, lines: Sequence[str], flags: str
) -> None:
    """Raise UserError, in one line, if the run cannot branch from a checkpoint.

    step: of the checkpoint. lines: what does not fit. flags: the options that accept all of that,
    "" if none do.
    """
    if not lines:
        if step >= config.train.steps:
            raise UserError.of(
                "training.no_step_after_branch", steps=config.train.steps, path=path, step=step
            )
        return
    # Of another family nearly every key differs.
    reasons = "; ".join(lines[:MOST_REASONS])
    if len(lines) > MOST_REASONS:
        reasons += f"; and {len(lines) - MOST_REASONS} more"
    if flags:
        raise UserError.of("training.changes_on_branch", path=path, reasons=reasons, flags=flags)
    raise UserError.of("training.no_origin", path=path, reasons=reasons)


def allowable_differences(
    checkpoint: Store, config: RunConfig, corpus: Corpus | None = None
) -> list[DataDifference]:
    """Return the differences of the run from the checkpoint that --allow accepts."""
    context = context_differences(read_model(checkpoint), config.model, config)
    differences = data_differences(checkpoint, config, corpus)
    return [*context, *differences, *_other_average(checkpoint, config)]


def data_differences(
    checkpoint: Store, config: RunConfig, corpus: Corpus | None = None
) -> list[DataDifference]:
    """Return the differences between the data of the run and of the checkpoint, as far as the
    checkpoint records its data.
    """
    differences = list[DataDifference]()
    identity = read_identity(checkpoint)
    if identity:
        differences += other_settings(identity, config.data, config.train)
    differences += _other_length(checkpoint, config)
    if corpus:
        differences += _other_tokenizer(checkpoint, corpus)
        if identity and corpus.identity:
            differences += other_sets(identity, corpus.identity)
    return differences


class _Remark(NamedTuple):
    """A line of a resume. word: "changed" or "note"."""

    word: str
    text: str


def resume_lines(config: RunConfig, corpus: Corpus, path: Path) -> Iterator[str]:
    """Yield the lines that a resumed run prints: changed keys, warnings and notes."""
    for remark in _remarks(config, corpus, Store(path)):
        yield f"{remark.word:11}{remark.text}"


def resume_event(config: RunConfig, corpus: Corpus, path: Path) -> dict[str, Any]:
    """Return the record of a resume, or of the beginning of a branch, for events.jsonl: its lines,
    and the learning rates around it.
    """
    checkpoint = Store(path)
    remarks = [*_remarks(config, corpus, checkpoint)]
    progress = read_progress(checkpoint)
    rate_before, rate_after = rates_around(checkpoint, config, progress)
    origin: dict[str, Any] = {"event": "resume", "step": progress.step, "checkpoint": str(path)}
    if is_branch(config, path):
        origin |= {"event": BRANCHED, "run": str(run_of(path))}
    return {
        **origin,
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

    # A change that --allow accepts has a line that says more than the one of its key.
    differences = allowable_differences(checkpoint, config, corpus)
    described_keys = {_key_of(difference.line) for difference in differences}
    all_key_lines = changed_keys(checkpoint, config, progress)
    key_lines = [line for line in all_key_lines if _key_of(line) not in described_keys]
    for difference in differences:
        mark = "" if difference.option == EMA else NOT_EXACT_MARK  # no weight depends on an average
        yield _Remark("changed", f"{difference.line}{mark}")
    for line in key_lines:
        yield _Remark("changed", line)
    for line in arithmetic_changes(checkpoint):
        yield _Remark("changed", f"{line}{NOT_EXACT_MARK}")
    yield from _notes(_unused_origins(config, checkpoint, {_key_of(line) for line in key_lines}))
    yield from _notes(_unused_state(checkpoint, config))
    if config.fp8.kind != "none" and (kept := optional_parts.kept_format_note(config)):
        yield _Remark("note", kept)
    yield from _notes(_position_notes(checkpoint, config, corpus))
    yield from _notes(other_length(checkpoint, config, progress))
    yield from _notes(lr_jump(checkpoint, config, progress))


def _unused_origins(
    config: RunConfig, checkpoint: Store, changed: Collection[str]
) -> Iterator[str]:
    """Yield a note for each changed key that names where a run begins: a resumed run has its own
    state. changed: keys."""
    unused = {"train.init_from": "weights"}
    if not is_branch(config, checkpoint.path):
        unused["train.branch_from"] = "state"
    for key, state in unused.items():
        if config.get(key) and key in changed:
            yield f"{key}: not used, for the run goes on with the {state} of {checkpoint.path}"


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


def _other_canonical_shards(checkpoint: Store, config: RunConfig) -> Iterator[str]:
    """Yield a problem if a canonical run would go on in another number of pieces: its bits would be
    others.
    """
    saved_values = saved_keys(checkpoint)
    values = keys_of(config)
    if not saved_values.get("train.numerics") == values["train.numerics"] == toml("canonical"):
        return
    key = "train.canonical_shards"
    saved = saved_values.get(key)
    if saved != values[key]:
        yield Problem.of("training.other_shards", key=key, shards=values[key], saved=saved)


def _other_average(checkpoint: Store, config: RunConfig) -> Iterator[DataDifference]:
    """Yield a difference if the run keeps an average of the weights that the checkpoint lacks, or
    lacks one that the checkpoint has."""
    has_average = bool(checkpoint.shapes(EMA))
    decay = config.optimizer.ema
    if decay and not has_average:
        effect = f"{checkpoint.path} has no average of the weights, so one begins with its weights"
        yield DataDifference(EMA, f"{AVERAGE_KEY}: {toml(0.0)} -> {toml(decay)}: {effect}")
    if has_average and not decay:
        saved = saved_keys(checkpoint).get(AVERAGE_KEY, "on")
        effect = f"the average of the weights in {checkpoint.path} is given up"
        yield DataDifference(EMA, f"{AVERAGE_KEY}: {saved} -> {toml(decay)}: {effect}")


def _missing_state(checkpoint: Store, config: RunConfig) -> Iterator[str]:
    """Yield a problem if the checkpoint lacks state of the optimizer, as one of another rule or of
    Hugging Face does.
    """
    rule = make_rule(config.optimizer)
    numbers = checkpoint.index.get("optimizer")
    missing = [name for name in rule.names if not checkpoint.shapes(name)]
    # A rule of torch has numbers of its own, such as a count of steps, after its first step.
    if (
        isinstance(rule, TorchRule)
        and read_progress(checkpoint).applied
        and isinstance(numbers, dict)
    ):
        missing += sorted(rule.scalar_names.difference(numbers.get("rule") or ()))
    if missing:
        yield Problem.of(
            "training.missing_state", path=checkpoint.path, missing=" and no ".join(missing)
        )


def _unused_state(checkpoint: Store, config: RunConfig) -> Iterator[str]:
    """Yield a note if the checkpoint has state of an update rule that the run's rule does not
    have."""
    names = make_rule(config.optimizer).names
    kinds = dict[str, None]()  # each once, in their order
    for key in checkpoint.index["tensors"]:  # kind/name
        kind, _, _ = key.partition("/")
        kinds[kind] = None
    saved = [kind for kind in kinds if kind not in ("weight", EMA)]
    unused = [kind for kind in saved if kind not in names]
    if unused:
        used = [kind for kind in saved if kind in names]
        yield (
            f"optimizer.name = {toml(config.optimizer.name)} goes on with "
            f"{enumerated(used or ['no state'])} of {checkpoint.path}, and leaves out "
            f"{enumerated(unused)}"
        )


def check_tokens(config: RunConfig, corpus: Corpus, allowed: Collection[str] = ()) -> None:
    """Raise UserError if ids of weights or of a data set mean other tokens than the tokenizer's.

    allowed: differences that are accepted, of `data_identity.ALLOW`.
    """
    if "tokenizer" in allowed:
        return
    if problems := [*other_tokens(config, corpus)]:
        raise UserError(*problems)


def other_tokens(config: RunConfig, corpus: Corpus) -> Iterator[Problem]:
    """Yield a problem for the weights of train.init_from and for each data set that have another
    tokenizer than the run.
    """
    if corpus.tokenizer is None:
        return
    tokenizer = corpus.tokenizer.path
    # A run that resumes does not use the weights of train.init_from.
    if config.train.init_from and open_newest_checkpoint(config.checkpoint_folder) is None:
        weights_tokenizer = optional_parts.initial_model(
            path_of(config.train.init_from), config.model
        ).tokenizer
        if weights_tokenizer and config.train.grow_vocabulary != "none":
            yield from optional_parts.moved_tokens(
                load_tokenizer(weights_tokenizer), corpus.tokenizer
            )
        elif weights_tokenizer and not same_tokens(weights_tokenizer, tokenizer):
            yield Problem.of(
                "training.tokenizer_of_weights",
                tokenizer=tokenizer,
                weights_tokenizer=weights_tokenizer,
                value=toml(str(weights_tokenizer)),
            )
    prefixes = [dataset.prefix for dataset in corpus.datasets]
    if config.train.evaluates:
        # Those of texts are built with the run's own tokenizer.
        prefixes += [source.prefix for source in validation_sources(config) if source.is_tokenized]
    for prefix in prefixes:
        yield from _other_tokens_of_set(prefix, corpus.tokenizer)


def _other_tokens_of_set(prefix: Path, tokenizer: Tokenizer) -> Iterator[Problem]:
    """Yield a problem if a data set is known to be built with another tokenizer.

    By the digest in the set's record, or by the tokenizer file beside the set, if that is the one
    that the set was built with.
    """
    record = read_record(prefix)
    if record is None:
        return
    built_with = file_here(prefix, ".model")
    is_copied = not is_remote(built_with) and built_with.is_file()
    has_copy = is_copied and record.get(FILE_DIGEST) == file_digest(built_with)
    is_same = has_built(tokenizer, record)
    if is_same is None and has_copy:
        is_same = same_tokens(built_with, tokenizer.path)
    if is_same is False:
        built_by = f"{prefix}, {built_with}" if has_copy else str(prefix)
        yield Problem.of("training.tokenizer_of_set", tokenizer=tokenizer.path, built_by=built_by)


def _other_tokenizer(checkpoint: Store, corpus: Corpus) -> Iterator[DataDifference]:
    """Yield a difference if equal token ids would mean other tokens than in the
    checkpoint's run.
    """
    saved = read_tokenizer(checkpoint)
    tokenizer = corpus.tokenizer
    if saved and (tokenizer is None or not same_tokens(saved, tokenizer.path)):
        subject = f"{tokenizer.path} is not" if tokenizer else "there is none, which is not"
        line = (
            f"data.tokenizer: {subject} the tokenizer that the checkpoint was trained with, of "
            f"which {saved} is a copy"
        )
        yield DataDifference("tokenizer", line)


@dataclass(frozen=True)
class _DataPosition:
    """The position of a run in its data.

    next_sample: its number, where samples have the length that they have now. repeated: tokens at
    the beginning of that sample that were read before. trained_of_held_out: tokens that were
    trained on, and that belong to the held-out part now.
    """

    next_sample: int
    repeated: int = 0
    trained_of_held_out: int = 0


def _other_length(checkpoint: Store, config: RunConfig) -> Iterator[DataDifference]:
    """Yield a difference if another length of samples than the checkpoint's changes their order."""
    old_length = saved_length(checkpoint, config)
    length = config.train.seq_length
    if old_length == length or not read_progress(checkpoint).samples:
        return
    if config.data.windows == "random":
        return
    if config.data.pack != "none":
        reason = "documents are packed anew"
    elif config.data.shuffle:
        reason = "its samples come in another order"
    elif config.data.blend:
        reason = "each set of a blend counts its samples"
    else:
        return
    effect = "so text of this epoch comes twice or not at all"
    yield DataDifference(
        "seq_length", f"{LENGTH_KEY}: {old_length} -> {length}: {reason}, {effect}"
    )


def resumed_progress(checkpoint: Store, config: RunConfig, corpus: Corpus) -> TrainState:
    """Return the progress that a run goes on with: the checkpoint's, with its position in the data
    kept in tokens.
    """
    progress = read_progress(checkpoint)
    position = _data_position(checkpoint, config, corpus)
    return replace(progress, samples=position.next_sample)


def _position_notes(checkpoint: Store, config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a note about the position in the data if the length of samples has changed."""
    old_length = saved_length(checkpoint, config)
    length = config.train.seq_length
    if old_length == length:
        return
    position = _data_position(checkpoint, config, corpus)
    tokens = read_progress(checkpoint).samples * old_length
    line = (
        f"{LENGTH_KEY}: the place in the data is kept: {tokens:,} tokens are read, and sample "
        f"{position.next_sample:,} of {length} tokens is next"
    )
    if config.data.windows == "random":
        line = f"{LENGTH_KEY}: from now on random windows of {length} tokens are drawn"
    if config.data.pack != "none":
        line = (
            f"{LENGTH_KEY}: documents are packed anew into samples of {length} tokens; "
            f"{tokens:,} tokens are read, and sample {position.next_sample:,} is next"
        )
    if position.repeated:
        line += f"; its first {position.repeated:,} tokens come again"
    if position.trained_of_held_out:
        verb = "may have been" if config.data.windows == "random" else "were"
        trained = f"{position.trained_of_held_out:,} tokens that {verb} trained on"
        line += f"; {trained} belong to the held-out part now"
    yield line


def _data_position(checkpoint: Store, config: RunConfig, corpus: Corpus) -> _DataPosition:
    """Return where the run goes on in its data: after as many tokens as the checkpoint's run has
    read, if samples have another length now. Random windows keep the number of the sample."""
    old_length = saved_length(checkpoint, config)
    length = config.train.seq_length
    samples = read_progress(checkpoint).samples
    if old_length == length:
        return _DataPosition(samples)
    if config.data.windows == "random":
        shared = _drawn_of_held_out(old_length, config, corpus) if samples else 0
        return _DataPosition(samples, trained_of_held_out=shared)
    if config.data.pack != "none":  # samples of the two lengths have no common order
        return _DataPosition(samples * old_length // length)
    if not isinstance(corpus.train, Samples):  # a blend, which has no epochs of its own
        following, repeated = divmod(samples * old_length, length)
        return _DataPosition(following, repeated)
    return _position_in_epochs(samples, old_length, corpus.train, corpus.held_out, config)


def _position_in_epochs(
    samples: int,
    old_length: int,
    training: Samples,
    held_out: Samples | Blend | None,
    config: RunConfig,
) -> _DataPosition:
    """Return where a run goes on in a single data set, after `samples` samples of the old length.

    A sample has a number in the text, counted in samples of one length; the numbers of held-out
    samples are not trained on. training, held_out: samples of the new length.
    """
    length = config.train.seq_length
    old_numbers = training_numbers(
        training.dataset, old_length, config.data.held_out, held_out_rule(config)
    )
    new_numbers = training.chosen
    # Whole epochs are counted in samples of the old length, and the rest in tokens.
    epoch, samples_in_epoch = divmod(samples, len(old_numbers))
    next_number = int(old_numbers.numbers(np.int64(samples_in_epoch)))
    number, repeated = divmod(next_number * old_length, length)
    following = new_numbers.index_of(number)
    # What is left of the epoch is shorter than a sample, or the sample is held out.
    if new_numbers.index_of(number + 1) == following:
        repeated = 0
    trained_of_held_out = 0
    if isinstance(held_out, Samples):
        # The borders of the held-out part are at whole samples, and so have moved, too.
        trained = old_numbers if epoch else old_numbers.beginning(samples_in_epoch)
        trained_of_held_out = trained.shared_tokens(old_length, held_out.chosen, length)
    next_sample = epoch * len(training) + following
    return _DataPosition(next_sample, repeated, trained_of_held_out)


def _drawn_of_held_out(old_length: int, config: RunConfig, corpus: Corpus) -> int:
    """Return the number of held-out tokens from which windows of the old length may have been
    drawn: the borders of the held-out part are at whole samples."""
    if corpus.held_out is None:
        return 0
    held_out = corpus.held_out
    held_out_parts = held_out.parts if isinstance(held_out, Blend) else [held_out]
    tokens = 0
    for trained, evaluated in zip(corpus.training_parts, held_out_parts, strict=True):
        old_numbers = training_numbers(
            trained.dataset, old_length, config.data.held_out, held_out_rule(config)
        )
        tokens += old_numbers.shared_tokens(old_length, evaluated.chosen, config.train.seq_length)
    return tokens
