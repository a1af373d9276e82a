"""Named model presets, from sizes that a laptop trains in minutes to published sizes.

Each preset has only the fields that differ from the defaults of its family. The demos take their vocabulary from the
tokenizer.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig

Sizes = Mapping[str, Any]


def _gpt2(layers: int, hidden: int, heads: int) -> Sizes:
    return {
        "family": "gpt2",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab": 50257,
        "max_positions": 1024,
    }


def _pythia(layers: int, hidden: int, heads: int, vocab: int = 50304) -> Sizes:
    return {
        "family": "gpt_neox",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab": vocab,
        "max_positions": 2048,
    }


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Sizes:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {"family": "llama", **sizes, "vocab": 32000, "max_positions": 4096}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, **others: Any) -> Sizes:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn, "vocab": 128256}
    return {"family": "llama", **sizes, "max_positions": 8192, "rope_base": 500000.0, **others}


def _longer(factor: float) -> Sizes:
    """Return the fields that Llama 3.1 and 3.2 change for sequences sixteen times as long."""
    scaling = {"kind": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    return {"max_positions": 131072, "rope_scaling": scaling}


def _mistral(family: str, **others: Any) -> Sizes:
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000}
    return {"family": family, **sizes, "max_positions": 32768, **others}


def _qwen(family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **others: Any) -> Sizes:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": 151936}
    same = {"norm_eps": 1e-6, "rope_base": 1e6}
    return {"family": family, **sizes, **same, "max_positions": 40960 if family == "qwen3" else 32768, **others}


QWEN3 = {"head_dim": 128}

PRESETS: Mapping[str, Sizes] = MappingProxyType(
    {
        "llama-demo": {"family": "llama", "layers": 6, "hidden": 256, "heads": 4, "kv_heads": 2},
        "mixtral-demo": {
            "family": "mixtral",
            "layers": 4,
            "hidden": 192,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 384,
            "experts": 4,
        },
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "pythia-14m": _pythia(6, 128, 4),
        "pythia-70m": _pythia(6, 512, 8),
        "pythia-160m": _pythia(12, 768, 12),
        "pythia-410m": _pythia(24, 1024, 16),
        "pythia-1b": _pythia(16, 2048, 8),
        "pythia-1.4b": _pythia(24, 2048, 16),
        "pythia-2.8b": _pythia(32, 2560, 32),
        "pythia-6.9b": _pythia(32, 4096, 32, vocab=50432),
        "pythia-12b": _pythia(36, 5120, 40, vocab=50688),
        "llama-2-7b": _llama2(32, 4096, 32, 32, 11008),
        "llama-2-13b": _llama2(40, 5120, 40, 40, 13824),
        "llama-2-70b": _llama2(80, 8192, 64, 8, 28672),
        "llama-3-8b": _llama3(32, 4096, 32, 14336),
        "llama-3-70b": _llama3(80, 8192, 64, 28672),
        "llama-3.1-8b": _llama3(32, 4096, 32, 14336, **_longer(8.0)),
        "llama-3.2-1b": _llama3(16, 2048, 32, 8192, tied=True, **_longer(32.0)),
        "llama-3.2-3b": _llama3(28, 3072, 24, 8192, tied=True, **_longer(32.0)),
        "mistral-7b": _mistral("mistral", window=4096),
        "mixtral-8x7b": _mistral("mixtral", rope_base=1e6, router_aux_loss=0.02),
        "qwen2-0.5b": _qwen("qwen2", 24, 896, 14, 2, 4864, tied=True),
        "qwen2-1.5b": _qwen("qwen2", 28, 1536, 12, 2, 8960, tied=True),
        "qwen2-7b": _qwen("qwen2", 28, 3584, 28, 4, 18944, vocab=152064),
        "qwen3-0.6b": _qwen("qwen3", 28, 1024, 16, 8, 3072, tied=True, **QWEN3),
        "qwen3-8b": _qwen("qwen3", 36, 4096, 32, 8, 12288, **QWEN3),
        "qwen3-30b-a3b": _qwen(
            "qwen3", 48, 2048, 32, 4, 768, **QWEN3, experts=128, experts_per_token=8, router_aux_loss=0.001
        ),
    }
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the named model with some fields changed: `preset("gpt2", layers=2)`.

    Raises UserError for an unknown name.
    """
    if name not in PRESETS:
        raise UserError(f'no preset "{name}": there are {", ".join(PRESETS)}')
    return ModelConfig(**{**PRESETS[name], **overrides})
