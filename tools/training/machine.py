"""The machine of a run: its device and ranks here, whether the run fits it, and its allocator.

A number with a digit too many would otherwise start thousands of processes, or fill the memory
until the system kills something. Only what cannot work is refused: memory is the least that
weights, gradients, optimizer state and logits take.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from math import prod

import torch

from megaprec.errors import Problem, UserError
from megaprec.optim.rules.muon.rule import min_moments
from megaprec.resources import cores, memory_bytes, most_processes
from models.logical_shapes import logical_shapes
from models.parameter_counts import expert_parameters, num_parameters
from parallel.described_world import is_rank_of_world, read_number
from tools.config.layouts import in_keys
from tools.config.rules.derived import make_rule, trained_names
from tools.config.rules.expert_ranks import expert_replicas
from tools.config.run_file import RunConfig
from tools.console.units import counted

# options of mallopt, from malloc.h
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
FREE_BYTES = 1 << 30  # that may stay free at the end of the heap
HEAP_BLOCK_BYTES = 1 << 25  # largest block that comes from the heap: the most that glibc allows
# variables of oneDNN and of torch's layer over it
PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEPT_KERNELS = 64  # more than a step without experts has


def device_of_run(config: RunConfig) -> str:
    """Return the device, cpu or cuda, which is the same for all ranks of a machine.

    Raises UserError if there are fewer CUDA devices than ranks that need one.
    """
    wanted = config.train.device
    ranks = local_ranks(config)
    # Slurm may show each rank its own device only.
    devices = ranks if has_own_device() else torch.cuda.device_count()
    if wanted == "cuda" and devices < ranks:
        raise UserError.of("command.too_few_devices", devices=devices, ranks=ranks)
    return "cuda" if wanted != "cpu" and devices >= ranks else "cpu"


def check_this_machine(config: RunConfig) -> None:
    """Raise UserError if this machine cannot run the ranks that it has of the run."""
    try:
        device = device_of_run(config)
    except UserError:  # about a device that is not there: a check of its own
        return
    check_machine(config, local_ranks(config), device)


def local_ranks(config: RunConfig) -> int:
    """Return the number of ranks on this machine, according to the launcher."""
    if not is_rank_of_world():
        return config.world_size
    # Some launchers tell the rank on this host, but not how many there are.
    at_least = read_number("LOCAL_RANK", default="0") + 1
    return read_number("LOCAL_WORLD_SIZE", default=str(at_least))


def has_own_device(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if Slurm shows this task one CUDA device of its own, not all of the node, as with
    --gpus-per-task.
    """
    # A single device is not one's own by that alone: it may be all that the machine has.
    if torch.cuda.device_count() != 1 or "SLURM_PROCID" not in environ:
        return False
    if "SLURM_GPUS_PER_TASK" in environ:
        return True
    tasks = environ.get("LOCAL_WORLD_SIZE")
    devices = environ.get("SLURM_GPUS_ON_NODE")
    return bool(tasks and devices and int(devices) >= int(tasks))


def check_machine(config: RunConfig, ranks: int, device: str) -> None:
    """Raise UserError if this machine cannot run `ranks` of the run's ranks.

    device: cpu or cuda.
    """
    problems = [
        *_process_problems(config, ranks),
        *_offload_problems(config, ranks, device),
        *_memory_problems(config, ranks, device),
    ]
    if problems:
        raise UserError(*problems)


def _process_problems(config: RunConfig, ranks: int) -> Iterator[Problem]:
    """Yield a problem for more ranks, threads or processes than this machine takes."""
    max_processes = most_processes()
    machine_cores = counted(cores(), "core")
    limit = f"this machine has {machine_cores}, and takes {max_processes} at most"
    if ranks > max_processes:
        yield Problem.of(
            "training.too_many_ranks", layout=in_keys(config.parallel), ranks=ranks, limit=limit
        )
    for key in ("train.threads", "data.workers"):  # each is a number of threads or processes
        number_asked = config.get(key)
        if number_asked > max_processes:
            yield Problem.of(
                "training.too_many_processes", key=key, number=number_asked, limit=limit
            )


def _offload_problems(config: RunConfig, ranks: int, device: str) -> Iterator[Problem]:
    """Yield a problem if state that is to lie in host memory does so on a CPU anyway, or if the
    host's memory is less than it."""
    if config.optimizer.offload == "none":
        return
    if device == "cpu":
        yield Problem.of("training.offload_on_cpu")
    if device == "cpu" or config.model.factory:
        return
    on_device = config.with_value("optimizer.offload", "none", "the same run without it")
    state_of_run = _state_bytes(on_device) - _state_bytes(config)
    least = state_of_run * ranks // config.world_size
    available = memory_bytes()
    if least > available:
        yield Problem.of(
            "training.too_little_host_memory",
            least=least / 2**30,
            available=available / 2**30,
        )


def _memory_problems(config: RunConfig, ranks: int, device: str) -> Iterator[Problem]:
    """Yield a problem if the least memory of the run's state is more than there is."""
    if config.model.factory:
        return  # the size of a custom model is not estimated
    train = config.train
    # This machine's part of the whole run, as if all ranks needed the same.
    least = (_state_bytes(config) + _logit_bytes(config)) * ranks // config.world_size
    available = _available_bytes(device, ranks)
    if least > available:
        yield Problem.of(
            "training.too_little_memory",
            least=least / 2**30,
            parameters=num_parameters(config.sized_model),
            micro_batch=train.micro_batch,
            seq_length=train.seq_length,
            available=available / 2**30,
        )


def _state_bytes(config: RunConfig) -> int:
    """Return the least bytes of weights, gradients and optimizer state on all ranks together."""
    model = config.sized_model
    parallel = config.parallel
    moments = min_moments(make_rule(config.optimizer))
    on_every_rank, sharded = config.plan.bytes_per_parameter(
        moments,
        shards_gradients=parallel.shards_gradients,
        shards_weights=parallel.shards_weights,
        ema=config.optimizer.ema > 0,
        offload=config.optimizer.offload == "host",
    )
    # Experts have fewer copies than other weights: those of the expert axis hold different ones.
    experts = expert_parameters(model)

    # A frozen parameter is a weight alone.
    sizes = logical_shapes(model)
    trained = sum(prod(sizes[name]) for name in trained_names(config.optimizer, model))
    trained_share = trained / sum(map(prod, sizes.values()))

    def bytes_of(parameters: int, copies: int) -> int:
        # ZeRO-1 shards the optimizer state over the copies: together they hold it once.
        sharded_copies = 1 if parallel.zero else copies
        if_trained = on_every_rank * copies + sharded * sharded_copies
        if_frozen = config.plan.parameters.itemsize * copies
        return int(parameters * (trained_share * if_trained + (1 - trained_share) * if_frozen))

    shared_bytes = bytes_of(num_parameters(model) - experts, parallel.copies)
    return shared_bytes + bytes_of(experts, expert_replicas(parallel))


def _logit_bytes(config: RunConfig) -> int:
    """Return the bytes of the logits of a micro-batch, in two bytes each, on all replicas."""
    train = config.train
    # All pipeline ranks but the last have none, and tensor ranks share them: one copy a replica.
    tokens = config.parallel.data * train.micro_batch * train.seq_length
    return tokens * config.sized_model.vocab * 2


def _available_bytes(device: str, ranks: int) -> int:
    """Return the memory of the devices of `ranks` ranks, or of this machine: that of its container,
    if that has less.
    """
    if device == "cuda":
        devices = range(min(ranks, torch.cuda.device_count()))
        return sum(torch.cuda.get_device_properties(number).total_memory for number in devices)
    return memory_bytes()


def keep_freed_memory() -> None:
    """Have this process's glibc keep freed memory for the next allocation, unless the environment
    configures the allocator.

    A training step allocates the same large blocks again and again. By default glibc returns them
    when they are freed, and the system has to find, clear and map each page anew: a tenth of a
    step's time on a CPU.
    """
    configured = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if sys.platform != "linux" or configured:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries, such as musl, have none
        mallopt(TRIM_THRESHOLD, FREE_BYTES)
        mallopt(MMAP_THRESHOLD, HEAP_BLOCK_BYTES)


def bound_product_caches() -> None:
    """Have oneDNN and torch keep few of the kernels that they make for products of half precision
    on a CPU, unless the environment says how many. Before the first product of this process.

    They keep one for each number of rows, half a MiB each, and up to a thousand of them: the rows
    of an expert are others in each step. The bits of a product do not depend on how many are kept.
    """
    for name in PRODUCT_CACHES:
        os.environ.setdefault(name, str(KEPT_KERNELS))
