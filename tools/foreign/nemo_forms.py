"""NeMo's precision where it is said in other forms: by Megatron-Bridge, and by what a recipe holds unless told.

A recipe of NeMo's (`llm.llama3_8b.pretrain_recipe()`) has a precision plugin of its own at `trainer.plugins`, and one
of Megatron-Bridge at `mixed_precision`; single fields of it may be assigned afterwards. Which plugin that is stands in
nemo/collections/llm/recipes and megatron/bridge/recipes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tools.foreign.account import Saying
from tools.foreign.plain import Unreadable, plain
from tools.foreign.systems import BRIDGE, NEMO, OPTIMIZER_KEYS, maker_of
from tools.foreign.values import Entry, External, Thing

FLAGS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}
RECIPES = ("pretrain_recipe", "finetune_recipe", "pretrain_recipe_performance")
BRIDGE_RECIPES = ("_pretrain_config", "_finetune_config", "_sft_config", "_peft_config")
BY_MODEL: Mapping[str, str] = {
    "nemotronh_47b": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotronh_56b": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotron_nano_12b_v2": "nanov2_bf16_with_fp8_current_scaling_mixed",
}
UNSURE = ("hyena",)
"""Models whose recipes take an argument that changes precision in ways of their own."""


def bridge_fields(fields: Mapping[str, Entry]) -> dict[str, Entry]:
    """Fields of Megatron-Bridge's MixedPrecisionConfig as those of NeMo's plugin."""
    own = {key: entry for key, entry in fields.items() if key not in (*FLAGS, "library")}
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
    elif "fp8" in own:
        own.setdefault("fp8_recipe", Entry("tensorwise", line))
    return own


def held_plugins(things: Iterable[Thing], is_meant: Callable[[Any], bool]) -> Iterator[Saying]:
    """A saying for each recipe whose plugin was not replaced: its own plugin with the fields that were assigned."""
    for thing in things:
        function = thing.function
        if function is None or not is_meant(thing):
            continue
        if function.last in RECIPES and not (function.imported and not function.name.startswith("nemo")):
            yield from _of_recipe(thing, function)
        elif function.last.endswith(BRIDGE_RECIPES) and function.name.startswith(BRIDGE):
            yield from _of_bridge(thing)


def _of_recipe(recipe: Thing, function: External) -> Iterator[Saying]:
    model = function.name.split(".")[-2] if "." in function.name else ""
    plugin = _attribute(_attribute(recipe, "trainer"), "plugins")
    if plugin is not None and (not isinstance(plugin, Thing) or plugin.function or plugin.why != "is not in the file"):
        if isinstance(plugin, Thing) and (plugin.function is None or maker_of(plugin.function)[0] is None):
            yield Saying(NEMO, {"plugins": Entry(plugin, recipe.line)}, recipe.line, f"{recipe.text}.trainer.plugins")
        fields: dict[str, Entry] = {}
    else:
        fields = _default_plugin(recipe, model)
        fields |= _assigned(plugin)
    optimizer = _attribute(_attribute(recipe, "optim"), "config")
    fields |= {key: entry for key, entry in _assigned(optimizer).items() if key in OPTIMIZER_KEYS}
    if fields:
        conditions = recipe.conditions
        adds = not {"recipe", "precision"} & set(fields)
        yield Saying(NEMO, fields, recipe.line, f"{function.last}()", conditions, True, adds)


def _default_plugin(recipe: Thing, model: str) -> dict[str, Entry]:
    """The plugin that a recipe makes unless its `precision` says otherwise."""
    if model.startswith(UNSURE):
        why = "the precision of this recipe follows from its arguments: assign recipe.trainer.plugins"
        return {"recipe": Entry(Thing(recipe.text, recipe.line, why), recipe.line)}
    asked = recipe.arguments.entries.get("precision")
    if asked is None:
        return {"recipe": Entry(BY_MODEL.get(model, "bf16_mixed"), recipe.line)}
    return {"recipe": replace(asked, value=_named(asked.value))}


def _named(precision: Any) -> Any:
    try:
        return {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed"}.get(str(plain(precision)), precision)
    except Unreadable:
        return precision


def _of_bridge(config: Thing) -> Iterator[Saying]:
    plugin = _attribute(config, "mixed_precision")
    fields: dict[str, Entry] = {"library": Entry("bridge", config.line)}
    if isinstance(plugin, str):
        entry = config.attributes.get("mixed_precision") or config.arguments.entries["mixed_precision"]
        fields["recipe"] = entry
    elif isinstance(plugin, Thing) and plugin.function and maker_of(plugin.function)[0] is not None:
        fields = {}
    elif isinstance(plugin, Thing) and plugin.why != "is not in the file":
        fields["recipe"] = Entry(plugin, config.line)
    else:
        fields["recipe"] = Entry("bf16_mixed", config.line)
        fields |= _assigned(plugin)
    optimizer = {**_assigned(_attribute(config, "optimizer")), **_assigned(_attribute(config, "ddp"))}
    own = bridge_fields(fields) if fields else {}
    own |= {key: entry for key, entry in optimizer.items() if key in OPTIMIZER_KEYS}
    if own:
        name = config.function.last if config.function else config.text
        adds = not {"recipe", "precision"} & set(own)
        yield Saying(NEMO, own, config.line, f"{name}()", config.conditions, True, adds)


def _attribute(value: Any, name: str) -> Any:
    """An attribute that was assigned or looked at, or an argument; None if neither."""
    if not isinstance(value, Thing):
        return None
    entry = value.attributes.get(name) or value.arguments.entries.get(name)
    return None if entry is None else entry.value


def _assigned(value: Any) -> dict[str, Entry]:
    """The attributes of an object that were assigned."""
    if not isinstance(value, Thing):
        return {}
    return {str(key): entry for key, entry in value.attributes.items() if entry.node}
