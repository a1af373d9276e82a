"""The numbers of parameters of a model and of its parts: sums over its logical shapes."""

from collections.abc import Collection
from math import prod

from models.config import ModelConfig
from models.logical_shapes import (
    NamedShapes,
    expert_shapes,
    final_norm_shapes,
    head_shapes,
    layer_shapes,
    module_shapes,
    shapes_before_layers,
)


def num_parameters(model: ModelConfig) -> int:
    """Return the number of logical parameters, a tied head counted once. The vocabulary must be
    known."""
    assert model.vocab > 0, "with_vocab() first"
    return end_parameters(model) + model.over_layers(layer_parameters) + mtp_parameters(model)


def end_parameters(model: ModelConfig) -> int:
    """Return the number of parameters before and after the layers, a tied head counted once."""
    before = _elements(shapes_before_layers(model))
    return before + _elements(final_norm_shapes(model)) + _elements(head_shapes(model))


def stage_parameters(
    model: ModelConfig, layers: Collection[int], is_first: bool, is_last: bool
) -> int:
    """Return the number of parameters of a stage with these layers, of a pipeline.

    is_first, is_last: it is the model's first stage, with the embedding, or the last one, with the
    head. A tied embedding counts in both stages that have it.
    """
    count = model.over_layers(layer_parameters, layers)
    if is_first:
        count += _elements(shapes_before_layers(model))
    if is_last:
        count += _elements(final_norm_shapes(model)) + mtp_parameters(model)
        count += _elements(head_shapes(model))
    if is_last and model.tied and not is_first:
        count += model.vocab * model.hidden
    return count


def layer_parameters(kind: ModelConfig) -> int:
    """Return the number of parameters of one layer, of a model of its kind
    (`ModelConfig.kind_of_layer`)."""
    others = _elements(layer_shapes(kind, with_experts=False))
    return others + layer_expert_parameters(kind)


def layer_expert_parameters(kind: ModelConfig) -> int:
    """Return the number of parameters of the routed experts of one layer, without their router."""
    if not (kind.experts and kind.has_feed_forward):
        return 0
    return kind.experts * _elements(expert_shapes(kind))


def expert_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the experts of all layers, without their routers."""
    in_layers = model.over_layers(layer_expert_parameters)
    # A module of multi-token prediction has a layer such as the model's last one.
    last_kind = model.kind_of_layer(model.layers - 1)
    return in_layers + model.mtp_layers * layer_expert_parameters(last_kind)


def mtp_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the modules of multi-token prediction, without embedding
    and head."""
    if not model.mtp_layers:
        return 0
    return model.mtp_layers * _elements(module_shapes(model))


def _elements(shapes: NamedShapes) -> int:
    return sum(prod(shape) for _, shape in shapes)
