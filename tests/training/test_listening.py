"""What a run on one machine listens on, and what another user of the machine reaches of it."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel.local_store import LONGEST_PATH, STORE, LocalStore, served_store
from parallel.loopback import ONE_MACHINE, within_machine
from tests.runs import write_run
from tests.strangers import as_nobody

ROOT = Path(__file__).parents[2]
LISTENS = "0A"
# as the kernel writes addresses: words of 32 bits of this machine, which is little-endian
LOOPBACK = re.compile(r"......7F|0{24}01000000|0{16}FFFF0000......7F")
Port = tuple[str, int]  # the address as the kernel writes it, and the port

RANK = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch.distributed as dist
from parallel.mesh import make_mesh, world
here = Path(sys.argv[1])
with world() as store:
    make_mesh(1, 2, 1)
    store.set(f"told by {{dist.get_rank()}}", "a word between ranks")
    (here / f"ready {{dist.get_rank()}}").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
"""


def processes_of(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from processes_of(int(child))


def ports_of(pids: list[int]) -> set[Port]:
    """The addresses and ports at which processes listen or take datagrams."""
    inodes = set[str]()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    found = set[Port]()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = fields = row.split()
            if fields[9] in inodes and (state == LISTENS or table.startswith("udp")):
                address, _, port = local.partition(":")
                found.add((address, int(port, 16)))
    return found


def watched(argv: list[str], folder: Path, while_it_runs: Callable[[int], bool]) -> set[Port]:
    """The ports of a command and its ranks over its whole run, which must end well.

    while_it_runs: called with its process id until it returns True.
    """
    found = set[Port]()
    done = False
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL) as command:
        while command.poll() is None:
            found |= ports_of([*processes_of(command.pid)])
            done = done or while_it_runs(command.pid)
            time.sleep(0.05)
        assert command.returncode == 0
    assert done
    return found


def connected(address: tuple[str, int]) -> str:
    with socket.socket() as connection:
        connection.settimeout(0.3)
        connection.connect(address)
        return "connected"


@pytest.mark.parametrize("started_by", ["us", "a launcher on one machine", "one on several"])
def test_loopback_is_asked_for_where_all_ranks_are_on_one_machine_and_only_until_they_are_joined(
    started_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher of another's may have chosen an interface, which then counts."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    own = {"GLOO_SOCKET_IFNAME": "a_cluster_has_it0"}
    expected = {"us": loopback, "a launcher on one machine": loopback | own, "one on several": own}
    for name in loopback:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    store: dist.Store = dist.HashStore()
    if started_by != "us":
        store = dist.PrefixStore("ranks", store)
        store.set(ONE_MACHINE, "yes" if "one machine" in started_by else "no")

    def asked_for() -> dict[str, str]:
        return {name: os.environ[name] for name in loopback if name in os.environ}

    with within_machine(store):
        assert asked_for() == expected[started_by]
    assert asked_for() == own


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["train", "my.toml", "parallel.data=2"],
        ["train", "my.toml"],
        ["parity", "my.toml", "--layouts", "tp=2", "--steps", "1"],
        pytest.param(["prove", "my.toml", "parallel.data=2"], marks=pytest.mark.campaign),
        pytest.param(["doctor", "my.toml", "parallel.data=2"], marks=pytest.mark.campaign),
    ],
    ids=lambda words: " ".join(words[::2]),
)
def test_a_run_on_one_machine_listens_on_loopback_alone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the shell names the interface of a cluster."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "a_cluster_has_it0")
    write_run(tmp_path)
    command = [sys.executable, "-P", "-m", "megaprec", *words]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ports = watched(command, tmp_path, lambda pid: True)
    assert ports, "gloo listens: else this test does not see it"
    assert not [port for port in ports if not LOOPBACK.fullmatch(port[0])]


@pytest.mark.slow
def test_another_user_can_neither_read_nor_write_what_local_ranks_tell_each_other(
    tmp_path: Path,
) -> None:
    start = f"start_ranks([sys.executable, '-c', {RANK!r}, {str(tmp_path)!r}], 2)"
    program = f"import sys; from tools.training.launch import start_ranks; sys.exit({start})"
    tried: dict[str, object] = {}

    def attack(pid: int) -> bool:
        if len([*tmp_path.glob("ready *")]) < 2:
            return False
        *_, rank = processes_of(pid)
        environment = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
        (store,) = (value for value in environment if value.startswith(f"{STORE}="))
        path = Path(store.partition("=")[2])
        own = LocalStore(path)
        assert own.get("told by 1") == b"a word between ranks"
        own.close()
        tried["socket"] = as_nobody(lambda: LocalStore(path).get("told by 1").decode())
        tried["groups"] = as_nobody(lambda: path.with_name("groups").read_bytes().decode())
        tried["folder"] = as_nobody(lambda: os.listdir(path.parent))
        for _, port in ports_of([*processes_of(pid)]):
            address = ("127.0.0.1", port)
            tried[f"port {port}"] = as_nobody(lambda address=address: connected(address))
        (tmp_path / "go").touch()
        return True

    watched([sys.executable, "-c", program], ROOT, attack)
    assert len(tried) > 4, "each rank has a port of gloo's"
    refused = ("PermissionError", "TimeoutError", "DistNetworkError")
    assert not {place: answer for place, answer in tried.items() if answer not in refused}


def test_a_store_is_a_folder_that_other_users_may_not_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the folder of temporary files is open to all, or its path too long for a socket."""
    for folder in (tmp_path, tmp_path / ("long" * 20)):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with served_store() as path:
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert len(os.fsencode(path)) <= LONGEST_PATH
            store = LocalStore(path)
            other = store.clone()
            store.set("key", "value")
            assert other.get("key") == b"value"
            store.close()
            other.close()
        assert not path.parent.exists()
