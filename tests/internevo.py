"""Small models of InternEvo's: a plain model of its forward pass, and its checkpoints written as it
writes them.

The model is that of internlm/model/modeling_internlm.py; the files are those of
internlm/checkpoint/components.py, cut as internlm/model/ops/linear.py and
internlm/model/modules/embedding.py cut parameters.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = 6
HIDDEN = 48
HEADS = 8
VOCAB = 136
SAID: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "mlp_ratio": 8 / 3,
    "norm_type": "rmsnorm",
    "layer_norm_epsilon": 1e-5,
    "rope_base": 50000,
    "max_position_embeddings": 64,
    "embed_grad_scale": 1,
    "drop_rate": 0,
    "attn_drop_rate": 0,
    "checkpoint": 0.5,
    "dtype": torch.float64,
    "use_flash_attn": True,
    "parallel_output": True,
}


@dataclass(frozen=True)
class Form:
    """What differs among InternEvo's models and versions. closing: of the feed-forward; fc2 is not
    gated."""

    closing: str = "w2"
    norm: str = "rmsnorm"
    split_hidden: bool = True
    biased: bool = True
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def ffn(self) -> int:
        return HIDDEN * 8 // 3 if self.closing == "fc2" else 256

    @property
    def config(self) -> dict[str, Any]:
        return {
            **SAID,
            "norm_type": self.norm,
            "embed_split_hidden": self.split_hidden,
            **self.said,
        }


def weights(form: Form) -> dict[str, Tensor]:
    """A whole model of random weights, under InternEvo's names, in float64."""
    h = HIDDEN
    f = form.ffn
    dice = torch.Generator().manual_seed(7)
    if form.closing == "fc2":
        outer = ["fc1"]
    else:
        outer = [w for w in ("w1", "w2", "w3") if w != form.closing]
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCAB, h), "head.weight": (VOCAB, h)}
    for n in range(LAYERS):
        layer = {"mixer.Wqkv.weight": (3 * h, h), "mixer.out_proj.weight": (h, h)}
        layer |= {"mixer.Wqkv.bias": (3 * h,), "mixer.out_proj.bias": (h,)} if form.biased else {}
        layer |= {f"mlp.{w}.weight": (f, h) for w in outer} | {f"mlp.{form.closing}.weight": (h, f)}
        shapes |= {f"blocks.{n}.{name}": shape for name, shape in layer.items()}
    for norm in ("norm", *(f"blocks.{n}.norm{m}" for n in range(LAYERS) for m in (1, 2))):
        shapes[f"{norm}.weight"] = (h,)
        shapes |= {f"{norm}.bias": (h,)} if form.norm == "layernorm" else {}
    draw = {
        name: torch.randn(shape, generator=dice, dtype=torch.float64) * 0.2
        for name, shape in shapes.items()
    }
    return {
        name: values + 1 if "norm" in name and name.endswith("weight") else values
        for name, values in draw.items()
    }


def logits(form: Form, w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """[b, s, vocab] of token ids [b, s], in float64."""
    dim = HIDDEN // HEADS
    angles = torch.arange(ids.shape[1]).double()[:, None] * form.config["rope_base"] ** (
        -torch.arange(0, dim, 2).double() / dim
    )
    mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1).double()

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        if form.norm == "layernorm":
            return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos = angles.cos()[:, None]
        sin = angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    x = w["embedding.weight"][ids]
    for n in range(LAYERS):
        query, key, value = (
            linear(f"blocks.{n}.mixer.Wqkv", norm(f"blocks.{n}.norm1", x))
            .unflatten(-1, (3, HEADS, dim))
            .unbind(2)
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", turn(query), turn(key)) / math.sqrt(dim)
        mixed = torch.einsum("bhqk,bkhd->bqhd", (scores + mask).softmax(-1), value).flatten(2)
        x = x + linear(f"blocks.{n}.mixer.out_proj", mixed)
        x = x + _feed_forward(
            form,
            lambda name, y, n=n: linear(f"blocks.{n}.mlp.{name}", y),
            norm(f"blocks.{n}.norm2", x),
        )
    return norm("norm", x) @ w["head.weight"].t()


def _feed_forward(form: Form, layer: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
    if form.closing == "fc2":
        return layer("fc2", F.gelu(layer("fc1", x), approximate="tanh"))
    other = "w3" if form.closing == "w2" else "w2"
    return layer(form.closing, F.silu(layer("w1", x)) * layer(other, x))


def uneven(values: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """The part of a rank where the first ranks have one more (ColumnParallelLinearTorch,
    RowParallelLinearTorch)."""
    whole, more = divmod(values.shape[dim], ranks)
    sizes = [whole + (n < more) for n in range(ranks)]
    return values.split(sizes, dim)[rank]


def tensor_parallel(form: Form, tp: int, rank: int, name: str, values: Tensor) -> Tensor | None:
    """What a rank along tensor parallelism has of a parameter; None for a bias that the first alone
    has."""
    layer = name.split(".")[-2]
    if layer == "Wqkv":
        return torch.cat([uneven(third, tp, rank) for third in values.chunk(3)])
    if layer == "out_proj" and name.endswith("bias"):
        return values if rank == 0 else None
    if layer in ("out_proj", form.closing):
        return uneven(values, tp, rank, 1)
    if layer == "embedding":
        return values.chunk(tp, 1 if form.split_hidden else 0)[rank]
    if layer in ("head", "w1", "w2", "w3", "fc1"):
        return uneven(values, tp, rank)
    return values


def weight_parallel(form: Form, wp: int, rank: int, name: str, values: Tensor) -> Tensor | None:
    """The same along weight parallelism, where every linear layer is an ISPLinear: its rows are
    cut."""
    layer = name.split(".")[-2]
    if layer == "embedding":
        return values.chunk(wp, 1 if form.split_hidden else 0)[rank]
    return values if "norm" in layer else uneven(values, wp, rank)


def stages(pp: int, chunks: int) -> list[list[range]]:
    """Layers of each rank's chunks (internlm/solver/pipeline_utils.py:partition_uniform): later
    ranks have more."""
    own: list[list[range]] = [[] for _ in range(pp)]
    each = LAYERS // chunks
    start = 0
    for _ in range(chunks):
        for p in range(pp):
            end = start + each // pp + (p >= pp - each % pp)
            own[p].append(range(start, end))
            start = end
    return own


def state(
    form: Form, whole: dict[str, Tensor], layers: list[range], cut: Callable[[str, Tensor], Any]
) -> dict[str, Any]:
    """The state dict of a rank: chunks are NaiveAMPModels in a ModuleList if there are several."""
    found: dict[str, Any] = {}
    for number, own in enumerate(layers):
        for name, values in whole.items():
            block = name.split(".")[1] if name.startswith("blocks.") else None
            if block is not None:
                local = f"blocks.{int(block) - own[0]}.{name.split('.', 2)[2]}"
            else:
                local = name
            if block is not None:
                here = int(block) in own
            elif "embedding" in name:
                here = 0 in own
            else:
                here = LAYERS - 1 in own
            part = cut(name, values) if here else None
            if part is not None:
                if form.split_hidden:
                    local = local
                else:
                    local = local.replace("embedding.", "embedding.word_embeddings.")
                found[f"{number}.model.{local}" if len(layers) > 1 else local] = part.clone()
    return found


@contextmanager
def config_class() -> Iterator[type]:
    """InternEvo's Config, a dict in a module of its own
    (internlm/core/context/parallel_context.py)."""
    name = "internlm.core.context.parallel_context"
    parents = [name.rsplit(".", n)[0] for n in range(3, -1, -1)]
    sys.modules |= {parent: ModuleType(parent) for parent in parents}
    try:
        config = type("Config", (dict,), {"__module__": name, "__setattr__": dict.__setitem__})
        sys.modules[name].Config = config  # type: ignore[attr-defined]
        yield config
    finally:
        for parent in parents:
            del sys.modules[parent]


def save(
    folder: Path,
    form: Form,
    whole: dict[str, Tensor],
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    wp: int = 0,
    **said: Any,
) -> Path:
    """The folder of a step. wp: ranks of weight parallelism, 0 if there is none; then tp ranks cut
    nothing."""
    folder.mkdir(parents=True)
    layers = stages(pp, chunks)
    kind, count = (weight_parallel, wp) if wp else (tensor_parallel, tp)
    for p in range(pp):
        for rank in range(count):
            name = f"wp{rank}" if wp else f"tp{rank}"
            own = state(form, whole, layers[p], lambda n, v, r=rank: kind(form, count, r, n, v))
            torch.save(own, folder / f"model_{name}_pp{p}.pt")
            torch.save({}, folder / f"topo_{name}_pp{p}.json")
            torch.save({"base_optim_states": {}}, folder / f"optimizer_{name}_pp{p}_zo0.pt")
    with config_class() as config:
        extra = {"num_chunks": chunks} | said
        torch.save(config({**form.config, **extra}), folder / "model_config.pt")
    torch.save({"step_count": 3}, folder / "context.pt")
    torch.save("model = dict(...)", folder / "config_file.pt")
    return folder
