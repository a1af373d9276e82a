"""Links between ranks along each axis of the mesh: latency, bandwidth, and sums that are right.

Neighbours on an axis are measured in pairs, and no rank is in two pairs at once: a slow link is
then slow by itself, and not because of another. Afterwards all ranks of the axis sum and gather,
two at a time, as training does.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import AXES, Axis
from megaprec.comm.groups import make_groups
from parallel.mesh import make_mesh
from tools.console.units import counted, duration, size
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong
from tools.verify.doctor.questions import RankContext

ROUNDS = 20  # small messages there and back
TRIES = 4  # measurements of the bandwidth of a link that seems broken
# floats of a message for bandwidth: 1 MiB first, then 16 MiB if that takes no second
MEDIUM_MESSAGE = 2**18
LARGE_MESSAGE = 2**22
FLOAT_BYTES = 4
LEAST_BANDWIDTH = {"cpu": 20e6, "cuda": 1e9}  # bytes a second of a link that is not broken
# seconds of a small message on a link that is not broken
LONGEST_LATENCY = {"cpu": 0.05, "cuda": 0.005}
SLOWDOWN = 6.0  # by which a link may be slower than the median of the others of its kind
REMEDY = (
    "look at the cable, the network card and the switch port of both hosts (ethtool, ibstat, dmesg)"
)
Record = dict[str, Any]  # the figures of one link or of one axis: JSON values by name
LOCAL_REMEDY = "look at what else runs there (top), and at CPU limits of the container"


@dataclass(frozen=True)
class Pair:
    """Two neighbours on an axis, seen from one of them.

    peer: the other's rank in the group. first: it sends first.
    """

    axis: Axis
    peer: int
    first: bool
    device: str

    def send(self, tensor: Tensor) -> None:
        """Send to the other rank and wait until the message has left."""
        dist.send(tensor, group=self.axis.group, group_dst=self.peer)

    def receive(self, tensor: Tensor) -> None:
        """Receive from the other rank into `tensor`."""
        dist.recv(tensor, group=self.axis.group, group_src=self.peer)
        # NCCL's receive returns before the message is there.
        if self.device == "cuda":
            torch.cuda.synchronize()

    def there_and_back(self, tensor: Tensor) -> float:
        """Send `tensor` to the other rank and back; return the seconds for one way."""
        start = time.perf_counter()
        for sends in (self.first, not self.first):
            if sends:
                self.send(tensor)
            else:
                self.receive(tensor)
        return (time.perf_counter() - start) / 2


def axes_of(mesh: DeviceMesh, device: str) -> list[Axis]:
    """Return the axes of more than one rank.

    On CUDA with groups of NCCL. Collective over the world.
    """
    axes: list[Axis] = []
    for name in AXES:
        axis = Axis.of(mesh, name)
        if axis.size == 1:
            continue  # it has no link
        if device == "cuda":
            # the world itself is over gloo, whatever the links are
            axis = replace(axis, group=_nccl_group(mesh, name))
        axes.append(axis)
    return axes


def _nccl_group(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """Return this rank's NCCL group of the axis. Collective over the world."""
    mesh_dim = (mesh.mesh_dim_names or ()).index(name)
    ranks = mesh.mesh.movedim(mesh_dim, -1)
    ranks_by_group = ranks.reshape(-1, mesh.size(mesh_dim))
    return make_groups(ranks_by_group, "nccl")


def measure(context: RankContext) -> list[Record]:
    """Return the records of this rank's links, and of the collectives of each axis.

    A link is recorded by the one of its two ranks at which it begins. Collective over the world.
    """
    records = list[Record]()
    for axis in axes_of(make_mesh(*context.layout), context.device):
        for turn in (0, 1):
            records += _measure_pair(context, axis, turn)
        records.append(_measure_collectives(context, axis))
    return records


def _measure_pair(context: RankContext, axis: Axis, turn: int) -> Iterator[Record]:
    """Measure the link of this turn: of ranks 0 and 1, 2 and 3, ... or of 1 and 2, 3 and 4, ... The
    first rank of each pair yields its record."""
    first = axis.rank % 2 == turn
    peer_rank = axis.rank + (1 if first else -1)
    if not 0 <= peer_rank < axis.size:  # the end of the axis has no neighbour in this turn
        return
    global_peer = dist.get_global_rank(axis.group, peer_rank) if axis.group else peer_rank
    pair = Pair(axis, peer_rank, first, context.device)
    measured = _run_guarded(lambda: speeds(pair))
    if first:
        yield {
            "axis": axis.name,
            "device": context.device,
            "ranks": [context.rank, global_peer],
            "hosts": [context.host, context.host_of(global_peer)],
            **measured,
        }


def _run_guarded(part: Callable[[], Record]) -> Record:
    """Return what the part returns, or {"error": ...} if torch raises."""
    try:
        return part()
    except (RuntimeError, ValueError) as error:
        return {"error": str(error).splitlines()[0]}


def speeds(pair: Pair) -> dict[str, float]:
    """Return the best seconds of a small message and bytes a second of a large one."""
    small = torch.zeros(2, device=pair.device)
    medium = torch.zeros(MEDIUM_MESSAGE, device=pair.device)
    pair.there_and_back(small)  # the first message also sets up the connection
    latency = min(pair.there_and_back(small) for _ in range(ROUNDS))

    bandwidth = 0.0
    agreed = 0.0
    for _ in range(TRIES):  # a busy host is no broken link
        seconds = min(pair.there_and_back(medium) for _ in range(2))
        bandwidth = max(bandwidth, FLOAT_BYTES * MEDIUM_MESSAGE / seconds)
        # Both ranks must leave the loop together.
        agreed = _agree_on_bandwidth(pair, bandwidth)
        if agreed >= LEAST_BANDWIDTH[pair.device]:
            break

    # It takes less than a second, by the bandwidth on which both ranks agree: both send it or none.
    if agreed > FLOAT_BYTES * LARGE_MESSAGE:
        large = torch.zeros(LARGE_MESSAGE, device=pair.device)
        seconds = min(pair.there_and_back(large) for _ in range(3))
        bandwidth = FLOAT_BYTES * LARGE_MESSAGE / seconds
    return {"latency_s": latency, "bytes_per_s": bandwidth}


def _agree_on_bandwidth(pair: Pair, bandwidth: float) -> float:
    """Return the bandwidth that the first of both ranks has measured, on both."""
    message = torch.tensor([bandwidth], device=pair.device)
    if pair.first:
        pair.send(message)
    else:
        pair.receive(message)
    return float(message)


def _measure_collectives(context: RankContext, axis: Axis) -> Record:
    """Return whether sums and gathers over the axis are right if both are in flight at once, and
    the time of a large sum."""

    def sum_and_gather() -> Record:
        """Return whether a sum and a gather that run at once are right, and the time of a sum."""
        summed = torch.full((1000,), float(axis.rank + 1), device=context.device)
        local = torch.full((3,), axis.rank, device=context.device, dtype=torch.int64)
        finish_sum = axis.start_sum_(summed)
        finish_gather = axis.start_gather(local)
        # Waits in the other order: no result may depend on which is awaited first.
        gathered = finish_gather()
        finish_sum()

        expected_sum = axis.size * (axis.size + 1) / 2
        expected_gathered = torch.arange(axis.size).repeat_interleave(3).tolist()
        return {
            "right": bool((summed == expected_sum).all()),
            "in_order": gathered.tolist() == expected_gathered,
            "sum_s": min(_time_sum(context, axis) for _ in range(2)),
        }

    return {
        "axis": axis.name,
        "size": axis.size,
        "collective": True,
        "rank": context.rank,
        "host": context.host,
        **_run_guarded(sum_and_gather),
    }


def _time_sum(context: RankContext, axis: Axis) -> float:
    """Return the seconds of a sum of MEDIUM_MESSAGE floats over the axis."""
    summed = torch.zeros(MEDIUM_MESSAGE, device=context.device)
    start = time.perf_counter()
    axis.sum_(summed)
    if context.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def judge(answers: Sequence[Sequence[Record]]) -> Iterator[Finding]:
    """Yield the findings about each axis."""
    records_by_axis: dict[str, list[Record]] = {}
    for records_of_rank in answers:
        for record in records_of_rank:
            records_by_axis.setdefault(record["axis"], []).append(record)
    if not records_by_axis:
        yield not_tried("links", "one rank only: it has no links")

    for axis, records in records_by_axis.items():
        links = [record for record in records if "collective" not in record]
        collectives = [record for record in records if "collective" in record]
        problems = [*_judge_links(axis, links), *_judge_collectives(axis, collectives)]
        yield from problems or [_summarize(axis, links, collectives)]


def _judge_links(axis: str, links: Sequence[Record]) -> Iterator[Finding]:
    """Yield a finding for each link that fails, or is slow beside others of its kind."""
    measured = [link for link in links if "error" not in link]
    for link in links:
        # links within a host go through memory: another kind than those between hosts
        local = _is_local(link)
        similar = [other for other in measured if _is_local(other) == local]
        # an error may have no text, and is a problem all the same
        has_failed = "error" in link
        problem = link["error"] if has_failed else slow(link, similar)
        if has_failed or problem:
            remedy = LOCAL_REMEDY if local else REMEDY
            message = f"{_format_ends(link)}: {problem}"
            yield wrong(f"links {axis}", message, remedy, **link)


def slow(link: Record, similar: Sequence[Record]) -> str:
    """Return why a link is too slow, by itself or beside at least two others of its kind.

    "" if it is not. similar: the links of its kind, itself among them.
    """
    bandwidth = link["bytes_per_s"]
    latency = link["latency_s"]
    least_bandwidth = LEAST_BANDWIDTH[link["device"]]
    longest_latency = LONGEST_LATENCY[link["device"]]
    if bandwidth < least_bandwidth:
        return f"{size(bandwidth)}/s, and less than {size(least_bandwidth)}/s is a broken link"
    if latency > longest_latency:
        return (
            f"a small message takes {duration(latency)}, and more than "
            f"{duration(longest_latency)} is too long"
        )
    if len(similar) > 2:
        usual = statistics.median(other["bytes_per_s"] for other in similar)
        if bandwidth * SLOWDOWN < usual:
            slowdown = f"{usual / bandwidth:.0f} times slower"
            return f"{size(bandwidth)}/s, {slowdown} than other links of this axis"
    return ""


def _is_local(link: Record) -> bool:
    """Return True for a link within a host: those are of another kind than links between hosts."""
    return link["hosts"][0] == link["hosts"][1]


def _format_ends(link: Record) -> str:
    first_rank, second_rank = link["ranks"]
    first_host, second_host = link["hosts"]
    return f"rank {first_rank} on {first_host} and rank {second_rank} on {second_host}"


def _judge_collectives(axis: str, collectives: Sequence[Record]) -> Iterator[Finding]:
    """Yield a finding for each rank whose sums or gathers over an axis are wrong."""
    check = f"links {axis}"
    for record in collectives:
        rank = f"rank {record['rank']} on {record['host']}"
        if "error" in record:
            yield wrong(check, f"{rank}: sums of the axis fail: {record['error']}", REMEDY)
            continue

        if not record["right"]:
            problem = "a sum is wrong"
        elif not record["in_order"]:
            problem = "gathered parts are not in the order of ranks"
        else:
            continue
        remedy = "look at versions of NCCL and drivers on all hosts"
        yield wrong(check, f"{rank}: {problem}", remedy)


def _summarize(axis: str, links: Sequence[Record], collectives: Sequence[Record]) -> Finding:
    """Return the finding of an axis without problems, with its worst figures."""
    latency = max(link["latency_s"] for link in links)
    bandwidth = min(link["bytes_per_s"] for link in links)
    seconds = max(record["sum_s"] for record in collectives)
    backend = "NCCL" if links[0]["device"] == "cuda" else "gloo"
    worst = f"{duration(latency)} and {size(bandwidth)}/s at worst"
    sum_time = f"a sum of {size(FLOAT_BYTES * MEDIUM_MESSAGE)} takes {duration(seconds)}"
    message = f"{backend}, {counted(len(links), 'link')}: {worst}; {sum_time}"
    return ok(
        f"links {axis}",
        message,
        latency_s=latency,
        bytes_per_s=bandwidth,
        sum_s=seconds,
        links=list(links),
    )
