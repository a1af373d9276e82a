"""Clocks: each host's against rank 0's, and against its own files.

Rank 0 is asked for the time, and half of the way there and back is the error of the answer. Of
several answers the one with the shortest way counts. Wrong clocks do no harm to numbers, but logs,
records of failures and caches of data are compared by their times.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tools.verify.doctor.finding import Finding, ok, wrong
from tools.verify.doctor.questions import Answer, RankContext

TOLERANCE = 1.0  # seconds that clocks may differ
READINGS = 8  # number of times that each host asks
REMEDY = "run an NTP client there (chronyc tracking, timedatectl)"


def wall() -> float:
    """Return the seconds since 1970 by this host's clock."""
    return time.time()


def readings(context: RankContext) -> Answer:
    """Return how far this host's clock is from rank 0's and from the times of its files.

    In seconds: "offset" with its "error", and "behind_files" of the time of installed files.
    """
    return {
        "rank": context.rank,
        "host": context.host,
        "behind_files": max(0.0, Path(torch.__file__).stat().st_mtime - wall()),
        **_compare_with_first(context),
    }


def _compare_with_first(context: RankContext) -> dict[str, float]:
    """Return the offset of this host's clock from rank 0's, on the first rank of each other host.

    {"offset": seconds ahead of rank 0's clock, "error": ...}; nothing on other ranks. Collective
    over the world.
    """
    other_hosts = context.first_ranks()[1:]
    if context.rank == 0:
        for rank in other_hosts:
            _serve(rank)
        return {}
    if context.rank in other_hosts:
        return _measure_offset()
    return {}


def _serve(rank: int) -> None:
    """Answer a rank's questions for the time."""
    for _ in range(READINGS):
        dist.recv(torch.zeros(1, dtype=torch.float64), rank)
        dist.send(torch.tensor([wall()], dtype=torch.float64), rank)


def _measure_offset() -> dict[str, float]:
    """Ask rank 0 for the time; return the offset of the quickest answer and its error, seconds."""
    measured = list[tuple[float, float]]()
    for _ in range(READINGS):
        answer = torch.zeros(1, dtype=torch.float64)
        before = wall()
        start = time.monotonic()  # the wall clock may be set meanwhile
        dist.send(torch.zeros(1, dtype=torch.float64), 0)
        dist.recv(answer, 0)
        # Rank 0 has read its clock half of the way, give or take the other half.
        one_way = (time.monotonic() - start) / 2
        measured.append((one_way, before + one_way - float(answer)))
    # the quickest answer, which has the smallest error
    error_seconds, offset_seconds = min(measured)
    return {"offset": offset_seconds, "error": error_seconds}


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about clocks."""
    problems = [
        *_judge_offsets(answers),
        *_judge_file_times(answers),
    ]
    yield from problems or [_summarize(answers)]


def _judge_offsets(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a finding for each rank whose clock differs from rank 0's."""
    for answer in answers:
        offset_seconds = answer.get("offset", 0.0)
        error_seconds = answer.get("error", 0.0)
        if abs(offset_seconds) - error_seconds > TOLERANCE:  # more than the measurement can explain
            direction = "ahead of" if offset_seconds > 0 else "behind"
            message = (
                f"the clock of {answer['host']} is {abs(offset_seconds):.1f} s {direction} "
                f"that of {answers[0]['host']}"
            )
            yield wrong("clocks", message, REMEDY, offset_s=offset_seconds, error_s=error_seconds)


def _judge_file_times(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a finding for each host whose clock is behind the time of its own files."""
    behind: dict[str, float] = {}  # by host: its ranks have one clock
    for answer in answers:
        if answer["behind_files"] > TOLERANCE:
            behind[answer["host"]] = answer["behind_files"]
    for host, seconds in behind.items():
        message = f"the clock of {host} is {seconds:.0f} s behind the time of installed files"
        yield wrong("clocks", message, REMEDY)


def _summarize(answers: Sequence[Answer]) -> Finding:
    """Return the finding of clocks without problems, with the largest offset."""
    compared = [answer for answer in answers if "offset" in answer]
    if not compared:
        return ok("clocks", "one host only: its clock is not behind its files")
    worst_answer = max(compared, key=lambda answer: abs(answer["offset"]))
    milliseconds = max(abs(worst_answer["offset"]), worst_answer["error"]) * 1e3
    message = f"{len(compared) + 1} hosts agree within {milliseconds:.1f} ms"
    return ok("clocks", message, offset_s=worst_answer["offset"], error_s=worst_answer["error"])
