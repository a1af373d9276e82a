"""Preparation of a run: its checks, missing data, and the files that all ranks open."""

import sys
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import latest
from megaprec.checkpoint.reader import Store
from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.tokens.copies import file_here
from megaprec.tokens.files import with_suffix
from megaprec.tokens.places import is_remote, path_of
from parallel.described_world import is_rank_of_world
from tools.config.rules.checking import check_all
from tools.config.run_file import RunConfig
from tools.console.wrapped import say
from tools.parts import optional_parts
from tools.training.branch import is_branch, open_start, require_origin_intact
from tools.training.corpus import Corpus, open_corpus
from tools.training.data_sources import check_sources
from tools.training.hangs import put_aside_records
from tools.training.initial import check_first_weights, check_growth, differences_from_first_weights
from tools.training.launched import is_local_rank
from tools.training.machine import check_this_machine, device_of_run, local_ranks
from tools.training.prepared_files import TOKENIZER, masked_prefixes
from tools.training.resume import (
    allowable_differences,
    check_resumable,
    check_tokens,
    other_tokens,
)
from tools.training.run_folder import check_folders, lock_folder
from tools.training.run_warnings import run_warnings


def open_checked(config: RunConfig, allowed: Collection[str]) -> Corpus:
    """Return the data of a run, opened or built, after all checks.

    Everything that can be checked is checked before anything is written. Raises UserError.
    allowed: see `check_resumable`.
    """
    check_all(
        config,
        device_of_run,
        check_this_machine,
        _check_fp8,
        check_folders,
        check_sources,
        partial(check_resumable, allowed=allowed),
        _check_initial,
        partial(check_first_weights, allowed=allowed),
        partial(check_growth, allowed=allowed),
        _require_trackers,
        _require_harness,
        _require_exportable,
    )
    # Before data are built; in a world the ranks check the files together, when they load them.
    if not is_rank_of_world():
        require_origin_intact(config)
    corpus = open_corpus(config, allowed)
    if config.checkpoint.export == "hf":
        optional_parts.require_exportable_tokenizer(corpus)
    # Once more, for the data decides whether the checkpoint is one of this run.
    check_resumable(config, corpus, allowed)
    check_tokens(config, corpus, allowed)
    return corpus


def _check_initial(config: RunConfig) -> None:
    """Raise UserError if the checkpoint of train.init_from is incomplete or damaged."""
    if config.train.init_from:
        optional_parts.open_initial(path_of(config.train.init_from), config.model)


def _check_fp8(config: RunConfig) -> None:
    """Raise UserError if FP8 settings are not computed, name no weight, or have no backend."""
    if config.plan.fp8:
        optional_parts.check_fp8(config)


def _require_trackers(config: RunConfig) -> None:
    """Raise UserError if a tracker of log.to is not there."""
    if config.log.to:
        optional_parts.require_trackers(config.log.to)


def _require_harness(config: RunConfig) -> None:
    """Raise UserError if a task of data.lm_eval cannot be evaluated."""
    if config.data.lm_eval:
        optional_parts.require_harness(config)


def _require_exportable(config: RunConfig) -> None:
    """Raise UserError if no folder of checkpoint.export can hold the model."""
    if config.checkpoint.export == "hf":
        optional_parts.require_exportable(config)


def verify_models(config: RunConfig, export_folder: Path | None) -> None:
    """Raise UserError if transformers computes other logits than megaprec for the initial or the
    exported model.
    """
    # A run that resumes has weights of its own.
    initial = config.train.init_from if not latest(config.checkpoint_folder) else ""
    exports = [f"--export-hf {export_folder}"] if export_folder else []
    if config.checkpoint.export == "hf":
        exports.append('checkpoint.export = "hf"')
    if initial or exports:
        for line in optional_parts.verified_models(config, initial, " and ".join(exports)):
            print(line)


def prepare(
    config: RunConfig,
    locks: ExitStack,
    allowed: Collection[str] = (),
    export: Path | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Check the run, build missing data and return the files that all ranks open, "" for those that
    it does without: paths that the machines share, and URLs. For rank 0.

    The run folder is locked until `locks` is closed. allowed: see `check_resumable`. export: where
    the model is exported after training. verify: see `verify_models`.
    """
    corpus = open_checked(config, allowed)
    if is_rank_of_world() and not is_local_rank():  # otherwise the launcher has printed it
        optional_parts.print_plan(config)
    if verify:
        verify_models(config, export)
    # Held until the run ends: the check of the folder above has released it.
    try:
        locks.enter_context(lock_folder(config))
    except OSError as error:
        raise UserError.of(
            "command.folder_not_writable", folder=config.train.folder, reason=error.strerror
        ) from error
    # Those of the run before this one, which may have ended abnormally.
    put_aside_records(Path(config.train.folder))
    for warning in run_warnings(config, corpus, local_ranks(config), device_of_run(config)):
        say(f"warning    {warning}")
    # Other runs write them at their end. An exported checkpoint needs them for its card, which
    # gives bits per byte.
    if config.checkpoint.export == "hf":
        write_yardsticks(config, corpus)
        if note := optional_parts.export_note(config):
            say(f"note       {note}")
    # Named by rank 0, so that all ranks resume from the same one.
    checkpoint = open_start(config)
    _note_former_places(config, checkpoint)
    _note_needless_allowances(config, corpus, checkpoint, allowed)
    return {
        "prefixes": [str(dataset.prefix) for dataset in corpus.datasets],
        "masked": sorted(masked_prefixes(corpus)),
        "tokenizer": _named_tokenizer(corpus),
        "checkpoint": str(checkpoint.path) if checkpoint else "",
        "identity": corpus.identity.model_dump() if corpus.identity else None,
        "notes": corpus.notes,
    }


def _note_former_places(config: RunConfig, checkpoint: Store | None) -> None:
    """Print a note for each former place of checkpoints that a run which begins cannot look at."""
    if checkpoint is not None and not is_branch(config, checkpoint.path):
        return
    for note in optional_parts.notes_on_former_places(config):
        say(f"note       {note}")


def _note_needless_allowances(
    config: RunConfig, corpus: Corpus, checkpoint: Store | None, allowed: Collection[str]
) -> None:
    """Print a note for each --allow that names something in which run and checkpoint agree."""
    if checkpoint is not None:
        differences = allowable_differences(checkpoint, config, corpus)
    else:
        differences = differences_from_first_weights(config)
    differing = {difference.option for difference in differences}
    if any(other_tokens(config, corpus)):
        differing.add("tokenizer")
    for name in sorted(set(allowed) - differing):
        print(
            f"note       --allow {name}: not needed, for the checkpoint has the same one, or "
            "there is no checkpoint"
        )


def _named_tokenizer(corpus: Corpus) -> str:
    """Return the name of the tokenizer file on any machine, its URL if this one has a copy of it;
    "" without a tokenizer."""
    if corpus.tokenizer is None:
        return ""
    path = corpus.tokenizer.path
    for dataset in corpus.datasets:
        if is_remote(dataset.prefix) and path == file_here(dataset.prefix, TOKENIZER):
            return str(with_suffix(dataset.prefix, TOKENIZER))
    return str(path)


def write_yardsticks(config: RunConfig, corpus: Corpus) -> None:
    """Write what the held-out loss is measured against; nothing, with a warning, if that fails."""
    try:
        yardsticks = optional_parts.make_yardsticks(config, corpus)
        if yardsticks is not None:
            yardsticks.save(Path(config.train.folder))
    except (UserError, OSError) as error:
        # a run that has trained is not lost for a number
        reason = file_error(error) if isinstance(error, OSError) else error
        print(f"warning    no yardsticks: {reason}", file=sys.stderr, flush=True)
