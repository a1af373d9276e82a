"""The logical tensors of a model by name and shape, without building the model."""

from collections.abc import Iterator

from models.activations import ACTIVATIONS
from models.config import ModelConfig

NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every logical tensor of `model`."""
    shapes = dict(shapes_before_layers(model))
    for layer in range(model.layers):
        for tensor_name, shape in layer_shapes(model.kind_of_layer(layer)):
            shapes[f"layers.{layer}.{tensor_name}"] = shape
    shapes |= dict(final_norm_shapes(model))
    for module in range(model.mtp_layers):
        for tensor_name, shape in module_shapes(model):
            shapes[f"mtp.{module}.{tensor_name}"] = shape
    return shapes | dict(head_shapes(model))


def is_never_trained(name: str) -> bool:
    """Return True for the logical name of a tensor that no run trains: the number of a layer
    (`ModelConfig.layer_scalar`), which begins at 1."""
    return name.endswith(".scalar")


def shapes_before_layers(model: ModelConfig) -> NamedShapes:
    """Yield the tensors in front of the first layer."""
    yield "embedding.weight", (model.vocab, model.hidden)
    if model.positions == "learned":
        yield "positions.weight", (model.max_positions, model.hidden)
    if model.embedding_norm:
        yield from _norm("embedding_norm", model, model.hidden)


def final_norm_shapes(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of the norm after the last layer."""
    yield from _norm("final_norm", model, model.hidden)


def head_shapes(model: ModelConfig) -> NamedShapes:
    """Yield the tensor of the head; none if it is tied, and so the embedding."""
    if not model.tied:
        yield "head.weight", (model.vocab, model.hidden)


def module_shapes(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of a module of multi-token prediction: of its layer, and of what is around
    it."""
    for tensor_name in ("embedding_norm", "hidden_norm", "final_norm"):
        yield from _norm(tensor_name, model, model.hidden)
    yield "projection.weight", (model.hidden, 2 * model.hidden)
    yield from layer_shapes(model.kind_of_layer(model.layers - 1))


def layer_shapes(model: ModelConfig, with_experts: bool = True) -> NamedShapes:
    """Yield the tensors of a layer.

    model: that of the layer (`ModelConfig.kind_of_layer`).
    with_experts: False leaves routed experts out (`expert_shapes`), of which there may be hundreds.
    """
    hidden = model.hidden
    if model.has_mixer:
        yield from _branch_norms("attention", model, hidden)
        if model.delta_net:
            yield from _delta_net(model)
        elif model.mamba:
            yield from _mamba(model)
        else:
            yield from _attention(model)
    if model.layer_scalar:
        yield "scalar", (1,)
    if not model.has_feed_forward:
        return
    if not model.shared_norm:
        yield from _branch_norms("mlp", model, hidden)
    if model.experts:
        yield from _router(model)
        for expert in range(model.experts if with_experts else 0):
            for name, shape in expert_shapes(model):
                yield f"mlp.experts.{expert}.{name}", shape
        yield from _shared_experts(model)
    else:
        yield from _feed_forward("mlp", model, model.ffn, model.mlp_bias)


def _attention(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of attention."""
    if model.latent:
        yield from _latents(model)
    else:
        yield from _queries_keys_values(model)
    # In latent attention values have a width of their own.
    values = model.heads * (model.latent.value_dim or model.head_dim)
    yield from _linear("attention.output", model.hidden, values, model.output_bias)


def _delta_net(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of a gated delta net."""
    sizes = model.delta_net
    convolved = {
        "query": sizes.key_width,
        "key": sizes.key_width,
        "value": sizes.value_width,
    }
    projected = {**convolved, "strength": sizes.value_heads}
    if sizes.gate_rank:
        projected |= {"gate_down": sizes.gate_rank, "decay_down": sizes.gate_rank}
        yield "delta_net.gate_up.weight", (sizes.value_width, sizes.gate_rank)
        yield "delta_net.decay_up.weight", (sizes.decay_width, sizes.gate_rank)
    else:
        projected |= {"gate": sizes.value_width, "decay": sizes.value_heads}
    for name, rows in projected.items():
        yield f"delta_net.{name}.weight", (rows, model.hidden)
    for name, features in convolved.items():
        yield f"delta_net.{name}_convolution.weight", (features, sizes.kernel)
    yield "delta_net.decay.bias", (sizes.decay_width,)
    yield "delta_net.decay.log_rate", (sizes.value_heads,)
    yield "delta_net.output_norm.weight", (sizes.value_dim,)
    yield "delta_net.output.weight", (model.hidden, sizes.value_width)


def _mamba(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of a Mamba-2 mixer."""
    sizes = model.mamba
    convolved = {
        "value": sizes.width,
        "key": sizes.key_width,
        "query": sizes.key_width,
    }
    for name, rows in {"gate": sizes.width, **convolved, "step": sizes.heads}.items():
        yield f"mamba.{name}.weight", (rows, model.hidden)
    for name, features in convolved.items():
        yield f"mamba.{name}_convolution.weight", (features, sizes.kernel)
        yield f"mamba.{name}_convolution.bias", (features,)
    yield "mamba.step.bias", (sizes.heads,)
    yield "mamba.log_rate", (sizes.heads,)
    yield "mamba.skip", (sizes.heads,)
    yield "mamba.output_norm.weight", (sizes.width,)
    yield "mamba.output.weight", (model.hidden, sizes.width)


def _router(model: ModelConfig) -> NamedShapes:
    yield from _linear("mlp.router", model.experts, model.hidden, model.router_bias)
    if model.router.correction:
        yield "mlp.router.correction", (model.experts,)


def _shared_experts(model: ModelConfig) -> NamedShapes:
    if model.shared_experts:
        yield from _feed_forward("mlp.shared", model, model.shared_experts, model.expert_bias)
    if model.shared_gate:
        yield "mlp.shared_gate.weight", (1, model.hidden)


def expert_shapes(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of one routed expert, by their names in it."""
    for name, shape in _feed_forward("expert", model, model.ffn, model.expert_bias):
        yield name.removeprefix("expert."), shape


def _queries_keys_values(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of queries, keys and values of ordinary attention."""
    head_dim = model.head_dim
    query_rows = model.heads * head_dim
    kv_rows = model.kv_heads * head_dim
    projected = {"query": query_rows, "key": kv_rows}
    if not model.global_key_as_value:
        projected["value"] = kv_rows
    for name, rows in projected.items():
        yield from _linear(f"attention.{name}", rows, model.hidden, model.qkv_bias)
    if model.attention_gate:
        yield from _linear("attention.gate", query_rows, model.hidden, model.qkv_bias)
    if model.qk_norm and model.norm_weight:
        # A norm over all heads has a weight for each feature of each head.
        if model.qk_norm_over == "all":
            query_features = query_rows
            key_features = kv_rows
        else:
            query_features = head_dim
            key_features = head_dim
        yield "attention.query_norm.weight", (query_features,)
        yield "attention.key_norm.weight", (key_features,)
    if model.attention_sinks:
        yield "attention.sinks.weight", (model.heads,)


def _latents(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of queries, keys and values of latent attention."""
    hidden = model.hidden
    bias = model.qkv_bias
    sizes = model.latent
    query_rows = model.heads * model.head_dim
    key_rows = model.heads * sizes.nope_dim
    value_rows = model.heads * sizes.value_dim
    if sizes.query_rank:
        yield from _linear("attention.query_down", sizes.query_rank, hidden, bias)
        yield "attention.query_down_norm.weight", (sizes.query_rank,)
        yield "attention.query_up.weight", (query_rows, sizes.query_rank)
    else:
        yield "attention.query.weight", (query_rows, hidden)
    # All heads share the latent of keys and values, and the rotary part of keys.
    yield from _linear("attention.key_value_down", sizes.kv_rank, hidden, bias)
    yield from _linear("attention.key_rope", sizes.rope_dim, hidden, bias)
    yield "attention.key_value_down_norm.weight", (sizes.kv_rank,)
    yield "attention.key_up.weight", (key_rows, sizes.kv_rank)
    yield "attention.value_up.weight", (value_rows, sizes.kv_rank)


def _feed_forward(
    tensor_name: str,
    model: ModelConfig,
    ffn: int,
    bias: bool,
) -> NamedShapes:
    if model.gated:
        yield from _linear(f"{tensor_name}.gate", ffn, model.hidden, bias)
    yield from _linear(f"{tensor_name}.up", ffn, model.hidden, bias)
    yield from _linear(f"{tensor_name}.down", model.hidden, ffn, bias)
    for parameter in ACTIVATIONS[model.mlp].parameters:
        yield f"{tensor_name}.activation.{parameter}", (1,)


def _linear(
    tensor_name: str,
    rows: int,
    columns: int,
    bias: bool,
) -> NamedShapes:
    yield f"{tensor_name}.weight", (rows, columns)
    if bias:
        yield f"{tensor_name}.bias", (rows,)


def _branch_norms(
    branch: str,
    model: ModelConfig,
    features: int,
) -> NamedShapes:
    """Yield the norms before a branch of a layer, after it, or both."""
    if model.norm_at != "after":
        yield from _norm(f"{branch}_norm", model, features)
    if model.norm_at != "before":
        yield from _norm(f"{branch}_post_norm", model, features)


def _norm(
    tensor_name: str,
    model: ModelConfig,
    features: int,
) -> NamedShapes:
    if model.norm_weight:
        yield f"{tensor_name}.weight", (features,)
    if model.norm_bias:
        yield f"{tensor_name}.bias", (features,)
