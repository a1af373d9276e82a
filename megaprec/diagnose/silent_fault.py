"""The verdict about ranks that computed or hold something wrong: which rank it was, and where it
began.

Every rank gives a `RankEvidence`: digests of what it holds, of the messages that it sent and
received, and traces of one micro-batch. The micro-batch was computed in the training step ("real")
and again on another replica ("again"). If these differ, every replica computes it twice more
("first", "second"). A replica that differs from itself, or from the majority of replicas, is at
fault; if all agree now, the fault was transient, and the one that differs from the majority is the
one that erred then. Two replicas that differ steadily accuse each other: nothing tells which is
right.

Within a replica, the first difference in order of computation names the rank. Tensor-parallel ranks
that see it at the same moment, after a sum of their parts, are all named.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from megaprec.comm.tensor_digests import hexadecimal
from megaprec.diagnose.module_trace import BACKWARD, TraceEntry, TracePoint


class TraceRow(NamedTuple):
    """An entry of a trace, read from the device. module: see `TraceEntry`. digest: hexadecimal."""

    point: TracePoint
    description: str
    module: str
    digest: str


RankTrace = tuple[TraceRow, ...]
ReplicaTrace = Mapping[tuple[int, int], RankTrace]  # of a replica's ranks, by (pp, tp)


@dataclass(frozen=True)
class RankEvidence:
    """The digests that one rank contributes to the verdict.

    coordinates: its (pp, dp, tp).
    weights, gradients: digests by key.
    strayed: parameters whose weights are not their masters, rounded.
    messages: digests by message and side, "sent" or "received".
    traces: by name.
    """

    rank: int
    host: str
    coordinates: tuple[int, int, int]
    weights: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)
    strayed: Sequence[str] = ()
    messages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    traces: Mapping[str, RankTrace] = field(default_factory=dict)

    @property
    def replica(self) -> int:
        """Return the data-parallel rank."""
        _, dp_rank, _ = self.coordinates
        return dp_rank

    @property
    def coordinates_in_replica(self) -> tuple[int, int]:
        """Return (pp, tp)."""
        pp_rank, _, tp_rank = self.coordinates
        return pp_rank, tp_rank

    @staticmethod
    def read(values: Mapping[str, Any]) -> "RankEvidence":
        """Return the evidence of which `asdict` made JSON values."""
        traces = {trace_name: _parse_trace(trace) for trace_name, trace in values["traces"].items()}
        # JSON has lists in place of tuples
        coordinates = tuple(values["coordinates"])
        return RankEvidence(**{**values, "coordinates": coordinates, "traces": traces})


def _parse_trace(rows: Iterable[Sequence[Any]]) -> RankTrace:
    """Return the trace of which JSON made lists."""
    return tuple(
        TraceRow(TracePoint(*point), description, module, digits)
        for point, description, module, digits in rows
    )


def read_trace(entries: Iterable[TraceEntry]) -> RankTrace:
    """Return the entries of a trace, read from the device."""
    return tuple(
        TraceRow(entry.point, entry.description, entry.module, hexadecimal(entry.digest))
        for entry in entries
    )


@dataclass(frozen=True)
class Fault:
    """A fault, and who is to blame for it.

    kind: "weights", "message", "computation", "gradients".
    what: the tensor in which it is first seen.
    module: its module, "" if there is none.
    direction: "forward", "backward" or "".
    ranks, hosts: those to blame.
    certain: False if only some of them are, and nothing tells which.
    transient: True if it did not happen again.
    can_be_saved: True if all that the ranks hold agrees.
    """

    kind: str
    what: str
    module: str
    direction: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    certain: bool
    transient: bool
    can_be_saved: bool

    def fields(self) -> dict[str, Any]:
        """Return the fault as JSON values, under the names that events have."""
        values = asdict(self)
        values["sound"] = values.pop("can_be_saved")
        return {**values, "ranks": list(self.ranks), "hosts": list(self.hosts)}

    def __str__(self) -> str:
        """Return the fault in one sentence: who did what wrongly."""
        names = [
            f"rank {rank} on host {host}" for rank, host in zip(self.ranks, self.hosts, strict=True)
        ]
        # of a lost message, either its sender or its receiver is to blame
        all_are = self.certain and self.kind != "message"
        conjunction = " and " if all_are else " or "
        who = conjunction.join(names)
        if self.kind == "weights":
            return f"{who} holds wrong bits of {self.what}"
        if self.kind == "message":
            return f"{self.what} was not received as it was sent: {who}"
        again = ", and right when computed again" if self.transient else ""
        return (
            f"{who} computed {self.what} wrongly in the {self.direction or 'reduction'} pass{again}"
        )


class _Disagreement(NamedTuple):
    """A tensor that ranks hold unequally.

    certain: True if a majority of its holders agrees. blamed: the other holders; without a majority
    all of them.
    """

    key: str
    blamed: Sequence[RankEvidence]
    certain: bool


class _Sent(NamedTuple):
    """A message as it was sent."""

    sender: RankEvidence
    digest: str


class _WrongReplica(NamedTuple):
    """A replica whose trace of the micro-batch is not the one that is right."""

    replica: int
    trace: ReplicaTrace
    right_trace: ReplicaTrace


def judge(
    evidence: Sequence[RankEvidence],
    suspect: int | None,
    comparable: bool,
    exact: bool,
) -> Fault | None:
    """Return the verdict; None if the micro-batch cannot be judged, because its computation is not
    deterministic.

    evidence: of all ranks, by rank.
    suspect: the data-parallel rank whose micro-batch was not computed again as it was; None if
        there is none.
    comparable: True if all replicas compute alike.
    exact: True if a rank without a fault is known to compute the same bits each time.
    """
    # In order of cause: wrong weights or messages make computations and gradients wrong too.
    if (fault := _weights_fault(evidence)) is not None:
        return fault
    if (fault := _message_fault(evidence)) is not None:
        return fault
    if suspect is not None:
        return _computation_fault(evidence, suspect, comparable, exact)
    unequal = _first_disagreement(evidence, [of_rank.gradients for of_rank in evidence])
    if unequal is not None:
        return _fault(
            "gradients",
            unequal.key,
            unequal.blamed,
            unequal.certain,
            can_be_saved=True,
        )
    return None


def _weights_fault(evidence: Sequence[RankEvidence]) -> Fault | None:
    """Return the fault of weights or state that ranks hold unequally, or that stray from their
    masters."""
    unequal = _first_disagreement(evidence, [of_rank.weights for of_rank in evidence])
    strayed = [of_rank for of_rank in evidence if of_rank.strayed]
    if unequal is not None:
        # Without a majority, ranks whose weights are not their masters are the wrong ones.
        if not unequal.certain and strayed:
            return _fault(
                "weights",
                unequal.key,
                strayed,
                certain=True,
                can_be_saved=False,
            )
        return _fault(
            "weights",
            unequal.key,
            unequal.blamed,
            unequal.certain,
            can_be_saved=False,
        )
    if strayed:
        first_weight = strayed[0].strayed[0]
        tensor_description = f"weight {first_weight}, which are not its masters rounded"
        return _fault("weights", tensor_description, strayed, certain=True, can_be_saved=False)
    return None


def _fault(
    kind: str,
    tensor_description: str,
    blamed: Sequence[RankEvidence],
    certain: bool,
    can_be_saved: bool,
    transient: bool = False,
    module: str = "",
    direction: str = "",
) -> Fault:
    """Return the fault of the ranks `blamed`.

    tensor_description: of the tensor in which it is first seen (`Fault.what`). The other arguments
        are the fields of `Fault` with these names.
    """
    return Fault(
        kind=kind,
        what=tensor_description,
        module=module,
        direction=direction,
        ranks=tuple(of_rank.rank for of_rank in blamed),
        hosts=tuple(of_rank.host for of_rank in blamed),
        certain=certain,
        transient=transient,
        can_be_saved=can_be_saved,
    )


def _first_disagreement(
    evidence: Sequence[RankEvidence], digests: Sequence[Mapping[str, str]]
) -> _Disagreement | None:
    """Return the first thing that ranks hold unequally. digests: of each rank, by key."""
    keys: dict[str, None] = {}  # without repetition, in their order
    for digests_of_rank in digests:
        keys |= dict.fromkeys(digests_of_rank)
    for key in keys:
        holders: list[RankEvidence] = []
        digests_of_holders: list[str] = []
        for of_rank, digests_of_rank in zip(evidence, digests, strict=True):
            if key in digests_of_rank:
                holders.append(of_rank)
                digests_of_holders.append(digests_of_rank[key])
        (common, count), *others = Counter(digests_of_holders).most_common()
        if not others:  # all holders agree, or there is one only
            continue
        has_majority = 2 * count > len(holders)
        if not has_majority:
            return _Disagreement(key, holders, certain=False)
        blamed: list[RankEvidence] = []
        for holder, digest in zip(holders, digests_of_holders, strict=True):
            if digest != common:
                blamed.append(holder)
        return _Disagreement(key, blamed, certain=True)
    return None


def _message_fault(evidence: Sequence[RankEvidence]) -> Fault | None:
    """Return the fault of the first message that was received with other bits than it was sent
    with."""
    # by name, which is unique within a pipeline, and by the dp and tp rank that name the pipeline
    sent: dict[tuple[str, int, int], _Sent] = {}
    for sender in evidence:
        _, dp_rank, tp_rank = sender.coordinates
        for message_name, sides in sender.messages.items():
            if "sent" in sides:
                sent[message_name, dp_rank, tp_rank] = _Sent(sender, sides["sent"])
    for receiver in evidence:
        _, dp_rank, tp_rank = receiver.coordinates
        for message_name, sides in receiver.messages.items():
            message = sent.get((message_name, dp_rank, tp_rank))
            # the other end of a link between stages of one rank is noted once only
            if "received" not in sides or message is None:
                continue
            if sides["received"] != message.digest:
                return _fault(
                    "message",
                    message_name,
                    [message.sender, receiver],
                    certain=False,
                    can_be_saved=True,
                    transient=True,
                )
    return None


def _computation_fault(
    evidence: Sequence[RankEvidence],
    suspect: int,
    comparable: bool,
    exact: bool,
) -> Fault | None:
    """Return the fault of the replicas that computed the suspect's micro-batch wrongly, by the
    order of evidence in the module's docstring.

    suspect, comparable, exact: as in `judge`. "first" and "second" are the two repetitions that
    each replica computes.
    """
    replicas = 1 + max(of_rank.replica for of_rank in evidence)
    judged = range(replicas) if comparable else [suspect]
    first = {replica: _replica_trace(evidence, replica, "first") for replica in judged}
    second = {replica: _replica_trace(evidence, replica, "second") for replica in judged}

    unsteady = _find_differing(first, second)
    if unsteady:
        # No replica repeats its own result, and none has to (exact): no fault, the computation is
        # not deterministic.
        if not exact and len(unsteady) == len(judged):
            return None
        return _blame(evidence, unsteady, transient=True)

    right_trace = _majority(first.values())
    if right_trace is None:
        # the first two accuse each other
        accused, accuser, *_ = judged
        wrong = [
            _WrongReplica(accused, first[accused], first[accuser]),
            _WrongReplica(accuser, first[accuser], first[accused]),
        ]
        return _blame(evidence, wrong, certain=False)

    wrong = _find_differing(first, dict.fromkeys(judged, right_trace))
    if wrong:
        return _blame(evidence, wrong)

    # in the step the next replica computed it again, or the suspect itself if no other can
    borrower = (suspect + 1) % replicas if comparable else suspect
    return _transient_fault(evidence, suspect, borrower, right_trace)


def _transient_fault(
    evidence: Sequence[RankEvidence],
    suspect: int,
    borrower: int,
    right_trace: ReplicaTrace,
) -> Fault | None:
    """Return the fault of the replicas that erred in the step, though all agree now.

    borrower: the replica that computed the suspect's micro-batch again in the step.
    """
    erred = []
    for replica, trace_name in ((suspect, "real"), (borrower, "again")):
        trace = _replica_trace(evidence, replica, trace_name)
        if trace != right_trace:
            erred.append(_WrongReplica(replica, trace, right_trace))
    if not erred:
        return None
    return _blame(evidence, erred, transient=True)


def _replica_trace(evidence: Sequence[RankEvidence], replica: int, trace_name: str) -> ReplicaTrace:
    """Return the traces of this name of all ranks of a replica."""
    return {
        of_rank.coordinates_in_replica: of_rank.traces[trace_name]
        for of_rank in evidence
        if of_rank.replica == replica
    }


def _find_differing(
    traces: Mapping[int, ReplicaTrace],
    right_traces: Mapping[int, ReplicaTrace],
) -> list[_WrongReplica]:
    """Return the replicas whose trace is not the one that is right for it. Both by replica."""
    return [
        _WrongReplica(replica, trace, right_traces[replica])
        for replica, trace in traces.items()
        if trace != right_traces[replica]
    ]


def _majority(traces: Collection[ReplicaTrace]) -> ReplicaTrace | None:
    """Return the trace that more than half of the replicas have, None if there is none."""
    for trace in traces:
        count = sum(trace == other for other in traces)
        if 2 * count > len(traces):
            return trace
    return None


def _blame(
    evidence: Sequence[RankEvidence],
    wrong: Sequence[_WrongReplica],
    certain: bool = True,
    transient: bool = False,
) -> Fault:
    """Return the fault of replicas whose trace differs from a right one."""
    first_rows: list[TraceRow] = []
    at_fault: set[tuple[int, int, int]] = set()  # by (pp, dp, tp)
    for replica, trace, right_trace in wrong:
        trace_row, first_ranks = _first_difference(trace, right_trace)
        first_rows.append(trace_row)
        at_fault |= {(pp, replica, tp) for pp, tp in first_ranks}
    # the earliest row of all replicas names the tensor; ranks of each replica are to blame
    earliest = min(first_rows, key=lambda trace_row: trace_row.point)
    return _fault(
        "computation",
        earliest.description,
        [of_rank for of_rank in evidence if of_rank.coordinates in at_fault],
        certain,
        can_be_saved=True,
        transient=transient,
        module=earliest.module,
        direction="backward" if earliest.point.direction == BACKWARD else "forward",
    )


def _first_difference(
    trace: ReplicaTrace, right_trace: ReplicaTrace
) -> tuple[TraceRow, list[tuple[int, int]]]:
    """Return the first row in which two replicas differ, and the (pp, tp) of the ranks that differ
    at that point of the computation."""
    differing: dict[tuple[int, int], TraceRow] = {}
    for coordinates, rows_of_rank in trace.items():
        trace_row = _first_differing_row(rows_of_rank, right_trace[coordinates])
        if trace_row is not None:
            differing[coordinates] = trace_row
    # later ranks computed on wrong inputs
    earliest = min(trace_row.point for trace_row in differing.values())
    first_to_differ = [
        coordinates for coordinates, trace_row in differing.items() if trace_row.point == earliest
    ]
    return differing[first_to_differ[0]], first_to_differ


def _first_differing_row(trace: RankTrace, right_trace: RankTrace) -> TraceRow | None:
    """Return the first row of `trace` that is not in its place in `right_trace`.

    Of traces of which one begins with the other, that is the first row that only the longer one
    has. None if they are equal.
    """
    for trace_row, right_row in zip(trace, right_trace, strict=False):
        if trace_row != right_row:
            return trace_row
    if len(trace) == len(right_trace):
        return None
    common = min(len(trace), len(right_trace))
    return max(trace, right_trace, key=len)[common]
