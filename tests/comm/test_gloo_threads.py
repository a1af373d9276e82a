"""gloo's threads wait their turn in every group of a mesh; the threads of ranks and of processes do
not."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.gloo_threads import waiting_their_turn
from parallel.mesh import world
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has the policy SCHED_BATCH"
)


def policies() -> dict[str, set[int]]:
    """The scheduling policies of this process's threads, by the names of the threads."""
    found: dict[str, set[int]] = {}
    for thread in Path("/proc/self/task").iterdir():
        found.setdefault((thread / "comm").read_text().strip(), set()).add(
            os.sched_getscheduler(int(thread.name))
        )
    return found


def policies_of_a_rank(mesh: DeviceMesh) -> tuple[dict[str, set[int]], int]:
    for axis in mesh.mesh_dim_names or ():
        torch.distributed.all_reduce(torch.ones(1), group=mesh.get_group(axis))
    return policies(), os.sched_getscheduler(0)


def test_gloos_threads_of_every_group_wait_their_turn_and_the_ranks_own_does_not() -> None:
    for found, own in run_ranks(policies_of_a_rank, {"pp": 2, "tp": 2}):
        assert found["pt_gloo_runloop"] == {os.SCHED_BATCH}
        # older releases of gloo do not name this one
        assert found.get("gloo_tcp_loop", {os.SCHED_BATCH}) == {os.SCHED_BATCH}
        assert own == os.SCHED_OTHER


def test_so_do_those_of_a_world() -> None:
    deadline = time.monotonic() + 60
    with world():
        # A thread names itself after it has started, and not all releases of gloo name them all.
        while "pt_gloo_runloop" not in policies() and time.monotonic() < deadline:
            time.sleep(0.01)
        found = policies()
    assert found["pt_gloo_runloop"] == {os.SCHED_BATCH}
    assert found.get("gloo_tcp_loop", {os.SCHED_BATCH}) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_policy_of_this_thread_is_its_own_again_also_after_an_error() -> None:
    with suppress(ZeroDivisionError), waiting_their_turn():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        raise ZeroDivisionError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_process_with_a_policy_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[Any] = []
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_RR)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: changed.append(arguments))
    with waiting_their_turn():
        pass
    assert not changed


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
def test_a_system_that_refuses_the_policy_goes_on_without_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, call, refused)
    with waiting_their_turn():
        pass
