"""The check that a run fits the machine that starts it: ranks, threads, workers and memory against
what there is.

A number with a digit too many would otherwise start thousands of processes, or fill the memory
until the system kills something. Only what cannot work is refused: memory is the least that
weights, gradients, optimizer state and logits take.
"""

from collections.abc import Iterator

import torch

from megaprec.errors import UserError
from megaprec.optim.muon.rule import min_moments
from megaprec.resources import cores, memory_bytes, most_processes
from tools.config.checks import make_rule
from tools.config.expert_ranks import expert_replicas
from tools.config.layouts import in_keys
from tools.config.run_file import RunConfig
from tools.console.units import counted


def check_machine(config: RunConfig, ranks: int, device: str) -> None:
    """Raise UserError if this machine cannot run `ranks` of the run's ranks.

    device: cpu or cuda.
    """
    problems = [
        *_process_problems(config, ranks),
        *_memory_problems(config, ranks, device),
    ]
    if problems:
        raise UserError(*problems)


def _process_problems(config: RunConfig, ranks: int) -> Iterator[str]:
    max_processes = most_processes()
    machine_cores = counted(cores(), "core")
    limit = f"this machine has {machine_cores}, and takes {max_processes} at most"
    if ranks > max_processes:
        yield (
            f"{in_keys(config.parallel)}: {ranks:,} local ranks, but {limit}: make the layout "
            "smaller, or start the ranks on several machines"
        )
    for key in ("train.threads", "data.workers"):  # each is a number of threads or processes
        number = config.get(key)
        if number > max_processes:
            yield f"{key} = {number}, but {limit}: use 0, which takes the cores that there are"


def _memory_problems(config: RunConfig, ranks: int, device: str) -> Iterator[str]:
    """Yield a problem if the least memory of the run's state is more than there is.

    Custom models are not estimated.
    """
    if config.model.factory:
        return
    parameters = config.sized_model.num_parameters
    train = config.train
    # This machine's part of the whole run, as if all ranks needed the same.
    least = (_state_bytes(config) + _logit_bytes(config)) * ranks // config.world_size
    available = _available_bytes(device, ranks)
    if least > available:
        yield (
            f"the run needs at least {least / 2**30:,.1f} GiB of memory here ({parameters:,} "
            f"parameters with gradients and optimizer state, and logits of {train.micro_batch:,} "
            f"x {train.seq_length:,} tokens), but there are {available / 2**30:,.1f} GiB: make "
            "model.* or train.micro_batch smaller"
        )


def _state_bytes(config: RunConfig) -> int:
    """Return the least bytes of weights, gradients and optimizer state on all ranks together."""
    model = config.sized_model
    parallel = config.parallel
    moments = min_moments(make_rule(config.optimizer))
    on_every_rank, sharded = config.plan.bytes_per_parameter(moments)
    experts = model.expert_parameters

    def bytes_of(parameters: int, copies: int) -> int:
        # ZeRO-1 shards the optimizer state over the copies: together they hold it once.
        sharded_copies = 1 if parallel.zero else copies
        return parameters * (on_every_rank * copies + sharded * sharded_copies)

    shared_bytes = bytes_of(model.num_parameters - experts, parallel.copies)
    return shared_bytes + bytes_of(experts, expert_replicas(parallel))


def _logit_bytes(config: RunConfig) -> int:
    """Return the bytes of the logits of a micro-batch, in two bytes each, on all replicas."""
    train = config.train
    tokens = config.parallel.data * train.micro_batch * train.seq_length
    return tokens * config.sized_model.vocab * 2


def _available_bytes(device: str, ranks: int) -> int:
    """Return the memory of the devices of `ranks` ranks, or of this machine.

    That of its container, if that has less.
    """
    if device == "cuda":
        devices = range(min(ranks, torch.cuda.device_count()))
        return sum(torch.cuda.get_device_properties(number).total_memory for number in devices)
    return memory_bytes()
