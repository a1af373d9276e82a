"""Small models of other systems: configurations of every family, folders of random weights, a training file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tools.convert.core.names import HUGGING_FACE
from tools.convert.core.rules import matches
from tools.convert.hf.config import from_hugging_face

MEGATRON = [  # modules of megatron-core that its models and optimizer need
    f"megatron.core.{module}"
    for module in ("models.gpt.gpt_layer_specs", "optimizer", "distributed", "dist_checkpointing", "transformer.module")
]
_SIZES = {
    "vocab_size": 131,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 48,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 24,
    "n_head": 4,
    "n_positions": 48,
    "vocab_size": 131,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# Odd on purpose: sizes that nothing divides, fewer key/value heads, heads wider than hidden / heads.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-tied": {"model_type": "llama", **_LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-biased": {"model_type": "llama", **_LLAMA, "attention_bias": True, "mlp_bias": True, "rope_theta": 5e5},
    "gpt_neox": {"model_type": "gpt_neox", **_SIZES, "rotary_pct": 0.7, "hidden_act": "gelu", "hidden_dropout": 0.0},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", **_LLAMA, "head_dim": 6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_LLAMA,
        "moe_intermediate_size": 40,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2},
    "llama-stretched": {"model_type": "llama", **_LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama-yarn": {"model_type": "llama", **_LLAMA, "rope_scaling": YARN},
}
WITHOUT_MEGATRON = {"gpt_neox", "llama-yarn"}  # parallel residual, yarn


def usually(few: Iterable[Any], all_kinds: Iterable[Any] = CONFIGS) -> list[Any]:
    """Parameters of a test: the kinds in `few` always, the others of `all_kinds` only among the slow tests."""
    chosen = sorted(set(few))
    return [*chosen, *slow(*((kind,) for kind in sorted(all_kinds) if kind not in chosen))]


def slow(*parameters: tuple[Any, ...]) -> list[Any]:
    """Parameters of a test that are tried only among the slow tests."""
    return [pytest.param(*values, marks=pytest.mark.slow) for values in parameters]


def write_folder(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A Hugging Face folder of random weights, written without transformers."""
    config = {**CONFIGS[kind], **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    dice = torch.Generator().manual_seed(5)
    tensors = {
        match.foreign: torch.randn(match.shape, generator=dice).mul_(0.3).to(dtype)
        for match in matches(HUGGING_FACE[config["model_type"]], from_hugging_face(config))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_files(one: Path, other: Path) -> None:
    """The same names with the same bytes, all the way down."""
    first, second = (
        {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()} for path in (one, other)
    )
    assert first.keys() == second.keys()
    assert not [name for name, content in first.items() if content != second[name]]
