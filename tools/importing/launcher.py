"""The launcher before a program: torchrun, deepspeed or python, and how many ranks it starts."""

import re
from collections.abc import Iterator, Sequence

PROGRAM = re.compile(r"(\S*/)?\w+\.py")
SIZES = {"nproc_per_node", "nproc-per-node", "nnodes", "num_gpus", "num_nodes"}


def program(words: Sequence[str]) -> int | None:
    """Return the index of the program among the words of a command, if arguments follow it."""
    at = next((i for i, word in enumerate(words) if PROGRAM.fullmatch(word)), None)
    if at is not None and any(word.startswith("--") for word in words[at + 1 :]):
        return at
    return None


def ranks(words: Sequence[str]) -> int | None:
    """Return the number of ranks that the options of torchrun or deepspeed start; None if they do
    not say it."""
    sizes = dict[str, str]()
    for name, value in _pairs(words):
        if name.lstrip("-") in SIZES:
            sizes[name.lstrip("-").replace("-", "_")] = value
    local = sizes.get("nproc_per_node", sizes.get("num_gpus", ""))
    nodes = sizes.get("nnodes", sizes.get("num_nodes", "1"))
    if local.isdecimal() and nodes.isdecimal() and len(local + nodes) < 12:
        return int(local) * int(nodes)
    return None


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        yield name, value if equals else words[i + 1] if i + 1 < len(words) else ""
