"""No test fails because a machine is slow or busy: none holds a time of less than a minute.

A time is what a clock of the module `time` tells, what is computed of it, and what a function of
the test's module returns of it. A test that asserts something about a time, or that gives up at
one, may only do so after MINUTE or more: what takes longer hangs.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MINUTE = 60
CLOCKS = {
    f"{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
}


def held_times(source: str) -> list[int]:
    """Return the lines of a module of tests that hold a time of less than MINUTE."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    timers = set[str]()  # functions that return times
    while True:
        found = {function.name for function in functions if _returns_time(function, timers)}
        if found <= timers:
            break
        timers |= found
    lines = set[int]()
    for function in functions:
        lines |= set(_held_by(function, timers))
    return sorted(lines)


def _returns_time(function: ast.FunctionDef, timers: set[str]) -> bool:
    times = _times_of(function, timers)
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return any(value is not None and _is_time(value, times, timers) for value in returns)


def _held_by(function: ast.FunctionDef, timers: set[str]) -> Iterator[int]:
    times = _times_of(function, timers)
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            # a moment at which the test gives up
            sides = (node.left, node.right)
            if any(_is_clock(side) for side in sides) and _is_short(sides):
                yield node.lineno
        if isinstance(node, ast.Assert):
            for compared in ast.walk(node.test):
                if not isinstance(compared, ast.Compare):
                    continue
                sides = (compared.left, *compared.comparators)
                if any(_is_time(side, times, timers) for side in sides) and _is_short(sides):
                    yield compared.lineno


def _times_of(function: ast.FunctionDef, timers: set[str]) -> set[str]:
    """Return the names in a function that are given times."""
    times = set[str]()
    while True:
        before = len(times)
        for node in ast.walk(function):
            for target, value in _assigned(node):
                if _is_time(value, times, timers):
                    times |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        if len(times) == before:
            return times


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, ast.AugAssign | ast.NamedExpr):
        yield node.target, node.value
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend", "add")
        and node.args
    ):
        yield node.func.value, node.args[0]


def _is_clock(node: ast.AST) -> bool:
    """Return True for a call of a clock."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        module = node.func.value
        return isinstance(module, ast.Name) and module.id == "time" and node.func.attr in CLOCKS
    return isinstance(node.func, ast.Name) and node.func.id in CLOCKS


def _is_time(node: ast.AST, times: set[str], timers: set[str]) -> bool:
    """Return True if an expression is made of a clock, of times, or of what timers return."""
    for part in ast.walk(node):
        if _is_clock(part):
            return True
        if isinstance(part, ast.Name) and part.id in times | timers:
            return True
    return False


def _is_short(sides: tuple[ast.AST, ...]) -> bool:
    """Return True if these expressions have a number that is above 0 and less than MINUTE."""
    for side in sides:
        indices = {
            part
            for node in ast.walk(side)
            if isinstance(node, ast.Subscript)
            for part in ast.walk(node.slice)
        }
        for part in ast.walk(side):
            if not isinstance(part, ast.Constant) or part in indices:
                continue
            value = part.value
            if isinstance(value, int | float) and value is not True and 0 < value < MINUTE:
                return True
    return False


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_no_test_holds_a_time_of_less_than_a_minute(path: Path) -> None:
    source = path.read_text()
    assert held_times(source) == []


@pytest.mark.parametrize(
    "body",
    [
        "    start = time.monotonic()\n    work()\n    assert time.monotonic() - start < 5",
        "    start = perf_counter()\n    took = perf_counter() - start\n    assert 1e-3 > took",
        "    seconds = []\n    seconds.append(time.thread_time())\n    assert min(seconds) < 1e-3",
        "    first, second = timed(), timed()\n    assert 5 * first < second",
        "    deadline = time.time() + 30\n    while time.time() < deadline:\n        pass",
    ],
)
def test_such_a_test_is_found(body: str) -> None:
    timer = (
        "def timed():\n    start = time.process_time()\n    return time.process_time() - start\n"
    )
    assert held_times(f"import time\n{timer}def test_it():\n{body}\n")
    longer = body.replace("< 5", "< 60").replace("+ 30", "+ 60")
    if longer != body:
        assert not held_times(f"import time\n{timer}def test_it():\n{longer}\n")
