"""Bytes of weights, gradients, masters and moments known beforehand are those that a real engine
holds, to the byte."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.rules.muon.matrix_exchange import owners_of
from megaprec.optim.rules.muon.newton_schulz import MatrixStack, orthogonalized
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.update_rules import AdamW, UpdateRule
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import PrecisionPlan, plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.estimate.state import (
    Sharding,
    StateBytes,
    _iteration_peak,
    _most_owned,
    state_bytes,
)
from models.estimate.storage import LiveMemory
from models.parameter_counts import num_parameters
from parallel.pipeline.kinds import schedule
from tests.given import declare
from tests.other_systems import slow
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "ffn": 96,
    "vocab": 101,
    "max_positions": 16,
}
LENGTH = 16
LLAMA = {"family": "llama", "kv_heads": 2, **SIZES}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2, tied": {"family": "gpt2", **SIZES},
    "gpt_neox": {"family": "gpt_neox", **SIZES},
    "qwen3": {"family": "qwen3", "kv_heads": 2, **SIZES},
    "mixtral": {"family": "mixtral", "experts": 4, **SIZES},
}
IN_FP8 = plan("bf16", fp8=FP8Recipe(kind="current", parameters=True, pad=True))
PLANS: dict[str, PrecisionPlan] = {
    "fp32": plan("fp32"),
    "bf16": plan("bf16"),
    "fp16": plan("fp16"),
    "bf16, split masters": plan("bf16", masters="split", moments="bf16", gradients="bf16"),
    "bf16, norms in fp32": plan("bf16", keep_fp32=("*norm*",)),
    "fp8 weights": IN_FP8,
}
KINDS = ("weights", "gradients", "masters", "moments", "ema")


@dataclass(frozen=True)
class Case:
    model: dict[str, Any] = field(hash=False)
    plan: PrecisionPlan
    kind: str = "1f1b"
    layers: tuple[int, ...] = ()
    rule: UpdateRule = AdamW()
    expert: int = 1
    expert_tensor: int = 0
    canonical: int = 0
    zero: int = 1
    zero_size: int = 0
    keep: int = 0
    keep_bytes: int = 0
    bucket: int = 0
    overlap: bool = False
    ema: float = 0.0


def held(mesh: DeviceMesh | None, cases: Sequence[Case], pp: int = 1) -> list[dict[str, int]]:
    """The bytes by kind that this rank's engine holds in each case."""
    return [bytes_of_rank(mesh, case, pp) for case in cases]


def bytes_of_rank(mesh: DeviceMesh | None, case: Case, pp: int) -> dict[str, int]:
    return bytes_of(engine_of(mesh, case, pp))


def bytes_of(engine: Engine) -> dict[str, int]:
    """The bytes by kind that an engine holds on this rank."""
    found = [buffer.bytes_by_kind() for buffer in engine.optimizer.all_buffers()]
    return {kind: sum(one[kind] for one in found) for kind in KINDS}


def engine_of(mesh: DeviceMesh | None, case: Case, pp: int) -> Engine:
    made = schedule(case.kind, pp, 4)
    return Engine.build(
        ModelConfig(**case.model),
        case.plan,
        mesh,
        made,
        EngineOptions(
            micro_batch=1,
            seq_length=LENGTH,
            layers=case.layers,
            expert=case.expert,
            expert_tensor=case.expert_tensor,
            canonical_shards=case.canonical,
        ),
        rule=case.rule,
        zero_size=case.zero_size,
        shard_gradients=case.zero >= 2,
        shard_weights=case.zero == 3,
        keep_layers=case.keep,
        keep_bytes=case.keep_bytes,
        bucket=case.bucket,
        overlap=case.overlap,
        ema=case.ema,
    )


def foretold(case: Case, pp: int = 1, dp: int = 1, tp: int = 1) -> list[StateBytes]:
    model = ModelConfig(**case.model)
    placed = schedule(case.kind, pp, 4).rank_of_stage
    cut = cuts(model, len(placed), LENGTH, case.layers, placed)
    sharding = Sharding(
        tp,
        dp,
        case.zero_size or dp,
        bucket=case.bucket,
        expert=case.expert,
        expert_tensor=case.expert_tensor,
        gradients=case.zero >= 2,
        weights=case.zero == 3,
        ema=case.ema > 0,
    )
    return state_bytes(model, case.plan, cut, placed, sharding, case.rule)


@pytest.mark.parametrize("precision", PLANS)
def test_one_process_holds_what_is_foretold_in_every_precision(precision: str) -> None:
    case = Case(LLAMA, PLANS[precision], ema=0.9)
    (said,) = foretold(case)
    assert said.ema
    assert bytes_of_rank(None, case, 1) == {kind: getattr(said, kind) for kind in KINDS}


@pytest.mark.parametrize("model", MODELS)
def test_one_process_holds_what_is_foretold_of_every_family(model: str) -> None:
    case = Case(MODELS[model], plan("bf16"))
    (said,) = foretold(case)
    assert bytes_of_rank(None, case, 1) == {kind: getattr(said, kind) for kind in KINDS}


@pytest.mark.parametrize("model", MODELS)
def test_one_process_holds_what_its_virtual_ranks_would(model: str) -> None:
    """Under canonical numerics, with a copy of the embedding for a tied head."""
    case = Case(MODELS[model], plan("bf16"), canonical=2)
    made = schedule(case.kind, 1, 4).rank_of_stage
    config = ModelConfig(**case.model)
    cut = cuts(config, 1, LENGTH, case.layers, made)
    (said,) = state_bytes(config, case.plan, cut, made, Sharding(2, separate_head=True), case.rule)
    assert bytes_of_rank(None, case, 1) == {kind: 2 * getattr(said, kind) for kind in KINDS}


FEW = [
    Case(MODELS["gpt2, tied"], plan("bf16"), ema=0.9),
    Case(LLAMA, IN_FP8, ema=0.9),
    Case(MODELS["mixtral"], plan("bf16")),
]
FEW += [
    Case(MODELS["mixtral"], plan("bf16"), rule=Muon()),
    Case(LLAMA, IN_FP8, rule=Muon(by_adamw=("*.0.mlp.*",))),
]
SPREAD = [
    Case(MODELS["mixtral"], plan("bf16"), expert=2, ema=0.9),
    Case(MODELS["mixtral"], plan("bf16"), "1f1b", (), Muon(), 4, 1),
]
MANY = [Case(model, precision) for model in MODELS.values() for precision in PLANS.values()]
MANY += [
    Case(model, precision, rule=Muon()) for model in MODELS.values() for precision in PLANS.values()
]
# Every family in every precision, and each of both with Muon.
SOME = [*MANY[: len(MODELS) * len(PLANS)]]
SOME += [
    Case(model, precision, rule=Muon())
    for model, precision in zip(cycle(MODELS.values()), PLANS.values(), strict=False)
]


@pytest.mark.parametrize(
    ("axes", "cases"),
    [
        ({"pp": 2, "tp": 2}, [*FEW, Case(LLAMA, plan("bf16"), layers=(2, 1))]),
        ({"dp": 2, "tp": 2}, [*FEW, *SPREAD]),
        *slow(({"pp": 2, "dp": 2, "tp": 2}, SOME)),
        *(
            pytest.param(axes, MANY, marks=pytest.mark.campaign)
            for axes in ({"pp": 3}, {"pp": 2, "dp": 2, "tp": 2})
        ),
    ],
    ids=str,
)
def test_every_rank_holds_what_is_foretold(axes: dict[str, int], cases: list[Case]) -> None:
    """Tensor, pipeline in uneven stages, ZeRO-1, tied embeddings and experts."""
    pp, dp, tp = (axes.get(name, 1) for name in ("pp", "dp", "tp"))
    said = [foretold(case, pp, dp, tp) for case in cases]
    for rank, found in enumerate(run_ranks(held, axes, cases=cases, pp=pp)):
        for case, real, expected in zip(cases, found, said, strict=True):
            stage = rank // (dp * tp)
            assert real == {kind: getattr(expected[stage], kind) for kind in KINDS}, case


def test_stages_that_share_a_rank_are_counted_together() -> None:
    four = {**MODELS["gpt2, tied"], "layers": 4}
    case = Case(four, plan("bf16"), "zb-v")
    found = run_ranks(held, {"pp": 2}, cases=[case], pp=2)
    said = foretold(case, pp=2)
    assert [one[0] for one in found] == [
        {kind: getattr(rank, kind) for kind in KINDS} for rank in said
    ]


def peak_of_update(mesh: DeviceMesh | None, case: Case, pp: int = 1) -> int:
    """The bytes that an optimizer step adds at its peak, on this rank, with gradients of zero."""
    optimizer = engine_of(mesh, case, pp).optimizer
    declare(optimizer)
    with torch.no_grad(), LiveMemory() as live:
        optimizer.step(1e-3)
    return live.peak


def test_the_first_step_takes_two_megabytes_at_most_however_large_a_parameter_is() -> None:
    """In it weights are compared with the masters that they were rounded from."""
    case = Case({**LLAMA, "vocab": 40_000}, plan("bf16"))
    assert foretold(case)[0].update == 0
    assert peak_of_update(None, case) < 2_000_000 < 40_000 * LLAMA["hidden"] * 2


def test_the_peak_of_an_average_is_foretold() -> None:
    """Of its update, and of its place among the weights while it is evaluated."""
    case = Case({**LLAMA, "hidden": 256, "ffn": 512}, plan("bf16"), ema=0.9)
    (said,) = foretold(case)
    assert 0.8 * said.update < peak_of_update(None, case) < 1.2 * said.update + 2_000_000
    optimizer = engine_of(None, case, 1).optimizer
    with LiveMemory() as live, optimizer.averaged_weights():
        held = live.now
    assert held == said.own == said.weights


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}, {"dp": 4}], ids=str)
def test_the_peak_of_muons_update_is_foretold(axes: dict[str, int]) -> None:
    """Within a fifth: of the fullest rank, and above what AdamW's blocks take."""
    wide = {**LLAMA, "hidden": 256, "ffn": 512}
    rules = [Muon(ns_dtype="bf16"), Muon(ns_dtype="fp32"), Muon(ns_dtype="fp32", per_head=True)]
    for rule in rules:
        case = Case(wide, plan("bf16"), rule=rule)
        found = run_ranks(peak_of_update, axes, case=case) if axes else [peak_of_update(None, case)]
        (said,) = foretold(case, dp=axes.get("dp", 1), tp=axes.get("tp", 1))
        assert 0.8 * said.update < max(found) < 1.2 * said.update, (rule, found, said.update)


@pytest.mark.parametrize(
    ("model", "dp", "zero_size"),
    [
        ({**LLAMA, "hidden": 128, "ffn": 256}, 2, 2),
        ({**MODELS["gpt2, tied"], "layers": 1, "hidden": 128, "ffn": 512}, 1, 1),
        ({**LLAMA, "layers": 12, "ffn": 64}, 2, 1),
    ],
    ids=["on the way to the owners", "beside a block of the update", "on the way back to replicas"],
)
def test_the_peak_of_muons_update_is_foretold_wherever_it_is(
    model: dict[str, Any], dp: int, zero_size: int
) -> None:
    """Two iterations of a small model take little, so that the peak is before or after them."""
    rule = Muon(ns_dtype="fp32", ns_steps=2)
    case = Case(model, plan("bf16"), rule=rule, zero_size=zero_size)
    found = run_ranks(peak_of_update, {"dp": dp}, case=case)
    (said,) = foretold(case, dp=dp)
    assert 0.9 * said.update < max(found) < 1.1 * said.update, (found, said.update)


def test_iterations_take_what_those_of_the_largest_matrix_take() -> None:
    stacks = [MatrixStack(*sizes) for sizes in ((1, 8, 24), (1, 40, 32), (1, 16, 8))]
    real: list[int] = []
    for stack in stacks:
        with LiveMemory() as live:
            orthogonalized(stack.apart(torch.ones(stack.whole)), steps=5)
        real.append(live.peak)
    assert _iteration_peak(stacks, torch.float32) == max(real) == real[1]


def test_a_stage_without_trained_weights_has_no_state() -> None:
    """Its weights are all that there is, and all that is saved."""
    model = ModelConfig(**MODELS["gpt2, tied"])
    cut = cuts(model, 1, LENGTH, (), (0,))
    sharding = Sharding(ema=True, offload=True, frozen=("*",))
    (said,) = state_bytes(model, plan("bf16"), cut, (0,), sharding, AdamW())
    weights = 2 * num_parameters(model)
    numbers = asdict(said)
    del numbers["whole_weights"]
    some = {name: number for name, number in numbers.items() if number}
    assert some == {"weights": weights, "saved": weights}


def test_the_fullest_owner_has_the_matrices_that_muon_gives_it() -> None:
    stacks = [MatrixStack(*sizes) for sizes in ((1, 4, 8), (1, 4, 8), (3, 2, 2), (1, 16, 4))]
    flops = [stack.flops(5) for stack in stacks]
    for ranks in (1, 2, 3, 4, 5):
        owners = owners_of(flops, ranks)
        owned = [
            sum(prod(stack) for stack, owner in zip(stacks, owners, strict=True) if owner == rank)
            for rank in range(ranks)
        ]
        assert _most_owned(stacks, Muon(ns_steps=5), ranks) == max(owned)
