"""The precision settings of a Python file or of a tree of data: those of the systems' classes,
functions, dicts and variables among its values."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megaprec.dialects import nemo
from tools.interop.foreign.findings import RUN_FILE, Findings, Settings
from tools.interop.foreign.nemo_recipes import bridge_fields, overwritten, recipe_settings
from tools.interop.foreign.plain import (
    ATTRIBUTES,
    FP8_RECIPES,
    Call,
    Entry,
    Row,
    Table,
    Unknown,
    fields_of,
    inner_table,
    is_dtype,
    spread,
)
from tools.interop.foreign.precision_words import shown
from tools.interop.foreign.systems import (
    BRIDGE,
    COLOSSALAI,
    ENVIRONMENT,
    FP16,
    LOOSE,
    MAKERS,
    MARKS,
    NEMO,
    NXD,
    NXD_ENVIRONMENT,
    SMP_POLICY,
    SMP_POLICY2,
    TABLES,
    WITH_DTYPE,
    Maker,
    maker_of,
    table_of,
)

DEEPEST = 8
OLD_ZERO = frozenset({"model_config", "optimizer_config", "level", "tensor_placement_policy"})
MASTERS = frozenset({"use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"})
PLUGIN_FIELDS = frozenset(nemo.MegatronMixedPrecision.model_fields) - {"precision", "recipe", "v1"}
DEFAULT_OF_NXD = "optimizer_config['zero_one_enabled']"
"""What NxD's documentation gives as the value of a key that has its default."""


class Gatherer:
    """One pass over the values of a file. calls: all of it. scopes: its tables of names."""

    def __init__(
        self,
        calls: Iterable[Call],
        scopes: Iterable[Table],
        environment: Mapping[str, Entry],
        findings: Findings,
    ) -> None:
        self.calls = list(calls)
        self.scopes = list(scopes)
        self.environment = environment
        self.findings = findings
        self.read: set[int] = set()  # ids of dicts and calls that are read
        self.unknown: list[tuple[str, Entry]] = []  # names whose value is not known
        self.used: set[int] = set()
        for call in self.calls:
            given = [*call.positional, *call.arguments.entries.values(), *call.attributes.values()]
            for entry in given:
                _add_inside(entry.value, self.used)

    def gather(self, named: Iterable[tuple[str, Entry]] = ()) -> None:
        """Add all settings to the findings. named: names, keys and attributes that are set."""
        for call in self.calls:
            self._call(call)
            for settings in recipe_settings(call):
                self.findings.add(settings)
            self._note_overwritten(call)
        for scope in self.scopes:
            self._search(scope)
        self._refuse_unknown()
        self._environment()
        self._clipping()
        self._refuse_parts()
        for _, entry in named:
            # names that stand for what is read
            values = entry.value.items if isinstance(entry.value, Row) else [entry.value]
            if any(id(value) in self.read for value in values):
                self.findings.take(entry)

    # calls

    def _note_overwritten(self, call: Call) -> None:
        fields = overwritten(call)
        self.findings.take(*fields.values())
        names = [name for name, entry in fields.items() if entry.value not in (None, False)]
        if names:
            listed = ", ".join(names)
            why = "where a precision plugin is given, it overwrites them"
            self.findings.note(call.line, f"{call.function.last}: {listed}: {why}")

    def _call(self, call: Call) -> None:
        last = call.function.last
        maker, elsewhere = maker_of(call.function)
        if last in FP8_RECIPES or is_dtype(call.function):
            # it is read where it is passed to another call
            self._take_call(call)
        elif last == "set_fp32_attr_to_module":
            self._take_call(call)
            why = "a mark in a model of your own counts when the model is made"
            self.findings.note(call.line, f"{call.text}: {why}; precision.keep_fp32 says it of any")
        elif elsewhere and MAKERS[last][0].table:
            self._take_call(call)
            why = f"{last} comes from {elsewhere}: what it does is not known here; {RUN_FILE}"
            self.findings.refuse(call.line, why)
        elif maker is not None:
            self._made(call, maker)

    def _take_call(self, call: Call) -> None:
        self.read.add(id(call))
        self.findings.take(Entry(call, node=call.node), *fields_of(call, ()).values())

    def _made(self, call: Call, maker: Maker) -> None:
        """Read the arguments of a class or function of a system."""
        fields = fields_of(call, maker.order)
        self.read.add(id(call))
        self.findings.take(Entry(call, node=call.node))
        if maker.strict:
            # of the others only what is read is accounted for
            self.findings.take(*fields.values())
        for name, why in maker.remarks.items():
            if name in fields:
                line = fields[name].line or call.line
                self.findings.note(line, f"{name}: not used, for {why}")
        for name, table in maker.tables.items():
            if name in fields:
                self._table_argument(table, fields.pop(name), name, call)
        if not maker.table:
            self._holder(call, fields)
            return
        keys = _keys_of(call, maker, fields)
        # without keys of their own they leave the dtype to others
        if keys or maker.table not in (COLOSSALAI, NEMO):
            self._add(maker.table, keys, call, maker.completes)

    def _add(self, table: str, fields: dict[str, Entry], call: Call, completes: bool) -> None:
        name = f"{call.function.last}(...)"
        is_used = id(call) in self.used
        settings = Settings(table, fields, call.line, name, call.guard, is_used, completes)
        self.findings.add(settings)

    def _holder(self, call: Call, fields: Mapping[str, Entry]) -> None:
        """Read what a holder of tables has beside them: a trainer may have the fields of NeMo's
        plugin, as in its documentation."""
        for name, entry in fields.items():
            if name.startswith("**"):
                self.findings.note(entry.line, f"{name} of {call.function.last}(...): not known")
        plugin_fields = dict[str, Entry]()
        for name, entry in fields.items():
            if name in PLUGIN_FIELDS:
                plugin_fields[name] = entry
        if call.function.last == "Trainer" and plugin_fields:
            why = "read as fields of the precision plugin; nl.Trainer has none such"
            self.findings.note(call.line, f"{', '.join(plugin_fields)}: {why}")
            self._add(NEMO, plugin_fields, call, completes=True)

    def _table_argument(self, table: str, entry: Entry, name: str, holder: Call) -> None:
        """Read an argument that is a table: a dict, an object with settings, the name of a recipe,
        or None."""
        line = entry.line or holder.line
        values = entry.value.items if isinstance(entry.value, Row) else [entry.value]
        self.findings.take(entry)
        settled = [value for value in values if isinstance(value, Call) and _is_made(value)]
        for value in values:
            if value is None:
                self._none(table, line, f"{name} = None of {holder.function.last}(...)")
            elif isinstance(value, Table):
                self._say(table, value, name, is_used=True)
            elif isinstance(value, str):
                self._name(table, Entry(value, line, entry.node), name, holder)
            elif settled and value not in settled:
                text = f"{shown(value)}: beside what sets {name}, and not read"
                self.findings.note(line, text)
            elif not settled:
                whose = f"{holder.function.last}(...)"
                fields = {f"argument {name}": Entry(value, line)}
                self.findings.add(Settings(table, fields, line, whose, is_used=True))

    def _none(self, table: str, line: int, text: str) -> None:
        """Refuse settings that are made and not passed on: FSDP(model, mixed_precision=None)."""
        for call in self.calls:
            maker, _ = maker_of(call.function)
            if maker is not None and maker.table == table and id(call) not in self.used:
                made = f"{call.function.last}(...) is made in line {call.line}"
                self.findings.refuse(line, f"{text}, though {made}: which is meant?")

    def _name(self, table: str, entry: Entry, name: str, holder: Call) -> None:
        """Read the name of a recipe or a precision, given for a table."""
        fields = {"mixed_precision": entry}
        if table == NEMO:
            recipe = entry.value.replace("-", "_")
            is_recipe = recipe in nemo.RECIPES
            key = "recipe" if is_recipe else "precision"
            fields = {key: replace(entry, value=recipe if is_recipe else entry.value)}
        elif table != FP16:
            self.findings.refuse(entry.line, f'{name} = "{entry.value}": must be a table')
            return
        table = NEMO if table == NEMO else COLOSSALAI
        is_used = table == NEMO
        settings = Settings(table, fields, entry.line, name, holder.guard, is_used, not is_used)
        self.findings.add(settings)

    # dicts and variables

    def _search(self, table: Table, depth: int = 0) -> None:
        """Add each dict that a system knows by name, also within other dicts."""
        entries = spread(table)
        for name, entry in entries.items():
            content = entry.value
            if isinstance(content, Unknown) and not isinstance(content, Call):
                self.unknown.append((name, entry))
            if not isinstance(content, Table) or depth > DEEPEST:
                continue
            settings_table = table_of(name, content, entries)
            if name == "zero" and OLD_ZERO & set(content.entries):
                self._take_within(content)
                why = "Colossal-AI's ZeRO before its plugins, with FP16 weights and a loss scale"
                remedy = "say the same with LowLevelZeroPlugin(...) or GeminiPlugin(...)"
                self.findings.refuse(entry.line, f"zero = dict(...): {why}, is not read; {remedy}")
            elif settings_table:
                self.findings.take(entry)
                self._say(settings_table, content, name, is_used=depth > 0)
                self._loose(settings_table.partition(".")[0], entries)
            else:
                self._search(content, depth + 1)
        # NxD's, without its telling name
        if table.line and MASTERS & set(entries):
            self._say(NXD, table, "the dict", is_used=False)

    def _refuse_unknown(self) -> None:
        """Refuse a dict of a system that is not known; one of a common name only if something else
        is of that system."""
        systems = {settings.system for settings in self.findings.settings}
        for name, entry in self.unknown:
            table = TABLES.get(name, "")
            is_meant = name not in MARKS or table.partition(".")[0] in systems
            if table and is_meant:
                self.findings.add(Settings(table, {"the keys": entry}, entry.line, name))

    def _loose(self, system: str, beside: Mapping[str, Entry]) -> None:
        """Add the single settings of a system that stand beside its dicts."""
        for name in LOOSE.get(system, ()):
            if name in beside:
                fields = {name: beside[name]}
                line = beside[name].line
                self.findings.add(Settings(system, fields, line, name, completes=True))

    def _say(self, table: str, content: Table, name: str, is_used: bool) -> None:
        """Add a dict as settings."""
        if id(content) in self.read:
            return
        fields = dict[str, Entry]()
        for key, entry in spread(content).items():
            text = getattr(entry.value, "text", "")
            is_default = table == NXD and text == DEFAULT_OF_NXD
            fields[key] = replace(entry, value=None) if is_default else entry
        if content.doubt:
            fields["the keys"] = Entry(content, content.line)
        self._take_within(content)
        self.findings.add(Settings(table, fields, content.line, name, is_used=is_used))

    def _take_within(self, content: Table) -> None:
        self.read.add(id(content))
        for entry in spread(content).values():
            self.findings.take(entry)
            if isinstance(entry.value, Table) and id(entry.value) not in self.read:
                self._take_within(entry.value)

    def _environment(self) -> None:
        """Read environment variables that the file sets for Neuron devices."""
        fields = dict[str, Entry]()
        for name in ENVIRONMENT:
            if name in self.environment:
                fields[name] = self.environment[name]
        systems = {settings.system for settings in self.findings.settings}
        if fields and NXD in systems:
            line = next(iter(fields.values())).line
            self.findings.add(Settings(NXD_ENVIRONMENT, fields, line, "os.environ"))

    def _clipping(self) -> None:
        """Read clipping in a script with FSDP: `model.clip_grad_norm_(1.0)`, torch's function."""
        tables = {settings.table for settings in self.findings.settings}
        if not tables & {SMP_POLICY, SMP_POLICY2}:
            return
        for call in self.calls:
            if call.function.last == "clip_grad_norm_":
                is_torchs = call.function.name.endswith("utils.clip_grad_norm_")
                order = ("parameters", "max_norm") if is_torchs else ("max_norm",)
                fields = fields_of(call, order)
                self._take_call(call)
                keys = {"max_grad_norm": fields["max_norm"]} if "max_norm" in fields else {}
                # a gradient is clipped in a step that is taken, whatever the condition
                self._add("smp", keys, replace(call, guard=""), completes=True)

    def _refuse_parts(self) -> None:
        """Refuse tables and classes of a system without the one that has its dtype, which is then
        in another file."""
        for system, what in WITH_DTYPE.items():
            of_system = [
                settings for settings in self.findings.settings if settings.system == system
            ]
            with_dtype = [
                one for one in of_system if not one.completes and one.table in (system, "nemo.v1")
            ]
            if of_system and not with_dtype:
                why = f"{what}, which says the dtype, is not in this file: give both in one"
                first = of_system[0]
                self.findings.refuse(first.line, f"{first.name}: {why}")


def _keys_of(call: Call, maker: Maker, fields: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the keys that the arguments of a call set in its maker's table."""
    keys = dict[str, Entry]()
    for name, entry in fields.items():
        is_other = maker.strict and name not in {*maker.unrelated, *maker.remarks}
        if name in (*maker.keys, ATTRIBUTES) or is_other:
            key = maker.keys.get(name, name)
            keys[key] = replace(entry, line=entry.line or call.line)
    for key, value in maker.adds.items():
        keys[key] = Entry(value, call.line)
    if call.function.name.startswith(BRIDGE) or "library" in keys:
        return bridge_fields(keys)
    return keys


def _is_made(call: Call) -> bool:
    return maker_of(call.function)[0] is not None


def _add_inside(value: Any, seen: set[int]) -> None:
    """Add the ids of a value and of everything in it."""
    if id(value) in seen or not isinstance(value, Row | Table | Unknown):
        return
    seen.add(id(value))
    values = list[Any]()
    if isinstance(value, Row):
        values += value.items
    if isinstance(inner := inner_table(value), Table):
        values += [entry.value for entry in inner.entries.values()]
    if isinstance(value, Unknown):
        values += [entry.value for entry in value.attributes.values()]
    for inner in values:
        _add_inside(inner, seen)
