"""Sequences that are cut over ranks train what one process trains, to rounding, by ring and by
gather."""

import re
import resource
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.optim.decision.step_report import RouterReport
from megaprec.precision.plan import plan
from models.attention import partial
from models.attention.context_limits import require_divisible_context
from models.attention.context_parallel import attend_over_ranks
from models.attention.packing import causal_mask
from models.attention.partial import (
    AttentionGradients,
    AttentionRule,
    MergedAttention,
    visible_blocks,
)
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.estimate.storage import LiveMemory
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.kinds import schedule
from parallel.sequence_cut import chunks_of_rank, length_multiple, positions, take_own_positions
from tests import oracle
from tests.activation_bytes import kept_bytes
from tests.layouts import Result, Run, batches, make_engine, train_all
from tests.models.routers import require_routers
from tests.models.test_parity import MODELS, SIZES, differing
from tests.ranks import on_ranks, run_ranks
from tests.refusals import raises, sentence

ROOM: dict[str, Any] = {**SIZES, "layers": 4, "max_positions": 32, "init_std": 0.1}
WINDOW: dict[str, Any] = {
    "family": "llama",
    **ROOM,
    "kv_heads": 2,
    "window": 3,
    "window_layers": [1],
}
DROPS: dict[str, Any] = {"family": "gpt2", **ROOM, "dropout": 0.2, "attention_dropout": 0.2}
EXPERTS: dict[str, Any] = {**MODELS["mixtral"], **ROOM}
STRETCHED: dict[str, Any] = {
    "family": "llama",
    **ROOM,
    "rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
}
SUNK: dict[str, Any] = {**MODELS["gpt_oss"], **ROOM, "attention_dropout": 0.2}
CAPPED: dict[str, Any] = {
    "family": "gemma2",
    **ROOM,
    "kv_heads": 2,
    "window": 3,
    "window_layers": [0, 2],
    "attention_softcap": 0.5,
    "final_softcap": 2.0,
}
DELTA: dict[str, Any] = {**MODELS["qwen3_next"], **ROOM, "head_dim": 8}
KIMI: dict[str, Any] = {**MODELS["kimi_linear"], **ROOM, "kv_heads": ROOM["heads"]}
HYBRID: dict[str, Any] = {**MODELS["nemotron_h"], **ROOM, "hybrid_pattern": "M*-M"}
RUNS: dict[str, Run] = {
    "delta nets": Run(DELTA, length=16, steps=2, borders=3, reset=True),
    "Kimi Delta Attention recomputed": Run(
        KIMI, length=16, steps=1, borders=3, reset=True, recompute=Recompute(("attention",))
    ),
    "mixers recomputed": Run(
        HYBRID, length=16, steps=1, borders=2, reset=True, recompute=Recompute(fraction=1.0)
    ),
    "documents": Run(WINDOW, length=16, borders=3, steps=2),
    "documents reset": Run(DROPS, length=16, borders=3, reset=True, steps=2),
    "experts recomputed": Run(EXPERTS, length=16, steps=1, recompute=Recompute(fraction=1.0)),
    "stretched rotary": Run(STRETCHED, length=16, steps=1, borders=2, reset=True),
    "sinks": Run(SUNK, length=16, steps=1, borders=3),
    "soft caps recomputed": Run(
        CAPPED, length=16, steps=1, borders=2, recompute=Recompute(("attention",))
    ),
    "selective": Run(DROPS, length=16, steps=1, recompute=Recompute(("attention",))),
}
FAST = ("documents reset",)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    documents: Tensor | None,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    attends = causal_mask(query.shape[2], window, documents, query.device)
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    if sinks is None and not cap:
        return F.scaled_dot_product_attention(query, key, value, attends, scale=0.3)
    scores = 0.3 * query @ key.mT
    scores = (cap * torch.tanh(scores / cap) if cap else scores).masked_fill(
        ~attends, float("-inf")
    )
    if sinks is None:
        logits = [scores]
    else:
        logits = [scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)]
    return torch.cat(logits, -1).softmax(-1)[..., : key.shape[2]] @ value


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 1, 2, 5, 40]), st.booleans(), st.booleans(),
    st.sampled_from([0.0, 0.5]), st.integers(0, 2**31), st.randoms(use_true_random=False),
)  # fmt: skip
def test_attention_merged_from_parts_in_any_order_is_that_of_the_whole(
    groups: int,
    ranks: int,
    window: int,
    several: bool,
    sunk: bool,
    cap: float,
    seed: int,
    random: Any,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    own = 2 * int(torch.randint(1, 4, (), generator=generator))
    heads = 2
    length = own * ranks
    sizes = ((heads * groups, 5), (heads, 5), (heads, 3))
    query, key, value = (
        torch.randn(2, n, length, d, dtype=torch.float64, generator=generator).requires_grad_()
        for n, d in sizes
    )
    documents = torch.randint(0, 2, (2, length), generator=generator).cumsum(1) if several else None
    sinks = (
        3 * torch.randn(query.shape[1], dtype=torch.float64, generator=generator)
    ).requires_grad_()
    sinks = sinks if sunk else None
    whole = attention(query, key, value, window, documents, sinks, cap)
    grad = torch.randn(whole.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(
        whole, (query, key, value) if sinks is None else (query, key, value, sinks), grad
    )
    rule = AttentionRule(0.3, window, documents, softcap=cap)
    wide = torch.float64
    of_key = torch.zeros_like(key)
    of_value = torch.zeros_like(value)
    of_sinks = torch.zeros(query.shape[1]).double()
    with torch.no_grad():
        for rank in range(ranks):
            mine = chunks_of_rank(rank, ranks, own)
            axis = Axis("cp", rank, ranks)
            here = positions(axis, own)
            merged = MergedAttention(query[:, :, here], mine, heads, 3, rule, wide, sinks)
            order = random.sample(range(ranks), ranks)
            for other in order:
                there = positions(Axis("cp", other, ranks), own)
                merged.add(key[:, :, there], value[:, :, there], chunks_of_rank(other, ranks, own))
            mixed, log_sum = merged.result()
            torch.testing.assert_close(mixed, whole[:, :, here], rtol=1e-11, atol=1e-12)
            sums = AttentionGradients(
                query[:, :, here], mine, mixed, log_sum, grad[:, :, here], rule, wide
            )
            for other in order:
                there = positions(Axis("cp", other, ranks), own)
                into = torch.zeros_like(key[:, :, there]), torch.zeros_like(value[:, :, there])
                sums.add(
                    key[:, :, there], value[:, :, there], chunks_of_rank(other, ranks, own), *into
                )
                of_key[:, :, there] += into[0]
                of_value[:, :, there] += into[1]
            torch.testing.assert_close(
                sums.grad_query(), wanted[0][:, :, here], rtol=1e-11, atol=1e-12
            )
            of_sinks += 0 if sinks is None else sums.grad_sinks(sinks)
    torch.testing.assert_close((of_key, of_value), wanted[1:3], rtol=1e-11, atol=1e-12)
    if sinks is not None:
        torch.testing.assert_close(of_sinks, wanted[3], rtol=1e-11, atol=1e-12)


def test_every_token_is_on_one_rank_and_all_ranks_attend_to_as_many_keys() -> None:
    for size in (1, 2, 3, 8):
        places = [positions(Axis("cp", rank, size), 6) for rank in range(size)]
        assert sorted(torch.cat(places).tolist()) == list(range(6 * size))
        assert len({int((own + 1).sum()) for own in places}) == 1
        whole = torch.arange(6 * size) * 10
        assert all(
            torch.equal(take_own_positions(whole, Axis("cp", r, size), 0), whole[own])
            for r, own in enumerate(places)
        )


def scores_computed(rank: int, size: int, window: int) -> int:
    """The scores of one head that a rank computes for a sequence of 1024 tokens."""
    own = 1024 // size
    query = torch.zeros(1, 1, 1, 1024 // size, 8)
    mine = chunks_of_rank(rank, size, own)
    rule = AttentionRule(1.0, window)
    return sum(
        len(block.queries) * len(block.keys)
        for other in range(size)
        for block in visible_blocks(
            mine, chunks_of_rank(other, size, own), rule, query, torch.float32
        )
    )


def test_no_rank_computes_more_scores_than_another_and_few_that_are_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(partial._SCORES_BYTES, "cpu", 1)  # the smallest blocks: 16 queries
    for size in (1, 2, 4):
        (computed,) = {scores_computed(rank, size, 0) for rank in range(size)}
        assert 1024 * 1024 // 2 < computed * size < 1024 * 1024 * 0.52
        assert sum(scores_computed(rank, size, 32) for rank in range(size)) == pytest.approx(
            1024 * 47, rel=0.02
        )


def attend_rank(mesh: DeviceMesh, dtype: torch.dtype) -> dict[bool, list[Tensor]]:
    cp = Axis.of(mesh, "cp")
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(1, n, 32, 8, generator=generator) for n in (4, 2, 2, 4)]
    own = [take_own_positions(x, cp, 2).to(dtype).requires_grad_() for x in whole]
    made = {}
    for ring in (False, True):
        mixed = attend_over_ranks(
            own[0], own[1], own[2], cp, AttentionRule(0.3, 9), ring, torch.float32
        )
        made[ring] = [mixed.detach(), *torch.autograd.grad(mixed, own[:3], own[3].detach())]
    return made


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("cp", [2, 8, 4])
def test_partial_results_are_merged_in_fp32_so_the_gap_to_float64_does_not_grow_with_the_ranks(
    cp: int,
) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = [
        torch.randn(1, n, 32, 8, generator=generator).bfloat16().double() for n in (4, 2, 2, 4)
    ]
    q, k, v = (x.requires_grad_() for x in whole[:3])
    exact = attention(q, k, v, 9, None)
    wanted = [exact.detach(), *torch.autograd.grad(exact, (q, k, v), whole[3])]
    ranks = run_ranks(attend_rank, {"cp": cp}, dtype=torch.bfloat16)
    for ring in (False, True):
        for n, right in enumerate(wanted):
            for rank, made in enumerate(ranks):
                here = take_own_positions(right, Axis("cp", rank, cp), 2)
                rounding = 2.0**-8 * right.abs().max()  # that of one number in bf16, whatever cp
                assert (made[ring][n].double() - here).abs().max() <= rounding * (
                    1 if n == 0 else 2
                )
    assert all(torch.equal(*(made[ring][0] for ring in (False, True))) for made in ranks), (
        "the same sums, forward"
    )


@cache
def trained(
    layout: tuple[int, ...], ring: bool = True, kind: str = "1f1b", names: tuple[str, ...] = ()
) -> list[Result]:
    tp, pp = layout[:2]
    chosen = [RUNS[name] for name in names or RUNS]
    options: dict[str, Any] = {
        "ring": ring,
        "kind": kind,
        "sequence": tp > 1,
        "micro_batch": 2 if pp > 1 else 4,
    }
    return train_all([Run(**{**vars(run), **options}) for run in chosen], *layout)


def same_router(found: RouterReport, expected: RouterReport) -> None:
    for field in fields(RouterReport):
        here = getattr(found, field.name)
        right = getattr(expected, field.name)
        # What this router does not have is None on both sides.
        assert here == (None if right is None else pytest.approx(right, rel=1e-8)), field.name


def same(found: Result, expected: Result) -> None:
    for report, right in zip(found.reports, expected.reports, strict=True):
        assert report.outcome == "applied"
        assert report.loss == pytest.approx(right.loss, rel=1e-9)
        assert report.grad_norm == pytest.approx(right.grad_norm, rel=1e-9)
        for router, expected_router in zip(report.routers, right.routers, strict=True):
            same_router(router, expected_router)
    for grads, right in zip(found.grads, expected.grads, strict=True):
        largest = max(g.abs().max() for g in right.values())
        for name, gradient in right.items():
            scale = largest if name.endswith("key.bias") else gradient.abs().max()
            assert (grads[name] - gradient).abs().max() <= 1e-9 * scale, name


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "gather"])
def test_documents_and_dropout_train_alike_if_their_sequences_are_cut(ring: bool) -> None:
    for found, expected in zip(
        trained((1, 1, 1, 2), ring, names=FAST), trained((1, 1, 1), names=FAST), strict=True
    ):
        same(found, expected)


LAYOUTS = [
    ((1, 1, 1, 4), True, "1f1b"),
    ((2, 1, 2, 2), False, "1f1b"),
    ((1, 2, 1, 2), True, "zb-h1"),
    ((1, 1, 1, 8), True, "1f1b"),  # from here on: of a campaign
    ((1, 1, 1, 8), False, "1f1b"),
    ((2, 1, 1, 4), True, "1f1b"),
    ((1, 1, 2, 4), False, "1f1b"),
    ((1, 2, 1, 2), False, "gpipe"),
    ((1, 2, 1, 4), True, "zb-h2"),
    ((1, 2, 1, 2), False, "zb-v"),
    ((1, 2, 1, 2), True, "interleaved"),
    ((2, 2, 1, 2), True, "1f1b"),
    ((1, 2, 2, 2), True, "1f1b"),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("layout", "ring", "kind"),
    LAYOUTS,
    ids=lambda x: "x".join(map(str, x)) if type(x) is tuple else str(x),
)
def test_every_layout_trains_what_one_process_trains(
    layout: tuple[int, ...], ring: bool, kind: str
) -> None:
    for found, expected in zip(trained(layout, ring, kind), trained((1, 1, 1)), strict=True):
        same(found, expected)


@pytest.mark.cases(0, slow=1)
@pytest.mark.parametrize("layout", [(1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 1, 4)], ids=str)
def test_every_family_trains_the_plain_model_if_its_sequences_are_cut(
    layout: tuple[int, ...],
) -> None:
    runs = [Run(model, sequence=layout[0] > 1, micro_batch=4, steps=2) for model in MODELS.values()]
    first = train_all([replace(run, sequence=False, steps=0) for run in runs])
    for name, run, alone, result in zip(MODELS, runs, first, train_all(runs, *layout), strict=True):
        records: list[dict[str, Any]] = oracle.train(
            run.config, alone.before, batches(run), run.lr, run.clip
        )
        for report, grads, record in zip(result.reports, result.grads, records, strict=True):
            assert report.loss == pytest.approx(record["loss"], rel=1e-9)
            require_routers(report, record)
            assert not (wrong := differing(grads, record["grads"])), f"{name}: {wrong}"


def measure_rank(mesh: DeviceMesh, ring: bool) -> tuple[int, int]:
    """Bytes that a stage keeps, and its peak, in a forward and backward pass."""
    context = Context(plan("bf16"), cp=Axis.of(mesh, "cp"), ring=ring)
    stage = Stage(LONG, context, WHOLE_MODEL).bfloat16()
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    ids = take_own_positions(
        torch.arange(LONG.max_positions).unsqueeze(1) % LONG.vocab, context.cp, 0
    )
    stage(ids[: len(ids)])  # makes the rotary tables, which are kept for good
    with LiveMemory() as live:
        logits = stage(ids, MicrobatchInfo(0, torch.arange(1), torch.ones(())))
        loss = stage.losses(logits, ids).sum()
        del logits
        forward = live.peak
        kept = live.begin()
        loss.backward()
    return kept, max(forward, live.peak)


LONG = ModelConfig(
    family="llama", layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=64, max_positions=2048
)
WHOLE_MODEL = Cut(0, range(2), True, True)


@pytest.mark.slow
def test_activations_are_at_most_a_quarter_on_four_ranks_and_are_those_foretold() -> None:
    ((whole, _),) = run_ranks(measure_rank, {}, ring=True)
    (foretold_whole,) = kept_bytes(
        LONG, plan("bf16"), [WHOLE_MODEL], EngineOptions(1, LONG.max_positions)
    )
    assert whole == pytest.approx(foretold_whole.activations, rel=0.01)
    keys_and_values = LONG.max_positions * 2 * LONG.kv_heads * LONG.head_dim
    peaks = dict[bool, int]()
    for ring in (True, False):
        measured = run_ranks(measure_rank, {"cp": 4}, ring=ring)
        (foretold,) = kept_bytes(
            LONG,
            plan("bf16"),
            [WHOLE_MODEL],
            EngineOptions(1, LONG.max_positions, ring=ring),
            cp=4,
        )
        assert len(set(measured)) == 1
        kept, peaks[ring] = measured[0]
        # less where the fused attention of one process keeps its output as well
        assert kept <= whole / 4 * 1.01
        assert kept == pytest.approx(foretold.activations, rel=0.01)
        assert peaks[ring] == pytest.approx(
            max(foretold.forward, kept + foretold.backward), rel=0.01
        )
    # in bf16, and gradients in FP32
    assert peaks[True] < peaks[False] <= peaks[True] + keys_and_values * (2 + 4 + 4)


ROOM_MB = (
    115  # beyond the engine, a step takes one rank 160 to 200 MB and each of four ranks 50 to 60
)
FAR = Run(
    {**LONG.model_dump(exclude={"dense_ffn"}), "ffn": 1024, "max_positions": 4096},
    "fp32",
    masked=False,
    steps=1,
    own=str(schedule("1f1b", 1, 1)),
    micro_batch=1,
    length=4096,
)


def step_in_room(mesh: DeviceMesh, room: int) -> float | str:
    """The loss of a step on one sequence in `room` MB beyond the engine's own (0: any); or what
    went wrong."""
    engine = make_engine(mesh, FAR)
    tokens, targets, _ = (x if x is None else x[:1] for x in batches(FAR)[0])
    assert tokens is not None and targets is not None
    if room:
        most = (
            int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            + room * 2**20
        )
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        loss = engine.step(Share(tokens, targets), FAR.lr, 0).loss
    except RuntimeError as error:
        return str(error)
    assert isinstance(loss, float)
    return loss


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits the memory of a process as Linux does"
)
def test_four_ranks_train_on_a_sequence_for_which_one_rank_of_the_same_memory_has_no_room() -> None:
    (whole,) = run_ranks(step_in_room, {}, room=0)
    (alone,) = run_ranks(step_in_room, {}, room=ROOM_MB)
    assert isinstance(alone, str) and "can't allocate memory" in alone
    assert run_ranks(step_in_room, {"cp": 4}, room=ROOM_MB) == [pytest.approx(whole, rel=1e-6)] * 4


@on_ranks(dp=2, cp=2)
def test_replicas_of_weights_are_dp_and_cp_together_and_samples_belong_to_dp_alone(
    mesh: DeviceMesh,
) -> None:
    replicas = Axis.replicas(mesh)
    dp = Axis.of(mesh, "dp")
    cp = Axis.of(mesh, "cp")
    assert (replicas.size, replicas.rank) == (4, 2 * dp.rank + cp.rank)
    assert replicas.gather(torch.tensor([dp.rank, cp.rank])).tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert cp.start_shift(torch.tensor([float(cp.rank)]))().tolist() == [1.0 - cp.rank]
    assert Axis.stage(mesh).size == 4


@pytest.mark.parametrize(
    ("changes", "length", "tensor", "said"),
    [
        ({}, 20, 1, (sentence("model.context_length", length=20, multiple=8, rule="2 x parallel.context", here="parallel.context = 4"))),
        ({}, 24, 3, sentence("model.context_length", multiple=24, rule="parallel.context x the least common multiple of 2 and parallel.tensor")),
        ({"factory": "my_model.py:build"}, 16, 1, sentence("model.context_factory", factory="my_model.py:build", here="parallel.context = 4")),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(
    changes: dict[str, Any], length: int, tensor: int, said: str
) -> None:
    model = ModelConfig(**{"family": "llama", **SIZES, **changes})
    if length % length_multiple(4, tensor) == 0 and not changes:
        length += 1
    with pytest.raises(UserError) as raised:
        require_divisible_context(model, plan("bf16"), 4, length, tensor)
    assert re.search(said, str(raised.value))


def test_rounded_scores_are_refused_by_name() -> None:
    with raises("model.context_scores", scores="bf16", here="parallel.context = 2"):
        require_divisible_context(
            ModelConfig(family="llama", **SIZES), plan("bf16", scores=torch.bfloat16), 2, 16
        )
