"""Chat templates: the text of a conversation, as a tokenizer's template writes it, and where the
answers in it are.

A template is a program in Jinja2, which is run in a sandbox, as transformers runs it, with the same
variables and filters. It may mark the assistant's text by `{% generation %}`. Of a template that
does not, the answer to the messages before is what it writes beyond its prompt for one: the text of
the messages up to the answer, without the text of the messages before it and the prompt.

A template that writes other text in each build is refused: the day of the build would be in the
data if it could ask for it, so `strftime_now` is not defined, and `random` and `lipsum` draw.

Programs may run without an end and take all memory, so a confined process runs them
(`chat_rendering`); this module imports no other module of the project.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
Answers = tuple[tuple[int, int], ...]

# Around what a template marks; random, so that no text holds them.
ANSWER_BEGIN = uuid.uuid4().hex
ANSWER_END = uuid.uuid4().hex
# Names under which messages have the reasoning before an answer; templates read the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Fields of a message, besides its content, that a model is to read or write.
TOOL_FIELDS = ("tool_calls", "function_call")
SPOKEN_FIELDS = (*TOOL_FIELDS, *REASONING)
ONLY_LAST = "+last"  # behind the name of a template
CHATML = """\
{%- for message in messages %}
{%- if message['content'] is not string %}{{ raise_exception('a content is no text') }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


# names of Jinja's that write other text each time
DRAWING = ("random", "lipsum")
# what Python writes of an object without a text of its own; it is other in each process
ADDRESS = re.compile(r" at 0x[0-9a-f]{4,}>")


class ChatError(Exception):
    """A conversation that a template cannot write, or whose answers are not found; its text is the
    reason."""


# the function by which templates ask for the day of the build
DAY = "strftime_now"
DAY_GIVEN = "give a copy of the template with a day of its own"
_WRITE_OR_REMOVE = "give a copy of the template that writes it, or rows without it"
_MARK = "give a copy of the template that marks answers by {% generation %}"
_WAYS_OUT = (
    f"put {ONLY_LAST} behind the name of the template to learn only the answers after the last "
    f"question of each conversation, or {_MARK}"
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the ranges of characters of its answers, ascending."""

    text: str
    answers: Answers


class _Generation(Extension):
    """The block `{% generation %}`, whose text is put between two marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads this attribute of the class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node of a block, which calls `_marked` with its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{ANSWER_BEGIN}{caller()}{ANSWER_END}"


class ChatTemplate:
    """A compiled template.

    source: its program.
    variables: further values that it may read, such as `eos_token`.
    last: True if only the answers after the last question of a conversation count.
    Raises ChatError for a program that is none.
    """

    def __init__(self, source: str, variables: Mapping[str, str], last: bool = False) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["random"] = _draw
        environment.globals["lipsum"] = _draw
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as problem:
            raise ChatError(f"line {problem.lineno}: {problem.message}") from problem
        # Python's own compiler says so of deep nesting, and Jinja of a huge constant
        except MemoryError as problem:
            raise ChatError("it takes too much memory, or is nested too deeply") from problem
        # what Python's own compiler refuses: blocks and brackets that are nested deep
        except (RecursionError, SyntaxError, ValueError) as problem:
            raise ChatError(f"it is nested too deeply: {problem}") from problem
        drawn = sorted({node.name for node in tree.find_all(nodes.Filter)} & {*DRAWING})
        drawn += sorted({node.name for node in tree.find_all(nodes.Name)} & {"lipsum"})
        if drawn:
            raise ChatError(f"{drawn[0]} draws at random, so that the data are not built again")
        self._source = source
        self._variables = variables
        self._last = last
        calls = tree.find_all(nodes.ExtensionAttribute)
        self._marks_answers = any(call.name == "_marked" for call in calls)
        self._names = frozenset(_names_in(tree))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        given: int = 0,
    ) -> Rendered:
        """Return the text of a conversation, and its answers.

        given: number of messages at the beginning whose answers do not count.
        Raises ChatError, also if the template would leave out what a model is to read or write.
        """
        if self._last:
            given = max(given, _end_of_questions(messages))
        whole = self._run(messages, tools)
        self._require_written(messages, tools, whole.text)
        if self._marks_answers:
            skipped = len(self._run(messages[:given], tools, True).answers) if given else 0
            answers = whole.answers[skipped:]
            given = max(given, _end_of_questions(messages))
        else:
            answers = self._find_answers(whole.text, messages, tools, given)
        self._require_each_written(messages, tools, whole.text, given)
        return Rendered(whole.text, answers)

    def _find_answers(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, given: int
    ) -> Answers:
        """Return the ranges of the answers in the text of a conversation. Raises ChatError."""
        answers: list[tuple[int, int]] = []
        for number in range(given, len(messages)):
            if messages[number]["role"] == "assistant":
                answers.append(self._find_answer(text, messages[: number + 1], tools))
        return tuple(answers)

    def _require_written(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str
    ) -> None:
        """Raise ChatError if the text of a conversation is the same without fields that the
        template does not name."""
        suspects = self._unnamed_fields(messages)
        lacks_tools = bool(tools) and "tools" not in self._names
        if not suspects and not lacks_tools:
            return
        reduced: list[Message] = []
        for message in messages:
            reduced.append({key: value for key, value in message.items() if key not in suspects})
        # not naming a field is no proof: a template may also write a message as a whole
        if self._run(reduced, None if lacks_tools else tools).text == text:
            left_out = [*suspects, "tools"] if lacks_tools else suspects
            raise ChatError(f"it leaves out {', '.join(left_out)}; {_WRITE_OR_REMOVE}")

    def _unnamed_fields(self, messages: Sequence[Message]) -> list[str]:
        """Return the fields that a message has and that the template does not name."""
        unnamed: list[str] = []
        for name in SPOKEN_FIELDS:
            is_in_messages = any(message.get(name) for message in messages)
            if is_in_messages and not self._names_field(name):
                unnamed.append(name)
        return unnamed

    def _require_each_written(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, given: int
    ) -> None:
        """Raise ChatError if the text of a conversation is the same without a field that a message
        has, or holds a shorter answer than was given.

        given: number of messages of which only calls of tools must be there: templates of models
            that think leave out earlier reasoning.
        """
        last_answer = _end_of_questions(messages)  # the messages from here on have no question
        for number, message in enumerate(messages):
            required = TOOL_FIELDS if number < given else SPOKEN_FIELDS
            left_out: list[str] = []
            for name in required:
                has_field = bool(message.get(name))
                if has_field and self._is_written_without(name, number, messages, tools, text):
                    left_out.append(name)
            is_learned = number >= given and message["role"] == "assistant"
            if is_learned and _is_shortened(message, text):
                left_out.append("a part of the content")
            if left_out:
                # fields that every template must write: of the last answers, and calls of tools
                is_needed = number >= last_answer or not {*TOOL_FIELDS}.isdisjoint(left_out)
                ways_out = _WRITE_OR_REMOVE if is_needed else _WAYS_OUT
                what = " and ".join(left_out)
                raise ChatError(f"it leaves out {what} of message {number + 1}; {ways_out}")

    def _is_written_without(
        self,
        name: str,
        number: int,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        text: str,
    ) -> bool:
        """Return True if the text of a conversation is the same without a field of one message."""
        reduced = {key: value for key, value in messages[number].items() if key != name}
        try:
            written = self._run([*messages[:number], reduced, *messages[number + 1 :]], tools)
        except ChatError:
            return False
        return written.text == text

    def _names_field(self, name: str) -> bool:
        # messages have their reasoning under all of its names
        names = REASONING if name in REASONING else (name,)
        return not self._names.isdisjoint(names)

    def _find_answer(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[int, int]:
        """Return the range of the last of some messages in the text of the conversation. Raises
        ChatError."""
        number = len(messages)
        prompt = self._run(messages[:-1], tools, True).text
        with_answer = self._run(messages, tools).text
        if not with_answer.startswith(prompt):
            raise ChatError(
                f"the text of the first {number} messages does not begin with that of the first "
                f"{number - 1} and the prompt for an answer; {_MARK}"
            )
        if not text.startswith(with_answer):
            raise ChatError(
                f"the text of the conversation does not begin with that of its first {number} "
                f"messages, so answer {number} is not written as it was given; {_WAYS_OUT}"
            )
        return len(prompt), len(with_answer)

    def _run(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, asks: bool = False
    ) -> Rendered:
        """Return what the template writes. asks: with its prompt for an answer.

        A message without content, as one that calls tools, has none for the template either. Of a
        template that fails then, such as DeepSeek-V3's, the content is null.
        """
        read = [_as_templates_read(message) for message in messages]
        try:
            try:
                marked = self._written(read, tools, asks)
            except jinja2.UndefinedError:
                if all("content" in message for message in read):
                    raise
                with_null = [{"content": None} | message for message in read]
                marked = self._written(with_null, tools, asks)
        except Exception as problem:  # a program of others, which may raise anything
            raise ChatError(_reason(problem, messages)) from problem
        rendered = _without_marks(marked)
        if " at 0x" in rendered.text:
            self._require_no_address(rendered.text, json.dumps([messages, tools]))
        return rendered

    def _written(self, messages: Sequence[Message], tools: Sequence[Any] | None, asks: bool) -> str:
        """Return what the template's program returns."""
        return self._template.render(
            self._variables,
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=asks,
        )

    def _require_no_address(self, text: str, given: str) -> None:
        """Raise ChatError for an address of memory in a text that was not given."""
        for found in ADDRESS.findall(text):
            if found not in given and found not in self._source:
                raise ChatError("it writes the address of an object, which is other in each build")


class Work:
    """The rendering of conversations in a confined process.

    A request has `source`, `variables` and `last` of a template, and `messages`, `tools` and
    `given`. The answer is the text, and the ranges of its answers. If `messages` is null, the
    template is compiled alone.
    """

    def __init__(self) -> None:
        self._compiled: ChatTemplate | None = None  # of the last request
        self._program: Any = None  # of which it was compiled

    def answers(self, request: Mapping[str, Any], read_bytes: Any) -> Iterator[Any]:
        """Yield the answer to one request. Raises ChatError."""
        program = request["source"], request["variables"], request["last"]
        if self._compiled is None or self._program != program:
            self._compiled = ChatTemplate(*program)
            self._program = program
        template = self._compiled
        if request["messages"] is not None:
            rendered = template.render(request["messages"], request["tools"], request["given"])
            yield rendered.text, rendered.answers


def _reason(problem: Exception, messages: Sequence[Message]) -> str:
    """Return why a template has failed, and what to do."""
    said = " ".join(str(problem).split())
    if DAY in said:
        return f"it asks for the day ({DAY}), which is not given: {DAY_GIVEN}"
    if isinstance(problem, TypeError) and any(map(_calls_with_objects, messages)):
        return (
            f"{said}: the arguments of its tool calls are objects; give them as text, in JSON, if "
            "the template reads a text"
        )
    return said or type(problem).__name__


def _calls_with_objects(message: Message) -> bool:
    """Return True if a message has a tool call whose arguments are an object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    arguments = [each.get("arguments") for each in functions if isinstance(each, dict)]
    return any(isinstance(each, dict) for each in arguments)


def _is_shortened(message: Message, text: str) -> bool:
    """Return True if a text does not hold the content of a message, whatever its white space."""
    content = message.get("content")
    if not isinstance(content, str):
        return False
    return "".join(content.split()) not in "".join(text.split())


def _end_of_questions(messages: Sequence[Message]) -> int:
    """Return the number of messages up to the last one of a user, that one too."""
    end = 0
    for number, message in enumerate(messages, 1):
        if message["role"] == "user":
            end = number
    return end


def _names_in(tree: nodes.Template) -> Iterator[str]:
    """Yield all variables, attributes and texts that a program names."""
    for attribute in tree.find_all(nodes.Getattr):
        yield attribute.attr
    for variable in tree.find_all(nodes.Name):
        yield variable.name
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _as_templates_read(message: Message) -> dict[str, Any]:
    """Return a message without values that are null, its reasoning under both usual names."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = [given[name] for name in REASONING if name in given]
    if not reasoning:
        return given
    return {"thinking": reasoning[0]} | given | {"reasoning_content": reasoning[0]}


def _without_marks(marked: str) -> Rendered:
    """Return a text without the marks of answers, and their ranges."""
    before, *parts = marked.split(ANSWER_BEGIN)
    text = before
    answers: list[tuple[int, int]] = []
    for part in parts:
        answer, end, after = part.partition(ANSWER_END)
        if not end:
            raise ChatError("a {% generation %} block lies within another one, or is changed later")
        if answer:
            answers.append((len(text), len(text) + len(answer)))
        text += answer + after
    if ANSWER_END in text:
        raise ChatError("a {% generation %} block lies within another one, or is changed later")
    return Rendered(text, tuple(answers))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON: the filter `tojson`, which does not escape what HTML would."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _draw(*values: Any) -> None:
    """Refuse to draw: the filter `random` and the function `lipsum`."""
    raise jinja2.TemplateError("it draws at random, so that the data are not built again")


def _raise_exception(message: str) -> None:
    """Refuse a conversation: the function of templates by this name."""
    raise jinja2.TemplateError(message)
