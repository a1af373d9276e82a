"""The logical tensors of a model by name and shape, without building the model.

Logical names, the same for every layout:

    embedding.weight [vocab, hidden]
    positions.weight [max_positions, hidden] (learned positions)
    embedding_norm.weight|bias
    layers.N.attention_norm.weight|bias
    layers.N.attention.query|key|value|gate|output.weight|bias
    layers.N.attention.query_norm|key_norm.weight [head_dim] or [all heads]
    layers.N.attention.sinks.weight [heads]
    layers.N.attention_post_norm.weight
    layers.N.mlp_norm.weight|bias
    layers.N.mlp.gate|up|down.weight|bias
    layers.N.mlp.activation.alpha_p|alpha_n [1] (xielu), or with experts
        layers.N.mlp.router.weight|bias [experts, hidden] or [experts]
        layers.N.mlp.router.correction [experts]
        layers.N.mlp.experts.E.gate|up|down.weight|bias
        layers.N.mlp.shared.gate|up|down.weight
        layers.N.mlp.shared_gate.weight [1, hidden]
    layers.N.mlp_post_norm.weight
    layers.N.scalar [1], which is not trained (layer_scalar)
    final_norm.weight|bias
    head.weight [vocab, hidden] (a tied head is embedding.weight)
    mtp.N.embedding_norm|hidden_norm|final_norm.weight|bias
    mtp.N.projection.weight [hidden, 2 * hidden]
    mtp.N.attention_norm and so on as of layers

A model without `norm_weight` has none of the weights of these norms, one with `shared_norm` no
mlp_norm. A layer without the window has no attention.value with `global_key_as_value`.

Multi-head latent attention has in layers.N.attention, instead of query, key and value:

    query_down.weight|bias [query_rank, hidden]
    query_down_norm.weight [query_rank]
    query_up.weight [heads * (rope_dim + nope_dim), query_rank]
    key_value_down.weight|bias [kv_rank, hidden]
    key_value_down_norm.weight [kv_rank]
    key_up.weight [heads * nope_dim, kv_rank]
    key_rope.weight|bias [rope_dim, hidden]
    value_up.weight [heads * value_dim, kv_rank]

A model without a latent of queries has query.weight [heads * (rope_dim + nope_dim), hidden] for its
three of queries.

A layer with a gated delta net has in place of layers.N.attention, with kw = key_heads * key_dim and
vw = value_heads * value_dim:

    delta_net.query|key|value|gate.weight [kw or vw, hidden]
    delta_net.query_convolution|key_convolution|value_convolution.weight [kw or vw, kernel]
    delta_net.strength|decay.weight [value_heads, hidden]
    delta_net.decay.bias|log_rate [value_heads]
    delta_net.output_norm.weight [value_dim]
    delta_net.output.weight [hidden, vw]

With `delta_net.gate_rank` (Kimi Delta Attention) it has for delta_net.gate.weight,
delta_net.decay.weight and delta_net.decay.bias

    delta_net.gate_down|decay_down.weight [gate_rank, hidden]
    delta_net.gate_up.weight [vw, gate_rank]
    delta_net.decay_up.weight [kw, gate_rank]
    delta_net.decay.bias [kw]

A layer of `hybrid_pattern` has one of the two branches, with the norm of that branch alone. One
with a Mamba-2 mixer has in place of layers.N.attention, with kw = groups * state_dim and vw =
heads * head_dim of `mamba`:

    mamba.query|key|value|gate.weight [kw or vw, hidden]
    mamba.query_convolution|key_convolution|value_convolution.weight|bias [kw or vw, kernel] or [..]
    mamba.step.weight|bias [heads, hidden] or [heads]
    mamba.log_rate|skip [heads]
    mamba.output_norm.weight [vw]
    mamba.output.weight [hidden, vw]

Weights are [output features, input features]. Rows of query and key are in the order of
`models.attention.rope`'s rotation.
"""

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
    """Yield the tensors of a layer by their names in it.

    model: describes the layer (`ModelConfig.kind_of_layer`).
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
        if with_experts:
            for expert in range(model.experts):
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
    """Yield the tensors of a gated delta net, with `gate_rank` those of Kimi Delta Attention."""
    sizes = model.delta_net
    # rows of the matrices, by name: of what passes the convolution, and of all that is projected
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
    projected = {"gate": sizes.width, **convolved, "step": sizes.heads}
    for name, rows in projected.items():
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
    """Yield the tensors of one routed expert, by their names in it, such as "up.weight"."""
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
    """Yield the tensors of a feed-forward of width `ffn`, under the name `tensor_name`."""
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
    """Yield the weight [rows, columns] of a linear layer, and its bias if it has one."""
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
    """Yield the weight and the bias of a norm, as far as norms of this model have them."""
    if model.norm_weight:
        yield f"{tensor_name}.weight", (features,)
    if model.norm_bias:
        yield f"{tensor_name}.bias", (features,)
