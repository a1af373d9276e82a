"""The model of a Megatron-Bridge checkpoint, as run_config.yaml beside its tensors says it.

    iter_0000100/run_config.yaml     the configuration of the run; `model` has all fields of the
                                     model, defaults included
    iter_0000100/.metadata, ...      the tensors, as Megatron-core saves them (torch_dist)

Fields of `model` are those of Megatron-core's TransformerConfig, in newer versions in a table of
their own (`model.transformer`), and of what makes a GPTModel of it (megatron/bridge/models/
gpt_provider.py). Here they become Megatron's args, which are read, known not to matter, or refused
by name (`keys`); a field that no table has is named in a note. The other tables of the file are of
training, and are not read.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaprec.errors import Problem, UserError
from tools.convert.core.yaml_files import read_yaml
from tools.convert.megatron.feed_forwards import SQUARED_RELU
from tools.convert.megatron.rotary import LLAMA3

BRIDGE = "run_config.yaml"
_TARGET = "_target_"
# Classes that make Megatron-core's GPTModel and change nothing of it.
_CLASSES = re.compile(
    r"megatron\.bridge\.models\.(?:"
    r"gpt_provider\.GPTModelProvider"
    r"|mla_provider\.MLAModelProvider"
    r"|gpt\.model_config\.BridgeGPTModelConfig(?:\.from_dict)?"
    r"|(?:llama|mistral|qwen|deepseek)\.\w+_provider\.\w+)"
)
# Functions that make the layers of such a model as its other fields say.
_LAYERS = re.compile(
    r"megatron\.bridge\.models\.gpt_provider\.(?:default|local|transformer_engine(?:_full)?)_layer_spec"
    r"|megatron\.core\.models\.gpt\.gpt_layer_specs\.get_gpt_\w+"
)
_ACTIVATIONS = {
    "torch.nn.functional.silu": "silu",
    "torch.nn.functional.gelu": "gelu",
    "torch._C._nn.gelu": "gelu",
    "megatron.core.activations.squared_relu": SQUARED_RELU,
}
# Of Llama 3.1 in older versions: the field -> what Megatron-core has in its code.
_STRETCHED = {
    "low_freq_factor": LLAMA3["low_freq_factor"],
    "high_freq_factor": LLAMA3["high_freq_factor"],
    "old_context_len": LLAMA3["original_max_position_embeddings"],
}
_STRETCH = "scale_factor"
# Fields of what makes the model, of which no weight depends.
_FREE = """
attention_softmax_in_fp32 cross_entropy_loss_fusion dense_grouped_gemm extra_checkpoint_metadata
generation_config gradient_accumulation_fusion hf_model_id hf_model_revision
init_model_with_meta_device logit_dtype make_vocab_size_divisible_by masked_softmax_fusion
mtp_enabled restore_modelopt_state should_pad_vocab tp_comm_overlap_cfg transformer_layer_spec
use_arbitrary_attention_mask use_te_rng_tracker use_transformer_engine_full_layer_spec
use_transformer_engine_op_fuser
"""


def bridge_arguments(file: Path) -> dict[str, Any]:
    """Return the model of a run_config.yaml as Megatron's args.

    Raises UserError for a file that says no model, one of another class, adapters, layers or an
    activation that are not known, and what cannot be read.
    """
    config = read_yaml(file)
    fields = config.get("model")
    if not isinstance(fields, dict):
        raise UserError.of("convert.bridge_no_model", file=file)
    outer_class = fields.get(_TARGET)
    inner = fields.get("transformer")
    if isinstance(inner, dict):
        fields = {**fields, **inner}
    problems = [*_problems(file, config, fields, outer_class)]
    if problems:
        raise UserError(*problems)
    arguments = {}
    for name, value in fields.items():
        if name != "transformer" and not str(name).startswith("_") and name not in _FREE.split():
            arguments[name] = value
    return {**arguments, **_named_otherwise(fields)}


def _problems(
    file: Path, config: Mapping[str, Any], fields: Mapping[str, Any], outer_class: Any
) -> Iterator[Problem]:
    """Yield a line for each part of the configuration by which it is another model."""
    if not isinstance(outer_class, str) or not _CLASSES.fullmatch(outer_class):
        yield Problem.of("convert.bridge_class", file=file, target=outer_class)
    if config.get("peft") is not None:
        yield Problem.of("convert.bridge_adapter", file=file)
    layers = _function(fields.get("transformer_layer_spec"))
    if layers is not None and not (isinstance(layers, str) and _LAYERS.fullmatch(layers)):
        yield Problem.of("convert.bridge_layers", file=file, value=layers)
    if "activation_func" in fields and _activation(fields) is None:
        yield Problem.of(
            "convert.bridge_activation", file=file, value=_function(fields["activation_func"])
        )
    stretched = {name: fields[name] for name in _STRETCHED if name in fields}
    if stretched and stretched != _STRETCHED:
        yield Problem.of("convert.bridge_rope", file=file, value=stretched, own=_STRETCHED)


def _named_otherwise(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the args that fields say in other words than Megatron's."""
    # The model is made for sequences of the training's length (GPTModelProvider.provide).
    arguments: dict[str, Any] = {"max_position_embeddings": fields.get("seq_length")}
    if "activation_func" in fields:
        arguments["activation_func"] = _activation(fields)
    # Rows of the embedding are as many as tokens, unless they are to be padded.
    if not fields.get("should_pad_vocab"):
        arguments["padded_vocab_size"] = fields.get("vocab_size")
    if fields.get(_STRETCH) is not None:
        arguments["rope_scaling"] = True
        arguments["rope_scaling_factor"] = fields[_STRETCH]
    return arguments


def _activation(fields: Mapping[str, Any]) -> str | None:
    """Return Megatron's word for the activation; None if it is not known."""
    function = _function(fields["activation_func"])
    if not isinstance(function, str):
        return None
    if function in _ACTIVATIONS.values():  # it is Megatron's word already
        return function
    return _ACTIVATIONS.get(function)


def _function(value: Any) -> Any:
    """Return the name of a function as it is dumped; what else is dumped is returned as it is."""
    return value.get(_TARGET) if isinstance(value, Mapping) else value
