"""ZeRO-3 beside torch's `fully_shard` on one model of torch's own layers, both counted in the same
way: the weights after training, the collectives, their bytes, and the bytes of whole weights."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from tests.ranks import run_ranks

WIDTH = 128  # sizes that need no padding
VOCAB = 128
LAYERS = 5
STEPS = 3
LR = 1e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass
class Traffic:
    """Collectives of one step on one rank, the bytes of their whole tensors, and the bytes of whole
    weights that have memory, at most and at the end.

    These are storages that are given memory and give it up. `fully_shard` gathers into further
    tensors first, which count until they are freed.
    """

    gathers: int = 0
    gathered_bytes: int = 0
    reductions: int = 0
    reduced_bytes: int = 0
    peak: int = 0
    now: int = 0
    grown: set[int] = field(default_factory=set)

    def gather(self, whole: Tensor) -> None:
        self.gathers += 1
        self.gathered_bytes += whole.nbytes

    def gather_into_new(self, whole: Tensor) -> None:
        self.gather(whole)
        self.hold(whole.nbytes)
        weakref.finalize(whole, self.hold, -whole.nbytes)

    def reduction(self, whole: Tensor) -> None:
        self.reductions += 1
        self.reduced_bytes += whole.nbytes

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        if size:
            self.grown.add(storage._cdata)
        elif storage._cdata not in self.grown:
            return  # gradients, which are allocated by other means
        self.hold(size - storage.nbytes())

    def hold(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what both systems send and hold inside."""
    traffic = Traffic()
    resize = torch.UntypedStorage.resize_

    def counting_resize(storage: torch.UntypedStorage, size: int) -> Any:
        traffic.resized(storage, size)
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", counting_resize)
        note_calls(
            patched, Axis, "start_gather_from", lambda axis, own, whole, tag: traffic.gather(whole)
        )
        note_calls(
            patched, Axis, "start_scatter_sum_", lambda axis, whole: traffic.reduction(whole)
        )
        # the names of torch 2.13, or those before
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                note_calls(
                    patched, dist, name, lambda whole, *_, **__: traffic.gather_into_new(whole)
                )
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                note_calls(
                    patched, dist, name, lambda *args, **named: traffic.reduction(named["input"])
                )
        yield traffic


def note_calls(
    patched: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]
) -> None:
    """Call `note` with the arguments of each call of a function."""
    function = getattr(owner, name)

    def noting(*args: Any, **named: Any) -> Any:
        note(*args, **named)
        return function(*args, **named)

    patched.setattr(owner, name, noting)


def ids_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, VOCAB, (4, 8), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


Trained = tuple[dict[str, Tensor], list[Traffic]]


def ours(mesh: DeviceMesh, overlap: bool) -> Trained:
    model = Decoder()
    attach_whole(model)
    optimizer = ParallelAMPOptimizer(
        [model],
        plan("fp32"),
        mesh,
        average=True,
        weight_decay=0.0,
        clip=0.0,
        shard_weights=True,
        overlap=overlap,
    )
    steps: list[Traffic] = []
    for step in range(STEPS):
        with counted() as traffic:
            optimizer.expect()
            loss_of(model, ids_of(optimizer.dp.rank, step)).backward()
            optimizer.step(lr=LR)
        steps.append(traffic)
    with optimizer.whole_weights():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, steps


def theirs(mesh: DeviceMesh) -> Trained:
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    steps: list[Traffic] = []
    for step in range(STEPS):
        with counted() as traffic:
            loss_of(model, ids_of(dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(traffic)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        weights[name] = parameter.full_tensor().detach()
    return weights, steps


@pytest.mark.parametrize("overlap", [False, True])
def test_zero_3_trains_as_fully_shard_and_sends_and_holds_no_more(overlap: bool) -> None:
    known, expected = run_ranks(theirs, {"dp": 2})[0]
    weights, steps = run_ranks(ours, {"dp": 2}, overlap=overlap)[0]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, known[name], rtol=1e-5, atol=1e-6)
    # the first step of fully_shard also learns the order of its layers
    for own, other in zip(steps[1:], expected[1:], strict=True):
        assert 2 * LAYERS < own.gathers <= other.gathers
        assert LAYERS < own.reductions <= other.reductions
        assert own.gathered_bytes <= other.gathered_bytes
        assert own.reduced_bytes <= other.reduced_bytes
        assert 0 < own.peak <= other.peak
        assert own.now <= other.now
