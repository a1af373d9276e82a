"""The files of a run that the first rank has prepared, opened by all ranks."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import INDEX
from megaprec.errors import Problem, UserError
from megaprec.tokens.copies import file_here
from megaprec.tokens.files import with_suffix
from megaprec.tokens.loss_mask import SUFFIX as LOSS_MASK
from megaprec.tokens.places import is_remote, is_url, path_of
from parallel.described_world import read_number
from tools.config.run_file import RunConfig
from tools.training.blend_place import saved_stretches
from tools.training.corpus import Corpus, identified, open_built, open_validation
from tools.training.data_identity import Identity

# after which NFS shows a new file to other hosts with its default settings (acdirmax)
NFS_SECONDS = 60.0


POLL_SECONDS = 0.5  # between two looks for a file


TOKENIZER = ".model"  # ending of the tokenizer beside a data set


def open_prepared(config: RunConfig, prepared: dict[str, Any]) -> tuple[Corpus, Path | None]:
    """Return the data and the checkpoint that rank 0 named. Raises UserError if this machine lacks
    a file of them.

    prepared: what `prepare` returned on rank 0.
    """
    prefixes = [path_of(prefix) for prefix in prepared["prefixes"]]
    tokenizer = _tokenizer_here(prepared["tokenizer"]) if prepared["tokenizer"] else None
    checkpoint = path_of(prepared["checkpoint"]) if prepared["checkpoint"] else None
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
    if checkpoint and not is_remote(checkpoint):
        required.append(checkpoint / INDEX)
    host = socket.gethostname()
    problems = []
    for path in _missing_files(required):
        problems.append(Problem.of("training.file_not_shared", path=path, host=host))
    if problems:
        raise UserError(*problems)


def masked_prefixes(corpus: Corpus) -> set[str]:
    """Return the prefixes of the data sets, also of data.validation, that have a loss mask."""
    validation = [samples.dataset for samples in corpus.validation.values()]
    datasets = [*corpus.datasets, *validation]
    return {str(dataset.prefix) for dataset in datasets if dataset.has_mask}


def _require_same_masks(corpus: Corpus, masked: set[str]) -> None:
    """Raise UserError unless this rank has the loss masks of the data sets `masked`, which rank 0
    has, and no other: it would count other tokens."""
    here = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
    problems = list[Problem]()
    for prefix in sorted(masked ^ masked_prefixes(corpus)):
        reader, other = ("rank 0", here) if prefix in masked else (here, "rank 0")
        mask = with_suffix(path_of(prefix), LOSS_MASK)
        problems.append(
            Problem.of("training.loss_mask_differs", mask=mask, reader=reader, other=other)
        )
    if problems:
        raise UserError(*problems)


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
    ranks = read_number("WORLD_SIZE", default="1")
    on_one_host = ranks <= read_number("LOCAL_WORLD_SIZE", default=str(ranks))
    wait_seconds = 0.0 if on_one_host else NFS_SECONDS
    deadline = time.monotonic() + wait_seconds
    # A URL here is that of a tokenizer of which this machine has no copy: waiting does not help.
    while missing := [path for path in required if is_remote(path) or not path.is_file()]:
        if time.monotonic() >= deadline or any(map(is_remote, missing)):
            return missing
        for folder in {path.parent for path in missing}:
            with suppress(OSError):
                os.listdir(folder)  # asks the server again
        time.sleep(POLL_SECONDS)
    return []
