"""Versions and devices of each rank, and the hosts whose versions differ from the others'.

Ranks of different versions may train and differ in silence, so every version that decides numbers
or messages must be the same on all ranks.
"""

import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.cuda import nccl
from torch.distributed import is_nccl_available

from megaprec.resources import cores
from megaprec.tested_versions import installed_version, untested
from parallel.described_world import read_number
from tools.console.units import counted
from tools.training.launched import share_of_cores
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong
from tools.verify.doctor.questions import Answer, RankContext, format_ranks

# facts that must be the same on all ranks
SAME_ON_ALL = ("megaprec", "torch", "python", "cuda", "nccl", "driver", "byteorder")
SUMMARIZED = ("megaprec", "torch", "python", "cuda", "nccl")  # versions that the line names
BUSY_SHARE = 0.05  # of a GPU's memory, used by others


def facts(context: RankContext) -> Answer:
    """Return the versions, the device and the CPU threads of this rank."""
    local_ranks = read_number("LOCAL_WORLD_SIZE", default="1")
    load_of_last_minute, _, _ = os.getloadavg()
    machine: Answer = {
        "megaprec": installed_version("megaprec") or "not installed",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "byteorder": sys.byteorder,
        "cores": cores(),
        "threads": share_of_cores(local_ranks),
        "local_ranks": local_ranks,
        "load": round(load_of_last_minute, 2),
        "cuda": torch.version.cuda or "",
        "gpu_tool": shutil.which("nvidia-smi") or "",
        "device": context.device,
        "rank": context.rank,
        "host": context.host,
        "untested": [*untested()],
    }
    # on a CPU there is nothing that could differ beside the versions
    if context.device == "cuda":
        machine |= _gpu_facts(context.local)
    return machine


def _gpu_facts(local_rank: int) -> Answer:
    """Return the GPU of this rank, its memory in bytes, and the versions of NCCL and the driver."""
    # A launcher may show each rank its own GPU only, which is then number 0.
    gpu_number = local_rank if torch.cuda.device_count() > 1 else 0
    free, total = torch.cuda.mem_get_info(gpu_number)
    properties = torch.cuda.get_device_properties(gpu_number)
    capability = torch.cuda.get_device_capability(gpu_number)
    nccl_version = nccl.version() if is_nccl_available() else ()
    reserved = torch.cuda.memory_reserved(gpu_number)
    used_by_others = total - free - reserved
    return {
        "gpu": properties.name,
        "capability": ".".join(map(str, capability)),
        "memory": total,
        # both numbers are read one after the other, and may not fit each other
        "used_by_others": max(0, used_by_others),
        "nccl": ".".join(map(str, nccl_version)),
        "uuid": str(getattr(properties, "uuid", "")),
    }


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about versions and devices."""
    yield from _judge_versions(answers)
    yield from _judge_untested(answers)
    yield from _judge_devices(answers)
    yield from _judge_threads(answers)


def _ranks_of(answers: Sequence[Answer]) -> str:
    """Return the ranks that gave these answers, in words."""
    host_of_rank = {answer["rank"]: answer["host"] for answer in answers}
    return format_ranks(host_of_rank)


def _by_value(answers: Sequence[Answer], fact_name: str) -> dict[str, list[Answer]]:
    """Return the answers by what they say of a fact; those without it by ""."""
    by_value: dict[str, list[Answer]] = {}
    for answer in answers:
        value = answer.get(fact_name, "")
        with_value = by_value.setdefault(value, [])
        with_value.append(answer)
    return by_value


def _usual_value(by_value: Mapping[str, Sequence[Answer]]) -> str:
    """Return the most frequent value; of equally frequent ones that of rank 0's host."""
    return max(by_value, key=lambda value: len(by_value[value]))


def _judge_versions(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield what is not the same on all ranks, otherwise what is installed."""
    problems = list[Finding]()
    for fact_name in SAME_ON_ALL:
        problems.extend(_different_versions(fact_name, answers))
    yield from problems or [_summarize_versions(answers)]


def _different_versions(fact_name: str, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about each version of `fact_name` that is not the most frequent one."""
    by_version = _by_value(answers, fact_name)
    usual_version = _usual_value(by_version)
    remedy = f"install the same {fact_name} on all hosts"
    for version_there, affected in by_version.items():
        if version_there == usual_version:
            continue
        there = f"{version_there or 'is not there'} on {_ranks_of(affected)}"
        elsewhere = f"{usual_version or 'is not there'} on the others"
        message = f"{fact_name} {there}, {elsewhere}"
        yield wrong("versions", message, remedy, differs=fact_name)


def _summarize_versions(answers: Sequence[Answer]) -> Finding:
    """Return what is installed, for ranks that all have the same."""
    first_answer = answers[0]
    # a machine without a GPU has no CUDA and no NCCL
    installed = [f"{name} {first_answer[name]}" for name in SUMMARIZED if first_answer.get(name)]
    message = f"{', '.join(installed)} on {first_answer['system']}"
    num_hosts = len(_by_value(answers, "host"))
    if num_hosts > 1:
        message += f", the same on {len(answers)} ranks of {num_hosts} hosts"
    facts = {name: first_answer.get(name, "") for name in (*SAME_ON_ALL, "system")}
    return ok("versions", message, **facts)


def _judge_untested(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about each package of a version that megaprec is not tested with.

    It may work.
    """
    answers_by_message: dict[str, list[Answer]] = {}
    for answer in answers:
        for message in answer.get("untested", ()):
            with_message = answers_by_message.setdefault(message, [])
            with_message.append(answer)
    for message, affected in sorted(answers_by_message.items()):
        if len(affected) < len(answers):
            message += f" ({_ranks_of(affected)})"
        yield not_tried("versions", message)


def _judge_devices(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs, otherwise what they are."""
    problems = [
        *_unused_gpus(answers),
        *_shared_gpus(answers),
        *_busy_gpus(answers),
        *_different_gpus(answers),
    ]
    yield from problems or [_summarize_devices(answers)]


def _summarize_devices(answers: Sequence[Answer]) -> Finding:
    """Return how many ranks there are on devices of each kind."""
    ranks_on: Counter[str] = Counter()
    for answer in answers:
        cpu = f"CPU of {counted(answer['cores'], 'core')}"
        device = answer.get("gpu") or cpu
        ranks_on[device] += 1
    parts = [f"{counted(count, 'rank')} on {device}" for device, count in ranks_on.items()]
    facts_of_ranks = [*map(_device_facts, answers)]
    return ok("devices", ", ".join(parts), ranks=facts_of_ranks)


def _device_facts(answer: Answer) -> Answer:
    """Return what a program may want to know of a rank's device."""
    fact_names = ("rank", "host", "gpu", "memory")
    return {fact_name: answer.get(fact_name) for fact_name in fact_names}


def _unused_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line if a driver is there, but torch sees no GPU."""
    # they have a driver, and train on the CPU
    blind = [answer for answer in answers if answer["gpu_tool"] and answer["device"] == "cpu"]
    if not blind:
        return
    if blind[0]["cuda"]:
        reason = "sees no GPU, or fewer than ranks"
    else:
        reason = "is built without CUDA"
    message = f"nvidia-smi is there, but torch {reason}: {_ranks_of(blind)}"
    remedy = "install a build of torch with CUDA, or look at CUDA_VISIBLE_DEVICES and the driver"
    yield wrong("devices", message, remedy)


def _shared_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a finding for each GPU that several ranks have."""
    # NCCL refuses such ranks too, but names the GPU only below the first line of its error.
    for uuid, sharing in _by_value(answers, "uuid").items():
        if uuid and len(sharing) > 1:
            message = f"{_ranks_of(sharing)} share GPU {uuid}"
            yield wrong("devices", message, "give each local rank a GPU of its own")


def _busy_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a finding for each GPU of which other processes use much memory."""
    for answer in answers:
        # A display or a monitor may take a little: only a noticeable share is named.
        used = answer.get("used_by_others", 0)
        noticeable = BUSY_SHARE * answer.get("memory", 1)
        if used > noticeable:
            gibibytes = used / 2**30
            rank = _ranks_of([answer])
            message = f"other processes use {gibibytes:.1f} GiB of the GPU of {rank}"
            yield wrong("devices", message, "end them: nvidia-smi lists them")


def _different_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a finding for each GPU of another kind than most."""
    by_gpu = _by_value(answers, "gpu")
    usual_gpu = _usual_value(by_gpu)
    for gpu, affected in by_gpu.items():
        if gpu != usual_gpu:
            others = f"the others {usual_gpu or 'a CPU'}"
            message = f"{_ranks_of(affected)} has {gpu or 'a CPU'}, {others}"
            yield wrong("devices", message, "use hosts of one kind")


def _judge_threads(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about CPU threads: more than cores slow every rank of a host."""
    # One thread a rank is the least: then there is nothing to mend.
    crowded: dict[str, Answer] = {}
    for answer in answers:
        if answer["threads"] > 1 and _all_threads(answer) > answer["cores"]:
            crowded[answer["host"]] = answer
    for host, answer in crowded.items():
        threads = max(1, answer["cores"] // answer["local_ranks"])
        message = f"{_format_threads(answer)} of {host}"
        yield wrong("threads", message, f"set OMP_NUM_THREADS={threads}")
    if not crowded:
        # the host whose cores have most to do
        busiest = max(answers, key=lambda answer: answer["load"] / answer["cores"])
        message = f"{_format_threads(busiest)}, load {busiest['load']}{_sharing(busiest)}"
        names = ("cores", "threads", "local_ranks", "load")
        numbers = {name: busiest[name] for name in names}
        yield ok("threads", message, **numbers)


def _sharing(answer: Answer) -> str:
    """Return the end of a line about cores that ranks share with each other, or with other work."""
    shared = ""
    if _all_threads(answer) > answer["cores"]:
        shared += "; ranks take turns on the cores"
    # the load has these ranks too
    if answer["load"] > answer["cores"] + _all_threads(answer):
        shared += f"; other work has the cores of {answer['host']}: speeds will be lower"
    return shared


def _all_threads(answer: Answer) -> int:
    """Return the CPU threads of all ranks of a host."""
    return answer["threads"] * answer["local_ranks"]


def _format_threads(answer: Answer) -> str:
    """Return the threads of a host's ranks and the cores that they share."""
    local_ranks = counted(answer["local_ranks"], "local rank")
    threads = counted(answer["threads"], "thread")
    num_cores = counted(answer["cores"], "core")
    return f"{local_ranks} x {threads} on {num_cores}"
