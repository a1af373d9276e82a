"""Mutants: one small change in one place of a source file, as a slip of the hand would make it.

Left alone are docstrings, annotations, messages (f-strings, `raise`), and assertions, of which a
change says nothing about how the code computes.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# folders of the code that trains
TRAINING = (
    "megaprec/comm",
    "megaprec/precision",
    "megaprec/fp8",
    "megaprec/optim",
    "megaprec/checkpoint",
    "megaprec/tokens",
    "parallel",
    "models",
    "tools/training",
)
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
BOOLEANS = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
EXTREMES = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "minimum": "maximum",
    "maximum": "minimum",
}
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    path: of the file, from the root of the tree.
    start, stop: the bytes of the file that `after` takes the place of.
    """

    path: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.before!r} -> {self.after!r}"

    def applied(self, source: bytes) -> bytes:
        """Return the source of the file with this change."""
        assert source[self.start : self.stop] == self.before.encode(), f"not in this file: {self}"
        return source[: self.start] + self.after.encode() + source[self.stop :]


def draw(
    root: Path,
    number: int,
    seed: int,
    folders: Sequence[str] = TRAINING,
    lines: Collection[tuple[str, int]] | None = None,
) -> list[Mutant]:
    """Return so many mutants of the files in `folders`, none in the line of another. Each kind is
    as likely as any other, and each place of a kind.

    lines: path and number of those that may be changed; None: all.
    """
    by_kind = defaultdict[str, list[Mutant]](list)
    for folder in folders:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            for mutant in mutants_of(path, file.read_bytes()):
                by_kind[mutant.kind].append(mutant)
    dice = random.Random(seed)
    drawn: list[Mutant] = []
    taken = set[tuple[str, int]]()
    while len(drawn) < number and by_kind:
        kind = dice.choice(sorted(by_kind))
        mutants = by_kind[kind]
        mutant = mutants.pop(dice.randrange(len(mutants)))
        if not mutants:
            del by_kind[kind]
        place = (mutant.path, mutant.line)
        may_change = lines is None or place in lines
        if may_change and place not in taken:
            taken.add(place)
            drawn.append(mutant)
    return drawn


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    text = _Text(path, source)
    for node in _changeable(ast.parse(source)):
        yield from _of_operators(text, node)
        yield from _of_values(text, node)
        yield from _of_flow(text, node)


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that may be changed."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, LEFT_ALONE):
                yield child
                yield from _changeable(child)


class _Text:
    """The bytes of a file, by the places of its nodes."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def mutant(self, kind: str, start: int, stop: int, after: str) -> Mutant:
        line = self.source.count(b"\n", 0, start) + 1
        before = self.source[start:stop].decode()
        return Mutant(self.path, line, kind, start, stop, before, after)

    def between(
        self,
        kind: str,
        left: ast.expr,
        right: ast.expr,
        sign: str,
        after: str,
    ) -> Iterator[Mutant]:
        """Yield the mutant of the operator between two operands, unless a comment stands there."""
        first, last = self.stop(left), self.start(right)
        text = self.source[first:last].decode()
        found = re.fullmatch(rf"([\s)\\]*){re.escape(sign)}([\s(\\]*)", text)
        if found:
            start = first + len(found[1].encode())
            yield self.mutant(kind, start, start + len(sign), after)


def _of_operators(text: _Text, node: ast.AST) -> Iterator[Mutant]:
    """Yield the mutants of comparisons, of booleans and of arithmetic."""
    if isinstance(node, ast.Compare):
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            if type(operator) in COMPARISONS:
                yield from text.between("comparison", left, right, *COMPARISONS[type(operator)])
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from text.between("boolean", left, right, *BOOLEANS[type(node.op)])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield from text.between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])


def _of_values(text: _Text, node: ast.AST) -> Iterator[Mutant]:
    """Yield the mutants of whole numbers, and of calls of least and largest."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield text.mutant("constant", text.start(node), text.stop(node), str(node.value + 1))
    elif isinstance(node, ast.Call):
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if name in EXTREMES:
            stop = text.stop(called)
            yield text.mutant("extreme", stop - len(name), stop, EXTREMES[name])


def _of_flow(text: _Text, node: ast.AST) -> Iterator[Mutant]:
    """Yield the mutants of conditions, and of calls that are statements."""
    conditions: list[ast.expr] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        conditions = [node.test]
    elif isinstance(node, ast.comprehension):
        conditions = node.ifs
    for condition in conditions:
        start, stop = text.start(condition), text.stop(condition)
        negated = f"(not ({text.source[start:stop].decode()}))"
        yield text.mutant("condition", start, stop, negated)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield text.mutant("removed call", text.start(node), text.stop(node), "pass")
