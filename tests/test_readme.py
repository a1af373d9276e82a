"""README.md lists the modules in reading order: all of them, each importing only those listed above it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("megaprec", "parallel", "models", "tools")


def listed() -> list[str]:
    return re.findall(rf"^\| `((?:{'|'.join(PACKAGES)})/[\w/]+\.py)`", (ROOT / "README.md").read_text(), re.MULTILINE)


def imports(path: str) -> set[str]:
    """Modules that the file imports: for `from a import b`, both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_readme_lists_every_module_once() -> None:
    present = [str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*.py") if f.name != "__init__.py"]
    assert sorted(listed()) == sorted(present)


def test_every_module_imports_only_modules_listed_above_it() -> None:
    place = {path.removesuffix(".py").replace("/", "."): number for number, path in enumerate(listed())}
    wrong = [
        f"{path} imports {name}, which is listed below it"
        for number, path in enumerate(listed())
        for name in imports(path)
        if place.get(name, -1) >= number
    ]
    assert not wrong, "\n".join(wrong)
