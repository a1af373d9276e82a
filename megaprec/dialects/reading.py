"""Reader of another system's configuration, by that system's own keys and types, which reports all
problems at once.

A dialect describes each table of its system as a class of `Keys`, whose defaults are that system's.
`Reading` fills such a class from the user's configuration, remembers which keys are set, and
collects a line for every problem: the key, its value and its place, the system whose rule is
violated, and the nearest valid value.

The result of a dialect is a `Resolved`: the precision plan, and run-file keys that the same
configuration decides. Every decision carries its origin, the key that decided it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.kinds import literals_of
from megaprec.precision.plan import TORCH_DTYPES, PrecisionPlan


class Keys(BaseModel):
    """A table of a system's configuration: frozen, no unknown keys, no conversions, no nan. No key
    is required.

    Bad values raise pydantic's ValidationError (a ValueError) in the constructor, and UserError if
    read by `Reading`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,  # torch.dtype
    )


KeysT = TypeVar("KeysT", bound=Keys)


def _torch_dtype(value: object) -> object:
    """Return the dtype that a text names; anything else unchanged. Raises ValueError for a text
    that names none."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise ValueError(
            f"no such dtype: use {', '.join(TORCH_DTYPES)}{did_you_mean(name, TORCH_DTYPES)}"
        )
    return TORCH_DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


Dtype = Annotated[torch.dtype, BeforeValidator(_torch_dtype)]
"""A torch dtype, or its name with or without "torch."."""


def member(enum: type[Enum]) -> BeforeValidator:
    """Return a validator that reads a member of `enum` from its name, in any case, with or without
    the class name."""

    def member_of_name(value: object) -> object:
        """Return the member that a text names. Raises ValueError if it names none."""
        if not isinstance(value, str):
            return value  # a member, or what pydantic then refuses
        name = value.rpartition(".")[2].upper()
        names = enum.__members__
        if name not in names:
            raise ValueError(f"use one of {', '.join(names)}{did_you_mean(name, names)}")
        return enum[name]

    return BeforeValidator(member_of_name)


class Unknown:
    """The value of a key that is set to an unknown value, such as one that a file computes; not the
    key's default."""

    def __repr__(self) -> str:
        return "(not known)"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Decision:
    """A value and the origin of its decision.

    by_user: True if a key that the user set decided it, which the run file must not contradict;
        False if a default or the system itself did, which the run file may override.
    """

    value: Any
    origin: str
    by_user: bool = False


def all_of(names: Iterable[str], decision: Decision) -> dict[str, Decision]:
    """Return the same decision for each of several fields."""
    return dict.fromkeys(names, decision)


@dataclass(frozen=True)
class Resolved:
    """The meaning of a configuration.

    plan: the precision plan, with the origin of each field. settings: run-file key -> decision, for
    other keys that the configuration decides. notes: lines that tell the user how ambiguous keys
    were understood.
    """

    plan: PrecisionPlan
    settings: Mapping[str, Decision] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NO_MARGIN = (
    "only delayed scales have a margin; in Transformer Engine too it changes nothing, so it is "
    "left out"
)


MOST_KEYS = 16  # of a table that an error lists


def no_such_key(key: str, known: Sequence[str]) -> str:
    """Return why a key is refused, with the known one that is like it, or all of a few."""
    hint = did_you_mean(key, known)
    if not hint and len(known) <= MOST_KEYS:
        hint = f"; there are {', '.join(known)}"
    return f"no such key{hint or '; docs/migrating.md has those that are read'}"


# as pydantic writes a bound of loss scales
SMALL_FRACTION = re.compile(r"\b0\.0{5,}\d+")


def _explanation(table_class: type[Keys], key: str, details: ErrorDetails) -> str:
    """Return why a key of a table cannot have its value, from pydantic's error about it."""
    if details["type"] == "extra_forbidden":
        names = list(table_class.model_fields)
        return no_such_key(key, names)
    if details["type"] == "is_instance_of":
        return f"must be a dtype, one of {', '.join(TORCH_DTYPES)}"
    # pydantic's messages in our words
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("must be a valid boolean", "must be true or false")
    message = SMALL_FRACTION.sub(lambda number: f"{float(number[0]):.4g}", message)
    if details["type"] == "literal_error":
        message += did_you_mean(str(details["input"]), literals_of(details))
    return message


class Reading:
    """One reading of a configuration of `system`, whose tables are under the dotted key `prefix`.

    sources: full dotted key -> where the key was set, such as "file run.toml" or "command line".
    """

    def __init__(self, system: str, prefix: str, sources: Mapping[str, str] | None = None) -> None:
        self.system = system
        self.prefix = prefix
        self.sources = sources or {}
        # full dotted keys that the user set: to a known value, and to UNKNOWN
        self.set_keys: set[str] = set()
        self.unknown_keys: set[str] = set()
        self.problems: list[Problem] = []

    def read(self, table_class: type[KeysT], values: object, table: str = "") -> KeysT:
        """Return `values`, a mapping or an instance, as `table_class`; a problem with a key is
        recorded, and the key left out.

        A key of the class whose value is UNKNOWN is recorded in `unknown_keys`, and left out too.
        values: None is a table that is not there, which has no keys. table: dotted key of the table
        below the prefix; empty for the whole configuration.
        """
        if isinstance(values, table_class):
            # made in Python, where its constructor has checked it
            self.set_keys |= {self._full_key(table, name) for name in values.model_fields_set}
            return values
        if values is None:
            values = {}
        elif not isinstance(values, Mapping):
            self.refuse(table, values, "must be a table of keys")
            values = {}
        known: dict[str, Any] = {}  # what pydantic is to check
        for name, value in values.items():
            if value is UNKNOWN and name in table_class.model_fields:
                self.unknown_keys.add(self._full_key(table, name))
            else:
                known[name] = value
        try:
            keys = table_class.model_validate(dict(known))
        except ValidationError as error:
            for details in error.errors(include_url=False):
                names = [str(name) for name in details["loc"]]  # of the key, and within its value
                path = ".".join(names)
                why = _explanation(table_class, path, details)
                self.refuse(self._under(table, path), details["input"], why)
                wrong_name = names[0]
                # it may be gone: of a union there is an error for each of its types
                known.pop(wrong_name, None)
            # what is left is valid: reading goes on, so that all problems are found at once
            keys = table_class.model_validate(known)
        self.set_keys |= {self._full_key(table, name) for name in known}
        return keys

    def refuse(self, key: str, value: object, why: str) -> None:
        """Record the problem that `key` cannot have `value`, and why."""
        full_key = f"{self.prefix}.{key}" if key else self.prefix
        source = f" ({self.sources[full_key]})" if full_key in self.sources else ""
        self.problems.append(
            Problem.of(
                "dialect.wrong_value",
                key=full_key,
                value=_format_value(value),
                place=source,
                why=why,
                system=self.system,
            )
        )

    def raise_problems(self) -> None:
        """Raise UserError with all recorded problems, if there are any."""
        if self.problems:
            raise UserError(*self.problems)

    def decided_by(self, value: object, *keys: str) -> Decision:
        """Return `value` as decided by those of `keys` that are set; if none is, by the default of
        the first."""
        full_keys = [self._full_key("", key) for key in keys]
        set_keys = [key for key in full_keys if key in self.set_keys]
        if set_keys:
            origin = ", ".join(map(self._with_source, set_keys))
            return Decision(value, origin, by_user=True)
        return Decision(value, f"{full_keys[0]} ({self.system}'s default)")

    def idle_note(
        self,
        values: Keys,
        keys: Iterable[str],
        why: str,
        table: str = "",
    ) -> tuple[str, ...]:
        """Return a note on those of `keys` that are set, to other values than their defaults, and
        change nothing."""
        key_infos = type(values).model_fields
        idle: list[str] = []
        for key in keys:
            is_set = self._full_key(table, key) in self.set_keys
            # a key at its default says what is so anyway
            if is_set and getattr(values, key) != key_infos[key].default:
                idle.append(self._under(table, key))
        if not idle:
            return ()
        change = "they change" if len(idle) > 1 else "it changes"
        return (f"{', '.join(idle)}: {change} nothing {why}",)

    def always(self, value: object) -> Decision:
        """Return `value` as a decision that is fixed in this system."""
        return Decision(value, f"{self.system}, always")

    def resolved(
        self,
        decisions: Mapping[str, Decision],
        settings: Mapping[str, Decision],
        notes: tuple[str, ...] = (),
    ) -> Resolved:
        """Return the plan of `decisions` about fields of PrecisionPlan; other fields have
        megaprec's own defaults.

        The residual stream and attention are in the compute dtype, unless `decisions` contain them.
        """
        decisions = {**all_of(("residual", "attention"), decisions["compute"]), **decisions}
        values = {name: decision.value for name, decision in decisions.items()}
        no_key = f"megaprec's own: {self.system} has no key for it"
        origin = {plan_field.name: no_key for plan_field in fields(PrecisionPlan)}
        origin |= {name: decision.origin for name, decision in decisions.items()}
        origin.pop("origin")  # a field of the plan itself, which nothing decides
        try:
            plan = PrecisionPlan(**values)
        except UserError as error:
            # each key is valid, but a plan does not allow their values together
            problems = [problem.within(f"[{self.prefix}]: ") for problem in error.problems]
            raise UserError(*problems) from error
        return Resolved(replace(plan, origin=origin), settings, notes)

    def _under(self, table: str, name: str) -> str:
        return f"{table}.{name}" if table else name

    def _full_key(self, table: str, name: str) -> str:
        return f"{self.prefix}.{self._under(table, name)}"

    def _with_source(self, full_key: str) -> str:
        """Return a full key, and where it was set if that is known."""
        if full_key in self.sources:
            return f"{full_key} ({self.sources[full_key]})"
        return full_key


def _format_value(value: object) -> str:
    """Return a value approximately as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return str(value)
