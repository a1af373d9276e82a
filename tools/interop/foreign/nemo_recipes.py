"""NeMo's recipes and Megatron-Bridge: their default plugins, and fields that are set afterwards.

A recipe of NeMo (`llm.llama3_8b.pretrain_recipe()`) has a precision plugin at `trainer.plugins`,
one of Megatron-Bridge at `mixed_precision`. The defaults are those of nemo/collections/llm/recipes
and megatron/bridge/recipes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megaprec.dialects import nemo
from tools.interop.foreign.findings import Settings
from tools.interop.foreign.plain import Call, Entry, Row, Unknown, attributes_set, spread
from tools.interop.foreign.systems import BRIDGE, BRIDGE_KEYS, NEMO, OPTIMIZER_KEYS, maker_of

FLAGS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}
PRECISIONS = {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed"}
RECIPES = ("pretrain_recipe", "finetune_recipe", "pretrain_recipe_performance")
BRIDGE_RECIPES = ("_pretrain_config", "_finetune_config", "_sft_config", "_peft_config")
BY_MODEL: Mapping[str, str] = {
    "nemotronh_47b": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotronh_56b": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotron_nano_12b_v2": "nanov2_bf16_with_fp8_current_scaling_mixed",
}
UNSURE = "hyena"  # its recipes take an argument that changes precision in ways of its own
OVERWRITTEN = ("DistributedDataParallelConfig", "OptimizerConfig", "MegatronStrategy")


def bridge_fields(fields: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return fields of Megatron-Bridge's MixedPrecisionConfig as fields of NeMo's plugin."""
    line = next((entry.line for entry in fields.values() if entry.line), 0)
    switches = {key: entry for key, entry in fields.items() if key in FLAGS}
    plugin = {
        BRIDGE_KEYS.get(key, key): entry
        for key, entry in fields.items()
        if key not in FLAGS and key != "library"
    }
    precision = _precision_of(switches, line)
    if precision is not None:
        plugin["precision"] = precision
    window = plugin.get("fp16_loss_scale_window")
    if window is not None and isinstance(window.value, float) and window.value.is_integer():
        plugin["fp16_loss_scale_window"] = replace(window, value=int(window.value))
    _add_fp8_defaults(plugin, line)
    return plugin


def _precision_of(switches: Mapping[str, Entry], line: int) -> Entry | None:
    """Return the precision that the switches bf16, fp16 and fp32 stand for; None if all are off."""
    on = [key for key, entry in switches.items() if entry.value is not False]
    if not on:
        return None
    if len(on) > 1:
        # no precision has this name, and it is refused by it
        return Entry(" and ".join(on), line)
    (key,) = on
    entry = switches[key]
    return replace(entry, value=FLAGS[key]) if entry.value is True else entry


def _add_fp8_defaults(plugin: dict[str, Entry], line: int) -> None:
    """Add what Megatron-Bridge has where NeMo's plugin has another default."""
    recipe = plugin.get("recipe")
    if recipe is not None and isinstance(recipe.value, str):
        name = recipe.value.replace("-", "_")
        plugin["recipe"] = replace(recipe, value=name)
        if "mxfp8" in name:
            # NeMo's recipe of this name is hybrid
            plugin.setdefault("fp8", Entry("e4m3", line))
    elif "fp8" in plugin and plugin["fp8"].value is not None:
        plugin.setdefault("fp8_recipe", Entry("tensorwise", line))
    elif "fp8_recipe" in plugin and plugin["fp8_recipe"].value == "tensorwise":
        # its default, which changes nothing without FP8
        plugin.pop("fp8_recipe")


def overwritten(call: Call) -> dict[str, Entry]:
    """Return the arguments of a call which a precision plugin overwrites
    (update_config_with_dtype_overrides)."""
    last = call.function.last
    if last not in OVERWRITTEN and not last.endswith("ModelProvider"):
        return {}
    fields = nemo.MegatronMixedPrecision.model_fields
    # the plugin does not have the optimizer's own keys
    known = {*fields, *FLAGS, *BRIDGE_KEYS} - {"library", *OPTIMIZER_KEYS}
    arguments = spread(call.arguments) | attributes_set(call)
    return {key: entry for key, entry in arguments.items() if key in known}


def recipe_settings(call: Call) -> Iterator[Settings]:
    """Yield the settings of a recipe: its default plugin, unless it is replaced, with the fields
    that are set afterwards."""
    function = call.function
    is_nemos = not function.imported or function.name.startswith("nemo")
    if function.last in RECIPES and is_nemos:
        plugin = _field(_value(call, "trainer"), "plugins")
        optimizers = [_value(_value(call, "optim"), "config")]
        fields = _plugin_of_nemo(call, plugin)
    elif function.last.endswith(BRIDGE_RECIPES) and function.name.startswith(BRIDGE):
        plugin = _field(call, "mixed_precision")
        optimizers = [_value(call, "optimizer"), _value(call, "ddp")]
        fields = _plugin_of_bridge(call, plugin)
    else:
        return
    for optimizer in optimizers:
        for key, entry in attributes_set(optimizer).items():
            if key in OPTIMIZER_KEYS:
                fields[key] = entry
    if fields:
        completes = not {"recipe", "precision", "plugins", "mixed_precision"} & set(fields)
        name = f"{function.last}()"
        yield Settings(NEMO, fields, call.line, name, call.guard, True, completes)


def _plugin_of_nemo(call: Call, plugin: Entry | None) -> dict[str, Entry]:
    if plugin is not None and plugin.node:
        return _replaced(plugin, "plugins")
    fields = attributes_set(plugin.value if plugin else None)
    precision = call.arguments.entries.get("precision")
    # llm.llama3_8b.pretrain_recipe
    module, _, _ = call.function.name.rpartition(".")
    model = module.rpartition(".")[2]
    recipe = Entry(BY_MODEL.get(model, "bf16_mixed"), call.line)
    if precision is not None:
        recipe = precision
        if isinstance(precision.value, str):
            name = PRECISIONS.get(precision.value, precision.value)
            recipe = replace(precision, value=name)
    elif model.startswith(UNSURE):
        why = "depends on the arguments of its recipe: assign recipe.trainer.plugins"
        recipe = Entry(Unknown(call.text, call.line, why), call.line)
    return {"recipe": recipe} | fields


def _plugin_of_bridge(call: Call, plugin: Entry | None) -> dict[str, Entry]:
    if plugin is not None and plugin.node:
        fields = _replaced(plugin, "mixed_precision")
    else:
        default = {"recipe": Entry("bf16_mixed", call.line)}
        fields = default | attributes_set(plugin.value if plugin else None)
    if fields:
        fields["library"] = Entry("bridge", call.line)
    return bridge_fields(fields)


def _replaced(plugin: Entry, name: str) -> dict[str, Entry]:
    """Return the fields of an assigned plugin; none if the call that makes it is read itself."""
    if isinstance(plugin.value, str):
        return {"recipe": plugin}
    values = plugin.value.items if isinstance(plugin.value, Row) else [plugin.value]
    for value in values:
        if not isinstance(value, Call):
            return {name: plugin}
        maker, _ = maker_of(value.function)
        if maker is None:
            return {name: plugin}
    return {}


def _field(value: Any, name: str) -> Entry | None:
    """Return the entry of an attribute or argument; None if there is neither."""
    if not isinstance(value, Unknown):
        return None
    entry = value.attributes.get(name)
    if entry is None and isinstance(value, Call):
        return value.arguments.entries.get(name)
    return entry


def _value(value: Any, name: str) -> Any:
    entry = _field(value, name)
    return None if entry is None else entry.value
