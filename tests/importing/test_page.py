"""The tables of docs/from-megatron.md are those of the code."""

from collections.abc import Iterator, Mapping

from tests.importing.test_arguments import FACTS
from tests.project.test_readme import ROOT
from tools.interop.arguments import accelerate, deepspeed, torchtitan
from tools.interop.arguments.megatron import READ, REFUSED, is_unused, option

PAGE = (ROOT / "docs" / "from-megatron.md").read_text()


def quoted(names: Iterator[str] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def by_reason(why: Mapping[str, str]) -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for name, reason in why.items():
        found.setdefault(reason, []).append(option(name))
    return found


def rows() -> Iterator[str]:
    keys = dict[tuple[str, ...], list[str]]()
    for row in READ.values():
        keys.setdefault(row.keys, []).append(option(row.name))
    for ours, names in sorted(keys.items()):
        yield f"| {quoted([*ours])} | {quoted(names)} |"
    for why, names in by_reason({name: refused.why for name, refused in REFUSED.items()}).items():
        yield f"| {why} | {quoted(names)} |"
    for path, ours in (*deepspeed.READ.items(), *accelerate.READ.items()):
        yield f"| `{path}` | {quoted([*ours])} |"
    for path, row in torchtitan.READ.items():
        yield f"| `{path}` | {quoted([*row.keys])} |"
    titans = dict[str, list[str]]()
    for path, why in torchtitan.WHY.items():
        titans.setdefault(why, []).append(path)
    for why, paths in titans.items():
        yield f"| {why} | {quoted(paths)} |"


def test_every_row_of_the_tables_is_on_the_page() -> None:
    missing = [row for row in rows() if f"\n{row}\n" not in PAGE]
    assert not missing, "docs/from-megatron.md lacks these rows:\n" + "\n".join(missing)


def test_the_page_counts_the_arguments() -> None:
    unused = [name for name, _, _ in FACTS if is_unused(name[2:].replace("-", "_"))]
    for count in (len(READ), len(REFUSED), len(unused)):
        assert f"({count} arguments)" in PAGE
