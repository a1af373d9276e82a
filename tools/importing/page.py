"""The text of an imported run file: every key with the argument that it comes from, and what was
left out and why."""

from collections.abc import Iterator, Mapping

from tools.arguments import megatron_idle
from tools.arguments.deepspeed import idle
from tools.config.run_file import tables_of_a_run
from tools.console.toml import Setting, toml

WIDTH = 100


def run_text(
    keys: Mapping[str, Setting], notes: list[str], unused: Mapping[str, str], source: str
) -> str:
    """Return the run file. unused: arguments without a meaning here, by name, as they were
    given."""
    lines = [
        f"# Made by `megaprec import-args` from {source}. A comment says where a value comes from."
    ]
    for table in tables_of_a_run():
        own = {
            key.partition(".")[2]: entry
            for key, entry in keys.items()
            if key.startswith(f"{table}.")
        }
        if own:
            lines += ["", f"[{table}]", *_table(own)]
    if notes:
        lines += ["", "# To know:", *(line for note in notes for line in _wrapped(f"- {note}"))]
    if unused:
        lines += ["", "# Not needed here:", *_of_unused(unused)]
    return "\n".join(lines) + "\n"


def _table(own: Mapping[str, Setting]) -> Iterator[str]:
    shown = {name: f"{name} = {toml(entry.value)}" for name, entry in own.items()}
    width = min(40, max(map(len, shown.values())))
    for name, entry in own.items():
        yield f"{shown[name]:{width}}  # {_printable(entry.origin)}"


def _of_unused(unused: Mapping[str, str]) -> Iterator[str]:
    reasons = dict[str, list[str]]()
    for name, said in unused.items():
        reasons.setdefault(megatron_idle.WHY.get(name) or idle(name), []).append(said)
    for why, said in reasons.items():
        yield from _wrapped(f"- {', '.join(said)}: {why}")


def _wrapped(text: str) -> Iterator[str]:
    """Yield lines of a comment; the words of one argument may stand on two."""
    line = "#"
    for word in _printable(text).split(" "):
        if len(line) + len(word) >= WIDTH and line.strip("# "):
            yield line
            line = "#  "
        line += f" {word}"
    yield line


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
