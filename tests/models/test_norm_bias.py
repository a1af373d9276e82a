"""A model without any bias is nanoGPT's: its number of parameters, and a checkpoint that any layout
reads."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from models.config import ModelConfig
from models.parameter_counts import num_parameters
from tests.refusals import sentence
from tests.runs import checkpoint, tensors, train_on, write_run

# config/train_shakespeare_char.py of nanoGPT with the sizes of its README for a CPU
NANOGPT = {
    "family": "gpt2",
    "layers": 4,
    "heads": 4,
    "hidden": 128,
    "ffn": 512,
    "vocab": 65,
    "max_positions": 64,
    "mlp": "gelu_exact",
    "bias": False,
    "norm_bias": False,
}
WITHOUT = ["model.norm=layer", "model.norm_bias=false", "model.dropout=0", "precision.compute=fp64"]


def test_nanogpts_model_has_its_published_number_of_parameters() -> None:
    assert num_parameters(ModelConfig.model_validate(NANOGPT)) == 804_096


def test_a_norm_without_a_mean_has_no_bias() -> None:
    with pytest.raises(ValidationError, match=sentence("model.norm_bias_of_rms")):
        ModelConfig.model_validate({**NANOGPT, "norm": "rms", "norm_bias": True})


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    parts = [*WITHOUT, f"train.folder={tmp_path}/parts"]
    whole = [*WITHOUT, f"train.folder={tmp_path}/whole"]
    train_on(file, *parts, "train.steps=3", "lr.length=6", tensor=2)
    after_parts = train_on(file, *parts, "train.steps=6", pipeline=2, data=2)
    after_whole = train_on(file, *whole)
    saved = tensors(checkpoint(after_parts, 6))
    assert not any(name.endswith(".bias") for name in saved)
    for name, values in tensors(checkpoint(after_whole, 6)).items():
        torch.testing.assert_close(saved[name], values, rtol=1e-9, atol=1e-12, msg=name)
