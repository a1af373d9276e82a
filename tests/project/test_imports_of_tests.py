"""`make test` in a new clone installs the extra `test` alone: a test of a package of another extra
(`oracles`) is skipped there for a reason that is said, and its file can be read.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = ("megaprec", "models", "parallel", "tests", "tools", "website")


def required_by(distribution: str, extra: str) -> Iterator[Requirement]:
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:  # a requirement of another system
        return
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def installed_for_tests() -> set[str]:
    """Return the distributions that the extra `test` brings, by their canonical names."""
    found = set[str]()
    waiting = [Requirement("megaprec[test]")]
    seen = set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += required_by(name, extra)
    return found


def imported_at_the_top(source: str) -> set[str]:
    """Return the dotted names of what a module imports whenever it is read."""
    names = set[str]()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            names.add(statement.module)
            names |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return names


def read_by_pytest() -> set[Path]:
    """Return the files of tests, and the modules of this folder that these import at the top."""
    waiting = {path for path in (ROOT / "tests").rglob("*.py") if path.name.startswith("test_")}
    waiting |= set((ROOT / "tests").rglob("conftest.py"))
    found = set[Path]()
    while waiting:
        path = waiting.pop()
        found.add(path)
        for name in imported_at_the_top(path.read_text(encoding="utf-8")):
            module = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("tests.") and module.is_file() and module not in found:
                waiting.add(module)
    return found


@cache
def distributions_by_package() -> dict[str, set[str]]:
    """Return the canonical names of the installed distributions that have each package."""
    return {
        package: {canonicalize_name(name) for name in names}
        for package, names in packages_distributions().items()
    }


def missing(source: str, installed: set[str]) -> set[str]:
    """Return the packages that a module of tests imports and that `installed` has not."""
    distributions = distributions_by_package()
    packages = {name.partition(".")[0] for name in imported_at_the_top(source)}
    return {
        name
        for name in packages - {*OURS, *sys.stdlib_module_names}
        if not distributions.get(name, set[str]()) & installed
    }


@pytest.mark.parametrize("line", ["import nowhere", "from nowhere.module import name"])
def test_a_package_that_is_not_installed_for_tests_is_found(line: str) -> None:
    assert missing(f"import json\nimport pytest\n{line}\n", {"pytest"}) == {"nowhere"}


def test_tests_can_be_read_with_what_the_test_command_installs() -> None:
    installed = installed_for_tests()
    assert {"torch", "pytest", "pyyaml"} <= installed
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(read_by_pytest())
        if (names := missing(path.read_text(encoding="utf-8"), installed))
    }
    assert not found
