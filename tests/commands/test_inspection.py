"""`megaprec inspect` and `megaprec diff` over formats, and what train.init_from refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaprec.errors import UserError
from megaprec.parsing import read_json
from models.config import ModelConfig
from tests.other_systems import write_folder
from tests.refusals import raises, sentence
from tools.cli import main
from tools.commands import diff
from tools.commands.diff import compare
from tools.commands.inspect import ALWAYS_SHOWN, shown_keys
from tools.config.resolved_run import resolve_run
from tools.console.toml import toml
from tools.convert.initial import initial_model

pytestmark = pytest.mark.usefixtures("torch_files_read_here")
RUN = "[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nseq_length = 8\n"


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[Path]:
    """The same model in all three formats."""
    paths = [write_folder(tmp_path / "hf", "llama"), tmp_path / "ours", tmp_path / "megatron"]
    said(capsys, "convert", paths[0], paths[1])
    said(capsys, "convert", paths[1], paths[2], "--to", "megatron", "--tp", 2, "--pp", 2)
    return paths


def test_the_same_tensors_have_the_same_digest_in_every_format(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    told = [said(capsys, "inspect", folder) for folder in folders]
    assert (
        len({line for text in told for line in text.splitlines() if line.startswith("digest")}) == 1
    )
    for text, name in zip(told, ("Hugging Face", "megaprec", "Megatron-LM"), strict=True):
        assert f"format     {name}" in text
        assert "model      llama: layers 4, hidden 24, heads 4, kv_heads 2, head_dim 10" in text
    assert "layout     tensor 2, pipeline 2, data 1" in told[2]


def test_the_keys_that_make_it_another_model_than_its_family_are_told() -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 24, "heads": 4, "ffn": 16, "vocab": 9}
    plain = ModelConfig(family="qwen2", experts=4, experts_per_token=2, **sizes)
    assert list(shown_keys(plain)) == [*ALWAYS_SHOWN, "experts"]
    others = {
        "shared_experts": 8,
        "shared_gate": True,
        "dense_layers": (0,),
        "mtp_layers": 1,
        "window": 5,
    }
    told = shown_keys(plain.model_copy(update=others))
    assert {key: told[key] for key in others} == others | {"dense_layers": [0]}
    latent = {"kv_rank": 7, "rope_dim": 4, "nope_dim": 4, "value_dim": 4}
    assert (
        shown_keys(ModelConfig(**{"family": "deepseek_v3", **sizes, "latent": latent}))["latent"]
        == latent
    )


def test_every_tensor_is_listed_on_request(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "inspect", folders[2], "--tensors")
    assert len([line for line in text.splitlines() if "weight/" in line]) == 39


def test_equal_models_do_not_differ_and_the_largest_difference_comes_first(
    folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert said(capsys, "diff", folders[0], folders[2]) == "39 of 39 tensors are equal, 0 differ\n"
    tensors = load_file(folders[0] / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    tensors["lm_head.weight"] += 0.25
    save_file(tensors, folders[0] / "model.safetensors")
    lines = [
        line
        for line in said(capsys, "diff", folders[0], folders[1]).splitlines()
        if "weight/" in line
    ]
    assert [line.split()[1] for line in lines] == ["weight/final_norm.weight", "weight/head.weight"]


def test_what_is_noted_of_a_folder_is_noted_of_its_comparison(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "note" not in said(capsys, "diff", folders[0], folders[1])
    assert json.loads(said(capsys, "diff", folders[0], folders[1], "--json"))["notes"] == []
    config = read_json(folders[0] / "config.json")
    (folders[0] / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoModel": "mine.Model"}})
    )
    _, line = said(capsys, "diff", folders[0], folders[1]).splitlines()
    assert line.startswith(
        f"note: {folders[0]}: config.json has auto_map: code of the folder's own is not run"
    )
    (note,) = json.loads(said(capsys, "diff", folders[1], folders[0], "--json"))["notes"]
    assert line == f"note: {note}"


def test_no_line_is_longer_than_a_screen_and_in_a_pipe_no_name_is_broken(
    folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(map(len, said(capsys, "inspect", folders[1]).splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "40")
    listed = said(capsys, "inspect", folders[1], "--tensors")
    assert "layers.3.attention.query.weight" in listed
    assert len([line for line in listed.splitlines() if "weight/" in line]) == 39


def test_a_difference_is_the_largest_and_the_mean_in_float64() -> None:
    found = compare(
        "x", torch.tensor([1.0, -2.0, float("inf")]), torch.tensor([1.5, -2.0, float("inf")])
    )
    assert (found.largest, found.mean) == (0.5, 0.5 / 3)
    assert compare(
        "x", torch.tensor([float("nan")]), torch.tensor([float("nan")])
    ).largest == float("inf")
    assert compare("x", torch.zeros(2), torch.zeros(3)).note == "[2] and [3]"
    damaged = compare("x", torch.tensor([float("nan"), 2.0]), torch.tensor([1.0, 2.0]))
    assert damaged.largest == float("inf") and damaged.size != damaged.size, (
        "NaN is not a largest value of 0 or 2"
    )


def test_the_largest_value_is_exact_over_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "BLOCK", 1)
    assert compare("x", torch.tensor([0.1, 0.0], dtype=torch.float64), torch.ones(2)).size == 0.1


def test_equal_tensors_of_another_model_are_told_to_be_that(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_json(folders[0] / "config.json")
    (folders[0] / "config.json").write_text(
        json.dumps({**config, "rope_theta": 500.0, "rms_norm_eps": 0.5})
    )
    equal, eps, base = said(capsys, "diff", folders[0], folders[1]).splitlines()
    assert equal == "39 of 39 tensors are equal, 0 differ"
    assert eps.startswith(f"model.norm_eps is 0.5 in {folders[0]} and ") and eps.endswith(
        f" in {folders[1]}"
    )
    assert base.startswith(f"model.rope_base is 500.0 in {folders[0]} and ")
    told = json.loads(said(capsys, "diff", folders[1], folders[0], "--json"))["model"]
    assert {key: values["b"] for key, values in told.items()} == {
        "norm_eps": 0.5,
        "rope_base": 500.0,
    }


def test_a_run_takes_its_model_from_the_folder_unless_it_contradicts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", "qwen2")
    file = tmp_path / "run.toml"
    file.write_text(f'{RUN}init_from = "{folder}"\n[data]\nsource = "x"\nvocab_size = 131\n')
    config = resolve_run(file)
    assert (config.model.layers, config.model.kv_heads, config.model.qkv_bias) == (4, 2, True)
    assert config.origin("model.layers") == str(folder / "config.json")
    assert (
        resolve_run(
            file, ["model.layers=4", "model.dropout=0.1", "model.max_positions=8"]
        ).model.dropout
        == 0.1
    )
    with raises(
        "config.not_of_weights",
        key="model.layers",
        value=3,
        origin="command line",
        value_of_weights=4,
    ):
        resolve_run(file, ["model.layers=3"])


def test_every_key_may_be_given_as_the_folder_has_it(tmp_path: Path) -> None:
    """Also those whose values are lists and tables."""
    folder = write_folder(tmp_path / "hf", "gpt_oss")
    model = initial_model(folder).model
    file = tmp_path / "run.toml"
    file.write_text(
        f'{RUN}init_from = "{folder}"\n[data]\nsource = "x"\nvocab_size = {model.vocab}\n'
    )
    assert model.window_layers
    keys = [f"model.{key}={toml(value)}" for key, value in model.model_dump(mode="json").items()]
    assert resolve_run(file, keys).model == model
    with raises(
        "config.not_of_weights", key="model.window_layers", value="[1]", origin="command line"
    ):
        resolve_run(file, ["model.window_layers=[1]"])


def test_a_run_from_a_folder_that_is_none_or_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    (tmp_path / "run.toml").write_text(RUN)
    none = r"^train.init_from \(command line\): " + sentence(
        "convert.not_a_folder", path=re.compile("none$"), what_it_is="not there"
    )
    with pytest.raises(
        UserError, match=f"{none}$"
    ):  # and not a word of the keys that it would have brought
        resolve_run(tmp_path / "run.toml", [f"train.init_from={tmp_path}/none"])
    with pytest.raises(UserError, match=f"{none}\nmodel.layers = -1 .*$"):
        resolve_run(tmp_path / "run.toml", [f"train.init_from={tmp_path}/none", "model.layers=-1"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with raises("convert.hf_model_type", kind="bert"):
        resolve_run(tmp_path / "run.toml", [f"train.init_from={folder}"])
