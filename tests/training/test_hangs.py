"""A run that hangs ends in time, and names the rank that hangs, its host and the instruction it is
in."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.hosts import ADDRESSES, Hosts, free_port, two_hosts
from tests.runs import write_run
from tests.training.planted import LONG
from tools import cli
from tools.training.launch import start_ranks

ROOT = Path(__file__).parents[2]
TIMEOUT = 5.0  # parallel.timeout of these runs
# seconds after it in which all ranks must be out, or as many as they took to start, if that is more
LEAVING = 10.0
SILENCE = (
    10.0  # seconds without an answer after which an agent of torchrun leaves, once its ranks have
)
SQUARE = ["parallel.tensor=2", "parallel.pipeline=2"]
STEPS = ["train.steps=100000", "checkpoint.every=4", "train.eval_every=3", "log.every=1000"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def planted(
    run_file: Path, folder: Path, what: tuple[str, int, str, int, str], *overrides: str
) -> list[str]:
    """The command of a rank that does (action, rank, phase, step, words)."""
    action, rank, phase, step, words = map(str, what)
    plant = [
        "-m",
        "tests.training.planted",
        action,
        rank,
        phase,
        step,
        words,
        str(folder / "planted"),
    ]
    keys = [f"train.folder={folder / 'run'}", f"parallel.timeout={TIMEOUT}", *STEPS, *overrides]
    return [sys.executable, *plant, "train", str(run_file), *keys]


def slowest(folder: Path) -> float:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return max((json.loads(line)["seconds"] for line in lines), default=0.0)


class Pauses:
    """Times at which this whole machine stood still, noticed by a thread; they are no time that a
    run has taken."""

    def __init__(self) -> None:
        self.began = time.time()
        self.found = list[tuple[float, float]]()
        self._over = Event()
        self._thread = Thread(target=self._notice, daemon=True)
        self._thread.start()

    def _notice(self) -> None:
        last = time.time()
        while not self._over.wait(0.1):
            if (now := time.time()) > last + 1:
                self.found.append((last, now - last))
            last = time.time()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def seconds_since(self, moment: float) -> float:
        return (
            time.time()
            - moment
            - sum(seconds for when, seconds in self.found if when + seconds > moment)
        )

    def require_left(self, moment: float, limit: float) -> None:
        """All ranks, which were all at work at this moment, are out in time; limit: seconds until
        they leave."""
        starting = self.seconds_since(self.began) - self.seconds_since(moment)
        assert self.seconds_since(moment) < limit + max(LEAVING, starting)


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    made = Pauses()
    yield made
    made.stop()


def moment_of(folder: Path) -> float:
    """The time of the planted action."""
    return float((folder / "planted").read_text())


STOPPED = [
    ("stop", 1, "step", 3, "forward of micro-batch 1 in stage 0"),
    ("stop", 0, "step", 4, "consensus"),
    ("sleep", 2, "step", 3, "update"),
    ("stop", 3, "save", 4, ""),
]
EVERYWHERE = [
    (action, rank, phase, step, words)
    for action in ("stop", "sleep")
    for rank in range(4)
    for phase, step, words in (
        ("step", 3, "reading of samples"),
        ("step", 3, "forward of micro-batch 2"),
        ("step", 3, "backward of micro-batch 0"),
        ("step", 3, "gradient reduction"),
        ("step", 3, "consensus"),
        ("step", 3, "update"),
        ("step", 3, "record of the step"),
        ("evaluation", 3, "forward"),
        ("save", 4, ""),
        ("step", 1, "forward"),
        ("loading", 0, "opening"),
    )
    if (action, phase) != ("stop", "loading")
]


def check_hang(
    pauses: Pauses, folder: Path, what: tuple[str, int, str, int, str], error: str, code: int
) -> None:
    """The last line names the rank and where it is; all ranks were out in time; `diagnose` says it
    too."""
    action, rank, phase, step, words = what
    if action == "sleep" and (phase != "step" or step == 1):
        limit = LONG
    else:
        limit = TIMEOUT + slowest(folder)
    heartbeat = TIMEOUT / 6 if (phase, step) != ("step", step) or step == 1 else 0.0
    assert (folder / "planted").exists(), error
    pauses.require_left(moment_of(folder), limit + heartbeat)
    last = error.splitlines()[-1]
    assert code == 1
    assert re.match(rf"rank {rank} on \S+ \(process \d+\) ", last), error
    assert words in last.partition(";")[0] and (f"step {step}" if step else phase) in last, last
    assert "Traceback" not in error


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("what", STOPPED, ids=lambda what: "-".join(map(str, what)))
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_hangs_is_named_and_all_ranks_are_out_in_time(
    what: tuple[str, int, str, int, str],
    pauses: Pauses,
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    code = start_ranks(planted(run_file, tmp_path, what, *SQUARE), 4, 1)
    check_hang(pauses, tmp_path, what, capfd.readouterr().err, code)
    assert cli.main(["diagnose", str(tmp_path / "run")]) == 0
    culprit, *ranks = capfd.readouterr().out.splitlines()
    assert culprit.startswith(f"culprit    rank {what[1]} on ")
    assert len(ranks) == 4 and what[4] in ranks[what[1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "others"), [(0, "layers.1"), (1, "final_norm.weight and 1 more")]
)
@pytest.mark.usefixtures("forked_python")
def test_ranks_that_call_different_layers_name_the_weights_that_each_waits_for(
    layer: int,
    others: str,
    pauses: Pauses,
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers have as many weights, so by order one rank would take those of the other's layer."""
    monkeypatch.chdir(ROOT)
    what = (f"leave out layer {layer}", 1, "step", 3, "forward of micro-batch 0")
    keys = ["parallel.data=2", "parallel.zero=3", "model.tied=false"]
    code = start_ranks(planted(run_file, tmp_path, what, *keys), 2, 1)
    error = capfd.readouterr().err
    assert (tmp_path / "planted").exists(), error
    pauses.require_left(moment_of(tmp_path), TIMEOUT + slowest(tmp_path))
    assert code == 1
    last = error.splitlines()[-1]
    assert "all ranks wait for each other" in last, error
    waits = dict(re.findall(r"rank (\d) on [^;]*?, waiting for the weights of ([^,;]*)", last))
    assert waits == {"0": f"layers.{layer}", "1": others}, last
    assert cli.main(["diagnose", str(tmp_path / "run")]) == 0
    _, *ranks = capfd.readouterr().out.splitlines()
    for rank, weights in waits.items():
        assert f"waiting for the weights of {weights}" in ranks[int(rank)]


@pytest.mark.campaign
@pytest.mark.parametrize("what", EVERYWHERE, ids=lambda what: "-".join(map(str, what)))
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_hangs_anywhere_is_named(
    what: tuple[str, int, str, int, str],
    pauses: Pauses,
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    code = start_ranks(planted(run_file, tmp_path, what, *SQUARE), 4, 1)
    check_hang(pauses, tmp_path, what, capfd.readouterr().err, code)


def start_on(
    hosts: Hosts, host: int, command: list[str], folder: Path, port: int
) -> subprocess.Popen:
    """The one rank of a host, as Slurm would start it."""
    environ = {
        "RANK": str(host),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }
    with (folder / f"log{host}").open("wb") as output:
        return hosts.start(host, command, environ, output)


def until(done: Path, text: str = "") -> None:
    """Waits until a file has a text."""
    end = time.monotonic() + 600
    while not (done.is_file() and text in done.read_text()):
        assert time.monotonic() < end, f"{done} has no {text!r}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_cut_link_ends_both_sides_in_time_and_each_names_both_hosts(
    pauses: Pauses, run_file: Path, tmp_path: Path
) -> None:
    with two_hosts() as hosts:
        nothing = ("stop", 9, "step", 0, "")
        command = planted(run_file, tmp_path, nothing, "parallel.data=2")
        ranks = [start_on(hosts, host, command, tmp_path, 29571) for host in range(2)]
        until(tmp_path / "run" / "metrics.jsonl", '"step": 10,')
        hosts.cut()
        cut = time.time()
        codes = [rank.wait(600) for rank in ranks]
        pauses.require_left(cut, TIMEOUT + slowest(tmp_path))
        assert codes == [1, 1]
    for host in range(2):
        last = (tmp_path / f"log{host}").read_text().splitlines()[-1]
        assert "alpha" in last and "beta" in last and "the link" in last, last


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_python")
def test_ranks_say_that_they_wait_for_the_data_and_leave_when_the_host_of_rank_0_is_gone(
    pauses: Pauses, run_file: Path, tmp_path: Path
) -> None:
    with two_hosts() as hosts:
        prepares = ("sleep", 0, "preparation of the data", 0, "")
        command = planted(run_file, tmp_path, prepares, "parallel.data=2")
        ranks = [start_on(hosts, host, command, tmp_path, 29572) for host in range(2)]
        until(
            tmp_path / "log1", "rank 1 on beta waits for rank 0 on alpha, which prepares the data"
        )
        time.sleep(2 * TIMEOUT)
        assert ranks[1].poll() is None  # as long as rank 0 has a heartbeat
        hosts.cut()
        cut = time.time()
        assert ranks[1].wait(600) == 1
        pauses.require_left(cut, TIMEOUT * 7 / 6)
        ranks[0].wait(600)
    last = (tmp_path / "log1").read_text().splitlines()[-1]
    assert "alpha" in last and "beta" in last and "which prepares the data" in last, last


def torchrun(
    hosts: Hosts, host: int, command: list[str], folder: Path, port: int
) -> subprocess.Popen:
    """A torchrun on a host with one rank, as the templates start it; both meet at the first
    host."""
    python, *program = command
    soon = (
        f"import sys; from tools.training import torchrun as t; t.SILENCE = {SILENCE}; "
        "sys.exit(t.main(sys.argv[1:]))"
    )
    agent = [
        *("-P", "-c", soon, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
        *(
            f"--rdzv-endpoint={ADDRESSES[0]}:{port}",
            f"--rdzv-conf=is_host={1 - host}",
            "--rdzv-id=cut",
        ),
        f"--local-addr={ADDRESSES[host]}",
    ]
    with (folder / f"log{host}").open("wb") as output:
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return hosts.start(host, [python, *agent, *program], environ, output)


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_python")
def test_under_torchrun_nothing_is_left_in_time_on_both_sides_of_a_cut_link(
    pauses: Pauses, run_file: Path, tmp_path: Path
) -> None:
    with two_hosts() as hosts:
        command = planted(run_file, tmp_path, ("stop", 9, "step", 0, ""), "parallel.data=2")
        agents = [torchrun(hosts, host, command, tmp_path, 29573) for host in range(2)]
        until(tmp_path / "run" / "metrics.jsonl", '"step": 10,')
        hosts.cut()
        cut = time.time()
        for rank in range(2):
            until(tmp_path / "run" / "last_end" / f"rank-0000{rank}.json")
        pauses.require_left(cut, TIMEOUT + slowest(tmp_path))
        assert [agent.wait(600) for agent in agents] == [1, 1]
        pauses.require_left(cut, TIMEOUT + slowest(tmp_path) + LEAVING + SILENCE)
    for host in range(2):
        said = [
            line
            for line in (tmp_path / f"log{host}").read_text().splitlines()
            if "the link" in line
        ]
        assert "alpha" in said[0] and "beta" in said[0] and "Traceback" not in said[0]
    assert (
        (tmp_path / "log1")
        .read_text()
        .splitlines()[-1]
        .startswith(f"torchrun   beta: {ADDRESSES[0]}:29573, where")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_after_a_kill_ranks_are_where_they_were_and_a_restart_keeps_the_record(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that lost the other one is where its work failed, not where it wrote the record, and
    the one that is gone may have gone on since its last heartbeat."""
    python, *program = planted(
        run_file, tmp_path, ("kill", 1, "step", 6, "update"), "parallel.data=2", "train.steps=8"
    )
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    run = tmp_path / "run"
    for restarts, began_again in ((0, False), (1, True)):
        (tmp_path / "planted").unlink(missing_ok=True)
        shutil.rmtree(run, ignore_errors=True)
        words = [python, *agent, f"--max-restarts={restarts}", *program]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600)
        assert (done.returncode == 0) == began_again, done.stderr
        capsys.readouterr()
        assert cli.main(["diagnose", str(run)]) == 0
        lines = capsys.readouterr().out.splitlines()
        if began_again:
            since = lines.pop(0)
            assert since == "since      the run began again after this end, and has come to step 8"
        culprit, first, second = lines
        assert culprit.startswith("culprit    rank 1, which left no record")
        assert "call_stack.py" not in first and "hangs" not in first
        assert re.search(r" in step [67], .*, at (megaprec/optim|models|parallel)/", first), first
        assert "had its last heartbeat in " in second


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_python")
def test_under_torchrun_the_lowest_rank_that_does_not_hang_tells_which_one_does_once(
    pauses: Pauses, run_file: Path, tmp_path: Path
) -> None:
    python, *program = planted(
        run_file, tmp_path, ("stop", 0, "step", 3, "update"), "parallel.tensor=2"
    )
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, *agent, *program], env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    pauses.require_left(moment_of(tmp_path), TIMEOUT + slowest(tmp_path))
    assert (
        len(
            re.findall(
                r"^rank 0 on \S+ \(process \d+\) was last seen in step 3, update", done.stderr, re.M
            )
        )
        == 1
    )


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            ("stop", 0, "step", 3, "update"),
            r"rank 0 on \S+ \(process \d+\) was last seen in step 3, update",
        ),
        (
            ("raise", 1, "step", 3, "update"),
            r"rank 1 on \S+ \(process \d+\) failed in step 3, update: ZeroDivisionError",
        ),
        (
            ("kill", 0, "step", 3, "update"),
            r"\S+ \(127.0.0.1:\d+, where the ranks meet\) has closed the connection to",
        ),
        (("kill", 1, "step", 3, "update"), r"rank 1 on \S+ \(process \d+\) was last seen in step"),
    ],
    ids=["store's host stops", "fails", "store's host dies", "dies"],
)
@pytest.mark.usefixtures("forked_python")
def test_ranks_without_a_launcher_tell_why_they_leave(
    what: tuple[str, int, str, int, str], told: str, pauses: Pauses, run_file: Path, tmp_path: Path
) -> None:
    """As Slurm starts them: what the other rank says last."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = planted(run_file, tmp_path, what, "parallel.tensor=2")
    ranks = list[subprocess.Popen]()
    for rank in range(2):
        environ = {
            **os.environ,
            **world,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        with (tmp_path / f"log{rank}").open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    command, env=environ, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
                )
            )
    codes = [rank.wait(600) for rank in ranks]
    pauses.require_left(moment_of(tmp_path), TIMEOUT + slowest(tmp_path))
    other = 1 - what[1]
    lines = (tmp_path / f"log{other}").read_text().splitlines()
    assert (
        codes[other] == 1
        and re.match(told, lines[-1])
        and "Traceback (most recent call last):" not in lines
    )


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_computes_slowly_is_named_in_the_log_and_in_the_events(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["parallel.data=2", "parallel.timeout=60", "train.steps=150"]
    assert (
        start_ranks(planted(run_file, tmp_path, ("slow", 1, "step", 60, "update"), *keys), 2, 1)
        == 0
    )
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    found = [
        event
        for event in events
        if event["event"] == "straggler" and (event["rank"], event["slow"]) == (1, True)
    ]
    found = found[-1]  # other work may have made it slow before
    assert 1 < found["since"] <= found["step"] < 150
    assert found["factor"] > 1.5
    assert f"rank 1 on {socket.gethostname()} is slow" in capfd.readouterr().out
