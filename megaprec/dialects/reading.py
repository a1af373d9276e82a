"""Reader of another system's configuration, by that system's own keys and types, which reports all
problems at once.

A dialect describes each table of its system as a class of `Keys`, whose defaults are that system's.
`Reading` fills such a class from the user's configuration, remembers which keys are set, and
collects a line for every problem: the key, its value and its place, the system whose rule is
violated, and the nearest valid value.

The result of a dialect is a `Resolved`: the precision plan, and run-file keys that the same
configuration decides. Every decision carries its origin, the key that decided it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from megaprec.errors import UserError, did_you_mean
from megaprec.precision.plan import TORCH_DTYPES, PrecisionPlan


class Keys(BaseModel):
    """A table of a system's configuration: frozen, no unknown keys, no conversions, no nan. No key
    is required.

    Bad values raise pydantic's ValidationError (a ValueError) in the constructor, and UserError if
    read by `Reading`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


K = TypeVar("K", bound=Keys)


def _torch_dtype(value: object) -> object:
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


def member(kind: type[Enum]) -> BeforeValidator:
    """Return a validator that reads a member of `kind` from its name, in any case, with or without
    the class name."""

    def find(value: object) -> object:
        if not isinstance(value, str):
            return value
        name = value.rpartition(".")[2].upper()
        if name not in kind.__members__:
            raise ValueError(
                f"use one of {', '.join(kind.__members__)}{did_you_mean(name, kind.__members__)}"
            )
        return kind[name]

    return BeforeValidator(find)


class Unknown:
    """The value of a key that is set to an unknown value, such as one that a file computes; not the
    key's default."""

    def __repr__(self) -> str:
        return "(not known)"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Decision:
    """A value and the origin of its decision.

    given: True if a key that the user set decided it; False if a default or the system itself did.
    """

    value: Any
    origin: str
    given: bool = False


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


class Reading:
    """One reading of a configuration of `system`, whose tables are under the dotted key `prefix`.

    places: full dotted key -> the place in which the key was set, such as "file run.toml" or
        "command line".
    """

    def __init__(self, system: str, prefix: str, places: Mapping[str, str] | None = None) -> None:
        self.system = system
        self.prefix = prefix
        self.places = places or {}
        self.given: set[str] = set()
        self.unknown: set[str] = set()
        self.problems: list[str] = []

    def read(self, kind: type[K], values: object, table: str = "") -> K:
        """Return `values`, a mapping or an instance, as `kind`; a problem with a key is recorded,
        and the key left out.

        A key of `kind` whose value is UNKNOWN is recorded in `unknown`, and left out too.
        """
        if isinstance(values, kind):
            self.given |= {self._full(table, name) for name in values.model_fields_set}
            return values
        if not isinstance(values, Mapping):
            self.problems.append(
                f"{self._said(table, values)}: must be a table of keys ({self.system})"
            )
            values = {}
        wrong: set[str] = set()
        unknown = {
            name for name, value in values.items() if value is UNKNOWN and name in kind.model_fields
        }
        self.unknown |= {self._full(table, name) for name in unknown}
        values = {name: value for name, value in values.items() if name not in unknown}
        try:
            made = kind.model_validate(dict(values))
        except ValidationError as error:
            for found in error.errors(include_url=False):
                self.problems.append(self._explained(kind, table, found))
                wrong.add(str(found["loc"][0]))
            made = kind.model_validate(
                {name: value for name, value in values.items() if name not in wrong}
            )
        self.given |= {self._full(table, name) for name in values if name not in wrong}
        return made

    def _explained(self, kind: type[Keys], table: str, found: ErrorDetails) -> str:
        name = ".".join(str(part) for part in found["loc"])
        said = self._said(self._under(table, name), found["input"])
        whose = f"({self.system})"
        if found["type"] == "extra_forbidden":
            known = list(kind.model_fields)
            return (
                f"{said}: no such "
                f"key{did_you_mean(name, known) or '; there are ' + ', '.join(known)} {whose}"
            )
        if found["type"] == "is_instance_of":
            return f"{said}: must be a dtype, one of {', '.join(TORCH_DTYPES)} {whose}"
        message = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        message = message.replace("must be a valid boolean", "must be true or false")
        if found["type"] == "literal_error":
            choices = (
                str(found.get("ctx", {}).get("expected", ""))
                .replace("'", "")
                .replace(" or ", ", ")
                .split(", ")
            )
            message += did_you_mean(str(found["input"]), choices)
        return f"{said}: {message} {whose}"

    def refuse(self, key: str, value: object, why: str) -> None:
        """Record the problem that `key` cannot have `value`, and why."""
        self.problems.append(f"{self._said(key, value)}: {why} ({self.system})")

    def done(self) -> None:
        """Raise UserError with all recorded problems, if there are any."""
        if self.problems:
            raise UserError(*self.problems)

    def by(self, value: object, *keys: str) -> Decision:
        """Return `value` as decided by those of `keys` that are set; if none is, by the default of
        the first."""
        full = [self._full("", key) for key in keys]
        if given := [key for key in full if key in self.given]:
            return Decision(value, ", ".join(map(self._placed, given)), given=True)
        return Decision(value, f"{full[0]} ({self.system}'s default)")

    def idle(self, asked: Keys, keys: Iterable[str], why: str, table: str = "") -> tuple[str, ...]:
        """Return a note on those of `keys` that are set, to other values than their defaults, and
        change nothing."""
        defaults = type(asked).model_fields
        given = [key for key in keys if self._full("", self._under(table, key)) in self.given]
        idle = [key for key in given if getattr(asked, key) != defaults[key].default]
        names = ", ".join(self._under(table, key) for key in idle)
        if idle:
            return (f"{names}: {'they change' if len(idle) > 1 else 'it changes'} nothing {why}",)
        return ()

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
        own = {
            f.name: f"megaprec's own: {self.system} has no key for it"
            for f in fields(PrecisionPlan)
        }
        origin = own | {name: decision.origin for name, decision in decisions.items()}
        origin.pop("origin")
        try:
            plan = PrecisionPlan(**{name: decision.value for name, decision in decisions.items()})
        except UserError as error:
            raise UserError(
                *(f"[{self.prefix}]: {problem}" for problem in error.problems)
            ) from error
        return Resolved(replace(plan, origin=origin), settings, notes)

    def _under(self, table: str, name: str) -> str:
        return f"{table}.{name}" if table else name

    def _full(self, table: str, name: str) -> str:
        return f"{self.prefix}.{self._under(table, name)}"

    def _placed(self, full: str) -> str:
        return f"{full} ({self.places[full]})" if full in self.places else full

    def _said(self, key: str, value: object) -> str:
        full = f"{self.prefix}.{key}" if key else self.prefix
        place = f" ({self.places[full]})" if full in self.places else ""
        return f"{full} = {_shown(value)}{place}"


def _shown(value: object) -> str:
    """Return a value approximately as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
