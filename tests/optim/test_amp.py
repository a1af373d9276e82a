"""The laws of mixed precision: all ranks step or none does, and a scaled loss trains what an
unscaled one trains."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.gemm import add_product_, product
from megaprec.precision.plan import LossScaling, plan
from models.attention.attention import Attention
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tests.given import declare
from tests.layouts import (
    COVERING,
    LAYOUTS,
    Result,
    Run,
    batches,
    make_engine,
    share_of,
    train,
    train_all,
)
from tests.models.test_parity import CLOSE, MODELS, differing
from tests.other_systems import slow, usually
from tests.ranks import run_ranks

INF = float("inf")
NAN = float("nan")
MODEL = MODELS["llama tied biased"]
# finds its scale in few steps
STEEP = LossScaling("dynamic", initial=2.0**32, backoff_factor=2.0**-4, growth_interval=3)
RUNS = {
    "fp16": Run(MODEL, "fp16", STEEP, steps=9, sequence=True, micro_batch=4),
    "fp16, planted": Run(
        MODEL, "fp16", LossScaling("constant", 1024.0), plant=(0, 1, NAN), micro_batch=4
    ),
    "bf16, planted": Run(MODEL, "bf16", plant=(0, 1, -INF), micro_batch=4),
    "fp32, planted": Run(MODEL, "fp32", plant=(0, 1, INF), micro_batch=4),
}


@cache
def results(layout: tuple[int, int, int]) -> dict[str, Result]:
    return dict(zip(RUNS, train_all(list(RUNS.values()), *layout), strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout", usually(COVERING, LAYOUTS), ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_every_layout_skips_the_same_steps_at_the_same_scales(layout: tuple[int, int, int]) -> None:
    for name, result in results(layout).items():
        expected = results(LAYOUTS[0])[name]
        decisions, same = (
            [(r.outcome, r.loss_scale) for r in x.reports] for x in (result, expected)
        )
        assert decisions == same, name
        assert result.scaler == expected.scaler, name
        if "planted" in name:
            assert [outcome for outcome, _ in decisions] == [
                "applied",
                "skipped_overflow",
                "applied",
            ]


def test_the_scale_falls_until_training_proceeds_and_then_grows_again() -> None:
    result = results(LAYOUTS[0])["fp16"]
    reports = result.reports
    scales = [r.loss_scale for r in reports]
    applied = [r.outcome == "applied" for r in reports]
    assert scales[:3] == [2.0**32, 2.0**32, 2.0**28], "one overflow is tolerated"
    first = applied.index(True)
    assert not any(applied[:first])
    assert all(applied[first : first + 3])
    assert scales[first + 3] == 2 * scales[first]
    assert all((r.grad_norm < INF) == (r.outcome == "applied") for r in reports)
    assert not any(
        torch.equal(result.after[name], weight) for name, weight in result.before.items()
    )


def require_scale_divided_out(**options: Any) -> None:
    """In float64, with a scale that doubles in every step: it must be that of the loss, not that of
    the next step."""
    growing = LossScaling("dynamic", initial=2.0**10, growth_interval=1)
    scaled = train(Run(MODEL, scaling=growing, **options))
    plain = train(Run(MODEL))
    assert [r.loss_scale for r in scaled.reports] == [2.0**10, 2.0**11, 2.0**12]
    for ours, expected in zip(scaled.reports, plain.reports, strict=True):
        assert ours.loss == pytest.approx(expected.loss, rel=CLOSE)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=CLOSE)
    assert not (wrong := differing(scaled.after, plain.after)), wrong


@pytest.mark.slow
def test_the_scale_divided_out_is_the_one_multiplied_in() -> None:
    require_scale_divided_out()


def require_nan_lowers_the_scale() -> None:
    """As an inf does."""
    strict = LossScaling("dynamic", initial=2.0**10, hysteresis=1)
    for bad in (INF, -INF, NAN):
        run = Run(MODEL, "bf16", strict, plant=(0, 1, bad))
        engine = make_engine(None, run)
        for step, batch in enumerate(batches(run)):
            engine.step(share_of(None, batch), run.lr, step)
        assert engine.optimizer.scaler.state_dict() == {
            "scale": 2.0**9,
            "growth_tracker": 1,
            "hysteresis_tracker": 0,
        }


@pytest.mark.slow
def test_a_nan_is_no_good_step() -> None:
    require_nan_lowers_the_scale()


# zero_size, gradients reduced
PLANTED = [
    ("fp32", 0, (False, True)),
    ("bf16", 1, (True,)),
    ("fp16", 0, (False,)),
]


def plant_everywhere(
    mesh: DeviceMesh,
    compute: str,
    zero_size: int,
    when: tuple[bool, ...],
    before: Callable[[], None] | None = None,
    every: int = 1,
) -> None:
    """One bad element in each piece of each rank's gradients, before or after they are reduced, one
    at a time.

    every: of these places only each so manieth, on all ranks in turn.
    """
    if before is not None:
        before()
    scaling = LossScaling("constant", 1024.0) if compute == "fp16" else None
    run = Run({**MODEL, "layers": 2, "bias": False}, compute, scaling, zero_size=zero_size)
    engine = make_engine(mesh, run)
    optimizer = engine.optimizer
    assert engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0).outcome == "applied"
    expected = [t.clone() for t in state(optimizer)]
    for reduced in when:
        places = list(elements(optimizer, reduced))
        most = int(optimizer.world.max_(torch.tensor(len(places))))
        for n in range(0, most * optimizer.world.size, every):
            rank, place = divmod(n, most)
            for buffer in optimizer.all_buffers():
                buffer.grads.fill_(0.5)
            declare(optimizer)
            if rank == optimizer.world.rank:
                places[place % len(places)][-n % 2] = (INF, -INF, NAN)[n % 3]
            for chunk in range(len(optimizer.buffers) if not reduced else 0):
                optimizer.reduce(chunk)
            report = optimizer.step(1e-2, torch.tensor(0.0))
            assert report.outcome == "skipped_overflow", (
                f"element {place} of rank {rank} was not seen, {reduced=}"
            )
            assert all(
                torch.equal(a, b) for a, b in zip(state(optimizer), expected, strict=True)
            ), "a skipped step changed something"
    for buffer in optimizer.all_buffers():
        buffer.grads.fill_(0.5)
    declare(optimizer)
    assert optimizer.step(1e-2).outcome == "applied"
    assert not torch.equal(state(optimizer)[0], expected[0]), (
        "nothing can be changed, so the test proves nothing"
    )


def elements(optimizer: ParallelAMPOptimizer, reduced: bool) -> Iterator[Tensor]:
    """First and last gradient element of each piece; of those in the own slice if the gradients are
    reduced."""
    for buffer in optimizer.all_buffers():
        low, high = (buffer.start, buffer.stop) if reduced else (0, buffer.size)
        for piece in buffer.pieces:
            first = max(piece.start, low)
            last = min(piece.stop, high)
            if first < last:
                yield buffer.grads[first : last : max(1, last - first - 1)]


def state(optimizer: ParallelAMPOptimizer) -> list[Tensor]:
    buffers = optimizer.all_buffers()
    return [
        optimizer.applied_steps,
        *(t for b in buffers for t in (b.weights, *b.saved().values())),
    ]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("every", [7, *slow((1,))])
@pytest.mark.parametrize(
    ("compute", "zero_size", "when"), PLANTED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_one_bad_gradient_element_anywhere_makes_every_rank_skip_and_changes_nothing(
    compute: str, zero_size: int, when: tuple[bool, ...], every: int
) -> None:
    axes = {"pp": 2, "dp": 2, "tp": 2}
    run_ranks(plant_everywhere, axes, compute=compute, zero_size=zero_size, when=when, every=every)


def halves(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float16)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_half_products_overflow_where_half_does(sign: float) -> None:
    """65504 is the largest half; what rounds to it lies below 65520."""
    a = halves([256.0, 1.0])
    for rest, expected in (
        (0.0, 65504.0),
        (15.0, 65504.0),
        (15.992, 65504.0),
        (16.0, INF),
        (17.0, INF),
    ):
        b = halves([sign * 255.875], [sign * rest])
        assert product(a, b).item() == sign * expected
        assert (a @ b).item() == product(a, b).item(), (
            "torch's own half product does something else"
        )
    big = halves([2.0**15] * 3)
    small = halves([1.0], [1.0], [-1.0])
    assert product(big, small).item() == 2.0**15, (
        "only the result is rounded, not what it is summed from"
    )


def test_half_products_are_rounded_once() -> None:
    """Eighths, few enough that FP32 sums are exact, so that float64 knows the one right answer."""
    random = torch.Generator().manual_seed(0)
    a, b = (
        (torch.randint(-400, 401, shape, generator=random) / 8).half()
        for shape in ((33, 70), (70, 17))
    )
    exact = a.double() @ b.double()
    assert torch.equal(product(a, b), exact.half())
    for wide in (torch.float32, torch.float16):
        total = torch.ones(33, 17, dtype=wide)
        add_product_(total, a, b)
        torch.testing.assert_close(total, (1 + exact).to(wide), rtol=2.0**-10, atol=0)
    total = torch.zeros(33, 17)
    add_product_(total, a, b)
    assert torch.equal(total, exact.half().float()), (
        "a gradient is rounded to half before it is added"
    )


@pytest.mark.parametrize("shape", [(700, 200), (3, 1 << 17), (1, 1), (0, 8)])
def test_a_narrow_product_of_any_size_is_added_to_the_last_row(shape: tuple[int, int]) -> None:
    """One too large to be widened at once is, in pieces, or row by row."""
    total = torch.randn(shape)
    a = torch.randn(shape[0], 4).bfloat16()
    b = torch.randn(4, shape[1]).bfloat16()
    expected = total + (a @ b).float()
    add_product_(total, a, b)
    assert torch.equal(total, expected)


def test_a_weight_gradient_beyond_half_is_inf_in_the_main_gradient() -> None:
    total = torch.zeros(1, 1)
    add_product_(total, halves([256.0, 1.0]), halves([255.875], [16.0]))
    assert total.item() == INF


@pytest.mark.parametrize("size", [1, 300])
@pytest.mark.parametrize("drop", [0.0, 1e-12])
def test_half_attention_is_computed_wide_and_rounded_once(drop: float, size: int) -> None:
    """Scores that half could not hold are no problem. With a drop that never falls: the other way
    it is computed."""
    config = ModelConfig(**MODEL, attention_dropout=drop)
    attention = Attention(config, Context(plan("fp16")), "a")
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 8, 4, generator=random).half() for n in (4, 1, 1))
    query = size * query
    key = size * key
    assert ((query.float() @ key.float().mT).abs().max() > 65504) == (size == 300)
    mixed = attention._core_attention(query, key, value, MicrobatchInfo(0, torch.arange(2)))
    wide = [z.double().expand(2, 4, 8, 4) for z in (query, key, value)]
    expected = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=True)
    assert mixed.dtype == torch.float16
    torch.testing.assert_close(
        mixed.double(), expected, rtol=0.51 * torch.finfo(torch.float16).eps, atol=1e-5
    )


def test_an_ordinary_half_module_gives_fp32_gradients_to_the_buffer() -> None:
    """Small gradients of many micro-batches add up, which they would not in half."""
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    attach_whole(layer)
    optimizer = ParallelAMPOptimizer([layer], plan("bf16"), clip=0.0)
    for size in [1.0] + [2.0**-9] * 256:
        layer(torch.full((1, 4), size, dtype=torch.bfloat16)).sum().backward()
    assert optimizer.all_buffers()[0].grads[:4].tolist() == [1.5] * 4
