"""The laws of checkpoint.export: each checkpoint that a run keeps has a whole Hugging Face folder,
whose numbers are those of the run, or none; and a card that says what is known."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.repocard_data import model_index_to_eval_results

from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from tests.checkpoint.test_keeping import steps_in
from tests.refusals import shows
from tests.runs import checkpoint, edit_index, steps, tensors, train, train_on, write_run
from tests.training.test_saves import During
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.config.run_file import load_run
from tools.convert.core import target
from tools.training import kept_exports
from tools.training.corpus import open_corpus
from tools.training.kept_exports import EXPORTED, export_kept
from tools.training.trainer import Trainer

Refusal = Callable[..., str]
KEYS = ("checkpoint.export=hf", "train.eval_every=1", "checkpoint.every=1", "train.seq_length=32")
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def run(file: Path) -> Path:
    """A run of three steps that has kept the last two."""
    assert train(file, *KEYS, "train.steps=3", "--no-verify") == 0
    return file.parent / "run"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    def call(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        return capsys.readouterr().err

    return call


@torch.no_grad()
def their_loss(file: Path, folder: Path, *keys: str) -> float:
    """The held-out loss of a folder by transformers, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    samples = open_corpus(resolve_run(file, [*KEYS, *keys])).evaluated["eval_loss"]
    batch = samples.batch(0, len(samples))
    assert batch.mask is None
    logits = model(torch.as_tensor(batch.tokens)).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(batch.targets).flatten()
    ).item()


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        pytest.param({}, ("optimizer.ema=0.5", "checkpoint.export_ema=true")),
        pytest.param({"tensor": 2, "pipeline": 2}, (), marks=pytest.mark.slow),
        pytest.param(
            {"tensor": 2, "data": 2},
            ("parallel.zero=1", "checkpoint.background=false"),
            marks=pytest.mark.slow,
        ),
        pytest.param({"data": 2}, ("parallel.zero=2",), marks=pytest.mark.slow),
        pytest.param({"data": 2}, ("parallel.zero=3",), marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_each_kept_folder_by_transformers_is_the_held_out_loss_of_its_step(
    layout: dict[str, int], keys: tuple[str, ...], file: Path, tmp_path: Path
) -> None:
    trained = train_on(file, *KEYS, *keys, "train.steps=3", f"train.folder={tmp_path}", **layout)
    assert steps_in(trained / "checkpoints") == [2, 3]
    field = "eval_loss_ema" if "checkpoint.export_ema=true" in keys else "eval_loss"
    for record in steps(trained)[1:]:
        path = checkpoint(trained, record["step"])
        assert {entry.name for entry in (path / EXPORTED).iterdir()} == FILES
        assert not [entry for entry in path.iterdir() if entry.name.endswith(".partial")]
        loss = their_loss(file, path / EXPORTED, *keys)
        assert loss == pytest.approx(record[field], rel=1e-6)


class Killed(BaseException):
    """Stands for a signal that leaves no time to clean up."""


@pytest.mark.slow
def test_a_kill_at_any_boundary_leaves_a_whole_folder_or_none_and_the_next_save_completes_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, flush and renaming of the export is a boundary."""
    whole = checkpoint(run, 3) / EXPORTED
    boundary = 0
    while True:
        folder = tmp_path / str(boundary) / "checkpoints"
        shutil.copytree(run / "checkpoints", folder)
        shutil.copy(run / "yardsticks.json", folder.parent)
        path = folder / "step_00000003"
        shutil.rmtree(path / EXPORTED)
        left = boundary

        def counted(name: str, module: object) -> None:
            nonlocal left
            original = getattr(module, name)

            def call(*arguments: object, **named: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return original(*arguments, **named)

            monkeypatch.setattr(module, name, call)

        for module, name in ((target, "fill"), (target, "sync"), (Path, "rename"), (Path, "mkdir")):
            counted(name, module)
        try:
            warnings = export_kept(folder)
        except Killed:
            warnings = None
        monkeypatch.undo()
        Store(path)
        if warnings is not None:
            assert warnings == []
            break
        if (path / EXPORTED).exists():
            same(path / EXPORTED, whole)
        assert export_kept(folder) == []
        same(path / EXPORTED, whole)
        assert not list(path.glob(".*"))
        boundary += 1
    assert boundary > len(FILES)


def same(folder: Path, other: Path) -> None:
    assert {entry.name for entry in folder.iterdir()} == FILES
    for name in FILES:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_a_full_disk_costs_the_folder_a_warning_and_the_run_nothing(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = target.fill

    def full(path: Path, *arguments: object) -> None:
        if "step_00000002" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        fill(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "fill", full)
    keys = (*KEYS, "train.steps=3", f"train.folder={tmp_path}", "--no-verify")
    capsys.readouterr()
    assert train(file, *keys) == 0
    said = capsys.readouterr().err
    assert "step_00000002 is saved, but has no folder hf, and each later save tries again" in said
    assert "step_00000003 is saved" not in said
    assert not list(checkpoint(tmp_path, 2).glob("*hf*"))
    assert (checkpoint(tmp_path, 3) / EXPORTED).is_dir()
    # the disk has room again
    monkeypatch.undo()
    assert train(file, *keys, "train.steps=4", "checkpoint.keep=3") == 0
    assert (checkpoint(tmp_path, 2) / EXPORTED).is_dir()


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (("checkpoint.export_ema=true",), "command.export_key_no_ema"),
        (("model.factory=mine.py:make",), "model.factory_not_built_in"),
        (("model.family=gpt2", "model.mlp=swiglu"), "convert.hf_no_family"),
    ],
)
def test_a_run_whose_model_no_folder_can_hold_is_refused_before_it_begins(
    keys: tuple[str, ...], code: str, file: Path, tmp_path: Path, refusal: Refusal
) -> None:
    (tmp_path / "mine.py").write_text("def make(config): raise AssertionError\n")
    folder = tmp_path / "new"
    said = refusal("train", file, f"train.folder={folder}", *KEYS, *keys)
    assert shows(said, code)
    assert not folder.exists()


def test_the_card_is_one_that_the_hub_reads_and_says_what_the_run_recorded(run: Path) -> None:
    path = checkpoint(run, 3)
    card = huggingface_hub.ModelCard.load(path / EXPORTED / "README.md")
    metadata = card.data.to_dict()
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert "license" not in metadata
    record = steps(run)[2]
    _, results = model_index_to_eval_results(metadata["model-index"])
    values = {result.metric_type: result.metric_value for result in results}
    assert values["loss"] == record["eval_loss"]
    assert f"| tokens | {3 * 8 * 32:,} |" in card.text
    assert f"| held-out loss | {record['eval_loss']:.4f} nats a token |" in card.text
    assert f"| bits per byte | {values['bits_per_byte']:.4f} |" in card.text


def test_the_settings_of_a_card_are_a_run_file_of_the_same_run(run: Path, tmp_path: Path) -> None:
    text = (checkpoint(run, 3) / EXPORTED / "README.md").read_text()
    _, _, rest = text.partition("```toml\n")
    mine = tmp_path / "card.toml"
    mine.write_text(rest.partition("```")[0])
    ours, theirs = resolve_run(run / "run.toml"), resolve_run(mine)
    # the size of the vocabulary is in the card, and was the tokenizer's
    assert ours.model.vocab == 0
    assert theirs.sized_model == ours.sized_model
    assert {**dict(theirs), "model": None} == {**dict(ours), "model": None}


@pytest.mark.slow
def test_convert_and_export_hf_write_the_card_of_the_checkpoint(
    file: Path, run: Path, tmp_path: Path
) -> None:
    exported = checkpoint(run, 3) / EXPORTED
    assert main(["convert", str(run), str(tmp_path / "a"), "--to=hf", "--no-verify"]) == 0
    same(tmp_path / "a", exported)
    keys = [*KEYS, "train.steps=3", "--no-verify", f"--export-hf={tmp_path / 'b'}"]
    assert main(["train", str(file), *keys]) == 0
    same(tmp_path / "b", exported)


def test_a_card_shows_no_secret_of_a_url(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "step_00000003"
    shutil.copytree(checkpoint(run, 3), copied)
    secret = "https://host/text.txt?sig=SECRET"

    def with_secret(index: dict[str, Any]) -> None:  # as checkpoints of earlier versions may have
        index["run"]["data.source"] = f'"{secret}"'
        index["data"]["sets"][0]["source"] = secret

    edit_index(copied, with_secret)
    assert main(["convert", str(copied), str(tmp_path / "out"), "--to=hf", "--no-verify"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "https://host/text.txt?***" in card
    assert "SECRET" not in card


def test_steps_are_taken_while_a_folder_is_written_and_are_those_of_a_run_without_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of step 2 is not begun before step 4, whose save waits for it."""
    is_taken = Event()
    convert = kept_exports.convert

    def late(*arguments: object) -> object:
        assert is_taken.wait(600)
        return convert(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_exports, "convert", late)

    def act(step: int) -> None:
        if step == 4:
            is_taken.set()

    run_folders = {name: tmp_path / name for name in ("hf", "none")}
    for name, folder in run_folders.items():
        keys = [f"train.folder={folder}", "checkpoint.every=2", f"checkpoint.export={name}"]
        config = load_run(file, [*keys, "train.steps=4"])
        Trainer(config, open_corpus(config), None, None, [During(act)]).run()
    assert (checkpoint(run_folders["hf"], 2) / EXPORTED).is_dir()
    exported, plain = (steps(folder) for folder in run_folders.values())
    assert exported == plain
    ours, theirs = (tensors(checkpoint(folder, 4)) for folder in run_folders.values())
    assert all(torch.equal(values, theirs[key]) for key, values in ours.items())


def test_what_a_folder_leaves_out_is_said_before_the_first_step(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    keys = (*KEYS, "model.mtp_layers=1", "train.steps=1", f"train.folder={tmp_path}")
    assert train(file, *keys, "--no-verify") == 0
    out = capsys.readouterr().out
    (note,) = (line for line in out.splitlines() if "leaves out" in line)
    assert "modules of multi-token prediction (model.mtp_layers = 1)" in note
    assert out.index(note) < out.index("step 1/1")


def test_a_place_that_cannot_be_listed_is_a_warning(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(folder: Path) -> list[Path]:
        raise UserError(f"{folder}: gone")

    monkeypatch.setattr(kept_exports, "made_here", gone)
    assert export_kept(run / "checkpoints") == [f"{run / 'checkpoints'}: gone"]


def test_a_card_has_every_weight_of_a_blend_that_changes(file: Path, tmp_path: Path) -> None:
    text = file.parent / "text.txt"
    other = tmp_path / "other.txt"
    shutil.copyfile(text, other)
    blend = (
        f"data.blend=[{{source='{text}', weight=[[0, 0.75], [8, 0.25]]}}, "
        f"{{source='{other}', weight=0.25}}]"
    )
    folder = tmp_path / "blended"
    blended = tmp_path / "my.toml"
    lines = file.read_text().splitlines()
    blended.write_text("\n".join(line for line in lines if not line.startswith("source =")))
    words = (blend, f"train.folder={folder}", f"data.cache={tmp_path}/data", "train.steps=2")
    assert train(blended, *words, "--no-verify") == 0
    assert main(["convert", str(folder), str(tmp_path / "hf"), "--to", "hf"]) == 0
    rows = (tmp_path / "hf" / "README.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith(f"| `{text}` |")]
    assert "| 0.75, 0.25 from sample 8 on |" in row
