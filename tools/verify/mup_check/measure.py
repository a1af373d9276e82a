"""The measurement of one width: how far each activation is from its initial value after each step.

The model is trained on one sample of random tokens, which the seed decides and no width or layout
changes. Before the first step and after each one the same sample passes the model again without
gradients, and the activations are compared: all that a layer adds to the stream, the stream itself,
the scores of attention, logits of routers and of the head. Each is one number, the root mean square
over all tokens and features.

Logits change in two ways. The initial weights of a head or a router pass on what has changed before
them, less the wider they are; that is right, and no sign of how far updates reach. So the products
of the weights' changes alone are measured besides ("head update", "router update").

The ranks of tp have the same activations, or slices of them. Sums of squares over all ranks, and
their counts, give the same numbers in both cases.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.param_groups import Group
from megaprec.optim.update_rules import UpdateRule
from megaprec.precision.plan import PrecisionPlan
from models.attention.attention import Attention
from models.attention.flash_windows import Documents
from models.attention.latent_attention import LatentAttention
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer
from models.decoder.stages import Cut, Stage
from models.feed_forward.moe import MixtureOfExperts
from models.feed_forward.router import Router
from parallel.context import Context
from parallel.dropout import MicrobatchInfo

Activations = dict[str, Tensor]
Keep = Callable[[str, Tensor], None]
"""Takes an activation with its name."""


@dataclass(frozen=True)
class Training:
    """How the models are trained, the same at all widths.

    rule: the update rule.
    rate: the learning rate of every step.
    length: tokens of the sample.
    """

    rule: UpdateRule
    rate: float
    weight_decay: float
    clip: float
    groups: Sequence[Group]
    steps: int
    seed: int
    length: int
    plan: PrecisionPlan


@dataclass(frozen=True)
class Measured:
    """Root mean squares by activation.

    initial: of the activations before the first step.
    changes: of their differences from these, after each step.
    """

    initial: dict[str, float]
    changes: list[dict[str, float]]


def measure(
    model: ModelConfig,
    training: Training,
    mesh: DeviceMesh | None = None,
    prepare: Callable[[Stage, ParallelAMPOptimizer], None] | None = None,
) -> Measured:
    """Train a model and return what was measured. Collective over the mesh, of the axis tp.

    prepare: called with the stage and the optimizer before anything is measured.
    """
    tp = Axis.of(mesh, "tp")
    context = Context(training.plan, tp=tp, seed=training.seed)
    whole = Cut(0, range(model.layers), first=True, last=True)
    stage = RecordingStage(model, context, whole)
    optimizer = ParallelAMPOptimizer(
        [stage],
        training.plan,
        mesh,
        rule=training.rule,
        weight_decay=training.weight_decay,
        groups=training.groups,
        clip=training.clip,
        average=False,
    )
    if prepare is not None:
        prepare(stage, optimizer)
    tokens, targets = _sample(model.vocab, training)
    readouts = {name: weight.detach().clone() for name, weight in _readouts(stage).items()}
    initial = _record(stage, tokens, readouts)
    changes: list[dict[str, float]] = []
    for _ in range(training.steps):
        loss = stage.losses(stage(tokens), targets).mean()
        (loss * optimizer.scale).backward()
        optimizer.step(training.rate, loss.detach())
        after = _record(stage, tokens, readouts)
        moved = {name: after[name] - values for name, values in initial.items()}
        changes.append(_sizes(moved, tp))
    return Measured(_sizes(initial, tp), changes)


def _sample(vocab: int, training: Training) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, int64 [s, 1] each."""
    generator = torch.Generator().manual_seed(training.seed)
    ids = torch.randint(0, vocab, (training.length + 1, 1), generator=generator)
    return ids[:-1].contiguous(), ids[1:].contiguous()


def _sizes(activations: Activations, tp: Axis) -> dict[str, float]:
    """Return the root mean square of each activation over all ranks of tp. Collective over tp."""
    sizes: dict[str, float] = {}
    for name, values in activations.items():
        squares = values.double().square().sum()
        count = torch.tensor(float(values.numel()), dtype=torch.float64)
        total_squares, total_count = tp.sum_(torch.stack((squares, count))).tolist()
        sizes[name] = (total_squares / total_count) ** 0.5
    return sizes


def _readouts(stage: "RecordingStage") -> dict[str, nn.Parameter]:
    """Return the weights that make logits, by the name of what they make."""
    weights = {"head": stage.head}
    for number, router in _routers(stage).items():
        weights[f"layers.{number}.router"] = router.weight
    return weights


def _routers(stage: "RecordingStage") -> dict[str, Router]:
    """Return the routers of the layers that have one, by the layer's number."""
    routers: dict[str, Router] = {}
    for number, layer in _layers(stage).items():
        if isinstance(layer.mlp, MixtureOfExperts):
            routers[number] = layer.mlp.router
    return routers


def _layers(stage: "RecordingStage") -> dict[str, DecoderLayer]:
    """Return the layers of a stage by number."""
    return {number: layer for number, layer in stage.layers.items() if _is_layer(layer)}


def _is_layer(module: nn.Module) -> TypeGuard[DecoderLayer]:
    return isinstance(module, DecoderLayer)


@torch.no_grad()
def _record(
    stage: "RecordingStage", tokens: Tensor, initial_readouts: dict[str, Tensor]
) -> Activations:
    """Return copies of the activations of the sample, by name.

    initial_readouts: `_readouts` before the first step.
    """
    activations: Activations = {}

    def keep(name: str, values: Tensor) -> None:
        activations[name] = values.detach().clone()

    with _hooks(stage, keep, initial_readouts):
        keep("logits", stage(tokens))
    return activations


@contextmanager
def _hooks(
    stage: "RecordingStage", keep: Keep, initial_readouts: dict[str, Tensor]
) -> Iterator[None]:
    """Context manager in which the modules of a stage give their activations to `keep`."""
    handles = [stage.layers["0"].register_forward_pre_hook(_input_hook("embedding", keep))]
    for number, layer in _layers(stage).items():
        name = f"layers.{number}"
        assert isinstance(layer.attention, _ScoresKept)
        layer.attention.keep_scores = _keep_as(f"{name}.attention scores", keep)
        handles.append(layer.attention.register_forward_hook(_hook(f"{name}.attention", keep)))
        handles.append(layer.mlp.register_forward_hook(_hook(f"{name}.mlp", keep)))
        handles.append(layer.register_forward_hook(_hook(f"{name}.residual", keep)))
    head_hook = _readout_hook("head", stage.head, initial_readouts["head"], keep)
    handles.append(stage.final_norm.register_forward_hook(head_hook))
    for number, router in _routers(stage).items():
        name = f"layers.{number}.router"
        router_hook = _router_hook(name, router.weight, initial_readouts[name], keep)
        handles.append(router.register_forward_hook(router_hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in _layers(stage).values():
            assert isinstance(layer.attention, _ScoresKept)
            layer.attention.keep_scores = None


def _hook(name: str, keep: Keep) -> Callable[..., None]:
    """Return a forward hook that keeps the output of a module."""
    return lambda module, inputs, output: keep(name, output)


def _input_hook(name: str, keep: Keep) -> Callable[..., None]:
    """Return a hook that keeps the first input of a module."""
    return lambda module, inputs: keep(name, inputs[0])


def _readout_hook(name: str, weight: Tensor, initial: Tensor, keep: Keep) -> Callable[..., None]:
    """Return a hook that keeps the product of a module's output with the change of a weight."""

    def keep_update(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(f"{name} update", F.linear(output.to(weight.dtype), weight - initial))

    return keep_update


def _router_hook(name: str, weight: Tensor, initial: Tensor, keep: Keep) -> Callable[..., None]:
    """Return a hook that keeps the logits of a router without its bias, and what the change of its
    weight adds to them."""

    def keep_logits(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        x: Tensor = inputs[0].to(weight.dtype)
        keep(f"{name} logits", F.linear(x, weight))
        keep(f"{name} update", F.linear(x, weight - initial))

    return keep_logits


def _keep_as(name: str, keep: Keep) -> Callable[[Tensor], None]:
    return lambda values: keep(name, values)


class _ScoresKept(Attention):
    """Attention that shows its scores, before masks and soft caps.

    keep_scores: takes them, [b, n, s, s].
    """

    keep_scores: Callable[[Tensor], None] | None = None

    def _core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        if self.keep_scores is not None:
            scale = self.scale or query.shape[-1] ** -0.5
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            self.keep_scores(query @ keys.transpose(2, 3) * scale)
        return super()._core_attention(query, key, value, microbatch, attn_mask)


class _RecordingAttention(_ScoresKept):
    """Attention that shows its scores."""


class _RecordingLatentAttention(_ScoresKept, LatentAttention):
    """Latent attention that shows its scores."""


class RecordingStage(Stage):
    """A whole model that shows its activations."""

    attention: ClassVar[type[Attention]] = _RecordingAttention
    latent_attention: ClassVar[type[LatentAttention]] = _RecordingLatentAttention
