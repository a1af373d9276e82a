"""The precision settings of a Python file or of a tree of data: those of the systems' classes,
functions, dicts and variables among its values."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megaprec.dialects import nemo
from tools.interop.foreign.findings import RUN_FILE, Findings, FoundSettings
from tools.interop.foreign.nemo_recipes import bridge_fields, recipe_settings
from tools.interop.foreign.plain import (
    ATTRIBUTES,
    Call,
    DictEntry,
    PlainDict,
    UnknownValue,
    fields_of,
    items_of,
    spread,
)
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
    NXD_MASTERS,
    SMP_POLICY,
    SMP_POLICY2,
    TABLES,
    WITH_DTYPE,
    Maker,
    maker_of,
    table_of,
)

DEEPEST = 8  # dicts within dicts that are searched
# Tables that may be given by a name: table -> the table and key that the name counts for, and names
# of recipes
BY_NAME = {
    FP16: (COLOSSALAI, "mixed_precision", ()),
    NEMO: (NEMO, "precision", nemo.RECIPES),
}


class Gatherer:
    """One pass over the values of a file. calls: all its calls. names: what it assigns, or its
    tree."""

    def __init__(self, calls: Iterable[Call], names: PlainDict, findings: Findings) -> None:
        self.calls = [*calls]
        self.names = names
        self.findings = findings
        self.unknown: list[tuple[str, DictEntry]] = []  # names whose value is not known
        self.left_out: list[tuple[str, int, str]] = []  # tables that an argument is None for

    def gather(self) -> None:
        """Add all settings to the findings."""
        for call in self.calls:
            self._call(call)
            for settings in recipe_settings(call):
                self.findings.add(settings)
        self._search(self.names)
        self._refuse_unknown()
        self._environment()
        self._clipping()
        self._refuse_left_out()
        self._refuse_parts()

    def _add(self, table: str, fields: dict[str, DictEntry], call: Call, completes: bool) -> None:
        """Add the settings that a call makes. completes: see `Maker`."""
        name = f"{call.function.last}(...)"
        if call.doubt:
            fields[ATTRIBUTES] = DictEntry(call, call.line)
        self.findings.add(FoundSettings(table, fields, call.line, name, completes))

    # calls

    def _call(self, call: Call) -> None:
        """Read a call of a class or function of a system. One of the same name from another package
        is refused if the system's is `strict` (see `Maker`), and otherwise passed over."""
        last = call.function.last
        maker, elsewhere = maker_of(call.function)
        makers_of_name = MAKERS.get(last, ())
        usual_maker = next(iter(makers_of_name), None)
        is_strict = usual_maker is not None and usual_maker.strict
        if last == "set_fp32_attr_to_module":
            self.findings.take(DictEntry(call))
            why = "a mark in a model of your own counts when the model is made"
            text = f"{call.text}: {why}; precision.keep_fp32 says it of any"
            self.findings.note(call.line, text)
        elif elsewhere and is_strict:
            self.findings.take(DictEntry(call))
            why = f"{last} comes from {elsewhere}: what it does is not known here; {RUN_FILE}"
            self.findings.refuse(call.line, why)
        elif maker is not None:
            self._made(call, maker)

    def _made(self, call: Call, maker: Maker) -> None:
        """Read the arguments of a class or function of a system."""
        fields = fields_of(call, maker.order)
        # of a holder only what is read is accounted for
        taken = DictEntry(None, node=call.node)
        if maker.strict:
            taken = DictEntry(call)
        self.findings.take(taken)
        for name, table in maker.tables.items():
            if name in fields:
                entry = fields.pop(name)
                self._table_argument(table, entry, name, call)
        for name, entry in fields.items():
            if name.startswith("**") and not maker.strict:
                text = f"{name} of {call.function.last}(...): not known"
                self.findings.note(entry.line, text)
        keys = _keys_of(call, maker, fields)
        # without keys of their own they leave the dtype to others
        may_be_empty = maker.table not in (COLOSSALAI, NEMO)
        if maker.table and (keys or may_be_empty):
            self._add(maker.table, keys, call, maker.completes)

    def _table_argument(self, table: str, entry: DictEntry, name: str, holder: Call) -> None:
        """Read an argument that is a table: a dict, an object with settings, the name of a recipe,
        or None."""
        self.findings.take(entry)
        for value in items_of(entry.value):
            # the arguments of a call that makes a table are read where it is made
            maker, _ = maker_of(value.function) if isinstance(value, Call) else (None, "")
            if value is None:
                text = f"{name} = None of {holder.function.last}(...)"
                self.left_out.append((table, entry.line, text))
            elif isinstance(value, PlainDict):
                self._say(table, value, name)
            elif isinstance(value, str) and table in BY_NAME:
                named_table, key, recipe_names = BY_NAME[table]
                recipe = value.replace("-", "_")
                if recipe in recipe_names:
                    fields = {"recipe": replace(entry, value=recipe)}
                else:
                    fields = {key: replace(entry, value=value)}
                self._add(named_table, fields, holder, completes=table == FP16)
            elif maker is None:
                fields = {f"argument {name}": replace(entry, value=value)}
                self._add(table, fields, holder, completes=False)

    def _refuse_left_out(self) -> None:
        """Refuse settings that are made beside a None: FSDP(model, mixed_precision=None)."""
        for table, line, text in self.left_out:
            for settings in self.findings.settings:
                if settings.table == table:
                    made = f"{settings.name} is made in line {settings.line}"
                    self.findings.refuse(line, f"{text}, though {made}: which is meant?")

    # dicts and variables

    def _search(self, table: PlainDict, depth: int = 0) -> None:
        """Add each dict that a system knows by name, also within other dicts."""
        entries = spread(table)
        for name, entry in entries.items():
            content = entry.value
            if isinstance(content, UnknownValue):
                self.unknown.append((name, entry))
            if not isinstance(content, PlainDict) or depth > DEEPEST:
                continue
            settings_table = table_of(name, content, entries)
            if settings_table:
                self.findings.take(entry)
                self._say(settings_table, content, name)
                system, _, _ = settings_table.partition(".")
                self._loose(system, entries)
            else:
                self._search(content, depth + 1)
        # NxD's, without its telling name
        if table.line and NXD_MASTERS & set(entries):
            self._say(NXD, table, "the dict")

    def _refuse_unknown(self) -> None:
        """Refuse a dict of a system that is not known; one of a common name only if something else
        is of that system."""
        systems = {settings.system for settings in self.findings.settings}
        for name, entry in self.unknown:
            table = TABLES.get(name, "")
            system, _, _ = table.partition(".")
            is_meant = name not in MARKS or system in systems
            if table and is_meant:
                fields = {"the keys": entry}
                self.findings.add(FoundSettings(table, fields, entry.line, name))

    def _loose(self, system: str, beside: Mapping[str, DictEntry]) -> None:
        """Add the single settings of a system that stand beside its dicts."""
        for name in LOOSE.get(system, ()):
            if name in beside:
                entry = beside[name]
                settings = FoundSettings(system, {name: entry}, entry.line, name, completes=True)
                self.findings.add(settings)

    def _say(self, table: str, content: PlainDict, name: str) -> None:
        """Add a dict as settings. table: of a system. name: by which the file has it."""
        fields = spread(content)
        if content.doubt:
            fields["the keys"] = DictEntry(content, content.line)
        self.findings.add(FoundSettings(table, fields, content.line, name))

    # the whole

    def _environment(self) -> None:
        """Read environment variables that the file sets for Neuron devices."""
        variables = self.names.get("os.environ") or PlainDict()
        fields = {key: entry for key, entry in variables.entries.items() if key in ENVIRONMENT}
        if variables.doubt and fields:
            fields["the variables"] = DictEntry(variables)
        systems = {settings.system for settings in self.findings.settings}
        if fields and NXD in systems:
            first_entry = next(iter(fields.values()))
            line = first_entry.line
            self.findings.add(FoundSettings(NXD_ENVIRONMENT, fields, line, "os.environ"))

    def _clipping(self) -> None:
        """Read clipping in a script with FSDP: `model.clip_grad_norm_(1.0)`, torch's function."""
        tables = {settings.table for settings in self.findings.settings}
        if tables.isdisjoint({SMP_POLICY, SMP_POLICY2}):
            return
        for call in self.calls:
            if call.function.last != "clip_grad_norm_":
                continue
            # torch's function has the parameters first, FSDP's method is the model's
            is_torchs = call.function.name.endswith("utils.clip_grad_norm_")
            order = ("parameters", "max_norm") if is_torchs else ("max_norm",)
            limit = fields_of(call, order).get("max_norm")
            self.findings.take(DictEntry(call))
            if limit is not None:
                # a gradient is clipped in a step that is taken, whatever the condition
                keys = {"max_grad_norm": limit}
                settings = FoundSettings("smp", keys, call.line, call.text, completes=True)
                self.findings.add(settings)

    def _refuse_parts(self) -> None:
        """Refuse tables and classes of a system without the one that has its dtype, which is then
        in another file."""
        all_settings = self.findings.settings
        for system, what in WITH_DTYPE.items():
            of_system = [settings for settings in all_settings if settings.system == system]
            tables_with_dtype = (system, "nemo.v1")
            with_dtype = [settings for settings in of_system if settings.table in tables_with_dtype]
            if of_system and all(settings.completes for settings in with_dtype):
                first = of_system[0]
                why = f"{what}, which says the dtype, is not in this file: give both in one"
                self.findings.refuse(first.line, f"{first.name}: {why}")


def _keys_of(call: Call, maker: Maker, fields: Mapping[str, DictEntry]) -> dict[str, DictEntry]:
    """Return the keys that the arguments of a call set in its maker's table. fields: the
    arguments, without those that are tables."""
    keys = dict[str, DictEntry]()
    for name, entry in fields.items():
        # of a strict one all arguments count, but those known to have nothing to do with precision
        is_other = maker.strict and name not in maker.unrelated
        if name in maker.keys or is_other:
            key = maker.keys.get(name, name)
            line = entry.line or call.line
            keys[key] = replace(entry, line=line)
    for key, value in maker.adds.items():
        keys[key] = DictEntry(value, call.line)
    # "library" is among what the makers of Megatron-Bridge add
    if call.function.name.startswith(BRIDGE) or "library" in keys:
        return bridge_fields(keys)
    return keys
