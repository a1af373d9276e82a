"""JSON and TOML from outside, and the files and paths that hold them.

Both formats may nest without end, have integers of any length and, in JSON, text that is no
Unicode. Python's parsers answer with a RecursionError, or with values on which later code fails.
Here all of it is a ValueError with one line. A file is read only if it is a regular one of bounded
size: a pipe or a device may never end.
"""

import errno
import io
import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from megaprec.durable import reading
from megaprec.errors import UserError

NESTING = 100  # levels; what megaprec, Hugging Face and other trainers write has some ten
TOO_DEEP = f"nested more than {NESTING} levels deep"
# of an integer: every float64 can hold its size, and states of random number generators have 128
MOST_BITS = 128
MOST_VALUES = (
    1 << 24
)  # of one text: a list without items takes 64 bytes of memory, written in three
MOST_BYTES = 1 << 30  # of a file that is read whole
MOST_SETTINGS = 1 << 20  # bytes of a file that people write settings into
_NAME = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_DEEP_KEY = re.compile(rf"(?<![\w-]){_NAME}(?:[ \t]*\.[ \t]*{_NAME}){{{NESTING},}}")
# bytes, on Linux
LONGEST_NAME = 255
LONGEST_PATH = 4095


def parse_json(text: str | bytes, check_values: bool = True) -> Any:
    """Return the value of a JSON text.

    check_values: False leaves unchecked how deep values are nested, whether integers are huge and
        texts are Unicode, and takes a third of the time: for a text that another reader, which is
        strict on them, reads too.
    Raises ValueError if it is not JSON, nested too deeply or no Unicode, has a huge integer, a key
    twice (programs differ in which of the two they take), or more than MOST_VALUES values.
    """
    require_few_values(text, MOST_VALUES)
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    if check_values:
        _check(value)
    return value


def require_few_values(text: str | bytes, most: int) -> None:
    """Raise ValueError for a JSON text that may have more than `most` values: each begins behind
    a comma or a bracket."""
    # a text has no more values than characters
    if len(text) <= most:
        return
    signs: Any = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    if sum(text.count(sign) for sign in signs) > most:
        raise ValueError(f"it has more than {most:,} values")


def require_shallow(value: Any) -> None:
    """Raise ValueError for a JSON value that is nested more than NESTING levels deep."""
    level: list[Any] = [value]
    for _ in range(NESTING):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise ValueError(TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object. Raises ValueError if it has a key twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"it has the key {repeated!r} twice")
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises ValueError if it is not TOML, or nested too
    deeply."""
    # Python's parser takes memory with the square of a dotted key's length.
    if _DEEP_KEY.search(text):
        raise ValueError(f"it has a key of more than {NESTING} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    _check(table)
    return table


def _check(value: Any) -> None:
    """Raise ValueError for a value of JSON or TOML that is nested more than NESTING levels deep,
    or has a huge integer or a text with half of a surrogate pair."""
    level: list[Any] = [value]  # all values at one depth of nesting
    for _ in range(NESTING):
        texts: list[str] = []
        integers: list[int] = []
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                texts.append(item)
            elif isinstance(item, int):
                integers.append(item)
            elif isinstance(item, dict):
                texts += item
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        _check_plain(texts, integers)
        if not inner:
            return
        level = inner
    raise ValueError(TOO_DEEP)


def _check_plain(texts: list[str], integers: list[int]) -> None:
    """Raise ValueError for text with half of a surrogate pair, and for huge integers."""
    if not all(text.isascii() or is_unicode(text) for text in texts):
        raise ValueError("it has text that is no Unicode (half of a surrogate pair)")
    if any(abs(integer) >> MOST_BITS for integer in integers):
        raise ValueError(f"it has an integer of more than {MOST_BITS} bits")


def is_unicode(text: str) -> bool:
    """Return True if `text` can be written as UTF-8: arguments that are not UTF-8 and halves of
    surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_regular(path: Path, max_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`. Raises OSError, with `path` as its
    filename."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Not max_bytes: memory is taken for as many bytes as are asked for.
        content = file.read(size + 1) if size <= max_bytes else b""
        # more than its size: it grows while it is read, or is a file of the kernel, without a size
        if len(content) > size:
            content += file.read(max_bytes + 1 - len(content))
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EOVERFLOW, f"it is larger than {max_bytes:,} bytes", str(path))
    return content


def read_text(path: Path, max_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most `max_bytes`. Raises OSError or
    UnicodeDecodeError."""
    content = io.BytesIO(read_regular(path, max_bytes))
    return io.TextIOWrapper(content, encoding="utf-8").read()  # any line end is \n


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError if the file is missing or holds something
    else."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UserError.of("megaprec.file_unreadable", path=path, error=error) from error
    if not isinstance(content, dict):
        raise UserError.of("megaprec.not_json_object", path=path)
    return content


def path_problem(path: str) -> str:
    """Return the reason why no file can have this path; empty if one can."""
    if "\0" in path or not is_unicode(path):
        return "a path of UTF-8 text without NUL is needed"
    longest_name = max(len(name.encode()) for name in path.split("/"))
    if longest_name > LONGEST_NAME or len(path.encode()) > LONGEST_PATH:
        return f"a name has {LONGEST_NAME} bytes at most, and a path {LONGEST_PATH}"
    return ""


def home_problem(path: str) -> str:
    """Return the reason why a leading ~ or ~USER stands for no home folder; empty if it does, or
    there is none."""
    if not path.startswith("~") or os.path.expanduser(path) != path:
        return ""
    home = path.partition("/")[0]
    return (
        f"no home folder is known for {home}; write the whole path, or ./{home} if that is a file "
        "or folder here"
    )


def home_expanded(path: str) -> str:
    """Return the path with the home folder in place of a leading ~ or ~USER. Raises UserError if
    none is known."""
    if problem := home_problem(path):
        raise UserError.of("megaprec.home_unknown", path=path, problem=problem)
    return os.path.expanduser(path)
