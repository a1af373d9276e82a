"""Texts without the secrets of URLs: names and passwords before a host, and what signs a request in
the query of `https://`.

Requests take URLs as they are; only what is shown, or kept for a reader, goes through `masked`.
"""

import re

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
    text = HTTP_USER.sub(rf"\1{MASK}@", text)
    text = PASSWORD.sub(rf"\1{MASK}@", text)
    return QUERY.sub(rf"\1{MASK}", text)
