"""Values of another system's file, as far as they are known without running it, and as plain data.

Numbers, texts, True, False and None are themselves. A dict is a `PlainDict`, a list a
`PlainSequence`, and a name from outside of the file a `Symbol`, with import aliases resolved:
torch.bfloat16. A `Call` is the result of a call of something outside of the file, and all else is
`UnknownValue`, with the reason.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaprec.dialects.reading import UNKNOWN
from megaprec.precision.plan import TORCH_DTYPES

# Endings of names that mean the world's process group, under any alias
WORLD_GROUPS = ("world_process_group", "group.WORLD", "GroupMember.WORLD")
# Recipes of Transformer Engine, values of `fp8_recipe`, with their parameters by position
FP8_RECIPES: Mapping[str, tuple[str, ...]] = {
    "DelayedScaling": (
        "margin",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "scaling_factor_compute_algo",
        "reduce_amax",
        "fp8_dpa",
        "fp8_mha",
    ),
    "Float8CurrentScaling": ("use_power_2_scales", "fp8_format"),
    "Float8BlockScaling": ("use_f32_scales", "fp8_format"),
    "MXFP8BlockScaling": ("margin", "fp8_format", "fp8_dpa", "fp8_mha"),
    "NVFP4BlockScaling": (),
    "CustomRecipe": (),
}
LAYOUT_KEYS = frozenset({"tp_size", "pp_size"})
# Keys of models, layouts and clipping: where their value is unknown, the run file's own counts
OPEN_KEYS = frozenset(
    {
        "num_attention_heads",
        "num_kv_attention_heads",
        "embed_split_hidden",
        "vocab_size",
        "hidden_size",
        "num_layers",
        "mlp_ratio",
        "checkpoint",
        "num_chunks",
        "max_position_embeddings",
        "reduce_bucket_size",
        "multiple_of",
        "tensor",
        "pipeline",
        "weight",
        "size",
        "max_grad_norm",
        "clip_grad",
    }
)


# What stands for the arguments and attributes of a call in the place of a key, if there is doubt
# about them
ATTRIBUTES = "the arguments"


class Unreadable(Exception):
    """A value that cannot be known, with the reason as its text."""


@dataclass(frozen=True)
class Symbol:
    """A name from outside of the file. imported: the file imports it; else nothing defines it."""

    name: str
    imported: bool = False

    @property
    def last(self) -> str:
        """The part of the name after the last dot."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class DictEntry:
    """A value under a key.

    node: id of the syntax node of the key, by which it is accounted for; 0: none.
    """

    value: Any
    line: int = 0
    node: int = 0


@dataclass(eq=False)
class Fields:
    """A dict, or what a call returns, by its keys.

    doubt: why they may be others than the file shows; empty if they are not. used: line of its
    first use, 0 for none. home: the function or loop that makes it. is_read: a key was looked up.
    """

    entries: dict[str, DictEntry] = field(default_factory=dict)
    line: int = 0
    doubt: str = ""
    used: int = 0
    home: Any = None
    is_read: bool = False

    def get(self, key: str) -> Any:
        """Return the value under `key`; None if there is none."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value


class PlainDict(Fields):
    """A dict."""


@dataclass(eq=False)
class Call(Fields):
    """The result of a call of something outside of the file, or an attribute of one.

    Its entries are the arguments, and the attributes that are set later; those that the file only
    looks at have no node. text: its source.
    """

    text: str = ""
    why: str = "comes of a call that is not run"
    function: Symbol = Symbol("")
    node: int = 0


@dataclass(eq=False)
class PlainSequence:
    """A list, tuple or set."""

    items: list[Any]
    doubt: str = ""


@dataclass(frozen=True)
class UnknownValue:
    """A value that is not known. text: its source text. why: the reason."""

    text: str
    line: int
    why: str


def find(tree: PlainDict, path: str) -> DictEntry | None:
    """Return the entry under a dotted path."""
    fields: Any = tree
    entry = None
    for name in path.split("."):
        entry = fields.entries.get(name) if isinstance(fields, Fields) else None
        fields = None if entry is None else entry.value
    return entry


def plain(value: Any) -> Any:
    """Return the value as plain data. Raises Unreadable."""
    doubt = getattr(value, "doubt", "")
    if doubt:
        raise Unreadable(doubt)
    match value:
        case Symbol():
            return _of_symbol(value)
        case PlainDict():
            return _of_entries(spread(value))
        case PlainSequence():
            return [plain(item) for item in value.items]
        case Call() if value.function.last in FP8_RECIPES:
            fields = fields_of(value, FP8_RECIPES[value.function.last])
            return {"recipe": value.function.last} | _of_entries(fields)
        case Call() if is_dtype(value.function) and not value.entries:
            return value.function.name  # torch.bfloat16(), as one system's documentation has it
        case ast.AST():
            raise Unreadable("it is a function, which would have to be run")
        case UnknownValue() | Call():
            raise Unreadable(f"`{value.text}` {value.why}")
    return value


def _of_symbol(symbol: Symbol) -> str:
    """Return a dtype, a member of an enumeration or the like by its name; the world's process group
    is "world"."""
    if symbol.name.endswith(WORLD_GROUPS):
        return "world"
    if not symbol.imported and "." not in symbol.name:
        raise Unreadable(f"`{symbol.name}` is not defined in the file")
    return symbol.name


def _of_entries(entries: Mapping[str, DictEntry]) -> dict[str, Any]:
    """Return entries as plain data, with UNKNOWN for those of OPEN_KEYS that are not known. Raises
    Unreadable for any other, by its key."""
    content = dict[str, Any]()
    for key, entry in entries.items():
        try:
            content[key] = plain(entry.value)
        except Unreadable as reason:
            if key not in OPEN_KEYS:
                place = f" (line {entry.line})" if entry.line else ""
                raise Unreadable(f"its {key}{place}: {reason}") from reason
            content[key] = UNKNOWN
    return content


def is_dtype(symbol: Symbol) -> bool:
    """Return True if this is torch's name of a dtype."""
    return symbol.name.removeprefix("torch.") in TORCH_DTYPES


def fields_of(call: Call, order: tuple[str, ...]) -> dict[str, DictEntry]:
    """Return the arguments of a call by name, with attributes that are set later.

    order: the names of positional arguments; one that has none is "argument N".
    """
    names = {argument(index): name for index, name in enumerate(order)}
    fields = dict[str, DictEntry]()
    for key, entry in spread(call).items():
        if entry.node:
            fields[names.get(key, key)] = entry
    if call.doubt:
        fields[ATTRIBUTES] = DictEntry(call, call.line)
    return fields


def items_of(value: Any) -> list[Any]:
    """Return the items of a list that is known, or the value alone."""
    return value.items if isinstance(value, PlainSequence) and not value.doubt else [value]


def argument(index: int) -> str:
    """Return the key of a positional argument."""
    return f"argument {index + 1}"


def positional(call: Call) -> list[DictEntry]:
    """Return the positional arguments of a call."""
    return [entry for key, entry in call.entries.items() if key.startswith("argument ")]


def spread(fields: Fields) -> dict[str, DictEntry]:
    """Return the entries of a dict or call, with those that it takes in by **.

    A dict that is not known stays under its text: "**load()".
    """
    entries = dict[str, DictEntry]()
    for key, entry in fields.entries.items():
        if key.startswith("**") and isinstance(entry.value, PlainDict) and not entry.value.doubt:
            entries |= spread(entry.value)
        else:
            entries[key] = entry
    return entries
