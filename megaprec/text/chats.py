"""Rows that are conversations, or prompts with their answers, as documents of which only the
answers count in the loss.

| fields of a row            | document                                                          |
|----------------------------|-------------------------------------------------------------------|
| `messages`                 | objects with `role` and `content`, written by a chat template     |
| `conversations`            | the same, or ShareGPT's objects with `from` and `value`           |
| `prompt` and `completion`  | texts: one message of the user and one of the assistant; lists of |
|                            | messages: one after the other, of which the latter count          |

A row may have `tools`, a list or its JSON, which the template gets. With the format `plain` there
is no template: the texts of `prompt` and `completion` follow each other, each encoded by itself, as
the prompt is when a model is asked, and the end-of-document token counts.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.durable import naming_file
from megaprec.errors import UserError
from megaprec.parsing import read_json, read_text
from megaprec.text.chat_rendering import Renderer
from megaprec.text.chat_template import CHATML, DAY, DAY_GIVEN, ONLY_LAST, Message
from megaprec.text.confined import ConfinedError
from megaprec.text.encoding import Marks
from megaprec.text.pieces import MarkedPiece, cut_document, require_unicode
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.tokenizer_files import CONFIG, TEMPLATE, read_settings

PLAIN = "plain"
OF_TOKENIZER = "tokenizer"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_FIELDS = ("messages", "conversations")
# Fields of rows that a model would have to be told, and that no template here is given.
UNREAD_FIELDS = ("system", "documents", "functions")
ROW_FIELDS = (*CHAT_FIELDS, "prompt", "completion", "tools", *UNREAD_FIELDS)
# ShareGPT's names of roles
ROLES = {"human": "user", "gpt": "assistant"}
CALLS = ("tool_calls", "function_call")  # what an answer may have in place of a content
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython", *ROLES}
# keys of messages by which others leave an answer out of the loss
WEIGHTS = ("weight", "train", "training")


@dataclass(frozen=True)
class Chats:
    """The way in which rows become documents.

    name: `plain`, or where the template is from.
    template: None: there is none, for prompts with completions alone.
    special: tokens of the tokenizer that no message may spell.
    digest: of the template and the names of its tokens.
    notes: what to know of the template.
    """

    name: str
    template: Renderer | None
    special: frozenset[str]
    digest: str
    notes: tuple[str, ...] = ()

    def pieces(self, document: str, row: Any, field: str, where: str) -> Iterator[MarkedPiece]:
        """Yield the pieces of the document of a row.

        field: of the conversation; "text": one of the usual names.
        Raises UserError, which names `where`, for a row that is no conversation.
        """
        if not isinstance(row, dict):
            raise UserError.of("data.chat_row", where=where, reason="it is not an object")
        for name in UNREAD_FIELDS:
            if row.get(name):
                reason = f"its field {name} is not read: give it as a message of the conversation"
                raise UserError.of("data.chat_row", where=where, reason=reason)
        if self.template is None:
            prompt = _text_of(row, "prompt", where)
            completion = _text_of(row, "completion", where)
            if not completion:
                raise UserError.of("data.chat_row", where=where, reason="its completion is empty")
            yield from _plain_pieces(document, prompt, Marks((), False))
            yield from _plain_pieces(document, completion, Marks(((0, len(completion)),), False))
            return
        messages, given = _messages(row, field, where)
        tools = _tools(row, where)
        self._require_unforged([*messages, tools], where)
        try:
            rendered = self.template.render(messages, tools, given)
        except ConfinedError as problem:
            raise UserError.of(
                "data.chat_not_rendered", where=where, name=self.name, problem=problem
            ) from problem
        text = require_unicode(rendered.text, where, "the conversation")
        yield MarkedPiece(document, text, Marks(rendered.answers, True))

    def _require_unforged(self, value: Any, where: str) -> None:
        """Raise UserError if a text within a JSON value spells a special token: in the rendered
        conversation it would be that token."""
        if not self.special:
            return
        # the longest first, so that the error does not name a part of a token
        longest_first = sorted(self.special, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        for text in _texts_within(value):
            if found := pattern.search(text):
                raise UserError.of("data.chat_forged", where=where, token=found[0])


def load_chats(name: str, tokenizer_file: Path | None) -> Chats:
    """Return the way of `name`: `plain`, `tokenizer`, `chatml` or the path of a template, the last
    three also with `+last`, so that only the answers after the last question count.

    tokenizer_file: None: it will be trained, which only `plain` allows.
    Raises UserError.
    """
    is_last = name.endswith(ONLY_LAST)
    template_name = name.removesuffix(ONLY_LAST)
    if name == PLAIN:
        return Chats(PLAIN, None, frozenset(), PLAIN)
    if tokenizer_file is None:
        raise UserError.of("data.chat_without_tokenizer", name=name)
    tokenizer = load_tokenizer(tokenizer_file)
    if tokenizer.encode_rendered is None:
        raise UserError.of("data.chat_sentencepiece", path=tokenizer_file, name=name)
    settings = read_settings(tokenizer_file, {})
    variables = {role: token for role, (token, _) in settings.named.items()}
    if template_name == "chatml":
        missing = [token for token in CHATML_TOKENS if token not in tokenizer.special]
        if missing:
            raise UserError.of(
                "data.chat_tokens_missing", path=tokenizer_file, missing=" and ".join(missing)
            )
        origin = template_name
        source = CHATML
    elif template_name == OF_TOKENIZER:
        origin, source = _template_beside(tokenizer_file)
    else:
        path = Path(template_name)
        if not path.is_file():
            raise UserError.of("data.chat_template_missing", name=name)
        origin = template_name
        source = _read_template(path)
    try:
        template = Renderer(source, variables, is_last)
    except ConfinedError as problem:
        raise UserError.of("data.chat_template_broken", name=origin, problem=problem) from problem
    inputs: list[Any] = [source, variables]
    if is_last:
        inputs.append(ONLY_LAST)
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return Chats(origin, template, tokenizer.special, digest, tuple(_notes(origin, source)))


def _notes(origin: str, source: str) -> Iterator[str]:
    """Yield what to know of a template."""
    if DAY in source:
        yield (
            f"the chat template ({origin}) asks for the day ({DAY}), which would be another one in "
            f"each build: it is not given, and what the template writes without counts; {DAY_GIVEN}"
        )


def _template_beside(tokenizer_file: Path) -> tuple[str, str]:
    """Return the place and the program of a tokenizer's own template. Raises UserError."""
    file = tokenizer_file.with_name(TEMPLATE)
    if file.is_file():
        return str(file), _read_template(file)
    config = tokenizer_file.with_name(CONFIG)
    template = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # of several, each with a name
        named = {each["name"]: each["template"] for each in template if _is_named(each)}
        if "default" not in named:
            names = ", ".join(sorted(named)) or "none"
            raise UserError.of("data.chat_templates_named", file=config, names=names)
        template = named["default"]
    if not isinstance(template, str):
        raise UserError.of("data.chat_template_none", path=tokenizer_file)
    return str(config), template


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and {"name", "template"} <= value.keys()


def _read_template(path: Path) -> str:
    try:
        with naming_file(path):
            return read_text(path)
    except (OSError, ValueError) as problem:
        raise UserError.of("data.chat_template_broken", name=path, problem=problem) from problem


def _plain_pieces(document: str, text: str, marks: Marks) -> Iterator[MarkedPiece]:
    """Yield a text in pieces, of which all counts if `marks` has answers, else nothing."""
    for name, piece in cut_document(document, text):
        answers = ((0, len(piece)),) if marks.answers else ()
        yield MarkedPiece(name, piece, Marks(answers, False))


def _messages(row: Mapping[str, Any], field: str, where: str) -> tuple[list[Message], int]:
    """Return the messages of a row, and how many of them are the prompt, in which no answer counts.

    field: that has the messages; "text", the default: any of the usual names.
    Raises UserError unless the row has one form of a conversation, and no more.
    """
    is_unnamed = field == "text"
    present_fields = [name for name in CHAT_FIELDS if name in row]
    fields = present_fields if is_unnamed else [field]
    forms = [*fields]
    if is_unnamed and {"prompt", "completion"} <= row.keys():
        forms.append("prompt")
    if len(forms) != 1 or forms[0] not in row:
        names = ", ".join(sorted(map(str, row))) or "none"
        raise UserError.of("data.chat_fields", where=where, names=names)
    if fields:
        messages_field = fields[0]
        return _list_of_messages(row[messages_field], messages_field, where), 0
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        question = {"role": "user", "content": prompt}
        answer = {"role": "assistant", "content": completion}
        return [question, answer], 1
    given = _list_of_messages(prompt, "prompt", where)
    answers = _list_of_messages(completion, "completion", where)
    return [*given, *answers], len(given)


def _list_of_messages(value: Any, field: str, where: str) -> list[Message]:
    """Return the messages of a field, a list or its JSON. Raises UserError if it is no list of
    them, for a message of two meanings, an unknown role, and a weight that is not 1."""
    value = _unpacked(value)
    if not isinstance(value, list) or not value:
        reason = f"{field} is not a list of messages"
        raise UserError.of("data.chat_row", where=where, reason=reason)
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        message = _message(item)
        if message is None:
            reason = f"message {number} of {field} has no role and content, nor from and value"
            raise UserError.of("data.chat_row", where=where, reason=reason)
        if _says_two_things(item):
            reason = f"message {number} of {field} says one thing by role and content, and another "
            reason += "by from and value: leave one pair out"
            raise UserError.of("data.chat_row", where=where, reason=reason)
        if message["role"] not in KNOWN_ROLES:
            reason = f"message {number} of {field} has the role {message['role']!r}, which is none "
            reason += f"of {', '.join(sorted(KNOWN_ROLES))}"
            raise UserError.of("data.chat_row", where=where, reason=reason)
        for key in WEIGHTS:
            if message.get(key) not in (None, 1):
                reason = f"message {number} of {field} has {key} = {message[key]!r}, and answers "
                reason += "that do not count are not read"
                raise UserError.of("data.chat_row", where=where, reason=reason)
        messages.append(message)
    return messages


def _message(item: Any) -> Message | None:
    """Return a message with the usual names of roles, None for what is none."""
    if not isinstance(item, dict):
        return None
    role = item.get("role")
    if isinstance(role, str):
        is_empty = item.get("content") is None and not any(item.get(key) for key in CALLS)
        return None if is_empty else {**item, "role": ROLES.get(role, role)}
    role = item.get("from")
    content = item.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    others = {key: value for key, value in item.items() if key not in ("from", "value")}
    return {**others, "role": ROLES.get(role, role), "content": content}


def _says_two_things(item: Mapping[str, Any]) -> bool:
    """Return True for a message whose `from` and `value` are other than its `role` and
    `content`."""
    value = item.get("value")
    if not isinstance(value, str):
        return False
    content = item.get("content")
    role = item.get("role")
    sender = item.get("from")
    if content is not None and content != value:
        return True
    if not isinstance(role, str) or not isinstance(sender, str):
        return False
    return ROLES.get(role, role) != ROLES.get(sender, sender)


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the tools of a row; None if it has none. Raises UserError if they are no list."""
    tools = _unpacked(row.get("tools"))
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list):
        raise UserError.of("data.chat_row", where=where, reason="tools is not a list")
    return tools


def _unpacked(value: Any) -> Any:
    """Return a list that a column of texts has as JSON; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    """Return the text in a field. Raises UserError if there is none."""
    text = row.get(field)
    if not isinstance(text, str):
        reason = f"its field {field} is no text; plain takes the texts of prompt and completion"
        raise UserError.of("data.chat_row", where=where, reason=reason)
    return require_unicode(text, where, f"field {field!r}")


def _texts_within(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_within(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts_within(key)
            yield from _texts_within(item)
