"""The models that InternEvo builds of `model = dict(...)`, written plainly in float64: one process,
no code of ours.

Of InternLM/InternEvo at c628a8c: `internlm/model/modeling_internlm.py` (model type INTERNLM),
`modeling_internlm2.py` (INTERNLM2_PUBLIC), `modeling_llama.py` (LLAMA2),
`modules/multi_head_attention.py`, `modules/embedding.py`, `modules/mlp.py` and `ops/linear.py`.
Weights are a dict by the names that those modules give them. What only changes dtypes, memory or
communication there is not in here.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "model_type": "INTERNLM",
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_kv_attention_heads": None,
    "vocab_size": 50304,
    "mlp_ratio": 4.0,
    "norm_type": "rmsnorm",
    "layer_norm_epsilon": 1e-5,
    "embed_grad_scale": 1,
    "embed_split_hidden": False,
    "use_flash_attn": True,
    "use_swiglu": True,
    "rope_base": 10000,
    "use_dynamic_ntk_rope": False,
    "max_position_embeddings": 2048,
    "no_bias": False,
    "adapt_hf": None,
}
"""Arguments of `build_model_with_cfg`; adapt_hf is true for INTERNLM2_PUBLIC and false for LLAMA2."""
Weights = Mapping[str, Tensor]
Drop = Callable[[str, Tensor], Tensor]


class InternEvo:
    """What a dict describes."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.c = {**DEFAULTS, **given}
        self.kind = self.c["model_type"]
        self.hidden, self.heads, self.layers = (
            self.c[key] for key in ("hidden_size", "num_attention_heads", "num_layers")
        )
        self.head_dim = self.hidden // self.heads
        self.kv_heads = self.c["num_kv_attention_heads"] or self.heads
        self.gated = self.c["use_swiglu"] or not self.c["use_flash_attn"]
        width = int(self.hidden * self.c["mlp_ratio"])
        self.width = 256 * ((width + 255) // 256) if self.gated else width
        self.biased = self.kind == "INTERNLM" or not self.c["no_bias"]
        if self.c["adapt_hf"] is None:
            adapted = self.kind == "INTERNLM2_PUBLIC"
        else:
            adapted = self.c["adapt_hf"]
        self.neighbours = self.kind != "INTERNLM" and not adapted

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the whole model, on one rank."""
        h = self.hidden
        kv = self.kv_heads * self.head_dim
        if self.kind == "INTERNLM":
            first, last = ("embedding", "head")
        else:
            first, last = ("tok_embeddings", "output")
        if self.c["embed_split_hidden"] or not self.c["use_flash_attn"]:
            table = "weight"
        else:
            table = "word_embeddings.weight"
        shapes: dict[str, tuple[int, ...]] = {f"{first}.{table}": (self.c["vocab_size"], h)}
        products = {
            "INTERNLM": {"mixer.Wqkv": (3 * h, h), "mixer.out_proj": (h, h)},
            "INTERNLM2_PUBLIC": {"attention.wqkv": (h + 2 * kv, h), "attention.wo": (h, h)},
            "LLAMA2": {
                "attention.wq": (h, h),
                "attention.wk": (kv, h),
                "attention.wv": (kv, h),
                "attention.wo": (h, h),
            },
        }[self.kind]
        norms = ("norm1", "norm2") if self.kind == "INTERNLM" else ("attention_norm", "ffn_norm")
        fed = {"w1": (self.width, h), "w2": (h, self.width), "w3": (self.width, h)}
        fed = fed if self.gated else {"fc1": (self.width, h), "fc2": (h, self.width)}
        for n in range(self.layers):
            block = self.block(n)
            for name, shape in products.items():
                shapes[f"{block}.{name}.weight"] = shape
                if self.biased:
                    shapes[f"{block}.{name}.bias"] = shape[:1]
            for norm in norms:
                shapes |= self._norm_shapes(f"{block}.{norm}")
            shapes |= {f"{block}.{self.feed}.{name}.weight": shape for name, shape in fed.items()}
        return shapes | self._norm_shapes("norm") | {f"{last}.weight": (self.c["vocab_size"], h)}

    def _norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        kinds = ("weight",) if self.c["norm_type"] == "rmsnorm" else ("weight", "bias")
        return {f"{name}.{kind}": (self.hidden,) for kind in kinds}

    def block(self, n: int) -> str:
        return f"{'blocks' if self.kind == 'INTERNLM' else 'layers'}.{n}"

    @property
    def feed(self) -> str:
        return "mlp" if self.kind == "INTERNLM" else "feed_forward"

    def logits(self, w: Weights, ids: Tensor, drop: Drop = lambda where, x: x) -> Tensor:
        """ids [b, s] -> [b, s, vocab]. drop: stands for dropout, by the name of the place."""
        scale = self.c["embed_grad_scale"]
        x = F.embedding(ids, next(table for name, table in w.items() if "embedding" in name))
        x = scale * x + (1 - scale) * x.detach()
        norms = ("norm1", "norm2") if self.kind == "INTERNLM" else ("attention_norm", "ffn_norm")
        for n in range(self.layers):
            block = self.block(n)
            residual = drop(f"{n} input", x)
            mixed = self.attention(w, block, self.norm(w, f"{block}.{norms[0]}", residual))
            residual = drop(f"{n} attention", mixed) + residual
            x = (
                self.feed_forward(
                    w, f"{block}.{self.feed}", self.norm(w, f"{block}.{norms[1]}", residual)
                )
                + residual
            )
        head = w["head.weight" if self.kind == "INTERNLM" else "output.weight"]
        return self.norm(w, "norm", x) @ (scale * head + (1 - scale) * head.detach()).T

    def norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        weight = w[f"{name}.weight"]
        epsilon = self.c["layer_norm_epsilon"]
        if self.c["norm_type"] == "rmsnorm":
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight
            + w[f"{name}.bias"]
        )

    def feed_forward(self, w: Weights, name: str, x: Tensor) -> Tensor:
        if not self.gated:
            return (
                F.gelu(x @ w[f"{name}.fc1.weight"].T, approximate="tanh")
                @ w[f"{name}.fc2.weight"].T
            )
        first = x @ w[f"{name}.w1.weight"].T
        third = x @ w[f"{name}.w3.weight"].T
        return (F.silu(first) * third) @ w[f"{name}.w2.weight"].T

    def attention(self, w: Weights, block: str, x: Tensor) -> Tensor:
        """x [b, s, h]."""

        def product(name: str, x: Tensor) -> Tensor:
            return F.linear(x, w[f"{block}.{name}.weight"], w.get(f"{block}.{name}.bias"))

        q, k, v = self._apart(product, x)
        q = self.rotated(q)
        k = self.rotated(k)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 2) for y in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k / math.sqrt(self.head_dim))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.c["use_flash_attn"]:
            scores = scores.masked_fill(later, -math.inf)
        else:
            scores = scores + later * -10000.0
        mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
        return product("mixer.out_proj" if self.kind == "INTERNLM" else "attention.wo", mixed)

    def _apart(
        self, product: Callable[[str, Tensor], Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [b, s, heads, d], key and value [b, s, kv heads, d]."""
        if self.kind == "INTERNLM":
            q, k, v = (
                product("mixer.Wqkv", x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
            )
            return q, k, v
        if self.kind == "LLAMA2":
            q, k, v = (
                product(f"attention.w{n}", x).unflatten(-1, (-1, self.head_dim)) for n in "qkv"
            )
            return q, k, v
        groups = self.heads // self.kv_heads
        packed = product("attention.wqkv", x).unflatten(
            -1, (self.kv_heads, groups + 2, self.head_dim)
        )
        return packed[..., :groups, :].flatten(2, 3), packed[..., -2, :], packed[..., -1, :]

    def rotated(self, x: Tensor) -> Tensor:
        """x [b, s, heads, d], whose halves, or whose even and odd features, are turned as pairs."""
        if self.neighbours:
            x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        length = x.shape[1]
        d = self.head_dim
        base = float(self.c["rope_base"])
        if self.c["use_dynamic_ntk_rope"] and length > self.c["max_position_embeddings"]:
            base *= (length / self.c["max_position_embeddings"]) ** (d / (d - 2))
        slowness = 1.0 / base ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), slowness)[:, None]
        first, second = x.chunk(2, -1)
        cosine = angles.cos()
        sine = angles.sin()
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)

    def as_ours(self, theirs: Weights) -> dict[str, Tensor]:
        """Tensors by our logical names: the same numbers, each once."""
        ours: dict[str, Tensor] = {}
        for name, tensor in theirs.items():
            ours |= self._as_ours(name, tensor)
        return ours

    def _as_ours(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        parts = name.split(".")
        kind = name.rpartition(".")[2]
        if parts[0] in ("embedding", "tok_embeddings"):
            return {"embedding.weight": tensor}
        if parts[0] in ("norm", "head", "output"):
            return {f"{'final_norm' if parts[0] == 'norm' else 'head'}.{kind}": tensor}
        layer = f"layers.{parts[1]}"
        part = parts[-2]
        if part in ("Wqkv", "wqkv", "wq", "wk", "wv"):
            return {
                f"{layer}.attention.{which}.{kind}": t
                for which, t in self._rows(part, tensor).items()
            }
        renamed = {
            **dict.fromkeys(("norm1", "attention_norm"), "attention_norm"),
            **dict.fromkeys(("norm2", "ffn_norm"), "mlp_norm"),
            **dict.fromkeys(("out_proj", "wo"), "attention.output"),
            "w1": "mlp.gate",
            **dict.fromkeys(("w3", "fc1"), "mlp.up"),
            **dict.fromkeys(("w2", "fc2"), "mlp.down"),
        }
        return {f"{layer}.{renamed[part]}.{kind}": tensor}

    def _rows(self, part: str, tensor: Tensor) -> dict[str, Tensor]:
        """Query, key and value out of rows that are packed, with halves of each head where
        neighbours were."""
        groups = self.heads // self.kv_heads
        d = self.head_dim
        rows: dict[str, Tensor]
        if part == "Wqkv":
            rows = dict(zip(("query", "key", "value"), tensor.chunk(3), strict=True))
        elif part == "wqkv":
            packed = tensor.unflatten(0, (self.kv_heads, groups + 2, d))
            rows = {"query": packed[:, :groups].flatten(0, 2), "key": packed[:, -2].flatten(0, 1)}
            rows["value"] = packed[:, -1].flatten(0, 1)
        else:
            rows = {{"q": "query", "k": "key", "v": "value"}[part[1]]: tensor}
        if not self.neighbours:
            return rows
        order = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])
        return {
            which: t if which == "value" else t.unflatten(0, (-1, d))[:, order].flatten(0, 1)
            for which, t in rows.items()
        }
