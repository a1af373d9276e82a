"""Chat templates that run in a confined process: they are programs of others, which may run without
an end, or take all memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaprec.text import chat_template
from megaprec.text.chat_template import Message, Rendered
from megaprec.text.confined import Confined

MODULE = Path(chat_template.__file__)
SECONDS = 10  # of processor time for one conversation


class Renderer:
    """A template, in a process of its own.

    source: its program.
    variables: further values that it may read, such as `eos_token`.
    last: True if only the answers after the last question of a conversation count.
    Raises ConfinedError, which says why, for a program that is none.
    """

    def __init__(self, source: str, variables: Mapping[str, str], last: bool = False) -> None:
        self._request = {"source": source, "variables": dict(variables), "last": last}
        self._process = Confined(MODULE)
        self._ask(None, None, 0)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, given: int
    ) -> Rendered:
        """Return the text of a conversation, and its answers, as `ChatTemplate.render` does. Raises
        ConfinedError."""
        ((text, answers),) = self._ask(messages, tools, given)
        return Rendered(text, tuple((begin, end) for begin, end in answers))

    def _ask(
        self, messages: Sequence[Message] | None, tools: Sequence[Any] | None, given: int
    ) -> list[Any]:
        request = {"messages": messages, "tools": tools, "given": given}
        return [*self._process.ask(self._request | request, SECONDS)]
