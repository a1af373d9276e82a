"""A program that runs torchtitan's own models: each folder gets a small one's checkpoint and its
logits.

    python titan.py KIND FOLDER ...

The checkpoint is saved as torchtitan saves it, by names at the top beside the optimizer's. Logits
are computed in float64 of torchtitan's modules; only the two kernels that want a compiler or bf16,
of attention and of experts, are put as plain products. Each folder has ids.pt, and gets step-1/ and
logits.pt.
"""

# The package is in a folder of its own, in which no other program looks for it.
# pyright: reportMissingImports=false

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts

VOCAB = 131
DIM = 24
LENGTH = 48
LLAMA = {"dim": DIM, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 40}
MOE = {"num_experts": 5, "moe_hidden_dim": 16, "moe_comm_backend": "standard"}
LATENT = {
    "n_layers": 3,
    "n_dense_layers": 1,
    "dim": DIM,
    "n_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "mscale": 1.0,
    "dense_hidden_dim": 40,
    "num_shared_experts": 2,
    "router_top_k": 2,
    "router_score_func": "sigmoid",
    "router_route_norm": True,
    "router_route_scale": 2.5,
    "non_blocking_capacity_factor": None,
    **MOE,
}


def llama_layers(fused: bool) -> list[Any]:
    rope = ComplexRoPE.Config(
        dim=DIM // 4,
        max_seq_len=LENGTH,
        theta=500.0,
        scaling="llama",
        scaling_factor=8.0,
        original_max_position_embeddings=16,
    )
    return llama3._build_llama3_layers(rope=rope, fuse_qkv=fused, attn_backend="flex", **LLAMA)


def qwen_layers(experts: bool) -> list[Any]:
    sizes = {key: value for key, value in LLAMA.items() if key != "hidden_dim"}
    rope = CosSinRoPE.Config(dim=10, max_seq_len=LENGTH, theta=200.0)
    shared = {**sizes, "head_dim": 10, "rope": rope, "attn_backend": "flex"}
    if experts:
        return qwen3._build_qwen3_moe_layers(**shared, top_k=2, **MOE)
    return qwen3._build_qwen3_layers(**shared, hidden_dim=40)


def latent_layers(query_rank: int) -> list[Any]:
    rope = ComplexRoPE.Config(dim=6, max_seq_len=LENGTH, theta=300.0)
    return deepseek_v3._build_dsv3_layers(
        q_lora_rank=query_rank, rope=rope, attn_backend="flex", **LATENT
    )


# kind -> the class of the model, its layers, epsilon of the last norm, tied
KINDS: dict[str, tuple[Any, Any, float, bool]] = {
    "llama3": (llama3.Llama3Model, lambda: llama_layers(True), 1e-5, False),
    "llama3-tied": (llama3.Llama3Model, lambda: llama_layers(False), 1e-5, True),
    "qwen3": (qwen3.Qwen3Model, lambda: qwen_layers(False), 1e-6, True),
    "qwen3-experts": (qwen3.Qwen3Model, lambda: qwen_layers(True), 1e-6, False),
    "deepseek_v3": (deepseek_v3.DeepSeekV3Model, lambda: latent_layers(14), 1e-5, False),
    "deepseek_v3-whole": (deepseek_v3.DeepSeekV3Model, lambda: latent_layers(0), 1e-5, False),
}


def build(kind: str) -> nn.Module:
    """Return a model of random weights that is lively enough for every tensor to matter."""
    model_class, layers, eps, tied = KINDS[kind]
    config = model_class.Config(
        dim=DIM,
        vocab_size=VOCAB,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM),
        norm=RMSNorm.Config(normalized_shape=DIM, eps=eps),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB),
        layers=layers(),
    )
    model = config.build()
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, values in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            values.copy_(center + 0.25 * torch.randn(values.shape, generator=dice))
        for name, values in model.named_buffers():
            if name.endswith("expert_bias_E"):
                # Hugging Face's Qwen has no correction.
                scale = 0.1 if kind.startswith("deepseek") else 0.0
                values.copy_(scale * torch.randn(values.shape, generator=dice))
    return model.eval()


def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> Tensor:
    """Causal attention by plain products; [b, s, heads, dim]."""
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def multiply(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """The product of each expert's rows with its matrix."""
    parts = []
    start = 0
    for matrix, end in zip(B_t, offs.tolist(), strict=True):
        parts.append(A[start:end] @ matrix)
        start = end
    return torch.cat([*parts, A[start:] @ B_t[0]])


@contextmanager
def float32_is_float64() -> Iterator[None]:
    """What torchtitan asks to be in FP32 or bf16 is in FP64."""
    narrow = torch.float32
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    Tensor.float = Tensor.bfloat16 = Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        # torch reads and writes files by its names of dtypes.
        torch.float32 = torch.float = narrow  # type: ignore[misc]


def main(arguments: list[str]) -> None:
    """Write the checkpoint and the logits of each folder."""
    FlexAttention.forward = attend  # type: ignore[method-assign]
    GroupedExperts._grouped_mm = multiply  # type: ignore[method-assign]
    for kind, folder in zip(arguments[::2], map(Path, arguments[1::2]), strict=True):
        ids = torch.load(folder / "ids.pt")
        with float32_is_float64(), torch.no_grad():
            model = build(kind)
            logits = model(ids)
        torch.save(logits, folder / "logits.pt")
        weights = ModelWrapper(model).state_dict()
        moments = {f"optimizer.state.{name}.exp_avg": values for name, values in weights.items()}
        state = {**weights, **moments, "train_state": {"step": torch.tensor(1)}}
        dcp.save(state, checkpoint_id=folder / "step-1", no_dist=True)


if __name__ == "__main__":
    main(sys.argv[1:])
