"""The first difference between the digests of two runs that ought to be the same.

Within a step the order is that of its computation: the samples, loss, norm and decision, then
moments and weights, then the loss scaler. Values are equal if all their bits are; NaN equals NaN.
The digest of the whole state never stands for its tables, nor they for it: one of them may have
been damaged or edited.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.training.step_records import STEP_FIELDS

# fields of a digest that are tables, of which its "state" is the digest
TABLES = ("progress", "tensors", "numbers")

Records = Mapping[int, Mapping[str, Any]]
LOADED = "loaded"


@dataclass(frozen=True)
class Parting:
    """The first difference. step: after which the states differ. what: the quantity that differs
    first.

    others: number of further quantities that differ in that step. values: of both runs. loaded:
    True if the state of that step differs as soon as it is loaded.
    """

    step: int
    what: str
    others: int
    values: tuple[str, str]
    loaded: bool = False

    def describe(self) -> str:
        """Return step, quantity and values in words."""
        when = "the state loaded after step" if self.loaded else "step"
        more = f" and {self.others} more" if self.others else ""
        values = " | ".join(self.values)
        return f"{when} {self.step}: {self.what}{more} ({values})"

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        fields: dict[str, Any] = {
            "step": self.step,
            "what": self.what,
            "others": self.others,
            "values": list(self.values),
        }
        if self.loaded:
            fields[LOADED] = True
        return fields


class _Quantity(NamedTuple):
    """One quantity of two digests, as text."""

    name: str
    ours: str
    theirs: str


def by_step(
    records: Sequence[Mapping[str, Any]], loaded: bool = False
) -> dict[int, Mapping[str, Any]]:
    """Return the digests of steps, by step; those of loaded states instead if `loaded`. The newest
    of a step counts."""
    digests: dict[int, Mapping[str, Any]] = {}
    for record in records:
        is_of_loaded_state = LOADED in record
        if is_of_loaded_state == loaded:
            digests[record["step"]] = record
    return digests


def first_parting(
    first_digests: Records, second_digests: Records, state_only: bool = False
) -> Parting | None:
    """Return the first difference in the steps that both have.

    state_only: compare the state, not the loss and norm of the step: `first_digests` are digests of
        states that were loaded.
    """
    for step in sorted(first_digests.keys() & second_digests.keys()):
        if first_digests[step] == second_digests[step]:
            continue  # most steps agree, and their tables are long
        quantities = _quantities(first_digests[step], second_digests[step], state_only)
        different = [quantity for quantity in quantities if quantity.ours != quantity.theirs]
        if different:
            first = different[0]
            values = (first.ours, first.theirs)
            return Parting(step, first.name, len(different) - 1, values, state_only)
    return None


def _quantities(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], state_only: bool
) -> Iterator[_Quantity]:
    """Yield everything that is compared of the digests of one step."""
    yield from _table_quantities("progress", ours["progress"], theirs["progress"])
    if not state_only:
        for key in STEP_FIELDS:
            # repr gives every bit of a number, and NaN equals NaN
            yield _Quantity(key, repr(ours.get(key)), repr(theirs.get(key)))
    # moments come before weights: an update computes them first
    kinds = sorted(
        {*ours["tensors"], *theirs["tensors"]},
        key=lambda tensor_kind: (tensor_kind == "weight", tensor_kind),
    )
    for tensor_kind in kinds:
        our_table = ours["tensors"].get(tensor_kind, {})
        their_table = theirs["tensors"].get(tensor_kind, {})
        yield from _table_quantities(tensor_kind, our_table, their_table)
    # the loss scaler is the last that a step changes
    yield from _table_quantities("optimizer", ours["numbers"], theirs["numbers"])
    # if a table differs, so does the digest of all of them: that is no further quantity
    if all(ours[table] == theirs[table] for table in TABLES):
        yield _Quantity("state", ours["state"], theirs["state"])


def _table_quantities(
    kind: str, our_table: Mapping[str, Any], their_table: Mapping[str, Any]
) -> Iterator[_Quantity]:
    """Yield the entries of a table in both digests: numbers, or the digests of tensors."""
    for name in sorted({*our_table, *their_table}):
        ours = _value_text(our_table, name)
        theirs = _value_text(their_table, name)
        yield _Quantity(f"{kind} {name}", ours, theirs)


def _value_text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name, "absent")
    return value if isinstance(value, str) else repr(value)
