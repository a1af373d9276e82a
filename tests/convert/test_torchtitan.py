"""Checkpoints of torchtitan's own models: the same logits in float64."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.convert.formats import open_source
from tools.convert.verify import load_stage

HERE = Path(__file__).parent
TORCHTITAN = Path(sys.prefix) / "torchtitan"
pytestmark = [
    pytest.mark.skipif(not TORCHTITAN.is_dir(), reason="needs torchtitan (make oracles)"),
]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 48,
    "tie_word_embeddings": False,
}
LLAMA = {
    "model_type": "llama",
    **SIZES,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": LLAMA3,
}
QWEN = {**SIZES, "rms_norm_eps": 1e-6, "head_dim": 10, "rope_theta": 200.0}
LATENT = {
    "model_type": "deepseek_v3",
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 300.0,
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama3": LLAMA,
    "llama3-tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **QWEN, "tie_word_embeddings": True},
    "qwen3-experts": {"model_type": "qwen3_moe", **QWEN, **EXPERTS},
    "deepseek_v3": LATENT,
    "deepseek_v3-whole": {**LATENT, "q_lora_rank": None},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind, with torchtitan's checkpoint and logits."""
    folder = tmp_path_factory.mktemp("titan")
    ids = torch.randint(131, (3, 40), generator=torch.Generator().manual_seed(1))
    command = [sys.executable, str(HERE / "titan.py")]
    for kind in CONFIGS:
        (folder / kind).mkdir()
        torch.save(ids, folder / kind / "ids.pt")
        command += [kind, str(folder / kind)]
    paths = {"PYTHONPATH": str(TORCHTITAN)}
    subprocess.run(command, check=True, env={**os.environ, **paths})
    return folder


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_of_torchtitan_has_the_logits_of_its_own_model(kind: str, saved: Path) -> None:
    folder = saved / kind
    # In the folder above, as for all checkpoints of a run.
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    source = open_source(folder / "step-1")
    assert source.facts.unread == "the optimizer's state, train_state"
    ids = torch.load(folder / "ids.pt")
    ours = load_stage(source, "fp64")(ids.t()).transpose(0, 1)
    expected = torch.load(folder / "logits.pt")
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
