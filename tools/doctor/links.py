"""Links between ranks along each axis of the mesh: order of messages, latency, bandwidth, and sums
that are right.

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
from megaprec.comm.groups import split
from parallel.mesh import make_mesh
from tools.console.units import counted, duration, size
from tools.doctor.finding import Finding, not_tried, ok, wrong
from tools.doctor.place import Place

NUMBERED = 32  # messages whose order is checked
ROUNDS = 20  # small messages there and back
TRIES = 4  # measurements of the bandwidth of a link that seems broken
# floats of a message for bandwidth: 1 MiB first, then 16 MiB if that takes no second
SMALL = 2**18
LARGE = 2**22
LEAST = {"cpu": 20e6, "cuda": 1e9}  # bytes a second of a link that is not broken
SLOWEST = {"cpu": 0.05, "cuda": 0.005}  # seconds of a small message on a link that is not broken
FACTOR = 6.0  # by which a link may be slower than the median of the others of its kind
REMEDY = (
    "look at the cable, the network card and the switch port of both hosts (ethtool, ibstat, dmesg)"
)
LOCAL = "look at what else runs there (top), and at CPU limits of the container"


@dataclass(frozen=True)
class Pair:
    """Two neighbours on an axis, seen from one of them. peer: the other's rank in the group. first:
    it sends first."""

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
        if self.device == "cuda":
            torch.cuda.synchronize()

    def there_and_back(self, tensor: Tensor) -> float:
        """Send `tensor` to the other rank and back; return the seconds for one way."""
        start = time.perf_counter()
        for mine in (self.first, not self.first):
            self.send(tensor) if mine else self.receive(tensor)
        return (time.perf_counter() - start) / 2


def axes_of(mesh: DeviceMesh, device: str) -> list[Axis]:
    """Return the axes of more than one rank. On CUDA with groups of NCCL. Collective over the
    world."""
    axes = [axis for axis in (Axis.of(mesh, name) for name in AXES) if axis.size > 1]
    if device == "cuda":
        return [replace(axis, group=_nccl_group(mesh, axis.name)) for axis in axes]
    return axes


def _nccl_group(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    dim = (mesh.mesh_dim_names or ()).index(name)
    return split(mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)), "nccl")


def measure(place: Place) -> list[dict[str, Any]]:
    """Return the record of each link of this rank that begins here, and of the collectives of each
    axis."""
    found = []
    for axis in axes_of(make_mesh(*place.layout), place.device):
        for turn in (0, 1):
            found += _pair(place, axis, turn)
        found.append(_collectives(place, axis))
    return found


def _pair(place: Place, axis: Axis, turn: int) -> Iterator[dict[str, Any]]:
    """Measure the link of this turn: of ranks 0 and 1, 2 and 3, ... or of ranks 1 and 2, 3 and 4,
    ..."""
    first = axis.rank % 2 == turn
    peer = axis.rank + (1 if first else -1)
    if not 0 <= peer < axis.size:
        return
    other = dist.get_global_rank(axis.group, peer) if axis.group else peer
    pair = Pair(axis, peer, first, place.device)
    found = _guarded(lambda: {"order": order(pair), **speeds(pair)})
    if first:
        hosts = [place.host, place.host_of(other)]
        yield {
            "axis": axis.name,
            "device": place.device,
            "ranks": [place.rank, other],
            "hosts": hosts,
            **found,
        }


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except (RuntimeError, ValueError) as error:
        return {"error": str(error).splitlines()[0]}


def order(pair: Pair) -> str:
    """Send numbered messages one way, then back; return what is wrong with their order, "" if
    nothing."""
    wrong_ones = ""
    for mine in (pair.first, not pair.first):
        for number in range(NUMBERED):
            message = torch.full((2,), float(number), device=pair.device)
            if mine:
                pair.send(message)
                continue
            pair.receive(message.fill_(-1.0))
            if message.tolist() != [number, number] and not wrong_ones:
                wrong_ones = f"message {number} was number {message.tolist()[0]:g}"
    return wrong_ones


def speeds(pair: Pair) -> dict[str, float]:
    """Return the seconds of a small message and the bytes a second of a large one, both at their
    best."""
    small, medium = (torch.zeros(n, device=pair.device) for n in (2, SMALL))
    pair.there_and_back(small)
    latency = min(pair.there_and_back(small) for _ in range(ROUNDS))
    rate = agreed = 0.0
    for _ in range(TRIES):  # a busy host is no broken link
        rate = max(rate, 4 * SMALL / min(pair.there_and_back(medium) for _ in range(2)))
        if (agreed := _agreed(pair, rate)) >= LEAST[pair.device]:
            break
    if agreed * 1.0 > 4 * LARGE:
        large = torch.zeros(LARGE, device=pair.device)
        rate = 4 * LARGE / min(pair.there_and_back(large) for _ in range(3))
    return {"latency_s": latency, "bytes_per_s": rate}


def _agreed(pair: Pair, rate: float) -> float:
    """Return the rate that the first of both ranks has measured, on both."""
    said = torch.tensor([rate], device=pair.device)
    pair.send(said) if pair.first else pair.receive(said)
    return float(said)


def _collectives(place: Place, axis: Axis) -> dict[str, Any]:
    """Sum and gather on all ranks of the axis, both in flight at once, and time a large sum."""

    def both() -> dict[str, Any]:
        ones = torch.full((1000,), float(axis.rank + 1), device=place.device)
        own = torch.full((3,), axis.rank, device=place.device, dtype=torch.int64)
        sum_ = axis.start_sum_(ones)
        gathered = axis.start_gather(own)
        whole = gathered()
        sum_()
        right = bool((ones == axis.size * (axis.size + 1) / 2).all())
        in_order = whole.tolist() == [rank for rank in range(axis.size) for _ in range(3)]
        return {
            "right": right,
            "in_order": in_order,
            "sum_s": min(_summed(place, axis) for _ in range(2)),
        }

    found = _guarded(both)
    return {
        "axis": axis.name,
        "size": axis.size,
        "collective": True,
        "rank": place.rank,
        "host": place.host,
        **found,
    }


def _summed(place: Place, axis: Axis) -> float:
    large = torch.zeros(SMALL, device=place.device)
    start = time.perf_counter()
    axis.sum_(large)
    if place.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def judge(answers: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Finding]:
    """Yield the findings about each axis."""
    records = [record for answer in answers for record in answer]
    if not records:
        yield not_tried("links", "one rank only: it has no links")
    for axis in dict.fromkeys(record["axis"] for record in records):
        own = [record for record in records if record["axis"] == axis]
        problems = [*_links(axis, [one for one in own if "collective" not in one])]
        problems += _sums(axis, [one for one in own if "collective" in one])
        yield from problems or [_well(axis, own)]


def _links(axis: str, links: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    whole = [link for link in links if "error" not in link]
    for link in links:
        between = _between(axis, link)
        remedy = LOCAL if _local(link) else REMEDY
        if "error" in link:
            yield wrong(f"links {axis}", f"{between}: {link['error']}", remedy, **link)
        elif link["order"]:
            yield wrong(
                f"links {axis}",
                f"{between}: messages out of order: {link['order']}",
                remedy,
                **link,
            )
        elif why := slow(link, [one for one in whole if _local(one) == _local(link)]):
            yield wrong(f"links {axis}", f"{between}: {why}", remedy, **link)


def slow(link: dict[str, Any], alike: Sequence[dict[str, Any]]) -> str:
    """Return why a link is too slow, by itself or beside at least two others of its kind; "" if it
    is not."""
    rate = link["bytes_per_s"]
    latency = link["latency_s"]
    if rate < LEAST[link["device"]]:
        return f"{size(rate)}/s, and less than {size(LEAST[link['device']])}/s is a broken link"
    if latency > SLOWEST[link["device"]]:
        return (
            f"a small message takes {duration(latency)}, and more than "
            f"{duration(SLOWEST[link['device']])} is too long"
        )
    if len(alike) > 2:
        usual = statistics.median(one["bytes_per_s"] for one in alike)
        if rate * FACTOR < usual:
            return f"{size(rate)}/s, {usual / rate:.0f} times slower than other links of this axis"
    return ""


def _local(link: dict[str, Any]) -> bool:
    return link["hosts"][0] == link["hosts"][1]


def _between(axis: str, link: dict[str, Any]) -> str:
    one, other = (
        f"rank {rank} on {host}" for rank, host in zip(link["ranks"], link["hosts"], strict=True)
    )
    return f"{one} and {other}"


def _sums(axis: str, sums: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for one in sums:
        who = f"rank {one['rank']} on {one['host']}"
        if "error" in one:
            yield wrong(f"links {axis}", f"{who}: sums of the axis fail: {one['error']}", REMEDY)
        elif not one["right"] or not one["in_order"]:
            if not one["right"]:
                what = "a sum is wrong"
            else:
                what = "gathered parts are not in the order of ranks"
            yield wrong(
                f"links {axis}",
                f"{who}: {what}",
                "look at versions of NCCL and drivers on all hosts",
            )


def _well(axis: str, records: Sequence[dict[str, Any]]) -> Finding:
    links = [one for one in records if "collective" not in one]
    latency = max(one["latency_s"] for one in links)
    rate = min(one["bytes_per_s"] for one in links)
    seconds = max(one["sum_s"] for one in records if "collective" in one)
    backend = "NCCL" if links[0]["device"] == "cuda" else "gloo"
    said = f"{backend}, {counted(len(links), 'link')}: {duration(latency)} and {size(rate)}/s at "
    said += f"worst, messages in order; a sum of {size(4 * SMALL)} takes {duration(seconds)}"
    return ok(
        f"links {axis}", said, latency_s=latency, bytes_per_s=rate, sum_s=seconds, links=list(links)
    )
