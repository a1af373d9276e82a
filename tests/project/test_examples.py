"""The templates of examples/: each starts the run file of the README, and what can be started
without a cluster is.

Two torchruns of this machine that meet on 127.0.0.1 play two machines. Slurm's template is tried in
`test_slurm.py`.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.hosts import free_port
from tests.project.test_readme import ROOT, blocks
from tools.config.run_file import load_run
from tools.journal.records import read_metrics

EXAMPLES = ROOT / "examples"
SMALL = [
    "data.source=python",
    "data.max_chars=60_000",
    "data.vocab_size=500",
    "parallel.pipeline=1",
]
SMALL += [
    "model.layers=1",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.seq_length=16",
    "train.steps=2",
]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """The README's, unchanged."""
    (tmp_path / "run.toml").write_text(blocks("toml"))
    return tmp_path / "run.toml"


@pytest.fixture
def environment(forks: Path) -> dict[str, str]:
    """With `megaprec` and `torchrun` on the path, as in an environment where the package is
    installed."""
    path = os.pathsep.join(map(str, (forks, Path(sys.executable).parent, os.environ["PATH"])))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(words: list[str], here: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
    lines = [
        line for line in (EXAMPLES / "modes.sh").read_text().splitlines() if line.startswith("run ")
    ]
    plans = {
        name: load_run(EXAMPLES / "modes.toml", keys).plan
        for _, name, *keys in map(shlex.split, lines)
    }
    assert len(plans) == len(lines) == 17
    assert {name for name, made in plans.items() if made.fp8} == {
        "smp-fp8",
        "nemo-bf16-fp8",
        "nemo-fp16-fp8",
    }


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
    nodes, ranks = (
        int(words[words.index(option) + 1].split(":")[-1])
        for option in ("--nnodes", "--nproc-per-node")
    )
    assert nodes == sum(replica["replicas"] for replica in replicas.values())
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    assert nodes * ranks == load_run(run_file).world_size


def test_the_job_of_slurm_has_as_many_tasks_as_the_run_has_ranks(run_file: Path) -> None:
    options = dict(
        re.findall(
            r"^#SBATCH --([\w-]+)=(\S+)$", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE
        )
    )
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == load_run(run_file).world_size
    assert options["ntasks-per-node"] == "1"  # torchrun


def test_pods_nodes_and_machines_are_started_by_the_same_words() -> None:
    def options(words: str) -> set[str]:
        return set(re.findall(r"--[a-z-]+(?= )|-m megaprec train", words.replace("\\\n", " "))) - {
            "--local-addr"
        }

    machines = (EXAMPLES / "torchrun.sh").read_text().split("exec ")[1]
    nodes = (EXAMPLES / "slurm.sbatch").read_text().split("code=0\n")[1].partition("|| code")[0]
    assert options(machines) == options(nodes) == options(shlex.join(words_of_pod()))
    assert "-m megaprec train" in options(machines)


@pytest.mark.slow
def test_two_machines_that_meet_train_one_model(
    run_file: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    cluster = {
        "HEAD": "127.0.0.1",
        "PORT": str(free_port()),
        "NODES": "2",
        "RANKS": "1",
        "ADDRESS": "127.0.0.1",
    }
    words = ["bash", str(EXAMPLES / "torchrun.sh"), str(run_file), *SMALL]
    nodes = [start(words, tmp_path, environment | cluster) for _ in range(2)]
    said = [node.communicate(timeout=12000)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert_trained(tmp_path / "runs" / "mine", "".join(said))
