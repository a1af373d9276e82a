"""Modules of multi-token prediction in folders of DeepSeek-V3 and GLM-4.5: read, written, and
nothing in silence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import runs
from tests.other_systems import CONFIGS, write_folder
from tests.refusals import raises
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.convert.formats import open_source
from tools.convert.verify import load_stage

KINDS = ("deepseek_v3", "glm4_moe")
IDS = torch.randint(131, (12, 1), generator=torch.Generator().manual_seed(1))
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def folder_of(path: Path, kind: str, modules: int, **changes: Any) -> Path:
    """A folder with the tensors of so many modules after four layers, with copies of embedding and
    head."""
    folder = write_folder(path, kind, num_nextn_predict_layers=modules, **changes)
    tensors = load_file(folder / "model.safetensors")
    for n in range(4, 4 + modules):
        assert (
            tensors[f"model.layers.{n}.eh_proj.weight"].shape[1] == 2 * CONFIGS[kind]["hidden_size"]
        )
        tensors |= {
            f"model.layers.{n}.{copy}": tensors[whole].clone() for copy, whole in COPIES.items()
        }
    return put(folder, tensors)


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_modules_come_back_from_our_checkpoint_as_they_were(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "hf", kind, 2)
    source = open_source(folder)
    assert source.model.mtp_layers == 2
    assert main(["convert", str(folder), str(tmp_path / "ours"), "--no-verify"]) == 0
    assert (
        "2 layers for multi-token prediction: they are read as model.mtp_layers"
        in capfd.readouterr().out
    )
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "again"), "--no-verify"]) == 0
    theirs, ours = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert theirs.keys() == ours.keys()
    assert not [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])]
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"]
        == 2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_beside_its_modules_is_the_model_without_them(kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", kind, 1)
    with_modules = load_stage(open_source(folder), "fp64")(IDS)
    kept = {
        n: t
        for n, t in load_file(folder / "model.safetensors").items()
        if not n.startswith("model.layers.4.")
    }
    put(folder, kept)
    source = open_source(folder)
    assert source.model.mtp_layers == 0
    assert any(
        "1 layers for multi-token prediction, of which the files hold no tensor" in n
        for n in source.facts.notes
    )
    assert torch.equal(load_stage(source, "fp64")(IDS), with_modules)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_differs_from_its_original_is_refused(copy: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", "deepseek_v3", 1)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.4.{copy}"][3, 2] += 1e-3
    with raises(
        "convert.hf_mtp_copy_differs", foreign=f"model.layers.4.{copy}", original=COPIES[copy]
    ):
        open_source(put(folder, tensors))


def test_modules_are_there_as_config_says_or_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", "glm4_moe", 1)
    tensors = load_file(folder / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if "hnorm" not in name}
    with raises("convert.tensor_missing", name="model.layers.4.hnorm.weight"):
        open_source(put(folder, without))
    with raises("convert.tensor_surplus"):
        open_source(edit(put(folder, tensors), num_nextn_predict_layers=0))
    with raises("convert.tensor_missing", name="model.layers.5.enorm.weight"):
        open_source(edit(folder, num_nextn_predict_layers=2))


@pytest.mark.slow
def test_formats_without_a_place_for_modules_leave_them_out_and_say_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run of Llama's form, to Hugging Face. Text and losses need no modules either."""
    assert (
        runs.train(
            runs.write_run(tmp_path), "model.mtp_layers=1", "train.steps=1", "model.dropout=0"
        )
        == 0
    )
    assert "mtp loss" in capfd.readouterr().out
    (step,) = runs.steps(tmp_path / "run")
    assert 0 < step["mtp_loss"] < 2 * step["loss"]
    said = "modules of multi-token prediction (model.mtp_layers = 1)"
    made = tmp_path / "hf"
    assert main(["convert", str(tmp_path / "run"), str(made), "--to", "hf", "--no-verify"]) == 0
    assert said in capfd.readouterr().out
    assert open_source(made).model.mtp_layers == 0
    ours, theirs = (load_stage(open_source(path), "fp64") for path in (tmp_path / "run", made))
    assert torch.equal(ours(IDS), theirs(IDS))
    assert main(["generate", str(tmp_path / "run"), "--prompt", "the", "--tokens", "3"]) == 0


def test_a_run_starts_from_a_folder_with_its_modules_or_without(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", "deepseek_v3", 1)
    file = tmp_path / "run.toml"
    train = "steps = 1\nglobal_batch = 2\nmicro_batch = 1\nseq_length = 16\n"
    file.write_text(f'[data]\nvocab_size = 131\n[train]\n{train}init_from = "{folder}"\n')
    assert resolve_run(file).model.mtp_layers == 1
    assert (
        resolve_run(file, ["model.mtp_layers=0", "model.mtp_loss_weight=0.1"]).model.mtp_layers == 0
    )
    with raises("config.not_of_weights", key="model.mtp_layers", value=2, value_of_weights=1):
        resolve_run(file, ["model.mtp_layers=2"])
