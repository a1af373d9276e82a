"""Records of a run's invariants in events.jsonl: what was broken, and what is known of each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tools.console.units import first_of
from tools.journal.records import INVARIANT, INVARIANTS

FIRST_LOSS = "first loss"
TOKENS = "tokens"
RATE = "rate"
MOVEMENT = "movement"
COPIES = "copies"
NAMES = (FIRST_LOSS, TOKENS, RATE, MOVEMENT, COPIES)
PROVEN = "proven"
WRONG = "wrong"
NOT_TRIED = "not tried"
MOST_NAMED = 5  # tensors in a line
UNKNOWN = "the run has no record of it"


class InvariantFinding(NamedTuple):
    """The knowledge about an invariant.

    verdict: PROVEN, WRONG or NOT_TRIED. why: may be empty if it is proven.
    """

    verdict: str
    why: str = ""


def in_words(names: Sequence[str]) -> str:
    """Return the names of tensors as a list in words: the first of many, and how many more."""
    sorted_names = sorted(names)
    return first_of(sorted_names, MOST_NAMED)


def broken_event(name: str, said: str, step: int) -> dict[str, Any]:
    """Return the event of an invariant that a step has broken. said: how, in words."""
    line = f"{name}: {said}"
    return {"event": INVARIANT, "step": step, "invariant": name, "said": line}


def findings_event(findings: Mapping[str, InvariantFinding], step: int) -> dict[str, Any]:
    """Return the event of what is known of each invariant."""
    # as JSON has them: [verdict, why]
    verdicts = {name: list(finding) for name, finding in findings.items()}
    return {"event": INVARIANTS, "step": step, "verdicts": verdicts}


def read_findings(events: Sequence[Mapping[str, Any]]) -> dict[str, InvariantFinding]:
    """Return what is known of each invariant from the events of a run: one that was broken once is
    wrong, and one that one process has proven and the next has not tried is proven."""
    findings = {name: InvariantFinding(NOT_TRIED, UNKNOWN) for name in NAMES}
    for name, finding in _recorded(events):
        known = findings.get(name)
        # an invariant of another version has no name here
        if known is None or known.verdict == WRONG:
            continue
        if finding.verdict == NOT_TRIED and known.verdict == PROVEN:
            continue
        findings[name] = finding
    return findings


def broken_ones(findings: Mapping[str, InvariantFinding]) -> list[str]:
    """Return a line for each invariant that was broken."""
    lines: list[str] = []
    for name, finding in findings.items():
        if finding.verdict == WRONG:
            lines.append(f"{name}: {finding.why}")
    return lines


def _recorded(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, InvariantFinding]]:
    """Yield the findings of events, oldest first, without those that an editor has damaged."""
    for event in events:
        kind = event.get("event")
        if kind == INVARIANT:
            name = str(event["invariant"])
            said = str(event["said"]).removeprefix(f"{name}: ")
            why = f"{said}, in step {event['step']}"
            yield name, InvariantFinding(WRONG, why)
        if kind != INVARIANTS or not isinstance(event["verdicts"], dict):
            continue
        for name, finding in event["verdicts"].items():
            match finding:
                case [(("proven" | "not tried") as verdict), str(why)]:
                    yield name, InvariantFinding(verdict, why)
                case _:  # one that is wrong has an event of its own
                    pass
