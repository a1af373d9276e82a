"""Conditions of a shell script, decided by what is known of its variables."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tools.interop.importing.shell_blocks import CaseBlock
from tools.interop.importing.shell_expansions import Expander
from tools.interop.importing.shell_sums import holds
from tools.interop.importing.shell_tokens import ODDITIES, Token, written_of
from tools.interop.importing.shell_words import HOLE

TESTS = ("[", "[[", "test")
BRACKETS_END = ("]", "]]")
BARE_VARIABLE = re.compile(r"\"?\$\{?(\w+)\}?\"?")
PATTERN = re.compile(r"(?<!\$)[*?]")
QUOTE = re.compile(r"[\"'\\]")
WILDCARD = re.compile(r"[*?\[]")


def decide(tokens: Sequence[Token], expander: Expander) -> bool | None:
    """Return whether conditions hold, joined by && and ||; None if one is not known."""
    result: bool | None = True
    for sign, condition in _joined(tokens):
        if sign not in ("&&", "||"):
            return None
        # as a shell: && after a condition that does not hold, || after one that does
        is_alternative = sign == "||"
        is_skipped = result == is_alternative
        if is_skipped:
            continue
        result = _holds(condition, expander)
        if result is None:
            return None
    return result


def _joined(tokens: Sequence[Token]) -> list[tuple[str, list[Token]]]:
    """Return the conditions between operators, each with the operator before it; the first has
    &&."""
    conditions: list[tuple[str, list[Token]]] = [("&&", [])]
    for token in tokens:
        if token.kind == "operator":
            conditions.append((token.text[:2], []))
        else:
            _, condition = conditions[-1]
            condition.append(token)
    return conditions


def _holds(tokens: Sequence[Token], expander: Expander) -> bool | None:
    """Return whether one condition holds; None if that is not known."""
    begin = tokens[0].text if tokens else ""
    if begin in ("true", "false"):
        return begin == "true"
    is_negated = begin == "!"
    test = tokens[1:] if is_negated else tokens
    words = _within_brackets(test)
    are_plain = all(word.kind == "word" for word in words)
    if not words or not are_plain or _has_pattern(words) or _has_command(words):
        return None
    operands = [operand(word, expander) for word in words]
    known = [text for text in operands if text is not None]
    if len(known) < len(operands):
        return None
    result = holds(known)
    return None if result is None else result != is_negated


def _within_brackets(tokens: Sequence[Token]) -> list[Token]:
    """Return what stands in `[ ... ]` or behind `test`; nothing for another command."""
    words = list(tokens)
    if words and words[0].text in TESTS:
        del words[0]
    if words and words[-1].text in BRACKETS_END:
        del words[-1]
    is_test = len(words) < len(tokens)
    return words if is_test else []


def _has_pattern(words: Sequence[Token]) -> bool:
    """Return True if a word is compared with a pattern, or if it may be one."""
    # behind the first word and the sign
    compared_with = words[2:]
    return any(PATTERN.search(word.text) for word in compared_with)


def _has_command(words: Sequence[Token]) -> bool:
    """Return True if a word holds what a command prints."""
    written = written_of(words)
    return any(odd.startswith(("$(", "`")) for odd in ODDITIES.findall(written))


def operand(token: Token, expander: Expander) -> str | None:
    """Return a word of a condition; None if it is not known. A variable that nothing sets is
    empty."""
    variables = expander.variables
    bare = BARE_VARIABLE.fullmatch(token.text)
    if bare:
        (name,) = bare.groups()
        if variables.is_absent(name):
            variables.absent[name] = None
            return ""
    text = expander.text(token.text, token.place)
    # what is not known leaves a hole in the text
    has_hole = HOLE.search(text) is not None
    return None if has_hole else text


def chosen_body(choice: CaseBlock, expander: Expander) -> Sequence[list[Token]] | None:
    """Return the statements of the branch that a `case` takes, which are none if no pattern fits.

    None: the word is not known, or a pattern that may come before the one that fits.
    """
    value = operand(choice.word, expander)
    if value is None:
        return None
    for patterns, body in choice.branches:
        known = _known_patterns(patterns, expander)
        if known is None:
            return None
        if any(fnmatchcase(value, pattern) for pattern in known):
            return body
    return []


def _known_patterns(patterns: Sequence[Token], expander: Expander) -> list[str] | None:
    """Return the patterns of a branch; None if one is not known."""
    texts = [operand(pattern, expander) for pattern in patterns]
    known = list[str]()
    for pattern, text in zip(patterns, texts, strict=True):
        if text is None:
            return None
        # in quotes these letters are no wildcards, and the text does not tell which are
        is_mixed = QUOTE.search(pattern.text) and WILDCARD.search(text)
        if is_mixed:
            return None
        known.append(text)
    return known
