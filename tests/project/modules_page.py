"""Print docs/modules.md: python -m tests.project.modules_page > docs/modules.md."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from megaprec.front_door import exports_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("megaprec", "parallel", "models", "tools")
DOOR = "/optional_parts.py"  # the name of a door within the house

HEAD = """\
# Modules

Every module, in reading order: none imports one below it. A room is a folder, and "Uses" names the other rooms that its
modules import from. Each line is the first sentence of the docstring. [code.md](code.md) is the map of the rooms.
"""


def modules() -> list[str]:
    """Return the paths of all modules, such as "parallel/mesh.py"; `__init__.py` is not among them."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py")


class Parsed(NamedTuple):
    """What a module imports, by dotted name, and its docstring."""

    imported_names: frozenset[str]
    docstring: str


@cache
def parsed(path: str) -> Parsed:
    """Parse a module, each once: its tree does not outlive this."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # in `from a import b`, b is a name of a or the module a.b
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return Parsed(frozenset(names), ast.get_docstring(tree) or "")


def imported_modules(path: str, present: Iterable[str]) -> set[str]:
    """Return the modules among `present` that a module imports, anywhere in it; what a door within
    the house names, it does not import."""
    names = parsed(path).imported_names
    if path.endswith(DOOR):
        names -= {module for module, _ in exports_of(ROOT / path).values()}
    return {name.replace(".", "/") + ".py" for name in names} & set(present)


def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    present = modules()
    return {path: imported_modules(path, present) for path in present}


def room_of(path: str) -> str:
    """Return the folder of a module. `python -m megaprec` is the command line, wherever Python wants
    its file to lie. The folders within megaprec/optim are one room with it: the optimizer is built
    from them, and they from its buffers."""
    if path == "megaprec/__main__.py":
        return "tools"
    folder = str(Path(path).parent)
    return "megaprec/optim" if folder.startswith("megaprec/optim/") else folder


def uses_of_rooms() -> dict[str, set[str]]:
    """Return the other rooms that each room imports from."""
    uses: dict[str, set[str]] = {room_of(path): set() for path in modules()}
    for path, imported in imports().items():
        uses[room_of(path)] |= {room_of(other) for other in imported} - {room_of(path)}
    return uses


def in_reading_order(uses: dict[str, set[str]], kin: dict[str, str] | None = None) -> list[str]:
    """Return names so that each stands below those that it uses; among those that may stand next,
    first those of the same `kin`, then by name.

    Raises CycleError if some use each other in a circle.
    """
    sorter = TopologicalSorter({name: sorted(others) for name, others in uses.items()})
    sorter.prepare()
    ready = set(sorter.get_ready())
    order = list[str]()
    while ready:
        last = order[-1] if order else ""
        near = {name for name in ready if kin and last and kin[name] == kin[last]}
        chosen = min(near or ready)
        ready.remove(chosen)
        order.append(chosen)
        sorter.done(chosen)
        ready |= set(sorter.get_ready())
    return order


def rooms_in_order() -> list[str]:
    """Return all rooms in reading order, those of a package together where their uses allow it."""
    uses = uses_of_rooms()
    return in_reading_order(uses, {room: room.split("/")[0] for room in uses})


def subject(path: str) -> str:
    """Return the first sentence of a module's docstring, without the full stop."""
    text = " ".join(parsed(path).docstring.split())
    sentence = re.split(r"(?<=[.])\s", text, maxsplit=1)[0]
    return sentence.rstrip(".")


def page() -> str:
    """Return the page: all rooms with their subjects, uses and modules."""
    uses = uses_of_rooms()
    rooms = rooms_in_order()
    imported = imports()
    lines = [HEAD]
    for room in rooms:
        used = ", ".join(f"`{other}`" for other in rooms if other in uses[room])
        lines.append(f"\n## `{room}`\n\n{subject(f'{room}/__init__.py')}.\n\n")
        lines.append(f"Uses: {used or 'nothing of ours'}.\n\n| module | subject |\n|---|---|\n")
        members = {path: others for path, others in imported.items() if room_of(path) == room}
        inside = {path: others & set(members) for path, others in members.items()}
        for path in in_reading_order(inside):
            lines.append(f"| `{path}` | {subject(path).replace('|', chr(92) + '|')} |\n")
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
