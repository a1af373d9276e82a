"""Every mode of the five dialects trains, in the dtypes that its system says, alike on one process
and on four ranks.

What is inspected are the tensors of a model in training. What they must be is written down in
`tests.modes` from the systems' own documentation, not read from the plan.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.rules.update_rules import AdamW
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision import gemm
from megaprec.precision.plan import DTYPES, PrecisionPlan, dtype_name, plan
from megaprec.precision.tf32 import round_tf32
from models.attention.attention import Attention
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.feed_forward.mlp import MLP
from parallel.norms import RMSNorm
from parallel.pipeline.kinds import schedule
from parallel.pipeline.p2p import P2P
from tests.layouts import (
    LENGTH,
    SAMPLES,
    Fragment,
    Recording,
    Run,
    assemble,
    batches,
    fragments,
    share_of,
)
from tests.modes import KEPT, MODES, B, F, Mode, resolved
from tests.other_systems import slow
from tests.ranks import run_ranks

STEPS = 2
MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 101,
    "max_positions": 16,
}
LAYOUTS = {"dp2 tp2": {"dp": 2, "tp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}
# With stages only what they send is new: every third mode, in which are all systems and all dtypes
# that are sent.
IN_LAYOUTS = [
    *((name, "dp2 tp2") for name in MODES),
    *slow(*((name, "tp2 pp2") for name in [*MODES][::3])),
    *(
        pytest.param(*(name, "tp2 pp2"), marks=pytest.mark.campaign)
        for n, name in enumerate(MODES)
        if n % 3
    ),
]


@dataclass
class Seen:
    """dtypes of the tensors of a training run on one rank, by what they are; by parameter name
    where they differ."""

    of: dict[str, set[torch.dtype]] = field(default_factory=dict)
    rounded: int = 0  # products of factors that were rounded to TF32
    wrong: int = 0  # those of them that are another product

    def note(self, what: str, dtype: torch.dtype) -> None:
        self.of.setdefault(what, set()).add(dtype)


@dataclass
class Trained:
    """On one rank: logical gradients of the first applied step (unscaled) and weights at the
    end."""

    reports: list[StepReport]
    grads: list[Fragment]
    after: list[Fragment]
    seen: Seen


@dataclass
class Together:
    """Of all ranks."""

    reports: list[StepReport]
    grads: dict[str, Tensor]
    after: dict[str, Tensor]
    seen: list[Seen]


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Notes what is multiplied, what goes from stage to stage and what is summed over dp."""
    product = gemm.product
    send = P2P.send
    start = Buffer.start_reduce
    rounded_product = gemm.product_tf32
    mix = Attention._core_attention

    def noted_product(a: Tensor, b: Tensor, *more: Any) -> Tensor:
        seen.note("products", a.dtype)
        seen.note("products", b.dtype)
        return product(a, b, *more)

    def noted_tf32(a: Tensor, b: Tensor) -> Tensor:
        seen.rounded += 1
        made = rounded_product(a, b)
        seen.wrong += not torch.equal(made, round_tf32(a) @ round_tf32(b))
        return made

    def noted_mix(
        attention: Attention, query: Tensor, key: Tensor, value: Tensor, *more: Any
    ) -> Tensor:
        for tensor in (query, key, value):
            seen.note("attention", tensor.dtype)
        return mix(attention, query, key, value, *more)

    def noted_send(links: P2P, i: Any, tensor: Tensor) -> None:
        seen.note("sent", tensor.dtype)
        send(links, i, tensor)

    def noted_reduce(buffer: Buffer) -> Any:
        names = [part.name for p in buffer.parameters for part in layout_of(p).parts]
        axis = type(buffer.dp)
        originals = {name: getattr(axis, name) for name in ("start_scatter_sum_", "start_sum_")}

        def noting(original: Any) -> Any:
            def sum_(self: Any, tensor: Tensor) -> Any:
                for name in names:
                    seen.note(f"travel {name}", tensor.dtype)
                return original(self, tensor)

            return sum_

        with patch.multiple(
            axis, **{name: noting(original) for name, original in originals.items()}
        ):
            return start(buffer)

    with (
        patch.object(gemm, "product", noted_product),
        patch.object(gemm, "product_tf32", noted_tf32),
        patch.object(Attention, "_core_attention", noted_mix),
        patch.object(P2P, "send", noted_send),
        patch.object(Buffer, "start_reduce", noted_reduce),
    ):
        yield


def hook(engine: Engine, seen: Seen) -> None:
    """Notes what norms are given, compute in and hand on, and the logits."""

    def note_norm(norm: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
        assert made.grad_fn is not None
        x, inverse = made.grad_fn.saved_tensors  # type: ignore[attr-defined]
        seen.note("norms are given", x.dtype)
        seen.note("norms compute in", inverse.dtype)
        seen.note("norms make", made.dtype)

    def note_layer(layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        seen.note("layers are given", given[0].dtype)
        seen.note("layers make", made.dtype)

    for stage in engine.stages.values():
        for module in stage.modules():
            if isinstance(module, RMSNorm):
                module.register_forward_hook(note_norm)
            if isinstance(module, DecoderLayer):
                module.register_forward_hook(note_layer)
            if isinstance(module, Attention | MLP):
                module.register_forward_hook(
                    lambda branch, given, made: seen.note("branches make", made.dtype)
                )
    if engine.last_stage in engine.stages:
        engine.stages[engine.last_stage].register_forward_hook(
            lambda stage, given, made: seen.note("logits", made.dtype)
        )


def note_state(engine: Engine, seen: Seen) -> None:
    """What is kept of each parameter, and the rotary tables."""
    for buffer in engine.optimizer.all_buffers():
        for parameter in buffer.parameters:
            for part in layout_of(parameter).parts:
                seen.note(f"weights {part.name}", parameter.dtype)
                seen.note(f"gradients {part.name}", parameter.main_grad.dtype)  # type: ignore[attr-defined]
                assert buffer.masters is not None
                seen.note(f"masters {part.name}", buffer.masters.dtype)
                for values in buffer.state.values():
                    seen.note(f"moments {part.name}", values.dtype)
    for stage in engine.stages.values():
        seen.note("tables", next(iter(stage._rotary_tables.values()))[0].dtype)


def make(mesh: DeviceMesh | None, made: PrecisionPlan, zero: bool, clip: float) -> Engine:
    pp, dp = (1 if mesh is None else mesh[axis].size() for axis in ("pp", "dp"))
    return Engine.build(
        ModelConfig(**MODEL),
        made,
        mesh,
        schedule("1f1b", pp, 2),
        EngineOptions(micro_batch=SAMPLES // 2 // dp, seq_length=LENGTH, seed=3, trace=False),
        kind=Recording,
        # a smaller one makes of each gradient its sign, and of noise near zero a whole step
        rule=AdamW(eps=1e-4),
        clip=clip,
        zero_size=0 if zero else 1,
        seed=5,
        plant=None,
    )


def train_one(
    mesh: DeviceMesh | None, made: PrecisionPlan, zero: bool = True, clip: float = 1.0
) -> Trained:
    seen = Seen()
    engine = make(mesh, made, zero, clip)
    optimizer = engine.optimizer
    assert isinstance(optimizer, Recording)
    hook(engine, seen)
    data = batches(Run(MODEL, steps=STEPS))
    reports = []
    with watched(seen):
        for number in range(12):
            reports.append(
                engine.step(share_of(mesh, data[sum(r.changed for r in reports)]), 1e-2, number)
            )
            if sum(r.changed for r in reports) == STEPS:
                break
    note_state(engine, seen)
    first = next(number for number, report in enumerate(reports) if report.changed)
    grads = [
        Fragment(
            f.name,
            f.shape,
            f.offset,
            f.local,
            f.first,
            f.values.double() / reports[first].loss_scale,
        )
        for f in optimizer.seen[first]
    ]
    after = fragments(optimizer.all_buffers(), lambda buffer: buffer.own_weights.double())
    return Trained(reports, grads, after, seen)


def train_rank(mesh: DeviceMesh, modes: Sequence[Mode]) -> list[Trained]:
    return [train_one(mesh, *resolved(mode)) for mode in modes]


@cache
def results(layout: str, names: tuple[str, ...]) -> dict[str, Together]:
    """Of each of these modes in this layout, all in one start of the ranks."""
    ranks = run_ranks(train_rank, LAYOUTS[layout], modes=[MODES[name] for name in names])
    return {name: together([rank[n] for rank in ranks]) for n, name in enumerate(names)}


def tried_in(layout: str, alike: list[dict[str, Any]]) -> tuple[str, ...]:
    """The modes that this session tries in this layout."""
    return tuple(case["name"] for case in alike if case["layout"] == layout)


@cache
def alone(name: str) -> Together:
    return together([train_one(None, *resolved(MODES[name]))])


@cache
def exact(zero: bool, clip: float) -> Together:
    return together([train_one(None, plan("fp64"), zero, clip)])


def together(ranks: Sequence[Trained]) -> Together:
    reports = ranks[0].reports
    assert all(str(rank.reports) == str(reports) for rank in ranks), "ranks report different steps"
    grads, after = (assemble([getattr(rank, of) for rank in ranks]) for of in ("grads", "after"))
    return Together(reports, grads, after, [rank.seen for rank in ranks])


PARAMETERS = ("weights", "gradients", "masters", "moments")


@pytest.mark.cases(4, sample=4)
@pytest.mark.parametrize(("name", "layout"), IN_LAYOUTS)
def test_the_tensors_of_a_running_model_have_the_dtypes_that_the_system_gives_them(
    name: str, layout: str, alike: list[dict[str, Any]]
) -> None:
    mode = MODES[name]
    ranks = results(layout, tried_in(layout, alike))[name].seen
    residual = mode.residual or mode.products
    expected = {"norms compute in": F, "norms are given": residual, "norms make": mode.products}
    expected |= {
        "layers are given": residual,
        "layers make": residual,
        "branches make": mode.products,
    }
    expected |= {"logits": mode.logits or mode.products, "tables": mode.tables}
    expected["attention"] = mode.attention or mode.products
    if "pp" in LAYOUTS[layout]:
        expected["sent"] = mode.sent
    for what, dtype in expected.items():
        assert set().union(*(seen.of.get(what, set()) for seen in ranks)) == {DTYPES[dtype]}, what
    made = {dtype_name(dtype) for seen in ranks for dtype in seen.of["products"]}
    assert made == ({mode.products, F} if mode.kept == KEPT else {mode.products})
    for seen in ranks:
        assert (seen.rounded > 0, seen.wrong) == (mode.tf32, 0)


@pytest.mark.parametrize("name", MODES)
def test_what_is_kept_of_a_parameter_has_the_dtypes_that_the_system_gives_it(name: str) -> None:
    mode = MODES[name]
    ranks = results("dp2 tp2", tuple(MODES))[name].seen
    for what in (*PARAMETERS, "travel"):
        found = {
            key: {dtype_name(d) for d in of}
            for seen in ranks
            for key, of in seen.of.items()
            if key.startswith(what)
        }
        assert len(found) == 21
        for key, dtypes in found.items():
            kept = any(some in key for some in mode.kept)
            assert dtypes == {F if kept else getattr(mode, what)}, key


def size(grads: dict[str, Tensor]) -> float:
    return sum(float(values.square().sum()) for values in grads.values()) ** 0.5


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return size({name: values - other[name] for name, values in one.items()})


def error(name: str, of: str) -> float:
    """How far a mode on one process is from training in float64."""
    return distance(getattr(alone(name), of), getattr(exact(*resolved(MODES[name])[1:]), of))


@pytest.mark.cases(12, sample=1)
@pytest.mark.parametrize(("name", "layout"), IN_LAYOUTS)
def test_a_mode_trains_in_a_layout_as_it_does_on_one_process(
    name: str, layout: str, alike: list[dict[str, Any]]
) -> None:
    """A layout only sums in another order, with as many roundings. So its error has the size of
    that of one process, which is measured against float64, and the two differ by at most both
    errors. Where gradients travel in BF16 they may have the error of a BF16 model besides, which
    one process, where nothing travels, has not.
    """
    ours = results(layout, tried_in(layout, alike))[name]
    one = alone(name)
    assert [(r.outcome, r.loss_scale) for r in ours.reports] == [
        (r.outcome, r.loss_scale) for r in one.reports
    ]
    for of in ("grads", "after"):
        travel = error("FSDP bf16", of) if MODES[name].travel == B else 0.0
        assert distance(getattr(ours, of), getattr(one, of)) <= 2 * max(error(name, of), travel), of


@pytest.mark.parametrize("name", MODES)
def test_a_gradient_is_as_exact_as_the_dtypes_it_is_made_in(name: str) -> None:
    """It passes through some 16 roundings: four in each direction of each of two layers. Their
    errors, each at most `unit`, have nothing to do with each other, so together they are about the
    root of 16 as large.
    """
    whole = exact(*resolved(MODES[name])[1:]).grads
    assert error(name, "grads") <= 4 * MODES[name].unit * size(whole)
    assert error(name, "grads") > 0.05 * MODES[name].unit * size(whole), (
        "it is more exact than it can be"
    )


def test_a_scale_that_is_too_high_falls_in_a_mode_until_it_trains() -> None:
    outcomes = [report.outcome for report in alone("NeMo 16-mixed").reports]
    assert outcomes.count("applied") == STEPS and outcomes[0] == "skipped_overflow"
