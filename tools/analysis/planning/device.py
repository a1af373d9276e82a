"""The device that a run is planned for: its kind, its memory and its peak speed, or that they are
not known.

A GPU is named on the command line, or it is the one that is here. A CPU's memory is shared by all
ranks of the run, as if they ran on this machine. Nothing is guessed: what is not known is 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megaprec.errors import UserError, did_you_mean
from megaprec.resources import memory_bytes
from models.estimate.gpus import GPU, GPUS, gpu_named
from models.estimate.storage import Device
from tools.analysis.planning.memory import PROCESS
from tools.config.run_file import RunConfig
from tools.config.tables.table import parse_size

RESERVED = 0.05  # of a device's memory: for CUDA, kernels and gaps between tensors


@dataclass(frozen=True)
class DeviceTarget:
    """A rank's device.

    memory: in bytes; 0 if it is not known.
    gpu: its data sheet; None if it is not known.
    process: bytes of Python and torch in a process on a CPU.
    """

    device: Device
    name: str
    memory: int = 0
    gpu: GPU | None = None
    process: int = PROCESS

    @property
    def usable(self) -> int:
        """Return the bytes that a run may use."""
        return int(self.memory * (1 - RESERVED))

    def verdict(self, needed: int) -> str:
        """Return whether `needed` bytes fit: "fits", "does not fit" or "not known"."""
        if not self.memory:
            return "not known"
        return "fits" if needed <= self.usable else "does not fit"


def target_of(config: RunConfig, gpu: str = "", memory: str = "", ranks: int = 0) -> DeviceTarget:
    """Return the device that is named, or the one here that the run would take. Raises UserError.

    ranks: that share it if it is a CPU; 0: those of the run.
    """
    size = _memory_size(memory) if memory else 0
    if gpu:
        sheet = _require_gpu(gpu)
        return DeviceTarget("cuda", sheet.name, size or int(sheet.gigabytes * 10**9), sheet)
    # memory alone is that of some GPU, whose speed is not known
    if size:
        return DeviceTarget("cuda", f"a GPU of {memory}", size)
    if config.train.device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = properties.name
        return DeviceTarget("cuda", name, properties.total_memory, gpu_named(name))
    # the run asks for a GPU, whatever this machine has
    if config.train.device == "cuda":
        return DeviceTarget("cuda", "a GPU that is not here")
    if config.optimizer.offload == "host":
        raise UserError.of("training.offload_on_cpu")
    ranks = ranks or config.world_size
    name = f"this machine's {memory_bytes() / 2**30:.1f} GiB"
    if ranks > 1:
        name += f" over {ranks:,} ranks"
    return DeviceTarget("cpu", name, memory_bytes() // ranks)


def assumed_devices(config: RunConfig) -> Iterator[str]:
    """Yield a line for what the device was taken to be, if the run file leaves it open."""
    if config.train.device == "auto" and not torch.cuda.is_available():
        yield 'train.device = "auto" is a CPU on this machine; --gpu NAME plans for a GPU'


def _require_gpu(name: str) -> GPU:
    """Return the data sheet of the GPU of this name. Raises UserError."""
    if gpu := gpu_named(name):
        return gpu
    names = [gpu.name for gpu in GPUS]
    raise UserError.of(
        "planning.gpu_unknown",
        name=name,
        did_you_mean=did_you_mean(name, names),
        names=", ".join(names),
    )


def _memory_size(text: str) -> int:
    """Return the bytes of a size such as 80GB or 79.6GiB. Raises UserError."""
    parsed = parse_size(text)
    if parsed is None:
        raise UserError.of("planning.gpu_memory_form", text=text)
    size, unit = parsed
    # no GPU has less: 80 without a unit is not meant as bytes
    if not unit and size < 10**6:
        raise UserError.of("planning.gpu_memory_unit", text=text, number=text.strip())
    return size
