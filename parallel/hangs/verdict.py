"""The verdict: which rank hangs, from the positions of all ranks.

A rank without a heartbeat is the cause: it was stopped, its machine is gone, or the link to it is
cut. If all have a heartbeat, the cause is a rank that does not wait for others, and among several
the one that is the least far. If all ranks wait, they wait for each other, and the least far one is
named first.

`judge` is the present beat of the rank that judges, and `beats` are the last ones of the others, by
rank: None for a rank that has never been heard of.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain

from parallel.hangs.heartbeat import Beat


@dataclass(frozen=True)
class HangVerdict:
    """The cause of a hang.

    reason: one line.
    culprits: the ranks that hang, or cannot be reached.
    judge: the rank that has found out.
    silent: those of the culprits that have no heartbeat.
    beats: the last known position of each rank.
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
    def from_json(text: str) -> "HangVerdict":
        """Return the verdict that `to_json` wrote."""
        fields = json.loads(text)
        return HangVerdict(
            fields["reason"],
            tuple(fields["culprits"]),
            fields["judge"],
            tuple(fields["silent"]),
            tuple(Beat.read(beat) for beat in fields["beats"]),
        )


def judge_silent(
    judge: Beat,
    beats: Mapping[int, Beat | None],
    silent: Mapping[int, float],
) -> HangVerdict:
    """Return the verdict about ranks without a heartbeat: their hosts are the cause if all ranks of
    these are silent, otherwise the ranks are.

    silent: their seconds of silence, by rank.
    """
    known_beats = _known_beats(judge, beats)
    ranks = sorted(silent)
    seconds = max(silent.values())
    lost_hosts = _lost_hosts(judge, known_beats, silent)
    if lost_hosts:
        hosts = [f"{host} ({ranks_in_words(on_host)})" for host, on_host in lost_hosts.items()]
        lost = " and ".join(hosts)
        ranks_here = [beat.rank for beat in known_beats.values() if beat.host == judge.host]
        reason = (
            f"{lost} has not been heard of for {seconds:.0f} s by {judge.host} "
            f"({ranks_in_words(ranks_here)}): the machine is down, or the link to it is cut; "
            f"{_last_seen(ranks[0], known_beats.get(ranks[0]))}"
        )
    else:
        stopped = "; ".join(_last_seen(rank, known_beats.get(rank)) for rank in ranks)
        reason = (
            f"{stopped}: stopped or dead, without a heartbeat for {seconds:.0f} "
            f"s{_describe_waiting(known_beats, silent)}"
        )
    return HangVerdict(
        reason,
        culprits=tuple(ranks),
        judge=judge.rank,
        silent=tuple(ranks),
        beats=tuple(known_beats.values()),
    )


def judge_hung(
    judge: Beat,
    beats: Mapping[int, Beat | None],
    seconds: float,
) -> HangVerdict:
    """Return the verdict about ranks that all have a heartbeat.

    The culprit is the rank that is least far among those that do not wait for others; if all wait,
    the one that is least far of all.
    seconds: how long the phase has lasted.
    """
    known_beats = _known_beats(judge, beats)
    by_progress = sorted(known_beats.values(), key=lambda beat: (beat.step, beat.count, beat.rank))
    busy = [beat for beat in by_progress if not beat.waits]
    culprit = (busy or by_progress)[0]
    name = named(culprit.rank, culprit)
    stack = f", at {' < '.join(culprit.at)}" if culprit.at else ""
    if busy:
        reason = f"{name} hangs in {where_in_words(culprit)} after {seconds:.0f} s{stack}"
        reason += _describe_waiting(known_beats, [culprit.rank])
    else:
        others = [
            f"rank {beat.rank} on {beat.host} in {where_in_words(beat)}" for beat in by_progress[1:]
        ]
        reason = f"all ranks wait for each other after {seconds:.0f} s: {name} in "
        reason += f"{where_in_words(culprit)}{stack}; {'; '.join(others)}"
    return HangVerdict(
        reason,
        culprits=(culprit.rank,),
        judge=judge.rank,
        silent=(),
        beats=tuple(known_beats.values()),
    )


def judge_store(
    judge: Beat,
    host: str,
    address: str,
    seconds: float,
    closed: bool,
) -> HangVerdict:
    """Return the verdict that the machine of the ranks' store does not answer, or has closed the
    connection.

    host: of rank 0.
    address: the store's.
    """
    name = f"rank {judge.rank} on {judge.host}"
    if closed:
        problem = f"has closed the connection to {name}: the process there has ended"
    else:
        problem = (
            f"has not answered {name} for {seconds:.0f} s: the machine is down, or the link is cut"
        )
    reason = f"{host} ({address}, where the ranks meet) {problem}"
    reason += f"; rank {judge.rank} was in {where_in_words(judge)}"
    # the beats of other ranks are in the store, which cannot be read
    return HangVerdict(reason, culprits=(0,), judge=judge.rank, silent=(0,), beats=(judge,))


def verdict_of_own_failure(judge: Beat, error: str) -> HangVerdict:
    """Return the verdict that this rank has failed with `error`."""
    name = named(judge.rank, judge)
    reason = f"{name} failed in {where_in_words(judge)}: {error}"
    return HangVerdict(reason, culprits=(judge.rank,), judge=judge.rank, silent=(), beats=(judge,))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 2 and 3"; long runs of ranks as "4 to 7"."""
    # consecutive ranks together
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs:
        # two neighbours are shorter by their numbers than as a run
        if len(run) < 3:
            texts += map(str, run)
        else:
            texts.append(f"{run[0]} to {run[-1]}")
    *all_but_last, last = texts
    words = f"{', '.join(all_but_last)} and {last}" if all_but_last else last
    is_one_rank = words.isdecimal()
    return f"rank {words}" if is_one_rank else f"ranks {words}"


def where_in_words(beat: Beat) -> str:
    """Return the position of a rank in words, such as "step 3, forward of micro-batch 0 in stage
    1"."""
    phase = beat.phase
    if beat.phase == "step":
        phase += f" {beat.step}"
    # before the first step there is none to name
    if beat.step and beat.phase in ("save", "evaluation"):
        phase += f" after step {beat.step}"
    return f"{phase}, {beat.doing}" if beat.doing else phase


def named(rank: int, beat: Beat | None) -> str:
    """Return a rank with its host and process, as far as they are known."""
    # a rank may have ended before its first beat
    if beat:
        return f"rank {rank} on {beat.host} (process {beat.pid})"
    return f"rank {rank}, which has never been heard of"


def _known_beats(
    judge: Beat,
    beats: Mapping[int, Beat | None],
) -> dict[int, Beat]:
    """Return the beats of the ranks that have been heard of, and of this one, by rank."""
    known_beats = {rank: beat for rank, beat in beats.items() if beat is not None}
    # its own position is newer than that in the store
    known_beats[judge.rank] = judge
    return dict(sorted(known_beats.items()))


def _lost_hosts(
    judge: Beat,
    known_beats: Mapping[int, Beat],
    silent: Mapping[int, float],
) -> dict[str, list[int]]:
    """Return the ranks of each host that is silent as a whole, besides the judge's; empty if some
    silent rank is on a host of which other ranks are not silent."""
    hosts: dict[str, list[int]] = {}
    for beat in known_beats.values():
        hosts.setdefault(beat.host, []).append(beat.rank)
    lost: dict[str, list[int]] = {}
    for host, ranks in hosts.items():
        if host != judge.host and all(rank in silent for rank in ranks):
            lost[host] = ranks
    # Hosts are the cause only if they have all silent ranks.
    lost_ranks = sorted(chain.from_iterable(lost.values()))
    return lost if lost_ranks == sorted(silent) else {}


def _last_seen(rank: int, beat: Beat | None) -> str:
    name = named(rank, beat)
    return f"{name} was last seen in {where_in_words(beat)}" if beat else name


def _describe_waiting(
    known_beats: Mapping[int, Beat],
    culprits: Iterable[int],
) -> str:
    """Return the end of a sentence about the ranks that wait for others, "" if none does. culprits:
    ranks that the sentence names already."""
    named_already = {*culprits}
    waiting = [
        rank for rank, beat in known_beats.items() if beat.waits and rank not in named_already
    ]
    if not waiting:
        return ""
    # the position of the first stands for all, so that the line stays short
    where = where_in_words(known_beats[waiting[0]])
    if len(waiting) == 1:
        return f"; {ranks_in_words(waiting)} waits in {where}"
    return f"; {ranks_in_words(waiting)} wait, rank {waiting[0]} in {where}"
