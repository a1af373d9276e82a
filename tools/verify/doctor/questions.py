"""Questions that every rank answers, and the rank that does not.

A check has a part for each rank and a judge on rank 0. Each part runs in a thread with a time
limit, and its answer goes through the store. So a rank that hangs in a message, in a system call or
altogether costs its time limit and is named; the others go on. After a rank has not answered, no
check is begun in which ranks wait for each other.

Everything that ranks tell each other goes through the store, which answers although a rank hangs.
Only the checks of links and clocks send messages between ranks, with a short time limit.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch.distributed as dist

from tools.console.units import first_of
from tools.verify.doctor.finding import Finding, not_tried, wrong

GRACE_SECONDS = 5.0  # that an answer may be later than its rank's own limit
BEGIN_SECONDS = 60.0  # that a rank waits for rank 0 to begin the next check
LOST_REMEDY = "look at that host: the process was killed or stopped, or its network is down"
MOST_LISTED = 4  # ranks or hosts that a line names at most
HOSTS_SECONDS = 10.0  # to wait for the hosts of all ranks, which rank 0 publishes
POLL_SECONDS = 0.005  # between two looks at the store
Answer = dict[str, Any]  # what a rank reports: JSON values by name
Judge = Callable[[Sequence[Any]], Iterable[Finding]]


@dataclass(frozen=True)
class RankContext:
    """One rank.

    local: its index on its host. layout: pipeline, data and tensor ranks. device: cpu or cuda.
    folder: the folder whose filesystem is checked. bytes_needed: what the run will write there.
    """

    rank: int
    size: int
    local: int
    host: str
    store: dist.Store
    layout: tuple[int, int, int]
    device: str
    folder: Path
    bytes_needed: int

    def publish(self, store_name: str, value: Any) -> None:
        """Put a JSON value into the store."""
        self.store.set(f"doctor/{store_name}", json.dumps(value))

    def wait_for(self, store_name: str, seconds: float) -> Any:
        """Wait for the JSON value of `store_name` and return it. Raises TimeoutError after
        `seconds`."""
        deadline = time.monotonic() + seconds
        store_key = f"doctor/{store_name}"
        # Polls: a blocking `get` would wait for the store's own, long timeout.
        while not self.store.check([store_key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{store_name} was not told within {seconds:g} s")
            time.sleep(POLL_SECONDS)
        return json.loads(self.store.get(store_key))

    def first_ranks(self) -> list[int]:
        """Return the first rank of each host, in order of ranks.

        All ranks must have answered before.
        """
        hosts: list[str] = self.wait_for("hosts", HOSTS_SECONDS)
        return [hosts.index(host_name) for host_name in dict.fromkeys(hosts)]

    def host_of(self, rank_number: int) -> str:
        """Return the host of a rank. All ranks must have answered before."""
        return self.wait_for("hosts", HOSTS_SECONDS)[rank_number]


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
    """Findings of a check. lost: why later checks must not wait for a rank, "" if they
    may."""

    findings: list[Finding]
    lost: str


def conduct(checks: Sequence[Check], context: RankContext) -> tuple[list[Finding], bool]:
    """Carry out the checks on this rank.

    Return the findings (on rank 0; none elsewhere) and if all ranks answered.
    """
    findings = list[Finding]()
    lost_reason = ""
    for check_number, check in enumerate(checks):
        # Every rank must skip the same checks, or some would wait for each other in vain.
        lost_reason = _agree_to_begin(context, check_number, lost_reason)
        if lost_reason and check.together:
            if context.rank == 0:
                findings.append(not_tried(check.name, lost_reason, check.needed))
            continue

        rank_answer = run_with_time_limit(check.seconds, check.part, context)
        rank_answer["host"] = context.host
        context.publish(f"{check_number}/{context.rank}", rank_answer)
        if context.rank == 0:
            answers = _collect_answers(context, check_number, check.seconds)
            judgement = _judge(check, context, answers)
            findings.extend(judgement.findings)
            lost_reason = lost_reason or judgement.lost
    return findings, not lost_reason


def _agree_to_begin(context: RankContext, check_number: int, lost_reason: str) -> str:
    """Agree with rank 0 on beginning a check.

    Return why ranks must not wait for each other, "" if they may. lost_reason: rank 0's reason.
    """
    if context.rank == 0:
        context.publish(f"{check_number}/begin", lost_reason)
        return lost_reason
    return context.wait_for(f"{check_number}/begin", BEGIN_SECONDS)


def run_with_time_limit(seconds: float, part: Callable[..., Any], *arguments: Any) -> Answer:
    """Run the part for at most `seconds`; return its result as a record.

    {"value": ...}, {"error": ...} if the part failed, or {"late": True} if it was not done in time.
    """
    rank_answer: Answer = {}

    def run_part() -> None:
        try:
            rank_answer["value"] = part(*arguments)
        except Exception as error:
            description = f"{type(error).__name__}: {error}"
            rank_answer["error"] = description.splitlines()[0]

    # A daemon thread: one that hangs for good must not keep the process from ending.
    thread = Thread(target=run_part, daemon=True)
    thread.start()
    thread.join(seconds)
    return rank_answer or {"late": True}


def _collect_answers(context: RankContext, check_number: int, seconds: float) -> dict[int, Answer]:
    """Return the answers that come before the time limit, by rank."""
    answers = dict[int, Answer]()
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    for rank_number in range(context.size):
        # Zero at the deadline: the answers of later ranks that are there are still taken.
        remaining = max(0.0, deadline - time.monotonic())
        try:
            answers[rank_number] = context.wait_for(f"{check_number}/{rank_number}", remaining)
        except TimeoutError:
            continue
    return answers


def _judge(check: Check, context: RankContext, answers: Mapping[int, Answer]) -> _Judgement:
    """Return the findings of a check; if ranks are silent, late or fail, this alone."""
    silent = dict[int, str]()
    for rank_number in range(context.size):
        if rank_number not in answers:
            silent[rank_number] = _host_of_silent(context, rank_number)
    late = _hosts_of_answers_with("late", answers)
    if silent or late:
        message = f"{format_ranks(silent or late)} did not answer within {check.seconds:g} s"
        return _Judgement([wrong(check.name, message, LOST_REMEDY)], message)

    # a rank that fails has answered: the others need not give up waiting
    failed = _hosts_of_answers_with("error", answers)
    if failed:
        first_error = answers[min(failed)]["error"]
        message = f"{format_ranks(failed)}: {first_error}"
        remedy = "look at that host, and run this command there alone"
        return _Judgement([wrong(check.name, message, remedy)], "")

    in_order = [answers[rank_number] for rank_number in range(context.size)]
    # The first check that all ranks have answered tells every rank the hosts of the others.
    if not context.store.check(["doctor/hosts"]):
        context.publish("hosts", [rank_answer["host"] for rank_answer in in_order])
    values = [rank_answer["value"] for rank_answer in in_order]
    return _Judgement([*check.judge(values)], "")


def _hosts_of_answers_with(key: str, answers: Mapping[int, Answer]) -> dict[int, str]:
    """Return the host of each rank whose answer has the key."""
    return {
        rank_number: rank_answer["host"]
        for rank_number, rank_answer in answers.items()
        if key in rank_answer
    }


def _host_of_silent(context: RankContext, rank_number: int) -> str:
    """Return the host of a rank that is silent, "" if it has not joined the world.

    `parallel.joining` puts the hosts into the store.
    """
    store_name = f"host of rank {rank_number}"
    if not context.store.check([store_name]):  # `get` would wait for it
        return ""
    return context.store.get(store_name).decode()


def format_ranks(hosts_by_rank: Mapping[int, str]) -> str:
    """Return "rank 3 on node1" or "ranks 3 and 4 on node1".

    hosts_by_rank: the host of each rank, "" if it is not known.
    """
    # each host once
    names = {host_name or "a host that is not known" for host_name in hosts_by_rank.values()}
    hosts = sorted(names)
    ranks = [str(rank_number) for rank_number in sorted(hosts_by_rank)]
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {first_of(ranks, MOST_LISTED)} on {first_of(hosts, MOST_LISTED)}"
