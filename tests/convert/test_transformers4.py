"""Exported folders under transformers 4, which vLLM and llama.cpp go by: the same logits as under
5, or a note."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.other_systems import CONFIGS, write_folder
from tools.cli import main
from tools.convert.verify import logits

HERE = Path(__file__).parent
OLDER = Path(sys.prefix) / "transformers4"
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.skipif(not OLDER.is_dir(), reason="needs transformers 4 beside 5 (make oracles)"),
]
LINEAR = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}
TYPES = ["full_attention"] * 4
SLIDING = ["full_attention", "sliding_attention"] * 2
BASE = {"rope_type": "default", "rope_theta": 150.0}
ONE_BASE = {key: {"rope_type": "default", "rope_theta": 70.0} for key in dict.fromkeys(SLIDING)}
ELSEWHERE = (
    "gpt_oss",
    "granitemoe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "minimax_m2",
    "glm4_moe_lite",
    "solar_open",
    "youtu",
    "kimi_linear",
    "nanochat",
    "ministral3",
    "apertus",
    "gemma4_text",
    "gemma4_unified_text",
    "cwm",
    "hyperclovax",
    "jais2",
)  # kinds that are below, with what they need
# name -> kind, changes of its configuration
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in CONFIGS if "-" not in kind and kind not in ELSEWHERE},
    "gpt_oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "granitemoe": ("granitemoe", {"head_dim": 6}),
    "gemma3 scaled": ("gemma3_text", {"rope_scaling": LINEAR, "rope_local_base_freq": 300.0}),
    "gemma3 full": ("gemma3_text", {"layer_types": TYPES}),
    "gemma2 full": ("gemma2", {"layer_types": TYPES}),
    "gpt_oss full": ("gpt_oss", {"layer_types": TYPES, "swiglu_limit": 7.0}),
    "gpt_oss unscaled": ("gpt_oss", {"rope_parameters": BASE, "swiglu_limit": 7.0}),
    "olmo2 scaled": ("olmo2", {"rope_scaling": LINEAR}),
    "olmo3 of one base": ("olmo3", {"rope_scaling": None, "rope_parameters": ONE_BASE}),
    "mistral of an odd size": (
        "mistral",
        {"hidden_size": 28, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "mistral that is no llama": (
        "mistral",
        {
            "hidden_size": 28,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "sliding_window": None,
        },
    ),
    "deepseek_v3 of an odd size": ("deepseek_v3", {"hidden_size": 25}),
}
BY_LAYER: dict[str, Any] = {
    "full_attention": BASE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2 yarn": ("olmo2", {"rope_scaling": YARN}),
    "olmo3 of two bases": (
        "olmo3",
        {"rope_scaling": None, "rope_parameters": BY_LAYER, "layer_types": SLIDING},
    ),
    "qwen2_moe of an odd size": ("qwen2_moe", {"hidden_size": 26}),
    "granitemoe of wide heads": ("granitemoe", {}),
    "gpt_oss of another clamp": ("gpt_oss", {"swiglu_limit": 0.5}),
    "nemotron_h": ("nemotron_h", {}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    "minimax_m2": ("minimax_m2", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "solar_open": ("solar_open", {}),
    "youtu": ("youtu", {}),
    "kimi_linear": ("kimi_linear", {}),
    "nanochat": ("nanochat", {}),
    "ministral3": ("ministral3", {}),
    "apertus": ("apertus", {}),
    "gemma4_text": ("gemma4_text", {}),
    "gemma4_unified_text": ("gemma4_unified_text", {}),
    "cwm": ("cwm", {}),
    "hyperclovax": ("hyperclovax", {}),
    "jais2": ("jais2", {}),
}
NOTE = "config.json needs transformers 5 or newer"


def exported(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """Return a folder that was exported from a checkpoint of ours, with ids to compute logits
    for."""
    write_folder(folder / "given", kind, **changes)
    assert main(["convert", str(folder / "given"), str(folder / "ours"), "--no-verify"]) == 0
    assert (
        main(["convert", str(folder / "ours"), str(folder / "out"), "--to", "hf", "--no-verify"])
        == 0
    )
    torch.save(
        torch.randint(131, (2, 40), generator=torch.Generator().manual_seed(2)),
        folder / "out/ids.pt",
    )
    return folder / "out"


def run_older(folders: list[Path]) -> None:
    """Run the program of transformers 4 over folders."""
    command = [sys.executable, str(HERE / "transformers4.py"), *map(str, folders)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(OLDER)}, check=True)


@pytest.mark.slow
def test_an_exported_folder_computes_the_same_under_transformers_4_or_a_note_says_that_it_needs_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {}
    for name, (kind, changes) in (CASES | NEWER).items():
        folders[name] = exported(tmp_path / name.replace(" ", "_"), kind, changes)
        assert (NOTE in capsys.readouterr().out) == (name in NEWER), name
    run_older([*folders.values()])
    for name in CASES:
        assert not (folders[name] / "refusal.txt").exists(), (
            name,
            (folders[name] / "refusal.txt").read_text(),
        )
    for name, folder in folders.items():
        expected = logits(folder, torch.load(folder / "ids.pt"), torch.float32)
        if name in NEWER:
            continue
        found = torch.load(folder / "logits.pt")
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name
    for name in NEWER:  # so that the note is not of models that transformers 4 has
        refused = (folders[name] / "refusal.txt").exists()
        assert refused or not torch.allclose(
            torch.load(folders[name] / "logits.pt"),
            logits(folders[name], torch.load(folders[name] / "ids.pt"), torch.float32),
            atol=1e-4,
        ), name
