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
from tools.doctor.finding import Finding, not_tried, ok, wrong
from tools.doctor.questions import Answer, RankContext, format_ranks
from tools.training.launch import share_of_cores

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
    if context.device == "cuda":
        machine |= _gpu_facts(context.local)
    return machine


def _gpu_facts(local_rank: int) -> Answer:
    """Return the GPU of this rank, its memory in bytes, and the versions of NCCL and the driver."""
    # A launcher may show each rank its own GPU only, which is then number 0.
    number = local_rank if torch.cuda.device_count() > 1 else 0
    free, total = torch.cuda.mem_get_info(number)
    properties = torch.cuda.get_device_properties(number)
    reserved = torch.cuda.memory_reserved(number)
    return {
        "gpu": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(number))),
        "memory": total,
        "used_by_others": max(0, total - free - reserved),
        "nccl": ".".join(map(str, nccl.version())) if is_nccl_available() else "",
    }


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield the findings about versions and devices."""
    yield from _judge_versions(answers)
    yield from _judge_untested(answers)
    yield from _judge_devices(answers)
    yield from _judge_threads(answers)


def _hosts_by_rank(answers: Sequence[Answer]) -> dict[int, str]:
    return {answer["rank"]: answer["host"] for answer in answers}


def _judge_versions(answers: Sequence[Answer]) -> Iterator[Finding]:
    problems = list[Finding]()
    for name in SAME_ON_ALL:
        problems.extend(_different_versions(name, answers))
    yield from problems or [_summarize_versions(answers)]


def _different_versions(name: str, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about each version of `name` that is not the most frequent one."""
    counts = Counter(answer.get(name, "") for answer in answers)
    # Of equally frequent ones the first, that of rank 0's host.
    usual = counts.most_common(1)[0][0]
    for unusual in counts:
        if unusual == usual:
            continue
        affected = [answer for answer in answers if answer.get(name, "") == unusual]
        ranks = format_ranks(_hosts_by_rank(affected))
        message = (
            f"{name} {unusual or 'is not there'} on {ranks}, {usual or 'is not there'} on the "
            "others"
        )
        yield wrong("versions", message, f"install the same {name} on all hosts", differs=name)


def _summarize_versions(answers: Sequence[Answer]) -> Finding:
    first = answers[0]
    hosts = len({answer["host"] for answer in answers})
    extent = f", the same on {len(answers)} ranks of {hosts} hosts" if hosts > 1 else ""
    installed = [name for name in SUMMARIZED if first.get(name)]
    versions = ", ".join(f"{name} {first[name]}" for name in installed)
    numbers = {name: first.get(name, "") for name in (*SAME_ON_ALL, "system")}
    return ok("versions", f"{versions} on {first['system']}{extent}", **numbers)


def _judge_untested(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about each package of a version that megaprec is not tested with.

    It may work.
    """
    answers_by_message: dict[str, list[Answer]] = {}
    for answer in answers:
        for message in answer.get("untested", ()):
            answers_by_message.setdefault(message, []).append(answer)

    for message, affected in sorted(answers_by_message.items()):
        if len(affected) < len(answers):
            message += f" ({format_ranks(_hosts_by_rank(affected))})"
        yield not_tried("versions", message)


def _judge_devices(answers: Sequence[Answer]) -> Iterator[Finding]:
    problems = [
        *_unused_gpus(answers),
        *_busy_gpus(answers),
        *_different_gpus(answers),
    ]
    yield from problems or [_summarize_devices(answers)]


def _summarize_devices(answers: Sequence[Answer]) -> Finding:
    kinds = Counter(
        answer.get("gpu") or f"CPU of {counted(answer['cores'], 'core')}" for answer in answers
    )
    ranks_by_kind = [f"{counted(count, 'rank')} on {kind}" for kind, count in kinds.items()]
    message = ", ".join(ranks_by_kind)
    return ok("devices", message, ranks=[_device_facts(answer) for answer in answers])


def _device_facts(answer: Answer) -> Answer:
    return {name: answer.get(name) for name in ("rank", "host", "gpu", "memory")}


def _unused_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line if a driver is there, but torch sees no GPU."""
    affected = [answer for answer in answers if answer["gpu_tool"] and answer["device"] == "cpu"]
    if not affected:
        return
    blind = _hosts_by_rank(affected)  # they have a driver, and train on the CPU
    if answers[min(blind)]["cuda"]:
        reason = "sees no GPU, or fewer than ranks"
    else:
        reason = "is built without CUDA"
    message = f"nvidia-smi is there, but torch {reason}: {format_ranks(blind)}"
    remedy = "install a build of torch with CUDA, or look at CUDA_VISIBLE_DEVICES and the driver"
    yield wrong("devices", message, remedy)


def _busy_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    for answer in answers:
        # A display or a monitor may take a little: only a noticeable share is named.
        used = answer.get("used_by_others", 0)
        if used > BUSY_SHARE * answer.get("memory", 1):
            rank = format_ranks(_hosts_by_rank([answer]))
            message = f"other processes use {used / 2**30:.1f} GiB of the GPU of {rank}"
            yield wrong("devices", message, "end them: nvidia-smi lists them")


def _different_gpus(answers: Sequence[Answer]) -> Iterator[Finding]:
    kinds = Counter(answer.get("gpu", "a CPU") for answer in answers)
    usual = kinds.most_common(1)[0][0]
    for kind in kinds:
        if kind == usual:
            continue
        affected = [answer for answer in answers if answer.get("gpu", "a CPU") == kind]
        ranks = format_ranks(_hosts_by_rank(affected))
        message = f"{ranks} has {kind}, the others {usual}"
        yield wrong("devices", message, "use hosts of one kind")


def _judge_threads(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a line about CPU threads: more than cores slow every rank of a host."""
    # One thread a rank is the least: then there is nothing to mend.
    crowded = {
        answer["host"]: answer
        for answer in answers
        if answer["threads"] > 1 and _all_threads(answer) > answer["cores"]
    }
    for host, answer in crowded.items():
        threads = max(1, answer["cores"] // answer["local_ranks"])
        message = f"{_format_threads(answer)} of {host}"
        yield wrong("threads", message, f"set OMP_NUM_THREADS={threads}")
    if not crowded:
        first = answers[0]
        message = f"{_format_threads(first)}, load {first['load']}"
        numbers = {name: first[name] for name in ("cores", "threads", "local_ranks", "load")}
        yield ok("threads", message, **numbers)


def _all_threads(answer: Answer) -> int:
    return answer["threads"] * answer["local_ranks"]


def _format_threads(answer: Answer) -> str:
    """Return the threads of a host's ranks and the cores that they share."""
    ranks = counted(answer["local_ranks"], "local rank")
    threads = counted(answer["threads"], "thread")
    return f"{ranks} x {threads} on {counted(answer['cores'], 'core')}"
