"""The world of ranks that a launcher describes to this process in environment variables.

torchrun, Kubernetes' PyTorchJob and `torch.distributed` use RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Slurm describes the tasks of a step in variables of its own, which `slurm_environment`
translates. A world that is described in part, in contradictory numbers, or in the words of another
launcher is refused: every process would otherwise train alone, or all would be the same rank.
"""

import os
import re
from collections.abc import Mapping

from megaprec.errors import UserError

WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# variables in which launchers without torch's variables set the number of processes
PROCESS_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
HIGHEST_PORT = 65535
INTERACTIVE_STEP = "4294967290"  # SLURM_STEP_ID of the shell that salloc opens on a node
# where MASTER_PORT is not set: one of these ports, by the number of the job
FIRST_PORT = 20000
PORT_COUNT = 10000


def is_rank_of_world(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher started this process as a rank, False if it runs by itself.

    Raises UserError if torch's variables (WORLD) are there in part, or if a launcher started
    several processes without setting them.
    """
    described = {**environ, **slurm_environment(environ)}
    missing = [name for name in WORLD if not described.get(name)]
    if not missing:
        return True
    if {"RANK", "WORLD_SIZE"} <= set(missing):
        require_no_other_rank(described)
        return False
    present = [f"{name}={described[name]}" for name in WORLD if name not in missing]
    raise UserError.of(
        "parallel.variables_incomplete", present=" ".join(present), missing=", ".join(missing)
    )


def require_no_other_rank(environ: Mapping[str, str]) -> None:
    """Raise UserError if a launcher started several processes but did not tell them torch's
    variables."""
    for name in PROCESS_COUNTS:
        if _counts_several(name, environ):
            raise UserError.of(
                "parallel.ranks_alone", name=name, value=environ[name], world=", ".join(WORLD)
            )


def _counts_several(name: str, environ: Mapping[str, str]) -> bool:
    return environ.get(name, "1") not in ("", "0", "1")


def require_consistent(environ: Mapping[str, str]) -> None:
    """Raise UserError if a described world has numbers that cannot be, or that contradict those of
    Slurm. Nothing is checked of a world that torch's variables do not describe."""
    if not all(environ.get(name) for name in WORLD):
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    numbers = {name: read_number(name, environ) for name in names if environ.get(name)}
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
            raise UserError.of(
                "parallel.rank_out_of_range",
                rank_name=rank,
                rank=numbers[rank],
                size_name=size,
                size=numbers[size],
            )
    port = numbers["MASTER_PORT"]
    if not 0 < port <= HIGHEST_PORT:
        raise UserError.of("parallel.port_out_of_range", port=port, highest_port=HIGHEST_PORT)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    task = environ.get("SLURM_PROCID", environ["RANK"])
    # under torchrun a task starts several ranks, whose numbers are not those of tasks
    each_is_a_rank = "TORCHELASTIC_RUN_ID" not in environ and tasks == environ["WORLD_SIZE"]
    if each_is_a_rank and task != environ["RANK"]:
        raise UserError.of(
            "parallel.rank_set_before_srun", rank=environ["RANK"], task=task, tasks=tasks
        )


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a task of a Slurm step of several tasks, otherwise none; for
    os.environ.update().

    MASTER_ADDR and MASTER_PORT are kept if set; otherwise they are the step's first node and a port
    computed from the job id. Raises UserError for a variable of Slurm's that is missing or
    malformed, and for a WORLD_SIZE that is not the step's.
    """
    # torch's variables are there, or there is no step of several tasks
    if environ.get("RANK") or read_number("SLURM_STEP_NUM_TASKS", environ, "1") < 2:
        return {}
    address = environ.get("MASTER_ADDR")
    tasks = environ["SLURM_STEP_NUM_TASKS"]
    missing = [name for name in SLURM_VARIABLES if not environ.get(name)]
    # the list of nodes is read for an address alone
    if address and "SLURM_STEP_NODELIST" in missing:
        missing.remove("SLURM_STEP_NODELIST")
    if missing:
        raise UserError.of("parallel.slurm_incomplete", tasks=tasks, missing=", ".join(missing))
    if environ.get("WORLD_SIZE", tasks) not in ("", tasks):
        raise UserError.of(
            "parallel.world_size_differs", world_size=environ["WORLD_SIZE"], tasks=tasks
        )
    local_size = _tasks_of_node(environ)
    variables = {
        "RANK": str(read_number("SLURM_PROCID", environ)),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": str(read_number("SLURM_LOCALID", environ)),
        "MASTER_ADDR": address or _first_node(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or _port_of_job(environ),
    }
    if local_size:
        variables["LOCAL_WORLD_SIZE"] = local_size
    return variables


def lone_task(environ: Mapping[str, str]) -> str:
    """Return a line to print if no other task of this process's Slurm step joins; "" if the process
    is no task of a step.

    In a shell on a node the variables describe the step of the shell: its tasks are not ranks of
    our command, and will never join.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    # under torchrun ranks are no tasks
    is_task = "TORCHELASTIC_RUN_ID" not in environ and tasks == environ.get("WORLD_SIZE")
    if not is_task or environ.get("SLURM_PROCID") != environ.get("RANK"):
        return ""
    variables = " ".join(name for name in PROCESS_COUNTS if _counts_several(name, environ))
    return (
        f"this is task {environ['RANK']} of {tasks} of a Slurm step, and no other task is there: "
        f"start the command with srun, or unset {variables} to run without the others"
    )


def waits_for_a_person(environ: Mapping[str, str], terminal: bool) -> bool:
    """Return True if a person waits for a lone task of a Slurm step (`lone_task`): it runs in a
    shell that Slurm has opened, or reads from a terminal.

    terminal: the process reads from a terminal.
    """
    return (
        terminal
        or bool(environ.get("SLURM_PTY_PORT"))
        or environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP
    )


def _port_of_job(environ: Mapping[str, str]) -> str:
    return str(FIRST_PORT + read_number("SLURM_JOB_ID", environ) % PORT_COUNT)


def _first_node(nodes: str) -> str:
    """Return the first name of Slurm's list of nodes: "rack0n05" of "rack[0-1]n[05-09,12],login".

    Raises UserError for what is no such list.
    """
    # up to the first comma that is not within brackets
    first_entry = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodes)
    if first_entry is None:
        raise UserError.of("parallel.slurm_node_list", nodes=nodes)
    # of each range in brackets its first number
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first_entry.group())


def _tasks_of_node(environ: Mapping[str, str]) -> str:
    """Return the number of tasks of the Slurm step on this node as text, "" if Slurm does not state
    it. Raises UserError for a list that is malformed."""
    stated = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not re.fullmatch(r"(\d+(\(x\d+\))?(,|$))*", stated):
        raise UserError.of("parallel.slurm_tasks_per_node", stated=stated)
    tasks_by_node: list[str] = []
    # "2(x3),1": 4 nodes, of which three have 2 tasks
    for tasks, node_count in re.findall(r"(\d+)(?:\(x(\d+)\))?", stated):
        tasks_by_node += [tasks] * int(node_count or 1)
    node = read_number("SLURM_NODEID", environ, "0")
    if node < len(tasks_by_node):
        return tasks_by_node[node]
    return environ.get("SLURM_NTASKS_PER_NODE", "")


def read_number(
    name: str,
    environ: Mapping[str, str] = os.environ,
    default: str = "",
) -> int:
    """Return the whole number that a launcher's variable states; that of `default` for one that is
    not set or empty. Raises UserError for text that is no number of at most nine digits."""
    text = environ.get(name) or default
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text):
        raise UserError.of("parallel.launcher_number", name=name, text=text)
    return int(text)
