"""Other systems that train the stack of `python -m tools.bench gpu`, as functions that take one
step.

All do the same work: a Llama-style decoder in bf16 with FP32 masters, AdamW, clipping at 1, causal
attention, the same micro-batches. Megatron-core and Transformer Engine are measured where they are
installed; what is missing is said.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.bench.llama_layers import LEARNING_RATE, Workload
from tools.bench.measurement import Step

ROTARY_BASE = 10000.0


class Absent(Exception):
    """A system that cannot be measured here; the message says why."""


class MasterAdamW:
    """AdamW on FP32 copies of bf16 parameters, with clipping at 1: torch's own, fused."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self) -> None:
        """Update the parameters from their gradients, which are dropped."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*self.parameters], self.masters)


class Layer(nn.Module):
    """A Llama-style layer of plain torch modules."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.head_dim = workload.hidden // workload.heads
        # features of queries, keys and values
        heads = (workload.heads, workload.kv_heads, workload.kv_heads)
        self.qkv_sizes = [count * self.head_dim for count in heads]
        self.norm1 = nn.RMSNorm(workload.hidden, eps=1e-5)
        self.norm2 = nn.RMSNorm(workload.hidden, eps=1e-5)
        self.qkv = nn.Linear(workload.hidden, sum(self.qkv_sizes), bias=False)
        self.out = nn.Linear(self.qkv_sizes[0], workload.hidden, bias=False)
        self.gate_up = nn.Linear(workload.hidden, 2 * workload.ffn, bias=False)
        self.down = nn.Linear(workload.ffn, workload.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the activations [b, s, hidden] after the layer."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).split(self.qkv_sizes, -1)
        query, key, value = (features.view(batch, length, -1, self.head_dim) for features in qkv)
        attended = F.scaled_dot_product_attention(
            rotate(query, cos, sin).transpose(1, 2),
            rotate(key, cos, sin).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        heads_joined = attended.transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(heads_joined)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Embedding, layers, norm and head. layers: any modules that take (x, cos, sin)."""

    def __init__(self, workload: Workload, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(workload.vocab, workload.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(workload.hidden, eps=1e-5)
        self.head = nn.Linear(workload.hidden, workload.vocab, bias=False)
        head_dim = workload.hidden // workload.heads
        frequencies = ROTARY_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(workload.tokens), frequencies)
        # Buffers, so that they move to the device and to bf16 with the weights.
        self.cos = nn.Buffer(angles.cos(), persistent=False)
        self.sin = nn.Buffer(angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        return _mean_loss(self.logits(tokens), targets)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of a micro-batch, [b, s, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [b, s, heads, head_dim] with rotary positions: both halves of a head are the two
    coordinates."""
    real, imaginary = x.chunk(2, -1)
    cos = cos[:, None].to(x.dtype)
    sin = sin[:, None].to(x.dtype)
    turned_real = real * cos - imaginary * sin
    turned_imaginary = imaginary * cos + real * sin
    return torch.cat((turned_real, turned_imaginary), -1)


def _make_step(
    model: nn.Module, workload: Workload, loss: Callable[[Tensor, Tensor], Tensor]
) -> Step:
    """Return a step of `model` with `MasterAdamW`, which also drops the gradients. loss: of a
    micro-batch's tokens and targets."""
    optimizer = MasterAdamW(list(model.parameters()))
    batches = workload.batches()

    def step() -> Tensor:
        step_loss = torch.zeros((), device=workload.device)
        for tokens, targets in batches:
            # gradients add up over the micro-batches to those of the mean
            scaled_loss = loss(tokens, targets) / len(batches)
            scaled_loss.backward()
            step_loss += scaled_loss.detach()  # on the device: reading it would make the host wait
        optimizer.step()
        return step_loss

    return step


def torch_native(workload: Workload, compiled: bool = False) -> Step:
    """Return the step of plain torch modules. compiled: as a whole, by torch.compile."""
    with torch.device(workload.device):
        model = Decoder(workload, [Layer(workload) for _ in range(workload.layers)])
    model.to(torch.bfloat16)
    return _make_step(model, workload, torch.compile(model) if compiled else model)


def torchtitan_like(workload: Workload) -> Step:
    """Return the step as torchtitan takes it on one GPU: FP32 weights under autocast, each layer
    and the loss compiled, torch's fused AdamW."""
    with torch.device(workload.device):
        model = Decoder(workload, [Layer(workload) for _ in range(workload.layers)])
    for layer in model.layers:
        layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches = workload.batches()
    loss_of = torch.compile(_mean_loss)

    def step() -> Tensor:
        step_loss = torch.zeros((), device=workload.device)
        for tokens, targets in batches:
            with torch.autocast(workload.device, torch.bfloat16):
                loss = loss_of(model.logits(tokens), targets) / len(batches)
            loss.backward()
            step_loss += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return step_loss

    return step


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def transformer_engine(workload: Workload) -> Step:
    """Return the step of Transformer Engine's layers. Raises Absent."""
    te = _module("transformer_engine.pytorch")
    layers = [_TransformerEngineLayer(te, workload) for _ in range(workload.layers)]
    model = Decoder(workload, layers)
    model.to(workload.device, torch.bfloat16)
    return _make_step(model, workload, model)


class _TransformerEngineLayer(nn.Module):
    """Transformer Engine's layer, called as `Decoder` calls its layers. te: its module."""

    def __init__(self, te: Any, workload: Workload) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(
            workload.hidden,
            workload.ffn,
            workload.heads,
            num_gqa_groups=workload.kv_heads,
            layernorm_epsilon=1e-5,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            attn_input_format="bshd",
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
        )
        rotary = te.attention.RotaryPositionEmbedding(workload.hidden // workload.heads)
        frequencies = rotary(workload.tokens)
        self.positions = nn.Buffer(frequencies, persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the activations [b, s, hidden] after the layer, which has angles of its own."""
        # Its kernel takes FP32, and the cast of the module to bf16 was one of the angles, too.
        return self.layer(x, rotary_pos_emb=self.positions.float())


def megatron_core(workload: Workload) -> Step:
    """Return the step of Megatron-core's GPTModel with its own optimizer, on one rank. Raises
    Absent."""
    parallel_state = _module("megatron.core.parallel_state")
    gpt = _module("megatron.core.models.gpt")
    distributed = _module("megatron.core.distributed")
    optimizers = _module("megatron.core.optimizer")
    # once a process: a system is built in each pass
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        _module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(0)
    config = _megatron_config(workload)
    model = gpt.GPTModel(
        config,
        _megatron_layer(),
        vocab_size=workload.vocab,
        max_sequence_length=workload.tokens,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(workload.device, torch.bfloat16)
    reduction = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = distributed.DistributedDataParallel(config, reduction, model)
    settings = optimizers.OptimizerConfig(
        optimizer="adam", lr=LEARNING_RATE, weight_decay=0.1, clip_grad=1.0, bf16=True
    )
    return _megatron_step(workload, model, optimizers.get_megatron_optimizer(settings, [model]))


def _megatron_config(workload: Workload) -> Any:
    """Return Megatron-core's configuration of the workload's layers."""
    return _module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=workload.layers,
        hidden_size=workload.hidden,
        num_attention_heads=workload.heads,
        num_query_groups=workload.kv_heads,
        ffn_hidden_size=workload.ffn,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        layernorm_epsilon=1e-5,
        gradient_accumulation_fusion=False,
    )


def _megatron_layer() -> Any:
    """Return the layer of Transformer Engine where it is installed, otherwise Megatron-core's
    own."""
    specs = _module("megatron.core.models.gpt.gpt_layer_specs")
    try:
        _module("transformer_engine.pytorch")
    except Absent:
        return specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    return specs.get_gpt_layer_with_transformer_engine_spec()


def _megatron_step(workload: Workload, model: Any, optimizer: Any) -> Step:
    """Return a step of Megatron-core's model with its optimizer, which returns the mean loss."""
    batches = workload.batches()
    positions = torch.arange(workload.tokens, device=workload.device)[None]
    square = (1, 1, workload.tokens, workload.tokens)
    # Megatron's masks are True where a token does not attend.
    mask = torch.ones(square, dtype=torch.bool, device=workload.device).triu(1)

    def step() -> Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=workload.device)
        for tokens, targets in batches:
            losses = model(tokens, positions.expand_as(tokens), mask, labels=targets)
            scaled_loss = losses.float().mean() / len(batches)
            scaled_loss.backward()
            step_loss += scaled_loss.detach()
        model.finish_grad_sync()
        optimizer.step()
        return step_loss

    return step


def _module(name: str) -> Any:
    """Import a module of a system that need not be installed. Raises Absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{name.split('.')[0]} is not installed ({error})") from error


PEERS: dict[str, Callable[[Workload], Step]] = {
    "torch": torch_native,
    "torch, compiled": partial(torch_native, compiled=True),
    "torchtitan-like": torchtitan_like,
    "Megatron-core": megatron_core,
    "Transformer Engine": transformer_engine,
}
