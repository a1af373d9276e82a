"""Versions, devices, threads and kernels: hosts that differ from the others are named."""

from typing import Any

import pytest
import torch

from tests.doctor.places import HOSTS, place
from tools.verify.doctor import kernels, machine
from tools.verify.doctor.finding import NOT_TRIED, OK, WRONG, Finding


def answers(**differs: Any) -> list[dict[str, Any]]:
    """What three hosts answer, of which the last differs in these."""
    usual = {
        "megaprec": "1",
        "torch": "2.13",
        "python": "3.11",
        "system": "Linux",
        "byteorder": "little",
        "cores": 8,
    }
    usual |= {
        "threads": 4,
        "local_ranks": 1,
        "load": 0.5,
        "cuda": "13.0",
        "gpu_tool": "/bin/nvidia-smi",
    }
    usual |= {
        "untested": [],
        "device": "cuda",
        "gpu": "H200",
        "memory": 2**37,
        "used_by_others": 0,
        "nccl": "2.28",
    }
    made = [{**usual, "rank": n, "host": HOSTS[n], "uuid": str(n)} for n in range(3)]
    made[2] |= differs
    return made


def problems(**differs: Any) -> list[Finding]:
    return [one for one in machine.judge(answers(**differs)) if one.verdict != OK]


def test_alike_hosts_have_no_problems() -> None:
    assert problems() == []
    assert [one.check for one in machine.judge(answers())] == ["versions", "devices", "threads"]


def test_more_ranks_than_cores_are_well_with_one_thread_each() -> None:
    *_, found = machine.judge([answers(threads=1, local_ranks=2, cores=1)[2]])
    message = "2 local ranks x 1 thread on 1 core, load 0.5; ranks take turns on the cores"
    assert (found.verdict, found.message) == (OK, message)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"torch": "2.12"}, "torch 2.12 on rank 2 on gamma, 2.13 on the others"),
        ({"nccl": "2.27"}, "nccl 2.27 on rank 2 on gamma, 2.28 on the others"),
        ({"cuda": ""}, "cuda is not there on rank 2 on gamma, 13.0 on the others"),
        ({"uuid": "0"}, "ranks 0 and 2 on alpha and gamma share GPU 0"),
        ({"used_by_others": 2**35}, "other processes use 32.0 GiB of the GPU of rank 2 on gamma"),
        ({"gpu": "H100"}, "rank 2 on gamma has H100, the others H200"),
        ({"threads": 8, "local_ranks": 4}, "4 local ranks x 8 threads on 8 cores of gamma"),
        (
            {"device": "cpu"},
            "nvidia-smi is there, but torch sees no GPU, or fewer than ranks: rank 2 on gamma",
        ),
    ],
)
def test_a_host_that_differs_is_named_with_a_remedy(differs: dict[str, Any], said: str) -> None:
    (finding,) = problems(**differs)
    assert (finding.verdict, finding.message) == (WRONG, said) and finding.remedy


def test_a_version_that_is_not_tested_is_named_with_its_ranks() -> None:
    said = "torch 2.15.1 is not of the versions that megaprec is tested with: <2.15,>=2.11"
    (one,) = problems(untested=[said])
    assert (one.verdict, one.message, one.needed) == (NOT_TRIED, f"{said} (rank 2 on gamma)", False)
    every = [answer | {"untested": [said]} for answer in answers()]
    assert [one.message for one in machine.judge(every) if one.verdict == NOT_TRIED] == [said]


def test_the_facts_of_this_machine_are_judged_well(tmp_path: Any) -> None:
    found = machine.facts(place(tmp_path))
    assert found["torch"] == torch.__version__ and found["cores"] >= 1
    assert [one.verdict for one in machine.judge([{**found, "gpu_tool": ""}])] == [OK, OK, OK]


def test_each_kernel_is_here_and_right_or_absent_with_the_reason(tmp_path: Any) -> None:
    found = kernels.probe(place(tmp_path))
    for name, (state, why) in found["tried"].items():
        assert state in (kernels.HERE, kernels.ABSENT) and bool(why) == (state == kernels.ABSENT), (
            name
        )
    verdicts = {one.verdict for one in kernels.judge([found])}
    assert verdicts <= {OK, NOT_TRIED}


def test_a_kernel_that_computes_wrongly_is_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, offs: (a @ b[0]) * 1.1)
    (one,) = [f for f in kernels.judge([kernels.probe(place(tmp_path))]) if f.verdict == WRONG]
    assert one.message.startswith("grouped products on alpha: wrong by ")


def test_a_kernel_that_some_hosts_lack_is_named() -> None:
    tried = {name: [kernels.HERE, ""] for name in kernels.KERNELS}
    hosts = [{"host": host, "device": "cuda", "tried": tried} for host in HOSTS[:2]]
    hosts[1] = {**hosts[1], "tried": {**tried, "FP8 products": [kernels.ABSENT, "no kernel image"]}}
    (one,) = [f for f in kernels.judge(hosts) if f.verdict == WRONG]
    assert one.message.startswith("FP8 products are not on beta, but on the others")


def test_cores_that_ranks_share_and_other_work_that_has_them_are_told() -> None:
    def told(**changed: float) -> str:
        *_, found = machine.judge([answers(**changed)[2]])
        assert (found.check, found.verdict) == ("threads", OK)
        return found.message

    quiet = told(threads=1, local_ranks=2, cores=4, load=1.0)
    assert "turns" not in quiet and "other work" not in quiet
    busy = told(threads=1, local_ranks=4, cores=2, load=14.0)
    assert "ranks take turns on the cores; other work has the cores of " in busy
