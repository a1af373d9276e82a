"""Clocks: each host's against rank 0's, against its own files, and against time that passes.

Rank 0 is asked for the time, and half of the way there and back is the error of the answer. Of
several answers the one with the shortest way counts. Wrong clocks do no harm to numbers, but logs,
records of failures and caches of data are compared by their times.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.doctor.finding import Finding, ok, wrong
from tools.doctor.place import Place

MOST = 1.0  # seconds that clocks may differ
ASKED = 8  # number of times that each host asks
STEP = 0.2  # seconds between two looks at both clocks of this process
REMEDY = "run an NTP client there (chronyc tracking, timedatectl)"


def wall() -> float:
    """Return the seconds since 1970 by this host's clock."""
    return time.time()


def readings(place: Place) -> dict[str, Any]:
    """Return how far this host's clock is from rank 0's, from that of its installed files, and from
    steady time."""
    return {
        "rank": place.rank,
        "host": place.host,
        "behind_files": max(0.0, Path(torch.__file__).stat().st_mtime - wall()),
        "jumped": _jumped(),
        **_against_first(place),
    }


def _jumped() -> float:
    """Return by how many seconds the clock was set while this function waited."""
    before = _ahead()
    time.sleep(STEP)
    return _ahead() - before


def _ahead() -> float:
    """Return how far the wall clock is ahead of steady time: of several looks at both the quickest
    one counts."""
    looks = list[tuple[float, float]]()
    for _ in range(ASKED):
        start = time.monotonic()
        now = wall()
        end = time.monotonic()
        looks.append((end - start, now - (start + end) / 2))
    return min(looks)[1]


def _against_first(place: Place) -> dict[str, float]:
    """Return {"offset": seconds ahead of rank 0's clock, "error": ...} on the first rank of each
    other host."""
    firsts = place.firsts()[1:]
    if place.rank == 0:
        for rank in firsts:
            _serve(rank)
        return {}
    return _ask() if place.rank in firsts else {}


def _serve(rank: int) -> None:
    """Answer a rank's questions for the time."""
    for _ in range(ASKED):
        dist.recv(torch.zeros(1, dtype=torch.float64), rank)
        dist.send(torch.tensor([wall()], dtype=torch.float64), rank)


def _ask() -> dict[str, float]:
    found = list[tuple[float, float]]()
    for _ in range(ASKED):
        answer = torch.zeros(1, dtype=torch.float64)
        before = wall()
        start = time.monotonic()
        dist.send(torch.zeros(1, dtype=torch.float64), 0)
        dist.recv(answer, 0)
        way = time.monotonic() - start
        found.append((way / 2, before + way / 2 - float(answer)))
    error, offset = min(found)
    return {"offset": offset, "error": error}


def judge(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the findings about clocks."""
    off = [one for one in answers if abs(one.get("offset", 0.0)) - one.get("error", 0.0) > MOST]
    behind = {one["host"]: one for one in answers if one["behind_files"] > MOST}
    jumped = {one["host"]: one for one in answers if abs(one["jumped"]) > MOST}
    for one in off:
        way = "ahead of" if one["offset"] > 0 else "behind"
        said = (
            f"the clock of {one['host']} is {abs(one['offset']):.1f} s {way} that of "
            f"{answers[0]['host']}"
        )
        yield wrong("clocks", said, REMEDY, offset_s=one["offset"], error_s=one["error"])
    for host, one in behind.items():
        said = (
            f"the clock of {host} is {one['behind_files']:.0f} s behind the time of installed files"
        )
        yield wrong("clocks", said, REMEDY)
    for host, one in jumped.items():
        yield wrong(
            "clocks", f"the clock of {host} was set by {one['jumped']:+.1f} s meanwhile", REMEDY
        )
    if not (off or behind or jumped):
        yield _well(answers)


def _well(answers: Sequence[dict[str, Any]]) -> Finding:
    asked = [one for one in answers if "offset" in one]
    if not asked:
        return ok("clocks", "one host only: its clock runs steadily and is not behind its files")
    worst = max(asked, key=lambda one: abs(one["offset"]))
    said = (
        f"{len(asked) + 1} hosts agree within "
        f"{max(abs(worst['offset']), worst['error']) * 1e3:.1f} ms"
    )
    return ok("clocks", said, offset_s=worst["offset"], error_s=worst["error"])
