"""The effects of commands of a shell script, as far as their words alone say them: what they may
set."""

import re
from collections.abc import Iterator, Sequence
from itertools import dropwhile

from tools.interop.importing.shell_conditions import TESTS
from tools.interop.importing.shell_expansions import WITH_DEFAULT
from tools.interop.importing.shell_tokens import ODDITIES, Token, commands_of, written_of

DECLARES = ("export", "declare", "typeset", "readonly", "local")
HARMLESS_FLAGS = re.compile(r"-[xragA]+")
SETS_WITHIN = re.compile(r"=|\+\+|--")


def assignments_of(command: Sequence[Token], is_in_call: bool) -> list[Token]:
    """Return the words of a command that would be assignments: for one that declares, without its
    flags and bare names. is_in_call: a function is followed, without which `local` is no command.
    """
    name = command[0].text
    is_local_of_none = name == "local" and not is_in_call
    if name not in DECLARES or is_local_of_none:
        return [*command]
    # a bare name only says that there is such a variable
    words = [word for word in command[1:] if not word.text.isidentifier()]
    without_flags = dropwhile(_is_harmless_flag, words)
    return [*without_flags]


def _is_harmless_flag(word: Token) -> bool:
    """Return True for flags of a declaration that change no value."""
    return HARMLESS_FLAGS.fullmatch(word.text) is not None


def makes_read_only(command: Sequence[Token]) -> bool:
    """Return True for `readonly`, and for `declare` with its flag."""
    name = command[0].text
    if name not in ("declare", "typeset"):
        return name == "readonly"
    flags = [word.text for word in command[1:] if _is_harmless_flag(word)]
    return any("r" in flag for flag in flags)


def name_before_sign(word: Token) -> str:
    """Return what stands before the `=` of an assignment."""
    name, _, _ = word.text.partition("=")
    return name


def changes_own_arguments(command: Sequence[Token]) -> bool:
    """Return True for `shift`, and for `set` with words instead of options."""
    name = command[0].text
    option = written_of(command[1:2])
    # all behind `--` are words
    has_option = option.startswith(("-", "+")) and option != "--"
    sets_words = name == "set" and not has_option
    return name == "shift" or sets_words


def oddities_that_may_set(command: Sequence[Token]) -> Iterator[str]:
    """Yield the expansions in a command that may set variables: not `${NAME:=...}`, which is
    followed."""
    written = written_of(command)
    for odd in ODDITIES.findall(written):
        is_followed = WITH_DEFAULT.fullmatch(odd) is not None
        # a command or arithmetic may set what it likes, `${...}` only by these signs
        is_of_variable = odd.startswith("${")
        may_set = not is_of_variable or SETS_WITHIN.search(odd) is not None
        if may_set and not is_followed:
            yield odd


def part_that_may_set(tokens: Sequence[Token]) -> str:
    """Return the text of a statement that may set variables."""
    written = written_of(tokens)
    if not _sets_nothing(tokens):
        return written
    expansions = ODDITIES.findall(written)
    return " ".join(expansions)


def _sets_nothing(tokens: Sequence[Token]) -> bool:
    """Return True for words that are printed and for conditions in brackets, in which only an
    expansion may set a variable."""
    kinds = {token.kind for token in tokens}
    if not kinds <= {"word", "redirect", "operator"}:
        return False
    first_words = set[str]()
    for command in commands_of(tokens):
        texts = [token.text for token in command]
        if texts[0] in ("if", "elif", "!"):
            del texts[0]
        first_words.add(texts[0] if texts else "")
    return first_words <= {"echo", *TESTS}


def may_end_elsewhere(tokens: Sequence[Token], written: str) -> bool:
    """Return True for a statement of several lines with quotes within quotes or a sign that is not
    read: it may end elsewhere than it seems."""
    kinds = {token.kind for token in tokens}
    is_torn = "torn" in kinds or "other" in kinds
    is_long = "\n" in written
    return is_torn and is_long
