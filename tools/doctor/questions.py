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
from typing import Any, NamedTuple

from tools.doctor.finding import Finding, not_tried, wrong
from tools.doctor.place import Answer, RankContext, format_ranks

GRACE_SECONDS = 5.0  # that an answer may be later than its rank's own limit
BEGIN_SECONDS = 60.0  # that a rank waits for rank 0 to begin the next check
LOST_REMEDY = "look at that host: the process was killed or stopped, or its network is down"
Judge = Callable[[Sequence[Any]], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A question.

    part: what each rank does and answers, a JSON value. judge: findings from the answers of all
    ranks. together: ranks wait for each other in it. seconds: time limit of the part. needed: it
    counts if it is not tried.
    """

    name: str
    part: Callable[[RankContext], Any]
    judge: Judge
    together: bool = False
    seconds: float = 20.0
    needed: bool = True


class _Judgement(NamedTuple):
    """Findings of a check. lost: why later checks must not wait for a rank, "" if they may."""

    findings: list[Finding]
    lost: str


def conduct(checks: Sequence[Check], context: RankContext) -> tuple[list[Finding], bool]:
    """Carry out the checks on this rank.

    Return the findings (on rank 0; none elsewhere) and if all ranks answered.
    """
    findings = list[Finding]()
    lost = ""
    for number, check in enumerate(checks):
        # Every rank must skip the same checks, or some would wait for each other in vain.
        lost = _agree_to_begin(context, number, lost)
        if lost and check.together:
            if context.rank == 0:
                findings.append(not_tried(check.name, lost, check.needed))
            continue

        answer = run_with_time_limit(check.seconds, check.part, context)
        answer["host"] = context.host
        context.tell(f"{number}/{context.rank}", answer)
        if context.rank == 0:
            answers = _collect_answers(context, number, check.seconds)
            judgement = _judge(check, context, answers)
            findings.extend(judgement.findings)
            lost = lost or judgement.lost
    return findings, not lost


def _agree_to_begin(context: RankContext, number: int, lost: str) -> str:
    """Agree with rank 0 on beginning a check.

    Return why ranks must not wait for each other, "" if they may. lost: rank 0's reason.
    """
    if context.rank == 0:
        context.tell(f"{number}/begin", lost)
        return lost
    return context.told(f"{number}/begin", BEGIN_SECONDS)


def run_with_time_limit(seconds: float, part: Callable[..., Any], *arguments: Any) -> Answer:
    """Run the part for at most `seconds`; return its result as a record.

    {"value": ...}, {"error": ...} if the part failed, or {"late": True} if it was not done in time.
    """
    answer: Answer = {}

    def run_part() -> None:
        try:
            answer["value"] = part(*arguments)
        except Exception as error:
            description = f"{type(error).__name__}: {error}"
            answer["error"] = description.splitlines()[0]

    # A daemon thread: one that hangs for good must not keep the process from ending.
    thread = Thread(target=run_part, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer or {"late": True}


def _collect_answers(context: RankContext, number: int, seconds: float) -> dict[int, Answer]:
    """Return the answers that come before the time limit, by rank."""
    answers = dict[int, Answer]()
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    for rank in range(context.size):
        # Zero at the deadline: the answers of later ranks that are there are still taken.
        remaining = max(0.0, deadline - time.monotonic())
        try:
            answers[rank] = context.told(f"{number}/{rank}", remaining)
        except TimeoutError:
            continue
    return answers


def _judge(check: Check, context: RankContext, answers: Mapping[int, Answer]) -> _Judgement:
    silent = dict[int, str]()
    for rank in range(context.size):
        if rank not in answers:
            silent[rank] = _host_of_silent(context, rank)
    late = _hosts_of_answers_with("late", answers)
    if silent or late:
        message = f"{format_ranks(silent or late)} did not answer within {check.seconds:g} s"
        return _Judgement([wrong(check.name, message, LOST_REMEDY)], message)

    failed = _hosts_of_answers_with("error", answers)
    if failed:
        first_error = answers[min(failed)]["error"]
        message = f"{format_ranks(failed)}: {first_error}"
        remedy = "look at that host, and run this command there alone"
        return _Judgement([wrong(check.name, message, remedy)], "")

    in_order = [answers[rank] for rank in range(context.size)]
    # The first check that all ranks have answered tells every rank the hosts of the others.
    if not context.store.check(["doctor/hosts"]):
        context.tell("hosts", [answer["host"] for answer in in_order])
    values = [answer["value"] for answer in in_order]
    return _Judgement([*check.judge(values)], "")


def _hosts_of_answers_with(key: str, answers: Mapping[int, Answer]) -> dict[int, str]:
    """Return the host of each rank whose answer has the key."""
    return {rank: answer["host"] for rank, answer in answers.items() if key in answer}


def _host_of_silent(context: RankContext, rank: int) -> str:
    """Return the host of a rank that is silent, "" if it has not joined the world.

    `parallel.joining` puts the hosts into the store.
    """
    key = f"host of rank {rank}"
    if not context.store.check([key]):  # `get` would wait for it
        return ""
    return context.store.get(key).decode()
