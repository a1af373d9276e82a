"""The kernels that a GPU runs in a step of a benchmark."""

import torch
from torch.profiler import ProfilerActivity

from tools.analysis.planning.fp8_timing import synchronize
from tools.bench.measurement import Step
from tools.journal.kernel_table import Kernel, kernels_among


def kernels_of(step: Step, device: torch.device) -> list[Kernel]:
    """Return the kernels of a step, which has warmed up."""
    synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        synchronize(device)
    return kernels_among(profiler.events() or ())
