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
    """Expect a UserError that has a problem of this code, whose fields have these values."""
    with pytest.raises(UserError) as caught:
        yield caught
    problems = caught.value.problems
    expected = {name: str(value) for name, value in fields.items()}
    for problem in problems:
        named = {name: str(value) for name, value in problem.fields.items()}
        if problem.code == code and expected.items() <= named.items():
            return
    raised = "\n".join(f"{problem.code} {problem.fields}: {problem}" for problem in problems)
    raise AssertionError(f"expected {code} {fields}, got\n{raised}")


def shows(text: str, code: str, /, **fields: Any) -> bool:
    """Return whether a text has the sentence of a code, with these values of its fields."""
    return re.search(sentence(code, **fields), text) is not None


def sentence(code: str, /, **fields: Any) -> str:
    """Return a regular expression of the sentence of a code. A field that is not given may have any
    value."""
    area, _, name = code.partition(".")
    pattern = ""
    for literal, field, form, conversion in Formatter().parse(sentences()[area][name]):
        pattern += re.escape(literal)
        if field in fields:
            marker = f"!{conversion}" if conversion else ""
            pattern += re.escape(f"{{{marker}:{form}}}".format(fields[field]))
        elif field is not None:
            pattern += "(?s:.*?)"
    return pattern


def said_of(call: Callable[[], object]) -> str:
    """The lines of the UserError that a call raises; empty if it raises none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""
