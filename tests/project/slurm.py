"""A real Slurm on two played hosts, each a node with one CPU and one "GPU"; one of them has the
controller too."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts import ADDRESSES, NAMES, Hosts, two_hosts

SETTINGS = """ClusterName=two
SlurmctldHost={1}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={0}
SlurmdSpoolDir={0}/%n
SlurmctldPidFile={0}/controller.pid
SlurmdPidFile={0}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=120
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=alpha,beta CPUs=1 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES
"""
FILES = {
    "gres.conf": "AutoDetect=off\nName=gpu File=/dev/null\n",
    "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
}
# Slurm wants a folder of control groups, which it does not use here, and hosts that know each
# other's names. A job would take the names of a host's links to the other one.
ON_HOST = """unset GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME
mount -t tmpfs none /sys/fs/cgroup && mount --bind "$1" /etc/hosts && cd "$2" && shift 2 && exec "$@"
"""


class Cluster:
    """The cluster, with its files in `folder`. home: the folder in which commands run.

    controller: the host of Slurm's controller, and of commands."""

    def __init__(self, hosts: Hosts, folder: Path, home: Path, controller: int) -> None:
        self.hosts = hosts
        self.home = home
        self.controller = controller
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        for name, text in {
            "slurm.conf": SETTINGS.format(folder, NAMES[controller]),
            **FILES,
        }.items():
            (folder / name).write_text(text)
        known = [f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))

    def start(self, host: int, *command: str) -> subprocess.Popen:
        """A daemon or a command on a host; its output is in the folder, in a file of the command's
        name."""
        words = [
            "bash",
            "-c",
            ON_HOST,
            "bash",
            str(self.folder / "hosts"),
            str(self.home),
            *command,
        ]
        with (self.folder / f"{command[0]}-{NAMES[host]}.txt").open("wb") as output:
            return self.hosts.start(host, words, self.environ, output)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints on the controller's host."""
        assert self.start(self.controller, *command).wait(timeout=12000) == 0, self.said()
        return (self.folder / f"{command[0]}-{NAMES[self.controller]}.txt").read_text()

    def said(self) -> str:
        return "\n".join(
            f"== {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("*.txt"))
        )

    def lose_node(self) -> None:
        """Lose the host without the controller."""
        self.hosts.lose(1 - self.controller)


@contextmanager
def cluster(folder: Path, home: Path, controller: int) -> Iterator[Cluster]:
    """Both nodes idle. Skips the test where Slurm is not installed, or hosts cannot be played."""
    if not (shutil.which("slurmctld") and shutil.which("slurmd")):
        pytest.skip("Slurm is not installed: apt-get install slurm-wlm")
    with two_hosts() as hosts:
        made = Cluster(hosts, folder, home, controller)
        made.start(controller, "slurmctld", "-D")
        for host in range(2):
            made.start(host, "slurmd", "-D")
        wait_for(
            lambda: made.ask("sinfo", "--noheader", "--format", "%D %t").split() == ["2", "idle"],
            made,
        )
        try:
            yield made
        finally:
            made.ask("scancel", "--user", "root")


def wait_for(condition: Callable[[], bool], made: Cluster, seconds: float = 1200) -> None:
    """Wait until the condition holds; the last resort is a time that no machine takes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, made.said()
        time.sleep(0.3)
