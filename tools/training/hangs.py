"""Ending a run that hangs: each rank leaves a record of what it was doing, and the cause is printed
once, last.

`megaprec diagnose` reads the records (`end_records.py`).
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaprec.comm.waiting import noted
from megaprec.diagnose.position import Position
from parallel.hangs.heartbeat import Beat
from parallel.hangs.verdict import Verdict
from parallel.hangs.watchdog import Watchdog, kill_silent
from tools.training.end_records import EndRecord, write_record
from tools.training.endings import ON_PURPOSE
from tools.training.launch import RankHangs, is_local_rank, lost_connection, note_failure

LEFT = "left, because of that"


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
    size = dist.get_world_size()

    def leave(verdict: Verdict) -> None:
        _leave(folder, size, verdict, watchdog.me())

    position.share()
    watchdog = Watchdog(store, rank, size, position, timeout, leave, peers)
    watchdog.start()
    try:
        with noted(position.waits):
            yield watchdog
    except ON_PURPOSE:
        raise
    except Exception as error:
        if size > 1:
            # the launcher's, while this rank leaves by itself
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if lost_connection(str(error)):
            # The rank that is gone or hangs has its own reason: this one is no culprit.
            watchdog.lost_connection(search="TORCHELASTIC_RUN_ID" not in os.environ)
            reason = "lost the connection to another rank"
            _record_end(folder, watchdog, size, reason, ())
            raise
        reason = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        _record_end(folder, watchdog, size, reason, (rank,))
        if not is_local_rank():
            watchdog.failed(reason)
        raise
    finally:
        watchdog.stop()


def _record_end(
    folder: Path, watchdog: Watchdog, size: int, reason: str, culprits: tuple[int, ...]
) -> None:
    """Write the record of this rank, which has failed."""
    record = EndRecord(
        rank=watchdog.me(),
        ranks=size,
        ended=reason,
        culprits=culprits,
        others=watchdog.others(),
    )
    write_record(folder, record)


def print_waiting(watchdog: Watchdog, seconds: float) -> None:
    """Print what this rank waits for, during the preparation of the data: once on each machine."""
    if watchdog.first and _speaks_for_machine(watchdog.rank):
        reason = f"waits for rank 0 on {watchdog.first.host}, which prepares the data"
        print(
            f"rank {watchdog.rank} on {socket.gethostname()} {reason}: {seconds:.0f} s so far",
            file=sys.stderr,
            flush=True,
        )


def straggler_events(watchdog: Watchdog) -> list[dict[str, Any]]:
    """Return the lines of events.jsonl about ranks that have become slow, or no longer are.

    Those since the last call.
    """
    events = list[dict[str, Any]]()
    for straggler, line in watchdog.noticed():
        event: dict[str, Any] = {
            "event": "straggler",
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


def _leave(folder: Path, ranks: int, verdict: Verdict, me: Beat) -> None:
    """Leave a record, kill the stopped ranks of this machine, tell the cause, and end here."""
    try:
        record = EndRecord(
            rank=me,
            ranks=ranks,
            ended=LEFT,
            verdict=verdict.reason,
            culprits=verdict.culprits,
            others=tuple(beat for beat in verdict.beats if beat.rank != me.rank),
        )
        write_record(folder, record)
        try:  # `note_failure` takes the traceback of the exception that is handled
            raise RankHangs(verdict.reason)
        except RankHangs as hang:
            note_failure(hang)
        kill_silent(verdict)  # their launcher would wait for them
        if not is_local_rank() and me.rank == _speaker(verdict, me):
            print(verdict.reason, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Not sys.exit: the main thread hangs, and no handler of exit may wait for it.
        os._exit(1)


def _speaker(verdict: Verdict, me: Beat) -> int:
    """Return the rank that prints the cause.

    The lowest that does not hang, of those that can be reached.
    """
    if len(verdict.beats) == 1:  # about the store; each rank has found it out alone
        return me.rank if _speaks_for_machine(me.rank) else -1
    hanging = {*verdict.silent, *verdict.culprits}
    able = [beat.rank for beat in verdict.beats if beat.rank not in hanging]
    return min(able, default=me.rank)
