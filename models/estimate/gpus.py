"""Peak speed, memory and links of GPUs, from their vendors' data sheets.

Speeds are dense: a data sheet's figures "with sparsity" are twice as high. Memory is in the
vendors' GB of 10^9 bytes. Links are those between GPUs of one machine, GB/s in each direction, half
of what data sheets add up. Sources: NVIDIA's data sheets of A10, A30, A40, A100, L4, L40S, H100,
H200 and HGX B200, its whitepapers of GeForce RTX 3090 and 4090, and AMD's data sheet of MI300X. A
device that is not listed is not known: nothing is guessed from its name.
"""

import re
from dataclasses import dataclass

import torch

from megaprec.precision.plan import PrecisionPlan


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    gigabytes: of memory.
    half, tf32, single: peak TFLOP/s of dense products in bf16 and fp16, in TF32 and in FP32.
    link: GB/s to another GPU of the machine, in each direction.
    """

    name: str
    gigabytes: float
    half: float
    tf32: float
    single: float
    link: float

    def tflops(self, plan: PrecisionPlan) -> float:
        """Return the peak TFLOP/s of the plan's products; 0 for FP64, whose peak is not listed.

        Of FP8 products it is the peak of bf16, in which the others are.
        """
        if plan.compute == torch.float64:
            return 0.0
        if plan.compute == torch.float32:
            return self.tf32 if plan.tf32 else self.single
        return self.half


GPUS = (
    GPU("A10", 24, 125, 62.5, 31.2, 32),
    GPU("A30", 24, 165, 82, 10.3, 100),
    GPU("A40", 48, 149.7, 74.8, 37.4, 56),
    GPU("A100", 80, 312, 156, 19.5, 300),
    GPU("A100 40GB", 40, 312, 156, 19.5, 300),
    GPU("L4", 24, 121, 60, 30.3, 32),
    GPU("L40S", 48, 362, 183, 91.6, 32),
    GPU("H100", 80, 989, 494, 67, 450),
    GPU("H100 PCIe", 80, 756, 378, 51, 300),
    GPU("H100 NVL", 94, 835, 417, 60, 300),
    GPU("H200", 141, 989, 494, 67, 450),
    GPU("H200 NVL", 141, 835, 417, 60, 450),
    GPU("B200", 180, 2250, 1100, 80, 900),
    GPU("RTX 3090", 24, 71, 35.6, 35.6, 32),
    GPU("RTX 4090", 24, 165, 82.6, 82.6, 32),
    GPU("MI300X", 192, 1307, 654, 163, 64),
)

# Words that make another device: GeForce RTX 4090 Laptop GPU, or a part (MIG) of an A100.
OTHERS = {"laptop", "ti", "super", "d", "mig"}


def gpu_named(name: str) -> GPU | None:
    """Return the GPU of this name, such as "h100" or torch's "NVIDIA A100-SXM4-80GB"; None if it is
    not known.

    All words of a device's name must be there; of several devices the one with most words is meant.
    Words of `OTHERS` make it another device.
    """
    words = _words(name)
    if words & OTHERS:
        return None
    candidates = [gpu for gpu in GPUS if _words(gpu.name) <= words]
    return max(candidates, key=lambda gpu: len(_words(gpu.name)), default=None)


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s_/-]+", name.lower()))
