"""A program that trains torchtitan's own Llama by torchtitan's optimizer, rate, loss and clipping.

    python titan_program.py FOLDER

The folder has settings.json and ids.pt, int64 [steps, samples, length + 1]. It gets the seed
checkpoint step-0/ and losses.json. Only the kernel of attention, which wants a compiler, is a plain
one of torch.
"""

# The package is in a folder of its own, in which no other program looks for it.
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import default_adamw
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention


def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> Tensor:
    """Causal attention by torch's own function; [b, s, heads, dim]."""
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def build(settings: dict[str, Any]) -> nn.Module:
    """Return the model with the weights that its own rules draw."""
    dim = settings["dim"]
    vocab = settings["vocab"]
    rope = ComplexRoPE.Config(
        dim=dim // settings["heads"], max_seq_len=settings["length"], theta=settings["theta"]
    )
    layers = llama3._build_llama3_layers(
        n_layers=settings["layers"],
        dim=dim,
        n_heads=settings["heads"],
        n_kv_heads=settings["kv_heads"],
        hidden_dim=settings["hidden_dim"],
        rope=rope,
        fuse_qkv=False,
        attn_backend="flex",
    )
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=False,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, eps=1e-5, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)
        ),
        layers=layers,
    )
    torch.manual_seed(settings["seed"])
    model = config.build()
    with torch.no_grad():
        model.init_states()
    return model


def main(folder: Path) -> None:
    """Train, and leave the seed checkpoint and the losses."""
    FlexAttention.forward = attend  # type: ignore[method-assign]
    settings = json.loads((folder / "settings.json").read_text())
    ids = torch.load(folder / "ids.pt")
    model = build(settings)
    state = {**ModelWrapper(model).state_dict(), "train_state": {"step": torch.tensor(0)}}
    dcp.save(state, checkpoint_id=folder / "step-0", no_dist=True)
    optimizer_config = default_adamw(lr=settings["lr"])
    optimizer_config.implementation = "for-loop"
    optimizers = OptimizersContainer(optimizer_config, model_parts=[model])
    rates = LRSchedulersContainer.Config(
        warmup_steps=settings["warmup"], decay_type="linear", min_lr_factor=0.1
    ).build(optimizers=optimizers, training_steps=len(ids))
    losses = []
    norms = []
    for batch in ids:
        inputs = batch[:, :-1]
        labels = batch[:, 1:]
        optimizers.zero_grad()
        loss = cross_entropy_loss(model(inputs), labels) / labels.numel()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), settings["clip"])
        optimizers.step()
        rates.step()
        losses.append(loss.item())
        norms.append(norm.item())
    (folder / "losses.json").write_text(json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
