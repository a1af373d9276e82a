"""The speed of training in FLOPs: model TFLOP/s of a rank, and MFU where the peak of its device is
known.

MFU is the fraction of the device's peak that the model's own matrix products use (model FLOPs
utilization). Recomputed products do not count, so MFU says how fast the model trains and not how
busy the device is.
"""

from dataclasses import dataclass

import torch

from models.config import ModelConfig
from models.estimate.flops import training_flops
from models.estimate.gpus import gpu_named
from tools.config.run_file import RunConfig


@dataclass(frozen=True)
class Throughput:
    """The measure of a run's speed.

    flops: of a token, on one rank; 0 if they are not known. peak: TFLOP/s of a rank's device, 0 if
    not known.
    """

    flops: float
    peak: float

    @staticmethod
    def of(config: RunConfig, model: ModelConfig, device: torch.device) -> "Throughput":
        """Return the measure of a run. The FLOPs of a custom model are not known."""
        flops = 0.0
        if not model.factory:
            # Tokens a second are those of all ranks together.
            flops = training_flops(model, config.train.seq_length) / config.world_size
        return Throughput(flops, peak_of(config, device))

    def fields(self, tokens_per_s: float) -> dict[str, float]:
        """Return the fields of a step's record: `tflops` of a rank, and `mfu`."""
        if not self.flops:
            return {}
        tflops = tokens_per_s * self.flops / 1e12
        fields = {"tflops": tflops}
        if self.peak:
            fields["mfu"] = tflops / self.peak
        return fields


def peak_of(config: RunConfig, device: torch.device) -> float:
    """Return the peak TFLOP/s of a device: log.peak_tflops, or that of its data sheet.

    0 if neither is known.
    """
    if config.log.peak_tflops or device.type != "cuda":
        return config.log.peak_tflops
    gpu = gpu_named(torch.cuda.get_device_name(device))
    return gpu.tflops(config.plan) if gpu else 0.0
