"""Clocks, the shared filesystem and links between ranks on different hosts; each planted fault is
named."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.doctor.places import HOSTS, place
from tests.ranks import run_ranks
from tools.verify.doctor import clocks, links, shared
from tools.verify.doctor.finding import OK, WRONG, Finding
from tools.verify.doctor.links import Pair
from tools.verify.doctor.questions import RankContext


def read_clocks(mesh: DeviceMesh, folder: Path, ahead: float) -> dict[str, Any]:
    with patch.object(clocks, "wall", lambda: time.time() + ahead * mesh.get_rank()):
        return clocks.readings(place(folder))


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (0.0, "^3 hosts agree within"),
        (5.0, r"^the clock of beta is .* s ahead"),
        (-60.0, "^the clock of beta .* behind"),
    ],
)
def test_a_host_whose_clock_differs_is_named(ahead: float, said: str, tmp_path: Path) -> None:
    findings = list(clocks.judge(run_ranks(read_clocks, {"dp": 3}, folder=tmp_path, ahead=ahead)))
    assert re.search(said, findings[0].message)
    assert [one.verdict for one in findings] == ([WRONG, WRONG] if ahead else [OK])
    for host, one in enumerate(findings, start=1) if ahead else ():
        assert abs(one.facts["offset_s"] - host * ahead) <= one.facts["error_s"] + 1e-3, (
            "the error says how far it may be off"
        )


def test_a_clock_that_is_behind_installed_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "wall", lambda: 10.0 * time.monotonic())
    (finding,) = clocks.judge([clocks.readings(place(tmp_path))])
    assert "behind the time of installed files" in finding.message


def look(mesh: DeviceMesh, folder: Path, fault: str) -> dict[str, Any]:
    """The part of a rank; the second host has the fault."""
    here = place(folder)
    if fault == "no lock" and here.rank == 0:
        with patch.object(shared.fcntl, "flock", lambda *_: None):
            return shared.probe(here)
    if fault and fault != "no lock" and here.rank == 1:
        return look_elsewhere(here, fault)
    return shared.probe(here)


def look_elsewhere(here: RankContext, fault: str) -> dict[str, Any]:
    """A host with another filesystem, empty or with the first content only."""
    wait_for = RankContext.wait_for
    other = here.folder / "other"
    other.mkdir()
    if fault == "stale":
        (other / "file").write_bytes(b"one")
    with (
        patch.object(shared, "VISIBLE_SECONDS", 0.3),
        patch.object(
            RankContext,
            "wait_for",
            lambda p, key, seconds: (
                str(other) if key == "shared/one" else wait_for(p, key, seconds)
            ),
        ),
    ):
        return shared.probe(here)


FAULTS = {
    "": "2 hosts see each other's files and locks",
    "not shared": "a file that alpha wrote there is not seen",
    "stale": "the old content is seen after",
    "no lock": "a file that alpha has locked can be locked again",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_that_does_not_share_the_filesystem_is_named(fault: str, tmp_path: Path) -> None:
    answers = run_ranks(look, {"dp": 2}, folder=tmp_path, fault=fault)
    finding, *_ = shared.judge(answers)
    assert FAULTS[fault] in finding.message and finding.verdict == (WRONG if fault else OK)
    assert not fault or "beta" in finding.message


class Steady:
    """A clock of which each look takes a tenth of a millisecond, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now


def measure(mesh: DeviceMesh, folder: Path, fault: str) -> list[dict[str, Any]]:
    """The links of a rank of dp 2 x tp 2; rank 3 has the fault."""
    here = place(folder, (1, 2, 2))
    clock = Steady()
    with (
        patch.object(links, "time", clock),
        patch.object(links, "ROUNDS", 2),
        faulty(fault, clock),
    ):
        return links.measure(here)


@contextmanager
def faulty(fault: str, clock: Steady) -> Iterator[None]:
    """Small messages from rank 3 take 120 ms."""
    receive = Pair.receive

    def slow(pair: Pair, tensor: torch.Tensor) -> None:
        receive(pair, tensor)
        assert pair.axis.group
        if dist.get_global_rank(pair.axis.group, pair.peer) == 3 and tensor.tolist() == [0.0, 0.0]:
            clock.now += 0.12

    with patch.object(Pair, "receive", slow if fault == "slow" else receive):
        yield


LINKS = {
    "": ("gloo, 2 links: ", "gloo, 2 links: "),
    "slow": ("rank 1 on beta and rank 3 on delta: ", "rank 2 on gamma and rank 3 on delta: "),
}


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("fault", LINKS)
def test_a_link_that_is_slow_is_named(fault: str, tmp_path: Path) -> None:
    answers = run_ranks(measure, {"dp": 2, "tp": 2}, folder=tmp_path, fault=fault)
    findings = list(links.judge(answers))
    assert [one.check for one in findings] == ["links dp", "links tp"]
    assert {one.verdict for one in findings} == {WRONG if fault else OK}
    for finding, said in zip(findings, LINKS[fault], strict=False):
        assert finding.message.startswith(said)


def link(rate: float = 1e9, latency: float = 1e-4, **more: Any) -> dict[str, Any]:
    ranks = {"axis": "tp", "device": "cpu", "ranks": [0, 1], "hosts": list(HOSTS[:2])}
    return {**ranks, "latency_s": latency, "bytes_per_s": rate, **more}


def judged(*records: dict[str, Any]) -> list[Finding]:
    total = {"axis": "tp", "size": 2, "collective": True, "rank": 0, "host": "alpha"}
    total |= {"right": True, "in_order": True, "sum_s": 1e-3}
    return list(links.judge([[*records, total]]))


def test_a_link_is_slow_by_itself_or_beside_others_of_its_kind() -> None:
    assert judged(link())[0].verdict == OK
    assert "less than 19.1 MiB/s is a broken link" in judged(link(1e7))[0].message
    assert "more than 50.0 ms is too long" in judged(link(latency=0.1))[0].message
    one, *others = judged(link(), link(), link(1e8, ranks=[2, 3]))
    assert (
        "10 times slower than other links" in one.message and "rank 2" in one.message and not others
    )
    local = link(1e10, hosts=["alpha", "alpha"])
    assert judged(local, local, link(1e9))[0].verdict == OK, "links within a host are another kind"


def test_a_link_that_fails_and_a_sum_that_is_wrong_are_named() -> None:
    (one,) = judged(
        {"axis": "tp", "device": "cpu", "ranks": [0, 1], "hosts": ["a", "b"], "error": "timed out"}
    )
    assert one.message == "rank 0 on a and rank 1 on b: timed out" and "ethtool" in one.remedy
    sums = {
        "axis": "tp",
        "size": 2,
        "collective": True,
        "rank": 1,
        "host": "beta",
        "in_order": True,
        "sum_s": 1.0,
    }
    (one,) = links.judge([[{**sums, "right": False}]])
    assert one.message == "rank 1 on beta: a sum is wrong"
