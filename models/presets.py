"""Named model presets, from sizes that a laptop trains in minutes to published sizes.

Each preset has only the fields that differ from the defaults of its family. Presets that differ in
few sizes are made by a function named after their family, which returns those fields. The demos
take their vocabulary from the tokenizer.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig

Sizes = Mapping[str, Any]
"""Fields of a `ModelConfig` by name."""


def _gpt2(
    layers: int,
    hidden: int,
    heads: int,
) -> Sizes:
    """Return the fields of a GPT-2 of these sizes."""
    return {
        "family": "gpt2",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab": 50257,
        "max_positions": 1024,
    }


def _pythia(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 50304,
) -> Sizes:
    """Return the fields of a Pythia of these sizes."""
    return {
        "family": "gpt_neox",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocab": vocab,
        "max_positions": 2048,
    }


def _llama2(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
) -> Sizes:
    """Return the fields of a Llama 2 of these sizes."""
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": 32000,
        "max_positions": 4096,
    }


def _llama3(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    **changes: Any,
) -> Sizes:
    """Return the fields of a Llama 3 of these sizes, with changes."""
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 8,
        "ffn": ffn,
        "vocab": 128256,
        "max_positions": 8192,
        "rope_base": 500000.0,
        **changes,
    }


def _long_llama3(factor: float) -> Sizes:
    """Return the fields that Llama 3.1 and 3.2 change for sequences sixteen times as long."""
    return {
        "max_positions": 131072,
        "rope_scaling": {
            "kind": "llama3",
            "factor": factor,
            "original_max_position_embeddings": 8192,
        },
    }


def _mistral(family: str, **changes: Any) -> Sizes:
    """Return the fields of Mistral 7B or of a model of its sizes, with changes."""
    return {
        "family": family,
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 32000,
        "max_positions": 32768,
        **changes,
    }


def _ministral3(
    layers: int,
    hidden: int,
    ffn: int,
    **changes: Any,
) -> Sizes:
    """Return the text model of a Ministral 3."""
    return {
        "family": "ministral3",
        "layers": layers,
        "hidden": hidden,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": ffn,
        "rope_base": 1e6,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "query_beta": 0.1,
        },
        "max_positions": 262144,
        "vocab": 131072,
        **changes,
    }


def _qwen(
    family: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    **changes: Any,
) -> Sizes:
    """Return the fields of a Qwen 2, 2.5 or 3 of these sizes, with changes."""
    return {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": 151936,
        "norm_eps": 1e-6,
        "rope_base": 1e6,
        "max_positions": 40960 if family == "qwen3" else 32768,
        **changes,
    }


# Qwen3's heads are wider than hidden / heads.
QWEN3 = {"head_dim": 128}
QWEN3_EXPERTS = {"experts": 128, "experts_per_token": 8, "router_aux_loss": 0.001}


# Without the module for multi-token prediction that its files hold beside the layers.
QWEN3_NEXT = {
    "head_dim": 256,
    "rope_base": 1e7,
    "max_positions": 262144,
    "delta_net": {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128},
    "experts": 512,
    "experts_per_token": 10,
    "shared_experts": 512,
    "shared_gate": True,
    "router_aux_loss": 0.001,
}


def _qwen3_5(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    value_heads: int,
    **changes: Any,
) -> Sizes:
    """Return the text model of a Qwen3.5, without the module for multi-token prediction that its
    files hold beside the layers.

    value_heads: of gated delta nets.
    """
    return {
        "family": "qwen3_5",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 256,
        "ffn": ffn,
        "delta_net": {
            "key_heads": 16,
            "value_heads": value_heads,
            "key_dim": 128,
            "value_dim": 128,
        },
        "rope_base": 1e7,
        "max_positions": 262144,
        "vocab": 248320,
        "norm_eps": 1e-6,
        **changes,
    }


def _qwen3_5_experts(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    value_heads: int,
    experts: int,
    experts_per_token: int,
) -> Sizes:
    """Return the text model of a Qwen3.5 with experts, the shared one as wide as the others."""
    return _qwen3_5(
        layers,
        hidden,
        heads,
        2,
        ffn,
        value_heads,
        experts=experts,
        experts_per_token=experts_per_token,
        shared_experts=ffn,
        shared_gate=True,
        router_aux_loss=0.001,
    )


def _glm45(
    layers: int,
    hidden: int,
    dense_layers: int,
    dense_ffn: int,
    ffn: int,
    experts: int,
    **changes: Any,
) -> Sizes:
    """Return a model of GLM-4.5 without its layer for multi-token prediction.

    dense_layers: number of first layers without experts, of feed-forwards of width dense_ffn.
    """
    return {
        "family": "glm4_moe",
        "layers": layers,
        "hidden": hidden,
        "heads": 96,
        "kv_heads": 8,
        "head_dim": 128,
        "qkv_bias": True,
        "ffn": ffn,
        "shared_experts": ffn,
        "dense_layers": tuple(range(dense_layers)),
        "dense_ffn": dense_ffn,
        "experts": experts,
        "experts_per_token": 8,
        "router_aux_loss": 0.0,
        "rope_base": 1e6,
        "max_positions": 131072,
        "vocab": 151552,
        **changes,
    }


def _olmo2(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    **changes: Any,
) -> Sizes:
    """Return the fields of an OLMo 2 of these sizes, with changes."""
    return {
        "family": "olmo2",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "vocab": 100352,
        "max_positions": 4096,
        "norm_eps": 1e-6,
        "rope_base": 500000.0,
        **changes,
    }


def _olmo3(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    **changes: Any,
) -> Sizes:
    """Return a model of OLMo 3 as it is after its training on long texts: three of four layers have
    the window."""
    long_texts = {
        "window": 4096,
        "window_layers": _all_but_each(4, layers),
        "rope_scaling": {
            "kind": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
        },
        "max_positions": 65536,
        "window_rope_base": 500000.0,
        "vocab": 100278,
    }
    return {**_olmo2(layers, hidden, heads, ffn, **long_texts, **changes), "family": "olmo3"}


def _all_but_each(period: int, layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers but the last one of each `period` layers."""
    return tuple(number for number in range(layers) if (number + 1) % period)


def _gemma3(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int = 4,
    kv_heads: int = 1,
    **changes: Any,
) -> Sizes:
    """Return a text model of Gemma 3, five of six of whose layers have the window."""
    return {
        "family": "gemma3",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 256,
        "ffn": ffn,
        "window": 512,
        "window_layers": _all_but_each(6, layers),
        "max_positions": 32768,
        "rope_base": 1e6,
        "window_rope_base": 10000.0,
        "vocab": 262144,
        "norm_eps": 1e-6,
        **changes,
    }


def _gemma3_large(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    **changes: Any,
) -> Sizes:
    """Return the text model of a Gemma 3 with images, whose layers without the window reach eight
    times as far."""
    long_texts = {
        "window": 1024,
        "max_positions": 131072,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
    }
    kv_heads = heads // 2
    return _gemma3(layers, hidden, ffn, heads, kv_heads, vocab=262208, **long_texts, **changes)


def _gemma4(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    global_kv_heads: int,
) -> Sizes:
    """Return a dense text model of Gemma 4 whose layers without the window have wider heads, of
    which each is key and value."""
    changes = {
        "family": "gemma4",
        "global_head_dim": 512,
        "global_kv_heads": global_kv_heads,
        "global_key_as_value": True,
        "window": 1024,
        "max_positions": 262144,
        "rope_scaling": {"kind": "proportional", "fraction": 0.25},
        "final_softcap": 30.0,
    }
    return _gemma3(layers, hidden, ffn, heads, heads // 2, **changes)


def _deepseek(
    family: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    dense_ffn: int,
    **changes: Any,
) -> Sizes:
    """Return a DeepSeek with experts, two of them shared, and one layer without, trained on 4,096
    tokens at first."""
    return {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "dense_ffn": dense_ffn,
        "norm_eps": 1e-6,
        "shared_experts": 2 * ffn,
        "dense_layers": (0,),
        "norm_topk": False,
        "router_aux_loss": 0.001,
        "vocab": 102400,
        "max_positions": 163840,
        **changes,
    }


def _deepseek_yarn(mscale: float) -> Sizes:
    """Return DeepSeek's scaling of rotary positions to forty times the length."""
    return {
        "kind": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


LLAMA3_OF_EXAONE4 = {
    "kind": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The sizes of DeepSeek's latent attention; the large models have a query latent besides.
LATENT = {"kv_rank": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}


def _gemma2(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    head_dim: int,
    scalar: float,
) -> Sizes:
    """Return a model of Gemma 2, every other layer of which has the window."""
    return {
        "family": "gemma2",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "window": 4096,
        "window_layers": tuple(range(0, layers, 2)),
        "attention_scalar": scalar,
        "vocab": 256000,
        "max_positions": 8192,
        "norm_eps": 1e-6,
    }


def _gpt_oss(layers: int, experts: int) -> Sizes:
    """Return a model of gpt-oss, every other layer of which has the window."""
    return {
        "family": "gpt_oss",
        "layers": layers,
        "hidden": 2880,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "ffn": 2880,
        "window": 128,
        "window_layers": tuple(range(0, layers, 2)),
        "max_positions": 131072,
        "rope_base": 150000.0,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "experts": experts,
        "experts_per_token": 4,
        "router_aux_loss": 0.9,
        "vocab": 201088,
    }


def _nemotron_h(
    pattern: str,
    hidden: int,
    heads: int,
    ffn: int,
    mamba: Sizes,
    **changes: Any,
) -> Sizes:
    """Return a Nemotron-H, each of whose layers has the branch of its letter in `pattern`.

    mamba: the sizes of its mixers, whose least time step is none, as in NVIDIA's own code; only
        first weights go by time_step_min there.
    """
    return {
        "family": "nemotron_h",
        "layers": len(pattern),
        "hybrid_pattern": pattern,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": ffn,
        "mamba": {"groups": 8, **mamba},
        "vocab": 131072,
        "max_positions": 8192,
        **changes,
    }


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
        # layers, hidden, heads
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
        # layers, hidden, heads, kv_heads, ffn
        "llama-2-7b": _llama2(32, 4096, 32, 32, 11008),
        "llama-2-13b": _llama2(40, 5120, 40, 40, 13824),
        "llama-2-70b": _llama2(80, 8192, 64, 8, 28672),
        # layers, hidden, heads, ffn
        "llama-3-8b": _llama3(32, 4096, 32, 14336),
        "llama-3-70b": _llama3(80, 8192, 64, 28672),
        "llama-3.1-8b": _llama3(32, 4096, 32, 14336, **_long_llama3(8.0)),
        "llama-3.2-1b": _llama3(16, 2048, 32, 8192, tied=True, **_long_llama3(32.0)),
        "llama-3.2-3b": _llama3(28, 3072, 24, 8192, tied=True, **_long_llama3(32.0)),
        "mistral-7b": _mistral("mistral", window=4096),
        "mixtral-8x7b": _mistral("mixtral", rope_base=1e6, router_aux_loss=0.02),
        # layers, hidden, heads, kv_heads, ffn
        "qwen2-0.5b": _qwen("qwen2", 24, 896, 14, 2, 4864, tied=True),
        "qwen2-1.5b": _qwen("qwen2", 28, 1536, 12, 2, 8960, tied=True),
        "qwen2-7b": _qwen("qwen2", 28, 3584, 28, 4, 18944, vocab=152064),
        "qwen3-0.6b": _qwen("qwen3", 28, 1024, 16, 8, 3072, tied=True, **QWEN3),
        "qwen3-1.7b": _qwen("qwen3", 28, 2048, 16, 8, 6144, tied=True, **QWEN3),
        "qwen3-4b": _qwen("qwen3", 36, 2560, 32, 8, 9728, tied=True, **QWEN3),
        "qwen3-8b": _qwen("qwen3", 36, 4096, 32, 8, 12288, **QWEN3),
        "qwen3-14b": _qwen("qwen3", 40, 5120, 40, 8, 17408, **QWEN3),
        "qwen3-32b": _qwen("qwen3", 64, 5120, 64, 8, 25600, **QWEN3),
        "qwen3-30b-a3b": _qwen("qwen3", 48, 2048, 32, 4, 768, **QWEN3, **QWEN3_EXPERTS),
        "qwen3-235b-a22b": _qwen("qwen3", 94, 4096, 64, 4, 1536, **QWEN3, **QWEN3_EXPERTS),
        "qwen3-next-80b-a3b": _qwen("qwen3_next", 48, 2048, 16, 2, 512, **QWEN3_NEXT),
        # layers, hidden, heads, kv_heads, ffn, value_heads
        "qwen3.5-0.8b": _qwen3_5(24, 1024, 8, 2, 3584, 16, tied=True),
        "qwen3.5-2b": _qwen3_5(24, 2048, 8, 2, 6144, 16, tied=True),
        "qwen3.5-4b": _qwen3_5(32, 2560, 16, 4, 9216, 32, tied=True),
        "qwen3.5-9b": _qwen3_5(32, 4096, 16, 4, 12288, 32),
        "qwen3.5-27b": _qwen3_5(64, 5120, 24, 4, 17408, 48),
        # layers, hidden, heads, ffn, value_heads, experts, experts_per_token
        "qwen3.5-35b-a3b": _qwen3_5_experts(40, 2048, 16, 512, 32, 256, 8),
        "qwen3.5-122b-a10b": _qwen3_5_experts(48, 3072, 32, 1024, 64, 256, 8),
        "qwen3.5-397b-a17b": _qwen3_5_experts(60, 4096, 32, 1024, 64, 512, 10),
        "glm-4.5": _glm45(
            layers=92,
            hidden=5120,
            dense_layers=3,
            dense_ffn=12288,
            ffn=1536,
            experts=160,
            qk_norm=True,
            router={"score": "sigmoid", "correction": True, "scale": 2.5},
        ),
        # layers, hidden, dense_layers, dense_ffn, ffn, experts
        "glm-4.5-air": _glm45(46, 4096, 1, 10944, 1408, 128),
        # layers, hidden, heads, ffn
        "olmo2-1b": _olmo2(16, 2048, 16, 8192),
        "olmo2-7b": _olmo2(32, 4096, 32, 11008),
        "olmo2-13b": _olmo2(40, 5120, 40, 13824),
        "olmo2-32b": _olmo2(64, 5120, 40, 27648, kv_heads=8),
        "olmo3-7b": _olmo3(32, 4096, 32, 11008),
        "olmo3-32b": _olmo3(64, 5120, 40, 27648, kv_heads=8),
        "deepseek-v2-lite": _deepseek(
            "deepseek_v2",
            layers=27,
            hidden=2048,
            heads=16,
            ffn=1408,
            dense_ffn=10944,
            latent=LATENT,
            rope_scaling=_deepseek_yarn(0.707),
            experts=64,
            experts_per_token=6,
        ),
        "deepseek-v2": _deepseek(
            "deepseek_v2",
            layers=60,
            hidden=5120,
            heads=128,
            ffn=1536,
            dense_ffn=12288,
            latent={**LATENT, "query_rank": 1536},
            rope_scaling=_deepseek_yarn(0.707),
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
            layers=61,
            hidden=7168,
            heads=128,
            ffn=2048,
            dense_ffn=18432,
            latent={**LATENT, "query_rank": 1536},
            rope_scaling=_deepseek_yarn(1.0),
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
        # layers, hidden, heads, kv_heads, ffn, head_dim, attention_scalar
        "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216, 256, 256.0),
        "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336, 256, 256.0),
        "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, 128, 144.0),
        # layers, hidden, ffn, and of the larger ones heads
        "gemma3-270m": _gemma3(18, 640, 2048),
        "gemma3-1b": _gemma3(26, 1152, 6912),
        "gemma3-4b": _gemma3_large(34, 2560, 10240, 8),
        "gemma3-12b": _gemma3_large(48, 3840, 15360, 16),
        "gemma3-27b": _gemma3_large(62, 5376, 21504, 32, head_dim=128, attention_scalar=168.0),
        "gemma4-12b": _gemma4(48, 3840, 15360, 16, global_kv_heads=1),
        "gemma4-31b": _gemma4(60, 5376, 21504, 32, global_kv_heads=4),
        # layers, experts
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "kimi-linear-48b-a3b": {
            "family": "kimi_linear",
            "layers": 27,
            "hidden": 2304,
            "heads": 32,
            "latent": LATENT,
            "delta_net": {
                "key_heads": 32,
                "value_heads": 32,
                "key_dim": 128,
                "value_dim": 128,
                "gate_rank": 128,
            },
            "delta_layers": tuple(n for n in range(27) if n not in (3, 7, 11, 15, 19, 23, 26)),
            "ffn": 1024,
            "max_positions": 1048576,
            "vocab": 163840,
            "experts": 256,
            "experts_per_token": 8,
            "router": {"score": "sigmoid", "scale": 2.446, "correction": True},
            "dense_layers": (0,),
            "dense_ffn": 9216,
            "shared_experts": 1024,
            "router_aux_loss": 0.0,
        },
        "seed-oss-36b": {
            "family": "seed_oss",
            "layers": 64,
            "hidden": 5120,
            "heads": 80,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 27648,
            "rope_base": 1e7,
            "max_positions": 524288,
            "vocab": 155136,
            "norm_eps": 1e-6,
        },
        "exaone-4.0-1.2b": {
            "family": "exaone4",
            "layers": 30,
            "hidden": 2048,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 4096,
            "rope_base": 1e6,
            "rope_scaling": {**LLAMA3_OF_EXAONE4},
            "max_positions": 65536,
            "vocab": 102400,
            "tied": True,
        },
        "exaone-4.0-32b": {
            "family": "exaone4",
            "layers": 64,
            "hidden": 5120,
            "heads": 40,
            "kv_heads": 8,
            "ffn": 27392,
            "rope_base": 1e6,
            "rope_scaling": {**LLAMA3_OF_EXAONE4},
            "max_positions": 131072,
            "vocab": 102400,
            # three layers with the window, and one without it and without positions
            "window": 4096,
            "window_layers": tuple(n for n in range(64) if (n + 1) % 4),
            "nope_layers": tuple(range(3, 64, 4)),
        },
        "ernie-4.5-0.3b": {
            "family": "ernie4_5",
            "layers": 18,
            "hidden": 1024,
            "heads": 16,
            "kv_heads": 2,
            "head_dim": 128,
            "ffn": 3072,
            "rope_base": 500000.0,
            "max_positions": 131072,
            "vocab": 103424,
        },
        "phi-3-mini-4k": {
            "family": "phi3",
            "layers": 32,
            "hidden": 3072,
            "heads": 32,
            "ffn": 8192,
            "max_positions": 4096,
            "vocab": 32064,
            "window": 2047,
        },
        "phi-4": {
            "family": "phi3",
            "layers": 40,
            "hidden": 5120,
            "heads": 40,
            "kv_heads": 10,
            "ffn": 17920,
            "rope_base": 250000.0,
            "max_positions": 16384,
            "vocab": 100352,
        },
        "command-r7b": {
            "family": "cohere2",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 14336,
            "rope_base": 50000.0,
            "window": 4096,
            "window_layers": _all_but_each(4, 32),
            "nope_layers": tuple(range(3, 32, 4)),
            "logit_divisor": 4.0,
            "max_positions": 8192,
            "vocab": 256000,
        },
        "nanochat-d32": {
            "family": "nanochat",
            "layers": 32,
            "hidden": 2048,
            "heads": 16,
            "norm_eps": 1e-6,
            "max_positions": 2048,
            "vocab": 65536,
        },
        "apertus-8b": {
            "family": "apertus",
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 21504,
            "rope_base": 1.2e7,
            "rope_scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
            },
            "max_positions": 65536,
            "vocab": 131072,
        },
        "ministral-3-3b": _ministral3(26, 3072, 9216, tied=True),
        "ministral-3-8b": _ministral3(34, 4096, 14336),
        "smollm3-3b": {
            "family": "smollm3",
            "layers": 36,
            "hidden": 2048,
            "heads": 16,
            "kv_heads": 4,
            "ffn": 11008,
            "nope_layers": tuple(range(3, 36, 4)),
            "rope_base": 5e6,
            "max_positions": 65536,
            "vocab": 128256,
            "norm_eps": 1e-6,
        },
        "olmoe-1b-7b": {
            "family": "olmoe",
            "layers": 16,
            "hidden": 2048,
            "heads": 16,
            "ffn": 1024,
            "norm_topk": False,
            "max_positions": 4096,
            "vocab": 50304,
        },
        "minimax-m2": {
            "family": "minimax_m2",
            "layers": 62,
            "hidden": 3072,
            "heads": 48,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 1536,
            "router_aux_loss": 0.001,
            "rope_base": 5e6,
            "max_positions": 196608,
            "vocab": 200064,
            "norm_eps": 1e-6,
        },
        "dots.llm1": {
            "family": "dots1",
            "layers": 62,
            "hidden": 4096,
            "heads": 32,
            "ffn": 1408,
            "experts": 128,
            "experts_per_token": 6,
            "shared_experts": 2816,
            "dense_layers": (0,),
            "dense_ffn": 10944,
            "router": {"score": "sigmoid", "correction": True, "scale": 2.5},
            "router_aux_loss": 0.0,
            "rope_base": 1e7,
            "max_positions": 32768,
            "vocab": 152064,
        },
        "glm-4.7-flash": {
            "family": "glm4_moe_lite",
            "layers": 47,
            "hidden": 2048,
            "heads": 20,
            "latent": {
                "kv_rank": 512,
                "query_rank": 768,
                "rope_dim": 64,
                "nope_dim": 192,
                "value_dim": 256,
            },
            "ffn": 1536,
            "experts": 64,
            "experts_per_token": 4,
            "shared_experts": 1536,
            "dense_layers": (0,),
            "dense_ffn": 10240,
            "router": {"score": "sigmoid", "correction": True, "scale": 1.8},
            "router_aux_loss": 0.0,
            "rope_base": 1e6,
            "max_positions": 202752,
            "vocab": 154880,
        },
        "solar-open-100b": {
            "family": "solar_open",
            "layers": 48,
            "hidden": 4096,
            "heads": 64,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 1280,
            "experts_per_token": 8,
            "shared_experts": 1280,
            "router_aux_loss": 0.0,
            "rope_base": 1e6,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 65536,
            },
            "max_positions": 131072,
            "vocab": 196608,
        },
        # pattern, hidden, heads, ffn, mamba
        "nemotron-h-4b": _nemotron_h(
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            3072,
            32,
            12288,
            {"heads": 112, "head_dim": 64, "state_dim": 128},
        ),
        "nemotron-h-8b": _nemotron_h(
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            4096,
            32,
            21504,
            {"heads": 128, "head_dim": 64, "state_dim": 128},
        ),
        "nemotron-h-47b": _nemotron_h(
            "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
            "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
            8192,
            64,
            30720,
            {"heads": 256, "head_dim": 64, "state_dim": 256},
        ),
        "nemotron-h-56b": _nemotron_h(
            "M-M-M-M" + 9 * "*-M-M-M-M-M" + "*-M-M-M-M-M-",
            8192,
            64,
            32768,
            {"heads": 256, "head_dim": 64, "state_dim": 256},
        ),
        "nemotron-nano-9b-v2": _nemotron_h(
            "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            4480,
            40,
            15680,
            {"heads": 128, "head_dim": 80, "state_dim": 128},
            max_positions=131072,
        ),
        "nemotron-nano-12b-v2": _nemotron_h(
            "M-M-M-M" + 6 * "*-M-M-M-M" + "-",
            5120,
            40,
            20480,
            {"heads": 128, "head_dim": 80, "state_dim": 128},
            max_positions=131072,
        ),
        "nemotron-3-nano-30b-a3b": _nemotron_h(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            2688,
            32,
            1856,
            {"heads": 64, "head_dim": 64, "state_dim": 128},
            kv_heads=2,
            experts=128,
            experts_per_token=6,
            shared_experts=3712,
            router={"score": "sigmoid", "correction": True, "scale": 2.5},
            router_aux_loss=0.0001,
            max_positions=262144,
        ),
    }
)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of the preset of this name with some fields changed: `preset("gpt2",
    layers=2)`. Raises UserError for an unknown name."""
    if name not in PRESETS:
        raise UserError.of("model.preset_unknown", name=name, presets=", ".join(PRESETS))
    return ModelConfig(**{**PRESETS[name], **overrides})
