"""Versions and devices of each rank, and the hosts whose versions differ from the others'.

Ranks of different versions may train and differ in silence, so every version that decides numbers
or messages must be the same on all ranks.
"""

import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.cuda import nccl
from torch.distributed import is_nccl_available

from megaprec.resources import cores
from megaprec.tested_versions import untested
from tools.console.units import counted
from tools.training.launch import share_of_cores
from tools.verify.doctor.finding import Finding, not_tried, ok, wrong
from tools.verify.doctor.questions import Answer, RankContext, format_ranks

# facts that must be the same on all ranks
SAME_ON_ALL = ("megaprec", "torch", "python", "cuda", "nccl", "driver", "byteorder")
SUMMARIZED = ("megaprec", "torch", "python", "cuda", "nccl")  # versions that the line names
BUSY_SHARE = 0.05  # of a GPU's memory, used by others


def facts(context: RankContext) -> Answer:
    """Return the versions, the device and the CPU threads of this rank."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine: Answer = {
        "megaprec": _installed_version("megaprec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "byteorder": sys.byteorder,
        "cores": cores(),
        "threads": share_of_cores(local_ranks),
        "local_ranks": local_ranks,
        "load": round(os.getloadavg()[0], 2),
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
    reserved = torch.cuda.memory_reserved(gpu_number)
    return {
        "gpu": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(gpu_number))),
        "memory": total,
        "used_by_others": max(0, total - free - reserved),
        "nccl": ".".join(map(str, nccl.version())) if is_nccl_available() else "",
        "uuid": str(getattr(properties, "uuid", "")),
    }


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def judge(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about versions and devices."""
    yield from _judge_versions(rank_answers)
    yield from _judge_untested(rank_answers)
    yield from _judge_devices(rank_answers)
    yield from _judge_threads(rank_answers)


def _hosts_by_rank(rank_answers: Sequence[Answer]) -> dict[int, str]:
    return {rank_answer["rank"]: rank_answer["host"] for rank_answer in rank_answers}


def _judge_versions(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    problems = list[Finding]()
    for fact_name in SAME_ON_ALL:
        problems.extend(_different_versions(fact_name, rank_answers))
    yield from problems or [_summarize_versions(rank_answers)]


def _different_versions(fact_name: str, rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about each version of `fact_name` that is not the most frequent one."""
    counts = Counter(rank_answer.get(fact_name, "") for rank_answer in rank_answers)
    # Of equally frequent ones the first, that of rank 0's host.
    usual_value = counts.most_common(1)[0][0]
    for unusual in counts:
        if unusual == usual_value:
            continue
        affected = [
            rank_answer for rank_answer in rank_answers if rank_answer.get(fact_name, "") == unusual
        ]
        ranks = format_ranks(_hosts_by_rank(affected))
        others = f"{usual_value or 'is not there'} on the others"
        message = f"{fact_name} {unusual or 'is not there'} on {ranks}, {others}"
        yield wrong(
            "versions", message, f"install the same {fact_name} on all hosts", differs=fact_name
        )


def _summarize_versions(rank_answers: Sequence[Answer]) -> Finding:
    first_answer = rank_answers[0]
    hosts = len({rank_answer["host"] for rank_answer in rank_answers})
    extent = f", the same on {len(rank_answers)} ranks of {hosts} hosts" if hosts > 1 else ""
    installed = [fact_name for fact_name in SUMMARIZED if first_answer.get(fact_name)]
    versions = ", ".join(f"{fact_name} {first_answer[fact_name]}" for fact_name in installed)
    numbers = {fact_name: first_answer.get(fact_name, "") for fact_name in (*SAME_ON_ALL, "system")}
    return ok("versions", f"{versions} on {first_answer['system']}{extent}", **numbers)


def _judge_untested(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about each package of a version that megaprec is not tested with.

    It may work.
    """
    answers_by_message: dict[str, list[Answer]] = {}
    for rank_answer in rank_answers:
        for message in rank_answer.get("untested", ()):
            answers_by_message.setdefault(message, []).append(rank_answer)

    for message, affected in sorted(answers_by_message.items()):
        if len(affected) < len(rank_answers):
            message += f" ({format_ranks(_hosts_by_rank(affected))})"
        yield not_tried("versions", message)


def _judge_devices(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    problems = [
        *_unused_gpus(rank_answers),
        *_shared_gpus(rank_answers),
        *_busy_gpus(rank_answers),
        *_different_gpus(rank_answers),
    ]
    yield from problems or [_summarize_devices(rank_answers)]


def _summarize_devices(rank_answers: Sequence[Answer]) -> Finding:
    device_kinds = Counter(
        rank_answer.get("gpu") or f"CPU of {counted(rank_answer['cores'], 'core')}"
        for rank_answer in rank_answers
    )
    ranks_by_kind = [
        f"{counted(count, 'rank')} on {device_kind}" for device_kind, count in device_kinds.items()
    ]
    message = ", ".join(ranks_by_kind)
    return ok(
        "devices", message, ranks=[_device_facts(rank_answer) for rank_answer in rank_answers]
    )


def _device_facts(rank_answer: Answer) -> Answer:
    return {
        fact_name: rank_answer.get(fact_name) for fact_name in ("rank", "host", "gpu", "memory")
    }


def _unused_gpus(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line if a driver is there, but torch sees no GPU."""
    affected = [
        rank_answer
        for rank_answer in rank_answers
        if rank_answer["gpu_tool"] and rank_answer["device"] == "cpu"
    ]
    if not affected:
        return
    blind = _hosts_by_rank(affected)  # they have a driver, and train on the CPU
    if rank_answers[min(blind)]["cuda"]:
        reason = "sees no GPU, or fewer than ranks"
    else:
        reason = "is built without CUDA"
    message = f"nvidia-smi is there, but torch {reason}: {format_ranks(blind)}"
    remedy = "install a build of torch with CUDA, or look at CUDA_VISIBLE_DEVICES and the driver"
    yield wrong("devices", message, remedy)


def _shared_gpus(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    # NCCL refuses such ranks too, but names the GPU only below the first line of its error.
    ranks_by_gpu: dict[str, list[Answer]] = {}
    for rank_answer in rank_answers:
        if uuid := rank_answer.get("uuid"):
            ranks_by_gpu.setdefault(uuid, []).append(rank_answer)
    for uuid, sharing in ranks_by_gpu.items():
        if len(sharing) > 1:
            message = f"{format_ranks(_hosts_by_rank(sharing))} share GPU {uuid}"
            yield wrong("devices", message, "give each local rank a GPU of its own")


def _busy_gpus(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    for rank_answer in rank_answers:
        # A display or a monitor may take a little: only a noticeable share is named.
        used = rank_answer.get("used_by_others", 0)
        if used > BUSY_SHARE * rank_answer.get("memory", 1):
            rank = format_ranks(_hosts_by_rank([rank_answer]))
            message = f"other processes use {used / 2**30:.1f} GiB of the GPU of {rank}"
            yield wrong("devices", message, "end them: nvidia-smi lists them")


def _different_gpus(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    device_kinds = Counter(rank_answer.get("gpu", "a CPU") for rank_answer in rank_answers)
    usual_value = device_kinds.most_common(1)[0][0]
    for device_kind in device_kinds:
        if device_kind == usual_value:
            continue
        affected = [
            rank_answer
            for rank_answer in rank_answers
            if rank_answer.get("gpu", "a CPU") == device_kind
        ]
        ranks = format_ranks(_hosts_by_rank(affected))
        message = f"{ranks} has {device_kind}, the others {usual_value}"
        yield wrong("devices", message, "use hosts of one kind")


def _judge_threads(rank_answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about CPU threads: more than cores slow every rank of a host."""
    # One thread a rank is the least: then there is nothing to mend.
    crowded = {
        rank_answer["host"]: rank_answer
        for rank_answer in rank_answers
        if rank_answer["threads"] > 1 and _all_threads(rank_answer) > rank_answer["cores"]
    }
    for host, rank_answer in crowded.items():
        threads = max(1, rank_answer["cores"] // rank_answer["local_ranks"])
        message = f"{_format_threads(rank_answer)} of {host}"
        yield wrong("threads", message, f"set OMP_NUM_THREADS={threads}")
    if not crowded:
        first_answer = rank_answers[0]
        message = f"{_format_threads(first_answer)}, load {first_answer['load']}"
        numbers = {
            fact_name: first_answer[fact_name]
            for fact_name in ("cores", "threads", "local_ranks", "load")
        }
        yield ok("threads", message, **numbers)


def _all_threads(rank_answer: Answer) -> int:
    return rank_answer["threads"] * rank_answer["local_ranks"]


def _format_threads(rank_answer: Answer) -> str:
    """Return the threads of a host's ranks and the cores that they share."""
    local_ranks = counted(rank_answer["local_ranks"], "local rank")
    threads = counted(rank_answer["threads"], "thread")
    return f"{local_ranks} x {threads} on {counted(rank_answer['cores'], 'core')}"
