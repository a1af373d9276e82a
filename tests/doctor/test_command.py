"""`megaprec doctor`: exit codes, the table, and whole runs on local ranks and on two hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import ADDRESSES, Hosts, free_port, two_hosts
from tests.project.test_readme import ROOT
from tests.runs import write_run
from tools import cli
from tools.commands import doctor
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong

WELL = ok("ranks", "2 ranks on 1 host answer")
BAD = wrong("disk", "/scratch on a: locks do not hold", "mount it with locks")


def run(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[Finding], parity: Finding, *options: str
) -> int:
    monkeypatch.setattr(doctor, "_launch_ranks", lambda args, ranks: list(found))
    monkeypatch.setattr(doctor, "parity_here", lambda config, file: parity)
    return cli.main(["doctor", *options])


@pytest.mark.parametrize(
    ("found", "parity", "code", "says"),
    [
        ([WELL], ok("parity", "tp=2"), 0, "all is well: 2 checks ok"),
        (
            [WELL, not_tried("kernels", "no GPU")],
            ok("parity", "tp=2"),
            0,
            "all is well: 2 checks ok, 1 not tried",
        ),
        ([WELL, BAD], ok("parity", "tp=2"), 1, "1 thing is wrong"),
        (
            [WELL],
            not_tried("parity", "no", needed=True),
            2,
            "nothing is wrong, but parity could not be tried",
        ),
        ([BAD], not_tried("parity", "no", needed=True), 1, "1 thing is wrong"),
    ],
)
def test_the_exit_code_and_the_last_line_are_the_verdict(
    found: list[Finding],
    parity: Finding,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, found, parity) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"verdict    {says} (")
    assert [line for line in lines if line.startswith("mend")] == (
        ["mend       disk: /scratch on a: locks do not hold: mount it with locks"]
        if BAD in found
        else []
    )
    assert run(monkeypatch, found, parity, "--json") == code
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == {0: "ok", 1: "wrong", 2: "not tried"}[code]
    assert [one["verdict"] for one in document["checks"]] == [
        one.verdict for one in [*found, parity]
    ]


def test_a_layout_that_this_machine_cannot_start_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    layout = ["parallel.data=512", "train.global_batch=1024"]
    assert run(monkeypatch, [WELL], WELL, str(file), *layout, "--json") == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(one["check"], one["verdict"]) for one in checks] == [
        ("machine", "wrong"), ("data", "ok"), ("ranks", "ok"),
        ("links", "not tried"), ("parity", "not tried"),
    ]  # fmt: skip
    assert "run this under torchrun or srun" in checks[-1]["said"]


def test_parity_is_not_tried_on_ranks_that_do_not_answer_or_if_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = wrong("ranks", "rank 1 on b did not answer within 20 s", "look at that host")
    assert run(monkeypatch, [silent], WELL) == 1
    assert "first mend what is wrong with ranks" in capsys.readouterr().out
    assert run(monkeypatch, [WELL], WELL, "--no-parity") == 0
    assert "--no-parity was given" in capsys.readouterr().out


def test_a_run_file_that_is_wrong_is_refused_as_by_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(write_run(tmp_path)), "parallel.tensr=2"]) == 2
    assert "tensor" in capsys.readouterr().err
    assert cli.main(["doctor", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_the_folder_of_a_run_that_has_not_begun_is_that_above_it(tmp_path: Path) -> None:
    assert doctor.nearest_existing(tmp_path / "runs" / "mine") == tmp_path


# In fewer steps than the command takes.
SHORTER = """
import sys
from tools.commands import doctor_layout
doctor_layout.STEPS = 3
from tools.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_this_machine_and_a_run_file_are_found_well(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SHORTER, "doctor", str(file), "parallel.tensor=2", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert {"ranks", "versions", "devices", "disk", "clocks", "links tp", "parity"} <= set(checks)
    assert (
        checks["parity"]["said"]
        == "tp=2,pp=1,dp=1 trains what one process trains: 3 steps, float64"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"my.toml", "text.txt", "data"}, (
        "nothing is left"
    )


STOPPING = """
import os, signal, sys
from tools.verify.doctor import disk
disk.try_filesystem = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
from tools.cli import main
sys.exit(main())
"""


def begun(
    hosts: Hosts, folder: Path, *options: str, stops: bool = False
) -> list[subprocess.Popen[bytes]]:
    """One rank on each host. stops: the second one stops when it tries the disk."""
    port = str(free_port())
    began = []
    for host in (0, 1):
        world = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        world |= {
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": port,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        program = ["-c", STOPPING] if stops and host else ["-m", "megaprec"]
        words = [sys.executable, *program, "doctor", "--folder", str(folder), "--json", *options]
        with (folder.parent / f"out{host}").open("wb") as output:
            began.append(hosts.start(host, words, world, output))
    return began


def document(folder: Path) -> dict[str, Any]:
    """What rank 0 printed, among warnings of torch."""
    lines = (folder.parent / "out0").read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


@pytest.mark.cases(0, 1)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("slow", [True, False])
def test_two_hosts_are_found_well_and_a_slow_link_between_them_is_named(
    slow: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    with two_hosts() as hosts:
        if slow:
            limit = ["root", "tbf", "rate", "40mbit", "burst", "32kbit", "latency", "400ms"]
            subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    hosts.spaces[0],
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    hosts.ends[0],
                    *limit,
                ],
                check=True,
            )
        codes = [
            rank.wait(timeout=600)
            for rank in begun(hosts, folder, *(["--no-parity"] if slow else []))
        ]
    found = document(folder)
    assert codes == [int(slow), 0], found
    wrong_ones = [one["said"] for one in found["checks"] if one["verdict"] == "wrong"]
    assert all(said.startswith("rank 0 on alpha and rank 1 on beta: ") for said in wrong_ones)
    assert [said.endswith("is a broken link") for said in wrong_ones] == [True] * slow
    checks = {one["check"]: one["said"] for one in found["checks"]}
    assert checks["ranks"] == "2 ranks on 2 hosts answer" and checks["clocks"].startswith(
        "2 hosts agree"
    )
    assert (
        slow
        or checks["parity"] == "tp=1,pp=1,dp=2 trains what one process trains: 20 steps, float64"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_stops_answering_is_named_and_the_others_end(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    with two_hosts() as hosts:
        ranks = begun(hosts, folder, stops=True)
        assert ranks[0].wait(timeout=600) == 1
        ranks[1].kill()
        ranks[1].wait()
    said = [one["said"] for one in document(folder)["checks"] if one["verdict"] == "wrong"]
    assert len(said) == 1 and said[0].startswith("rank 1 on beta did not answer within ")
