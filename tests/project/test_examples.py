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
from typing import Any

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


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod of a Kubernetes template: its containers and volumes."""
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    if job["kind"] == "JobSet":
        (node,) = spec["replicatedJobs"]
        return node["template"]["spec"]["template"]["spec"]
    # the Trainer's own runtime has the pod, to which the job adds
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    trainer = spec["trainer"]
    resources = trainer["resourcesPerNode"]
    return {**pod, "containers": [{**container, **trainer, "resources": resources}]}


def read_job(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text())


def words_of_pod(name: str) -> list[str]:
    """The command of a Kubernetes template's pods."""
    (container,) = pod_of(read_job(name))["containers"]
    assert container["command"] == ["bash", "-c"]
    return shlex.split(container["args"][0].removeprefix("cd /shared && "))


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


def pods_of(job: dict[str, Any]) -> int:
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        return sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    if job["kind"] == "JobSet":
        inner = spec["replicatedJobs"][0]["template"]["spec"]
        assert inner["parallelism"] == inner["completions"]
        return inner["completions"]
    return spec["trainer"]["numNodes"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pytorchjob.yaml", ("kubeflow.org/v1", "PyTorchJob")),
        ("jobset.yaml", ("jobset.x-k8s.io/v1alpha2", "JobSet")),
        ("trainjob.yaml", ("trainer.kubeflow.org/v1alpha1", "TrainJob")),
    ],
)
def test_a_job_of_kubernetes_has_as_many_ranks_as_the_run(
    name: str, kind: tuple[str, str], run_file: Path
) -> None:
    job = read_job(name)
    assert (job["apiVersion"], job["kind"]) == kind
    pod = pod_of(job)
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    words = words_of_pod(name)
    nodes, ranks = (
        int(words[words.index(option) + 1].split(":")[-1])
        for option in ("--nnodes", "--nproc-per-node")
    )
    assert nodes == pods_of(job)
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    assert nodes * ranks == load_run(run_file).world_size


def test_master_and_worker_of_a_pytorch_job_are_the_same_pod() -> None:
    replicas = read_job("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    assert sorted(replicas) == ["Master", "Worker"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]


def test_the_first_pod_of_a_jobset_is_where_ranks_meet() -> None:
    job = read_job("jobset.yaml")
    (node,) = job["spec"]["replicatedJobs"]
    (container,) = pod_of(job)["containers"]
    name = job["metadata"]["name"]
    head = next(entry["value"] for entry in container["env"] if entry["name"] == "HEAD")
    assert head == f"{name}-{node['name']}-0-0.{name}"


def test_the_image_has_pinned_versions_and_a_user_without_root() -> None:
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = [line.split(maxsplit=1) for line in lines]
    order = [instruction for instruction, _ in words]
    assert order[0] == "FROM" and ":" in words[0][1] and "latest" not in words[0][1]
    assert order[-3:] == ["WORKDIR", "ENTRYPOINT", "CMD"]
    assert [rest for instruction, rest in words if instruction == "USER"] == ["1000"]
    installs = [part for line in lines for part in line.split("&&") if "pip install" in part]
    assert len(installs) == 2 and all("-c constraints.txt" in part for part in installs)
    extras = installs[1].split("[")[1].split("]")[0].split(",")
    assert set(extras) <= set(setup_extras())


def setup_extras() -> list[str]:
    return re.findall(r'^        "([\w-]+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE)


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
    cloud = read_job("skypilot.yaml")["run"].split("exec ")[1]
    assert options(machines) == options(nodes) == options(cloud)
    for name in ("pytorchjob.yaml", "jobset.yaml", "trainjob.yaml"):
        assert options(shlex.join(words_of_pod(name))) == options(machines), name
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
