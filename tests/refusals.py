"""What a call refuses, in tests that look at many wrong calls."""

from collections.abc import Callable

from megaprec.errors import UserError


def said_of(call: Callable[[], object]) -> str:
    """The lines of the UserError that a call raises; empty if it raises none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""
