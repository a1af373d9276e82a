"""Keys whose value is one of the names of a table."""

from collections.abc import Collection

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError


def one_of(names: Collection[str]) -> AfterValidator:
    """Return a check that a text is one of `names`, with the error that pydantic has for a Literal
    of them."""
    *most, last = map(repr, names)
    expected = f"{', '.join(most)} or {last}"

    def checked(word: str) -> str:
        if word not in names:
            raise PydanticKnownError("literal_error", {"expected": expected})
        return word

    return AfterValidator(checked)
