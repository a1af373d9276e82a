"""A rank that does not answer, hangs or fails is named, and the others go on without waiting for
it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.doctor.places import place
from tools.verify.doctor import questions
from tools.verify.doctor.finding import NOT_TRIED, OK, WRONG, Finding, ok, verdict
from tools.verify.doctor.questions import Check, RankContext, conduct, format_ranks


def answered(answers: Sequence[Any]) -> Iterator[Finding]:
    yield ok("answers", ",".join(map(str, answers)))


def check(part: Any, together: bool = False, seconds: float = 600.0) -> Check:
    return Check("answers", part, answered, together, seconds)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankContext:
    """Rank 0 of two. The other one never answers unless a test answers for it."""
    monkeypatch.setattr(questions, "GRACE_SECONDS", 0.05)
    made = replace(place(tmp_path), size=2)
    made.store.delete_key("doctor/hosts")
    made.store.set("host of rank 1", "beta")
    return made


def test_a_rank_that_does_not_answer_is_named_and_nothing_waits_for_it(alone: RankContext) -> None:
    called: list[str] = []
    checks = [
        check(lambda p: 1, seconds=0.05),
        check(lambda p: called.append("together"), together=True),
    ]
    findings, whole = conduct(checks, alone)
    assert [one.verdict for one in findings] == [WRONG, NOT_TRIED] and not whole and not called
    assert (
        findings[0].message == findings[1].message == "rank 1 on beta did not answer within 0.05 s"
    )
    assert findings[0].remedy and verdict(findings) == WRONG


def test_a_rank_that_is_still_at_work_is_named(alone: RankContext) -> None:
    alone.publish("0/1", {"host": "beta", "value": 2})
    over = Event()
    findings, _ = conduct([check(lambda p: over.wait(600), seconds=0.05)], alone)
    over.set()
    assert [one.message for one in findings] == ["rank 0 on alpha did not answer within 0.05 s"]


def test_a_rank_that_fails_is_named_with_its_reason(alone: RankContext) -> None:
    alone.publish("0/1", {"host": "beta", "error": "OSError: [Errno 5] Input/output error"})
    (finding,), _ = conduct([check(lambda p: 1)], alone)
    assert (
        finding.verdict == WRONG
        and finding.message == "rank 1 on beta: OSError: [Errno 5] Input/output error"
    )


def test_the_answers_of_all_ranks_are_judged_in_the_order_of_ranks(alone: RankContext) -> None:
    alone.publish("0/1", {"host": "beta", "value": "second"})
    (finding,), whole = conduct([check(lambda p: "first")], alone)
    assert (finding.verdict, finding.message, whole) == (OK, "first,second", True)
    assert alone.first_ranks() == [0, 1] and alone.host_of(1) == "beta"


def test_many_ranks_are_named_in_a_short_line() -> None:
    said = format_ranks({rank: f"node{rank:03}" for rank in range(100)})
    assert said == "ranks 0, 1, 2, 3 and 96 more on node000, node001, node002, node003 and 96 more"
    assert (
        format_ranks({4: "b", 3: "a"}) == "ranks 3 and 4 on a and b"
        and format_ranks({3: ""}) == "rank 3 on a host that is not known"
    )
