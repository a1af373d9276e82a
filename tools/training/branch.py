"""The checkpoint that a run goes on from: the newest of its own folder, or, before it has one, that
of train.branch_from, a checkpoint of another run, which is only read.
"""

from pathlib import Path

from megaprec.checkpoint.atomic import checkpoint_at
from megaprec.checkpoint.integrity import require_intact
from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem, UserError
from megaprec.tokens.places import is_remote, path_of
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.parts import optional_parts
from tools.saved.train_state import open_newest_checkpoint


def open_start(config: RunConfig) -> Store | None:
    """Open the checkpoint that the run goes on from; None if it begins with step 1.

    Raises UserError for a damaged one, or if there is none in train.branch_from. Files of tensors
    are not read.
    """
    own = open_newest_checkpoint(config.checkpoint_folder)
    if own is not None or not config.train.branch_from:
        return own
    return _open_origin(config)


def branch_point(config: RunConfig) -> Path | None:
    """Return the checkpoint of train.branch_from, None if the key is empty. Raises UserError if
    there is none."""
    return _open_origin(config).path if config.train.branch_from else None


def _open_origin(config: RunConfig) -> Store:
    """Open the checkpoint of train.branch_from. Raises UserError with one problem. Its files of
    tensors are not checked here: loading does that."""
    folder = path_of(config.train.branch_from)
    try:
        path = checkpoint_at(folder)
        if path is None:
            raise UserError.of("training.no_branch_checkpoint", folder=folder)
        checkpoint = Store(path)
        others = [name for name in checkpoint.digests if not name.endswith(".safetensors")]
        require_intact(checkpoint, others)
    except UserError as error:
        raise _of_key(config, error) from error
    return checkpoint


def is_branch(config: RunConfig, checkpoint: Path) -> bool:
    """Return True if a checkpoint that the run goes on from is one of another folder."""
    folder = checkpoint.parent
    own_folder = config.checkpoint_folder
    if is_remote(folder) or is_remote(own_folder):
        return str(folder) != str(own_folder)
    return folder.resolve() != own_folder.resolve()


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint lies in, as an absolute path."""
    folder = checkpoint.parent if is_remote(checkpoint) else checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


def require_origin_intact(config: RunConfig) -> None:
    """Raise UserError if the run is to branch, and a file of the checkpoint is not what was saved.

    Reads the whole checkpoint.
    """
    checkpoint = open_start(config)
    if checkpoint is None or not is_branch(config, checkpoint.path):
        return
    try:
        require_intact(checkpoint, checkpoint.digests)
    except UserError as error:
        raise _of_key(config, error) from error


def _of_key(config: RunConfig, error: UserError) -> UserError:
    """Return the error of a checkpoint with "train.branch_from" and its value before each problem,
    and a hint if the value is a path from another working directory."""
    value = config.train.branch_from
    prefix = f"train.branch_from = {toml(value)}: "
    hint = optional_parts.working_directory_hint(config.origin("train.branch_from"), value)
    problems = map(_for_an_origin, error.problems)
    return UserError(*(problem.within(prefix, hint) for problem in problems))


def _for_an_origin(problem: Problem) -> Problem:
    """Return a problem of a checkpoint with another remedy: a damaged one of the run's own may be
    moved away, but one that it only reads would then be missing."""
    if "remedy" not in problem.fields:
        return problem
    remedy = "restore it, or give another"
    sentence = problem.replace(problem.fields["remedy"], remedy)
    return Problem(sentence, problem.code, problem.fields | {"remedy": remedy})
