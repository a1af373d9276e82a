"""The text of `megaprec keys`: every key of a run file with its default and its help, by table."""

from typing import Any

from pydantic.fields import FieldInfo

from models.config import ModelConfig
from models.presets import PRESETS
from tools.config.precision_settings import PLAN_ONLY
from tools.config.run_file import tables_of_a_run
from tools.console.toml import toml

PRESET = f"Name of a known model, whose keys the others of this table change: {', '.join(PRESETS)}."


def describe() -> str:
    """Return all keys of a run file with default and help, a line each, by table."""
    lines: list[str] = []
    for table, kind in tables_of_a_run().items():
        lines += ["", f"[{table}]  {(kind.__doc__ or '').splitlines()[0]}"]
        if kind is ModelConfig:
            lines.append(_line("model.preset", "none", PRESET))
        fields = ((f"{table}.{name}", field) for name, field in kind.model_fields.items())
        lines += [_line(key, _default(field), field.description) for key, field in fields if key not in PLAN_ONLY]
    return "\n".join(lines[1:])


def document() -> dict[str, Any]:
    """Return all keys for programs: type, default and help by dotted key. default: null if required or derived."""
    keys = dict[str, Any]()
    for table, kind in tables_of_a_run().items():
        if kind is ModelConfig:
            keys["model.preset"] = {"default": None, "required": False, "help": PRESET}
        for name, field in kind.model_fields.items():
            if (key := f"{table}.{name}") not in PLAN_ONLY:
                given = None if field.is_required() or field.default_factory is not None else toml(field.default)
                keys[key] = {"default": given, "required": field.is_required(), "help": field.description}
    return {"keys": keys}


def _line(key: str, default: str, text: str | None) -> str:
    return f"{key:34}{default:16}{text}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "derived" if field.default_factory is not None else toml(field.default)
