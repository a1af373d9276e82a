"""Joining the world: all ranks, or a line that names who is missing. Ranks are threads here."""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from megaprec.errors import UserError
from parallel import joining
from parallel.described_world import lone_task
from tests.hosts import free_port
from tests.refusals import shows

HOST = socket.gethostname()


def joined(ranks: Sequence[int], size: int, port: int) -> list[str]:
    """What each of these ranks gets, which begin one after the other: rank and size, or the
    error."""

    def of(rank: int) -> str:
        names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        time.sleep(0.1 * ranks.index(rank))
        try:
            store, *told = joining.join({name: str(value) for name, value in names.items()})
        except UserError as error:
            return str(error)
        stores.append(store)
        return str(told)

    stores: list[dist.Store] = []
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(of, ranks))


def test_all_ranks_join_in_any_order() -> None:
    assert joined([2, 0, 1], 3, free_port()) == ["[2, 3]", "[0, 3]", "[1, 3]"]


def test_ranks_that_do_not_join_are_named_by_all_that_did(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "NEWS", 0.05)
    held = list[dist.Store]()
    connected = joining._connect
    missing = joining._wait_for_ranks

    def kept(*arguments: Any) -> dist.Store:
        held.append(connected(*arguments))
        return held[-1]

    def soon_missing(store: dist.Store, size: int, seconds: float, *_: object) -> str:
        store.wait([joining._key(2)])  # however late it begins
        return missing(store, size, 1.0)

    monkeypatch.setattr(joining, "_connect", kept)
    monkeypatch.setattr(joining, "_wait_for_ranks", soon_missing)
    problem = f"ranks 1, 3 of 4 have not joined within 1 s; there are the ranks of {HOST}"
    assert joined([0, 2], 4, free_port()) == [problem, problem]
    assert "ranks 1, 3 of 4 have not joined for " in capfd.readouterr().err


def test_a_rank_that_cannot_reach_the_store_says_where_it_looks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "JOIN", 1.0)
    monkeypatch.setattr(joining, "NEWS", 0.05)
    port = free_port()
    (problem,) = joined([1], 2, port)
    assert shows(
        problem,
        "parallel.no_answer",
        here=f"rank 1 on {HOST}",
        address="127.0.0.1",
        port=port,
        seconds=1,
    )
    assert (
        f"rank 1 on {HOST} waits for the ranks' store at 127.0.0.1:{port}: "
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("address", ["no-such-machine.invalid", "a" * 64])
def test_a_first_machine_whose_name_is_not_known_is_said(
    address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "NEWS", 0.05)
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match=f"MASTER_ADDR {address}: "):
        joining.join(world, seconds=1.0)
    assert f"29500 (MASTER_ADDR {address}: " in capfd.readouterr().err


def test_a_port_in_use_is_said() -> None:
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (problem,) = joined([0], 2, taken.port)
    assert shows(problem, "parallel.port_not_opened", here=f"rank 0 on {HOST}", port=taken.port)


def test_many_missing_ranks_are_not_all_named() -> None:
    assert joining._count_missing([5], 8) == "rank 5 of 8 has"
    assert (
        joining._count_missing(list(range(100)), 128)
        == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... of 128 have"
    )


HERE = joining.Seat("alpha", "1", "10.0.0.1")


def test_ranks_of_several_machines_name_no_address_that_only_their_own_machine_reaches() -> None:
    """Debian writes the machine's own name into /etc/hosts as 127.0.1.1, and gloo tells it to the
    other machines."""
    lost = joining.Seat("beta", "2", "127.0.1.1")
    said = joining._unreachable([HERE, HERE, lost])
    assert said.startswith(
        "beta is 127.0.1.1 to itself (/etc/hosts), which no other machine reaches: "
    )
    assert "set GLOO_SOCKET_IFNAME on each machine" in said
    assert joining._unreachable([HERE, joining.Seat("beta", "2", "10.0.0.2")]) == ""
    assert joining._unreachable([HERE, joining.Seat("beta", "2", "")]) == "", (
        "the interface was named"
    )
    assert joining._unreachable([lost, lost]) == "", "one machine reaches itself"
    assert "::1" in joining._unreachable([HERE, joining.Seat("beta", "2", "::1")])


def test_a_host_whose_name_resolves_to_nothing_is_at_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert joining.Seat.of_this_process().address == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert joining.Seat.of_this_process().address in ("127.0.0.1", "::1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert joining.Seat.of_this_process().address == ""


# The variables of a shell that "srun --ntasks=8 --pty bash" has opened.
SHELL = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PTY_PORT": "41234",
    "RANK": "0",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "127.0.0.1",
}
LONE = (
    "this is task 0 of 8 of a Slurm step, and no other task is there: start the command with "
    "srun, or unset "
    "SLURM_STEP_NUM_TASKS to run without the others"
)


def test_a_shell_that_slurm_has_opened_is_told_so_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "ALONE", 0.1)
    assert 3 * joining.ALONE < 5
    with pytest.raises(UserError, match=LONE):
        joining.join({**SHELL, "MASTER_PORT": str(free_port())})


def test_a_task_that_is_no_shell_says_so_and_goes_on_waiting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "ALONE", 0.1)
    task = {name: value for name, value in SHELL.items() if name != "SLURM_PTY_PORT"}
    with pytest.raises(UserError, match=r"ranks 1, .* of 8 have not joined within 1 s"):
        joining.join({**task, "MASTER_PORT": str(free_port())}, seconds=1.0)
    assert capfd.readouterr().err == f"{LONE} (waiting goes on)\n"


@pytest.mark.parametrize("others", [{"TORCHELASTIC_RUN_ID": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_ranks_of_another_launcher_are_no_tasks_of_slurm(others: dict[str, str]) -> None:
    assert lone_task({**SHELL, **others}) == ""
    assert lone_task(SHELL) == LONE
