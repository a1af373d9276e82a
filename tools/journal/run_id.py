"""The id of a run in the folder of a tracker, by which a resumed run goes on under that of the run
before."""

import re
import uuid
from pathlib import Path

from megaprec.durable import file_error, put_text
from megaprec.errors import UserError

_ID = re.compile(r"[\w-]+")


def saved_id(path: Path, step: int) -> str:
    """Return the id that the file `path` has of a run that resumes from `step`; empty for a new run
    (step = 0), or if there is none. Raises UserError if the file cannot be read."""
    try:
        if step and path.is_file():
            saved = path.read_text(encoding="utf-8").strip()
            return saved if _ID.fullmatch(saved) else ""
    except OSError as error:
        raise UserError(file_error(error)) from error
    return ""


def save_id(path: Path, run_id: str) -> None:
    """Keep the id of a run in the file `path`. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(exist_ok=True)
        put_text(path, f"{run_id}\n")
    except OSError as error:
        raise UserError(file_error(error)) from error


def run_id_at(path: Path, step: int) -> str:
    """Return the id of the run in the file `path`, a new one for a run that begins."""
    if saved := saved_id(path, step):
        return saved
    new_id = uuid.uuid4().hex
    save_id(path, new_id)
    return new_id
