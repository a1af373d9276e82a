"""NeMo 2's checkpoints: weights from torch_dist, the model from model.yaml, every key of it
accounted for."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor

from megaprec.errors import UserError
from tests.convert.test_beside import POINTER
from tests.convert.test_megatron_stacked import state_of
from tests.convert.test_untrusted import Malice
from tests.nemo import OTHERS, SILU, config_of, write_context
from tests.other_systems import usually, write_folder
from tests.refusals import sentence, shows
from tools.cli import main
from tools.convert.core.yaml_files import read_yaml
from tools.convert.formats import open_source
from tools.convert.systems.nemo import SPEC
from tools.convert.verify import load_stage

here = pytest.mark.usefixtures("torch_files_read_here")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about saving without ranks
SCALED = {
    "scale_factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "old_context_len": 8,
}
KINDS = ["gpt2", "gpt2-untied", "llama", "llama-tied", "llama-stretched", "qwen2", "qwen3"]


def save(folder: Path, kind: str = "llama", stacked: bool = True, **changes: Any) -> Path:
    return save_changed(folder, kind, stacked, changes)


def save_changed(folder: Path, kind: str, stacked: bool, changes: dict[Any, Any]) -> Path:
    """A checkpoint of the model of `folder`/hf, in `folder`/nemo. changes: of its configuration;
    ...: no such key."""
    source = open_source(write_folder(folder / "hf", kind))
    state = {
        f"module.{name}": values
        for name, values in state_of(source, (stacked, True, False)).items()
    }
    state |= {f"optimizer.state.exp_avg.{name}": values for name, values in state.items()}
    dcp.save(state, checkpoint_id=folder / "nemo/weights", no_dist=True)
    torch.save({"epoch": 0, "global_step": 7}, folder / "nemo/weights/common.pt")
    config = config_of(source.model) | changes
    write_context(
        folder / "nemo", {key: value for key, value in config.items() if value is not ...}
    )
    return folder / "nemo"


def tensors(source: Any) -> dict[str, Tensor]:
    return {key: source.read(key) for key in source.keys("weight")}


@pytest.mark.cases(None, sample=1)
@here
@pytest.mark.parametrize("kind", usually(("gpt2", "llama-stretched", "qwen3"), KINDS))
@pytest.mark.parametrize("stacked", [True, False])
def test_it_is_the_model_that_was_saved(kind: str, stacked: bool, tmp_path: Path) -> None:
    found = open_source(save(tmp_path, kind, stacked), 131)
    expected = open_source(tmp_path / "hf")
    ours = tensors(found)
    theirs = tensors(expected)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    ids = torch.randint(131, (2, 30), generator=torch.Generator().manual_seed(1)).t()
    assert torch.equal(load_stage(found, "fp64")(ids), load_stage(expected, "fp64")(ids))


@here
def test_it_is_converted_and_inspected_and_says_what_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "ours"), "--vocab", "131"]) == 0
    assert "not read: the optimizer's state, common.pt" in capsys.readouterr().out
    assert main(["inspect", str(folder / "weights"), "--vocab", "131"]) == 0
    assert "format     NeMo" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "ours"), str(tmp_path / "hf")]) == 0
    assert "0 differ" in capsys.readouterr().out


def refused(folder: Path, vocab: int | None = 131) -> str:
    with pytest.raises(UserError) as caught:
        open_source(folder, vocab)
    return "\n".join(caught.value.problems)


@pytest.mark.cases(24, sample=1)
@here
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": ...}, sentence("convert.model_key_missing", key="num_layers")),
        ({"qk_layernorm": ...}, sentence("convert.model_key_missing", key="qk_layernorm")),
        ({"surprise": 3}, sentence("convert.model_key_unknown", key="surprise")),
        (
            {"num_moe_experts": 8},
            sentence("convert.model_key_only", key="num_moe_experts", value=8, allowed="None"),
        ),
        (
            {"window_size": [4096, 0]},
            sentence("convert.model_key_only", key="window_size", value=[4096, 0]),
        ),
        (
            {"layernorm_zero_centered_gamma": True},
            sentence("convert.model_key_only", key="layernorm_zero_centered_gamma", value=True),
        ),
        (
            {"seq_len_interpolation_factor": 2.0},
            sentence("convert.model_key_only", key="seq_len_interpolation_factor", value=2.0),
        ),
        (
            {"activation_func": {"_target_": "megatron.core.activations.squared_relu"}},
            sentence("convert.nemo_activation", name=re.compile("squared_relu'"), gate="a gate"),
        ),
        (
            {"gated_linear_unit": False},
            sentence("convert.nemo_activation", name=re.compile("silu'"), gate="no gate"),
        ),
        ({"normalization": "L2Norm"}, sentence("convert.nemo_norm", normalization="L2Norm")),
        ({"position_embedding_type": "yarn"}, sentence("convert.nemo_positions", positions="yarn")),
        ({"scale_factor": 8.0}, sentence("convert.nemo_rope", scaling=re.compile("scale_factor"))),
        (
            {"_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B"},
            sentence("convert.nemo_rope", scaling=re.compile("scale_factor")),
        ),
        (
            {"rotary_interleaved": "False"},
            sentence(
                "convert.nemo_value_kind",
                key="rotary_interleaved",
                value="False",
                kind="True or False",
            ),
        ),
        (
            {"add_bias_linear": "no"},
            sentence(
                "convert.nemo_value_kind", key="add_bias_linear", value="no", kind="True or False"
            ),
        ),
        (
            {"bias_activation_fusion": None},
            sentence(
                "convert.nemo_value_kind",
                key="bias_activation_fusion",
                value=None,
                kind="True or False",
            ),
        ),
        (
            {"num_layers": "4"},
            sentence(
                "convert.nemo_value_kind",
                key="num_layers",
                value="4",
                kind="a whole number from 1 on",
            ),
        ),
        (
            {"vocab_size": 256.0},
            sentence(
                "convert.nemo_value_kind",
                key="vocab_size",
                value=256.0,
                kind="a whole number from 1 on",
            ),
        ),
        (
            {"layernorm_epsilon": None},
            sentence(
                "convert.nemo_value_kind", key="layernorm_epsilon", value=None, kind="a number"
            ),
        ),
        ({"rotary_base": 10**400}, sentence("convert.nemo_value_kind", kind="a number")),
        (
            {"hidden_dropout": "none"},
            sentence(
                "convert.nemo_value_kind", key="hidden_dropout", value="none", kind="a number"
            ),
        ),
        (
            {"normalization": ["RMSNorm"]},
            sentence(
                "convert.nemo_value_kind", key="normalization", value=["RMSNorm"], kind="a word"
            ),
        ),
        (
            {**SCALED, "scale_factor": None},
            sentence("convert.nemo_value_kind", key="scale_factor", value=None, kind="a number"),
        ),
        (
            {"activation_func": {"_target_": 5}},
            sentence("convert.nemo_activation", name=5, gate="a gate"),
        ),
        (
            {"activation_func": {"_target_": "mine.silu", "_call_": False}},
            sentence("convert.nemo_activation", name="mine.silu", gate="a gate"),
        ),
        (
            {"activation_func": {**SILU, "inplace": True}},
            sentence(
                "convert.nemo_activation", name=re.compile(r"'inplace': True\}"), gate="a gate"
            ),
        ),
        (
            {"activation_func": {**SILU, "_call_": True}},
            sentence("convert.nemo_activation", gate="a gate"),
        ),
        (
            {"transformer_layer_spec": {**OTHERS[SPEC], "depth": 2}},
            sentence("convert.nemo_layer_spec", value=re.compile(r"'depth': 2\}")),
        ),
        ({7: 3}, sentence("convert.model_key_unknown", key=7)),
        (
            {"vocab_size": 131},
            sentence("convert.nemo_vocab", shape=256, model="model.yaml", vocab=131),
        ),
        (
            {"_target_": "nemo.collections.llm.gpt.model.gemma.GemmaConfig"},
            sentence("convert.nemo_class", target=re.compile("GemmaConfig'")),
        ),
        (
            {"_target_": "__main__.MyConfig"},
            sentence("convert.nemo_class", target="__main__.MyConfig"),
        ),
        ({"_target_": ...}, sentence("convert.nemo_class", target=None)),
        (
            {"transformer_layer_spec": {"_target_": "__main__.my_spec"}},
            "transformer_layer_spec = '__main__.my_spec'",
        ),
        (
            {"transformer_layer_spec": {"_target_": "functools.partial"}},
            sentence("convert.nemo_layer_spec", value="functools.partial"),
        ),
        (
            {"transformer_layer_spec": ["rows"]},
            sentence("convert.nemo_layer_spec", key="transformer_layer_spec", value=["rows"]),
        ),
        (
            {"num_layers": 5},
            sentence(
                "convert.megatron_layer_count",
                name=re.compile(r"linear_proj\.weight"),
                shape="[4, 24, 40]",
                counts="[5]",
            ),
        ),
        ({"hidden_size": 48}, sentence("convert.tensor_shape")),
        (
            {"add_qkv_bias": True},
            sentence(
                "convert.tensor_missing", name="decoder.layers.0.self_attention.linear_qkv.bias"
            ),
        ),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused_by_the_key(
    changes: dict[Any, Any], said: str, tmp_path: Path
) -> None:
    assert re.search(said, refused(save_changed(tmp_path, "llama", True, changes)))


@here
def test_the_tokens_are_those_that_are_said(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert shows(refused(folder, None), "convert.nemo_vocab_null")
    (tmp_path / "two").mkdir()
    folder = save(tmp_path / "two", vocab_size=256)
    assert (open_source(folder).model.vocab, open_source(folder, 131).model.vocab) == (256, 131)


@here
def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path)
    file = folder / "context/model.yaml"
    text = file.read_text()
    faults = {
        "a: [": sentence("convert.yaml_unreadable"),
        "- 1": sentence("convert.yaml_not_mapping"),
        "a: 1": sentence("convert.nemo_no_config"),
    }
    faults |= {
        f"{text}\nconfig: 3": sentence(
            "convert.yaml_unreadable", split=re.compile("config is given twice")
        ),
        POINTER: sentence("convert.lfs_pointer"),
    }
    faults[text.replace("  num_layers:", "  num_layers: 9\n  num_layers:")] = (
        "num_layers is given twice"
    )
    for content, said in faults.items():
        file.write_text(content)
        assert f"{file} " in refused(folder) and re.search(said, refused(folder))
    file.unlink()
    assert shows(refused(folder), "convert.yaml_unreadable", file=file)
    file.write_text(text)
    (values,) = (folder / "weights").glob("*.distcp")
    whole = values.read_bytes()
    values.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=r"\.metadata names bytes of .* that it does not have: it is not whole"
    ):
        open_source(folder, 131)
    (folder / "weights/.metadata").rename(tmp_path / "kept")
    assert shows(refused(folder), "convert.nemo_not_distributed")


@here
def test_numbers_and_keys_may_be_spelled_in_any_way_that_yaml_has(tmp_path: Path) -> None:
    folder = save(tmp_path)
    file = folder / "context/model.yaml"
    text = file.read_text()
    number = next(line for line in text.splitlines() if "layernorm_epsilon:" in line)
    file.write_text(text.replace(number, "  layernorm_epsilon: 1e-05"))
    assert open_source(folder, 131).model.norm_eps == 1e-5
    merged = "a: &a {x: 1}\ndeep: {b: &b {<<: *a, x: 2}}\nd: {<<: *b}\n1: one\n'1': text\n"
    file.write_text(text + merged)
    assert read_yaml(file)["d"] == {"x": 2} and open_source(folder, 131).model.layers
    in_turn = "a: &a {x: 1, y: 5}\nb: &b {<<: *a, x: 2}\nfirst: {<<: [*a, *b]}\nown: {<<: [*b, *a], y: 9}\n"
    file.write_text(in_turn)
    assert read_yaml(file)["first"] == {"x": 1, "y": 5}
    assert read_yaml(file)["own"] == {"x": 2, "y": 9}
    for content, reason in (("d: {<<: 3}", "<< takes mappings"), ("d: &d {<<: *d}", "itself")):
        file.write_text(f"{text}{content}\n")
        assert shows(refused(folder), "convert.yaml_unreadable", file=file)
        assert reason in refused(folder)
    file.write_text(text + "? [a, b]\n: 1\n")
    assert shows(refused(folder), "convert.yaml_unreadable", file=file)


@here
def test_a_tensor_without_the_prefix_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    state = {"module.x": torch.zeros(2), "decoder.final_layernorm.weight": torch.zeros(24)}
    for file in (folder / "weights").iterdir():
        file.unlink()
    dcp.save(state, checkpoint_id=folder / "weights", no_dist=True)
    assert shows(
        refused(folder),
        "convert.nemo_name",
        name="decoder.final_layernorm.weight",
        prefix="module.",
    )


@here
def test_yaml_that_would_run_something_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    file = folder / "context/model.yaml"
    file.write_text(
        f"config: !!python/object/apply:subprocess.getoutput ['touch {tmp_path}/ran']\n"
    )
    yaml.unsafe_load(file.read_text())
    assert (tmp_path / "ran").exists(), "the bait works where YAML is trusted"
    (tmp_path / "ran").unlink()
    assert shows(refused(folder), "convert.yaml_unreadable", file=file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_hostile_pickle_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path)
    (folder / "weights/.metadata").write_bytes(pickle.dumps(Malice(tmp_path / "ran")))
    assert main(["convert", str(folder), str(tmp_path / "out"), "--vocab", "131"]) == 2
    said = capsys.readouterr().err
    assert "is not opened" in said and "getoutput" in said and "Traceback" not in said
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@here
def test_a_checkpoint_that_is_unfinished_or_an_adapter_is_refused(tmp_path: Path) -> None:
    """nemo/lightning/pytorch/callbacks/model_checkpoint.py, nemo/lightning/ckpt_utils.py."""
    folder = save(tmp_path)
    mark = tmp_path / "nemo-unfinished"
    mark.write_text("")
    assert shows(refused(folder), "convert.nemo_not_whole", mark=mark)
    mark.unlink()
    (folder / "weights/adapter_metadata.json").write_text("{}")
    assert shows(refused(folder), "convert.nemo_adapter")


@here
def test_weights_beside_the_context_are_read_as_those_in_a_folder_of_their_own(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path)
    for file in (folder / "weights").iterdir():
        file.rename(folder / file.name)
    (folder / "weights").rmdir()
    found, expected = (tensors(open_source(path, 131)) for path in (folder, tmp_path / "hf"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@here
def test_a_vocabulary_that_would_be_padded_otherwise_is_noted(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert open_source(folder, 131).facts.notes == ()
    (tmp_path / "many").mkdir()
    folder = save(tmp_path / "many", make_vocab_size_divisible_by=64)
    assert open_source(folder, 129).facts.notes == ()
    (note,) = open_source(folder, 128).facts.notes
    assert "--vocab 128 is 128 rows with NeMo's padding" in note and "the embedding has 256" in note
