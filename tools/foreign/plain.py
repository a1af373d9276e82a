"""Values of a file as plain numbers, texts, lists and dicts, as the dialects take them."""

import ast
import shlex
from collections.abc import Mapping
from typing import Any

from megaprec.dialects.reading import UNKNOWN
from megaprec.precision.plan import TORCH_DTYPES
from tools.foreign.systems import VALUES, WORLD_GROUPS
from tools.foreign.values import Entry, External, Function, Row, Table, Thing

NOT_PYTHON = ("${", "???", "!")


LAYOUT_KEYS = frozenset({"tp_size", "pp_size"})
"""Keys of layouts only: where their value is not known, nothing about precision is lost."""
OPEN_KEYS = frozenset(
    {
        "num_attention_heads",
        "num_kv_attention_heads",
        "embed_split_hidden",
        "vocab_size",
        "hidden_size",
        "num_layers",
    }
    | {
        "mlp_ratio",
        "checkpoint",
        "num_chunks",
        "max_position_embeddings",
        "reduce_bucket_size",
        "multiple_of",
    }
    | {"tensor", "pipeline", "weight", "size", "max_grad_norm", "clip_grad"}
)
"""Keys of models, layouts and clipping: where their value is not known, the run file's own counts."""


class Unreadable(Exception):
    """A value that cannot be known, with the reason as its text."""


def plain(value: Any) -> Any:
    """Return the value as plain data. Raises Unreadable."""
    if isinstance(value, External):
        return _of_external(value)
    if isinstance(value, Table):
        if value.open:
            plain(value.open[0])
            raise Unreadable("it takes in a dict that is not known")
        return _of_entries(value.entries)
    if isinstance(value, Row):
        return [plain(item) for item in value.items]
    if isinstance(value, Thing):
        return _of_thing(value)
    if isinstance(value, Function):
        raise Unreadable(f"`{value.name}` is a function, which would have to be run")
    return value


def _of_external(value: External) -> str:
    """Return a dtype, a member of an enumeration or the like by its name; the world's process group
    is "world"."""
    if value.name.endswith(WORLD_GROUPS):
        return "world"
    if not value.imported and "." not in value.name:
        raise Unreadable(f"`{value.name}` is not defined in the file{assumed(value.name)}")
    return value.name


def _of_thing(value: Thing) -> Any:
    if value.alternatives and value.why:
        options = [plain(option) for option in value.alternatives]
        if all(option == options[0] for option in options) and len(options) > 1:
            return options[0]
    if value.function and value.function.last in VALUES:
        return _recipe(value, value.function.last)
    if (
        value.function
        and not (value.why or value.positional or value.arguments.entries)
        and is_dtype(value.function)
    ):
        return value.function.name  # torch.bfloat16(), as the documentation of one system has it
    why = value.why or "comes of a call that is not run"
    can_assume = not value.why.startswith("depends on") and not value.text.startswith(NOT_PYTHON)
    raise Unreadable(f"`{value.text}` {why}{assumed(value.text) if can_assume else ''}")


def assumed(text: str) -> str:
    """Return the advice to assume a value for an expression; "" for a text that is none, being
    truncated."""
    return f"; {assuming(text, '...')} gives it" if is_expression(text) else ""


def assuming(text: str, value: str) -> str:
    """Return the option that assumes a value for an expression, quoted for a shell."""
    said = f"{text}={value}"
    if "'" not in said:
        return f"--assume '{said}'"
    if set(said) & set('"$`\\!'):
        return f"--assume {shlex.quote(said)}"
    return f'--assume "{said}"'


def is_expression(text: str) -> bool:
    """Return True if Python takes a text for an expression, as `--assume` must."""
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def is_dtype(function: External) -> bool:
    """Return True if this is torch's name of a dtype."""
    return function.name.removeprefix("torch.") in TORCH_DTYPES


def _recipe(value: Thing, name: str) -> dict[str, Any]:
    """Return a recipe of Transformer Engine as the table of its fields."""
    fields: dict[Any, Entry] = dict(zip(VALUES[name], value.positional, strict=False))
    fields |= value.arguments.entries | value.attributes
    for opened in value.arguments.open:
        plain(opened)
        raise Unreadable("it takes in a dict that is not known")
    return {"recipe": name} | _of_entries(fields)


def _of_entries(entries: Mapping[Any, Entry]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, entry in entries.items():
        try:
            made[str(key)] = plain(entry.value)
        except Unreadable as why:
            if key in OPEN_KEYS:
                made[str(key)] = UNKNOWN
                continue
            place = f" (line {entry.line})" if entry.line else ""
            raise Unreadable(f"its {key}{place}: {why}") from why
    return made


def fields_of(value: Thing, order: tuple[str, ...]) -> dict[str, Entry]:
    """Return the arguments of a call by name, overwritten by assignments to attributes of its
    result."""
    fields = dict(zip(order, value.positional, strict=False))
    extra = value.positional[len(order) :]
    fields |= {f"argument {len(order) + i + 1}": entry for i, entry in enumerate(extra)}
    fields |= {str(key): entry for key, entry in value.arguments.entries.items()}
    for i, opened in enumerate(value.arguments.open):
        fields[f"**{getattr(opened, 'text', 'dict')}"] = Entry(opened, value.line, -i)
    assigned = {
        str(key): entry for key, entry in value.attributes.items() if not _is_only_read(entry)
    }
    return fields | assigned


def _is_only_read(entry: Entry) -> bool:
    """Return True if an attribute was only accessed, so that its value is unknown."""
    value = entry.value
    return isinstance(value, Function) or (
        isinstance(value, Thing) and value.why == "is not in the file" and not entry.node
    )
