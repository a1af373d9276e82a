"""The published run by a plain loop, and by the engine in any layout: the losses of all batches and
of all evaluations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.optim.rules.update_rules import AdamW
from megaprec.precision.plan import plan
from models import build_stages, load_logical
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.pipeline.kinds import schedule
from tests.golden.stream import (
    BETAS,
    CLIP,
    EPS,
    WEIGHT_DECAY,
    Drawn,
    Setting,
    Stream,
    Text,
    Windows,
    read_text,
)
from tests.ranks import run_ranks


@dataclass
class Curve:
    """Losses of a run. batches, norms: of each step. evaluations: by step, the mean losses of both
    parts of the text."""

    batches: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])


@dataclass(frozen=True)
class Way:
    """One way of running. sizes: of the axes of the mesh."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    schedule: str = "1f1b"
    microbatches: int = 1
    zero: int = 1


WAYS = (
    Way("one process"),
    Way("tensor 2", {"tp": 2}),
    Way("pipeline 2, 1F1B", {"pp": 2}, microbatches=4),
    Way("pipeline 2, ZB-V", {"pp": 2}, schedule="zb-v", microbatches=4),
    Way("data 2, ZeRO-1", {"dp": 2}),
    Way("data 2, ZeRO-2", {"dp": 2}, zero=2),
    Way("data 2, ZeRO-3", {"dp": 2}, zero=3),
)

HOUR = 3600.0  # seconds, after which a run hangs
Progress = Callable[[int], None]


def _silent(step: int) -> None:
    """Report nothing."""


def plain_run(setting: Setting, text: Text, told: Progress = _silent) -> Curve:
    """Train by torch alone: its functions, its AdamW, its clipping."""
    stream = Stream(setting, text)
    weights = {name: tensor.requires_grad_() for name, tensor in stream.weights.items()}
    matrices = [tensor for tensor in weights.values() if tensor.dim() > 1]
    vectors = [tensor for tensor in weights.values() if tensor.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS)
    curve = Curve()
    for step, drawn in enumerate(stream.steps()):
        with torch.no_grad():
            _evaluate(curve, step, drawn, lambda each: plain_loss(setting, weights, each).item())
        for group in optimizer.param_groups:
            group["lr"] = setting.lr(step)
        loss = plain_loss(setting, weights, drawn.batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*matrices, *vectors], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        curve.batches.append(loss.item())
        curve.norms.append(norm.item())
        told(step)
    return curve


def plain_loss(setting: Setting, weights: dict[str, Tensor], batch: Windows) -> Tensor:
    """The mean loss of a batch, by torch's functions."""
    x = weights["embedding.weight"][batch.tokens] + weights["positions.weight"]
    for layer in range(setting.layers):
        name = f"layers.{layer}"
        normal = _plain_norm(weights[f"{name}.attention_norm.weight"], x)
        heads = []
        for part in ("query", "key", "value"):
            projected = normal @ weights[f"{name}.attention.{part}.weight"].T
            heads.append(projected.unflatten(-1, (setting.heads, -1)).transpose(1, 2))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + mixed @ weights[f"{name}.attention.output.weight"].T
        normal = _plain_norm(weights[f"{name}.mlp_norm.weight"], x)
        inner = F.gelu(normal @ weights[f"{name}.mlp.up.weight"].T)
        x = x + inner @ weights[f"{name}.mlp.down.weight"].T
    normal = _plain_norm(weights["final_norm.weight"], x)
    logits = normal @ weights["embedding.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def _plain_norm(weight: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight)


def engine_run(way: Way, setting: Setting, path: Path) -> Curve:
    """Train by the engine, in local ranks."""
    curves = run_ranks(engine_rank, way.sizes, HOUR, way=way, setting=setting, path=path)
    first = curves[0]
    assert all(curve == first for curve in curves), "ranks report different losses"
    return first


def engine_rank(mesh: DeviceMesh, way: Way, setting: Setting, path: Path) -> Curve:
    """The body of each rank."""
    text = read_text(path)
    stream = Stream(setting, text)
    dp = Axis.of(mesh, "dp")
    samples_of_rank = setting.samples // dp.size
    options = EngineOptions(
        micro_batch=samples_of_rank // way.microbatches,
        seq_length=setting.length,
    )
    stages = build_stages(
        setting.model(len(text.characters)),
        plan("fp32"),
        mesh,
        schedule(way.schedule, Axis.of(mesh, "pp").size, way.microbatches),
        options,
    )
    load_logical(stages.by_number.values(), stream.weights)
    optimizer = stages.make_optimizer(
        rule=AdamW(BETAS, EPS),
        weight_decay=WEIGHT_DECAY,
        clip=CLIP,
        shard_gradients=way.zero == 2,
        shard_weights=way.zero == 3,
    )
    engine = Engine(stages, optimizer)
    first = dp.rank * samples_of_rank

    def share_of(windows: Windows) -> Share:
        own = slice(first, first + samples_of_rank)
        return Share(windows.tokens[own], windows.targets[own], first=first)

    curve = Curve()
    for step, drawn in enumerate(stream.steps()):
        _evaluate(curve, step, drawn, lambda each: engine.evaluate(share_of(each)))
        report = engine.step(share_of(drawn.batch), setting.lr(step), step)
        assert report.outcome == "applied"
        assert report.grad_norm is not None
        curve.batches.append(report.loss)
        curve.norms.append(report.grad_norm)
    return curve


def _evaluate(curve: Curve, step: int, drawn: Drawn, loss_of: Callable[[Windows], float]) -> None:
    """Add the mean losses of an evaluation to a curve, if there is one."""
    means: dict[str, float] = {}
    for part, batches in drawn.evaluation.items():
        losses = [loss_of(batch) for batch in batches]
        means[part] = sum(losses) / len(losses)
    if means:
        curve.evaluations[step] = means
