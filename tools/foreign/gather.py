"""Collecting the precision settings of a Python file from the objects and names found by following
it."""

from dataclasses import replace
from typing import Any

from megaprec.dialects import nemo
from tools.foreign.account import Account, Saying
from tools.foreign.nemo_forms import bridge_fields, echo_of, held_plugins
from tools.foreign.plain import assumed, fields_of, is_dtype
from tools.foreign.statements import Statements
from tools.foreign.systems import (
    COLOSSALAI,
    ENVIRONMENT,
    MAKERS,
    NEMO,
    NXD_PACKAGES,
    SMP_POLICY,
    SMP_POLICY2,
    SMP_SCALER,
    VALUES,
    WITH_DTYPE,
    Maker,
    Spot,
    maker_of,
)
from tools.foreign.tables import Tables
from tools.foreign.values import Class, Entry, External, Function, Partial, Row, Scope, Table, Thing


class Gatherer:
    """One pass over the objects of a file. picked: ids of the objects that --pick limits it to;
    None: all."""

    def __init__(self, found: Statements, account: Account, picked: frozenset[int] | None) -> None:
        self.found = found
        self.account = account
        self.picked = picked
        self.handed_on, self.alive = _uses(found)
        self.tables = Tables(account, self._is_meant)
        self.nones: list[tuple[Spot, int, str]] = []

    def gather(self) -> None:
        """Add every saying of the file to the account."""
        for thing in self.found.things:
            if thing.function is not None:
                self._thing(thing, thing.function)
                if (echo := echo_of(thing, thing.function)) is not None:
                    self.account.echoes.append(echo)
        for saying in held_plugins(self.found.things, self._is_meant):
            self.account.add(saying)
        for scope in self.found.scopes:
            self.tables.search(self._as_table(scope))
        self._environment()
        self.account.take(
            *(
                thing.node
                for thing in self.found.things
                if thing.function and is_dtype(thing.function)
            )
        )
        self._clipping()
        self._refuse_unused()
        self._refuse_parts()
        self._strike_holders()

    # calls

    def _thing(self, thing: Thing, function: External) -> None:
        maker, elsewhere = maker_of(function)
        if function.last in VALUES:
            self._recipe(thing)
        elif function.last == "set_fp32_attr_to_module":
            self.account.take(thing.node)
            why = (
                "a mark in a model of your own counts when the model is made; "
                "precision.keep_fp32 says it of any model"
            )
            self.account.note(thing.line, f"{thing.text}: {why}")
        elif function.last == "TrainingArguments":
            self._training_arguments(thing)
        elif elsewhere and MAKERS[function.last][0].spot is None:
            return
        elif elsewhere:
            self.account.take(thing.node)
            why = (
                f"{function.last} comes from {elsewhere}: what it does is not known "
                f"here{assumed(thing.text)}"
            )
            self.account.refuse(thing.line, why)
        elif maker is not None:
            self._made(thing, function, maker)

    def _recipe(self, thing: Thing) -> None:
        """Read a recipe where it is passed to a call."""
        self.account.take(thing.node, *(entry.node for entry in fields_of(thing, ()).values()))

    def _made(self, thing: Thing, function: External, maker: Maker) -> None:
        self.account.take(thing.node)
        self.tables.read.add(id(thing))
        if not self._is_meant(thing):
            self._leave_out(thing, function, maker)
            return
        fields = fields_of(thing, maker.order)
        for name in [name for name in fields if name in maker.tables]:
            self._table_argument(maker.tables[name], fields.pop(name), name, thing)
        extra = self._extra_of_trainer(thing, fields) if function.last == "Trainer" else {}
        if maker.spot is None and not extra:
            return
        own = extra if maker.spot is None else self._own(fields, maker, thing)
        self.account.take(*(entry.node for entry in own.values()))
        own |= {key: Entry(value, thing.line) for key, value in maker.adds.items()}
        if function.name.startswith("megatron.bridge") or "library" in own:
            own = bridge_fields(own)
        if own or maker.spot not in (COLOSSALAI, NEMO):
            spot = maker.spot or NEMO
            name = f"{function.last}(...)"
            adds = maker.single or bool(extra)
            handed_on = id(thing) in self.handed_on
            self.account.add(Saying(spot, own, thing.line, name, thing.conditions, handed_on, adds))

    def _training_arguments(self, thing: Thing) -> None:
        """Read arguments of transformers' Trainer under FSDP, which set one dtype."""
        fields = fields_of(thing, ())
        if "fsdp" not in fields or not self._is_meant(thing):
            return
        on = {
            name: fields[name]
            for name in ("bf16", "fp16")
            if name in fields and fields[name].value is not False
        }
        self.tables.read.add(id(thing))
        self.account.take(
            thing.node, *(fields[name].node for name in ("bf16", "fp16") if name in fields)
        )
        dtypes = {"bf16": "bfloat16", "fp16": "float16"}
        for name, entry in on.items():
            value = dtypes[name] if entry.value is True else entry.value
            policy = {
                key: replace(entry, value=value)
                for key in ("param_dtype", "reduce_dtype", "buffer_dtype")
            }
            self.account.add(
                Saying(
                    SMP_POLICY, policy, entry.line, "TrainingArguments(...)", thing.conditions, True
                )
            )
            if (
                value == "float16"
            ):  # Accelerate, which the Trainer uses, makes torch's scaler with torch's defaults
                self.account.add(
                    Saying(
                        SMP_SCALER, {}, entry.line, "TrainingArguments(...)", thing.conditions, True
                    )
                )
        clip = fields.get("max_grad_norm", Entry(1.0, thing.line))
        self.account.add(
            Saying(
                ("smp", ""),
                {"max_grad_norm": clip},
                thing.line,
                "TrainingArguments(...)",
                adds=True,
            )
        )

    def _leave_out(self, thing: Thing, function: External, maker: Maker) -> None:
        """Name a call that does not count, and strike its arguments."""
        self.account.take(*(entry.node for entry in fields_of(thing, maker.order).values()))
        if maker.spot is not None:
            if id(thing) not in self.alive:
                why = "replaced before it is used"
            else:
                why = "not what --pick names"
            self.account.note(thing.line, f"{function.last}(...): {why}: left out")

    def _own(self, fields: dict[str, Entry], maker: Maker, thing: Thing) -> dict[str, Entry]:
        """Return the arguments that are keys of the table, by key."""
        own: dict[str, Entry] = {}
        remarked = {name: fields[name] for name in maker.remarks if name in fields}
        for why in dict.fromkeys(maker.remarks[name] for name in remarked):
            names = [name for name in remarked if maker.remarks[name] == why]
            self.account.note(
                remarked[names[0]].line or thing.line, f"{', '.join(names)}: not used, for {why}"
            )
        for name, entry in fields.items():
            if name in remarked:
                self.account.take(entry.node)
            elif name not in maker.unrelated and (maker.strict or name in maker.keys):
                own[maker.keys.get(name, name)] = replace(entry, line=entry.line or thing.line)
            elif name in maker.unrelated:
                self.account.take(entry.node)
        return own

    def _table_argument(self, spot: Spot, entry: Entry, name: str, holder: Thing) -> None:
        """Read an argument that is a table: a dict, an object with settings, the name of a recipe,
        or None."""
        value = entry.value
        line = entry.line or holder.line
        self.account.take(entry.node)
        values = value.items if isinstance(value, Row) else (value,)
        if value is None and holder.function is not None:
            self.nones.append((spot, line, f"{name} = None of {holder.function.last}(...)"))
        for item in values:
            if isinstance(item, Table):
                self.tables.say(spot, item, name, handed_on=True)
            elif isinstance(item, str):
                self._say_name(spot, item, Entry(item, line, entry.node), name)
            elif isinstance(item, Thing) and not self._says_itself(item):
                if item.function is None or item.why:
                    whose = (
                        f"{name} of {holder.function.last if holder.function else holder.text}(...)"
                    )
                    self.account.add(
                        Saying(spot, {name: Entry(item, line)}, line, whose, handed_on=True)
                    )
            elif isinstance(item, External) and not item.imported:
                self.account.add(
                    Saying(spot, {name: Entry(item, line)}, line, f"{name} of {holder.text}")
                )

    def _say_name(self, spot: Spot, text: str, entry: Entry, name: str) -> None:
        if spot == NEMO:
            key = "recipe" if text.replace("-", "_") in nemo.RECIPES else "precision"
            value = text.replace("-", "_") if key == "recipe" else text
            fields = {key: replace(entry, value=value)}
            self.account.add(Saying(spot, fields, entry.line, f'{name} "{text}"', handed_on=True))
        elif spot == ("colossalai", "fp16"):
            self.account.add(
                Saying(COLOSSALAI, {"mixed_precision": entry}, entry.line, name, adds=True)
            )
        else:
            self.account.refuse(entry.line, f'{name} = "{text}": must be a table')

    def _says_itself(self, thing: Thing) -> bool:
        return thing.function is not None and maker_of(thing.function)[0] is not None

    def _extra_of_trainer(self, thing: Thing, fields: dict[str, Entry]) -> dict[str, Entry]:
        """Read fields of the precision plugin that are given to a trainer, as in NeMo's
        documentation."""
        known = set(nemo.MegatronMixedPrecision.model_fields) - {"precision", "recipe", "v1"}
        extra = {name: entry for name, entry in fields.items() if name in known}
        for name, entry in fields.items():
            if name.startswith("**") and "placeholder" in getattr(entry.value, "why", ""):
                self.account.note(thing.line, f"{name}: `{entry.value.text}` {entry.value.why}")
        if extra:
            names = ", ".join(extra)
            self.account.note(
                thing.line,
                f"{names}: read as fields of the precision plugin; nl.Trainer has none such",
            )
        return extra

    # variables

    def _environment(self) -> None:
        """Read environment variables that the file sets for Neuron devices."""
        fields: dict[str, Entry] = {}
        for key, entry in self.found.outside.entries.items():
            name = str(key).removeprefix("env ")
            if name in ENVIRONMENT:
                fields[name] = entry
        if fields and (self._has("nxd") or self._imports(NXD_PACKAGES)):
            first = next(iter(fields.values()))
            self.account.add(Saying(("nxd", "environment"), fields, first.line, "os.environ"))

    def _has(self, system: str) -> bool:
        return any(saying.spot[0] == system for saying in self.account.sayings)

    def _imports(self, packages: tuple[str, ...]) -> bool:
        names = self.found.scopes[0].names.values()
        return any(
            isinstance(v, External) and v.imported and v.name.startswith(packages) for v in names
        )

    def _as_table(self, scope: Scope) -> Table:
        """Return the names of a scope as a table; those of the module with their places."""
        table = Table()
        for name, value in scope.names.items():
            if scope is self.found.scopes[0]:
                node, line = self.found.top_names.get(str(name), (0, 0))
            else:
                node = 0
                line = 0
            table.entries[name] = Entry(value, line, node)
        return table

    def _refuse_unused(self) -> None:
        """Refuse settings that are made and then not passed on: FSDP(model,
        mixed_precision=None)."""
        for spot, line, text in self.nones:
            made = next(
                (
                    s
                    for s in self.account.sayings
                    if s.spot == spot and not s.handed_on and not s.adds
                ),
                None,
            )
            if made is not None:
                self.account.refuse(
                    line, f"{text}, though {made.name} is made in line {made.line}: which is meant?"
                )

    def _refuse_parts(self) -> None:
        """Refuse tables and classes of a system without the one that has its dtype, which is then
        in another file."""
        for spot, what in WITH_DTYPE.items():
            own = [saying for saying in self.account.sayings if saying.spot[0] == spot[0]]
            if own and all(
                saying.adds or saying.spot[1].partition(".")[0] not in ("", "v1") for saying in own
            ):
                why = f"{what}, which says the dtype, is not in this file: give both in one"
                self.account.refuse(own[0].line, f"{own[0].name}: {why}")

    def _clipping(self) -> None:
        """Read clipping in a script with FSDP: `model.clip_grad_norm_(1.0)` and torch's
        function."""
        if not any(saying.spot in (SMP_POLICY, SMP_POLICY2) for saying in self.account.sayings):
            return
        for thing in self.found.things:
            if thing.function is not None and thing.function.last == "clip_grad_norm_":
                of_model = not thing.function.name.endswith("utils.clip_grad_norm_")
                fields = fields_of(thing, ("max_norm",) if of_model else ("parameters", "max_norm"))
                self.account.take(thing.node, *(entry.node for entry in fields.values()))
                own = {"max_grad_norm": fields["max_norm"]} if "max_norm" in fields else {}
                self.account.add(
                    Saying(("smp", ""), own, thing.line, "clip_grad_norm_(...)", adds=True)
                )

    # uses

    def _is_meant(self, value: Any) -> bool:
        """Return True if an object is used, and among those that were picked."""
        return id(value) in self.alive and (self.picked is None or id(value) in self.picked)

    def _strike_holders(self) -> None:
        """Strike names whose values are objects that were read or are followed, or were replaced
        later."""
        for entry in self.found.replaced:
            self.account.take(entry.node, *(inner.node for inner in _entries_within(entry.value)))
        for node in list(self.account.left):
            value = self.found.seen.get(node)
            if id(value) in self.tables.read or _holds(value, self.tables.read):
                self.account.take(node)


def _holds(value: Any, objects: set[int]) -> bool:
    """Return True if a value directly holds one of the objects, or is followed where it is used."""
    if isinstance(value, Row):
        return any(id(item) in objects for item in value.items)
    if isinstance(value, Thing) and value.function and value.function.last in VALUES:
        return True
    return isinstance(value, Function | Class | Partial)


def _entries_within(value: Any) -> list[Entry]:
    if not isinstance(value, Table):
        return []
    inner = list(value.entries.values())
    return inner + [entry for part in inner for entry in _entries_within(part.value)]


def _uses(found: Statements) -> tuple[set[int], set[int]]:
    """Return ids of the objects that are passed to a call, and of those that are not replaced
    before they are used."""
    handed_on: set[int] = set()
    for thing in found.things:
        entries = [*thing.positional, *thing.arguments.entries.values(), *thing.attributes.values()]
        for entry in entries:
            _inside(entry.value, handed_on)
    named = set(handed_on)
    for scope in found.scopes:
        for value in scope.names.values():
            _inside(value, named)
    for entry in found.outside.entries.values():
        _inside(entry.value, named)
    everything = {id(thing) for thing in found.things}
    return handed_on, named | (everything - found.assigned)


def _inside(value: Any, seen: set[int] | None = None) -> set[int]:
    """Add the ids of a value and of everything in it to `seen`, and return it."""
    seen = set() if seen is None else seen
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Row):
            waiting += value.items
        elif isinstance(value, Table):
            waiting += [entry.value for entry in value.entries.values()]
        elif isinstance(value, Thing):
            entries = [
                *value.positional,
                *value.arguments.entries.values(),
                *value.attributes.values(),
            ]
            waiting += [entry.value for entry in entries] + list(value.alternatives)
    return seen


def reachable(value: Any) -> frozenset[int]:
    """Return ids of an object and of everything in it, for --pick."""
    return frozenset(_inside(value))
