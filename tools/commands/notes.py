"""Notes: remarks on how a configuration was understood that the user should know. `--strict`
refuses them."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megaprec.errors import UserError
from tools.config.run_file import RunConfig, is_resolved
from tools.training.launched import prints_own_failure


def tell_notes(notes: Iterable[str], strict: bool) -> None:
    """Print the notes on stderr, on one rank. Raises UserError instead if `strict`."""
    lines = [f"note: {note}" for note in notes]
    # Refused with all notes at once, so that one attempt shows all that is to be changed.
    if strict and lines:
        raise UserError(*(f"{line} (--strict)" for line in lines))
    if prints_own_failure():
        for line in lines:
            print(line, file=sys.stderr)


def moved_notes(file: str, config: RunConfig) -> Iterator[str]:
    """Yield a note if the run that saved `file` was moved or copied, and this is another place.

    file: the run file that lies beside the run's checkpoints.

    A folder that the command line names needs no note: the user has just chosen it.
    """
    folder = Path(file).parent
    run_folder = config.train.folder
    if config.origin("train.folder") == "command line":
        return
    if folder.resolve() == Path(run_folder).resolve():
        return
    if is_resolved(Path(file)) and (folder / "checkpoints").is_dir():
        yield (
            f'train.folder = "{run_folder}", as when {file} was saved, so this run goes on or '
            f"begins there and leaves {folder} as it is: train.folder={folder} goes on with the "
            f"run in {folder}"
        )
