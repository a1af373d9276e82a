"""Sizes of memory as text: 80GB (10^9 bytes), 79.6GiB (2^30)."""

import re

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str) -> tuple[int, str] | None:
    """Return the bytes of a size, and its unit as it was written, which may be "" for bytes. None
    if the text is no size."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in UNITS or not 0 < float(match[1]) < 10**18:
        return None
    number, unit = match.groups()
    return int(float(number) * UNITS[unit.upper()]), unit


def checked_size(text: str) -> str:
    """Return the text of a size with a unit. Raises ValueError for any other text."""
    size = parse_size(text)
    if size is None or not size[1]:
        raise ValueError('must be a size such as "2GB" (10^9 bytes) or "1.5GiB" (2^30)')
    return text


def bytes_of(text: str) -> int:
    """Return the bytes of a checked size."""
    size = parse_size(text)
    assert size is not None
    return size[0]
