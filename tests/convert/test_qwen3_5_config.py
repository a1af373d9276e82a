"""Of Qwen3.5 every key is used, checked, refused by name or named in a note; of its folders with images
the text model is read."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaprec.errors import UserError
from models.presets import preset
from tests.models.test_families import float32_is_float64
from tests.other_systems import CONFIGS, write_folder
from tests.refusals import raises, sentence
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.hf.config import config_of, from_hugging_face
from tools.convert.hf.text_models import text_config
from tools.convert.verify import load_stage

# As Qwen3.5-35B-A3B has it.
ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "rope_type": "default",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
}
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "use_cache": True,
    "vocab_size": 248320,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": ROPE,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 24,
    "patch_size": 4,
}
MODULE = "mtp.layers.0.input_layernorm.weight"
KINDS = ("qwen3_5_text", "qwen3_5_moe_text")


def test_a_published_config_is_that_of_the_preset() -> None:
    model = preset("qwen3.5-35b-a3b")
    assert from_hugging_face(text_config(PUBLISHED)) == model
    assert from_hugging_face(config_of(model, "bfloat16")) == model


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-397b-a17b"])
def test_a_preset_is_written_in_the_words_of_its_own_family(name: str) -> None:
    config = config_of(preset(name), "bfloat16")
    assert config["model_type"] == ("qwen3_5_moe_text" if "-a" in name else "qwen3_5_text")
    assert from_hugging_face(config) == preset(name)


def test_layers_without_experts_are_written_as_qwen3_next() -> None:
    """Its class has them, and Qwen3.5's has not."""
    model = preset("qwen3.5-35b-a3b").model_copy(update={"dense_layers": (1,), "dense_ffn": 512})
    assert config_of(model, "float32")["model_type"] == "qwen3_next"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_output_gate", False),
        ("decoder_sparse_step", 2),
        ("hidden_act", "gelu"),
        ("mlp_only_layers", [1]),
        ("norm_topk_prob", False),
        ("output_gate_type", "sigmoid"),
    ],
)
def test_a_key_of_another_model_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=sentence("convert.hf_only_value", key=key)):
        from_hugging_face(TEXT | {key: value})


def test_sizes_that_experts_need_are_refused_by_name() -> None:
    with raises("convert.hf_shared_expert_zero"):
        from_hugging_face(TEXT | {"shared_expert_intermediate_size": 0})
    with raises("convert.hf_value_kind", key="num_experts", value=0):
        from_hugging_face(TEXT | {"num_experts": 0})


def test_two_fractions_of_features_that_turn_are_refused() -> None:
    parameters = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
    beside = {"partial_rotary_factor": 0.25, "rope_parameters": parameters}
    with raises("convert.rotary_fraction_differs", key="partial_rotary_factor", fraction=0.25):
        from_hugging_face(TEXT | beside)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_keys_beside_the_text_model_are_known_or_refused_by_name(kind: str) -> None:
    inner = {key: value for key, value in CONFIGS[f"{kind}_text"].items() if key != "model_type"}
    outer = {**PUBLISHED, "model_type": kind, "text_config": inner}
    assert from_hugging_face(text_config(outer)).family == "qwen3_5"
    with raises("convert.hf_key_unknown", key="boi_token_index", kind=kind):
        text_config({**outer, "boi_token_index": 1})
    with raises("convert.hf_text_config_type", text=f"{kind}_text"):
        text_config({**outer, "text_config": {**inner, "model_type": "qwen3_next"}})


@pytest.mark.parametrize("kind", KINDS)
def test_sections_of_images_turn_no_pair_of_a_text(kind: str) -> None:
    """Neither here nor in transformers, where all three positions of a token are its place."""
    transformers: Any = pytest.importorskip("transformers", exc_type=ImportError)
    rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
    sections = ({}, {"mrope_section": [1, 2, 1]}, {"mrope_section": [0, 9, 9]})
    ids = torch.randint(131, (2, 40), generator=torch.Generator().manual_seed(1))
    models = []
    logits = []
    for section in sections:
        config = {**CONFIGS[kind], "rope_parameters": {**rope, **section}}
        models.append(from_hugging_face(config))
        torch.manual_seed(3)
        settings = transformers.AutoConfig.for_model(**deepcopy(config))
        model = transformers.AutoModelForCausalLM.from_config(settings)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert all(model == models[0] for model in models)
    assert all(torch.equal(others, logits[0]) for others in logits)
    assert not torch.equal(logits[0][:, :-1], logits[0][:, 1:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_model_of_a_folder_with_images_computes_what_the_whole_model_does(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(3)
    inner = {key: value for key, value in CONFIGS[kind].items() if not key.endswith("token_id")}
    outer_kind = kind.removesuffix("_text")
    settings = transformers.AutoConfig.for_model(
        outer_kind, text_config=deepcopy(inner), vision_config=dict(VISION)
    )
    settings.text_config._experts_implementation = "eager"
    ids = torch.randint(131, (2, 40), generator=torch.Generator().manual_seed(1))
    with float32_is_float64(), torch.no_grad():
        whole = transformers.AutoModelForImageTextToText.from_config(settings).double().eval()
        for values in whole.parameters():
            values.normal_(0.0, 0.25)
        expected = whole(ids).logits
        whole.save_pretrained(tmp_path / "hf")
    ours = load_stage(open_source(tmp_path / "hf"), "fp64")(ids.t()).transpose(0, 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    file = tmp_path / "hf/model.safetensors"
    save_file({**load_file(file), MODULE: torch.ones(24)}, file, metadata={"format": "pt"})
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "hf"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"its text model is read, of model_type '{kind}'" in said
    assert f"1 tensors of multi-token prediction ({MODULE}, ...) are not read" in said
    settings = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    settings._experts_implementation = "eager"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", config=settings)
    assert type(back).__name__ == ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")["moe" in kind]
    with float32_is_float64(), torch.no_grad():
        again = back.double()(ids).logits
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_a_part_are_those_of_the_text_model(kind: str, tmp_path: Path) -> None:
    """As transformers writes a text model that it has loaded from a folder with images."""
    plain = write_folder(tmp_path / "plain", kind)
    part = write_folder(tmp_path / "part", kind)
    tensors = load_file(part / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    save_file(renamed, part / "model.safetensors", metadata={"format": "pt"})
    ours = open_source(plain)
    others = open_source(part)
    assert ours.shapes == others.shapes
    assert all(torch.equal(ours.read(key), others.read(key)) for key in ours.shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_tensors_for_one_place_neither_replaces_the_other(kind: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", kind)
    file = folder / "model.safetensors"
    other = {"model.language_model.norm.weight": torch.ones(24)}
    save_file({**load_file(file), **other}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.language_model\.norm\.weight"):
        open_source(folder)


def test_modules_that_the_files_do_not_hold_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", KINDS[0], mtp_num_hidden_layers=1)
    (note,) = open_source(folder).facts.notes
    assert "1 layers for multi-token prediction, of which the files hold no tensor" in note
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    assert not open_source(folder).facts.notes
