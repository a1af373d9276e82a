"""A message counts one thing as one, and several in the plural."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.project.test_packaging import ROOT, modules
from tools.console.units import counted


@pytest.mark.parametrize(
    ("number", "what", "plural", "said"),
    [
        (0, "rank", "s", "0 ranks"),
        (1, "rank", "s", "1 rank"),
        (1200, "document", "s", "1,200 documents"),
        (1, "micro-batch", "es", "1 micro-batch"),
        (2, "micro-batch", "es", "2 micro-batches"),
    ],
)
def test_a_number_of_things_is_said_as_in_speech(
    number: int, what: str, plural: str, said: str
) -> None:
    assert counted(number, what, plural) == said


def test_commands_count_in_one_way() -> None:
    own_way = re.compile(r"""else ['"]e?s['"]\}|\{['"]e?s['"] (?:if|\*)""")
    found = {
        str(path)
        for path in modules()
        if path.parts[0] == "tools" and own_way.search((ROOT / path).read_text())
    }
    other = ("config/layouts", "doctor/place", "journal/records", "training/data_identity")
    assert found <= {f"tools/{name}.py" for name in other}, (
        "counted of tools/console/units.py says it"
    )


def numbers_before_others(source: str) -> Iterator[int]:
    """The lines of f-strings that put a number before "others", which one is not."""
    for text in ast.walk(ast.parse(source)):
        if not isinstance(text, ast.JoinedStr):
            continue
        for value, after in zip(text.values, text.values[1:], strict=False):
            is_number = isinstance(value, ast.FormattedValue)
            is_word = isinstance(after, ast.Constant)
            if is_number and is_word and re.match(r" others?\b", str(after.value)):
                yield text.lineno


def test_no_message_counts_others_which_may_be_one() -> None:
    found = {str(path): [*numbers_before_others((ROOT / path).read_text())] for path in modules()}
    assert {path: lines for path, lines in found.items() if lines} == {}, "say: and 1 more"
    assert [*numbers_before_others('f"{n} others" f"{m} more"')] == [1]
