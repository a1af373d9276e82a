"""Functions of a shell script: where one is defined, and what its commands are."""

from collections.abc import Sequence

from tools.importing.shell_words import Command

BEFORE_A_COMMAND = ("do", "else", "elif", "if", "then", "!", "time", "while", "until")


def definition(commands: Sequence[Command], at: int) -> tuple[str, list[Command], int] | None:
    """Return the function whose definition begins at a command: its name, its body, and what
    follows at; or None."""
    words = list(commands[at].words)
    named_by_word = len(words) > 1 and words[0].plain == "function"
    name = ""
    if named_by_word:
        name = words[1].plain
    elif len(words) == 1:
        name = words[0].plain
    parentheses = commands[at].end == "(" and at + 1 < len(commands) and not commands[at + 1].words
    if not name or not (named_by_word or parentheses):
        return None
    begin = at + 2 if parentheses else at + 1
    body = list[Command]()
    if len(words) > 2:
        body.append(Command(tuple(words[2:]), commands[at].line, commands[at].end))
    elif begin < len(commands):
        body.append(commands[begin])
        begin += 1
    if not body or not body[0].words or body[0].words[0].plain != "{":
        return None
    open_braces = _opened(body[0])
    while open_braces > 0 and begin < len(commands):
        body.append(commands[begin])
        open_braces += _opened(commands[begin])
        begin += 1
    return name, body, begin


def _opened(command: Command) -> int:
    """Return how many groups a command opens, less those that it closes."""
    if len(command.words) > 2 and command.words[0].plain == "function":
        return int(command.words[2].plain == "{")
    opened = 0
    for word in command.words:
        if word.plain == "{":
            opened += 1
        elif word.plain == "}":
            opened -= 1
        elif word.plain not in BEFORE_A_COMMAND:
            break
    return opened
