"""The pages of the Python API, made of the docstrings of what the front doors export."""

import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pydantic import BaseModel
from sphinx.util.inspect import stringify_signature

DOORS = ("megaprec", "parallel", "parallel.pipeline", "models")
OURS = {"megaprec", "parallel", "models"}
HEAD = """\
# {door}

{docstring}

All that `{door}` exports is below: `from {door} import NAME`.
"""
BLOCK, INNER = "`" * 6, "`" * 5  # fences of directives, longer than those in docstrings


def api_page(door: str) -> str:
    """Return the page of a front door as Markdown, with directives of Sphinx's Python domain."""
    module = import_module(door)
    text = [HEAD.format(door=door, docstring=_markdown(inspect.getdoc(module) or ""))]
    for name in sorted(module.__all__, key=str.lower):
        text.append(f"## {name}\n")
        text.append(_export(door, name, getattr(module, name)))
    return "\n".join(text)


def _export(door: str, name: str, value: Any) -> str:
    """Return the directive of one exported name."""
    if inspect.isclass(value):
        body = [_markdown(inspect.getdoc(value) or "")]
        if issubclass(value, BaseModel):
            body.append("Its fields are the keys of [a table of the run file](../keys.md).\n")
        body += _members(value)
        return _directive(BLOCK, "class", f"{door}.{name}{_signature(value)}", "\n".join(body))
    if callable(value):
        signature = f"{door}.{name}{_signature(value)}"
        return _directive(BLOCK, "function", signature, _markdown(inspect.getdoc(value) or ""))
    return _directive(BLOCK, "data", f"{door}.{name}", _described_value(value))


def _described_value(value: Any) -> str:
    """Return a sentence about an exported value that is neither a class nor a function."""
    if isinstance(value, dict):
        names = ", ".join(f"`{key}`" for key in value)
        return f"A table by name. Its names: {names}."
    return f"A value of the type `{type(value).__name__}`."


def _directive(fence: str, kind: str, signature: str, body: str) -> str:
    return f"{fence}{{py:{kind}}} {signature}\n\n{body.strip()}\n{fence}\n"


def _members(value: type) -> Iterator[str]:
    """Yield the directives of the public methods and properties that have docstrings, in the order
    of the code; those of torch's and pydantic's classes are left out."""
    if issubclass(value, enum.Enum):
        members = ", ".join(f"`{name}`" for name in value.__members__)
        yield f"Its members: {members}.\n"
    seen = set[str]()
    for owner in value.__mro__:
        if owner.__module__.split(".")[0] not in OURS:
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            yield from _member(value, name, member)


def _member(owner: type, name: str, member: object) -> Iterator[str]:
    text = inspect.getdoc(member)
    if isinstance(member, property) and text:
        yield _directive(INNER, "property", name, _markdown(text))
        return
    is_bound = isinstance(member, classmethod | staticmethod)
    if text and (is_bound or inspect.isfunction(member)):
        called = getattr(owner, name)
        signature = _signature(called, is_method=not is_bound)
        yield _directive(INNER, "method", f"{name}{signature}", _markdown(text))


def _signature(value: Any, is_method: bool = False) -> str:
    """Return the signature of a callable with its annotations, without `self`."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class of C's
        return "()"
    parameters = list(signature.parameters.values())
    if is_method:
        parameters = parameters[1:]
    shown = [one.replace(default=_short_default(one)) for one in parameters]
    text = stringify_signature(signature.replace(parameters=shown), unqualified_typehints=True)
    return " ".join(text.split())


class _Ellipsis:
    """A default that is no literal: its text would say where an object lies in memory."""

    def __repr__(self) -> str:
        return "..."


def _short_default(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    literal = default is inspect.Parameter.empty or isinstance(
        default, str | int | float | bool | tuple | None
    )
    return default if literal else _Ellipsis()


def _markdown(docstring: str) -> str:
    """Return a docstring as Markdown: what stands outside code is shown as it is written."""
    lines = list[str]()
    is_code = False
    previous = ""
    for line in docstring.splitlines():
        indented = line.startswith("    ")
        # an indented line after an empty one is code; after a line of prose it goes on from it
        if line.strip():
            is_code = indented and (is_code or not previous.strip())
        lines.append(line if is_code else _prose(line.strip()))
        previous = line
    return "\n".join(lines) + "\n"


def _prose(line: str) -> str:
    """Return a line of prose with its marks of code, and no other mark of Markdown."""
    parts = re.split(r"(`[^`]*`)", line)
    escaped = [
        part if part.startswith("`") else re.sub(r"([\\*_<\[\]#])", r"\\\1", part) for part in parts
    ]
    return "".join(escaped)
