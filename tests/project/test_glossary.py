"""docs/glossary.md explains every word that a run writes, and none that it does not."""

import json
import re
from dataclasses import fields
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from megaprec.optim.decision.step_report import Offender, StepReport
from tests.project.test_readme import ROOT
from tests.runs import train, write_run
from tools import cli
from tools.analysis.plots.training_plot import LOSS, OTHERS
from tools.journal.records import COLLAPSE, TASK_PREFIX, read_events, read_metrics
from tools.journal.router_records import ROUTER

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def explained(section: str) -> list[str]:
    """The words in the first column of the table under a heading."""
    text = re.split(rf"^##+ {re.escape(section)}$", GLOSSARY, flags=re.MULTILINE)[1]
    cells = re.findall(
        r"^\| (`[^|]+) \|", re.split(r"^##+ ", text, flags=re.MULTILINE)[0], re.MULTILINE
    )
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with steps that were applied, shadowed, skipped and evaluated after."""
    file = write_run(tmp_path_factory.mktemp("glossary"))
    folder = file.parent / "run"
    scaled = ("precision.compute=fp16", "precision.loss_scale=1e30")
    fp8 = (
        "train.sentinel=1",
        "fp8.kind=current",
        "fp8.pad=true",
        "fp8.shadow_every=1",
        "fp8.shadow_cosine=0.99999",
    )
    named = f'data.validation=[{{name="NAME", source="{file.parent}/text.txt"}}]'
    bf16 = ("precision.compute=bf16", "log.peak_tflops=1")
    always = ("train.eval_every=1", "model.mtp_layers=1", "model.z_loss=0.1", "optimizer.ema=0.9")
    assert train(file, "train.steps=1", *always, named, *bf16, *fp8) == 0
    assert train(file, "train.steps=2", *always, *scaled) == 0
    return folder


@pytest.mark.slow
def test_every_field_of_a_shadow_is_explained_and_none_is_stale(overflowing: Path) -> None:
    shadows = read_events(overflowing, "fp8_shadow")
    assert sorted(explained("fp8_shadow")) == sorted(keys(shadows))
    assert any("shadow_alarm" in record for record in read_metrics(overflowing))


def keys(records: list[dict[str, Any]]) -> set[str]:
    return {key for record in records for key in record}


ELSEWHERE = {"offenders", "stop", "routers", "attentions", "sources", "further"}
"""Fields of a step's report that are no fields of its record."""


def test_every_field_of_a_steps_report_is_explained() -> None:
    assert {field.name for field in fields(StepReport)} - ELSEWHERE <= {*explained("metrics.jsonl")}


@pytest.mark.slow
def test_every_field_of_a_steps_record_is_explained_and_none_is_stale(overflowing: Path) -> None:
    written = keys(read_metrics(overflowing))
    assert written >= {field.name for field in fields(StepReport)} - ELSEWHERE
    # needs lm-evaluation-harness; tests/training/test_harness.py sees it written
    tasks = f"{TASK_PREFIX}TASK/METRIC"
    # needs experts; tests/training/test_experts_run.py sees both written
    of_experts = {ROUTER, COLLAPSE}
    # only in a step above its band; tests/training/test_spike_skips.py sees it written
    spike = "spike"
    # only in a step that breaks one; tests/training/test_invariants.py sees it written
    invariant = "invariant"
    # needs data.blend; tests/training/test_changing_blend.py sees them written
    of_sources = {"loss/NAME", "share/NAME", "tokens/NAME"}
    # needs train.batch_schedule and train.seq_schedule; tests of these see them written
    of_schedules = {"global_batch", "seq_length"}
    # needs data.pack; tests/training/test_packed_runs.py sees it written
    padding = "padding"
    others = {tasks, *of_experts, *of_sources, *of_schedules, spike, invariant, padding}
    assert sorted(explained("metrics.jsonl")) == sorted(written | others)


@pytest.mark.slow
def test_every_field_of_an_event_is_explained_and_none_is_stale(overflowing: Path) -> None:
    events = read_events(overflowing)
    assert sorted(explained("overflow")) == sorted(keys(events))
    offenders = keys([offender for event in events for offender in event["offenders"]])
    assert offenders >= {field.name for field in fields(Offender)}
    assert sorted(explained("offenders")) == sorted(offenders)


@pytest.mark.parametrize("skipped", [False, True])
def test_every_word_of_a_run_is_explained(
    skipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    capsys.readouterr()
    more = ("precision.compute=fp16", "precision.loss_scale=1e30") if skipped else ()
    (tmp_path / "other.txt").write_text("text that is not trained on\n" * 50)
    named = f'data.validation=[{{name="NAME", source="{tmp_path}/other.txt"}}]'
    assert train(file, "train.steps=1", "train.eval_every=1", named, *more) == (3 if skipped else 0)
    said = capsys.readouterr().out.splitlines()
    begun = [match[1] for line in said if (match := re.match(r"(\w+) {2,}", line))]
    lines = explained("Before the first step")
    after = re.findall(r"`(\w+)`", GLOSSARY.split("After the last step:")[1].split("\n\n")[0])
    assert begun[:6] == ["plan", "model", "data", "layout", "batch", "precision"]
    assert set(begun) <= {*lines, *after}
    (step,) = (line for line in said if line.startswith("step "))
    for known in (
        *explained("The line of a step"),
        *(r.get("overflow_in", "") for r in read_metrics(file.parent / "run")),
    ):
        step = step.replace(known, "", 1)
    assert not re.findall("[a-z]+", re.sub("1e[+]30|nan|inf", "", step)), step


def all_keys(value: Any, sealed: frozenset[str] = frozenset()) -> set[str]:
    """The keys of a JSON document at every depth; the tables named in `sealed` are not entered."""
    if isinstance(value, list):
        return set[str]().union(*(all_keys(one, sealed) for one in value))
    if not isinstance(value, dict):
        return set()
    found = set(value)
    for key, inner in value.items():
        if key not in sealed:
            found |= all_keys(inner, sealed)
    return found


def columns(section: str) -> list[str]:
    """The words in the second column of a table: what a command prints above its numbers."""
    text = re.split(rf"^##+ {re.escape(section)}$", GLOSSARY, flags=re.MULTILINE)[1]
    cells = re.findall(
        r"^\| `[^|]+ \| (`[^|]+) \|", re.split(r"^##+ ", text, flags=re.MULTILINE)[0], re.MULTILINE
    )
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main([*words]) == 0
    return capsys.readouterr().out


def test_every_number_of_compare_and_evaluate_is_explained_and_none_is_stale(
    overflowing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(overflowing)
    text = str(overflowing.parent / "text.txt")
    calls = {
        "compare": ["compare", run],
        "evaluate": ["evaluate", run, "--data", f"x={text}", "--max-chars", "300"],
    }
    for section, words in calls.items():
        document = json.loads(printed(capsys, *words, "--json"))
        assert sorted(explained(section)) == sorted(all_keys(document))
        header = next(
            line
            for line in printed(capsys, *words).splitlines()
            if line.split()[:1] in (["run"], ["data"])
        )
        shown = re.split(r" {2,}", header.strip())
        headings = [name for name in columns(section) if name not in ("note", "differs")]
        assert sorted(headings) == sorted(shown)


@pytest.mark.slow
def test_every_number_of_a_plan_is_explained_and_none_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    words = ["plan", str(file), "--tflops", "1", "--gpu-memory", "80GB", "--ranks", "2"]
    document = json.loads(printed(capsys, *words, "--json"))
    assert sorted(set(explained("plan"))) == sorted(all_keys(document, frozenset({"parallel"})))


def test_every_row_of_a_report_is_explained(
    overflowing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = overflowing / "page.html"
    printed(capsys, "report", str(overflowing), "-o", str(page))
    text = page.read_text(encoding="utf-8")
    rows = {unescape(row) for row in re.findall(r"<dt>(.*?)</dt>", text)}
    assert len(rows) > 10
    assert rows <= set(explained("report"))


def test_every_panel_of_the_picture_is_a_field_of_a_step() -> None:
    fields_of_a_step = explained("metrics.jsonl")
    assert {quantity.key for quantity in (LOSS, *OTHERS)} <= set(fields_of_a_step)
