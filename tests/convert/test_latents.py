"""Folders of DeepSeek: further layers, the other order of rotary partners, and what is refused with
a way out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.other_systems import CONFIGS, write_folder
from tests.refusals import shows
from tools.cli import main
from tools.convert.formats import open_source
from tools.convert.verify import load_stage

IDS = torch.randint(131, (12, 1), generator=torch.Generator().manual_seed(1))


def logits(folder: Path) -> torch.Tensor:
    return load_stage(open_source(folder), "fp64")(IDS)


def test_rows_in_halves_are_those_of_neighbours_in_another_order(tmp_path: Path) -> None:
    """rope_interleave = false: the same model, if the rows that turn are moved so."""
    folder = write_folder(tmp_path / "hf", "deepseek_v3")
    before = logits(folder)
    file = folder / "model.safetensors"
    (folder / "config.json").write_text(
        json.dumps({**CONFIGS["deepseek_v3"], "rope_interleave": False})
    )
    assert not torch.allclose(logits(folder), before, rtol=1e-3)
    turned = [0, 2, 4, 1, 3, 5]
    weights = load_file(file)
    for name, weight in weights.items():
        if "q_proj" in name:  # heads of 4 features without positions and 6 with
            weights[name] = weight.unflatten(0, (4, 10))[
                :, [0, 1, 2, 3, *(4 + n for n in turned)]
            ].flatten(0, 1)
        if "kv_a_proj" in name:  # 14 of the latent, and 6
            weights[name] = weight[[*range(14), *(14 + n for n in turned)]]
    save_file(weights, file, metadata={"format": "pt"})
    assert torch.equal(logits(folder), before)


def test_what_is_not_converted_is_refused_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "deepseek_v2-dense")
    assert (
        main(["convert", str(folder), str(tmp_path / "there"), "--to", "megatron", "--no-verify"])
        == 2
    )
    said = capsys.readouterr().err
    assert shows(said, "convert.megatron_not_expressible")
