"""The end of a run that hangs or fails, and the record that each rank leaves of what it was doing.

A record is a JSON file in the folder of the run, which `megaprec diagnose` reads. The next run in
the folder puts it aside, for `diagnose` to read until a later end leaves records. The cause of a
hang is printed once, last.
"""

import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megaprec.comm.waiting import noted
from megaprec.diagnose.position import Position
from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.tokens.files import write_whole
from megaprec.torch_private import transfers_under_way
from parallel.hangs.heartbeat import Beat
from parallel.hangs.verdict import HangVerdict
from parallel.hangs.watchdog import Watchdog, kill_silent
from tools.journal.records import STRAGGLER, no_run
from tools.training.ends import ON_PURPOSE, RankHangs
from tools.training.launched import is_local_rank, lost_connection
from tools.training.stopping import note_failure

LEFT = "left, because of that"  # the end of a rank that leaves because others hang
FOLDER = "last_end"  # of the records, in the run folder
EARLIER = "earlier_end"  # of those of an end after which the run began again
MAX_RANKS = 1_000_000  # of a run, so that a damaged record cannot ask for endless lines
WRITE_SECONDS = 3.0  # for writing a record; the filesystem may be what hangs


class EndRecord(BaseModel):
    """The end of a run as one rank saw it.

    rank: the position of the rank that wrote the record. ranks: number of ranks of the run.
    ended: why it ended. verdict: the cause of a hang, empty if there was none. culprits: ranks that
    hang, or the rank itself if it failed. others: the last known positions of other ranks.
    """

    model_config = ConfigDict(extra="forbid")

    rank: Beat
    ranks: int = Field(gt=0, le=MAX_RANKS)
    ended: str
    verdict: str = ""
    culprits: tuple[int, ...] = ()
    others: tuple[Beat, ...] = ()

    @model_validator(mode="after")
    def _require_ranks(self) -> "EndRecord":
        """Raise ValueError if the record names a rank that the run does not have."""
        named_ranks = [self.rank.rank, *self.culprits, *(beat.rank for beat in self.others)]
        if not all(0 <= rank < self.ranks for rank in named_ranks):
            raise ValueError(f"it names a rank that is not one of {self.ranks}")
        return self


def write_record(folder: Path, record: EndRecord) -> None:
    """Write a record into the run folder, and over NCCL what its groups have not finished, unless
    that fails or takes long: the cause must be told in any case.
    """
    number = f"{record.rank.rank:05d}"

    def write() -> None:
        with suppress(OSError, RuntimeError):
            file = folder / FOLDER / f"rank-{number}.json"
            write_whole(file, record.model_dump_json().encode())
            # last: who asks NCCL may wait for it
            if transfers := transfers_under_way():
                write_whole(folder / FOLDER / f"nccl-{number}.json", transfers)

    # A thread can be left behind; the main one must go on.
    writer = Thread(target=write, daemon=True)
    writer.start()
    writer.join(WRITE_SECONDS)


def put_aside_records(folder: Path) -> None:
    """Put the records of an earlier end of the run in `folder` aside, in place of older ones."""
    if not (folder / FOLDER).is_dir():
        return
    with suppress(OSError):
        shutil.rmtree(folder / EARLIER, ignore_errors=True)
        os.replace(folder / FOLDER, folder / EARLIER)


def read_records(folder: Path) -> Sequence[EndRecord]:
    """Return the records of the run in `folder`, by rank. Raises UserError if there is none, or one
    is damaged.
    """
    if records := _read_records(folder / FOLDER):
        return records
    if not folder.is_dir():
        raise UserError(no_run(folder))
    raise UserError.of("training.no_end_record", folder=folder)


def read_earlier_records(folder: Path) -> Sequence[EndRecord]:
    """Return the records of an end after which the run in `folder` began again, by rank; none if it
    has had no such end, or one of its own since. Raises UserError for a damaged one."""
    if (folder / FOLDER).is_dir():
        return []
    return _read_records(folder / EARLIER)


def _read_records(folder: Path) -> Sequence[EndRecord]:
    """Return the records in a folder, by rank. Raises UserError for a damaged one."""
    records = [_read_record(file) for file in sorted(folder.glob("rank-*.json"))]
    return sorted(records, key=lambda record: record.rank.rank)


def _read_record(file: Path) -> EndRecord:
    """Return the record in a file. Raises UserError if it cannot be read or is damaged."""
    try:
        return EndRecord.model_validate_json(read_whole(file))
    except OSError as error:
        raise UserError.of(
            "training.end_record_unreadable", file=file, reason=error.strerror
        ) from error
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UserError.of("training.end_record_damaged", file=file, problem=problem) from error


@contextmanager
def watching(
    folder: Path, store: dist.Store, position: Position, timeout: float, peers: int
) -> Iterator[Watchdog]:
    """Within the context a watchdog watches this rank, and ends the process if the run hangs.

    folder: of the run. store: the ranks' store. timeout: `parallel.timeout`. peers: ranks of a
    stage. If this rank fails, its record is written; if it failed because it lost its connection to
    another rank, it leaves with that rank's verdict.
    """
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()

    def leave(verdict: HangVerdict) -> None:
        _leave(folder, num_ranks, verdict, watchdog.own_beat())

    position.share()
    watchdog = Watchdog(
        store=store,
        rank=rank,
        size=num_ranks,
        position=position,
        timeout=timeout,
        leave=leave,
        peers=peers,
    )
    watchdog.start()
    try:
        with noted(position.waits):
            yield watchdog
    except ON_PURPOSE:
        raise
    except Exception as error:
        watchdog.error = error
        if num_ranks > 1:
            # The launcher ends all ranks by SIGTERM; this one is leaving already.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if lost_connection(str(error)):
            # The rank that is gone or hangs has its own reason: this one is no culprit.
            # A launcher tells which rank is gone; without one the watchdog looks for it.
            watchdog.lost_connection(search="TORCHELASTIC_RUN_ID" not in os.environ)
            reason = "lost the connection to another rank"
            _record_end(folder, watchdog, num_ranks, reason, culprits=())
            raise
        reason = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        _record_end(folder, watchdog, num_ranks, reason, culprits=(rank,))
        if not is_local_rank():
            # A local launcher ends the other ranks and prints the reason; without one they must be
            # told.
            watchdog.failed(reason)
        raise
    finally:
        watchdog.stop()


def _record_end(
    folder: Path,
    watchdog: Watchdog,
    num_ranks: int,
    reason: str,
    culprits: tuple[int, ...],
) -> None:
    """Write the record of this rank, which an error ends. culprits: itself, or none if the error is
    that another rank is gone."""
    record = EndRecord(
        rank=watchdog.own_beat(),
        ranks=num_ranks,
        ended=reason,
        culprits=culprits,
        others=watchdog.others(),
    )
    write_record(folder, record)


def print_waiting(watchdog: Watchdog, seconds: float) -> None:
    """Print what this rank waits for, during the preparation of the data: once on each machine."""
    if watchdog.first_beat and _speaks_for_machine(watchdog.rank):
        reason = f"waits for rank 0 on {watchdog.first_beat.host}, which prepares the data"
        print(
            f"rank {watchdog.rank} on {socket.gethostname()} {reason}: {seconds:.0f} s so far",
            file=sys.stderr,
            flush=True,
        )


def straggler_events(watchdog: Watchdog) -> list[dict[str, Any]]:
    """Return events, new since the last call, about ranks that are slow or no longer are."""
    events = list[dict[str, Any]]()
    for straggler, line in watchdog.noticed():
        event: dict[str, Any] = {
            "event": STRAGGLER,
            "step": straggler.step,
            "rank": straggler.rank,
            "slow": bool(straggler.since),
        }
        if straggler.since:
            event["since"] = straggler.since
        event |= {"factor": round(straggler.factor, 2), "said": line}
        events.append(event)
    return events


def _speaks_for_machine(rank: int) -> bool:
    """Return True for one rank of each machine, of those that can wait for rank 0."""
    return rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0"


def _leave(folder: Path, ranks: int, verdict: HangVerdict, own_beat: Beat) -> None:
    """Leave a record, kill the stopped ranks of this machine, tell the cause, and end here."""
    try:
        record = EndRecord(
            rank=own_beat,
            ranks=ranks,
            ended=LEFT,
            verdict=verdict.reason,
            culprits=verdict.culprits,
            others=tuple(beat for beat in verdict.beats if beat.rank != own_beat.rank),
        )
        write_record(folder, record)
        try:  # `note_failure` takes the traceback of the exception that is handled
            raise RankHangs(verdict.reason)
        except RankHangs as hang:
            note_failure(hang)
        kill_silent(verdict)  # their launcher would wait for them
        if not is_local_rank() and own_beat.rank == _speaker(verdict, own_beat):
            print(verdict.reason, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Not sys.exit: the main thread hangs, and no handler of exit may wait for it.
        os._exit(1)


def _speaker(verdict: HangVerdict, own_beat: Beat) -> int:
    """Return the rank that prints the cause: the lowest that does not hang, of those that can be
    reached.
    """
    if len(verdict.beats) == 1:  # about the store; each rank has found it out alone
        return own_beat.rank if _speaks_for_machine(own_beat.rank) else -1
    hanging = {*verdict.silent, *verdict.culprits}
    healthy_ranks = [beat.rank for beat in verdict.beats if beat.rank not in hanging]
    return min(healthy_ranks, default=own_beat.rank)
