"""train.eval_first: the first weights are evaluated before they are trained, and nothing else
changes."""

from pathlib import Path

import pytest

from tests.refusals import shows
from tests.runs import steps, train, train_on, write_run
from tools import cli
from tools.analysis.plots.training_plot import first_losses, pictures
from tools.journal.records import FIRST_EVALUATION, read_events, read_metrics

FIRST = ["model.dropout=0", "train.eval_first=true"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("first"))


def first(folder: Path) -> dict[str, float]:
    (event,) = read_events(folder, FIRST_EVALUATION)
    assert event["step"] == 0
    return event["losses"]


def test_it_is_the_loss_of_the_weights_that_a_rate_of_zero_keeps(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step of a warm-up from 0 has the rate 0: the evaluation after it is of the same
    weights."""
    options = ["lr.warmup=2", "train.steps=2", "train.eval_every=1", "precision.compute=fp64"]
    assert train(run_file, *FIRST, *options, f"train.folder={tmp_path}") == 0
    after_first_step = read_metrics(tmp_path)[0]["eval_loss"]
    assert first(tmp_path)["eval_loss"] == after_first_step
    assert f"step 0/2  held-out loss {after_first_step:.4f}" in capsys.readouterr().out


def test_it_changes_no_step(run_file: Path, tmp_path: Path) -> None:
    options = ["train.steps=3", "model.dropout=0.1"]
    assert train(run_file, *options, f"train.folder={tmp_path}/without") == 0
    assert train(run_file, *options, "train.eval_first=true", f"train.folder={tmp_path}/with") == 0
    assert steps(tmp_path / "with") == steps(tmp_path / "without")


def test_a_resume_does_not_evaluate_again(run_file: Path, tmp_path: Path) -> None:
    folder = f"train.folder={tmp_path}"
    assert train(run_file, *FIRST, folder, "train.steps=3") == 0
    before = first(tmp_path)
    assert train(run_file, *FIRST, folder, "train.steps=4") == 0
    assert first(tmp_path) == before


@pytest.mark.slow
def test_every_layout_has_the_same_loss(run_file: Path, tmp_path: Path) -> None:
    options = [*FIRST, "precision.compute=fp64", "train.steps=1", "optimizer.ema=0.9"]
    alone = train_on(run_file, *options, f"train.folder={tmp_path}/alone")
    parts = train_on(run_file, *options, f"train.folder={tmp_path}/parts", tensor=2, pipeline=2)
    assert first(alone).keys() == {"eval_loss", "eval_loss_ema"}
    assert first(parts) == pytest.approx(first(alone), rel=1e-12)


def test_the_picture_and_the_report_have_it(run_file: Path, tmp_path: Path) -> None:
    options = [*FIRST, "train.steps=2", "train.eval_every=1", f"train.folder={tmp_path}"]
    assert train(run_file, *options) == 0
    loss = first(tmp_path)["eval_loss"]
    events = read_events(tmp_path, FIRST_EVALUATION)
    chart = pictures(read_metrics(tmp_path), first=first_losses(events)).charts[0]
    (held_out,) = (series for series in chart.series if series.label == "held-out")
    assert list(held_out.x) == [0, 1, 2]
    assert held_out.y[0] == loss
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path), "-o", str(page)]) == 0
    assert f"{loss:.4f}" in page.read_text()


def test_without_a_text_to_evaluate_it_is_refused(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(run_file, *FIRST, "data.held_out=0", f"train.folder={tmp_path}") == 2
    assert shows(capsys.readouterr().err, "config.eval_without_text")
