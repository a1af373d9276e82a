"""Experts on ranks of their own: every cut trains the plain model, in float64, and no token is lost
on the way."""

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import latest
from megaprec.checkpoint.save_load import load
from megaprec.checkpoint.saving import Saving
from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.optim.model_buffers import ModelBuffers
from megaprec.optim.ranks import Replicas
from megaprec.optim.rules.rule_table import rule
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from models.engine.options import EngineOptions
from models.estimate.memory import StageMemory
from models.feed_forward import moe
from models.feed_forward.dispatch import ExchangeRows
from models.feed_forward.router import Router
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from tests import oracle
from tests.layouts import (
    Recording,
    Result,
    Run,
    assemble,
    batches,
    fragments,
    make_engine,
    share_of,
    train,
    train_all,
)
from tests.models.routers import require_routers
from tests.models.test_memory import allocations
from tests.models.test_parity import MODELS, SIZES, differing, zeros
from tests.ranks import run_ranks
from tools.training.banner import print_memory

MODEL: dict[str, Any] = {
    "family": "mixtral",
    **SIZES,
    "layers": 4,
    "experts": 8,
    "router_aux_loss": 0.5,
    "router_z_loss": 0.1,
    "init_std": 0.1,
}
PLAIN = Run(MODEL, steps=2)
CLOSE = 1e-9


@cache
def expected() -> tuple[Result, list[dict[str, Any]]]:
    alone = train(PLAIN)
    return alone, oracle.train(PLAIN.config, alone.before, batches(PLAIN), PLAIN.lr, PLAIN.clip)


def require_plain(result: Result, alone: Result, records: list[dict[str, Any]]) -> None:
    """Losses, gradients, norms, zeros and weights are those of the plain model."""
    assert result.num_elements == alone.num_elements
    assert result.before.keys() == alone.before.keys()
    assert all(torch.equal(result.before[name], weight) for name, weight in alone.before.items())
    for report, grads, record in zip(result.reports, result.grads, records, strict=True):
        assert report.outcome == "applied"
        assert report.loss == pytest.approx(record["loss"], rel=CLOSE)
        assert report.grad_norm == pytest.approx(record["norm"], rel=CLOSE)
        require_routers(report, record)
        assert report.num_zeros == zeros(grads) == zeros(record["grads"])
        assert not (wrong := differing(grads, record["grads"])), (
            f"gradients differ, by these ratios: {wrong}"
        )
    assert not (wrong := differing(result.after, records[-1]["weights"])), (
        f"weights differ, by these ratios: {wrong}"
    )


FAST = ((2, 1, 2), [{"expert": 4, "expert_tensor": 1, "sequence": True}])
SLOW: list[tuple[tuple[int, int, int], list[dict[str, Any]]]] = [
    ((1, 1, 2), [{"expert": 2}, {"expert": 2, "recompute": Recompute(fraction=1.0)}]),
    (
        (2, 1, 1),
        [{"expert": 2, "expert_tensor": 1}, {"expert": 1, "expert_tensor": 1, "sequence": True}],
    ),
    (
        (2, 1, 2),
        [
            {"expert": 2, "zero_size": 1, "options": {"overlap": True}},
            {"expert": 2, "expert_tensor": 1, "recompute": Recompute(("activation", "norm"))},
        ],
    ),
    (
        (1, 2, 2),
        [{"expert": 2, "kind": "zb-h1"}, {"expert": 2, "kind": "interleaved", "chunks": 2}],
    ),
    ((2, 2, 1), [{"expert": 2, "expert_tensor": 1, "kind": "gpipe", "sequence": True}]),
    ((1, 1, 4), [{"expert": 2, "zero_size": 2}, {"expert": 4}]),
    ((1, 1, 8), [{"expert": 8, "micro_batch": 1}]),
    ((4, 1, 2), [{"expert": 2, "expert_tensor": 2}, {"expert": 2}]),
    (
        (2, 2, 2),
        [{"expert": 4, "expert_tensor": 1, "sequence": True, "options": {"overlap": True}}],
    ),
    ((1, 2, 4), [{"expert": 2, "zero_size": 2, "kind": "zb-v"}]),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("layout", "cuts"),
    [FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_every_cut_of_the_experts_trains_the_plain_model(
    layout: tuple[int, int, int], cuts: list[dict[str, Any]]
) -> None:
    for result in train_all([replace(PLAIN, **cut) for cut in cuts], *layout):
        require_plain(result, *expected())


COMBINED: dict[str, dict[str, Any]] = {
    "glm4_moe": {**MODELS["glm4_moe"], "router_z_loss": 0.1},
    "gpt_oss": {
        **MODELS["gpt_oss"],
        "experts": 8,
        "attention_sinks": False,
        "router_aux_loss": 0.3,
    },
    "deepseek_v3": {
        **MODELS["deepseek_v3"],
        "bias": False,
        "experts": 8,
        "experts_per_token": 3,
        "dense_layers": [0],
        "dense_ffn": 40,
        "shared_experts": 16,
        "router": {
            "score": "sigmoid",
            "scale": 2.5,
            "correction": True,
            "groups": 4,
            "groups_per_token": 2,
        },
        "router_correction_speed": 0.03,
        "router_aux_loss": 0.3,
    },
}
ACROSS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 1, 1, 2), {"expert": 2}),
    ((1, 1, 2, 2), {"expert": 2, "zero_size": 2}),
    ((2, 1, 1, 2), {"expert": 4, "expert_tensor": 1, "sequence": True}),
    ((2, 1, 2, 1), {"expert": 4, "expert_tensor": 1, "sequence": True, "zero_size": 1}),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("layout", "cut"), ACROSS, ids=str)
def test_routers_biases_and_latents_train_alike_with_experts_on_ranks_and_sequences_cut(
    layout: tuple[int, ...], cut: dict[str, Any]
) -> None:
    """Shared experts, layers without experts, corrections, biases of experts, latents and
    documents, all at once."""
    runs = [
        Run({**m, "max_positions": 16, "init_std": 0.2}, length=16, steps=2, borders=3)
        for m in COMBINED.values()
    ]
    spread = train_all([replace(run, **cut) for run in runs], *layout)
    for ours, alone in zip(spread, train_all(runs), strict=True):
        for report, plain, grads, right in zip(
            ours.reports, alone.reports, ours.grads, alone.grads, strict=True
        ):
            assert report.loss == pytest.approx(plain.loss, rel=CLOSE)
            assert report.grad_norm == pytest.approx(plain.grad_norm, rel=CLOSE)
            assert report.num_zeros == plain.num_zeros
            assert all(
                (grads[n] - g).abs().max() <= CLOSE * _scale(right, n) for n, g in right.items()
            )
        assert all(
            (ours.after[n] - w).abs().max() <= CLOSE * _scale(alone.after, n)
            for n, w in alone.after.items()
        )
        assert all(
            torch.equal(ours.after[n], w)
            for n, w in alone.after.items()
            if n.endswith(".correction")
        )


def _scale(tensors: dict[str, Tensor], name: str) -> float:
    """Return what an error is measured by. Softmax does not see a bias of the keys, so all tensors
    measure it."""
    return max(
        float(t.abs().max()) for n, t in tensors.items() if n == name or name.endswith("key.bias")
    )


@pytest.mark.slow
def test_experts_on_ranks_train_in_half_precision_and_skip_steps_together() -> None:
    scaling = LossScaling("dynamic", initial=2.0**8, hysteresis=1)
    runs = [replace(PLAIN, compute="bf16", sequence=True)]
    runs += [replace(PLAIN, compute="fp16", steps=3, scaling=scaling, plant=(0, 1, float("inf")))]
    spread = train_all([replace(one, expert=4, expert_tensor=1) for one in runs], 2, 1, 2)
    for ours, theirs in zip(spread, train_all(runs), strict=True):
        assert [report.outcome for report in ours.reports] == [
            report.outcome for report in theirs.reports
        ]
        assert ours.scaler == theirs.scaler
        for own, other in zip(ours.reports, theirs.reports, strict=True):
            assert own.loss == pytest.approx(other.loss, rel=2e-2)
    assert [report.outcome for report in spread[1].reports] == [
        "applied",
        "skipped_overflow",
        "applied",
    ]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_expert_that_broke_a_step_is_named_once(rank: int) -> None:
    """The planted element is the last one that the rank counts, which is of its experts."""
    run = replace(
        PLAIN,
        steps=1,
        expert=2,
        plant=(rank, 0, float("inf")),
        before=plant_in_an_expert,
        options={"norm": 3.0},
    )
    first = train(run, 2, 1, 2).reports[0]
    assert first.outcome == "skipped_overflow"
    (offender,) = first.offenders
    number = int(offender.name.split(".experts.")[1].split(".")[0])
    tp = rank % 2
    assert (number // 4, offender.tp_rank, offender.infs) == (rank // 2, tp, 1)


def plant_in_an_expert() -> None:
    """Lets only the gradients of experts be planted in."""
    inner = Recording.__init__

    def init(self: Recording, *args: Any, **options: Any) -> None:
        inner(self, *args, **options)
        of_experts = [buffer for buffer in self.all_buffers() if buffer.holds_experts]
        self._counted_grads = [
            buffer.local_grads[a:b] for buffer in of_experts for a, b in buffer.counted()
        ]

    Recording.__init__ = init  # type: ignore[method-assign]


CUTS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 2), {"expert": 2}),
    ((2, 1, 2), {"expert": 4, "expert_tensor": 1, "zero_size": 1}),
    ((1, 1, 1), {}),
    ((1, 2, 2), {"expert": 2}),
    ((2, 1, 2), {"expert": 2}),
]


def saved_and_resumed(mesh: DeviceMesh, run: Run, folder: Path, number: int) -> list[Any]:
    """Loads the checkpoint of all steps so far, takes a step and saves it, in the background."""
    engine = make_engine(mesh, run)
    if number:
        path = latest(folder)
        assert path is not None
        load(path, engine.optimizer)
    report = engine.step(share_of(mesh, batches(run)[number]), run.lr, number)
    outcome = Saving(folder, number + 1, engine.optimizer, {}, background=True).finish()
    assert not outcome.problem
    held = fragments(engine.optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    whole = engine.optimizer.state_dict()["tensors"]
    return [
        report,
        held,
        {name: tensor for name, tensor in whole.items() if name.startswith("weight/")},
    ]


@pytest.mark.slow
def test_a_run_goes_on_in_every_other_cut_of_its_experts(tmp_path: Path) -> None:
    """Each step in another layout, from the checkpoint of the one before, is a step of the plain
    model."""
    run = replace(PLAIN, steps=len(CUTS), options={"norm": 3.0})  # and another norm than L2
    (alone,) = train_all([run])
    ranks: list[list[Any]] = []
    for number, ((tp, pp, dp), cut) in enumerate(CUTS):
        own = replace(run, **cut)
        ranks = run_ranks(
            saved_and_resumed,
            {"pp": pp, "dp": dp, "tp": tp},
            run=own,
            folder=tmp_path,
            number=number,
        )
        for report, *_ in ranks:
            assert report.loss == pytest.approx(alone.reports[number].loss, rel=CLOSE)
            assert report.grad_norm == pytest.approx(alone.reports[number].grad_norm, rel=CLOSE)
            assert report.num_zeros == alone.reports[number].num_zeros
    after = assemble([held for _, held, _ in ranks])
    assert not (wrong := differing(after, alone.after)), f"weights differ, by these ratios: {wrong}"
    for _, _, whole in ranks:
        assert all(torch.equal(whole[f"weight/{name}"], after[name]) for name in after)


@pytest.mark.slow
@pytest.mark.parametrize("per_head", [False, True])
def test_muon_orthogonalizes_each_expert_once(per_head: bool) -> None:
    by_muon = replace(PLAIN, options={"rule": rule("muon", {"per_head": per_head})})
    (alone,) = train_all([by_muon])
    (spread,) = train_all([replace(by_muon, expert=4, expert_tensor=1)], 2, 1, 2)
    assert not (wrong := differing(spread.after, alone.after)), (
        f"weights differ, by these ratios: {wrong}"
    )


@dataclass(frozen=True)
class Spread:
    """A layer's experts over ranks."""

    expert: int
    expert_tensor: int = 0
    sequence: bool = False


def even_route(self: Router, x: Tensor, place: object) -> tuple[Tensor, Tensor]:
    """As many tokens to each expert, on each rank, as an estimate takes them to be."""
    config = self.config
    tokens = x.shape[0] * x.shape[1]
    k = config.experts_per_token
    chosen = torch.arange(tokens * k).remainder(config.experts).view(*x.shape[:2], k)
    logits = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight)
    return logits.softmax(-1).gather(-1, chosen), chosen


def kept_on_a_rank(mesh: DeviceMesh, spread: Spread, recompute: Recompute) -> int:
    Router.forward = even_route  # type: ignore[method-assign]
    config = ModelConfig(**WIDE)
    cut = Cut(1, range(1, 3), first=False, last=False)
    axes = ExpertAxes.of(mesh, spread.expert, spread.expert_tensor)
    context = Context(
        plan("fp32"), Axis.of(mesh, "tp"), spread.sequence, recompute=recompute, experts=axes
    )
    stage = Stage(config, context, cut)
    shape = LONG // (context.tp.size if context.cut_sequence else 1), 2, config.hidden
    with torch.no_grad():
        stage(torch.zeros(shape))  # makes what is made once for all
    with allocations() as sizes:
        edge = get_gradient_edge(stage(torch.zeros(shape, requires_grad=True)))
    assert edge
    return sum(sizes)


LONG = 64
WIDE: dict[str, Any] = {**MODEL, "layers": 4, "hidden": 64, "ffn": 96, "max_positions": LONG}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("axes", "spread"),
    [({"dp": 2}, Spread(2)), ({"dp": 1, "tp": 2}, Spread(2, 1, True)), ({"tp": 2}, Spread(1, 1))],
    ids=str,
)
def test_a_rank_keeps_what_is_foretold(axes: dict[str, int], spread: Spread) -> None:
    """To five per cent."""
    for recompute in (KEEP, Recompute(("activation",))):
        memory = StageMemory(
            ModelConfig(**WIDE),
            plan("fp32"),
            EngineOptions(
                2,
                LONG,
                spread.sequence,
                recompute=recompute,
                expert=spread.expert,
                expert_tensor=spread.expert_tensor,
            ),
            axes.get("tp", 1),
        )
        said = memory.activation_bytes(Cut(1, range(1, 3), first=False, last=False)).activations
        for real in run_ranks(kept_on_a_rank, axes, spread=spread, recompute=recompute):
            assert real == pytest.approx(said, rel=0.05)


def said_of_memory(mesh: DeviceMesh, run: Run) -> str:
    text = StringIO()
    with redirect_stdout(text):
        print_memory(make_engine(mesh, run).optimizer)
    return text.getvalue()


@pytest.mark.slow
def test_the_memory_that_is_said_knows_how_few_ranks_share_the_state_of_an_expert() -> None:
    for said in run_ranks(said_of_memory, {"dp": 2}, run=replace(PLAIN, expert=2)):
        assert (
            "16 + 16/2 = 24 bytes a parameter, 16 + 16 = 32 bytes a parameter of experts for "
            "weights"
        ) in said


def experts_are_reduced_over_all_replicas() -> None:
    """As if every dp rank held the same experts."""
    ModelBuffers._replicas = lambda self, layout: Replicas(self._ranks.dp, self._shards)  # type: ignore[method-assign]


def experts_are_not_reduced() -> None:
    ModelBuffers._replicas = lambda self, layout: Replicas(  # type: ignore[method-assign]
        *((Axis("dp"), Axis("zero")) if layout.expert else (self._ranks.dp, self._shards))
    )


def gradients_go_back_to_other_rows() -> None:
    inner = ExchangeRows.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return inner(ctx, grad.flip(0))

    ExchangeRows.backward = backward  # type: ignore[method-assign]


def each_rank_sends_all_tokens() -> None:
    moe.rows_of_rank = lambda count, tp, experts: slice(0, count)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("bug", "layout", "cut"),
    [
        (experts_are_reduced_over_all_replicas, (1, 1, 2), {"expert": 2}),
        (experts_are_not_reduced, (1, 1, 4), {"expert": 2}),
        (gradients_go_back_to_other_rows, (1, 1, 2), {"expert": 2}),
        (each_rank_sends_all_tokens, (2, 1, 1), {"expert": 2, "expert_tensor": 1}),
    ],
)
def test_the_law_fails_if(
    bug: Callable[[], None], layout: tuple[int, int, int], cut: dict[str, Any]
) -> None:
    alone, records = expected()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        require_plain(train(replace(PLAIN, before=bug, **cut), *layout), alone, records)
