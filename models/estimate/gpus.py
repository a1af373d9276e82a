"""Peak speed, memory and links of GPUs, from their vendors' data sheets.

Speeds are dense: a data sheet's figures "with sparsity" are twice as high. Memory is in the
vendors' GB of 10^9 bytes. Links are those between GPUs of one machine, GB/s in each direction, half
of what data sheets add up. Sources: NVIDIA's data sheets of A10, A30, A40, A100, L4, L40S, H20,
H100, H200, HGX B200 and B300, GB200 NVL72 and GB300 NVL72, its whitepapers of GeForce RTX 3090 and
4090, DeepSeek-V3's report (arXiv 2412.19437) on the links of H800, and AMD's data sheets of MI300X
and MI325X. A device that is not listed is not known: nothing is guessed from its name.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch

from megaprec.precision.plan import PrecisionPlan

Architecture = Literal["Ampere", "Ada", "Hopper", "Blackwell", "CDNA 3"]


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    architecture: by which it reaches more or less of its peak.
    gigabytes: of memory.
    half, tf32, single: peak TFLOP/s of dense products in bf16 and fp16, in TF32 and in FP32.
    fp8: peak TFLOP/s of dense products in FP8; 0 without FP8.
    bandwidth: of memory, GB/s.
    link: GB/s to another GPU of the machine, in each direction.
    domain: GPUs that such links join; a rack of NVL72 is one machine.
    card: GB/s of the network card that systems of this GPU have for each GPU.
    """

    name: str
    architecture: Architecture
    gigabytes: float
    half: float
    tf32: float
    single: float
    fp8: float
    bandwidth: float
    link: float
    domain: int = 8
    card: float = 50.0

    def tflops(self, plan: PrecisionPlan) -> float:
        """Return the peak TFLOP/s of the plan's products; 0 for FP64, whose peak is not listed.

        Of a plan with FP8 it is the peak of bf16, in which the other products are.
        """
        if plan.compute == torch.float64:
            return 0.0
        if plan.compute == torch.float32:
            return self.tf32 if plan.tf32 else self.single
        return self.half


GPUS = (
    GPU("A10", "Ampere", 24, 125, 62.5, 31.2, 0, 600, 32),
    GPU("A30", "Ampere", 24, 165, 82, 10.3, 0, 933, 100),
    GPU("A40", "Ampere", 48, 149.7, 74.8, 37.4, 0, 696, 56),
    GPU("A100", "Ampere", 80, 312, 156, 19.5, 0, 2039, 300, card=25),
    GPU("A100 40GB", "Ampere", 40, 312, 156, 19.5, 0, 1555, 300, card=25),
    GPU("L4", "Ada", 24, 121, 60, 30.3, 242, 300, 32),
    GPU("L40S", "Ada", 48, 362, 183, 91.6, 733, 864, 32),
    GPU("H20", "Hopper", 96, 148, 74, 44, 296, 4000, 450),
    GPU("H100", "Hopper", 80, 989, 494, 67, 1979, 3350, 450),
    GPU("H100 PCIe", "Hopper", 80, 756, 378, 51, 1513, 2000, 300),
    GPU("H100 NVL", "Hopper", 94, 835, 417, 60, 1671, 3900, 300),
    GPU("H200", "Hopper", 141, 989, 494, 67, 1979, 4800, 450),
    GPU("H200 NVL", "Hopper", 141, 835, 417, 60, 1671, 4800, 450),
    GPU("H800", "Hopper", 80, 989, 494, 67, 1979, 3350, 200),
    GPU("B200", "Blackwell", 180, 2250, 1100, 80, 4500, 8000, 900),
    GPU("B300", "Blackwell", 288, 2250, 1100, 75, 4500, 8000, 900, card=100),
    GPU("GB200", "Blackwell", 186, 2500, 1250, 80, 5000, 8000, 900, domain=72),
    GPU("GB300", "Blackwell", 288, 2500, 1250, 80, 5000, 8000, 900, domain=72, card=100),
    GPU("RTX 3090", "Ampere", 24, 71, 35.6, 35.6, 0, 936, 32),
    GPU("RTX 4090", "Ada", 24, 165, 82.6, 82.6, 330, 1008, 32),
    GPU("MI300X", "CDNA 3", 192, 1307, 654, 163, 2615, 5300, 64),
    GPU("MI325X", "CDNA 3", 256, 1307, 654, 163, 2615, 6000, 64),
)

# Words that make another device: GeForce RTX 4090 Laptop GPU, or a part (MIG) of an A100.
OTHERS = {"laptop", "ti", "super", "d", "mig"}


def gpu_named(name: str) -> GPU | None:
    """Return the GPU of this name, such as "h100" or torch's "NVIDIA A100-SXM4-80GB"; None if it is
    not known.

    All words of a known GPU's name must be in `name`; of several such GPUs it is the one whose name
    has most words. A word of `OTHERS` in `name` says that it is another device.
    """
    words = _words(name)
    if words & OTHERS:
        return None
    candidates = [gpu for gpu in GPUS if _words(gpu.name) <= words]
    return max(candidates, key=lambda gpu: len(_words(gpu.name)), default=None)


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s_/-]+", name.lower()))
