"""Other forms of NeMo's precision: Megatron-Bridge, and the default plugins of recipes.

A recipe of NeMo (`llm.llama3_8b.pretrain_recipe()`) has a precision plugin at `trainer.plugins`,
one of Megatron-Bridge at `mixed_precision`; single fields of it may be assigned afterwards. The
default plugins are defined in nemo/collections/llm/recipes and megatron/bridge/recipes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megaprec.dialects import nemo
from tools.foreign.account import Account, Saying
from tools.foreign.plain import Unreadable, plain
from tools.foreign.systems import BRIDGE, BRIDGE_KEYS, NEMO, OPTIMIZER_KEYS, maker_of
from tools.foreign.values import Entry, External, Row, Thing

FLAGS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}
RECIPES = ("pretrain_recipe", "finetune_recipe", "pretrain_recipe_performance")
BRIDGE_RECIPES = ("_pretrain_config", "_finetune_config", "_sft_config", "_peft_config")
BY_MODEL: Mapping[str, str] = {
    "nemotronh_47b": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotronh_56b": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotron_nano_12b_v2": "nanov2_bf16_with_fp8_current_scaling_mixed",
}
OVERWRITTEN = ("DistributedDataParallelConfig", "OptimizerConfig", "MegatronStrategy")
ECHOED = ("grad_reduce_in_fp32", "pipeline_dtype", "params_dtype", "autocast_dtype")
ECHOED += tuple(
    key for key in nemo.MegatronMixedPrecision.model_fields if key.startswith(("fp8", "fp4"))
)
UNSURE = ("hyena",)
"""Models whose recipes take an argument that changes precision in ways of their own."""


def bridge_fields(fields: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return fields of Megatron-Bridge's MixedPrecisionConfig as fields of NeMo's plugin."""
    own = {
        BRIDGE_KEYS.get(key, key): entry
        for key, entry in fields.items()
        if key not in (*FLAGS, "library")
    }
    window = own.get("fp16_loss_scale_window")
    if (
        window is not None and isinstance(window.value, float) and window.value.is_integer()
    ):  # a float there
        own["fp16_loss_scale_window"] = replace(window, value=int(window.value))
    line = next((entry.line for entry in fields.values() if entry.line), 0)
    flags = {key: fields[key] for key in FLAGS if key in fields and fields[key].value is not False}
    for key, entry in flags.items():
        own["precision"] = replace(entry, value=FLAGS[key] if entry.value is True else entry.value)
    if len(flags) > 1:
        own["precision"] = Entry(" and ".join(flags), line)
    if "recipe" in own and isinstance(name := own["recipe"].value, str):
        name = name.replace("-", "_")
        own["recipe"] = replace(own["recipe"], value=name)
        if "mxfp8" in name:
            own.setdefault("fp8", Entry("e4m3", line))  # NeMo's recipe of this name is hybrid
    elif "fp8" in own and own["fp8"].value is not None:
        own.setdefault("fp8_recipe", Entry("tensorwise", line))
    elif (
        "fp8_recipe" in own and own["fp8_recipe"].value == "tensorwise"
    ):  # its default, which changes nothing
        own.pop("fp8_recipe")
    return own


def held_plugins(things: Iterable[Thing], is_meant: Callable[[Any], bool]) -> Iterator[Saying]:
    """Yield a saying for each recipe whose plugin was not replaced: its default plugin with the
    assigned fields."""
    for thing in things:
        function = thing.function
        if function is None or not is_meant(thing):
            continue
        if function.last in RECIPES and not (
            function.imported and not function.name.startswith("nemo")
        ):
            yield from _of_recipe(thing, function)
        elif function.last.endswith(BRIDGE_RECIPES) and function.name.startswith(BRIDGE):
            yield from _of_bridge(thing)


def echo_of(thing: Thing, function: External) -> Saying | None:
    """Return the precision settings of an object that the precision plugin overwrites
    (update_config_with_dtype_overrides).
    """
    if function.last not in OVERWRITTEN and not function.last.endswith("ModelProvider"):
        return None
    said = {
        str(key): entry for key, entry in {**thing.arguments.entries, **thing.attributes}.items()
    }
    echoed = {key: entry for key, entry in said.items() if key in (*FLAGS, *ECHOED, *BRIDGE_KEYS)}
    return Saying(NEMO, echoed, thing.line, function.last) if echoed else None


def note_overwritten(account: Account, plugin: Mapping[str, tuple[Any, Entry]]) -> None:
    """Note settings of objects that differ from the precision plugin, which overwrites them."""
    if not plugin:
        return
    named = {key: value for key, (value, _) in plugin.items()}
    fields = {**nemo.RECIPES.get(str(named.get("recipe")), {}), **named}
    for echo in account.echoes:
        account.take(*(entry.node for entry in echo.fields.values()))
        for key, entry in echo.fields.items():
            if key.startswith("fp8") and not fields.get("fp8"):
                continue  # without fp8 nothing hangs on it
            value = _echoed(entry.value)
            meant = _meant(key, fields)
            if value is not None and value != meant:
                account.note(
                    entry.line,
                    f"{key} = {value} of {echo.name}: the precision plugin overwrites it: {meant}",
                )


def _echoed(value: Any) -> Any:
    try:
        value = plain(value)
    except Unreadable as why:
        return f"unknown ({why})"
    if isinstance(value, str):
        return value.removeprefix("torch.").replace("half", "float16")
    return value


def _meant(key: str, fields: Mapping[str, Any]) -> Any:
    """Return the value of a field as the plugin has it."""
    half = nemo.HALVES.get(str(fields.get("precision", "32")))
    if key in FLAGS:
        return half == nemo.HALVES[FLAGS[key]]
    key = BRIDGE_KEYS.get(key, key)
    default = nemo.MegatronMixedPrecision.model_fields[key].default
    value = fields.get(key, default)
    return _echoed(str(value)) if isinstance(value, torch.dtype) else _echoed(value)


def _of_recipe(recipe: Thing, function: External) -> Iterator[Saying]:
    model = function.name.split(".")[-2] if "." in function.name else ""
    plugin = _entry(_attribute(recipe, "trainer"), "plugins")
    if plugin is not None and plugin.node:
        fields = _replaced(plugin, "plugins")
    else:
        fields = _default_plugin(recipe, model) | _assigned(plugin.value if plugin else None)
    optimizer = _attribute(_attribute(recipe, "optim"), "config")
    fields |= {key: entry for key, entry in _assigned(optimizer).items() if key in OPTIMIZER_KEYS}
    if fields:
        conditions = recipe.conditions
        adds = not {"recipe", "precision"} & set(fields)
        yield Saying(NEMO, fields, recipe.line, f"{function.last}()", conditions, True, adds)


def _default_plugin(recipe: Thing, model: str) -> dict[str, Entry]:
    """Return the plugin that a recipe makes unless its `precision` names another."""
    if model.startswith(UNSURE):
        why = (
            "the precision of this recipe follows from its arguments: assign recipe.trainer.plugins"
        )
        return {"recipe": Entry(Thing(recipe.text, recipe.line, why), recipe.line)}
    asked = recipe.arguments.entries.get("precision")
    if asked is None:
        return {"recipe": Entry(BY_MODEL.get(model, "bf16_mixed"), recipe.line)}
    return {"recipe": replace(asked, value=_named(asked.value))}


def _named(precision: Any) -> Any:
    try:
        return {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed"}.get(
            str(plain(precision)), precision
        )
    except Unreadable:
        return precision


def _of_bridge(config: Thing) -> Iterator[Saying]:
    plugin = _entry(config, "mixed_precision")
    if plugin is not None and plugin.node:
        fields = _replaced(plugin, "mixed_precision")
    else:
        fields = {"recipe": Entry("bf16_mixed", config.line)} | _assigned(
            plugin.value if plugin else None
        )
    fields |= {"library": Entry("bridge", config.line)} if fields else {}
    optimizer = {
        **_assigned(_attribute(config, "optimizer")),
        **_assigned(_attribute(config, "ddp")),
    }
    own = bridge_fields(fields) if fields else {}
    own |= {key: entry for key, entry in optimizer.items() if key in OPTIMIZER_KEYS}
    if own:
        name = config.function.last if config.function else config.text
        adds = not {"recipe", "precision"} & set(own)
        yield Saying(NEMO, own, config.line, f"{name}()", config.conditions, True, adds)


def _replaced(plugin: Entry, name: str) -> dict[str, Entry]:
    """Return the fields of an assigned plugin; none if the call that makes it is read itself."""
    value = plugin.value
    values = value.items if isinstance(value, Row) else (value,)
    if isinstance(value, str):
        return {"recipe": plugin}
    if all(
        isinstance(v, Thing) and v.function and maker_of(v.function)[0] is not None for v in values
    ):
        return {}
    return {name: plugin}


def _entry(value: Any, name: str) -> Entry | None:
    """Return the entry of an assigned or accessed attribute, or of an argument; None if there is
    neither."""
    if not isinstance(value, Thing):
        return None
    return value.attributes.get(name) or value.arguments.entries.get(name)


def _attribute(value: Any, name: str) -> Any:
    entry = _entry(value, name)
    return None if entry is None else entry.value


def _assigned(value: Any) -> dict[str, Entry]:
    """Return the attributes of an object that were assigned."""
    if not isinstance(value, Thing):
        return {}
    return {str(key): entry for key, entry in value.attributes.items() if entry.node}
