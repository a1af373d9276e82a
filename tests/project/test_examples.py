"""The templates of examples/: each starts the run file of the README, and what can be started without a cluster is.

A cluster is played by processes of this machine: two torchruns that meet on 127.0.0.1 are two nodes, and a program
called srun starts a task for each of two nodes, with the variables that Slurm gives it.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from megaprec.checkpoint.atomic import latest
from tests.hosts import free_port
from tests.project.test_readme import ROOT, blocks
from tests.runs import checkpoint
from tools.config.run_file import load_run
from tools.journal.records import read_metrics

EXAMPLES = ROOT / "examples"
SMALL = ["data.source=python", "data.max_chars=60_000", "data.vocab_size=500", "parallel.pipeline=1"]
SMALL += ["model.layers=1", "train.global_batch=2", "train.micro_batch=1", "train.seq_length=16", "train.steps=2"]
SRUN = """#!/usr/bin/env bash
# plays srun: two nodes with a task each, to which SIGTERM is handed on
[ "$1" = --no-kill ] && shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0
SLURM_PROCID=1 SLURM_NODEID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_NODEID=0 "$@" & first=$!
trap 'kill -TERM "$first" "$other"' TERM
code=0
for task in "$first" "$other"; do
    while kill -0 "$task" 2> /dev/null; do wait "$task" || code=$?; done
done
exit "$code"
"""
SCONTROL = """#!/bin/sh
echo "$@" > scontrol
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """The README's, unchanged."""
    (tmp_path / "run.toml").write_text(blocks("toml"))
    return tmp_path / "run.toml"


@pytest.fixture
def environment(forks: Path, tmp_path: Path) -> dict[str, str]:
    """With `megaprec` and `torchrun` on the path, as in an environment where the package is installed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    path = os.pathsep.join(map(str, (tmp_path / "bin", forks, Path(sys.executable).parent, os.environ["PATH"])))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(words: list[str], here: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_trained(folder: Path, said: str) -> None:
    """Two steps by two ranks of one world: one record a step, one first line."""
    assert [record["step"] for record in read_metrics(folder)] == [1, 2]
    assert said.count("tensor 2 x pipeline 1 x data 1 = 2 ranks") == 1, said


def words_of_pod() -> list[str]:
    """The command of the Kubernetes template's pods."""
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return shlex.split(container["args"][0])


def test_every_mode_of_the_comparison_is_one_that_a_run_file_can_have() -> None:
    lines = [line for line in (EXAMPLES / "modes.sh").read_text().splitlines() if line.startswith("run ")]
    plans = {name: load_run(EXAMPLES / "modes.toml", keys).plan for _, name, *keys in map(shlex.split, lines)}
    assert len(plans) == len(lines) == 17
    assert {name for name, made in plans.items() if made.fp8} == {"smp-fp8", "nemo-bf16-fp8", "nemo-fp16-fp8"}


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch", "modes.sh"])
def test_scripts_are_whole(script: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / script], check=True)


def test_the_job_of_kubernetes_has_as_many_ranks_as_the_run(run_file: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sorted(replicas) == ["Master", "Worker"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    volumes = {volume["name"] for volume in replicas["Master"]["template"]["spec"]["volumes"]}
    assert container["name"] == "pytorch"
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    words = words_of_pod()
    nodes, ranks = (int(words[words.index(option) + 1].split(":")[-1]) for option in ("--nnodes", "--nproc-per-node"))
    assert nodes == sum(replica["replicas"] for replica in replicas.values())
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    assert nodes * ranks == load_run(run_file).world_size


def test_the_job_of_slurm_has_as_many_tasks_as_the_run_has_ranks(run_file: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE))
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == load_run(run_file).world_size
    assert options["ntasks-per-node"] == "1"  # torchrun


def test_pods_nodes_and_machines_are_started_by_the_same_words() -> None:
    def options(words: str) -> set[str]:
        return set(re.findall(r"--[a-z-]+(?= )|-m megaprec train", words.replace("\\\n", " "))) - {"--local-addr"}

    machines = (EXAMPLES / "torchrun.sh").read_text().split("exec ")[1]
    nodes = (EXAMPLES / "slurm.sbatch").read_text().split("exec ")[1].partition("' torchrun")[0]
    assert options(machines) == options(nodes) == options(shlex.join(words_of_pod()))
    assert "-m megaprec train" in options(machines)


@pytest.mark.slow
def test_two_machines_that_meet_train_one_model(run_file: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    cluster = {"HEAD": "127.0.0.1", "PORT": str(free_port()), "NODES": "2", "RANKS": "1", "ADDRESS": "127.0.0.1"}
    words = ["bash", str(EXAMPLES / "torchrun.sh"), str(run_file), *SMALL]
    nodes = [start(words, tmp_path, environment | cluster) for _ in range(2)]
    said = [node.communicate(timeout=12000)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert_trained(tmp_path / "runs" / "mine", "".join(said))


@pytest.fixture
def job(run_file: Path, tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts the job of the Slurm template, on two nodes of one rank each."""
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(free_port() % 10_000), "SLURM_GPUS_ON_NODE": "1"}
    here = {"HEAD": "127.0.0.1", "ADDRESS": "127.0.0.1"}  # the host name need not resolve
    words = ["bash", str(EXAMPLES / "slurm.sbatch"), "run.toml", *SMALL]
    return lambda *more: start([*words, *more], Path("/"), environment | slurm | here)


@pytest.mark.slow
def test_nodes_of_slurm_train_one_model(job: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    running = job()
    said = running.communicate(timeout=12000)[0]
    assert running.returncode == 0, said
    assert_trained(tmp_path / "runs" / "mine", said)
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_its_state_and_queues_again(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    running, folder = job("train.steps=1000000"), tmp_path / "runs" / "mine"
    deadline = time.monotonic() + 1200
    while len(read_metrics(folder)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGUSR1)  # in any case, for the run is endless
    said = running.communicate(timeout=1200)[0]
    assert (running.returncode, (tmp_path / "scontrol").read_text().split()[0]) == (128 + signal.SIGUSR1, "requeue")
    last = len(read_metrics(folder))
    assert f"stopped by SIGTERM after step {last}, state saved" in said
    assert latest(folder / "checkpoints") == checkpoint(folder, last)


@pytest.mark.slow
def test_tasks_of_slurm_train_one_model(run_file: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    slurm |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": str(free_port() % 10_000)}
    words = ["megaprec", "train", str(run_file), *SMALL]
    own = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    tasks = [start(words, tmp_path, environment | slurm | one) for one in own]
    said = [task.communicate(timeout=12000)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(said)
    assert_trained(tmp_path / "runs" / "mine", "".join(said))
