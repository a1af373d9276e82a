"""The folder that an earlier run with the same run folder has saved its checkpoints in."""

from collections.abc import Iterator
from pathlib import Path

from megaprec.checkpoint.atomic import latest
from megaprec.errors import UserError
from megaprec.parsing import parse_toml, read_text
from tools.config.run_file import RunConfig, checkpoint_folder, run_file_in
from tools.console.toml import toml


def require_no_former_checkpoint(config: RunConfig) -> None:
    """Raise UserError if the run folder has a run that has saved checkpoints elsewhere than in
    checkpoint.folder: a run that begins anew would take its place unasked.

    The run has no checkpoint in checkpoint.folder.
    """
    for place in dict.fromkeys(_former_places(config)):
        folder = checkpoint_folder(place, Path(config.train.folder))
        if folder == config.checkpoint_folder:
            continue
        newest = latest(folder)
        if newest is not None:
            raise UserError.of(
                "training.former_checkpoint",
                key=f"checkpoint.folder = {toml(config.checkpoint.folder)}",
                path=newest,
                former=f"checkpoint.folder = {toml(place)}",
            )


def _former_places(config: RunConfig) -> Iterator[str]:
    """Yield the values of checkpoint.folder that an earlier run may have had."""
    yield ""
    run_file = run_file_in(Path(config.train.folder), written_by_run=True)
    if run_file is None:
        return
    try:
        place = parse_toml(read_text(run_file))["checkpoint"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: it is written anew
        return
    if isinstance(place, str):
        yield place
