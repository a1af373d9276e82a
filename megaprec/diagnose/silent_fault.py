"""The verdict about ranks that computed or hold something wrong: which rank it was, and where it
began.

Every rank gives a `Testimony`: digests of what it holds, of the messages that it sent and received,
and traces of one micro-batch. The micro-batch was computed in the training step ("real") and again
on another replica ("again"). If these differ, every replica computes it twice more ("first",
"second"). A replica that differs from itself, or from the majority of replicas, is at fault; if all
agree now, the fault was transient, and the one that differs from the majority is the one that erred
then. Two replicas that differ steadily accuse each other: nothing tells which is right.

Within a replica, the first difference in order of computation names the rank. Tensor-parallel ranks
that see it at the same moment, after a sum of their parts, are all named.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megaprec.diagnose.bit_digest import hexadecimal
from megaprec.diagnose.border_trace import BACKWARD, Entry, Moment

Row = tuple[Moment, str, str, str]  # moment, what, module, digest
Trace = tuple[Row, ...]
Replica = Mapping[tuple[int, int], Trace]  # traces of a replica's ranks, by (pp, tp)


@dataclass(frozen=True)
class Testimony:
    """The digests that one rank contributes to the verdict.

    place: its (pp, dp, tp). weights, gradients: digests by key. strayed: parameters whose weights
    are not their masters, rounded. messages: digests by message and side, "sent" or "received".
    traces: by name.
    """

    rank: int
    host: str
    place: tuple[int, int, int]
    weights: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)
    strayed: Sequence[str] = ()
    messages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    traces: Mapping[str, Trace] = field(default_factory=dict)

    @staticmethod
    def read(said: Mapping[str, Any]) -> "Testimony":
        """Return the testimony of which `asdict` made JSON values."""
        traces = {
            name: tuple(
                (Moment(*moment), what, module, bits) for moment, what, module, bits in trace
            )
            for name, trace in said["traces"].items()
        }
        return Testimony(**{**said, "place": tuple(said["place"]), "traces": traces})


def rows(entries: Iterable[Entry]) -> Trace:
    """Return the entries of a trace, read from the device."""
    return tuple((e.moment, e.what, e.module, hexadecimal(e.digest)) for e in entries)


@dataclass(frozen=True)
class Fault:
    """A fault, and who is to blame for it.

    kind: "weights", "message", "computation", "gradients". what: the tensor in which it is first
    seen. module: its module, "" if there is none. direction: "forward", "backward" or "". ranks,
    hosts: those to blame. certain: False if only some of them are, and nothing tells which.
    transient: True if it did not happen again. sound: True if all that the ranks hold agrees, so
    that it can be saved.
    """

    kind: str
    what: str
    module: str
    direction: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    certain: bool
    transient: bool
    sound: bool

    def fields(self) -> dict[str, Any]:
        """Return the fault as JSON values."""
        return {**asdict(self), "ranks": list(self.ranks), "hosts": list(self.hosts)}

    def __str__(self) -> str:
        names = [
            f"rank {rank} on host {host}" for rank, host in zip(self.ranks, self.hosts, strict=True)
        ]
        who = (" and " if self.certain and self.kind != "message" else " or ").join(names)
        if self.kind == "weights":
            return f"{who} holds wrong bits of {self.what}"
        if self.kind == "message":
            return f"{self.what} was not received as it was sent: {who}"
        again = ", and right when computed again" if self.transient else ""
        return (
            f"{who} computed {self.what} wrongly in the {self.direction or 'reduction'} pass{again}"
        )


def judge(
    said: Sequence[Testimony], suspect: int | None, comparable: bool, exact: bool
) -> Fault | None:
    """Return the verdict; None if the micro-batch cannot be judged, because its computation is not
    deterministic.

    said: the testimonies of all ranks, by rank. suspect: the data-parallel rank whose micro-batch
    was not computed again as it was; None if there is none. comparable: True if all replicas
    compute alike. exact: True if a sound rank is known to compute the same bits each time.
    """
    unequal = _unequal(said, [one.weights for one in said])
    alone = [one for one in said if one.strayed]
    sound = not unequal and not alone
    if unequal is not None:
        what, blamed, certain = unequal
        if not certain and alone:
            blamed = alone
            certain = True
        return _fault("weights", what, blamed, certain, sound)
    if alone:
        return _fault(
            "weights",
            f"weight {alone[0].strayed[0]}, which are not its masters rounded",
            alone,
            True,
            sound,
        )
    if (lost := _lost_message(said)) is not None:
        return lost
    if suspect is not None:
        return _computation(said, suspect, comparable, exact)
    if (unequal := _unequal(said, [one.gradients for one in said])) is not None:
        return _fault("gradients", *unequal, sound)
    return None


def _fault(
    kind: str,
    what: str,
    blamed: Sequence[Testimony],
    certain: bool,
    sound: bool,
    transient: bool = False,
) -> Fault:
    hosts = tuple(one.host for one in blamed)
    return Fault(
        kind, what, "", "", tuple(one.rank for one in blamed), hosts, certain, transient, sound
    )


def _unequal(
    said: Sequence[Testimony], digests: Sequence[Mapping[str, str]]
) -> tuple[str, Sequence[Testimony], bool] | None:
    """Return the first thing that ranks hold unequally, who is to blame, and True if a majority
    says so."""
    for key in dict.fromkeys(key for one in digests for key in one):
        holders = [(one, held[key]) for one, held in zip(said, digests, strict=True) if key in held]
        (common, count), *others = Counter(bits for _, bits in holders).most_common()
        if others:
            certain = 2 * count > len(holders)
            return key, [one for one, bits in holders if not certain or bits != common], certain
    return None


def _lost_message(said: Sequence[Testimony]) -> Fault | None:
    """Return the fault of the first message that was received with other bits than it was sent
    with."""
    sent = {
        (one.place[1:], name): (one, both["sent"])
        for one in said
        for name, both in one.messages.items()
        if "sent" in both
    }
    for one in said:
        for name, both in one.messages.items():
            sender, bits = sent.get((one.place[1:], name), (one, ""))
            if "received" in both and bits and both["received"] != bits:
                return _fault("message", name, [sender, one], False, True, transient=True)
    return None


def _computation(
    said: Sequence[Testimony], suspect: int, comparable: bool, exact: bool
) -> Fault | None:
    count = 1 + max(one.place[1] for one in said)
    able = range(count) if comparable else [suspect]
    first, second = ({r: _replica(said, r, name) for r in able} for name in ("first", "second"))
    unsteady = [r for r in able if first[r] != second[r]]
    if unsteady:
        if not exact and len(unsteady) == len(able):
            return None
        return _blame(said, [(r, first[r], second[r]) for r in unsteady], transient=True)
    standing = {r: sum(first[r] == first[other] for other in able) for r in able}
    judge = max(able, key=lambda r: standing[r])
    if 2 * standing[judge] <= len(able):
        one, other, *_ = able
        return _blame(
            said,
            [(one, first[one], first[other]), (other, first[other], first[one])],
            certain=False,
        )
    wrong = [(r, first[r], first[judge]) for r in able if first[r] != first[judge]]
    if wrong:
        return _blame(said, wrong)
    borrower = (suspect + 1) % count if comparable else suspect
    was = [
        (suspect, _replica(said, suspect, "real")),
        (borrower, _replica(said, borrower, "again")),
    ]
    erred = [(r, trace, first[judge]) for r, trace in was if trace != first[judge]]
    return _blame(said, erred, transient=True) if erred else None


def _replica(said: Sequence[Testimony], replica: int, name: str) -> Replica:
    return {
        (one.place[0], one.place[2]): one.traces[name] for one in said if one.place[1] == replica
    }


def _blame(
    said: Sequence[Testimony],
    wrong: Sequence[tuple[int, Replica, Replica]],
    certain: bool = True,
    transient: bool = False,
) -> Fault:
    """Return the fault of replicas whose trace differs from a right one."""
    found = [(r, *_first_difference(trace, right)) for r, trace, right in wrong]
    (_, row, _) = min(found, key=lambda one: one[1][0])
    places = {(pp, r, tp) for r, _, there in found for pp, tp in there}
    blamed = [one for one in said if one.place in places]
    moment, what, module, _ = row
    direction = "backward" if moment.direction == BACKWARD else "forward"
    ranks = tuple(one.rank for one in blamed)
    hosts = tuple(one.host for one in blamed)
    return Fault("computation", what, module, direction, ranks, hosts, certain, transient, True)


def _first_difference(trace: Replica, right: Replica) -> tuple[Row, list[tuple[int, int]]]:
    """Return the first row in which two replicas differ, and the places of the ranks that differ at
    that moment."""
    firsts: dict[tuple[int, int], Row] = {}
    for place, mine in trace.items():
        theirs = right[place]
        differing = (row for row, other in zip(mine, theirs, strict=False) if row != other)
        longer = mine if len(mine) > len(theirs) else theirs
        rest = iter(longer[min(len(mine), len(theirs)) :])
        if (row := next(differing, None) or next(rest, None)) is not None:
            firsts[place] = row
    earliest = min(row[0] for row in firsts.values())
    there = [place for place, row in firsts.items() if row[0] == earliest]
    return firsts[there[0]], there
