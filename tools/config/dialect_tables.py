"""Another system's table in a run file, such as [precision.nxd]: its plan, and the keys it decides.

A run file states its precision in native keys or in one dialect. A dialect may also decide keys of
other tables, such as `parallel.zero`, which the run file may then not contradict.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from megaprec.dialects.translate import DIALECTS
from megaprec.errors import Problem, UserError
from tools.config.dialect_result import DialectResult
from tools.config.tables.native_keys import KEYS
from tools.config.tables.settings import Parallel
from tools.console.toml import Setting, toml

NATIVE_ONLY = ("precision.patience", "precision.on_nonfinite", "fp8.backend", "fp8.history")
"""Native keys that no dialect has words for."""
_TABLE_OF_ZERO = "optimizer_config"
_ZERO_OF_NXD = f"{_TABLE_OF_ZERO}.zero_one_enabled"


def resolve_dialect(
    settings: dict[str, Setting], known_keys: Collection[str] | None
) -> DialectResult:
    """Take the table of a dialect out of `settings`, add the keys of other tables that it decides,
    and return its plan, notes and problems; an empty result if there is no such table.

    settings: dotted keys with their value and its origin, changed in place.
    known_keys: all keys of a run file; a decision without such a key is then a problem.
    """
    tables = dict[str, dict[str, Setting]]()
    for name in DIALECTS:
        leaves = _take_table(settings, name)
        # an empty table counts too: it may decide all by its defaults
        if leaves is not None:
            tables[name] = leaves
    if not tables:
        return DialectResult()
    if len(tables) > 1:
        names = " and ".join(f"[precision.{name}]" for name in tables)
        return DialectResult(problems=(Problem.of("config.several_dialects", tables=names),))
    ((name, leaves),) = tables.items()
    return _resolve_table(settings, name, leaves, known_keys)


def _resolve_table(
    settings: dict[str, Setting],
    name: str,
    leaves: dict[str, Setting],
    known_keys: Collection[str] | None,
) -> DialectResult:
    """Return plan, notes and problems of the table of the dialect `name`, and add to `settings` the
    keys of other tables that it decides. leaves: the values of the table, by dotted path."""
    problems: list[str] = [*_native_conflicts(settings, name)]
    if name == "nxd":
        _add_zero_of_nxd(settings, leaves)
    # the path "" is the table itself
    origins = {f"precision.{name}.{path}": leaf.origin for path, leaf in leaves.items() if path}
    try:
        resolved = DIALECTS[name].resolve(_tree(leaves), origins)
    except UserError as error:
        return DialectResult(problems=(*problems, *error.problems))
    if "model.layers" in resolved.settings and (preset := settings.get("model.preset")):
        problems.append(
            Problem.of(
                "config.preset_beside_dialect",
                preset=toml(preset.value),
                origin=preset.origin,
                table=f"[precision.{name}]",
            )
        )
    for key, decision in resolved.settings.items():
        decided = Setting(decision.value, decision.origin)
        problems += _settle(settings, key, decided, decision.by_user, known_keys)
    return DialectResult(resolved.plan, resolved.notes, tuple(problems))


def _take_table(settings: dict[str, Setting], name: str) -> dict[str, Setting] | None:
    """Remove the keys of [precision.<name>] from `settings` and return them by dotted path; None if
    there are none."""
    table = f"precision.{name}"
    leaves = dict[str, Setting]()
    keys = [key for key in settings if key == table or key.startswith(f"{table}.")]
    for key in keys:
        setting = settings.pop(key)
        path = key.removeprefix(table).lstrip(".")
        leaves |= _leaves(path, setting.value, setting.origin)
    return leaves if keys else None


def _leaves(path: str, value: Any, origin: str) -> dict[str, Setting]:
    """Return the tree `value` at `path` by dotted paths; a table has an entry of its own, {}."""
    if not isinstance(value, dict):
        return {path: Setting(value, origin)}
    leaves: dict[str, Setting] = {path: Setting({}, origin)}
    for key, inner in value.items():
        leaves |= _leaves(f"{path}.{key}" if path else key, inner, origin)
    return leaves


def _tree(leaves: Mapping[str, Setting]) -> Any:
    """Return the nested tables that dotted paths describe; a later path replaces an earlier value
    that stands where it needs a table."""
    tree: dict[str, Any] = {"": {}}
    for path, leaf in leaves.items():
        # the table itself is at "", the path of its key "a.b" is "", "a", "b"
        names = ["", *path.split(".")] if path else [""]
        *tables, last = names
        node = tree
        for table in tables:
            if not isinstance(node.get(table), dict):
                node[table] = {}
            node = node[table]
        # a table is there already if one of its keys came before it
        is_empty_table = leaf.value == {}
        if is_empty_table and isinstance(node.get(last), dict):
            continue
        node[last] = leaf.value
    return tree[""]


def _native_conflicts(settings: Mapping[str, Setting], name: str) -> Iterator[Problem]:
    """Yield a problem for each native key beside a dialect, which decides it."""
    native_keys = set(chain.from_iterable(KEYS.values())).difference(NATIVE_ONLY)
    for key, setting in settings.items():
        if key in native_keys:
            yield Problem.of(
                "config.native_beside_dialect",
                key=key,
                value=toml(setting.value),
                origin=setting.origin,
                table=f"[precision.{name}]",
            )


def _add_zero_of_nxd(settings: Mapping[str, Setting], leaves: dict[str, Setting]) -> None:
    """Add parallel.zero to the keys of NxD, whose defaults depend on ZeRO-1."""
    # what should be a table and is none is refused as it is
    outer = (leaves.get(path) for path in ("", _TABLE_OF_ZERO))
    is_table = all(table is None or table.value == {} for table in outer)
    if is_table and _ZERO_OF_NXD not in leaves:
        zero = settings.get("parallel.zero", Setting(Parallel().zero, "default"))
        leaves[_ZERO_OF_NXD] = Setting(bool(zero.value), f"parallel.zero, {zero.origin}")


def _agree(key: str, written: object, decided: object) -> bool:
    """Return True if the run file's value of a key is what a dialect decides."""
    # ZeRO-2 and 3 shard the optimizer state as ZeRO-1 does
    if key == "parallel.zero" and written in (2, 3):
        return bool(decided)
    return written == decided


def _settle(
    settings: dict[str, Setting],
    key: str,
    decided: Setting,
    explicit: bool,
    known_keys: Collection[str] | None,
) -> Iterator[Problem]:
    """Add a dialect's decision on a run-file key to `settings`, unless the key is there. Yield a
    problem if no run file has the key, or if its value there contradicts the decision.

    explicit: True if a key that the dialect's user has written decided it; only then can it
        contradict the run file.
    """
    written = settings.get(key)
    if known_keys is not None and key not in known_keys:
        yield Problem.of(
            "config.dialect_unsupported", origin=decided.origin, value=toml(decided.value)
        )
    elif written is None:
        settings[key] = decided
    elif explicit and not _agree(key, written.value, decided.value):
        yield Problem.of(
            "config.dialect_contradicted",
            key=key,
            value=toml(written.value),
            origin=written.origin,
            decider=decided.origin,
            decided=toml(decided.value),
        )
