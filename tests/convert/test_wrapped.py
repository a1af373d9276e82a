"""Of Gemma 3 with images the text model is read; other models with several inputs are one clear
line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaprec.errors import UserError
from tests.models.test_families import float32_is_float64
from tests.other_systems import CONFIGS, write_folder
from tests.refusals import raises, sentence
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.hf.config import from_hugging_face
from tools.convert.hf.text_models import text_config
from tools.convert.verify import load_stage

VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
}
VISION |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
INNER = {
    key: value for key, value in CONFIGS["gemma3_text"].items() if not key.endswith("token_id")
}
PUBLISHED: dict[str, Any] = {  # as gemma-3-4b-pt has them
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 129,
    "eoi_token_index": 130,
    "eos_token_id": [1, 106],
    "image_token_index": 128,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 4,
    "model_type": "gemma3",
    "text_config": INNER,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": VISION,
}
# of texts, and before those of images
NAMES = [
    ("language_model.model.", ""),
    ("model.language_model.", "model."),
]


def wrapped(path: Path, names: tuple[str, str] = NAMES[0], **changes: Any) -> Path:
    """The folder of a text model as a part of one with images."""
    write_folder(path, "gemma3_text", torch.bfloat16)
    text, images = names
    tensors = {
        name.replace("model.", text, 1): t
        for name, t in load_file(path / "model.safetensors").items()
    }
    tensors[f"{images}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = torch.ones(
        12, 8
    )
    tensors[f"{images}multi_modal_projector.mm_input_projection_weight"] = torch.ones(8, 36)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return path


@pytest.mark.parametrize("names", NAMES)
def test_the_text_model_is_that_of_a_folder_of_its_own(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = write_folder(tmp_path / "alone", "gemma3_text", torch.bfloat16)
    path = wrapped(tmp_path / "hf", names)
    assert main(["convert", str(path), str(tmp_path / "back"), "--to", "hf", "--no-verify"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "its text model is read, of model_type 'gemma3_text'; 2 tensors for images are left out"
        in said
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (alone, tmp_path / "back")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "gemma3_text" and config["eos_token_id"] == [1, 106]


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_transformers_wrote_computes_what_its_whole_model_does(
    tmp_path: Path,
) -> None:
    transformers: Any = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(3)
    settings = transformers.Gemma3Config(
        **{key: value for key, value in PUBLISHED.items() if key != "torch_dtype"}
    )
    ids = torch.randint(128, (2, 40), generator=torch.Generator().manual_seed(1))
    with float32_is_float64(), torch.no_grad():
        model = transformers.Gemma3ForConditionalGeneration(settings).double().eval()
        for values in model.parameters():
            values.normal_(0.0, 0.25)
        model.save_pretrained(tmp_path / "hf")
        expected = model(ids).logits
    ours = load_stage(open_source(tmp_path / "hf"), "fp64")(ids.t()).transpose(0, 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"text_config": None},
            sentence("convert.hf_text_config_missing", kind="gemma3", text="gemma3_text"),
        ),
        (
            {"text_config": {**INNER, "model_type": "llama"}},
            sentence("convert.hf_text_config_type", model_type="'llama'"),
        ),
        (
            {"text_config": {**INNER, "new": 1}},
            sentence("convert.hf_key_unread", key="new", value=1, kind="gemma3_text"),
        ),
        ({"new": 1}, sentence("convert.hf_key_unknown", key="new", value=1, kind="gemma3")),
        (
            {"tie_word_embeddings": False, "text_config": {**INNER, "tie_word_embeddings": True}},
            sentence("convert.hf_text_config_differs"),
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        open_source(wrapped(tmp_path / "hf", **changes))


def test_a_tensor_of_no_known_part_is_refused_by_its_name(tmp_path: Path) -> None:
    path = wrapped(tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    save_file(
        {**tensors, "audio_tower.x": torch.ones(2)},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with raises("convert.tensor_surplus", name="audio_tower.x"):
        open_source(path)


OTHERS: dict[str, dict[str, Any]] = {
    "llama4": {"text_config": {"model_type": "llama4_text"}, "vision_config": {}},
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral"},
    },
    "qwen2_5_vl": {"hidden_size": 24, "vision_config": {"depth": 2}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_vl_moe_text"}, "vision_config": {}},
    "glm4v_moe": {"text_config": {"model_type": "glm4v_moe_text"}, "vision_config": {}},
    "gemma3n": {
        "text_config": {"model_type": "gemma3n_text"},
        "audio_config": {},
        "vision_config": {},
    },
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": {}},
    "internvl_chat": {"llm_config": {"model_type": "qwen2"}, "vision_config": {}},
    "deepseek_vl_v2": {"language_config": {"model_type": "deepseek_v2"}, "vision_config": {}},
    "qwen2_5_omni": {"thinker_config": {"model_type": "qwen2_5_omni_thinker"}},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_with_several_inputs_are_one_line_that_says_what_to_do(kind: str) -> None:
    with pytest.raises(UserError, match=sentence("convert.hf_several_inputs")) as error:
        from_hugging_face(text_config({"model_type": kind, **OTHERS[kind]}))
    assert len(error.value.problems) == 1 and repr(kind) in str(error.value)


@pytest.mark.parametrize("wrong", [3, "tower", [], False])
def test_a_part_that_is_no_table_is_refused(wrong: object) -> None:
    with raises("convert.hf_value_kind", key="vision_config", remedy="a table"):
        text_config(PUBLISHED | {"vision_config": wrong})
    text_config(PUBLISHED | {"vision_config": None})
