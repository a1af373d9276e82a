"""`data.lm_eval`: tasks of lm-evaluation-harness during training, in any layout, with the results
of the export."""

import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.convert.test_lm_eval import CHOICES, MULTIPLE, ROLLING, TEXTS
from tests.refusals import sentence, shows
from tests.runs import checkpoint, steps, train, write_run
from tests.training.deaths import START
from tools.cli import main
from tools.config.run_file import load_run
from tools.config.tables.data_settings import Data
from tools.training import harness, launch

GENERATING = """
task: my_text
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
metric_list: [{metric: exact_match}]
"""
NAMES = 'data.lm_eval=["my_text","my_choices"]'
READING = "from tests.training import test_harness as t; t.harness._manager = t.of_own_tasks"
NOISE = pytest.mark.filterwarnings("default")  # the harness's own


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run file beside two offline tasks in the folder tasks."""
    texts = tmp_path / "texts.jsonl"
    choices = tmp_path / "choices.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    choices.write_text("".join(json.dumps(choice) + "\n" for choice in CHOICES))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "my_text.yaml").write_text(ROLLING.replace("TEXTS", str(texts)))
    (tmp_path / "tasks" / "my_choices.yaml").write_text(MULTIPLE.replace("CHOICES", str(choices)))
    return write_run(tmp_path)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'lm-eval[hf]'")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    assert START in launch.PROGRAM
    monkeypatch.setattr(launch, "PROGRAM", launch.PROGRAM.replace(START, f"{READING}\n{START}"))
    monkeypatch.setattr(harness, "_manager", of_own_tasks)


def own_tasks(folder: str | Path) -> Any:
    """The harness without its own ten thousand tasks, which take seconds to read."""
    return import_module("lm_eval.tasks").TaskManager(
        include_path=str(folder), include_defaults=False
    )


def of_own_tasks(data: Data) -> Any:
    """What stands in for `_manager`, here and in ranks that are started."""
    return own_tasks(data.lm_eval_folder)


def asked(file: Path, *more: str) -> list[str]:
    return [
        NAMES,
        f"data.lm_eval_folder={file.parent}/tasks",
        "train.eval_every=2",
        "train.steps=4",
        *more,
    ]


def results(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key.startswith("lm_eval/")}
        for record in steps(folder)
    ]


@pytest.mark.slow
@NOISE
@pytest.mark.usefixtures("offline", "forked_python")
def test_tasks_in_training_have_the_results_of_the_export_in_every_layout_and_change_no_number(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = {"": tmp_path / "one", "parallel.tensor=2 parallel.pipeline=2": tmp_path / "four"}
    for layout, folder in folders.items():
        exact = ("precision.compute=fp64", f"train.folder={folder}", *layout.split())
        assert train(file, *asked(file), *exact) == 0
    one, four = (results(folder) for folder in folders.values())
    assert [bool(said) for said in one] == [False, True, False, True]
    assert one[3].keys() == {"lm_eval/my_text/bits_per_byte", "lm_eval/my_choices/acc"}
    assert [
        said == pytest.approx(other, rel=1e-12) for said, other in zip(one, four, strict=True)
    ] == [True] * 4
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("step 4/4"))
    assert line.endswith(
        f"my_text bits_per_byte {one[3]['lm_eval/my_text/bits_per_byte']:.4f}  "
        f"my_choices acc {one[3]['lm_eval/my_choices/acc']:.4f}"
    )
    without = tmp_path / "without"
    assert (
        train(
            file,
            "precision.compute=fp64",
            f"train.folder={without}",
            "train.eval_every=2",
            "train.steps=4",
        )
        == 0
    )
    kept = [
        {k: v for k, v in record.items() if not k.startswith("lm_eval/")}
        for record in steps(folders[""])
    ]
    assert kept == steps(without)
    capfd.readouterr()
    texts = str(tmp_path / "texts.jsonl")
    saved = str(checkpoint(folders[""], 4))
    assert main(["evaluate", saved, "--data", texts, "--compute", "fp64", "--json"]) == 0
    (whole,) = json.loads(capfd.readouterr().out)["sets"]
    assert one[3]["lm_eval/my_text/bits_per_byte"] == pytest.approx(
        whole["bits_per_byte"], rel=1e-12
    )
    assert main(["convert", saved, str(tmp_path / "exported"), "--no-verify"]) == 0
    theirs = of_transformers(tmp_path / "exported", tmp_path / "tasks")
    assert one[3] == pytest.approx(theirs, rel=1e-5)


def of_transformers(folder: Path, tasks: Path) -> dict[str, float]:
    """The results of the harness itself on an exported model."""
    manager = own_tasks(tasks)
    arguments = f"pretrained={folder},dtype=float32"
    evaluate: Any = import_module("lm_eval").simple_evaluate
    said = evaluate(
        "hf",
        arguments,
        ["my_text", "my_choices"],
        device="cpu",
        task_manager=manager,
        bootstrap_iters=0,
    )
    found = said["results"]
    named = {"lm_eval/my_text/bits_per_byte": found["my_text"]["bits_per_byte,none"]}
    return named | {"lm_eval/my_choices/acc": found["my_choices"]["acc,none"]}


@pytest.mark.slow
@NOISE
@pytest.mark.usefixtures("offline")
def test_tasks_that_cannot_be_evaluated_are_refused_before_the_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (
        ("nowhere", sentence("training.harness_no_task", searched=re.compile("^ nor in "))),
        (
            "my_text",
            sentence("training.harness_unsupported", reason=re.compile("has the model write text")),
        ),
    ):
        (tmp_path / "tasks" / "my_text.yaml").write_text(
            GENERATING.replace("TEXTS", str(tmp_path / "texts.jsonl"))
        )
        assert train(file, *asked(file, f'data.lm_eval=["{name}"]')) == 2
        (line,) = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("data.lm_eval")
        ]
        assert line.startswith(f'data.lm_eval = "{name}"') and re.search(said, line)
    (tmp_path / "texts.jsonl").unlink()
    assert train(file, *asked(file, 'data.lm_eval=["my_text"]')) == 2
    assert shows(
        capsys.readouterr().err,
        "training.harness_task",
        name="my_text",
        reason=re.compile("^FileNotFound"),
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@NOISE
@pytest.mark.usefixtures("offline")
def test_a_harness_that_fails_during_training_is_a_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("lm_eval.evaluator.evaluate", fail)
    assert train(file, *asked(file)) == 0
    assert (
        capsys.readouterr().err.count(
            "warning    no results of data.lm_eval: ZeroDivisionError: planted; training goes on"
        )
        == 2
    )
    assert not any(results(file.parent / "run"))


def test_without_the_harness_tasks_are_refused_before_the_run_with_the_line_that_installs_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.training.harness.find_spec", lambda name: None)
    assert train(file, *asked(file)) == 2
    assert shows(capsys.readouterr().err, "training.harness_missing")
    assert not (tmp_path / "run").exists()


WRONG = {
    "train.eval_every=0": ("config.lm_eval_never", {}),
    "fp8.kind=current": ("config.lm_eval_fp8", {}),
    "data.lm_eval=[]": ("config.lm_eval_key", {"key": "lm_eval_folder"}),
}


@pytest.mark.parametrize("override", WRONG)
def test_keys_that_contradict_the_tasks_are_refused(
    override: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), *asked(file, override)]) == 2
    code, fields = WRONG[override]
    assert shows(capsys.readouterr().err, code, **fields)


def test_tasks_may_be_all_that_is_evaluated(file: Path) -> None:
    assert load_run(file, asked(file, "data.held_out=0")).data.lm_eval == ("my_text", "my_choices")


def test_another_rank_computes_all_that_the_first_one_sends_until_it_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first one would wait for it without an end."""
    sent = [["first sample"], ["second", "third"], []]
    computed: list[list[str]] = []
    monkeypatch.setattr(harness, "_broadcast_samples", lambda relay, own: sent.pop(0))
    monkeypatch.setattr(
        harness, "likelihoods", lambda relay, samples, note: computed.append(samples)
    )
    rank: Any = harness.Harness.__new__(harness.Harness)
    rank._relay = SimpleNamespace(world=SimpleNamespace(rank=1))
    rank._engine = SimpleNamespace(optimizer=SimpleNamespace(wait=lambda: None))
    assert rank.results() == {}
    assert computed == [["first sample"], ["second", "third"]]
