"""Weights go on with longer sequences if that is asked for: the model is then what transformers
computes with the same keys, and the change is recorded, told and exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.published import folder_of, logits_of, loss_of, model_of, written
from tests.refusals import shows
from tests.runs import checkpoint, losses, steps, train, write_run
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.convert.native import native_model
from tools.journal.records import INITIAL, read_branching, read_events
from tools.training.corpus import open_corpus

ALLOWED = "model.rope_base,model.rope_scaling,train.seq_length,model.max_positions"
BASE = "model.rope_base=5000.0"
LINEAR = 'model.rope_scaling={kind="linear",factor=4.0}'
LONG = ("train.seq_length=32", "model.max_positions=64")
ORIGINAL = {"original_max_position_embeddings": 16}
# kinds that scale positions, as transformers has them
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, **ORIGINAL},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"factor": 4.0, **ORIGINAL},
}
LATENT = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, **ORIGINAL}


def scaling_key(kind: str, keys: dict[str, Any]) -> str:
    parameters = ", ".join(f"{key} = {value}" for key, value in keys.items())
    return f'model.rope_scaling={{kind = "{kind}", {parameters}}}'


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("name", "kind", "keys"),
    [
        ("llama", "yarn", SCALINGS["yarn"]),
        ("deepseek_v3 yarn", "yarn", LATENT),
        *(
            pytest.param("llama", kind, SCALINGS[kind], marks=pytest.mark.slow)
            for kind in ("linear", "dynamic", "llama3")
        ),
        pytest.param("qwen2 window", "yarn", SCALINGS["yarn"], marks=pytest.mark.slow),
    ],
)
def test_the_first_loss_and_the_export_are_those_of_transformers_with_the_same_keys(
    name: str, kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(name, tmp_path / "hf")
    file = written(tmp_path, folder, "[precision]", 'compute = "fp64"')
    positions = "model.max_positions=16" if kind == "dynamic" else "model.max_positions=64"
    # the loads of experts move it, whatever the learning rate
    still = "model.router_correction_speed=0"
    overrides = [BASE, scaling_key(kind, keys), "train.seq_length=16", positions, still]
    export = tmp_path / "export"
    given = [*overrides, "--allow", ALLOWED, "--export-hf", str(export), "--no-verify"]
    assert train(file, *given) == 0

    length = 16 if kind == "dynamic" else 64
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **keys}
    theirs = model_of(folder, rope_parameters=parameters, max_position_embeddings=length)
    batch = open_corpus(resolve_run(file, overrides)).train.batch(0, 2)
    assert losses(tmp_path / "run") == [pytest.approx(loss_of(theirs, batch), rel=1e-10)]
    exported = model_of(export)
    torch.testing.assert_close(logits_of(exported, batch), logits_of(theirs, batch))
    assert exported.config.max_position_embeddings == length


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, whose run of six steps is in the folder `run` beside it."""
    file = write_run(tmp_path_factory.mktemp("longer"))
    assert train(file, "train.seq_length=16", "data.shuffle=false") == 0
    return file


def first(file: Path) -> Path:
    return file.parent / "run"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bare(file: Path, place: Path) -> Path:
    """The run file without [model]."""
    text = file.read_text()
    place.write_text(text[text.index("[data]") :])
    return place


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("start", "refusal"),
    [("init_from", "training.changes_on_init"), ("branch_from", "training.changes_on_branch")],
)
def test_a_run_that_begins_with_a_checkpoint_asks_once_and_keeps_the_change(
    start: str, refusal: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = bare(file, tmp_path / "own.toml")
    run = tmp_path / "run"
    begun = [f"train.{start}={first(file)}", f"train.folder={run}", "data.shuffle=false"]
    changes = [BASE, LINEAR, *LONG]
    assert train(own, *begun, *changes, "train.steps=7") == 2
    said = capsys.readouterr().err
    flags = "--allow model.rope_base --allow model.rope_scaling --allow model.max_positions"
    assert shows(said, refusal, flags=flags)
    assert "model.rope_base: 10000.0 -> 5000.0" in said
    assert "model.max_positions: 16 -> 64" in said
    assert not run.exists()
    accepted = ["--allow", ALLOWED]
    assert train(own, *begun, *changes, "train.steps=7", *accepted) == 0
    out = capsys.readouterr().out
    assert "changed    model.rope_base: 10000.0 -> 5000.0" in out
    model, _ = native_model(checkpoint(run, 7))
    assert (model.rope_base, model.rope_scaling.factor, model.max_positions) == (5000.0, 4.0, 64)
    event = read_branching(run) if start == "branch_from" else read_events(run, INITIAL)[0]
    assert event is not None
    told = [line.partition(":")[0] for line in event["changed"]]
    assert {"model.rope_base", "model.rope_scaling", "model.max_positions"} <= {*told}
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert "model.rope_base: 10000.0 -&gt; 5000.0" in (tmp_path / "page.html").read_text()

    # the change is that of the checkpoint now, and its undoing is another one
    assert train(own, *begun, *changes, "train.steps=8") == 0
    assert "model.rope" not in capsys.readouterr().out
    assert train(own, *begun, *changes, "model.rope_base=7000.0", "train.steps=9") == 2
    assert "model.rope_base: 5000.0 -> 7000.0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resume_asks_and_then_has_the_same_steps_as_a_branch(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place in the data is kept in tokens, in the order of the text."""
    run = tmp_path / "run"
    shutil.copytree(first(file), run)
    changes = ["data.shuffle=false", "train.steps=8", BASE, *LONG]
    assert train(file, f"train.folder={run}", *changes) == 2
    said = capsys.readouterr().err
    assert shows(
        said,
        "training.changes_on_resume",
        flags="--allow model.rope_base --allow model.max_positions",
    )
    before = contents(run)
    assert train(file, f"train.folder={run}", *changes, f"--allow={ALLOWED}") == 0
    out = capsys.readouterr().out
    tokens = 6 * 8 * 16
    assert f"{tokens:,} tokens are read, and sample {tokens // 32:,} of 32 tokens is next" in out
    assert all(
        contents(run)[path] == before[path] for path in before if "step_00000006" in str(path)
    )
    branch = tmp_path / "branch"
    origin = f"train.branch_from={first(file)}"
    given = [*changes, origin, f"train.folder={branch}", f"--allow={ALLOWED}"]
    assert train(file, *given) == 0
    assert steps(branch) == steps(run)[6:]


def test_other_keys_of_the_model_stay_refused_and_learned_positions_by_name(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = [f"train.init_from={first(file)}", f"train.folder={tmp_path}/run", f"--allow={ALLOWED}"]
    for key in ("model.rotary_fraction=0.5", "model.window_rope_base=500.0", "model.window=4"):
        assert train(file, *begun, key) == 2
        assert shows(capsys.readouterr().err, "config.not_of_weights", key=key.partition("=")[0])
    learned = [f"train.folder={tmp_path}/learned", 'model.positions="learned"', "train.steps=1"]
    assert train(file, *learned) == 0
    capsys.readouterr()
    longer = [*learned, "model.max_positions=64", f"--allow={ALLOWED}"]
    assert train(file, *longer, "train.steps=2") == 2
    assert shows(capsys.readouterr().err, "config.learned_positions", max_positions=64, saved=16)
    begun = [f"train.init_from={tmp_path}/learned", f"train.folder={tmp_path}/next"]
    assert train(file, *longer[1:], *begun) == 2
    assert shows(capsys.readouterr().err, "config.learned_positions", max_positions=64, saved=16)


@pytest.mark.slow
def test_fewer_positions_and_those_that_follow_the_length_of_samples_need_no_word(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = [f"train.init_from={first(file)}", f"train.folder={tmp_path}/run", "train.steps=1"]
    assert train(file, *begun, "train.seq_length=8", "model.max_positions=8") == 0
    assert "changed" not in capsys.readouterr().out
    assert not read_events(tmp_path / "run", INITIAL)
    short = ["train.seq_length=8", "model.max_positions=8"]
    assert train(file, *begun, *short, "train.steps=2", f"--allow={ALLOWED}") == 0
    out = capsys.readouterr().out
    for key in ("model.rope_base", "model.max_positions", "seq_length"):
        assert f"note       --allow {key}: not needed" in out
    saved = json.loads((checkpoint(tmp_path / "run", 2) / "checkpoint.json").read_text())
    assert saved["model"]["max_positions"] == 8


def test_an_allowance_of_several_names_that_holds_an_unknown_one_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(file, "--allow", "seed,model.rope_bases")
    assert ended.value.code == 2
    assert "model.rope_base" in capsys.readouterr().err
