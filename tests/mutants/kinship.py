"""How much a law speaks of a place in the code: by the rare words that both have."""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutants.changes import Mutant

WORD = re.compile(r"[a-z]+|[A-Z][a-z]*")
# of a word that only another part of the law's file has
OF_FILE = 0.25

Words = frozenset[str]


def words_of(text: str) -> Words:
    """Return the words of a text, in lower case: also those that make a name."""
    return frozenset(word.lower() for word in WORD.findall(text) if len(word) > 2)


def kinship(root: Path, mutant: Mutant, law: str) -> float:
    """Return how much a law, as "file::function[case]", speaks of the line of a mutant and of the
    function around it: more for words that few laws have."""
    laws, frequencies = _laws(root)
    file, _, name = law.partition("::")
    own = laws.get(f"{file}::{name.partition('[')[0]}", frozenset())
    of_file = laws.get(file, frozenset())
    total = 0.0
    for word in _words_at(root, mutant):
        share = 1.0 if word in own else OF_FILE if word in of_file else 0.0
        total += share * math.log(len(laws) / (1 + frequencies[word]))
    return total


@cache
def _words_at(root: Path, mutant: Mutant) -> Words:
    """Return the words of the line of a mutant, and of the names of function and class around it."""
    source = (root / mutant.path).read_text()
    text = f"{mutant.path} {source.splitlines()[mutant.line - 1]}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            if node.lineno <= mutant.line <= node.end_lineno:
                text += f" {node.name}"
    return words_of(text)


@cache
def _laws(root: Path) -> tuple[dict[str, Words], Counter[str]]:
    """Return the words of each law and of each file of laws, and how many of these have a word."""
    laws = {name: words_of(text) for name, text in _texts(root)}
    return laws, Counter(word for words in laws.values() for word in words)


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    for file in sorted((root / "tests").rglob("test_*.py")):
        path = file.relative_to(root).as_posix()
        text = file.read_text()
        yield path, text
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                yield f"{path}::{node.name}", ast.get_source_segment(text, node) or ""
