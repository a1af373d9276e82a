"""A world is what a launcher describes, wholly and without contradiction; all else is refused by
variable and value."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from megaprec.errors import UserError
from parallel import mesh
from parallel.described_world import is_rank_of_world, require_consistent, slurm_environment
from tests.refusals import raises, sentence, shows

WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu-[007-009,012]",
    "SLURM_JOB_ID": "123456",
}


def test_a_world_is_joined_only_when_it_is_wholly_described() -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert is_rank_of_world(whole)
    assert not is_rank_of_world({})
    assert not is_rank_of_world({"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert is_rank_of_world(SLURM)
    for lost in whole:
        if lost in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            with raises("parallel.variables_incomplete", missing=lost):
                is_rank_of_world({name: value for name, value in whole.items() if name != lost})


def test_a_slurm_step_is_said_in_torchs_words() -> None:
    assert slurm_environment(SLURM) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu-007",
        "MASTER_PORT": "23456",
    }
    assert slurm_environment(SLURM | {"SLURM_STEP_NODELIST": "a1,b[2-3]"})["MASTER_ADDR"] == "a1"
    assert (
        slurm_environment(SLURM | {"SLURM_STEP_NODELIST": "n[2-3]-ib,m"})["MASTER_ADDR"] == "n2-ib"
    )
    assert (
        slurm_environment(SLURM | {"MASTER_ADDR": "me", "MASTER_PORT": "9"})["MASTER_ADDR"] == "me"
    )


def test_a_task_of_slurm_joins_the_world_that_slurm_describes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Joined(Exception):
        """Raised in place of waiting for the others."""

    def join(over_gloo: bool) -> None:
        raise Joined({name: os.environ[name] for name in slurm_environment(SLURM)})

    # so that values come back at the end, whoever sets them
    for name in slurm_environment(SLURM):
        monkeypatch.setenv(name, "")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh, "join", join)
    with pytest.raises(Joined) as joined, mesh.world("cpu"):
        pass
    assert joined.value.args == (slurm_environment(SLURM),)


@pytest.mark.parametrize(
    ("said", "local"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, "2"),
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
                "SLURM_NODEID": "3",
                "SLURM_NTASKS_PER_NODE": "9",
            },
            "1",
        ),
        ({"SLURM_NTASKS_PER_NODE": "2"}, "2"),
        ({}, None),
    ],
)
def test_a_slurm_task_knows_how_many_ranks_its_node_has(
    said: dict[str, str], local: str | None
) -> None:
    assert slurm_environment(SLURM | said).get("LOCAL_WORLD_SIZE") == local


@pytest.mark.parametrize("change", [{"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}])
def test_slurm_is_not_asked_when_a_step_has_one_task_or_torchrun_spoke(
    change: dict[str, str],
) -> None:
    assert slurm_environment(SLURM | change) == {}
    # a batch script outside any step
    assert slurm_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == {}


def described(environ: Mapping[str, str]) -> bool:
    """As each command and each loop of one's own reads the environment."""
    whole = {**environ, **slurm_environment(environ)}
    require_consistent(whole)
    return is_rank_of_world(whole)


def test_the_first_node_of_any_list_of_slurms_is_the_address() -> None:
    for nodes, first in {
        "rack[0-1]node[05-09]": "rack0node05",
        "n[1,3-4]-ib,m": "n1-ib",
        "gpu-007": "gpu-007",
        "a[01-02],b": "a01",
    }.items():
        assert slurm_environment(SLURM | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SLURM | {"SLURM_STEP_NODELIST": ""}, sentence("parallel.slurm_incomplete", missing="SLURM_STEP_NODELIST")),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, sentence("parallel.slurm_incomplete", missing="SLURM_LOCALID")),
        (SLURM | {"SLURM_STEP_NODELIST": "[1-2"}, sentence("parallel.slurm_node_list")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "four"}, sentence("parallel.launcher_number", name="SLURM_STEP_NUM_TASKS", text='four')),
        (SLURM | {"SLURM_JOB_ID": "12_3"}, sentence("parallel.launcher_number", name="SLURM_JOB_ID", text='12_3')),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, sentence("parallel.slurm_tasks_per_node", stated='2(x')),
        (SLURM | {"WORLD_SIZE": "8"}, sentence("parallel.world_size_differs", world_size=8, tasks=4)),
        (SLURM | WHOLE | {"WORLD_SIZE": "4"}, sentence("parallel.rank_set_before_srun", rank=0, task=3, tasks=4)),
        (WHOLE | {"RANK": "2"}, sentence("parallel.rank_out_of_range", rank_name="RANK", rank=2, size_name="WORLD_SIZE", size=2)),
        (WHOLE | {"RANK": "00"}, sentence("parallel.launcher_number", name="RANK", text='00')),
        (WHOLE | {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, sentence("parallel.rank_out_of_range", rank_name="LOCAL_RANK", rank=4, size_name="LOCAL_WORLD_SIZE", size=4)),
        (WHOLE | {"MASTER_PORT": "70000"}, sentence("parallel.port_out_of_range", port=70000)),
        (WHOLE | {"RANK": ""}, sentence("parallel.variables_incomplete", missing="RANK")),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, sentence("parallel.ranks_alone", name="OMPI_COMM_WORLD_SIZE", value=4)),
        ({"PMI_SIZE": "2"}, sentence("parallel.ranks_alone")),
    ],
)  # fmt: skip
def test_a_world_that_cannot_be_is_refused_by_variable_and_value(
    environ: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        described(environ)


@pytest.mark.parametrize(
    "environ",
    [
        WHOLE,
        SLURM,
        SLURM | {"RANK": "", "WORLD_SIZE": "4"},
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"} | {"MASTER_ADDR": "first"},
        SLURM
        | WHOLE
        | {
            "WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "x",
        },  # torchrun's ranks in a step of its agents
        WHOLE | {"OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_a_world_that_is_wholly_described_is_joined(environ: dict[str, str]) -> None:
    assert described(environ)


def test_a_process_alone_may_be_started_by_any_launcher() -> None:
    assert not described({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1", "RANK": ""})


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "program", ["-m megaprec keys lr", "-c 'from parallel import world\nwith world(): pass'"]
)
def test_a_program_ends_with_one_line_where_no_world_is_described(program: str) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in WHOLE} | {
        "SLURM_STEP_NUM_TASKS": "2"
    }
    done = subprocess.run(
        f"{sys.executable} {program}",
        shell=True,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert shows(
        done.stderr.splitlines()[-1],
        "parallel.slurm_incomplete",
        tasks=2,
        missing=re.compile("SLURM_PROCID"),
    )
