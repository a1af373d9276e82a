"""Named model presets, from sizes that a laptop trains in minutes to published sizes.

Each preset has only the fields that differ from the defaults of its family. The demos take their
vocabulary from the tokenizer.
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
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 8,
        "ffn": ffn,
        "vocab": 128256,
    }
    return {"family": "llama", **sizes, "max_positions": 8192, "rope_base": 500000.0, **others}


def _longer(factor: float) -> Sizes:
    """Return the fields that Llama 3.1 and 3.2 change for sequences sixteen times as long."""
    scaling = {"kind": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    return {"max_positions": 131072, "rope_scaling": scaling}


def _mistral(family: str, **others: Any) -> Sizes:
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000}
    return {"family": family, **sizes, "max_positions": 32768, **others}


def _qwen(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **others: Any
) -> Sizes:
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": 151936,
    }
    same = {"norm_eps": 1e-6, "rope_base": 1e6}
    return {
        "family": family,
        **sizes,
        **same,
        "max_positions": 40960 if family == "qwen3" else 32768,
        **others,
    }


QWEN3 = {"head_dim": 128}


def _glm45(
    layers: int, hidden: int, dense: int, dense_ffn: int, ffn: int, experts: int, **others: Any
) -> Sizes:
    """Return a model of GLM-4.5 without its layer for multi-token prediction. dense: the first
    layers, of dense_ffn."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": 96,
        "kv_heads": 8,
        "head_dim": 128,
        "qkv_bias": True,
    }
    feed_forwards = {
        "ffn": ffn,
        "shared_experts": ffn,
        "dense_layers": tuple(range(dense)),
        "dense_ffn": dense_ffn,
    }
    routed = {"experts": experts, "experts_per_token": 8, "router_aux_loss": 0.0}
    turns = {"rope_base": 1e6, "max_positions": 131072, "vocab": 151552}
    return {"family": "glm4_moe", **sizes, **feed_forwards, **routed, **turns, **others}


def _olmo2(layers: int, hidden: int, heads: int, ffn: int, **others: Any) -> Sizes:
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "vocab": 100352,
        "max_positions": 4096,
    }
    return {"family": "olmo2", **sizes, "norm_eps": 1e-6, "rope_base": 500000.0, **others}


def _olmo3(layers: int, hidden: int, heads: int, ffn: int, **others: Any) -> Sizes:
    """Return a model of OLMo 3 as it is after its training on long texts: three of four layers have
    the window."""
    windows = {"window": 4096, "window_layers": tuple(n for n in range(layers) if (n + 1) % 4)}
    yarn = {"kind": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    turns = {
        "rope_scaling": yarn | {"attention_factor": 1.2079441541679836},
        "max_positions": 65536,
    }
    turns |= {"window_rope_base": 500000.0, "vocab": 100278}
    return {**_olmo2(layers, hidden, heads, ffn, **windows, **turns, **others), "family": "olmo3"}


def _gemma3(
    layers: int, hidden: int, ffn: int, heads: int = 4, kv_heads: int = 1, **others: Any
) -> Sizes:
    """Return a text model of Gemma 3, five of six of whose layers have the window."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 256,
        "ffn": ffn,
    }
    windows = {"window": 512, "window_layers": tuple(n for n in range(layers) if (n + 1) % 6)}
    turns = {"max_positions": 32768, "rope_base": 1e6, "window_rope_base": 10000.0}
    return {
        "family": "gemma3",
        **sizes,
        **windows,
        **turns,
        "vocab": 262144,
        "norm_eps": 1e-6,
        **others,
    }


def _gemma3_large(layers: int, hidden: int, ffn: int, heads: int, **others: Any) -> Sizes:
    """Return the text model of a Gemma 3 with images, whose layers without the window reach eight
    times as far."""
    reach = {
        "window": 1024,
        "max_positions": 131072,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
    }
    return _gemma3(layers, hidden, ffn, heads, heads // 2, vocab=262208, **reach, **others)


def _deepseek(
    family: str, layers: int, hidden: int, heads: int, ffn: int, dense_ffn: int, **others: Any
) -> Sizes:
    """Return a DeepSeek with experts, two of them shared, and one layer without, trained on 4,096
    tokens at first."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "dense_ffn": dense_ffn,
        "norm_eps": 1e-6,
    }
    experts = {
        "shared_experts": 2 * ffn,
        "dense_layers": (0,),
        "norm_topk": False,
        "router_aux_loss": 0.001,
    }
    return {
        "family": family,
        **sizes,
        **experts,
        "vocab": 102400,
        "max_positions": 163840,
        **others,
    }


def _yarn(mscale: float) -> Sizes:
    """Return DeepSeek's scaling of rotary positions to forty times the length."""
    same = {"kind": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    return {**same, "mscale": mscale, "mscale_all_dim": mscale}


LATENT = {"kv_rank": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}


def _gemma2(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int, scalar: float
) -> Sizes:
    """Return a model of Gemma 2, every other layer of which has the window."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
    }
    windows = {
        "window": 4096,
        "window_layers": tuple(range(0, layers, 2)),
        "attention_scalar": scalar,
    }
    return {
        "family": "gemma2",
        **sizes,
        **windows,
        "vocab": 256000,
        "max_positions": 8192,
        "norm_eps": 1e-6,
    }


def _gpt_oss(layers: int, experts: int) -> Sizes:
    """Return a model of gpt-oss, every other layer of which has the window."""
    sizes = {
        "layers": layers,
        "hidden": 2880,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "ffn": 2880,
    }
    windows = {"window": 128, "window_layers": tuple(range(0, layers, 2))}
    longer = {
        "kind": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    turns = {"max_positions": 131072, "rope_base": 150000.0, "rope_scaling": longer}
    routed = {"experts": experts, "experts_per_token": 4, "router_aux_loss": 0.9}
    return {"family": "gpt_oss", **sizes, **windows, **turns, **routed, "vocab": 201088}


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
        "qwen3-1.7b": _qwen("qwen3", 28, 2048, 16, 8, 6144, tied=True, **QWEN3),
        "qwen3-4b": _qwen("qwen3", 36, 2560, 32, 8, 9728, tied=True, **QWEN3),
        "qwen3-8b": _qwen("qwen3", 36, 4096, 32, 8, 12288, **QWEN3),
        "qwen3-14b": _qwen("qwen3", 40, 5120, 40, 8, 17408, **QWEN3),
        "qwen3-32b": _qwen("qwen3", 64, 5120, 64, 8, 25600, **QWEN3),
        "qwen3-30b-a3b": _qwen(
            "qwen3",
            48,
            2048,
            32,
            4,
            768,
            **QWEN3,
            experts=128,
            experts_per_token=8,
            router_aux_loss=0.001,
        ),
        "qwen3-235b-a22b": _qwen(
            "qwen3",
            94,
            4096,
            64,
            4,
            1536,
            **QWEN3,
            experts=128,
            experts_per_token=8,
            router_aux_loss=0.001,
        ),
        "glm-4.5": _glm45(
            92,
            5120,
            3,
            12288,
            1536,
            160,
            qk_norm=True,
            router={"score": "sigmoid", "correction": True, "scale": 2.5},
        ),
        "glm-4.5-air": _glm45(46, 4096, 1, 10944, 1408, 128),
        "olmo2-1b": _olmo2(16, 2048, 16, 8192),
        "olmo2-7b": _olmo2(32, 4096, 32, 11008),
        "olmo2-13b": _olmo2(40, 5120, 40, 13824),
        "olmo2-32b": _olmo2(64, 5120, 40, 27648, kv_heads=8),
        "olmo3-7b": _olmo3(32, 4096, 32, 11008),
        "olmo3-32b": _olmo3(64, 5120, 40, 27648, kv_heads=8),
        "deepseek-v2-lite": _deepseek(
            "deepseek_v2",
            27,
            2048,
            16,
            1408,
            10944,
            latent=LATENT,
            rope_scaling=_yarn(0.707),
            experts=64,
            experts_per_token=6,
        ),
        "deepseek-v2": _deepseek(
            "deepseek_v2",
            60,
            5120,
            128,
            1536,
            12288,
            latent={**LATENT, "query_rank": 1536},
            rope_scaling=_yarn(0.707),
            experts=160,
            experts_per_token=6,
            router={
                "score": "softmax",
                "scale": 16.0,
                "groups": 8,
                "groups_per_token": 3,
                "group_best": 1,
            },
        ),
        "deepseek-v3": _deepseek(
            "deepseek_v3",
            61,
            7168,
            128,
            2048,
            18432,
            latent={**LATENT, "query_rank": 1536},
            rope_scaling=_yarn(1.0),
            vocab=129280,
            experts=256,
            experts_per_token=8,
            shared_experts=2048,
            dense_layers=(0, 1, 2),
            norm_topk=True,
            router={
                "score": "sigmoid",
                "scale": 2.5,
                "correction": True,
                "groups": 8,
                "groups_per_token": 4,
            },
            router_aux_loss=0.0001,
        ),
        "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216, 256, 256.0),
        "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336, 256, 256.0),
        "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, 128, 144.0),
        "gemma3-270m": _gemma3(18, 640, 2048),
        "gemma3-1b": _gemma3(26, 1152, 6912),
        "gemma3-4b": _gemma3_large(34, 2560, 10240, 8),
        "gemma3-12b": _gemma3_large(48, 3840, 15360, 16),
        "gemma3-27b": _gemma3_large(62, 5376, 21504, 32, head_dim=128, attention_scalar=168.0),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
    }
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the named model with some fields changed: `preset("gpt2", layers=2)`.

    Raises UserError for an unknown name.
    """
    if name not in PRESETS:
        raise UserError(f'no preset "{name}": there are {", ".join(PRESETS)}')
    return ModelConfig(**{**PRESETS[name], **overrides})
