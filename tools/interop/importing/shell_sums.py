"""Arithmetic and conditions of a shell, of values that are known."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence

LONGEST_SUM = 200  # letters
LARGEST = 2**63  # beyond it a shell's numbers wrap around
PLAIN_SUM = re.compile(r"[\d\s+*/%()-]+")


def _quotient(left: int, right: int) -> int:
    """Return a quotient as a shell cuts it, towards zero."""
    quotient = abs(left) // abs(right)
    have_same_sign = (left < 0) == (right < 0)
    return quotient if have_same_sign else -quotient


def _rest(left: int, right: int) -> int:
    """Return the rest of a quotient that is cut towards zero: it has the sign of `left`."""
    return left - right * _quotient(left, right)


OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _rest,
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
# With a zero before it a number is octal in `[[ ... ]]`, and decimal in `[ ... ]`.
PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})")


def sum_of(text: str) -> int | None:
    """Return the value of arithmetic with whole numbers, + - * / % and brackets; None for other."""
    is_plain = len(text) <= LONGEST_SUM and PLAIN_SUM.fullmatch(text)
    # Python reads `//` and `**` otherwise than a shell, which reads 010 as octal
    if not is_plain or re.search(r"//|\*\*|\b0\d", text):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if abs(value) < LARGEST else None


def _value(node: ast.expr) -> int:
    """Return the value of a part of arithmetic. Raises ValueError for another form."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        operation = OPERATIONS[type(node.op)]
        left = _value(node.left)
        right = _value(node.right)
        return operation(left, right)
    raise ValueError(ast.dump(node))


def holds(words: Sequence[str]) -> bool | None:
    """Return whether the condition of `[ ... ]` holds; None if it is of another form, or of what
    stands outside of the script, such as a file."""
    if words[:1] == ["!"]:
        inner = holds(words[1:])
        return None if inner is None else not inner
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        asks_for_empty = words[0] == "-z"
        is_empty = words[1] == ""
        return is_empty == asks_for_empty
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        asks_for_equal = sign != "!="
        return (left == right) == asks_for_equal
    if sign in COMPARISONS and all(map(PLAIN_NUMBER.fullmatch, (left, right))):
        compare = COMPARISONS[sign]
        return compare(int(left), int(right))
    return None
