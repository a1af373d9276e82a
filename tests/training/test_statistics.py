"""Statistics of a run are lines of a file of their own, change no number, and become maps."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import shows
from tests.runs import steps, train, train_on, write_run
from tools.analysis.plots.statistics_map import MOST_COLUMNS, maps_of, row_of
from tools.cli import main
from tools.journal.records import read_statistics
from tools.journal.statistics_records import measure_of


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def watched(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "run"
    assert train(run_file, f"train.folder={folder}", "log.statistics=2") == 0
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """All lines of statistics.jsonl, of which each must be whole."""
    return [json.loads(line) for line in (folder / "statistics.jsonl").read_text().splitlines()]


def test_statistics_change_no_number_of_the_run(
    run_file: Path, watched: Path, tmp_path: Path
) -> None:
    assert train(run_file, f"train.folder={tmp_path / 'plain'}") == 0
    assert steps(watched) == steps(tmp_path / "plain")
    assert not (tmp_path / "plain" / "statistics.jsonl").exists()


def test_every_second_step_has_a_line_with_every_tensor(watched: Path) -> None:
    records = read_statistics(watched)
    assert [record["step"] for record in records] == [2, 4, 6]
    for record in records:
        names = set(record["weights"])
        assert names == set(record["gradients"]) == set(record["updates"])
        assert {"embedding.weight", "layers.1.mlp.down.weight", "final_norm.weight"} <= names
        assert set(measure_of(record, "outputs", "rms")) == {"layers.0", "layers.1"}


def test_a_resume_takes_the_lines_of_its_steps_again(
    run_file: Path, watched: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = [f"train.folder={folder}", "log.statistics=2"]
    assert train(run_file, *keys, "train.steps=5") == 0
    with (folder / "statistics.jsonl").open("a") as file:
        file.write('{"event": "statistics", "step": 6, "outc')
    assert train(run_file, *keys) == 0
    assert lines(folder) == lines(watched)


def test_layouts_have_the_same_statistics(run_file: Path, tmp_path: Path, watched: Path) -> None:
    folder = train_on(run_file, f"train.folder={tmp_path}/run", "log.statistics=2", tensor=2)
    for ours, theirs in zip(read_statistics(folder), read_statistics(watched), strict=True):
        for kind in ("weights", "outputs"):
            found = measure_of(ours, kind, "rms")
            assert found == pytest.approx(measure_of(theirs, kind, "rms"), rel=1e-3)


def test_maps_have_a_row_for_each_layer_in_the_order_of_computation(watched: Path) -> None:
    maps = maps_of(read_statistics(watched))
    assert [len(one.rows) for one in maps] == [2, 5, 5, 5]
    assert maps[1].rows == ["embedding", "layer 0", "layer 1", "final norm", "head"]
    cells = maps[0].cells
    record = read_statistics(watched)[-1]
    assert cells["layer 1", 6] == record["outputs"]["layers.1"]


def test_a_map_of_many_steps_has_its_first_and_last(watched: Path) -> None:
    first = read_statistics(watched)[0]
    records = [{**first, "step": step} for step in range(1, 1000)]
    (outputs, *_) = maps_of(records)
    assert len(outputs.steps) == MOST_COLUMNS
    assert (outputs.steps[0], outputs.steps[-1]) == (1, 999)


def test_what_is_no_number_is_white(watched: Path) -> None:
    record = read_statistics(watched)[0]
    damaged = {**record, "outputs": {"layers.0": "inf", "layers.1": None}, "weights": [1]}
    titles = [one.title for one in maps_of([damaged])]
    assert titles == ["gradient, root mean square of the largest tensor"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("layers.12.mlp.experts.3.up.weight", "layer 12"),
        ("final_norm.weight", "final norm"),
        ("mtp.0.projection.weight", "mtp 0"),
    ],
)
def test_a_tensor_is_in_the_row_of_its_layer(name: str, row: str) -> None:
    assert row_of(name) == row


def test_report_and_compare_draw_the_maps(
    watched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(watched), "-o", str(page)]) == 0
    assert "Inside the model" in page.read_text()
    picture = tmp_path / "maps.png"
    assert main(["compare", str(watched), str(watched), "--statistics", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"written    {picture}" in capsys.readouterr().out


def test_compare_says_which_run_has_no_statistics(
    run_file: Path, tmp_path: Path, watched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    assert train(run_file, f"train.folder={plain}") == 0
    assert main(["compare", str(watched), str(plain), "--statistics", f"{tmp_path}/a.png"]) == 2
    assert shows(capsys.readouterr().err, "command.no_statistics", folder=str(plain))


def test_a_line_that_is_no_record_is_named(
    watched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(watched, damaged)
    with (damaged / "statistics.jsonl").open("a") as file:
        file.write("no record\n")
    picture = tmp_path / "maps.png"
    assert main(["compare", str(damaged), str(watched), "--statistics", str(picture)]) == 0
    assert "statistics.jsonl: line 4 is no record" in capsys.readouterr().err
    assert main(["report", str(damaged), "-o", str(tmp_path / "page.html")]) == 0
    assert "statistics.jsonl: line 4 is no record" in (tmp_path / "page.html").read_text()
