"""The kernels that a run takes for attention and for layers with a recurrent state, in words."""

from collections.abc import Iterator, Mapping

import torch

from models.config import ModelConfig
from models.estimate.storage import without_storage
from tools.config.run_file import RunConfig


def kernel_lines(
    config: RunConfig, model: ModelConfig, device: str, refused_kernels: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for attention, and one for layers with a recurrent state if there are any.

    refused_kernels: why the run's engine does without a package of kernels, by its name.
    """
    with without_storage("cpu") if device == "cpu" else torch.device(device):
        attention = config.attention_kernels(model)
        recurrent = config.recurrent_kernels(model, refused_kernels)
    if attention:
        yield f"attention  {'; '.join(attention)}"
    if recurrent:
        yield f"recurrent  {'; '.join(recurrent)}"
