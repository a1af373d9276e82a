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
from tools.training.launch import RankHangs, lost_connection, note_failure, started_here

LEFT = "left, because of that"


@contextmanager
def watching(
    folder: Path, store: dist.Store, position: Position, timeout: float, peers: int
) -> Iterator[Watchdog]:
    """Within the context this rank is watched by a watchdog, which ends the process if the run
    hangs.

    folder: of the run. store: the ranks' store. timeout: `parallel.timeout`. peers: ranks of a
    stage. If this rank fails, its record is written; if it failed because it lost its connection to
    another rank, it leaves with that rank's verdict.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()

    def leave(verdict: Verdict) -> None:
        _leave(folder, size, verdict, dog.me())

    position.share()
    dog = Watchdog(store, rank, size, position, timeout, leave, peers)
    dog.start()
    try:
        with noted(position.waits):
            yield dog
    except ON_PURPOSE:
        raise
    except Exception as error:
        if size > 1:
            # the launcher's, while this rank leaves by itself
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if lost_connection(str(error)):
            dog.lost_connection(search="TORCHELASTIC_RUN_ID" not in os.environ)
            me = dog.me()
            ended = "lost the connection to another rank"
            write_record(folder, EndRecord(rank=me, ranks=size, ended=ended, others=dog.others()))
            raise
        reason = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        me = dog.me()
        others = dog.others()
        write_record(
            folder, EndRecord(rank=me, ranks=size, ended=reason, culprits=(rank,), others=others)
        )
        if not started_here():
            dog.failed(reason)
        raise
    finally:
        dog.stop()


def tell_waiting(dog: Watchdog, seconds: float) -> None:
    """Print what this rank waits for, during the preparation of the data: once on each machine."""
    if dog.first and _first_here(dog.rank):
        what = f"waits for rank 0 on {dog.first.host}, which prepares the data"
        print(
            f"rank {dog.rank} on {socket.gethostname()} {what}: {seconds:.0f} s so far",
            file=sys.stderr,
            flush=True,
        )


def straggler_events(dog: Watchdog) -> list[dict[str, Any]]:
    """Return the lines of events.jsonl about ranks that have become slow, or are so no longer,
    since the last call."""
    events = []
    for found, line in dog.noticed():
        since = {"since": found.since} if found.since else {}
        head = {
            "event": "straggler",
            "step": found.step,
            "rank": found.rank,
            "slow": bool(found.since),
        }
        events.append({**head, **since, "factor": round(found.factor, 2), "said": line})
    return events


def _first_here(rank: int) -> bool:
    """Return True for one rank of each machine, of those that can wait for rank 0."""
    return rank == 1 or os.environ.get("LOCAL_RANK", "0") == "0"


def _leave(folder: Path, ranks: int, verdict: Verdict, me: Beat) -> None:
    """Leave a record, kill the ranks on this machine that are stopped, tell the cause, and end this
    process."""
    try:
        others = tuple(one for one in verdict.beats if one.rank != me.rank)
        said = {"verdict": verdict.reason, "culprits": verdict.culprits, "others": others}
        write_record(folder, EndRecord(rank=me, ranks=ranks, ended=LEFT, **said))
        try:
            raise RankHangs(verdict.reason)
        except RankHangs as hang:
            note_failure(hang)
        kill_silent(verdict)
        if not started_here() and me.rank == _speaker(verdict, me):
            print(verdict.reason, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(1)


def _speaker(verdict: Verdict, me: Beat) -> int:
    """Return the rank that prints the cause: the lowest that does not hang, of those that can be
    reached."""
    if len(verdict.beats) == 1:  # about the store; each rank has found it out alone
        return me.rank if _first_here(me.rank) else -1
    there = [one.rank for one in verdict.beats if one.rank not in verdict.silent]
    return min((rank for rank in there if rank not in verdict.culprits), default=me.rank)
