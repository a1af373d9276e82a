"""The measurement of one width: how far each activation is from its initial value after each step.

The model is trained on one sample of random tokens, which the seed decides and no width or layout
changes. Before the first step and after each one the same sample passes the model again without
gradients, and the activations are compared: all that a layer adds to the stream, the stream itself,
the scores of attention, logits of routers and of the head. Each is one number, the root mean square
over all tokens and features.

An activation changes because of all that is updated before it. So what the change of each matrix
alone does is measured besides: its product with the activation that enters it ("qkv update", "head
update" and so on). In logits only that part moves equally far at all widths: what the initial
weights of a head or a router pass on of the changes before them is less the wider they are.
Experts are measured as a whole, by the feed-forward that they are.

The ranks of tp have the same activations, or slices of them. Sums of squares over all ranks, and
their counts, give the same numbers in both cases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.param_groups import Group
from megaprec.optim.rules.update_rules import UpdateRule
from megaprec.precision.plan import PrecisionPlan
from models.attention.attention import Attention
from models.attention.flash_windows import Documents
from models.attention.latent_attention import LatentAttention
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer
from models.decoder.stages import Cut, Stage
from models.feed_forward.router import Router
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear
from parallel.replicated_linear import ReplicatedLinear

Activations = dict[str, Tensor]
Keep = Callable[[str, Tensor], None]
"""Takes an activation with its name."""


@dataclass(frozen=True)
class Training:
    """Training of the models, the same at all widths.

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
class ActivationMeasures:
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
) -> ActivationMeasures:
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
    matrices = _matrices(stage)
    initial = _record(stage, tokens, matrices)
    changes: list[dict[str, float]] = []
    for _ in range(training.steps):
        loss = stage.losses(stage(tokens), targets).mean()
        (loss * optimizer.scale).backward()
        optimizer.step(training.rate, loss.detach())
        after = _record(stage, tokens, matrices)
        moved = {name: after[name] - values for name, values in initial.items()}
        changes.append(_sizes(moved, tp))
    return ActivationMeasures(_sizes(initial, tp), changes)


def measure_draws(model: ModelConfig, training: Training, draws: int) -> ActivationMeasures:
    """Return the root mean squares over several seeds, each with its weights and its sample: one
    draw alone may happen to be larger at one width."""
    measured: list[ActivationMeasures] = []
    for draw in range(draws):
        of_draw = replace(training, seed=training.seed + draw)
        measured.append(measure(model, of_draw))
    initial = _mean([measures.initial for measures in measured])
    changes: list[dict[str, float]] = []
    for step in range(training.steps):
        changes_of_draws = [measures.changes[step] for measures in measured]
        changes.append(_mean(changes_of_draws))
    return ActivationMeasures(initial, changes)


def _mean(sizes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the root mean square over the draws of each activation's size.
    sizes: of each draw, by activation."""
    means: dict[str, float] = {}
    for name in sizes[0]:
        squares = [of_draw[name] ** 2 for of_draw in sizes]
        means[name] = (sum(squares) / len(squares)) ** 0.5
    return means


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


@dataclass(frozen=True)
class _Matrix:
    """A weight whose update is measured.

    module: its forward hook has the activation that enters the weight, as input or as output.
    of_output: it is the output.
    initial: the weight before the first step.
    is_cut: each rank of tp has some of the inputs, so that products are partial sums.
    """

    module: nn.Module
    weight: nn.Parameter
    of_output: bool
    initial: Tensor
    is_cut: bool = False


def _matrices(stage: "RecordingStage") -> dict[str, _Matrix]:
    """Return the matrices of a stage by name, as they are before the first step."""
    matrices: dict[str, _Matrix] = {}
    for name, module in stage.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear | Router):
            # Experts are called without their layers' hooks.
            if ".experts." in name or ".shared." in name:
                continue
            initial = module.weight.detach().clone()
            is_cut = isinstance(module, RowParallelLinear)
            matrices[name] = _Matrix(module, module.weight, False, initial, is_cut)
    head_initial = stage.head.detach().clone()
    matrices["head"] = _Matrix(stage.final_norm, stage.head, True, head_initial)
    return matrices


@torch.no_grad()
def _record(
    stage: "RecordingStage", tokens: Tensor, matrices: Mapping[str, _Matrix]
) -> Activations:
    """Return copies of the activations of the sample, by name. Collective over tp."""
    activations: Activations = {}

    def keep(name: str, values: Tensor) -> None:
        activations[name] = values.detach().clone()

    with _hooks(stage, keep, matrices):
        keep("logits", stage(tokens))
    return activations


@contextmanager
def _hooks(stage: "RecordingStage", keep: Keep, matrices: Mapping[str, _Matrix]) -> Iterator[None]:
    """Context manager in which the modules of a stage give their activations to `keep`, by the
    names that the verdict uses."""
    handles = [stage.layers["0"].register_forward_pre_hook(_input_hook("embedding", keep))]
    for name, matrix in matrices.items():
        hook = _update_hook(name, matrix, stage.context.tp, keep)
        handles.append(matrix.module.register_forward_hook(hook))
    layers = [module for module in stage.layers.values() if isinstance(module, DecoderLayer)]
    for layer in layers:
        name = layer.name
        assert isinstance(layer.attention, _AttentionWithScores)
        layer.attention.keep_scores = _keep_as(f"{name}.attention scores", keep)
        # what is added to the stream, after the norm behind the branch if there is one
        attention = layer.attention_post_norm or layer.attention
        handles.append(attention.register_forward_hook(_hook(f"{name}.attention", keep)))
        feed_forward = layer.mlp_post_norm or layer.mlp
        assert feed_forward is not None  # models whose layers are one branch are refused
        handles.append(feed_forward.register_forward_hook(_hook(f"{name}.mlp", keep)))
        handles.append(layer.register_forward_hook(_hook(f"{name}.residual", keep)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            assert isinstance(layer.attention, _AttentionWithScores)
            layer.attention.keep_scores = None


def _hook(name: str, keep: Keep) -> Callable[..., None]:
    """Return a forward hook that keeps the output of a module."""
    return lambda module, inputs, output: keep(name, output)


def _input_hook(name: str, keep: Keep) -> Callable[..., None]:
    """Return a hook that keeps the first input of a module."""
    return lambda module, inputs: keep(name, inputs[0])


def _update_hook(name: str, matrix: _Matrix, tp: Axis, keep: Keep) -> Callable[..., None]:
    """Return a hook that keeps the product of an activation with the change of a weight; of a
    router its logits too, without the bias. The hook is collective over tp."""

    def keep_update(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        weight = matrix.weight
        x: Tensor = output if matrix.of_output else inputs[0]
        update = F.linear(x.to(weight.dtype), weight - matrix.initial)
        keep(f"{name} update", tp.sum_(update) if matrix.is_cut else update)
        if isinstance(module, Router):
            keep(f"{name} logits", F.linear(x.to(weight.dtype), weight))

    return keep_update


def _keep_as(name: str, keep: Keep) -> Callable[[Tensor], None]:
    return lambda values: keep(name, values)


class _AttentionWithScores(Attention):
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
        """Show the scores, and return the output."""
        if self.keep_scores is not None:
            scale = self.scale or query.shape[-1] ** -0.5
            # grouped attention: several heads of queries share one of keys
            queries_per_key = query.shape[1] // key.shape[1]
            keys = key.repeat_interleave(queries_per_key, 1)
            self.keep_scores(query @ keys.transpose(2, 3) * scale)
        return super()._core_attention(query, key, value, microbatch, attn_mask)


class _RecordingAttention(_AttentionWithScores):
    """Attention that shows its scores."""


class _RecordingLatentAttention(_AttentionWithScores, LatentAttention):
    """Latent attention that shows its scores."""


class RecordingStage(Stage):
    """A whole model that shows its activations."""

    attention: ClassVar[type[Attention]] = _RecordingAttention
    own_kinds: ClassVar[Mapping[str, type[nn.Module]]] = {
        "LatentAttention": _RecordingLatentAttention
    }
