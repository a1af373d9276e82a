"""Every fact of a published run has a source or is named as assumed, and stands once."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.planning.backtest import Published, published_table
from tests.planning.facts import (
    KINDS,
    Fact,
    FactError,
    facts_of,
    read_doubts,
    read_facts,
    unused,
)

TABLE = published_table()
FACTS = read_facts(TABLE["fact"])
ROW: dict[str, Any] = {
    "id": "one-2",
    "stack": "one",
    "gpu": "H100",
    "layout": {"tensor": 1, "context": 1, "expert": 1},
}
BOTH = (
    Fact("one", "attention", "cuDNN", source="a paper"),
    Fact("one", "compile", "block", assumed="as others"),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "give it a source, or say why it is assumed"),
        ({"source": "a paper", "assumed": "as others"}, "give it a source"),
        ({"source": "a paper", "kind": "speed"}, "no such kind"),
        ({"source": "a paper", "value": "fast"}, "'fast' is not a value of this kind"),
        ({"source": "a paper", "kind": "bandwidth", "value": "fast"}, "not a value of this kind"),
        ({"source": "a paper", "kind": "bandwidth", "value": 0}, "not a value of this kind"),
    ],
)
def test_what_is_not_a_fact_is_refused(changes: dict[str, Any], words: str) -> None:
    row = {"software": "one", "kind": "attention", "value": "flash", **changes}
    with pytest.raises(FactError, match=re.escape(words)):
        read_facts([row])


def test_a_run_without_a_fact_is_refused() -> None:
    assert {*facts_of(ROW, BOTH)} == {"attention", "compile"}
    with pytest.raises(FactError, match="one-2: one has no fact of compile"):
        facts_of(ROW, BOTH[:1])


@pytest.mark.parametrize(("axis", "kind"), [("tensor", "overlap"), ("expert", "rows")])
def test_a_run_with_traffic_says_what_becomes_of_it(axis: str, kind: str) -> None:
    row = ROW | {"layout": ROW["layout"] | {axis: 2}}
    with pytest.raises(FactError, match="has no fact of overlap"):
        facts_of(row, BOTH)
    overlap = Fact("one", "overlap", "all", source="a paper")
    rows = Fact("one", "rows", "each", source="a paper")
    assert kind in facts_of(row, (*BOTH, overlap, rows))


def test_an_exception_of_a_gpu_or_of_runs_follows_its_rule() -> None:
    flash = Fact("one", "attention", "flash", source="a paper", runs=("one-2",))
    other = Fact("one", "attention", "flash", source="a paper", gpu="A100")
    assert facts_of(ROW, (*BOTH, flash))["attention"] == flash
    assert facts_of(ROW, (*BOTH, other))["attention"] == BOTH[0]
    assert [*unused((*BOTH, flash), [ROW])] == [BOTH[0]]


def test_every_published_run_has_its_facts_and_every_fact_its_runs() -> None:
    for row in TABLE["run"]:
        facts_of(row, FACTS)
    assert not [*unused(FACTS, TABLE["run"])]


def test_every_doubt_is_of_a_published_run() -> None:
    beginnings = [run for doubt in read_doubts(TABLE["doubt"]) for run in doubt.runs]
    ids = [row["id"] for row in TABLE["run"]]
    assert beginnings
    assert not [run for run in beginnings if not any(name.startswith(run) for name in ids)]


def test_no_row_has_a_fact_of_its_software() -> None:
    """A fact that is repeated in rows can differ between them."""
    assert not {key for row in TABLE["run"] for key in row if key in KINDS}


def names_a_file_or_a_paper(source: str) -> bool:
    """Return True for a repository with a commit and a path, or a paper."""
    return bool(re.match(r"[\w.-]+/[\w.-]+@[0-9a-f]{7} \S+|arXiv \d{4}\.\d{5} ", source))


def test_a_source_is_a_file_at_a_commit_or_a_paper() -> None:
    assert not names_a_file_or_a_paper("general knowledge")
    sources = [fact.source for fact in FACTS if fact.source]
    assert sources
    assert not [source for source in sources if not names_a_file_or_a_paper(source)]


def test_with_sources_alone_a_software_is_taken_to_be_as_this_project(
    runs: Sequence[Published],
) -> None:
    """Its kernel of attention and what it compiles are those of this project."""
    for run in runs:
        known = run.by_sources()
        assert all(fact.source for fact in known.facts.values())
        kernel = known.facts.get("attention")
        assert kernel is None or kernel == run.facts["attention"]
        if "compile" not in known.facts:
            assert known.config.compile_mode("cuda") == "block"


@pytest.fixture(scope="module")
def runs() -> list[Published]:
    """One run of each software."""
    by_stack = {row["stack"]: row for row in TABLE["run"]}
    return [Published.of(row, FACTS) for row in by_stack.values()]
