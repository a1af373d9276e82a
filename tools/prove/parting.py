"""The first difference between the digests of two runs that ought to be the same.

Within a step the order is that of its computation: the samples, loss, norm and decision, then
moments and weights, then the loss scaler. Values are equal if all their bits are; NaN equals NaN.
The digest of the whole state never stands for its tables, nor they for it: one of them may have
been damaged or edited.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.training.state_digests import STEP_FIELDS

# fields of a digest; the first is made of the others
STATE = (
    "state",
    "progress",
    "tensors",
    "numbers",
)

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

    def said(self) -> str:
        """Return the place in words."""
        when = "the state loaded after step" if self.loaded else "step"
        more = f" and {self.others} more" if self.others else ""
        return f"{when} {self.step}: {self.what}{more} ({' | '.join(self.values)})"

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "step": self.step,
            "what": self.what,
            "others": self.others,
            "values": [*self.values],
        } | ({LOADED: True} if self.loaded else {})


def by_step(
    records: Sequence[Mapping[str, Any]], loaded: bool = False
) -> dict[int, Mapping[str, Any]]:
    """Return the digests of steps, by step; those of loaded states instead if `loaded`. The newest
    of a step counts."""
    return {record["step"]: record for record in records if (LOADED in record) == loaded}


def first_parting(ours: Records, theirs: Records, state_only: bool = False) -> Parting | None:
    """Return the first difference in the steps that both have.

    state_only: compare the state, not the loss and norm of the step: `ours` are digests of states
        that were loaded.
    """
    for step in sorted(ours.keys() & theirs.keys()):
        one = ours[step]
        other = theirs[step]
        if all(one[part] == other[part] for part in STATE) and (
            state_only or _of_step(one) == _of_step(other)
        ):
            continue
        apart = [found for found in _quantities(one, other, state_only) if found[1] != found[2]]
        if apart:
            what, *values = apart[0]
            return Parting(step, what, len(apart) - 1, (values[0], values[1]), state_only)
    return None


def _of_step(record: Mapping[str, Any]) -> list[str]:
    return [repr(record.get(key)) for key in STEP_FIELDS]


def _quantities(
    one: Mapping[str, Any], other: Mapping[str, Any], state_only: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, value), as text, of everything that is compared."""
    yield from _tables("progress", one["progress"], other["progress"])
    if not state_only:
        yield from ((key, repr(one.get(key)), repr(other.get(key))) for key in STEP_FIELDS)
    kinds = sorted({*one["tensors"], *other["tensors"]}, key=lambda kind: (kind == "weight", kind))
    for kind in kinds:
        yield from _tables(kind, one["tensors"].get(kind, {}), other["tensors"].get(kind, {}))
    yield from _tables("optimizer", one["numbers"], other["numbers"])
    if all(
        one[part] == other[part] for part in STATE[1:]
    ):  # else it differs because one of them does
        yield "state", one["state"], other["state"]


def _tables(
    kind: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*one, *other}):
        yield f"{kind} {name}", _text(one, name), _text(other, name)


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name, "absent")
    return value if isinstance(value, str) else repr(value)
