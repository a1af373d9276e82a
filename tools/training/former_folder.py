"""The folder that an earlier run with the same run folder has saved its checkpoints in."""

from collections.abc import Iterator
from pathlib import Path

from megaprec.checkpoint.atomic import latest
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_toml, read_text
from megaprec.url_secrets import masked
from tools.config.run_file import RunConfig, checkpoint_folder, run_file_in
from tools.console.toml import toml

DAMAGED = "checkpoint.damaged_newest"  # the error of a checkpoint that is there


def require_no_former_checkpoint(config: RunConfig) -> None:
    """Raise UserError if the run folder has a run that has saved checkpoints elsewhere than in
    checkpoint.folder: a run that begins anew would take its place unasked.

    The run has no checkpoint in checkpoint.folder. A former place that cannot be looked at refuses
    nothing, for the run needs nothing of it: `notes_on_former_places` tells of it.
    """
    for place in _former_places(config):
        newest, _ = _look_into(place, config)
        if newest is not None:
            raise UserError.of(
                "training.former_checkpoint",
                key=f"checkpoint.folder = {toml(config.checkpoint.folder)}",
                path=newest,
                former=f"checkpoint.folder = {toml(place)}",
            )


def notes_on_former_places(config: RunConfig) -> Iterator[str]:
    """Yield a note for each place where a former run of the run folder may have checkpoints, and
    which cannot be looked at."""
    for place in _former_places(config):
        _, reason = _look_into(place, config)
        if reason:
            former = masked(toml(place))
            yield (
                f"a former run of this folder had checkpoint.folder = {former}, which cannot be "
                f"looked at ({reason}): this run begins without it"
            )


def _look_into(place: str, config: RunConfig) -> tuple[Path | None, str]:
    """Return the newest checkpoint of a former place and "", or None and why it is not known if
    there is one. Raises UserError if that checkpoint is damaged.

    place: a value of checkpoint.folder. If it means the folder that the run has now, or holds no
    checkpoint, the answer is None and "".
    """
    try:
        folder = checkpoint_folder(place, Path(config.train.folder))
        if folder == config.checkpoint_folder:
            return None, ""
        return latest(folder), ""
    except UserError as error:
        first = error.problems[0]
        if isinstance(first, Problem) and first.code == DAMAGED:
            raise
        return None, str(first)


def _former_places(config: RunConfig) -> Iterator[str]:
    """Yield the values of checkpoint.folder that an earlier run may have had, each once."""
    yield ""
    run_file = run_file_in(Path(config.train.folder), written_by_run=True)
    if run_file is None:
        return
    try:
        place = parse_toml(read_text(run_file))["checkpoint"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: it is written anew
        return
    if isinstance(place, str) and place:
        yield place
