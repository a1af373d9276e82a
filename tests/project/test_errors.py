"""Errors have codes: each sentence stands once, under a code that code, tests and users go by."""

import ast
import json
import pickle
import re
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megaprec.errors import Problem, UserError, sentences
from tests.project.errors_page import page
from tests.refusals import sentence
from tools.cli import main
from tools.config.tables.schedules import read_schedule

ROOT = Path(__file__).parents[2]
ERRORS = ROOT / "megaprec" / "errors.py"
PACKAGES = ("megaprec", "parallel", "models", "tools")


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted({*(ROOT / package).rglob("*.py")} - {ERRORS})


@cache
def uses() -> tuple[tuple[str, str, set[str]], ...]:
    """Return place, code and fields of each `UserError.of` and `Problem.of`."""
    return tuple(_uses())


def _uses() -> Iterator[tuple[str, str, set[str]]]:
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and is_coded(node.func):
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                code = node.args[0]
                assert isinstance(code, ast.Constant), f"{place}: no literal code"
                yield place, str(code.value), {str(keyword.arg) for keyword in node.keywords}


def is_coded(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr != "of":
        return False
    return isinstance(function.value, ast.Name) and function.value.id in ("UserError", "Problem")


def fields_of(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name}


def test_every_code_has_a_sentence_with_the_fields_that_it_is_given() -> None:
    by_code = {
        f"{area}.{name}": text
        for area, names in sentences().items()
        for name, text in names.items()
    }
    wrong = [f"{place}: {code}" for place, code, _ in uses() if code not in by_code]
    wrong += [
        f"{place}: {code} has {sorted(fields_of(by_code[code]))}, and is given {sorted(fields)}"
        for place, code, fields in uses()
        if code in by_code and fields_of(by_code[code]) != fields
    ]
    assert not wrong


def test_no_error_is_made_of_a_sentence_that_has_no_code() -> None:
    without = list[str]()
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id != "UserError":
                continue
            texts = (ast.Constant, ast.JoinedStr)
            if any(isinstance(argument, texts) for argument in node.args):
                without.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not without


def test_every_sentence_is_used() -> None:
    used = {code for _, code, _ in uses()}
    listed = {f"{area}.{name}" for area, names in sentences().items() for name in names}
    assert not listed - used


def test_the_page_has_every_sentence() -> None:
    written = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert written == page(), "python -m tests.project.errors_page > docs/errors.md"


def test_a_problem_is_its_sentence_and_keeps_its_code_between_processes() -> None:
    problem = Problem.of("data.source_empty", name=Path("a.txt"))
    error = UserError(problem, "one without a code")
    assert problem == sentences()["data"]["source_empty"].format(name="a.txt")
    assert error.codes == ("data.source_empty", "")
    assert error.problems[0].fields == {"name": "a.txt"}
    again = pickle.loads(pickle.dumps(problem))
    assert (again, again.code, again.fields) == (problem, problem.code, problem.fields)


def test_a_line_that_does_not_print_keeps_its_code() -> None:
    (problem,) = UserError.of("data.source_empty", name="a\nb").problems
    assert problem == sentences()["data"]["source_empty"].format(name="a\\nb")
    assert problem.code == "data.source_empty"


def test_a_line_within_another_keeps_its_code(tmp_path: Path) -> None:
    (tmp_path / "schedule.txt").write_text("F0.0 X0.0\n")
    line = "schedule .*: line 1: " + sentence("pipeline.instruction", text="X0.0")
    with pytest.raises(UserError, match=line) as refused:
        read_schedule(str(tmp_path / "schedule.txt"))
    assert refused.value.codes == ("pipeline.instruction",)


def test_json_has_code_line_and_fields_of_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["data", "inspect", str(missing), "--json"]) == 2
    printed = capsys.readouterr()
    (error,) = json.loads(printed.out)["errors"]
    assert error["message"] == printed.err.strip()
    assert error["code"] == "data.data_set_missing"
    assert error["fields"] == {"path": f"{missing}.idx"}


REPAIRS = r": (restore|remove|build|copy|fetch|pack|\{remedy\})|; copy "


def test_whatever_is_found_damaged_is_told_with_what_to_do() -> None:
    without = list[str]()
    for area, by_name in sentences().items():
        for name, text in by_name.items():
            is_of_damage = re.search("damaged|is missing or does not|is not a checkpoint", text)
            if is_of_damage and not re.search(REPAIRS, text):
                without.append(f"{area}.{name}")
    assert without == []
