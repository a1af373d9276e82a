"""Texts without the secrets of URLs: names and passwords before a host, and what signs a request in
the query of `https://`.

Requests take URLs as they are; only what is shown, or kept for a reader, goes through `masked`. A
run file, which is kept as it is, may have no URL with a password (`has_password`). A URL that was
taken for a path has one slash (`s3:/key:secret@bucket`), and is masked too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MASK = "***"
# up to the last @ before the path: a password may have one itself
HTTP_USER = re.compile(r"(https?:/{1,2})[^\s/?#]*@", re.IGNORECASE)
# of other kinds a name alone may be a container (abfs://container@account); git://repo:ref@file and
# github://org:repo@ref/file have no password
PASSWORD = re.compile(
    r"(?<![\w+.-])(?!git(?:hub)?:)([a-z][a-z0-9+.-]*:/{1,2})([^\s/?#:]*:)[^\s/?#]+@", re.IGNORECASE
)
# a password with signs that end a host, as the / that every second key of S3 has: what follows the
# colon is no port and not MASK, and the host no address in brackets
ODD_PASSWORD = re.compile(
    r"(?<![\w+.-])(?!git(?:hub)?:)([a-z][a-z0-9+.-]*:/{1,2})[^\s/?#:@\[]*:"
    r"(?!\d+\b|@|\*{3}@)[^\s\"']+@",
    re.IGNORECASE,
)
# up to the next space or double quote, without the signs that may follow a URL in a sentence
QUERY = re.compile(
    r"(https?:/{1,2}[^\s?\"]*\?)[^\s\"]+?(?=['()\[\]{}<>:;,.]*(?:[\s\"]|$))", re.IGNORECASE
)


def masked(text: str) -> str:
    """Return a text in which MASK stands for the secrets of its URLs."""
    if ":/" not in text:
        return text
    return QUERY.sub(rf"\1{MASK}", _without_users(text))


def without_user_of(url: object, text: str) -> str:
    """Return what a library says of a URL, in which MASK stands for the name and password that the
    URL has before its host: libraries quote them without the rest, and only up to a slash in it."""
    user, at, _ = str(url).partition("://")[2].rpartition("@")
    if not at or ":" not in user:
        return text
    text = text.replace(user, MASK)
    before_slash, slash, _ = user.partition("/")
    return text.replace(before_slash, MASK) if slash and has_password(str(url)) else text


def has_password(text: str) -> bool:
    """Return True if a URL in a text has a password, or is `https://` with a name, which may be a
    key."""
    return _without_users(text) != text


def without_passwords(value: Any) -> Any:
    """Return a value of tables and lists without names and passwords of URLs that have a password
    (`has_password`)."""
    return _changed_inside(value, lambda text: _users_replaced(text, r"\1", r"\1"))


def _without_users(text: str) -> str:
    return _users_replaced(text, rf"\1{MASK}@", rf"\1\2{MASK}@")


def _users_replaced(text: str, web_user: str, password: str) -> str:
    """Return a text with other names and passwords before hosts, as templates of `re.sub`.

    web_user: where the name may be a key.
    password: where the name may stay.
    """
    text = HTTP_USER.sub(web_user, text)
    text = PASSWORD.sub(password, text)
    return ODD_PASSWORD.sub(web_user, text)


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value of tables and lists, names of keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def masked_inside(value: Any) -> Any:
    """Return a value of tables and lists with its texts `masked`."""
    return _changed_inside(value, masked)


def _changed_inside(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of tables and lists with a change of each text, names of keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _changed_inside(key, change): _changed_inside(inner, change)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed_inside(inner, change) for inner in value]
    return value
