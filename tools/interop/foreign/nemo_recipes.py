"""NeMo's recipes and Megatron-Bridge: their default plugins, and fields that are set afterwards.

A recipe of NeMo (`llm.llama3_8b.pretrain_recipe()`) has a precision plugin at `trainer.plugins`,
one of Megatron-Bridge at `mixed_precision`. The defaults are those of nemo/collections/llm/recipes
and megatron/bridge/recipes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tools.interop.foreign.findings import FoundSettings
from tools.interop.foreign.plain import (
    ATTRIBUTES,
    Call,
    DictEntry,
    UnknownValue,
    fields_of,
    items_of,
)
from tools.interop.foreign.systems import BRIDGE, BRIDGE_KEYS, NEMO, OPTIMIZER_KEYS, maker_of

FLAGS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}
PRECISIONS = {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed"}
RECIPES = ("pretrain_recipe", "finetune_recipe", "pretrain_recipe_performance")
BRIDGE_RECIPES = ("_pretrain_config", "_finetune_config", "_sft_config", "_peft_config")
# Beginnings of NeMo's models whose recipes have another plugin than bf16_mixed
OTHER_DEFAULTS = ("nemotron", "hyena")
NONE = DictEntry(None)
OFF = DictEntry(False)
KEYS_OF_A_PLUGIN = frozenset({"recipe", "precision", "the plugin"})


def bridge_fields(fields: Mapping[str, DictEntry]) -> dict[str, DictEntry]:
    """Return fields of Megatron-Bridge's MixedPrecisionConfig as fields of NeMo's plugin, with what
    Bridge has where NeMo's plugin has another default."""
    plugin = _precision_of_switches(fields)
    # switches are read above, and the name of a library is no field of a plugin
    read_elsewhere = (*FLAGS, "library")
    for key, entry in fields.items():
        if key not in read_elsewhere:
            nemo_key = BRIDGE_KEYS.get(key, key)
            plugin[nemo_key] = entry
    window = plugin.get("fp16_loss_scale_window", NONE)
    # Bridge has it as a float
    if isinstance(window.value, float) and window.value.is_integer():
        steps = int(window.value)
        plugin["fp16_loss_scale_window"] = replace(window, value=steps)
    recipe = plugin.get("recipe", NONE)
    fp8 = plugin.get("fp8", NONE)
    if isinstance(recipe.value, str):
        name = recipe.value.replace("-", "_")
        plugin["recipe"] = replace(recipe, value=name)
        if "mxfp8" in name:
            # NeMo's recipe of this name is hybrid
            plugin.setdefault("fp8", DictEntry("e4m3", recipe.line))
    elif fp8.value is not None:
        plugin.setdefault("fp8_recipe", DictEntry("tensorwise", fp8.line))
    return plugin


def _precision_of_switches(fields: Mapping[str, DictEntry]) -> dict[str, DictEntry]:
    """Return the precision that Bridge's switches `bf16`, `fp16` and `fp32` turn on."""
    turned_on = dict[str, DictEntry]()
    for flag, precision in FLAGS.items():
        switch = fields.get(flag, OFF)
        if switch.value is not False:
            turned_on[precision] = switch
    if not turned_on:
        return {}
    # no precision has the name of two, and a switch that is not known stays so
    precision_entry = next(iter(turned_on.values()))
    if precision_entry.value is True:
        precisions = " and ".join(turned_on)
        precision_entry = replace(precision_entry, value=precisions)
    return {"precision": precision_entry}


def recipe_settings(call: Call) -> Iterator[FoundSettings]:
    """Yield the settings of a recipe: its default plugin, unless it is replaced, with the fields
    that are set afterwards."""
    function = call.function
    is_nemos = not function.imported or function.name.startswith("nemo")
    if function.last in RECIPES and is_nemos:
        trainer = _field(call, "trainer")
        optim = _field(call, "optim")
        plugin = _field(trainer.value, "plugins")
        default = _default_recipe(call)
        fields = _plugin_fields(plugin, default)
        optimizers = [_field(optim.value, "config")]
    elif function.last.endswith(BRIDGE_RECIPES) and function.name.startswith(BRIDGE):
        plugin = _field(call, "mixed_precision")
        default = DictEntry("bf16_mixed", call.line)
        own_fields = _plugin_fields(plugin, default)
        fields = bridge_fields(own_fields)
        optimizers = [_field(call, "optimizer"), _field(call, "ddp")]
    else:
        return
    for optimizer in optimizers:
        for key, entry in _fields_set(optimizer.value).items():
            if key in OPTIMIZER_KEYS:
                fields[key] = entry
    if call.doubt:
        fields[ATTRIBUTES] = DictEntry(call, call.line)
    if fields:
        # without a plugin of its own the recipe adds to one that is read elsewhere
        completes = not KEYS_OF_A_PLUGIN & set(fields)
        place = f"{function.last}()"
        yield FoundSettings(NEMO, fields, call.line, place, completes)


def _default_recipe(call: Call) -> DictEntry:
    """Return the name of a recipe's plugin: its argument `precision`, or what the model has without
    one; an unknown value for a model whose recipes have a plugin that is not read."""
    precision = call.entries.get("precision")
    if precision is not None:
        name = PRECISIONS.get(str(precision.value))
        return precision if name is None else replace(precision, value=name)
    # llm.llama3_8b.pretrain_recipe
    module, _, _ = call.function.name.rpartition(".")
    _, _, model = module.rpartition(".")
    if model.startswith(OTHER_DEFAULTS):
        why = "has a plugin of its own: assign recipe.trainer.plugins"
        unknown = UnknownValue(call.text, call.line, why)
        return DictEntry(unknown, call.line)
    return DictEntry("bf16_mixed", call.line)


def _plugin_fields(plugin: DictEntry, default: DictEntry) -> dict[str, DictEntry]:
    """Return the fields of an assigned plugin, none if the call that makes it is read itself; of
    the default plugin without one."""
    if not plugin.node:
        return {"recipe": default} | _fields_set(plugin.value)
    if isinstance(plugin.value, str):
        return {"recipe": plugin}
    plugins = items_of(plugin.value)
    are_read = all(map(_is_read_itself, plugins))
    return {} if are_read else {"the plugin": plugin}


def _is_read_itself(value: Any) -> bool:
    """Return True for a call that makes a plugin of a known kind."""
    if not isinstance(value, Call):
        return False
    maker, _ = maker_of(value.function)
    return maker is not None


def _field(value: Any, name: str) -> DictEntry:
    """Return the entry of an attribute or argument; an empty one if there is neither."""
    return value.entries.get(name, NONE) if isinstance(value, Call) else NONE


def _fields_set(value: Any) -> dict[str, DictEntry]:
    """Return the attributes and arguments that are set of a call, and not only looked at."""
    return fields_of(value, ()) if isinstance(value, Call) else {}
