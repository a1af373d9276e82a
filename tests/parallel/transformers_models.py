"""Bodies of ranks that train models of transformers, cut by ready styles."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from parallel.context import Context
from parallel.layers import ColumnParallelLinear
from parallel.loss import vocab_parallel_loss
from parallel.plain_modules import parallelize
from parallel.ready_styles import transformers_styles

PRELOADED = ("transformers",)
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
}
STEPS = 4


def make_model(kind: str, **changes: Any) -> nn.Module:
    """A model of transformers in FP32, the same on every rank."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(96, (3, 13), generator=generator)] * STEPS


def losses(mesh: DeviceMesh, kind: str, changes: dict[str, Any]) -> list[float]:
    """Losses of some steps with parallel layers."""
    model = make_model(kind, **changes)
    precision = plan("fp32")
    tp = Axis.of(mesh, "tp")
    parallelize(model, Context(precision, tp), transformers_styles(model))
    optimizer = ParallelAMPOptimizer([model], precision, mesh, lr=1e-2, average=False)
    head = model.get_submodule("lm_head")
    assert isinstance(head, ColumnParallelLinear)
    loss_of = vocab_parallel_loss(head)
    found: list[float] = []
    for ids in batches():
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = loss_of(logits, ids[:, 1:]).mean()
        loss.backward()
        optimizer.step(loss=loss.detach())
        found.append(loss.item())
    return found


def plain_losses(kind: str, changes: dict[str, Any]) -> list[float]:
    """Losses of the same steps with torch's own optimizer."""
    model = make_model(kind, **changes)
    embedding = model.get_submodule("model.embed_tokens")
    assert isinstance(embedding, nn.Embedding)
    embedding.padding_idx = None
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    found: list[float] = []
    for ids in batches():
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_([*matrices, *vectors], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
