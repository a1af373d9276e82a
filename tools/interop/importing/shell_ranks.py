"""The number of ranks that torchrun, deepspeed, srun or mpirun starts, or that a script asks Slurm
for in its first lines."""

import re
from collections.abc import Mapping, Sequence

from tools.interop.importing.shell_words import Word, joined_texts

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
OPTIONS = {
    "nodes": NODES,
    "gpus": GPUS_OF_NODE,
    "tasks_of_node": TASKS_OF_NODE,
    "tasks": TASKS,
}
COUNT = re.compile(r"\d{1,6}")
# launchers whose tasks start the ranks of a node
OF_EACH_NODE = {
    "torchrun",
    "deepspeed",
    "torch.distributed.launch",
    "torch.distributed.run",
}
OF_MPI = {"mpirun", "mpiexec"}
SLURM_LINE = re.compile(r"^#SBATCH[ \t]+(.*?)(?:[ \t]#.*)?$", re.MULTILINE)
NAMES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "tasks_of_node": ("SLURM_NTASKS_PER_NODE",),
    "tasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def _sizes(text: str) -> dict[str, int]:
    """Return what options of srun or sbatch say. The last one counts."""
    sizes: dict[str, int] = {}
    for name, pattern in OPTIONS.items():
        values = pattern.findall(text)
        if values:
            sizes[name] = int(values[-1])
    if "tasks" not in sizes and "tasks_of_node" in sizes and "nodes" in sizes:
        sizes["tasks"] = sizes["nodes"] * sizes["tasks_of_node"]
    return sizes


def slurm_sizes(text: str) -> dict[str, str]:
    """Return the variables of Slurm that follow from the #SBATCH lines of a script."""
    asked = "\n".join(SLURM_LINE.findall(text))
    variables: dict[str, str] = {}
    for name, size in _sizes(asked).items():
        for variable in NAMES[name]:
            variables[variable] = str(size)
    return variables


def ranks_of(words: Sequence[Word], slurm: Mapping[str, str]) -> int | None:
    """Return the number of ranks that a launcher starts; None if its words do not say it, or may
    say it in one that is not known. slurm: what the script asks Slurm for."""
    said = joined_texts(words)
    launched: dict[str, str] = {}
    for name, size in LAUNCHED.findall(said):
        plain_name = name.replace("-", "_").lower()
        launched[plain_name] = size
    if not launched:
        return _tasks(words, said, slurm)
    if any(_may_be_options(words, number) for number in range(len(words))):
        return None
    # torchrun's name, otherwise deepspeed's
    local = launched.get("nproc_per_node") or launched.get("num_gpus", "")
    nodes = launched.get("nnodes") or launched.get("num_nodes", "1")
    if not COUNT.fullmatch(local) or not COUNT.fullmatch(nodes):
        return None
    return int(local) * int(nodes)


def _may_be_options(words: Sequence[Word], number: int) -> bool:
    """Return True for a word that is not known, and is no value of the option before it."""
    word = words[number]
    if word.unknown is None:
        return False
    before = words[number - 1].text if number else ""
    takes_value = before.startswith("-") and before not in FLAGS
    has_value = "=" in before
    is_value = takes_value and not has_value
    is_option_itself = word.text.startswith("-")
    return not is_value and not is_option_itself


def _tasks(words: Sequence[Word], said: str, slurm: Mapping[str, str]) -> int | None:
    """Return the tasks of srun or mpirun, of which each is a rank."""
    launchers = {word.text.rpartition("/")[2] for word in words}
    if launchers & OF_EACH_NODE:
        return None
    sizes = _sizes(said)
    if launchers & OF_MPI:
        return sizes.get("tasks")
    if "srun" not in launchers:
        return None
    tasks = sizes.get("tasks") or int(slurm.get("SLURM_NTASKS", "0"))
    if tasks:
        return tasks
    nodes = int(slurm.get("SLURM_NNODES", "0"))
    tasks_of_node = sizes.get("tasks_of_node", 0)
    return nodes * tasks_of_node or None
