"""The verdict: which rank hangs, from the positions of all ranks.

A rank without a heartbeat is the cause: it was stopped, its machine is gone, or the link to it is
cut. If all have a heartbeat, the cause is a rank that does not wait for others, and among several
the one that is the least far. If all ranks wait, they wait for each other, and the least far one is
named first.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from parallel.hangs.heartbeat import Beat


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang.

    reason: one line. culprits: the ranks that hang, or cannot be reached. judge: the rank that has
        found out.
    silent: those of the culprits that have no heartbeat. beats: the last known position of each
        rank.
    """

    reason: str
    culprits: tuple[int, ...]
    judge: int
    silent: tuple[int, ...]
    beats: tuple[Beat, ...]

    def to_json(self) -> str:
        """Return the verdict as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Verdict":
        """Return the verdict that `to_json` wrote."""
        said = json.loads(text)
        beats = tuple(Beat.read(one) for one in said["beats"])
        return Verdict(
            said["reason"], tuple(said["culprits"]), said["judge"], tuple(said["silent"]), beats
        )


def judge_silent(
    me: Beat, beats: Mapping[int, Beat | None], silent: Mapping[int, float]
) -> Verdict:
    """Return the verdict about ranks without a heartbeat. silent: their seconds of silence, by
    rank."""
    known = _known(me, beats)
    seconds = max(silent.values())
    lost = _lost_hosts(me, known, silent)
    if lost:
        where = " and ".join(f"{host} ({ranks_in_words(ranks)})" for host, ranks in lost.items())
        here = [one.rank for one in known.values() if one.host == me.host]
        reason = (
            f"{where} has not been heard of for {seconds:.0f} s by {me.host} "
            f"({ranks_in_words(here)}): the machine is down, or the link to it is cut; "
            f"{_last(min(silent), known.get(min(silent)))}"
        )
    else:
        stopped = "; ".join(_last(rank, known.get(rank)) for rank in sorted(silent))
        reason = (
            f"{stopped}: stopped or dead, without a heartbeat for {seconds:.0f} "
            f"s{_waiting(known, silent)}"
        )
    return Verdict(
        reason, tuple(sorted(silent)), me.rank, tuple(sorted(silent)), tuple(known.values())
    )


def judge_hung(me: Beat, beats: Mapping[int, Beat | None], seconds: float) -> Verdict:
    """Return the verdict about ranks that all have a heartbeat. seconds: how long the phase has
    lasted."""
    known = _known(me, beats)
    order = sorted(known.values(), key=lambda one: (one.step, one.count, one.rank))
    busy = [one for one in order if not one.waits]
    first = (busy or order)[0]
    at = f", at {' < '.join(first.at)}" if first.at else ""
    if busy:
        reason = (
            f"{named(first.rank, first)} hangs in {where_in_words(first)} after {seconds:.0f} s{at}"
        )
        reason += _waiting(known, [first.rank])
    else:
        others = "; ".join(
            f"rank {one.rank} on {one.host} in {where_in_words(one)}" for one in order[1:]
        )
        reason = (
            f"all ranks wait for each other after {seconds:.0f} s: {named(first.rank, first)} in "
        )
        reason += f"{where_in_words(first)}{at}; {others}"
    return Verdict(reason, (first.rank,), me.rank, (), tuple(known.values()))


def judge_store(me: Beat, host: str, address: str, seconds: float, closed: bool) -> Verdict:
    """Return the verdict that the machine of the ranks' store does not answer, or has closed the
    connection.

    host: of rank 0. address: the store's.
    """
    silent = (
        f"has not answered rank {me.rank} on {me.host} for {seconds:.0f} s: the machine is down, "
        "or the link is cut"
    )
    ended = f"has closed the connection to rank {me.rank} on {me.host}: the process there has ended"
    reason = f"{host} ({address}, where the ranks meet) {ended if closed else silent}"
    reason += f"; rank {me.rank} was in {where_in_words(me)}"
    return Verdict(reason, (0,), me.rank, (0,), (me,))


def judge_failed(me: Beat, error: str) -> Verdict:
    """Return the verdict that this rank has failed with `error`."""
    reason = (
        f"rank {me.rank} on {me.host} (process {me.pid}) failed in {where_in_words(me)}: {error}"
    )
    return Verdict(reason, (me.rank,), me.rank, (), (me,))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 2 and 3"; long runs of ranks as "4 to 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = [
        part
        for run in runs
        for part in (map(str, run) if len(run) < 3 else [f"{run[0]} to {run[-1]}"])
    ]
    words = " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))
    return f"rank{'' if words.isdecimal() else 's'} {words}"


def where_in_words(beat: Beat) -> str:
    """Return the position of a rank in words, such as "step 3, forward of micro-batch 0 in stage
    1"."""
    phase = f"{beat.phase} {beat.step}" if beat.phase == "step" else beat.phase
    phase += (
        f" after step {beat.step}" if beat.step and beat.phase in ("save", "evaluation") else ""
    )
    return f"{phase}, {beat.doing}" if beat.doing else phase


def named(rank: int, beat: Beat | None) -> str:
    """Return a rank with its host and process, as far as they are known."""
    if beat:
        return f"rank {rank} on {beat.host} (process {beat.pid})"
    return f"rank {rank}, which has never been heard of"


def _known(me: Beat, beats: Mapping[int, Beat | None]) -> dict[int, Beat]:
    known = {rank: beat for rank, beat in beats.items() if beat is not None} | {me.rank: me}
    return dict(sorted(known.items()))


def _lost_hosts(
    me: Beat, known: Mapping[int, Beat], silent: Mapping[int, float]
) -> dict[str, list[int]]:
    """Return the ranks of each other host that is silent as a whole; empty if a single rank of a
    host is silent."""
    hosts: dict[str, list[int]] = {}
    for one in known.values():
        hosts.setdefault(one.host, []).append(one.rank)
    lost = {
        host: ranks
        for host, ranks in hosts.items()
        if host != me.host and all(rank in silent for rank in ranks)
    }
    if sorted(rank for ranks in lost.values() for rank in ranks) == sorted(silent):
        return lost
    return {}


def _last(rank: int, beat: Beat | None) -> str:
    return named(rank, beat) + (f" was last seen in {where_in_words(beat)}" if beat else "")


def _waiting(known: Mapping[int, Beat], culprits: Iterable[int]) -> str:
    """Return the end of a sentence about the ranks that wait."""
    waiting: Sequence[int] = [
        rank for rank, one in known.items() if one.waits and rank not in set(culprits)
    ]
    if not waiting:
        return ""
    where = where_in_words(known[waiting[0]])
    wait = f"waits in {where}" if len(waiting) == 1 else f"wait, rank {waiting[0]} in {where}"
    return f"; {ranks_in_words(waiting)} {wait}"
