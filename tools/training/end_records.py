"""Records of a run's abnormal end: a JSON file for each rank that could write one, in the folder of
the run.

They are removed when the next run in the folder begins.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megaprec.data.files import write_whole
from megaprec.durable import read_whole
from megaprec.errors import UserError
from parallel.hangs.heartbeat import Beat

FOLDER = "last_end"
MOST_RANKS = 1_000_000  # of a run, so that a damaged record cannot ask for endless lines
WRITE_SECONDS = 3.0  # for writing a record; the filesystem may be what hangs


class EndRecord(BaseModel):
    """The end of a run as one rank saw it.

    rank: the position of the rank that wrote the record. ranks: number of ranks of the run.
    ended: why it ended. verdict: the cause of a hang, empty if there was none. culprits: ranks that
    hang, or the rank itself if it failed. others: the last known positions of other ranks.
    """

    model_config = ConfigDict(extra="forbid")

    rank: Beat
    ranks: int = Field(gt=0, le=MOST_RANKS)
    ended: str
    verdict: str = ""
    culprits: tuple[int, ...] = ()
    others: tuple[Beat, ...] = ()

    @model_validator(mode="after")
    def _require_ranks(self) -> "EndRecord":
        named_ranks = [self.rank.rank, *self.culprits, *(beat.rank for beat in self.others)]
        if not all(0 <= rank < self.ranks for rank in named_ranks):
            raise ValueError(f"it names a rank that is not one of {self.ranks}")
        return self


def write_record(folder: Path, record: EndRecord) -> None:
    """Write a record into the run folder, unless that fails or takes long.

    The cause must be told in any case.
    """

    file = folder / FOLDER / f"rank-{record.rank.rank:05d}.json"

    def write() -> None:
        with suppress(OSError):
            write_whole(file, record.model_dump_json().encode())

    writing = Thread(target=write, daemon=True)
    writing.start()
    writing.join(WRITE_SECONDS)


def forget_records(folder: Path) -> None:
    """Remove the records of an earlier end of the run in `folder`."""
    with suppress(OSError):
        shutil.rmtree(folder / FOLDER)


def read_records(folder: Path) -> Sequence[EndRecord]:
    """Return the records of the run in `folder`, by rank.

    Raises UserError if there is none, or one is damaged.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError.of("training.not_a_run", folder=folder, problem=problem)
    records = [_read_record(file) for file in sorted((folder / FOLDER).glob("rank-*.json"))]
    if not records:
        raise UserError.of("training.no_end_record", folder=folder)
    return sorted(records, key=lambda record: record.rank.rank)


def _read_record(file: Path) -> EndRecord:
    try:
        return EndRecord.model_validate_json(read_whole(file))
    except OSError as error:
        raise UserError.of(
            "training.end_record_unreadable", file=file, strerror=error.strerror
        ) from error
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UserError.of("training.end_record_damaged", file=file, problem=problem) from error
