"""What is compared of models with recurrent layers and of transformers' ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models.attention.packing import Packing
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.kv_cache import CachedStage
from models.decoder.stages import Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.families import LENGTH, Answer, Job, Layout, put, step_rank
from tools.convert.hf.folder import open_hf
from tools.convert.verify import read_weights


def drawn_documents(samples: int, has_documents: bool, seed: int) -> Tensor | None:
    """The numbers of the documents of a seed's tokens, some of one token; None without any."""
    if not has_documents:
        return None
    begins = torch.rand(samples, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.3
    return begins.cumsum(1)


def ours(job: Job, config: ModelConfig | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients by logical name with the logits among them, of one process."""
    config = config or job.config
    stage = Stage(config, Context(plan("fp64")), cuts(config, 1, job.tokens.shape[1])[0])
    put(stage, job.weights)
    samples = MicrobatchInfo(0, torch.arange(len(job.tokens)), torch.ones(()))
    logits = stage(job.tokens.t(), samples, Packing(job.documents))
    seen = logits.detach().transpose(0, 1).flatten(0, 1).t().clone()
    loss = stage.losses(logits, job.targets.t()).mean()
    loss.backward()
    found = {"logits": seen}
    for parameter in stage.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for part, first, last in layout_of(parameter).spans():
            found[part.name] = grad.view(-1)[first:last].view(part.shape)
    return loss.item(), found


def convolve_neighbours(patch: pytest.MonkeyPatch, mixer: Any) -> None:
    """Put each feature that a kind of mixer convolves in the place of its neighbour."""
    whole = mixer._convolve
    patch.setattr(mixer, "_convolve", lambda self, x, begins: whole(self, x, begins).roll(1, -1))


def misplaced(mesh: DeviceMesh, jobs: bytes, mixer: Any) -> list[Answer]:
    """A step whose second rank convolves with the channels of its neighbours."""
    right = mixer._convolve

    def convolve(self: Any, mixed: Tensor, begins: Tensor | None) -> Tensor:
        moved = self.context.tp.rank
        return right(self, mixed.roll(moved, -1), begins).roll(-moved, -1)

    mixer._convolve = convolve
    try:
        return step_rank(mesh, jobs, Layout(tp=2))
    finally:
        mixer._convolve = right


def continued(folder: Path, prompt: Tensor, count: int) -> list[int]:
    """A prompt [1, s], and the `count` likeliest tokens after it, by the model in a folder."""
    source = open_hf(folder)
    stage = CachedStage(source.model, Context(plan("fp64")), cuts(source.model, 1, 256)[0])
    read_weights(stage, source)
    stage.start(prompt.shape[1] + count)
    ids = prompt[0].tolist()
    piece = prompt.t()
    for _ in range(count):
        ids.append(int(stage.extend(piece)[0].argmax()))
        piece = torch.tensor([[ids[-1]]])
    return ids
