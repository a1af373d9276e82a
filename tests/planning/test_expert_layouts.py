"""Layouts with experts and long sequences over ranks: all are tried, and what they send is what a
stage sends."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.fp8.state import FP8State
from models.decoder.stages import Stage
from models.estimate.storage import SimulatedAxis, without_storage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.planning.test_plan import least_of_fullest
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.search import LONG, candidates, least_bytes, plan_run
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import least_seconds
from tools.config.layouts import layout_problems
from tools.config.run_file import RunConfig, load_run

RUN = [
    "model.family=mixtral",
    "model.experts=8",
    "model.experts_per_token=2",
    "model.layers=2",
    "model.heads=4",
]
RUN += ["model.hidden=64", "model.ffn=32", "model.vocab=64", "data.vocab_size=64", "train.steps=1"]
RUN += ["train.global_batch=16", "train.micro_batch=1", "train.seq_length=32"]
ASSUMED = Assumptions(100, 0.5, 100, 10, 8)


def run(**parallel: Any) -> RunConfig:
    said = (f"parallel.{key}={str(value).lower()}" for key, value in parallel.items())
    return load_run(None, [*RUN, *said])


def test_every_cut_of_experts_that_the_rules_allow_is_tried() -> None:
    config = run()
    every = (c.parallel for c in candidates(config, 8, 8))
    tried = {(p.tensor, p.expert, p.expert_tensor or p.tensor) for p in every if p.pipeline == 1}
    able = set[tuple[int, ...]]()
    for tensor, expert, whole in product((1, 2, 4), (1, 2, 4, 8), (True, False)):
        axes = {
            "tensor": tensor,
            "data": 8 // tensor,
            "expert": expert,
            "expert_tensor": int(whole),
        }
        if not layout_problems(config, config.parallel.model_copy(update=axes)):
            able.add((tensor, expert, 1 if whole else tensor))
    assert tried == able and len(able) > 8


def test_no_layout_is_tried_twice() -> None:
    every = (c.parallel for c in candidates(run(tensor=2, expert_tensor=1), 4, 8))
    same = Counter(
        p.model_copy(update={"expert_tensor": p.expert_tensor or p.tensor}) for p in every
    )
    assert set(same.values()) == {1}


def test_only_long_sequences_are_cut() -> None:
    tried = {
        length: {
            c.parallel.context
            for c in candidates(load_run(None, [*RUN, f"train.seq_length={length}"]), 4, 8)
        }
        for length in (LONG, 2 * LONG, 8 * LONG)
    }
    assert tried == {LONG: {1}, 2 * LONG: {1, 2}, 8 * LONG: {1, 2, 4}}


LAYOUTS = [
    {"tensor": 2, "data": 2, "expert": 4, "expert_tensor": 1, "sequence": True},
    {
        "tensor": 2,
        "data": 2,
        "expert": 2,
        "sequence": True,
        "recompute": "full",
        "recompute_fraction": 1.0,
    },
    {"tensor": 2, "context": 2, "expert_tensor": 1},
    {"tensor": 2, "pipeline": 2, "data": 2, "expert": 2, "zero": False},
    {"context": 4, "expert": 4, "context_by": "gather"},
    {"data": 4, "expert": 2},
    {"data": 4, "expert": 2, "zero": 3},
]


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_by_which_layouts_are_left_out_hold_for_experts(layout: dict[str, Any]) -> None:
    for overlap in ("true", "false"):
        config = run(**layout, overlap=overlap)
        planned = plan_run(config, MemoryModel("cuda"), ASSUMED)
        assert planned.prediction is not None
        assert least_bytes(config) <= planned.total
        assert least_of_fullest(config) <= planned.total
        assert least_seconds(config, ASSUMED) <= planned.prediction.seconds * (1 + 1e-9)


class Counted(SimulatedAxis):
    """An axis without its other ranks, which counts the bytes that this rank sends to them."""

    def __init__(self, name: str, size: int, sent: Counter[str]) -> None:
        super().__init__(name, 0, size)
        object.__setattr__(self, "sent", sent)

    def _count(self, number: float) -> None:
        self.sent[self.name] += round(number)  # type: ignore[attr-defined]

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._count((self.size - 1) * tensor.nbytes)
        return super().start_gather(tensor)

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._count((1 - 1 / self.size) * tensor.nbytes)
        return super().start_scatter_sum(tensor)

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        self._count(2 * (1 - 1 / self.size) * tensor.nbytes)
        return super().start_sum_(tensor)

    def start_shift(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._count(tensor.nbytes)
        return super().start_shift(tensor)

    def start_exchange(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._count((1 - 1 / self.size) * tensor.nbytes)
        return super().start_exchange(tensor)

    def start_exchange_of_rows(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], Tensor]:
        self._count(sum(sent[1:]) * rows.shape[1] * rows.itemsize)
        return super().start_exchange_of_rows(rows, sent, received)


def sent_in_a_step(config: RunConfig) -> Counter[str]:
    """Return the bytes that a rank sends in the passes of a micro-batch of its stage, by axis."""
    p = config.parallel
    sent = Counter[str]()
    tp = Counted("tp", p.tensor, sent)
    cut = p.expert_tensor or p.tensor
    spread = p.expert > 1 or cut < p.tensor
    within = tp if cut == p.tensor else Counted("tp", cut, sent)
    if spread:
        experts = ExpertAxes(Counted("expert", p.expert, sent), within, Axis("replicas"))
    else:
        experts = None
    with without_storage("cuda"):
        fp8 = FP8State(None, config.model.layers, tp, device="meta")
        cp = Counted("cp", p.context, sent)
        ring = p.context_by == "ring"
        context = Context(
            config.plan,
            tp,
            p.sequence,
            recompute=config.recompute,
            fp8=fp8,
            experts=experts,
            cp=cp,
            ring=ring,
        )
        (cost,) = config.stage_costs(config.sized_model, [0])
        stage = Stage(config.sized_model.with_zero_weights, context, cost.cut)
        for parameter in stage.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
        ids = torch.zeros(
            config.train.seq_length // p.context, config.train.micro_batch, dtype=torch.int64
        )
        sent.clear()
        y = stage(ids, MicrobatchInfo(0, torch.arange(ids.shape[1]), torch.ones(())))
        stage.losses(y, ids).sum().backward()
    return sent


DELTA_NET = {
    "model.experts": 0,
    "model.delta_net": "{key_heads=1, value_heads=4, key_dim=8, value_dim=16}",
    "model.delta_layers": "[0, 1]",
}
KIMI_DELTA = {
    **DELTA_NET,
    "model.delta_net": "{key_heads=4, value_heads=4, key_dim=8, value_dim=16, gate_rank=32}",
}
MIXERS = {
    "model.family": "nemotron_h",
    "model.hybrid_pattern": '"M*"',
    "model.experts": 0,
    "model.mamba": "{heads=4, head_dim=16, state_dim=8, groups=1}",
}
SENT = [
    ({"tensor": 2, "data": 2, "sequence": True, "expert": 4, "expert_tensor": 1}, {}),
    ({"context": 2, "expert": 2}, {}),
    ({"tensor": 2, "sequence": True}, {}),
    ({"tensor": 2}, {}),
    ({"tensor": 2, "data": 2, "sequence": True, "expert": 2}, {}),
    ({"tensor": 2, "data": 2, "expert": 4, "expert_tensor": 1}, {}),
    ({"tensor": 2, "sequence": True, "expert_tensor": 1}, {"model.shared_experts": 16}),
    (
        {"tensor": 4, "data": 1, "sequence": True, "expert": 2, "expert_tensor": 2},
        {"model.dense_layers": [0]},
    ),
    ({"context": 2, "expert": 2, "context_by": "gather"}, {}),
    ({"tensor": 2, "sequence": True}, {"model.experts": 0}),
    ({"context": 2}, DELTA_NET),
    ({"context": 2, "tensor": 2, "sequence": True}, KIMI_DELTA),
    ({"context": 2, "tensor": 2}, KIMI_DELTA),
    ({"context": 2}, MIXERS),
]


@pytest.mark.cases(3, sample=2)
@pytest.mark.parametrize(("layout", "model"), SENT)
def test_a_stage_sends_what_the_plan_says(layout: dict[str, Any], model: dict[str, Any]) -> None:
    """Small sums, such as those of the loss, are not in the plan."""
    length = [
        "model.vocab=64",
        "train.global_batch=4",
        "train.micro_batch=2",
        *(f"{k}={v}" for k, v in model.items()),
    ]
    said = [f"parallel.{key}={str(value).lower()}" for key, value in layout.items()]
    config = load_run(None, [*RUN, *length, *said])
    planned = plan_run(config, MemoryModel("cuda"), ASSUMED)
    assert planned.prediction is not None
    sent = sent_in_a_step(config)
    traffic = planned.prediction.traffic
    for axis, count in {"tp": traffic.tp, "expert": traffic.experts, "cp": traffic.cp}.items():
        assert sent[axis] * config.num_microbatches == pytest.approx(count, rel=0.03), axis
