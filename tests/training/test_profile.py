"""Steps that torch's profiler sees are in files that one can open, and are the steps of any run."""

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.refusals import raises
from tests.runs import steps, train, train_on, write_run
from tools.config.run_file import load_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def trace_of(file: Path) -> list[str]:
    """The names of the events of a trace."""
    with gzip.open(file) as content:
        return [str(event.get("name")) for event in json.load(content)["traceEvents"]]


def test_profiled_steps_are_written_by_each_rank_that_was_asked_and_train_the_same(
    run_file: Path, tmp_path: Path
) -> None:
    keys = ["log.profile=[2, 3]", "log.profile_ranks=[0, 1]", "train.steps=4"]
    run = train_on(run_file, f"train.folder={tmp_path / 'seen'}", *keys, data=2)
    plain = train_on(run_file, f"train.folder={tmp_path / 'plain'}", "train.steps=4", data=2)
    assert steps(run) == steps(plain)
    files = sorted(path.name for path in (run / "profile").iterdir())
    assert files == [
        f"steps_2_to_3.rank_{rank}.{ending}" for rank in range(2) for ending in ("json.gz", "txt")
    ]
    for rank in range(2):
        trace = run / "profile" / f"steps_2_to_3.rank_{rank}.json.gz"
        assert {"aten::mm", "module layers.0.attention"} <= set(trace_of(trace))
        text = trace.with_name(f"steps_2_to_3.rank_{rank}.txt").read_text()
        # which operators take longest depends on the load of the machine
        assert "aten::" in text and "layers.*.attention" in text
        assert "autograd::engine" not in text and "Optimizer.step" not in text


@pytest.mark.parametrize(("steps_seen", "ends"), [("[1, 1]", 1), ("[3, 9]", 4)])
def test_the_first_step_may_be_seen_and_a_run_may_end_before_the_last(
    steps_seen: str, ends: int, run_file: Path, tmp_path: Path
) -> None:
    keys = [f"log.profile={steps_seen}", "train.steps=4", f"train.folder={tmp_path / 'run'}"]
    run = train_on(run_file, *keys)
    first = json.loads(steps_seen)[0]
    assert (run / "profile" / f"steps_{first}_to_{ends}.rank_0.json.gz").is_file()


def test_the_log_names_the_trace(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(run_file, "log.profile=[1, 2]", "train.steps=2", f"train.folder={folder}") == 0
    line = r"^profile    steps 1 to 2 on rank 0: .*%; \S+json.gz, for Perfetto$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_a_resumed_run_profiles_the_steps_that_are_left_or_says_that_none_is(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"train.folder={tmp_path / 'run'}", "lr.schedule=constant")
    assert train(run_file, *keys, "train.steps=2") == 0
    assert train(run_file, *keys, "train.steps=4", "log.profile=[2, 3]") == 0
    names = [path.name for path in (tmp_path / "run" / "profile").iterdir()]
    assert sorted(names) == ["steps_3_to_3.rank_0.json.gz", "steps_3_to_3.rank_0.txt"]
    said = "note       log.profile = [1, 2]: these steps are taken already, unseen"
    capsys.readouterr()
    assert train(run_file, *keys, "train.steps=5", "log.profile=[1, 2]") == 0
    assert said in capsys.readouterr().out
    # a run that has profiled its steps goes on in silence
    assert train(run_file, *keys, "train.steps=6", "log.profile=[3, 3]") == 0
    assert "note       log.profile" not in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["[3]", "[3, 2]", "[1, 11]"])
def test_what_is_no_first_and_last_step_is_refused(wrong: str, run_file: Path) -> None:
    with raises("config.profile_steps", steps=json.loads(wrong), most=10):
        load_run(run_file, [f"log.profile={wrong}"])


def test_a_rank_that_the_layout_lacks_is_refused(run_file: Path) -> None:
    with raises("config.profile_ranks", rank=2, ranks=2):
        load_run(run_file, ["log.profile=[1, 2]", "log.profile_ranks=[1, 2]", "parallel.data=2"])
