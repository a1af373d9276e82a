"""Nothing that tests have started outlives them, also if pytest is killed and can clear nothing
away."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.project.forked_command import served
from tests.project.test_readme import ROOT
from tests.ranks import run_ranks
from tests.training.test_train import runs, until

SAID = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.getppid()}')"


def _stay(mesh: DeviceMesh, folder: Path) -> None:
    (folder / "pids").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(10_000)


def of_ranks(folder: Path) -> None:
    """Have a rank stay, and say who it and its server are."""
    run_ranks(_stay, {"dp": 1}, folder=folder)


def of_commands(folder: Path) -> None:
    """Have a command stay, and say who it and what looks after it are."""
    with served(folder, late=()) as programs:
        stay = [programs / "python", "-c", f"{SAID}; import time; time.sleep(10_000)"]
        subprocess.run([*stay, folder / "pids"], check=True)


@pytest.mark.cases(0, sample=1)
@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell a process that its parent died"
)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("server", [of_ranks, of_commands], ids=lambda server: server.__name__)
def test_servers_and_what_they_started_end_with_a_process_that_is_killed(
    server: object, tmp_path: Path
) -> None:
    name = getattr(server, "__name__", "")
    begin = (
        f"import sys, {__name__} as tests; sys.executable = {os.fsdecode(spawn.get_executable())!r}"
    )
    killed = f"{begin}; open(tests.Path(sys.argv[1]) / 'pid', 'w').write(str(tests.os.getpid()))"
    program = f"{killed}; tests.{name}(tests.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], env=environment):
        until(
            lambda: (
                (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2
            )
        )
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        until(lambda: not any(map(runs, started)))


@pytest.mark.slow
def test_a_signal_to_a_command_that_has_just_ended_says_nothing(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    with served(tmp_path, late=()) as programs:
        for _ in range(40):  # most signals come too early or too late
            with subprocess.Popen(
                [programs / "python", "-c", deaf], stdout=-1, stderr=-1, text=True
            ) as client:
                assert client.stdout and client.stderr
                client.stdout.readline()
                while client.poll() is None:
                    client.send_signal(signal.SIGTERM)
                assert (client.returncode, client.stderr.read()) in [(0, ""), (-signal.SIGTERM, "")]
