"""What the product opens to others, and what it takes from them: read from its source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
# collectives that send any object do it as a pickle
OBJECTS = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
# each with the modules that may use it, for ranks of another launcher or for a trial on loopback
LISTENS = {
    "TCPStore": {"parallel/joining.py", "tools/training/elastic.py"},
    "create_server": {"parallel/joining.py", "tools/training/launch.py"},
    # torch's own rendezvous listens on all interfaces and unpickles
    "get_rendezvous_handler": set[str](),
    "listen": set[str](),
    "HTTPServer": set[str](),
    "ThreadingHTTPServer": set[str](),
}
# it alone unpickles, in a process of its own
UNPICKLES = "tools/convert/core/untrusted.py"


@cache
def names_by_module() -> dict[str, frozenset[str]]:
    """The names that each module uses, read once for all laws."""
    found = {}
    for package in ("megaprec", "parallel", "models", "tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ast.parse(path.read_text(encoding="utf-8"))
            found[path.relative_to(ROOT).as_posix()] = frozenset(names_in(module))
    return found


def names_in(module: ast.Module) -> Iterator[str]:
    """Names that are used or imported, without what stands before a dot."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for name in node.names for part in name.name.split("."))


def test_nothing_that_another_process_sent_is_unpickled() -> None:
    used = {path: names & (PICKLES | OBJECTS) for path, names in names_by_module().items()}
    assert {path: names for path, names in used.items() if names} == {UNPICKLES: {"pickle"}}


def test_what_listens_is_known() -> None:
    listening = {name: set[str]() for name in LISTENS}
    for path, names in names_by_module().items():
        for name in LISTENS.keys() & names:
            listening[name].add(path)
    assert listening == LISTENS
