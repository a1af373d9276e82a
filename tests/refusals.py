"""Errors as tests see them: by their codes and the values that they name, not by their sentences."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from string import Formatter
from typing import Any

import pytest

from megaprec.errors import UserError, sentences


@contextmanager
def raises(code: str, /, **fields: Any) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError that has a problem of this code, whose fields have these values.

    A field may be given as a compiled regular expression, which is searched in its value.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    problems = caught.value.problems
    for problem in problems:
        if problem.code == code and _has(problem.fields, fields):
            return
    raised = "\n".join(f"{problem.code} {problem.fields}: {problem}" for problem in problems)
    raise AssertionError(f"expected {code} {fields}, got\n{raised}")


def _has(fields: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether fields have the values expected, each a value or a regular expression."""
    for name, value in expected.items():
        if name not in fields:
            return False
        text = str(fields[name])
        if isinstance(value, re.Pattern):
            if not value.search(text):
                return False
        elif text != str(value):
            return False
    return True


def shows(text: str, code: str, /, **fields: Any) -> bool:
    """Return whether a text has the sentence of a code, with these values of its fields.

    A field may be given as a compiled regular expression, which is searched in its value.
    """
    return re.search(sentence(code, **fields), text) is not None


def sentence(code: str, /, **fields: Any) -> str:
    """Return a regular expression of the sentence of a code. A field that is not given may have any
    value; one that is given as a regular expression has it somewhere in its value."""
    area, _, name = code.partition(".")
    template = sentences()[area][name]
    unknown = fields.keys() - {field for _, field, _, _ in Formatter().parse(template)}
    assert not unknown, f"{code} has no field {', '.join(sorted(unknown))}"
    pattern = ""
    for literal, field, form, conversion in Formatter().parse(template):
        pattern += re.escape(literal)
        value = fields.get(field or "")
        if isinstance(value, re.Pattern):
            pattern += _anywhere(value.pattern)
        elif field in fields:
            marker = f"!{conversion}" if conversion else ""
            pattern += re.escape(f"{{{marker}:{form}}}".format(value))
        elif field is not None:
            pattern += "(?s:.*?)"
    return pattern


def _anywhere(pattern: str) -> str:
    """Return a pattern that matches a whole value in which a pattern is found. Its anchors mean the
    ends of the value, not of the text around it."""
    before = "" if pattern.startswith("^") else "(?s:.*?)"
    after = "" if pattern.endswith("$") else "(?s:.*?)"
    return f"{before}(?:{pattern.removeprefix('^').removesuffix('$')}){after}"


def said_of(call: Callable[[], object]) -> str:
    """The lines of the UserError that a call raises; empty if it raises none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""
