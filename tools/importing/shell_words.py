"""The words of a shell script: commands, each of words, each of parts that are text or have to be
expanded.

Only the grammar is known here: quotes, comments, continued lines, variables, arrays, `$(...)` and
here-documents. Nothing is run.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaprec.errors import UserError

SPACE = " \t\r"
ENDS = "\n;&|()"
NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
REDIRECTION = re.compile(r"(?:\d*>>?&?|&>>?|\d*<(?!<))[ \t]*")
ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")


@dataclass(frozen=True)
class Part:
    """A part of a word. kind: text as it is; an expansion `${text}`; arithmetic; or something that
    would be run."""

    kind: Literal["text", "expand", "arithmetic", "run"]
    text: str
    quoted: bool


@dataclass(frozen=True)
class Raw:
    """A word before expansion. array: the words of NAME=(...); None for any other word."""

    parts: tuple[Part, ...]
    line: int
    array: "tuple[Raw, ...] | None" = None

    @property
    def plain(self) -> str:
        """Return the text of a word without quotes and expansions; "" for any other."""
        if all(p.kind == "text" and not p.quoted for p in self.parts):
            return "".join(p.text for p in self.parts)
        return ""

    @property
    def start(self) -> str:
        """Return the text that the word begins with."""
        if self.parts and self.parts[0].kind == "text" and not self.parts[0].quoted:
            return self.parts[0].text
        return ""


@dataclass(frozen=True)
class Command:
    """The words up to the end of a command. end: the sign that ends it, such as "&&" or a line
    end."""

    words: tuple[Raw, ...]
    line: int
    end: str


class Lexer:
    """Reads the commands of a text. name: of the file, for errors, which are UserErrors with the
    line."""

    def __init__(self, text: str, name: str, line: int = 1) -> None:
        self.text = text.replace("\\\r\n", "\\\n")
        self.name = name
        self.at = 0
        self.line = line

    def commands(self) -> list[Command]:
        """Return all commands."""
        found = list[Command]()
        while self.at < len(self.text):
            line = self.line
            words = self._words(ENDS)
            end = self._end()
            if words or end in ("&&", "||", "(", ")"):
                found.append(Command(tuple(words), line, end))
            if end == "\n":
                self._skip_documents(words)
        return found

    def _end(self) -> str:
        if self.at >= len(self.text):
            return ""
        sign = self.text[self.at]
        double = sign * 2 if self.text.startswith(sign * 2, self.at) and sign in ";&|" else sign
        self._advance(len(double))
        return double

    def _words(self, ends: str) -> list[Raw]:
        words = list[Raw]()
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in SPACE or (sign == "\n" and "\n" not in ends):
                self._advance(1)
            elif self.text.startswith("\\\n", self.at):
                self._advance(2)
            elif sign == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text.startswith(("<(", ">("), self.at):
                opening = self.text[self.at : self.at + 2]
                line = self.line
                words.append(
                    Raw((Part("run", f"{opening}{self._nested(opening, ')')})", False),), line)
                )
            elif "(" in ends and self.text.startswith("((", self.at) and _may_compute(words):
                line = self.line
                inside = Part("text", self._nested("((", "))"), True)
                words += [Raw((Part("text", "((", False),), line), Raw((inside,), line)]
            elif redirection := REDIRECTION.match(self.text, self.at):
                self._advance(redirection.end() - self.at)
                self._word(ends)
            elif sign in ends:
                return words
            else:
                words.append(self._word(ends))
        return words

    def _word(self, ends: str) -> Raw:
        parts = list[Part]()
        line = self.line
        began = self.at
        while self.at < len(self.text):
            sign = self.text[self.at]
            if (
                sign == "("
                and ARRAY.fullmatch("".join(p.text for p in parts))
                and parts[0].kind == "text"
            ):
                self._advance(1)
                inner = self._words(")")
                self._close(")", line)
                return Raw(_joined(parts), line, tuple(inner))
            if self.text.startswith("\\\n", self.at):
                self._advance(2)
            elif sign in SPACE or sign in ends or sign in "\n>":
                break
            else:
                parts.append(self._part(sign, quoted=False))
        if self.at == began:
            self._advance(1)
        return Raw(_joined(parts), line)

    def _part(self, sign: str, quoted: bool) -> Part:
        """Read a part that begins with `sign`; double quotes are read as parts of their own by
        `_quoted`."""
        if sign == "'" and not quoted:
            return self._single()
        if sign == '"' and not quoted:
            return self._double()
        if sign == "`":
            return Part("run", f"`{self._until('`')}`", quoted)
        if sign == "$":
            return self._dollar(quoted)
        if sign == "\\":
            self._advance(1)
            text = self.text[self.at : self.at + 1]
            self._advance(1)
            return Part("text", text if not quoted or text in '$`"\\' else f"\\{text}", True)
        self._advance(1)
        return Part("text", sign, quoted)

    def _single(self) -> Part:
        return Part("text", self._until("'"), True)

    def _double(self) -> Part:
        """Read double quotes whole. They are kept as one part: its inside is read again when it is
        expanded."""
        line = self.line
        began = self.at + 1
        self._advance(1)
        while self.at < len(self.text) and self.text[self.at] != '"':
            self._part(self.text[self.at], quoted=True)
        inside = self.text[began : self.at]
        self._close('"', line)
        return Part("expand", f'"{inside}', True)

    def inside(self) -> list[Part]:
        """Return the parts of the text as that of double quotes."""
        parts = list[Part]()
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self._advance(2)
            else:
                parts.append(self._part(self.text[self.at], quoted=True))
        return list(_joined(parts))

    def _dollar(self, quoted: bool) -> Part:
        rest = self.text[self.at + 1 : self.at + 3]
        if rest == "((":
            return Part("arithmetic", self._nested("$((", "))"), quoted)
        if rest[:1] == "(":
            return Part("run", f"$({self._nested('$(', ')')})", quoted)
        if rest[:1] == "{":
            return Part("expand", self._nested("${", "}"), quoted)
        if rest[:1] == '"' and not quoted:  # a text for translation
            self._advance(1)
            return self._double()
        if not quoted and (ansi := ANSI.match(self.text, self.at)):
            self._advance(ansi.end() - self.at)
            plain = "\\" not in ansi.group(1)
            if plain:
                return Part("text", ansi.group(1), True)
            return Part("run", ansi.group(), True)
        match = NAME.match(self.text, self.at + 1)
        if not match:
            self._advance(1)
            return Part("text", "$", quoted)
        name = match.group() if not match.group().isdigit() else match.group()[0]
        self._advance(1 + len(name))
        return Part("expand", name, quoted)

    def _nested(self, opening: str, closing: str) -> str:
        """Return what stands between `opening` and the `closing` that belongs to it."""
        line = self.line
        sign = opening[-1]
        depth = len(opening) - 1
        self._advance(len(opening))
        began = self.at
        open_signs = depth
        while self.at < len(self.text) and open_signs:
            here = self.text[self.at]
            if here in "'\"" and opening == "$(":
                self._part(here, quoted=False)
                continue
            open_signs += (here == sign) - (here == closing[0])
            self._advance(1)
        if open_signs:
            raise UserError.of(
                "import.unsupported_expansion",
                name=self.name,
                line=line,
                opening=opening,
                closing=closing,
            )
        return self.text[began : self.at - len(closing)]

    def _until(self, quote: str) -> str:
        line = self.line
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise UserError.of("import.open_quote", name=self.name, line=line, quote=quote)
        text = self.text[self.at + 1 : end]
        self._advance(end + 1 - self.at)
        return text

    def _close(self, sign: str, line: int) -> None:
        if self.text[self.at : self.at + 1] != sign:
            raise UserError.of("import.open_block", name=self.name, line=line, sign=sign)
        self._advance(1)

    def _skip_documents(self, words: Sequence[Raw]) -> None:
        """Skip the here-document that a command with `<<WORD` begins."""
        for i, word in enumerate(words):
            if word.start.startswith("<<") and not word.start.startswith("<<<"):
                rest = (
                    "".join(p.text.lstrip('"') for p in word.parts)
                    .removeprefix("<<")
                    .removeprefix("-")
                )
                if i + 1 < len(words):
                    following = "".join(p.text.lstrip('"') for p in words[i + 1].parts)
                else:
                    following = ""
                marker = re.compile(rf"^\s*{re.escape(rest or following)}\s*$", re.MULTILINE)
                match = marker.search(self.text, self.at)
                self._advance((match.end() if match else len(self.text)) - self.at)

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count


def _may_compute(words: Sequence[Raw]) -> bool:
    """Return True where `((` begins arithmetic: first in a command, and after `for`."""
    return not words or (len(words) == 1 and words[0].plain == "for")


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts with neighbouring texts of one kind joined."""
    made = list[Part]()
    for part in parts:
        if made and part.kind == made[-1].kind == "text" and part.quoted == made[-1].quoted:
            made[-1] = Part("text", made[-1].text + part.text, part.quoted)
        else:
            made.append(part)
    return tuple(made)
