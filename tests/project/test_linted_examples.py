"""Other people's checkers find nothing in the templates of examples/: hadolint in the image,
shellcheck in the scripts, Kubeflow's own definitions in the jobs of Kubernetes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api import models
from pydantic import ValidationError

from tests.project.test_examples import EXAMPLES, read_job
from tests.project.test_readme import ROOT

SCRIPTS = ["examples/torchrun.sh", "examples/slurm.sbatch", "examples/modes.sh", ".ci/run"]
Node = dict[str, Any]


def checked(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a checker of this environment in the root of the clone."""
    command = [Path(sys.executable).with_name(program), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_hadolint_finds_nothing_in_the_image() -> None:
    found = checked("hadolint", EXAMPLES / "Dockerfile")
    assert (found.returncode, found.stdout) == (0, "")


def test_hadolint_finds_a_user_that_kubernetes_cannot_tell_from_root(tmp_path: Path) -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    changed = tmp_path / "Dockerfile"
    changed.write_text(text.replace("USER 1000", "USER trainer"))
    assert "DL3066" in checked("hadolint", changed).stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing_in_a_script(script: str) -> None:
    # SC1091: the environment that Slurm's script enters is the user's
    found = checked("shellcheck", "--exclude=SC1091", script)
    assert (found.returncode, found.stdout) == (0, "")


def kept(kind: Any, said: Node) -> Node:
    """What a definition knows of an object; types that it forbids are errors."""
    return kind.from_dict(said).to_dict()


KINDS = {
    "jobset.yaml": models.JobsetV1alpha2JobSet,
    "trainjob.yaml": models.TrainerV1alpha1TrainJob,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_job_has_fields_that_its_definition_knows(name: str) -> None:
    job = read_job(name)
    assert kept(KINDS[name], job) == job


@pytest.mark.parametrize("role", ["Master", "Worker"])
def test_a_pod_of_a_pytorch_job_has_fields_that_kubernetes_knows(role: str) -> None:
    pod = read_job("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"][role]["template"]
    assert kept(models.IoK8sApiCoreV1PodTemplateSpec, pod) == pod


def job_template(job: Node) -> Node:
    return job["spec"]["replicatedJobs"][0]["template"]["spec"]


def container(job: Node) -> Node:
    return job_template(job)["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("place", "key"),
    [
        (lambda job: job["spec"], "failurPolicy"),
        (job_template, "completion_mode"),
        (container, "workingdir"),
        (lambda job: container(job)["volumeMounts"][0], "path"),
    ],
)
def test_a_field_that_the_definition_does_not_know_is_found(
    place: Callable[[Node], Node], key: str
) -> None:
    job = read_job("jobset.yaml")
    place(job)[key] = "value"
    assert kept(models.JobsetV1alpha2JobSet, job) != job


@pytest.mark.parametrize(("place", "key"), [(job_template, "parallelism"), (container, "command")])
def test_a_value_of_another_type_is_found(place: Callable[[Node], Node], key: str) -> None:
    job = read_job("jobset.yaml")
    place(job)[key] = "two"
    with pytest.raises(ValidationError):
        kept(models.JobsetV1alpha2JobSet, job)
