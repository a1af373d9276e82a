"""Texts without the secrets of URLs: names and passwords before a host, and what signs a request in
the query of `https://`.

Requests take URLs as they are; only what is shown, or kept for a reader, goes through `masked`. A
run file, which is kept as it is, may have no URL with a password (`has_user`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
# up to the last @ before the path: a password may have one itself
HTTP_USER = re.compile(r"(https?://)[^\s/?#]*@", re.IGNORECASE)
# of other kinds a name alone may be a container (abfs://container@account)
PASSWORD = re.compile(r"(://[^\s/?#:]*:)[^\s/?#]*@")
# up to the next space, without the quotes and points that may follow a URL in a sentence
QUERY = re.compile(r"(https?://[^\s?]*\?)\S+?(?=[\"'()\[\]:;,.]*(?:\s|$))", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a text in which MASK stands for the secrets of its URLs."""
    if "://" not in text:
        return text
    return QUERY.sub(rf"\1{MASK}", _without_users(text))


def has_user(text: str) -> bool:
    """Return True if a URL in a text has a password, or a name that may be a key."""
    return _without_users(text) != text


def _without_users(text: str) -> str:
    text = HTTP_USER.sub(rf"\1{MASK}@", text)
    return PASSWORD.sub(rf"\1{MASK}@", text)


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
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {masked_inside(key): masked_inside(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked_inside(inner) for inner in value]
    return value
