"""The work of a confined process that lays pages out (`marked_up`): a request is a page of HTML,
and the answer its text. This module imports no other module of the project."""

from collections.abc import Iterator
from typing import Any


class Work:
    """The layout of one page for each request."""

    def answers(self, request: str, read_bytes: Any) -> Iterator[str]:
        """Yield the text of a page."""
        import inscriptis  # noqa: PLC0415 (optional)

        yield inscriptis.get_text(request)
