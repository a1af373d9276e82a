"""Questions that every rank answers, and the rank that does not.

A check has a part for each rank and a judge on rank 0. Each part runs in a thread with a time
limit, and its answer goes through the store. So a rank that hangs in a message, in a system call or
altogether costs its time limit and is named; the others go on. After a rank has not answered, no
check is begun in which ranks wait for each other.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from tools.doctor.finding import Finding, not_tried, wrong
from tools.doctor.place import Place, named

GRACE = 5.0  # seconds that an answer may be later than its rank's own limit
PATIENCE = 60.0  # seconds that a rank waits for rank 0 to begin the next check
LOST = "look at that host: the process was killed or stopped, or its network is down"
Judge = Callable[[Sequence[Any]], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A question. part: what each rank does and answers, a JSON value. judge: findings from the
    answers of all ranks.

    together: ranks wait for each other in it. seconds: time limit of the part. needed: it counts if
        it is not tried.
    """

    name: str
    part: Callable[[Place], Any]
    judge: Judge
    together: bool = False
    seconds: float = 20.0
    needed: bool = True


def conduct(checks: Sequence[Check], place: Place) -> tuple[list[Finding], bool]:
    """Carry out the checks on this rank. Return the findings (on rank 0; none elsewhere) and if all
    ranks answered."""
    findings = list[Finding]()
    lost = ""
    for number, check in enumerate(checks):
        lost = _begun(place, number, lost)
        if lost and check.together:
            if place.rank == 0:
                findings.append(not_tried(check.name, lost, check.needed))
            continue
        place.tell(
            f"{number}/{place.rank}",
            {"host": place.host, **within(check.seconds, check.part, place)},
        )
        if place.rank == 0:
            answers = _collected(place, number, check.seconds)
            some, lost_now = _judged(check, place, answers)
            findings = [*findings, *some]
            lost = lost or lost_now
    return findings, not lost


def _begun(place: Place, number: int, lost: str) -> str:
    """Agree with rank 0 on beginning a check; return why ranks must not wait for each other, "" if
    they may."""
    if place.rank == 0:
        place.tell(f"{number}/begin", lost)
        return lost
    return place.told(f"{number}/begin", PATIENCE)


def within(seconds: float, part: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return {"value": ...}, {"error": ...} if the part failed, or {"late": True} if it was not
    done in time."""
    answer: dict[str, Any] = {}

    def answering() -> None:
        try:
            answer["value"] = part(*arguments)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]

    thread = Thread(target=answering, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer or {"late": True}


def _collected(place: Place, number: int, seconds: float) -> dict[int, dict[str, Any]]:
    """Return the answers that come before the time limit, by rank."""
    answers = dict[int, dict[str, Any]]()
    deadline = time.monotonic() + seconds + GRACE
    for rank in range(place.size):
        try:
            answers[rank] = place.told(f"{number}/{rank}", max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            continue
    return answers


def _judged(
    check: Check, place: Place, answers: Mapping[int, dict[str, Any]]
) -> tuple[list[Finding], str]:
    """Return the findings of a check, and why later checks must not wait for a rank, "" if they
    may."""
    silent = {rank: _host(place, rank) for rank in range(place.size) if rank not in answers}
    late = {rank: one["host"] for rank, one in answers.items() if "late" in one}
    if silent or late:
        said = f"{named(silent or late)} did not answer within {check.seconds:g} s"
        return [wrong(check.name, said, LOST)], said
    if number := [rank for rank, one in answers.items() if "error" in one]:
        first = answers[number[0]]
        said = f"{named({rank: answers[rank]['host'] for rank in number})}: {first['error']}"
        return [wrong(check.name, said, "look at that host, and run this command there alone")], ""
    if not place.store.check(["doctor/hosts"]):
        place.tell("hosts", [answers[rank]["host"] for rank in range(place.size)])
    return list(check.judge([answers[rank]["value"] for rank in range(place.size)])), ""


def _host(place: Place, rank: int) -> str:
    """Return the host of a rank that is silent, if it has joined the world; see
    `parallel.joining`."""
    key = f"host of rank {rank}"
    return place.store.get(key).decode() if place.store.check([key]) else ""
