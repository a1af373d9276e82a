"""The number of ranks that torchrun, deepspeed, srun or mpirun starts, or that a script asks Slurm
for in its first lines."""

import re
from collections.abc import Mapping, Sequence

from tools.interop.importing.shell_variables import Word

LAUNCHED = re.compile(
    r"(?:--?|(?<!\S)(?=N))(nproc[-_]per[-_]node|nnodes|num_gpus|num_nodes|NPROC_PER_NODE|NNODES)"
    r"[= ](\S+)"
)
FLAGS = ("--standalone", "--no-python", "--no_python", "--run-path", "--module", "-m", "-l", "-u")
TASKS = re.compile(r"(?<!\S)(?:-np?|--ntasks)[= ]?(\d{1,6})(?!\S)")
NODES = re.compile(r"(?<!\S)(?:-N|--nodes)[= ]?(\d{1,6})(?!\S)")
TASKS_OF_NODE = re.compile(r"(?<!\S)--ntasks-per-node[= ](\d{1,4})(?!\S)")
GPUS_OF_NODE = re.compile(
    r"(?<!\S)(?:--gpus-per-node|--gres)[= ](?:gpu:)?(?:[\w-]+:)?(\d{1,4})(?!\S)"
)
OPTIONS = {"nodes": NODES, "gpus": GPUS_OF_NODE, "tasks_of_node": TASKS_OF_NODE, "tasks": TASKS}
SLURM_LINE = re.compile(r"^#SBATCH[ \t]+(.*?)(?:[ \t]#.*)?$", re.MULTILINE)
NAMES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "tasks_of_node": ("SLURM_NTASKS_PER_NODE",),
    "tasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def _sizes(text: str) -> dict[str, int]:
    """Return what options of srun or sbatch say."""
    found = {name: pattern.findall(text) for name, pattern in OPTIONS.items()}
    sizes = {name: int(values[-1]) for name, values in found.items() if values}
    if "tasks" not in sizes and "tasks_of_node" in sizes and "nodes" in sizes:
        sizes["tasks"] = sizes["nodes"] * sizes["tasks_of_node"]
    return sizes


def slurm_sizes(text: str) -> dict[str, str]:
    """Return the variables of Slurm that follow from the #SBATCH lines of a script."""
    asked = "\n".join(SLURM_LINE.findall(text))
    return {variable: str(size) for name, size in _sizes(asked).items() for variable in NAMES[name]}


def ranks_of(words: Sequence[Word], slurm: Mapping[str, str]) -> int | None:
    """Return the number of ranks that a launcher starts; None if its words do not say it, or may
    say it in one that is not known. slurm: what the script asks Slurm for."""
    said = " ".join(word.text for word in words)
    launched = {name.replace("-", "_").lower(): size for name, size in LAUNCHED.findall(said)}
    if not launched:
        return _tasks(words, said, slurm)
    if any(_may_be_options(words, number) for number in range(len(words))):
        return None
    local = launched.get("nproc_per_node") or launched.get("num_gpus", "")
    nodes = launched.get("nnodes") or launched.get("num_nodes", "1")
    both = re.fullmatch(r"(\d{1,6}) (\d{1,6})", f"{local} {nodes}")
    return int(both[1]) * int(both[2]) if both else None


def _may_be_options(words: Sequence[Word], number: int) -> bool:
    """Return True for a word that is not known, and is no value of the option before it."""
    word = words[number]
    if word.unknown is None:
        return False
    before = words[number - 1].text if number else ""
    is_value = before.startswith("-") and "=" not in before and before not in FLAGS
    return not is_value and not word.text.startswith("-")


def _tasks(words: Sequence[Word], said: str, slurm: Mapping[str, str]) -> int | None:
    """Return the tasks of srun or mpirun, of which each is a rank."""
    launchers = {word.text.rpartition("/")[2] for word in words}
    if launchers & {"torchrun", "deepspeed", "torch.distributed.launch", "torch.distributed.run"}:
        return None
    if launchers & {"mpirun", "mpiexec"}:
        return _sizes(said).get("tasks")
    if "srun" not in launchers:
        return None
    sizes = _sizes(said)
    tasks = sizes.get("tasks") or int(slurm.get("SLURM_NTASKS", "0"))
    if tasks:
        return tasks
    nodes = int(slurm.get("SLURM_NNODES", "0"))
    return nodes * sizes.get("tasks_of_node", 0) or None
