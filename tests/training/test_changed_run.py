"""A run that goes on says what it has other keys for, and goes on with other data only if that is
said."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megaprec.checkpoint.reader import Store
from megaprec.errors import Problem
from megaprec.text.build import prepare
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_hugging_face
from tests.refusals import sentence, shows
from tests.runs import checkpoint, edit_index, rewind, steps, tensors, train, write_run
from tools import cli
from tools.config.run_file import RunConfig, known_keys, load_run
from tools.journal.records import read_events
from tools.saved.train_state import TrainState
from tools.training.changed_keys import (
    KEYS_WITHOUT_EFFECT,
    NOT_EXACT_MARK,
    changed_keys,
    keys_of,
    lr_jump,
    rates_around,
    same_rates,
)
from tools.training.learning_rates import LearningRates

OWN = "data.cache="
UNITS = ("steps", "samples")  # of lr.unit


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run, with data of its own, has been trained for six steps, with checkpoints
    at 3 and 6; and another text."""
    file = write_run(tmp_path_factory.mktemp("changed"))
    text = (file.parent / "text.txt").read_text(encoding="utf-8")
    (file.parent / "other.txt").write_text(text[::-1], encoding="utf-8")
    assert train(file, OWN) == 0
    return file


@pytest.fixture
def run(file: Path, tmp_path: Path) -> Path:
    return rewind(file.parent / "run", tmp_path / "run", 3)


def changed(said: str) -> list[str]:
    return [
        line.removeprefix("changed    ")
        for line in said.splitlines()
        if line.startswith("changed ")
    ]


@pytest.mark.slow
def test_every_key_that_is_another_one_is_named_and_those_that_change_numbers_are_marked(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [
        "train.steps=4",
        "train.global_batch=4",
        "lr.peak=2e-2",
        "log.every=2",
        "model.dropout=0.2",
    ]
    assert (
        train(
            file, OWN, f"train.folder={run}", *other, "parallel.tensor=1", "precision.compute=bf16"
        )
        == 0
    )
    assert changed(capsys.readouterr().out) == [
        "log.every: 1 -> 2",
        "lr.peak: 0.01 -> 0.02 (not bit for bit)",
        "model.dropout: 0.1 -> 0.2 (not bit for bit)",
        "model.embedding_dropout: 0.1 -> 0.2 (not bit for bit)",
        'precision.attention: "fp32" -> "bf16" (not bit for bit)',
        'precision.compute: "fp32" -> "bf16" (not bit for bit)',
        'precision.parameters: "fp32" -> "bf16" (not bit for bit)',
        'precision.pipeline: "fp32" -> "bf16" (not bit for bit)',
        'precision.residual: "fp32" -> "bf16" (not bit for bit)',
        f'train.folder: "{file.parent}/run" -> "{run}"',
        "train.global_batch: 8 -> 4 (not bit for bit)",
        "train.steps: 6 -> 4",
    ]


def test_a_resume_with_another_torch_or_processor_is_not_called_bit_for_bit(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.training.changed_keys.processor", lambda: "abacus")
    assert train(file, OWN, f"train.folder={run}") == 0
    (line,) = (line for line in changed(capsys.readouterr().out) if line.startswith("processor"))
    assert line.endswith("-> abacus (not bit for bit)")


def test_a_key_that_is_gone_is_named_if_the_run_worked_otherwise_with_it(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former = {"optimizer.native": "true", "optimizer.validation": '"before"'}
    edit_index(checkpoint(run, 3), lambda index: index["run"].update(former))
    assert train(file, OWN, f"train.folder={run}") == 0
    lines = [line for line in changed(capsys.readouterr().out) if line.startswith("optimizer.")]
    assert lines == ["optimizer.native: true -> false (not bit for bit)"]


def test_a_run_that_is_the_same_says_nothing_of_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [OWN, f"train.folder={tmp_path}"]
    assert train(file, *arguments, "train.steps=3") == 0
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    capsys.readouterr()
    assert train(file, *arguments, "train.steps=4") == 0
    said = capsys.readouterr().out
    assert changed(said) == ["train.steps: 3 -> 4"], "the rate is constant"
    assert "note" not in said


def test_keys_that_change_no_number_are_keys() -> None:
    assert all(
        any(key == f or (f[-1] == "*" and key.startswith(f[:-1])) for key in known_keys())
        for f in KEYS_WITHOUT_EFFECT
    )


def test_unmarked_changes_go_on_bit_for_bit(file: Path, run: Path) -> None:
    free = [
        "log.every=3",
        "train.eval_every=2",
        "data.workers=1",
        "parallel.zero=false",
        "precision.patience=3",
    ]
    assert (
        train(
            file,
            OWN,
            f"train.folder={run}",
            *free,
            "checkpoint.every=2",
        )
        == 0
    )
    before = tensors(checkpoint(file.parent / "run", 6))
    after = tensors(checkpoint(run, 6))
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("override", "what", "line"),
    [
        ("train.seed=7", "seed", "train.seed: 1234 -> 7: "),
        ("data.shuffle=false", "shuffle", "data.shuffle: true -> false: "),
        ("data.held_out=0.3", "data", "data.held_out: 0.1 -> 0.3: "),
        (
            "data.vocab_size=320",
            "tokenizer",
            sentence("training.vocabulary_differs", vocab_size=320, size=330),
        ),
        (
            "data.source=FOLDER/other.txt",
            "data",
            sentence(
                "training.other_text",
                key="data.source",
                names='"FOLDER/text.txt" -> "FOLDER/other.txt"',
            ),
        ),
        (
            "data.max_chars=9000",
            "data",
            sentence("training.other_text", key="data.source", names='"FOLDER/text.txt"'),
        ),
    ],
    ids=lambda value: value.partition("=")[0] if "=" in value else "",
)
def test_other_data_is_refused_and_one_command_goes_on_with_it(
    override: str, what: str, line: str, file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(file.parent)
    arguments = [OWN, f"train.folder={run}", override.replace("FOLDER", folder)]
    before = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    capfd.readouterr()
    assert train(file, *arguments) == 2
    said = capfd.readouterr().err
    assert re.match(line.replace("FOLDER", folder), said), said
    assert f"--allow {what}" in said
    assert {path: path.read_bytes() for path in before} == before
    if what == "tokenizer":
        return  # which of another size is of another model
    assert train(file, *arguments, "--allow", what) == 0
    out = capfd.readouterr().out
    key = line.partition(":")[0].replace("\\", "")
    assert any(
        found.startswith(f"{key}: ") and found.endswith("(not bit for bit)")
        for found in changed(out)
    ), out
    assert len(steps(run)) == 6
    assert train(file, *arguments, "train.steps=7") == 0, "it is the data of the checkpoint now"


def test_what_is_asked_for_twice_is_allowed_twice(
    file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [OWN, f"train.folder={run}", "train.seed=7", "data.shuffle=false"]
    assert train(file, *arguments, "--allow", "seed") == 2
    said = capfd.readouterr().err
    assert "train.seed" not in said and shows(
        said, "training.changes_on_resume", flags="--allow shuffle"
    )
    assert train(file, "--allow", "seed", "--allow", "shuffle", *arguments) == 0


def test_an_allowance_that_is_not_needed_is_told(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, OWN, f"train.folder={run}", "--allow", "seed") == 0
    assert "note       --allow seed: not needed" in capsys.readouterr().out


def test_a_checkpoint_that_was_renamed_is_no_later_one(
    file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    renamed = checkpoint(run, 3).rename(checkpoint(run, 9))
    assert train(file, OWN, f"train.folder={run}", "train.steps=9") == 2
    said = Problem.of(
        "training.renamed_checkpoint",
        path=renamed,
        step=3,
        expected_name=checkpoint(run, 3).name,
    )
    assert capfd.readouterr().err == f"{said}\n"


def test_removed_data_is_made_again_and_the_run_goes_on_bit_for_bit(file: Path, run: Path) -> None:
    shutil.rmtree(run / "data")
    assert train(file, OWN, f"train.folder={run}") == 0
    assert steps(run) == steps(file.parent / "run")
    assert (run / "data" / "text.model").read_bytes() == (
        file.parent / "run" / "data" / "text.model"
    ).read_bytes()


@pytest.mark.slow
def test_a_ready_data_set_that_was_replaced_is_refused(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        shutil.copytree(file.parent / "run" / "data", tmp_path / name)
    (tmp_path / "two" / "text.json").unlink()
    content = bytearray((tmp_path / "two" / "text.bin").read_bytes())
    content[40:80] = content[80:120]
    (tmp_path / "two" / "text.bin").write_bytes(content)
    arguments = [f"data.source={tmp_path}/data/text", f"train.folder={tmp_path}/run"]
    shutil.copytree(tmp_path / "one", tmp_path / "data")
    assert train(file, *arguments, "train.steps=3") == 0
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(tmp_path / "two", tmp_path / "data")
    capfd.readouterr()
    assert train(file, *arguments) == 2
    first, last = capfd.readouterr().err.splitlines()
    assert (
        first.startswith(f'data.source: "{tmp_path}/data/text" (')
        and " SHA-256 " in first
        and " -> " in first
    )
    assert re.fullmatch(sentence("training.changes_on_resume", flags="--allow data"), last)
    assert train(file, *arguments, "--allow", "data") == 0


@pytest.mark.slow
def test_a_blend_keeps_its_parts_and_weights(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = file.parent

    def blend(first: float, *more: str) -> list[str]:
        parts = [
            f'{{source = "{folder}/text.txt", weight = {first}}}',
            f'{{source = "{folder}/other.txt", weight = 1.0}}',
        ]
        source = "data.source=python"
        return [
            OWN,
            source,
            f"data.blend=[{', '.join([*parts, *more])}]",
            f"train.folder={tmp_path}/run",
        ]

    assert train(file, *blend(1.0), "train.steps=2") == 0
    assert train(file, *blend(1.0), "train.steps=3") == 0
    capfd.readouterr()
    assert train(file, *blend(3.0), "train.steps=4") == 2
    assert "data.blend[0].weight: 1.0 -> 3.0\n" in capfd.readouterr().err
    assert train(file, *blend(3.0), "train.steps=4", "--allow", "data") == 0
    assert (
        train(file, *blend(3.0, f'{{source = "{folder}/my.toml", weight = 1.0}}'), "train.steps=5")
        == 2
    )
    assert "data.blend: 2 data sets -> 3 data sets\n" in capfd.readouterr().err


def test_the_same_tokens_by_another_name_are_the_same_data(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, f"data.source={run}/data/text", f"train.folder={run}") == 0
    assert f'data.source: "{file.parent}/text.txt" -> "{run}/data/text"' in changed(
        capsys.readouterr().out
    )
    assert steps(run) == steps(file.parent / "run")


def test_another_tokenizer_of_the_same_size_is_refused(
    file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [
        f"data.source={file.parent}/other.txt",
        f"data.cache={run}/fresh",
        f"train.folder={run}/first",
    ]
    assert train(file, *asked, "train.steps=1") == 0
    tokenizer = [
        "--allow",
        "data",
        OWN,
        f"train.folder={run}",
        f"data.tokenizer={run}/fresh/text.model",
    ]
    capfd.readouterr()
    assert train(file, *tokenizer) == 2
    said = capfd.readouterr().err
    assert "is not the tokenizer that the checkpoint was trained with" in said and shows(
        said, "training.changes_on_resume", flags="--allow tokenizer"
    )
    assert train(file, *tokenizer, "--allow", "tokenizer") == 0


def test_a_checkpoint_keeps_the_settings_beside_its_tokenizer_and_data_that_they_do_not_fit_are_noted(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end of a document that a data set was built with is in its tokens, so it stays when
    settings change."""
    tokenizer = train_hugging_face(
        [(file.parent / "text.txt").read_text("utf-8")], tmp_path / "tokenizer.json", 300
    )
    settings = tmp_path / "special_tokens_map.json"
    prefix = tmp_path / "tokens"
    settings.write_text('{"eos_token": "t"}')
    prepare(open_source(str(file.parent / "text.txt")), prefix, tokenizer=tokenizer)
    arguments = [f"data.source={prefix}", f"data.tokenizer={tokenizer}", "train.steps=1"]
    assert train(file, *arguments, f"train.folder={tmp_path}/one") == 0
    assert (checkpoint(tmp_path / "one", 1) / settings.name).read_bytes() == settings.read_bytes()
    assert "built with token" not in capfd.readouterr().out
    settings.write_text('{"eos_token": "h"}')
    assert train(file, *arguments, f"train.folder={tmp_path}/two") == 0
    ids = load_tokenizer(tokenizer).vocabulary()
    said = (
        f"{prefix} was built with token {ids['t']} at the end of each document, but {tokenizer} "
        "and the settings"
    )
    assert f"{said} beside it now say token {ids['h']}" in capfd.readouterr().out


def test_a_data_set_with_ids_that_the_tokenizer_does_not_have_is_refused_though_the_model_has_them(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = train_hugging_face(
        [(file.parent / "text.txt").read_text("utf-8")], tmp_path / "tokenizer.json", 270
    )
    keys = [f"data.tokenizer={small}", "model.vocab=400", f"train.folder={tmp_path}/run"]
    assert train(file, f"data.source={file.parent}/run/data/text", *keys) == 2
    assert shows(capfd.readouterr().err, "data.vocabulary_too_small", low=2, vocab=270)


@pytest.mark.slow
def test_a_finished_cosine_that_is_prolonged_tells_of_the_jump(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosine = [f"train.folder={tmp_path}", "lr.schedule=cosine", "train.eval_every=0"]
    assert train(file, *cosine, "train.steps=4") == 0
    capsys.readouterr()
    shutil.copytree(tmp_path, tmp_path.parent / "held")
    assert train(file, *cosine, "train.steps=8") == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    rates = [record["lr"] for record in steps(tmp_path)]
    assert rates[4] > 3 * rates[3]
    assert (
        f"jumps from {rates[3]:.3g} in step 4 to {rates[4]:.3g} in step 5: train.steps 4 -> 8 "
        "stretches"
    ) in note
    way = note.partition("Ways out: ")[2].split(" keeps")[0].split()
    held = [f"train.folder={tmp_path.parent}/held", *way, "train.steps=8"]
    assert train(file, *cosine, *held) == 0
    assert steps(tmp_path.parent / "held")[4]["lr"] == pytest.approx(rates[3], rel=1e-2), (
        "the way out works"
    )
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]


@pytest.mark.parametrize(
    ("had", "has", "marked"),
    [
        (["lr.length=4", "lr.final=1e-3"], ["lr.final=2e-3"], ["lr.final"]),
        (["lr.length=4", "lr.final=1e-3"], ["lr.peak=2e-2"], []),
        (["lr.length=32"], ["lr.unit=samples"], ["lr.unit"]),
        (["lr.length=32"], ["lr.unit=samples", "lr.length=256"], []),
        (["lr.schedule=wsd", "lr.decay=9", "train.steps=90000"], ["lr.final=1e-3"], ["lr.final"]),
        (["lr.schedule=linear"], ["train.steps=8", "lr.length=6"], []),
    ],
)
def test_rates_that_change_at_any_time_are_marked_and_others_are_not(
    had: list[str], has: list[str], marked: list[str], file: Path, tmp_path: Path
) -> None:
    """A schedule may have ended, count in another unit, or part only in a short tail."""
    before, after = (load_run(file, ["lr.schedule=cosine", *keys]) for keys in (had, had + has))
    rates = [LearningRates.of(config.lr, config.train) for config in (before, after)]
    progress = TrainState(step=5, applied=5, samples=40, applied_samples=40)
    store = cast(Store, SimpleNamespace(index={"run": keys_of(before), "model": {}}, path=tmp_path))
    changed = [
        line for line in changed_keys(store, after, progress) if line.startswith(("lr.", "train."))
    ]
    assert same_rates(rates[0], rates[1], progress) == (not marked)
    assert all(line.endswith(NOT_EXACT_MARK) == bool(marked) for line in changed) and len(
        changed
    ) == len(has)
    assert all(any(line.startswith(f"{key}: ") for line in changed) for key in marked)


def test_a_schedule_that_counts_in_another_unit_tells_of_the_jump(
    file: Path, tmp_path: Path
) -> None:
    # which has no records
    keys = [
        "lr.schedule=cosine",
        "lr.length=60",
        f"train.folder={tmp_path}",
    ]
    before, after = (load_run(file, [*keys, f"lr.unit={unit}"]) for unit in UNITS)
    progress = TrainState(step=5, applied=5, samples=40, applied_samples=40)
    store = cast(Store, SimpleNamespace(index={"run": keys_of(before), "model": {}}, path=tmp_path))
    assert rates_around(store, after, progress) == (
        before.lr_schedule.at(4),
        after.lr_schedule.at(40),
    )
    (note,) = lr_jump(store, after, progress)
    assert note.startswith("the learning rate jumps from 0.00989 in step 5 to 0.0025 in step 6")


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ("constant steps=60", "cosine steps=6", ', by lr.schedule "constant" -> "cosine"'),
        ("cosine steps=60", "cosine steps=61 lr.peak=1e-3", ", by lr.peak 0.01 -> 0.001"),
        ("cosine steps=6", "cosine steps=60", ": train.steps 6 -> 60 stretches the cosine"),
        (  # either alone would make it jump
            "cosine steps=6",
            "linear steps=60",
            ', by lr.schedule "cosine" -> "linear" and train.steps 6 -> 60',
        ),
        (
            "cosine steps=6",
            "cosine steps=60 lr.peak=0.4",
            ", by lr.peak 0.01 -> 0.4 and train.steps 6 -> 60",
        ),
        ("cosine steps=60", "cosine steps=70 lr.warmup=50", ", by lr.warmup 0 -> 50"),
        (
            "wsd steps=60 lr.decay=10",
            "wsd steps=60 lr.decay=59 lr.final=0.002 lr.peak=5e-3",
            ", by lr.peak 0.01 -> 0.005",
        ),
    ],
)
def test_a_jump_is_laid_to_the_keys_that_make_it(
    before: str, after: str, cause: str, file: Path, tmp_path: Path
) -> None:
    def run(text: str) -> RunConfig:
        schedule, steps, *others = text.split()
        keys = [f"lr.schedule={schedule}", f"train.{steps}", f"train.folder={tmp_path}", *others]
        return load_run(file, keys)

    progress = TrainState(step=5, applied=5, samples=40, applied_samples=40)
    index = {"run": keys_of(run(before)), "model": {}}
    store = cast(Store, SimpleNamespace(index=index, path=tmp_path))
    (note,) = lr_jump(store, run(after), progress)
    assert f"in step 6{cause}" in note, note


@pytest.mark.slow
def test_a_warm_up_that_goes_on_as_before_is_no_jump(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosine = [f"train.folder={tmp_path}", "lr.schedule=cosine", "lr.warmup=2", "train.eval_every=0"]
    assert train(file, *cosine, "train.steps=2") == 0
    assert train(file, *cosine, "train.steps=6") == 0
    rates = [record["lr"] for record in steps(tmp_path)]
    assert rates[2] == 2 * rates[1], "the warm-up reaches its peak"
    assert "the learning rate jumps" not in capsys.readouterr().out


def test_the_event_of_a_resume_tells_changes_and_notes_apart(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As their lines do."""
    edit_index(checkpoint(run, 3), lambda index: index.pop("data"))
    capsys.readouterr()
    assert train(file, OWN, f"train.folder={run}", "train.steps=4", "lr.peak=1e-1") == 0
    said = capsys.readouterr().out.splitlines()
    (event,) = read_events(run, "resume")
    changes, notes = (
        [line[11:] for line in said if line.startswith(f"{word} ")] for word in ("changed", "note")
    )
    assert event["changed"] == changes
    assert any("keeps no record" in note for note in event["notes"])
    assert set(event["notes"]) <= set(notes), "others are not of the resume"


@pytest.mark.slow
def test_the_event_of_a_resume_has_the_rates_of_the_records_around_it_and_what_changed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosine = [f"train.folder={tmp_path}", "lr.schedule=cosine", "train.eval_every=0"]
    assert train(file, *cosine, "train.steps=3") == 0
    assert (
        train(file, *cosine, "train.steps=5", "precision.compute=fp16", "precision.loss_scale=1e30")
        == 0
    )
    capsys.readouterr()
    assert (
        train(file, *cosine, "train.steps=8", "precision.compute=fp16", "precision.loss_scale=8.0")
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    records = steps(tmp_path)
    assert [record["outcome"] == "applied" for record in records] == [True] * 3 + [False] * 2 + [
        True
    ] * 3
    resumes = read_events(tmp_path, "resume")
    assert [event["step"] for event in resumes] == [3, 5]
    for event in resumes:
        last, following = records[event["step"] - 1 : event["step"] + 1]
        assert (event["lr_before"], event["lr_next"]) == (last["lr"], following["lr"])
    for word, key in (("changed", "changed"), ("note", "notes")):
        assert resumes[1][key] == [line[11:] for line in said if line.startswith(f"{word} ")]
    assert "train.steps: 5 -> 8 (not bit for bit)" in resumes[1]["changed"]


def test_merged_weights_among_a_runs_checkpoints_are_told_with_the_way_out(
    file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = checkpoint(run, 3)
    merged = checkpoint(run, 9)
    assert cli.main(["merge", str(own), str(own), "-o", str(merged)]) == 0
    assert train(file, OWN, f"train.folder={run}", "train.steps=12") == 2
    told = capfd.readouterr().err
    way_out = {"path": merged, "folder": merged.parent, "older": own.name}
    assert shows(told, "training.resumable_below", **way_out)
    shutil.move(merged, run.parent / "merged")
    assert train(file, OWN, f"train.folder={run}") == 0


@pytest.mark.parametrize(
    ("name", "lacks"), [("NAdam", "mu_product and no step"), ("Adagrad", "sum and no step")]
)
def test_a_rule_whose_numbers_the_checkpoint_lacks_is_refused_before_the_run_begins(
    name: str, lacks: str, file: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(file, OWN, f"train.folder={run}", f"optimizer.name={name}") == 2
    said = capfd.readouterr()
    place = checkpoint(run, 3)
    assert shows(said.err, "training.missing_state", path=place, missing=lacks)
    assert "resumed" not in said.out


@pytest.mark.parametrize(
    ("keys", "used", "unused"),
    [
        (["optimizer.name=lion"], "exp_avg", "exp_avg_sq"),
        (
            ["optimizer.name=sgd", "optimizer.options={momentum = 0.0}"],
            "no state",
            "exp_avg and exp_avg_sq",
        ),
    ],
)
def test_state_of_another_rule_that_a_run_does_not_go_on_with_is_told(
    keys: list[str],
    used: str,
    unused: str,
    file: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert train(file, OWN, f"train.folder={run}", *keys) == 0
    name = keys[0].partition("=")[2]
    note = (
        f'note       optimizer.name = "{name}" goes on with {used} of {checkpoint(run, 3)}, and '
        f"leaves out {unused}"
    )
    assert note in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("branches", [False, True])
def test_a_run_whose_checkpoints_are_in_another_folder_does_not_begin_anew(
    branches: bool, file: Path, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    keys = [OWN, f"train.folder={run}"]
    if branches:
        keys.append(f"train.branch_from={file.parent / 'run'}")
    elsewhere = f"checkpoint.folder={tmp_path / 'elsewhere'}"
    assert train(file, *keys, elsewhere) == 2
    assert shows(capfd.readouterr().err, "training.former_checkpoint", path=checkpoint(run, 3))
    assert content == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    # and back: what the run file of the folder names is looked at
    assert train(file, OWN, f"train.folder={tmp_path / 'other'}", elsewhere, "train.steps=3") == 0
    assert train(file, OWN, f"train.folder={tmp_path / 'other'}") == 2
    former = f'checkpoint.folder = "{tmp_path / "elsewhere"}"'
    assert shows(capfd.readouterr().err, "training.former_checkpoint", former=former)


@pytest.mark.parametrize("gone", ["elsewhere", "gopher://bucket.example/run"])
def test_a_former_folder_of_checkpoints_that_is_gone_is_told_and_refuses_no_run(
    gone: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [OWN, f"train.folder={tmp_path / 'run'}", "train.steps=3"]
    elsewhere = tmp_path / "elsewhere"
    assert train(file, *keys, f"checkpoint.folder={elsewhere}") == 0
    run_file = tmp_path / "run" / "run.toml"
    place = gone if "://" in gone else str(elsewhere)
    run_file.write_text(run_file.read_text("utf-8").replace(str(elsewhere), place), "utf-8")
    elsewhere.rename(tmp_path / "moved")
    elsewhere.symlink_to(tmp_path / "nowhere")
    capsys.readouterr()
    assert train(file, *keys) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    said = (
        f'a former run of this folder had checkpoint.folder = "{place}", which cannot be looked at'
    )
    assert sum(said in note for note in notes) == 1
    assert (tmp_path / "run" / "metrics.jsonl.old").is_file(), "nothing of the former run is lost"


@pytest.mark.slow
def test_first_weights_that_a_resumed_run_does_not_use_are_told(
    file: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initial = f"train.init_from={file.parent}/run"
    assert train(file, OWN, f"train.folder={run}", initial, "train.steps=4") == 0
    note = (
        "note       train.init_from: not used, for the run goes on with the weights of "
        f"{checkpoint(run, 3)}"
    )
    assert note in capsys.readouterr().out.splitlines()
    assert train(file, OWN, f"train.folder={run}", initial, "train.steps=5") == 0
    assert "not used" not in capsys.readouterr().out, "nothing has changed"


@pytest.mark.slow
def test_a_run_file_that_was_moved_with_its_run_tells_of_the_place_that_it_names(
    file: Path, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(file, OWN, f"train.folder={run}", "train.steps=4") == 0
    moved = run.rename(tmp_path / "moved")
    capfd.readouterr()
    assert cli.main(["train", f"{moved}/run.toml", "--strict"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(
        f'note: train.folder = "{run}", as when {moved}/run.toml was saved, so this run goes on or'
    )
    assert f": train.folder={moved} goes on with the run in {moved}" in said and not run.exists()
    assert cli.main(["train", f"{moved}/run.toml", "--strict", f"train.folder={moved}"]) == 0
    assert (
        cli.main(["train", f"{moved}/run.toml", "--strict", f"train.folder={run}", "train.steps=1"])
        == 0
    )


def test_a_checkpoint_keeps_what_it_was_trained_on(file: Path) -> None:
    store = Store(checkpoint(file.parent / "run", 6))
    data = store.index["data"]
    record = json.loads((file.parent / "run" / "data" / "text.json").read_text())
    (one,) = data["sets"]
    assert (one["bin_sha256"], one["idx_sha256"]) == (record["bin_sha256"], record["idx_sha256"])
    assert (data["held_out"], data["shuffle"], data["seed"]) == (0.1, True, 1234)
    assert data["tokenizer"] == record["tokenizer_sha256"]
    assert store.index["run"]["lr.peak"] == load_run(file).value("lr.peak")
