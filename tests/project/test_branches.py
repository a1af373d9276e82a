"""No function decides more than a reader can hold: at most 12 branches, conditions within lines
counted too.

ruff's own count (C901, in pyproject.toml) passes over `and`, `or` and conditional expressions.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.modules_page import PACKAGES, ROOT

MOST = 12
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.And,
    ast.Or,
    ast.match_case,
)


def complexity(function: ast.AST) -> int:
    """Return the number of branches and one; those of inner functions are read with it."""
    return 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def functions_of(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_has_few_branches(package: str) -> None:
    too_many: list[str] = []
    for file in sorted(Path(ROOT, package).rglob("*.py")):
        for function in functions_of(file.read_text()):
            count = complexity(function)
            if count > MOST:
                place = file.relative_to(ROOT)
                too_many.append(f"{place}:{function.lineno} {function.name}: {count}")
    assert not too_many


def test_conditions_within_lines_count() -> None:
    source = """
def chosen(values, default):
    if values and all(value > 0 for value in values):
        return values[0] if default is None or default else default
    return default
"""
    (function,) = functions_of(source)
    # if, and, the comprehension, the conditional expression, or
    assert complexity(function) == 6
