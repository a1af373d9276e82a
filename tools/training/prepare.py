"""Preparation of a run: its checks, missing data, and the files that all ranks open."""

import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import INDEX, latest
from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem, UserError
from megaprec.tokens.copies import file_here
from megaprec.tokens.files import with_suffix
from megaprec.tokens.loss_mask import SUFFIX as LOSS_MASK
from megaprec.tokens.places import is_remote, is_url, path_of
from parallel.described_world import is_rank_of_world
from tools.config.rules.all_rules import check_all
from tools.config.run_file import RunConfig
from tools.console.wrapped import say
from tools.parts.optional_parts import part
from tools.training.blend_place import saved_stretches
from tools.training.branch import open_start, require_origin_intact
from tools.training.corpus import Corpus, identified, open_built, open_corpus, open_validation
from tools.training.data_identity import Identity
from tools.training.data_sources import check_sources
from tools.training.fp8_summary import check_fp8
from tools.training.hangs import put_aside_records
from tools.training.initial import check_first_weights, check_growth, differences_from_first_weights
from tools.training.launched import is_local_rank
from tools.training.machine import check_this_machine, device_of_run, local_ranks
from tools.training.resume import (
    allowable_differences,
    check_resumable,
    check_tokens,
    other_tokens,
)
from tools.training.run_folder import check_folders, lock_folder
from tools.training.run_warnings import run_warnings

# after which NFS shows a new file to other hosts with its default settings (acdirmax)
NFS_SECONDS = 60.0
POLL_SECONDS = 0.5  # between two looks for a file
TOKENIZER = ".model"  # ending of the tokenizer beside a data set


def open_checked(config: RunConfig, allowed: Collection[str]) -> Corpus:
    """Return the data of a run, opened or built, after all checks.

    Everything that can be checked is checked before anything is written. Raises UserError.
    allowed: see `check_resumable`.
    """
    check_all(
        config,
        device_of_run,
        check_this_machine,
        check_fp8,
        check_folders,
        check_sources,
        partial(check_resumable, allowed=allowed),
        _check_initial,
        partial(check_first_weights, allowed=allowed),
        partial(check_growth, allowed=allowed),
        _require_trackers,
        _require_harness,
    )
    # Before data are built; in a world the ranks check the files together, when they load them.
    if not is_rank_of_world():
        require_origin_intact(config)
    corpus = open_corpus(config, allowed)
    # Once more, for the data decides whether the checkpoint is one of this run.
    check_resumable(config, corpus, allowed)
    check_tokens(config, corpus, allowed)
    return corpus


def _check_initial(config: RunConfig) -> None:
    """Raise UserError if the checkpoint of train.init_from is incomplete or damaged."""
    if config.train.init_from:
        part("open_initial")(Path(config.train.init_from), config.model)


def _require_trackers(config: RunConfig) -> None:
    """Raise UserError if a tracker of log.to is not there."""
    if config.log.to:
        part("require_trackers")(config.log.to)


def _require_harness(config: RunConfig) -> None:
    """Raise UserError if a task of data.lm_eval cannot be evaluated."""
    if config.data.lm_eval:
        part("require_harness")(config)


def verify_models(config: RunConfig, export_folder: Path | None) -> None:
    """Raise UserError if transformers computes other logits than megaprec for the initial or the
    exported model.
    """
    # A run that resumes has weights of its own.
    initial = config.train.init_from if not latest(config.checkpoint_folder) else ""
    if initial or export_folder:
        for line in part("verified_models")(config, initial, export_folder):
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
        part("print_plan")(config)
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
    # Named by rank 0, so that all ranks resume from the same one.
    checkpoint = open_start(config)
    _note_needless_allowances(config, corpus, checkpoint, allowed)
    return {
        "prefixes": [str(dataset.prefix) for dataset in corpus.datasets],
        "masked": sorted(_masked(corpus)),
        "tokenizer": _named_tokenizer(corpus),
        "checkpoint": str(checkpoint.path) if checkpoint else "",
        "identity": corpus.identity.model_dump() if corpus.identity else None,
        "notes": corpus.notes,
    }


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


def open_prepared(config: RunConfig, prepared: dict[str, Any]) -> tuple[Corpus, Path | None]:
    """Return the data and the checkpoint that rank 0 named. Raises UserError if this machine lacks
    a file of them.

    prepared: what `prepare` returned on rank 0.
    """
    prefixes = [path_of(prefix) for prefix in prepared["prefixes"]]
    tokenizer = _tokenizer_here(prepared["tokenizer"]) if prepared["tokenizer"] else None
    checkpoint = Path(prepared["checkpoint"]) if prepared["checkpoint"] else None
    masked = [path_of(prefix) for prefix in prepared["masked"]]
    _require_files(prefixes, masked, tokenizer, checkpoint)
    # Rank 0 has digested the data; the others take its word.
    identity = prepared["identity"] and Identity.model_validate(prepared["identity"])
    stretches = saved_stretches(identity) if identity else ()
    corpus = open_built(config, prefixes, tokenizer, stretches)
    if os.environ.get("LOCAL_RANK") == "0" and os.environ.get("RANK") != "0":
        # One rank checks the files of this machine, as rank 0 has checked those of the first.
        identified(config, corpus)
    validation = open_validation(config, corpus.begin_token)
    notes = tuple(prepared["notes"])
    corpus = replace(corpus, identity=identity, notes=notes, validation=validation)
    _require_same_masks(corpus, set(prepared["masked"]))
    return corpus, checkpoint


def _require_files(
    prefixes: Sequence[Path],
    masked: Sequence[Path],
    tokenizer: Path | None,
    checkpoint: Path | None,
) -> None:
    """Raise UserError for files that this machine lacks.

    prefixes: of the data sets. masked: of those with a loss mask. What is at a URL is not asked
        for here: it is missed when it is opened.
    """
    required = [with_suffix(prefix, LOSS_MASK) for prefix in masked if not is_remote(prefix)]
    for prefix in prefixes:
        if not is_remote(prefix):
            required += [with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")]
    if tokenizer:
        required.append(tokenizer)
    if checkpoint:
        required.append(checkpoint / INDEX)
    host = socket.gethostname()
    problems = []
    for path in _missing_files(required):
        problems.append(Problem.of("training.file_not_shared", path=path, host=host))
    if problems:
        raise UserError(*problems)


def _masked(corpus: Corpus) -> set[str]:
    """Return the prefixes of the data sets, also of data.validation, that have a loss mask."""
    validation = [samples.dataset for samples in corpus.validation.values()]
    datasets = [*corpus.datasets, *validation]
    return {str(dataset.prefix) for dataset in datasets if dataset.has_mask}


def _require_same_masks(corpus: Corpus, masked: set[str]) -> None:
    """Raise UserError unless this rank has the loss masks of the data sets `masked`, which rank 0
    has, and no other: it would count other tokens."""
    here = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
    problems = list[Problem]()
    for prefix in sorted(masked ^ _masked(corpus)):
        readers = ("rank 0", here) if prefix in masked else (here, "rank 0")
        mask = with_suffix(path_of(prefix), LOSS_MASK)
        reader = readers[0]
        other = readers[1]
        problems.append(
            Problem.of("training.loss_mask_differs", mask=mask, reader=reader, other=other)
        )
    if problems:
        raise UserError(*problems)


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


def _tokenizer_here(name: str) -> Path:
    """Return the path of a tokenizer file: of one at a URL that of this machine's own copy, or its
    URL if it is not there."""
    if not is_url(name):
        return Path(name)
    prefix = path_of(name.removesuffix(TOKENIZER))
    return file_here(prefix, TOKENIZER)


def _missing_files(required: Sequence[Path]) -> list[Path]:
    """Return the files that are not there.

    On another host than that of rank 0, which has just named or made them, a network filesystem may
    show them late.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_one_host = ranks <= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    wait_seconds = 0.0 if on_one_host else NFS_SECONDS
    deadline = time.monotonic() + wait_seconds
    # a URL is one without a copy
    while missing := [path for path in required if is_remote(path) or not path.is_file()]:
        if time.monotonic() >= deadline or any(map(is_remote, missing)):
            return missing
        for folder in {path.parent for path in missing}:
            with suppress(OSError):
                os.listdir(folder)  # asks the server again
        time.sleep(POLL_SECONDS)
    return []
