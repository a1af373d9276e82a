"""A run with experts records what its routers did, and names the layer whose router collapses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.diagnose.router_monitor import STEPS
from megaprec.optim.decision.step_report import RouterReport
from models.feed_forward.router import Router
from parallel.dropout import MicrobatchInfo
from tests.project.test_glossary import explained
from tests.runs import steps, train, write_run
from tools.analysis.plots.training_plot import pictures
from tools.analysis.report.run import Run
from tools.analysis.report.sections import EXPERT_COLUMNS, page
from tools.journal.records import read_events, read_metrics
from tools.journal.router_records import (
    COLLAPSE,
    ROUTER,
    router_fields,
    router_scalars,
    router_values,
)

MOE = ["model.family=mixtral", "model.experts=4", "model.router_bias=true", "model.layers=3"]
MOE += ["model.dense_layers=[0]", "model.router_z_loss=0.001", "model.z_loss=1e-4", "lr.peak=1e-3"]
PLANTED = 3  # the step from which all tokens of a layer are sent to the same experts
LENGTH = PLANTED + STEPS + 1


def collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases the router of layer 2."""
    inner = Router.forward

    def forward(
        self: Router, x: Tensor, microbatch: MicrobatchInfo | None
    ) -> tuple[Tensor, Tensor]:
        starts = microbatch is not None and microbatch.step >= PLANTED - 1
        if starts and self.tally.layer == "layers.2":
            assert self.bias is not None
            with torch.no_grad():
                self.bias.copy_(torch.tensor([0.0, 30.0, 0.0, 30.0]))
        return inner(self, x, microbatch)

    monkeypatch.setattr(Router, "forward", forward)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def collapsed(run_file: Path) -> tuple[Path, str]:
    """The folder of a run whose router collapses, and the lines that it printed."""
    folder = run_file.parent / "collapsed"
    with pytest.MonkeyPatch.context() as patch:
        collapse(patch)
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *said, **_: lines.append(" ".join(map(str, said))))
        keys = [*MOE, f"train.steps={LENGTH}", "log.every=100", "train.eval_every=10"]
        assert train(run_file, *keys, f"train.folder={folder}") == 0
    return folder, "\n".join(lines)


@pytest.mark.slow
def test_a_router_that_collapses_is_named_at_the_step_in_an_event_and_a_line(
    collapsed: tuple[Path, str],
) -> None:
    folder, printed = collapsed
    (event,) = read_events(folder, "router_collapse")
    assert (event["step"], event["layers"]) == (PLANTED - 1 + STEPS, [2])
    assert event["used_experts"] == [pytest.approx(2.0)] and event["max_load"] == [1.0]
    assert event["said"].startswith(
        f"the router of layer 2 has collapsed: for {STEPS} steps in a row fewer than 2.2 of its 4 "
        "experts were used"
    )
    (line,) = [line for line in printed.splitlines() if "has collapsed" in line]
    assert line.startswith(f"step {event['step']}/{LENGTH}  loss") and event["said"] in line
    (record,) = [record for record in read_metrics(folder) if COLLAPSE in record]
    assert (record["step"], record[COLLAPSE]) == (event["step"], event["said"])
    assert sorted(explained(COLLAPSE)) == sorted(event)


@pytest.mark.slow
def test_a_healthy_run_has_no_such_event(run_file: Path) -> None:
    folder = run_file.parent / "healthy"
    keys = [*MOE, "model.router_aux_loss=0.0", f"train.steps={LENGTH}"]
    assert train(run_file, *keys, f"train.folder={folder}") == 0
    assert not read_events(folder, "router_collapse")
    assert len(read_metrics(folder)) == LENGTH


def test_each_step_records_a_list_by_layer_of_each_measure(collapsed: tuple[Path, str]) -> None:
    for record in steps(collapsed[0]):
        router = record["router"]
        assert {*router} == {
            "max_load", "min_load", "used_experts", "entropy", "balance_loss", "z_loss"
        }  # fmt: skip
        for column in router.values():
            dense, *values = column
            assert dense is None and all(math.isfinite(value) for value in values)
        fell = record["step"] >= PLANTED
        assert (router["max_load"][2] == 1.0 and router["min_load"][2] == 0.0) == fell
        # of a model that is hardly trained: the square of the log of the vocabulary
        assert record["z_loss"] > 1.0


def test_the_glossary_explains_each_measure() -> None:
    assert explained(ROUTER) == [
        "max_load", "min_load", "used_experts", "entropy", "balance_loss", "z_loss",
        "min_correction", "max_correction",
    ]  # fmt: skip
    assert {*explained(ROUTER)} == {*EXPERT_COLUMNS}


def test_trackers_get_a_number_for_each_measure_and_layer(collapsed: tuple[Path, str]) -> None:
    last = read_metrics(collapsed[0])[-1]
    scalars = router_scalars(last)
    assert len(scalars) == 2 * len(last["router"])
    assert scalars["router/max_load/2"] == 1.0
    assert "router/max_load/0" not in scalars


@pytest.mark.parametrize(
    "damaged", [None, 5, [], {"max_load": "high"}, {"max_load": [None, "nan", [], True]}]
)
def test_a_damaged_record_has_no_measures_and_stops_nothing(damaged: Any) -> None:
    record = {"step": 1, "outcome": "applied", "loss": 1.0, "router": damaged}
    assert all(math.isnan(value) for value in router_values(record, "max_load"))
    assert router_scalars(record) == {}
    pictures([record, {**record, "step": 2}])


def test_the_report_and_the_picture_show_the_layers(collapsed: tuple[Path, str]) -> None:
    folder, _ = collapsed
    shown = pictures(read_metrics(folder))
    used = next(chart for chart in shown.charts if chart.title.startswith("used experts"))
    lowest = next(series for series in used.series if series.label == "lowest layer")
    assert lowest.y[-1] == pytest.approx(2.0)
    assert [list(crosses.x) for crosses in used.crosses] == [[PLANTED - 1 + STEPS]]
    text = page(Run.read(folder))
    assert "Experts" in text and "the router of layer 2 has collapsed" in text


def test_a_record_of_many_layers_stays_short() -> None:
    third = 1 / 3
    routers = [
        RouterReport(layer, third, third, 8 * third, third, third, third, (third, third))
        for layer in range(61)
    ]
    assert len(json.dumps(router_fields(routers))) < 6000
