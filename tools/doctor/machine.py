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
from typing import Any

import torch
from torch.cuda import nccl
from torch.distributed import is_nccl_available

from megaprec.resources import cores
from megaprec.tested_versions import untested
from tools.console.units import counted
from tools.doctor.finding import Finding, not_tried, ok, wrong
from tools.doctor.place import Place, named
from tools.training.launch import share_of_cores

# the same on all ranks
ALIKE = (
    "megaprec",
    "torch",
    "python",
    "cuda",
    "nccl",
    "driver",
    "byteorder",
)
BUSY = 0.05  # of a GPU's memory, used by others


def facts(place: Place) -> dict[str, Any]:
    """Return the versions, the device and the CPU threads of this rank."""
    found = {
        "megaprec": _version("megaprec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "byteorder": sys.byteorder,
        "cores": cores(),
        "threads": share_of_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "load": round(os.getloadavg()[0], 2),
        "cuda": torch.version.cuda or "",
        "gpu_tool": shutil.which("nvidia-smi") or "",
        "device": place.device,
        "rank": place.rank,
        "host": place.host,
        "untested": [*untested()],
    }
    return found | (_gpu(place.local) if place.device == "cuda" else {})


def _gpu(local: int) -> dict[str, Any]:
    """Return the GPU of this rank, its memory in bytes, and the versions of NCCL and the driver."""
    number = local if torch.cuda.device_count() > 1 else 0
    free, total = torch.cuda.mem_get_info(number)
    properties = torch.cuda.get_device_properties(number)
    own = torch.cuda.memory_reserved(number)
    return {
        "gpu": properties.name,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(number))),
        "memory": total,
        "used_by_others": max(0, total - free - own),
        "nccl": ".".join(map(str, nccl.version())) if is_nccl_available() else "",
        "uuid": str(getattr(properties, "uuid", "")),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def judge(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the findings about versions and devices."""
    yield from _versions(answers)
    yield from _untested(answers)
    yield from _devices(answers)
    yield from _threads(answers)


def _versions(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    differ = False
    for name in ALIKE:
        counts = Counter(one.get(name, "") for one in answers)
        usual = counts.most_common(1)[0][0]
        for other in counts:
            if other != usual:
                differ = True
                there = {one["rank"]: one["host"] for one in answers if one.get(name, "") == other}
                said = (
                    f"{name} {other or 'is not there'} on {named(there)}, "
                    f"{usual or 'is not there'} on the others"
                )
                yield wrong("versions", said, f"install the same {name} on all hosts", differs=name)
    if not differ:
        one = answers[0]
        hosts = len({a["host"] for a in answers})
        where = f", the same on {len(answers)} ranks of {hosts} hosts" if hosts > 1 else ""
        shown = ("megaprec", "torch", "python", "cuda", "nccl")
        said = (
            ", ".join(f"{n} {one[n]}" for n in shown if one.get(n)) + f" on {one['system']}{where}"
        )
        yield ok("versions", said, **{n: one.get(n, "") for n in (*ALIKE, "system")})


def _untested(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield a line about each package of a version that megaprec is not tested with. It may
    work."""
    for said in sorted({said for one in answers for said in one.get("untested", ())}):
        there = {one["rank"]: one["host"] for one in answers if said in one.get("untested", ())}
        yield not_tried(
            "versions", said if len(there) == len(answers) else f"{said} ({named(there)})"
        )


def _devices(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    problems = [
        *_unused_gpus(answers),
        *_shared_gpus(answers),
        *_busy_gpus(answers),
        *_different_gpus(answers),
    ]
    yield from problems
    if not problems:
        kinds = Counter(
            one.get("gpu") or f"CPU of {counted(one['cores'], 'core')}" for one in answers
        )
        said = ", ".join(f"{counted(count, 'rank')} on {kind}" for kind, count in kinds.items())
        yield ok(
            "devices",
            said,
            ranks=[{k: a.get(k) for k in ("rank", "host", "gpu", "memory")} for a in answers],
        )


def _unused_gpus(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield a line if a driver is there, but torch sees no GPU."""
    blind = {
        one["rank"]: one["host"] for one in answers if one["gpu_tool"] and one["device"] == "cpu"
    }
    if blind:
        if not answers[min(blind)]["cuda"]:
            built = "is built without CUDA"
        else:
            built = "sees no GPU, or fewer than ranks"
        remedy = (
            "install a build of torch with CUDA, or look at CUDA_VISIBLE_DEVICES and the driver"
        )
        yield wrong("devices", f"nvidia-smi is there, but torch {built}: {named(blind)}", remedy)


def _shared_gpus(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    by_gpu: dict[str, dict[int, str]] = {}
    for one in answers:
        if one.get("uuid"):
            by_gpu.setdefault(one["uuid"], {})[one["rank"]] = one["host"]
    for uuid, ranks in by_gpu.items():
        if len(ranks) > 1:
            yield wrong(
                "devices",
                f"{named(ranks)} share GPU {uuid}",
                "give each local rank a GPU of its own",
            )


def _busy_gpus(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for one in answers:
        if one.get("used_by_others", 0) > BUSY * one.get("memory", 1):
            used = one["used_by_others"] / 2**30
            said = (
                f"other processes use {used:.1f} GiB of the GPU of "
                f"{named({one['rank']: one['host']})}"
            )
            yield wrong("devices", said, "end them: nvidia-smi lists them")


def _different_gpus(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    kinds = Counter(one.get("gpu", "a CPU") for one in answers)
    usual = kinds.most_common(1)[0][0]
    for kind in kinds:
        if kind != usual:
            there = {one["rank"]: one["host"] for one in answers if one.get("gpu", "a CPU") == kind}
            yield wrong(
                "devices", f"{named(there)} has {kind}, the others {usual}", "use hosts of one kind"
            )


def _threads(answers: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield a line about CPU threads: more than cores slow every rank of a host."""
    many = [
        one
        for one in answers
        if one["threads"] * one["local_ranks"] > one["cores"] and one["threads"] > 1
    ]
    for one in {one["host"]: one for one in many}.values():
        said = f"{_shared(one)} of {one['host']}"
        yield wrong(
            "threads", said, f"set OMP_NUM_THREADS={max(1, one['cores'] // one['local_ranks'])}"
        )
    if not many:
        one = answers[0]
        said = f"{_shared(one)}, load {one['load']}"
        yield ok(
            "threads",
            said,
            **{name: one[name] for name in ("cores", "threads", "local_ranks", "load")},
        )


def _shared(one: dict[str, Any]) -> str:
    """Return the threads of a host's ranks and the cores that they share."""
    ranks = counted(one["local_ranks"], "local rank")
    threads = counted(one["threads"], "thread")
    return f"{ranks} x {threads} on {counted(one['cores'], 'core')}"
