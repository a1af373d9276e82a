"""All mutants of a file in one text of it, each behind a switch (tests/mutants/switch.py)."""

import ast
from collections.abc import Iterator, Mapping

from tests.mutants.changes import Mutant

# a field of a node, and the place in it if it is a list
Step = tuple[str, int | None]
Path = tuple[Step, ...]
SWITCH = "_mutant_is_on"
IMPORT = f"from tests.mutants.switch import on as {SWITCH}"


def with_switches(source: bytes, mutants: Mapping[int, Mutant]) -> tuple[str, frozenset[int]]:
    """Return the text of a file with a switch for each of its mutants, by number, and the numbers
    of those that have one.

    What is evaluated when the file is imported has none, nor has what is no expression of its own:
    a pattern, or the code of a kernel.
    """
    tree = ast.parse(source)
    changed: list[tuple[Path, int, ast.AST]] = []
    for number, mutant in mutants.items():
        mutated = ast.parse(mutant.applied(source))
        path = _path_of_difference(tree, mutated)
        path = _outward_to_a_place(tree, path)
        if _is_evaluated_later(tree, path):
            changed.append((path, number, _at(mutated, path)))
    # inner places first: the text around them has them then
    for path, number, new in sorted(changed, key=lambda one: -len(one[0])):
        _put(tree, path, _switched(number, new, _at(tree, path)))
    if changed:
        tree.body.insert(_first_place(tree), ast.parse(IMPORT).body[0])
    text = ast.unparse(ast.fix_missing_locations(tree))
    return text, frozenset(number for _, number, _ in changed)


def _path_of_difference(old: ast.AST, new: ast.AST) -> Path:
    """Return the steps to the smallest node outside of which nothing differs."""
    before = dict(_children(old))
    after = dict(_children(new))
    differing = [
        step for step in before if ast.dump(before[step]) != ast.dump(after.get(step, old))
    ]
    if type(old) is not type(new) or before.keys() != after.keys() or len(differing) != 1:
        return ()
    step = differing[0]
    return (step, *_path_of_difference(before[step], after[step]))


def _children(node: ast.AST) -> Iterator[tuple[Step, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield (name, None), value
        elif isinstance(value, list):
            for place, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield (name, place), child


def _outward_to_a_place(tree: ast.AST, path: Path) -> Path:
    """Return the steps to the smallest expression or statement around the end of a path."""
    while path and not isinstance(_at(tree, path), ast.expr | ast.stmt):
        path = path[:-1]
    return path


def _is_evaluated_later(tree: ast.AST, path: Path) -> bool:
    """Return True for a place in the body of a function that Python itself runs."""
    node = tree
    later = False
    for step in path:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("jit" in ast.unparse(one) for one in node.decorator_list):
                return False
            later |= step[0] == "body"
        elif isinstance(node, ast.Lambda):
            later |= step[0] == "body"
        elif isinstance(node, ast.pattern):
            return False
        node = _child(node, step)
    return later


def _switched(number: int, new: ast.AST, old: ast.AST) -> ast.AST:
    """Return the node that is `new` if the switch is on."""
    is_on = ast.Call(ast.Name(SWITCH, ast.Load()), [ast.Constant(number)], [])
    if isinstance(old, ast.stmt):
        assert isinstance(new, ast.stmt)
        return ast.If(is_on, [new], [old])
    assert isinstance(old, ast.expr)
    assert isinstance(new, ast.expr)
    return ast.IfExp(is_on, new, old)


def _at(node: ast.AST, path: Path) -> ast.AST:
    for step in path:
        node = _child(node, step)
    return node


def _child(node: ast.AST, step: Step) -> ast.AST:
    name, place = step
    value = getattr(node, name)
    return value if place is None else value[place]


def _put(tree: ast.AST, path: Path, new: ast.AST) -> None:
    *before, (name, place) = path
    parent = _at(tree, tuple(before))
    if place is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[place] = new


def _first_place(tree: ast.Module) -> int:
    """Return the place behind the docstring and imports of what is to come."""
    place = 0
    for number, statement in enumerate(tree.body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if is_text or is_future:
            place = number + 1
    return place
