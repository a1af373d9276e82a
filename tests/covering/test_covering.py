"""A covering array has every combination that can be, and a sample of its rows trains what the
oracle trains."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count, islice, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel.pipeline.kinds import KINDS
from tests.covering import __main__ as campaign
from tests.covering import around, precisions
from tests.covering.array import Array, Row, combinations_of
from tests.covering.equal_rows import equal_rows, keep_equal_row
from tests.covering.options import CHEAP_RANKS, DEFAULT, FAMILIES, OPTIONS
from tests.covering.trial import (
    STEPS,
    Outcome,
    Together,
    config_of,
    ranks_of,
    refusal,
    tried,
    values_of_options,
)
from tests.families import CASES
from tests.families import config_of as model_of
from tests.parity.campaign import forked, left
from tests.ranks import run_ranks
from tests.refusals import shows
from tools import cli
from tools.verify.oracle.update_rules import ORACLE_RULES
from tools.verify.parity.ranks import RecordedRun, carry_out
from tools.verify.parity.record import Record

SMALL = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2"], "d": ["1", "2", "3"]}
ROWS = 20  # of a day
PRECISIONS = 6


def free(row: Row) -> int:
    """What each row costs."""
    return 0


def taken(row: Row) -> bool:
    """A rule of two options and one of three."""
    if row["a"] == "2" and row["b"] == "2":
        return False
    return not (row["b"] == row["c"] == "2" and row["d"] == "3")


def counted_rows(array: Array) -> Iterator[Row]:
    for row in array.rows():
        array.count(row)
        yield row


def seen_anywhere() -> set[tuple[tuple[str, str], ...]]:
    """All triples of all rows that are taken, by trying every row."""
    seen: set[tuple[tuple[str, str], ...]] = set()
    for values in product(*SMALL.values()):
        row = dict(zip(SMALL, values, strict=True))
        if taken(row):
            entries = set(row.items())
            wanted = combinations_of(SMALL, 3)
            seen |= {triple for triple in wanted if entries.issuperset(triple)}
    return seen


def test_each_triple_is_in_a_row_or_is_refused_by_a_rule() -> None:
    array = Array(SMALL, combinations_of(SMALL, 3), taken, free, 0, seed=1)
    rows = list(counted_rows(array))
    assert all(map(taken, rows))
    assert not array.left
    seen = {
        triple
        for triple in combinations_of(SMALL, 3)
        if any(set(row.items()).issuperset(triple) for row in rows)
    }
    assert seen == seen_anywhere()
    assert array.refused == set(combinations_of(SMALL, 3)) - seen
    assert len(rows) < 3 * 2 * 2 * 3


def test_costly_rows_are_made_of_nothing_else_than_what_needs_them() -> None:
    def cost(row: Row) -> int:
        return [*row.values()].count("2")

    array = Array(SMALL, combinations_of(SMALL, 3), lambda row: True, cost, 2, seed=1)
    costs = {cost(row) for row in counted_rows(array)}
    assert max(costs) == 3


def test_what_has_been_tried_is_not_tried_again() -> None:
    first = Array(SMALL, combinations_of(SMALL, 3), taken, free, 0, seed=1)
    rows = list(islice(counted_rows(first), 5))
    again = Array(SMALL, combinations_of(SMALL, 3), taken, free, 0, seed=1)
    for row in rows:
        again.count(row)
    assert all(row not in rows for row in counted_rows(again))


def test_a_row_that_was_wrong_is_tried_again() -> None:
    first = Array(SMALL, combinations_of(SMALL, 3), taken, free, 0, seed=1)
    wrong = next(first.rows())
    again = Array(SMALL, combinations_of(SMALL, 3), taken, free, 0, seed=1)
    assert next(again.rows()) == wrong


def test_a_row_that_was_equal_is_read_back_with_options_that_have_come_since(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    row = {**DEFAULT, "tensor": "2", "batch": "8 of 1"}
    keep_equal_row(row, path)
    assert list(equal_rows(path)) == [row]
    assert "pipeline" not in path.read_text()


def test_rows_that_are_recorded_have_options_and_values_that_there_are() -> None:
    for row in equal_rows():
        assert row.keys() == OPTIONS.keys()
        assert all(value in OPTIONS[option] for option, value in row.items())


def test_the_campaign_keeps_rows_with_all_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[Row] = []
    monkeypatch.setattr(campaign, "equal_rows", lambda: iter([DEFAULT]))
    monkeypatch.setattr(campaign, "tried", lambda *_: Outcome("equal"))
    monkeypatch.setattr(campaign, "keep_equal_row", kept.append)
    # three rows, whatever time they take
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=count().__next__))
    words = ["--minutes", "0.05", "--having", "clip=none", "--kept", "unused.jsonl"]
    monkeypatch.setattr(sys, "argv", ["covering", *words])
    assert campaign.main() == 0
    assert len(kept) == 3
    assert all(row.keys() == OPTIONS.keys() for row in kept)
    assert "seen" in capsys.readouterr().out


def test_a_combination_that_needs_another_value_is_tried_with_it() -> None:
    def takes(row: Row) -> bool:
        return row["a"] != "2" or row["d"] == "3"

    wanted = [(("a", "2"), ("b", "2"))]
    needed = [{"d": "3"}]
    array = Array(SMALL, wanted, takes, free, 0, 1, needed)
    assert [row["d"] for row in array.rows()] == ["3"]


def test_every_family_and_rule_that_the_oracle_has_and_every_schedule_is_an_option() -> None:
    families = {model_of(CASES[family]).family for family in FAMILIES}
    assert families == {model_of(case).family for case in CASES.values()}
    plain = {name: next(iter(values)) for name, values in OPTIONS.items()}
    rules = [config_of({**plain, "update": update}).optimizer.name for update in OPTIONS["update"]]
    assert {*rules} == {*ORACLE_RULES}
    assert {*OPTIONS["schedule"]} == {*KINDS}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option in OPTIONS for value in OPTIONS[option]]
)
def test_each_value_is_taken_in_some_run(option: str, value: str) -> None:
    """With the values that it needs, if there are any."""
    needed = {
        "experts": {"family": "mixtral", "data": "2"},
        "sequence": {"tensor": "2"},
        "resume": {"tensor": "2"},
        "schedule": {"pipeline": "2", "batch": "8 of 1"},
    }
    plain = {name: next(iter(values)) for name, values in OPTIONS.items()}
    assert refusal({**plain, **needed.get(option, {}), option: value}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROWS))
def test_a_row_of_the_day_trains_what_the_oracle_trains(number: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5", reason="needs transformers: the extra hf")
    seed = datetime.now(UTC).toordinal() * ROWS + number
    options = {name: values for name, values in values_of_options().items() if name != "compile"}
    wanted = combinations_of(options, 3)
    array = Array(options, wanted, lambda row: not refusal(row), ranks_of, CHEAP_RANKS, seed)
    row = next(array.rows())
    outcome = tried(row, tmp_path)
    assert outcome.verdict == "equal", (outcome.why, row, config_of(row).model.family)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PRECISIONS))
def test_a_row_of_the_day_in_mixed_precision_is_within_rounding_of_the_oracle(
    number: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5", reason="needs transformers: the extra hf")
    seed = datetime.now(UTC).toordinal() * PRECISIONS + number
    options = {name: list(values) for name, values in precisions.OPTIONS.items()}
    wanted = combinations_of(options, 2)
    array = Array(options, wanted, lambda row: not precisions.refusal(row), free, 0, seed)
    row = next(array.rows())
    outcome = precisions.tried(row, tmp_path)
    assert outcome.verdict == "equal", (outcome.why, row)


@pytest.mark.parametrize("command", ["plan", "parity", "mup-check"])
def test_fp8_that_is_not_computed_is_refused_before_anything_is_run(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["examples/demo.toml", "precision.compute=bf16", "fp8.kind=mx", "fp8.parameters=true"]
    assert cli.main([command, *words]) == 2
    assert shows(capfd.readouterr().err, "training.fp8_not_computed", field="parameters")


def of_all_without_a_load(mesh: DeviceMesh, folder: Path) -> None:
    with patch.object(around, "load"), around.obeyed():
        carry_out(folder)


def together_without_a_load(runs: Sequence[RecordedRun], folder: Path) -> list[None]:
    left(runs, folder)
    run_ranks(of_all_without_a_load, {"tp": runs[0].config.world_size}, folder=folder)
    return [None] * len(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("together", "verdict"), [(forked, "equal"), (together_without_a_load, "wrong")]
)
def test_a_resume_that_reads_nothing_is_wrong(
    together: Together, verdict: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5", reason="needs transformers: the extra hf")
    row = {**DEFAULT, "tensor": "2", "resume": around.ONE, "evaluation": "before each step"}
    assert tried(row, tmp_path, together).verdict == verdict


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_wrong_gradient_of_a_small_tensor_is_beyond_the_bound_though_all_gradients_are_not(
    factor: float,
) -> None:
    made = torch.Generator().manual_seed(0)
    right = {"large": torch.randn(400, 400, generator=made, dtype=torch.float64)}
    right["small"] = torch.randn(8, generator=made, dtype=torch.float64) / 8

    def record(gradients: dict[str, torch.Tensor]) -> Record:
        kinds = ("gradient/0", "before/weight", f"after/{STEPS - 1}/weight")
        tensors = dict.fromkeys(kinds, right) | {"gradient/0": gradients}
        return Record([{"loss": 1.0}], [], [*right], tensors)

    unit = 2.0**-8
    wrong = record({**right, "small": factor * right["small"]})
    errors = precisions._errors(wrong, record(right))
    assert errors.gradient < precisions.GRADIENT_UNITS * unit
    assert errors.tensor > precisions.TENSOR_UNITS * unit
