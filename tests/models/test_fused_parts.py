"""Attention of cut sequences, by one call of a fused kernel for the keys of each rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from models.attention import attention
from models.attention.context_parallel import attend_over_ranks
from models.attention.fused_parts import FusedParts, FusedPartsGradients, visible_part
from models.attention.kernels import AttentionCall, Kernel
from models.attention.partial import AttentionRule
from parallel.activation_checkpoint import Recompute
from parallel.sequence_cut import chunks_of_rank, positions, take_own_positions
from tests.layouts import Run, train_all
from tests.models.test_parity import MODELS, SIZES
from tests.ranks import run_ranks

SCALE = 0.3
LENGTH = 32
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def whole_sequences(dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value in groups, and a gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, heads, LENGTH, 8) for heads in (4, 2, 2, 4))
    # large numbers, so that the softmax is far from even
    return [
        (2 * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for s in shapes
    ]


def of_one_process(whole: list[Tensor], sinks: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients of query, key and value, and of the sinks if there are any."""
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    query, key, value = (x.repeat_interleave(4 // x.shape[1], 1) for x in leaves)
    scores = SCALE * query @ key.mT
    scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())
        scores = torch.cat((scores, leaves[3].view(1, -1, 1, 1).expand(2, 4, LENGTH, 1)), -1)
    output = scores.softmax(-1)[..., :LENGTH] @ value
    return [output.detach(), *torch.autograd.grad(output, leaves, whole[3])]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_part_that_each_rank_sees_has_the_pairs_that_attend(size: int) -> None:
    tokens = LENGTH // 2
    for own in range(size):
        for other in range(size):
            runs = chunks_of_rank(own, size, tokens)
            others_runs = chunks_of_rank(other, size, tokens)
            part = visible_part(runs, others_runs)
            seen = torch.zeros(tokens, tokens, dtype=torch.bool)
            seen[part.rows, part.columns] = True
            if part.causal:
                seen = seen.tril()
            own_positions = positions(Axis("cp", own, size), tokens)
            other_positions = positions(Axis("cp", other, size), tokens)
            assert torch.equal(seen, own_positions[:, None] >= other_positions)


@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_other_ranks_parts_are_merged_in_any_order(order: tuple[int, ...], sunk: bool) -> None:
    whole = whole_sequences(torch.float64)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0]).double() if sunk else None
    wanted = of_one_process(whole, sinks)
    # of query, key, value and sinks, summed over the ranks
    found = [torch.zeros_like(x) for x in wanted[1:]]
    tokens = LENGTH // 4
    for rank in range(4):
        runs = chunks_of_rank(rank, 4, tokens)
        here = positions(Axis("cp", rank, 4), tokens)
        ranks = [rank, *(other for other in order if other != rank)]
        query, _, _, grad = (x[:, :, here] for x in whole)
        merged = FusedParts(query, runs, SCALE, sinks)
        for other in ranks:
            there = positions(Axis("cp", other, 4), tokens)
            key, value = (x[:, :, there] for x in whole[1:3])
            merged.add(key, value, chunks_of_rank(other, 4, tokens))
        output, log_sum = merged.result()
        torch.testing.assert_close(output, wanted[0][:, :, here], rtol=1e-12, atol=1e-12)
        gradients = FusedPartsGradients(
            query, runs, output, log_sum, grad, SCALE, merged.backward_inputs
        )
        for other in ranks:
            there = positions(Axis("cp", other, 4), tokens)
            key, value = (x[:, :, there] for x in whole[1:3])
            sums = torch.zeros_like(key), torch.zeros_like(value)
            gradients.add(key, value, chunks_of_rank(other, 4, tokens), *sums)
            found[1][:, :, there] += sums[0]
            found[2][:, :, there] += sums[1]
        found[0][:, :, here] = gradients.grad_query()
        if sinks is not None:
            found[3] += gradients.grad_sinks(sinks)
    torch.testing.assert_close(found, wanted[1:], rtol=1e-12, atol=1e-12)


def attend_rank(mesh: DeviceMesh, dtype: torch.dtype) -> dict[bool, list[Tensor]]:
    """This rank's output and gradients, by ring and by gather."""
    cp = Axis.of(mesh, "cp")
    own = [take_own_positions(x, cp, 2).requires_grad_() for x in whole_sequences(dtype)]
    wide_dtype = torch.promote_types(dtype, torch.float32)
    rule = AttentionRule(SCALE)
    made = {}
    for ring in (False, True):
        output = attend_over_ranks(own[0], own[1], own[2], cp, rule, ring, wide_dtype, fused=True)
        made[ring] = [output.detach(), *torch.autograd.grad(output, own[:3], own[3].detach())]
    return made


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cp", [2, 4])
def test_cut_sequences_attend_as_in_one_process_by_ring_and_by_gather(
    cp: int, dtype: torch.dtype
) -> None:
    wanted = of_one_process(whole_sequences(torch.float64))
    ranks = run_ranks(attend_rank, {"cp": cp}, dtype=dtype)
    for rank, made in enumerate(ranks):
        expected = [take_own_positions(x, Axis("cp", rank, cp), 2) for x in wanted]
        for ring in (False, True):
            for one, other in zip(made[ring], expected, strict=True):
                assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()
        assert torch.equal(*(made[ring][0] for ring in (False, True)))


def take_the_fused_way() -> None:
    """As on a GPU in half precision, but in float64."""
    choose = attention.choose_kernel

    def choose_fused(call: AttentionCall) -> Kernel:
        assert call.over_ranks
        return choose(replace(call, parts_fuse=True))

    attention.choose_kernel = choose_fused


ROOM: dict[str, Any] = {**SIZES, "layers": 2, "max_positions": 32, "init_std": 0.1}
RUNS = [
    Run({"family": "llama", **ROOM, "kv_heads": 2}, length=16, steps=1),
    Run(
        {"family": "llama", **ROOM, "kv_heads": 2},
        length=16,
        steps=1,
        recompute=Recompute(("attention",)),
        ring=False,
    ),
    Run({**MODELS["gpt_oss"], **ROOM, "window_layers": [0]}, length=16, steps=1),
    Run({**MODELS["deepseek_v2"], **ROOM, "kv_heads": 4}, length=16, steps=1),
]


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("layout", [(1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 1, 4)], ids=str)
def test_models_train_by_fused_calls_what_one_process_trains(layout: tuple[int, ...]) -> None:
    alone = train_all(RUNS)
    fused = [replace(run, before=take_the_fused_way) for run in RUNS]
    for found, expected in zip(train_all(fused, *layout), alone, strict=True):
        assert found.reports[0].loss == pytest.approx(expected.reports[0].loss, rel=1e-9)
        largest = max(gradient.abs().max() for gradient in expected.grads[0].values())
        for name, gradient in expected.grads[0].items():
            assert (found.grads[0][name] - gradient).abs().max() <= 1e-9 * largest, name
