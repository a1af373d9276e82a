"""The laws of what a step keeps and sends in which dtype: bits that no layout changes, and bytes
that add up."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import SGD, AdamW
from megaprec.optim.state.flat_buffer import Buffer, GradReduction
from megaprec.precision.plan import DTYPES, LossScaling, PrecisionPlan, plan
from tests.given import declare
from tests.layouts import Run, train_all
from tests.logical import LAYOUTS, SHAPES, Case, Result, differing, results
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks
from tests.refusals import raises

CPU = torch.device("cpu")
SCALE = LossScaling("constant", 1024.0)
SCALED = {"scaling": SCALE}
NONE = {"masters": "none", "rounding": "stochastic"}
CASES = {
    "fp32": Case("fp32"),
    "bf16": Case("bf16", bad=(1,)),
    "split": Case("bf16", {"masters": "split"}, bad=(1,), restart=2),
    "bf16 moments": Case("bf16", {"moments": "bf16"}, bad=(0,), restart=2),
    "stochastic weights": Case("bf16", {"rounding": "stochastic"}, bad=(1,), restart=3),
    "no masters": Case("bf16", NONE, bad=(1,), restart=2),
    "all bf16": Case("bf16", {**NONE, "moments": "bf16", "gradients": "bf16"}, fine=8, bad=(1,)),
    "split, bf16 gradients": Case(
        "bf16", {"masters": "split", "moments": "bf16", "gradients": "bf16"}, fine=8
    ),
    "fp16 gradients": Case("fp16", {"gradients": "fp16", **SCALED}, fine=8, bad=(2,), restart=3),
    "fp16, bf16 moments": Case("fp16", {"moments": "bf16", **SCALED}, rule=("sgd", {})),
    "some fp32": Case(
        "bf16", {**NONE, "moments": "bf16", "keep_fp32": ("norm.*", "output.*")}, restart=1
    ),
}


@cache
def alone() -> dict[str, Result]:
    return dict(zip(CASES, results(list(CASES.values()), {}), strict=True))


def require_same_bits(
    axes: dict[str, int],
    names: Iterable[str] = CASES,
    before: Callable[[], None] | None = None,
    **options: Any,
) -> None:
    """Those of one process."""
    cases = [replace(CASES[name], options=CASES[name].options | options) for name in names]
    alone()
    for name, result in zip(names, results(cases, axes, before), strict=True):
        assert not (wrong := differing(result, alone()[name])), f"{name}: {wrong}"
        assert [r.outcome for r in result.reports] == [r.outcome for r in alone()[name].reports]
        assert result.numbers == alone()[name].numbers
        for ours, theirs in zip(result.reports, alone()[name].reports, strict=True):
            if ours.outcome == "applied":  # another logical element is spoiled in each layout
                assert ours.num_zeros == theirs.num_zeros
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [*LAYOUTS, {"pp": 2, "tp": 2, "dp": 2}], ids=str)
def test_no_layout_changes_a_bit_whatever_is_kept(axes: dict[str, int]) -> None:
    """Also with skipped steps, and carried over into a new optimizer."""
    require_same_bits(axes)


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nor_does_the_number_of_ranks_that_share_a_copy(size: int) -> None:
    require_same_bits({"dp": 4}, zero_size=size)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """From each step on, through `state_dict` and through a checkpoint; also from before the first
    step."""
    plain = [replace(case, restart=None, bad=(1,), steps=3) for case in CASES.values()]
    expected = dict(zip(CASES, results(plain, {"dp": 2}), strict=True))
    for number in range(3):
        folders = [tmp_path / f"{number}{name}" if number != 1 else None for name in CASES]
        cases = [
            replace(case, restart=number, folder=f) for case, f in zip(plain, folders, strict=True)
        ]
        for name, result in zip(CASES, results(cases, {"dp": 2}), strict=True):
            assert not (wrong := differing(result, expected[name])), (
                f"{name} resumed before step {number}: {wrong}"
            )


@pytest.mark.slow
def test_a_skipped_step_changes_and_redraws_nothing() -> None:
    for bad, steps, restart in ((2, 3, None), (0, 1, None), (0, 1, 0)):
        cases = [replace(case, restart=None, bad=()) for case in CASES.values()]
        before = results([replace(case, steps=steps - 1) for case in cases], {"dp": 2})
        after = results(
            [replace(case, steps=steps, bad=(bad,), restart=restart) for case in cases], {"dp": 2}
        )
        for name, ours, theirs in zip(CASES, after, before, strict=True):
            assert ours.reports[-1].outcome == "skipped_overflow"
            assert not (wrong := differing(ours, theirs)), f"{name}, {restart=}: {wrong}"


def away(wide: Tensor) -> Tensor:
    """FP32 to the nearest bfloat16, ties away from zero, by way of float64."""
    mantissa, exponent = torch.frexp(wide.double())
    return (
        mantissa.sign() * torch.ldexp((mantissa.abs() * 256 + 0.5).floor() / 256, exponent)
    ).bfloat16()


def round_ties_away() -> None:
    """Whatever made the weights from FP32 masters is done again in another way."""
    init = ParallelAMPOptimizer.__init__
    step = ParallelAMPOptimizer.step

    def again(self: ParallelAMPOptimizer) -> None:
        self.wait()
        for buffer in self.all_buffers():
            if buffer.masters is not None:
                buffer.own_weights.copy_(away(buffer.masters))
            buffer.start_all_gather()()

    def first(self: ParallelAMPOptimizer, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        again(self)

    def stepped(self: ParallelAMPOptimizer, *args: Any) -> Any:
        report = step(self, *args)
        again(self)
        return report

    ParallelAMPOptimizer.__init__ = first
    setattr(ParallelAMPOptimizer, "step", stepped)  # noqa: B010  # its arguments are only passed on


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout", [(1, 1, 1), (2, 1, 1), (1, 1, 2)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_split_masters_train_like_fp32_masters_bit_for_bit(layout: tuple[int, int, int]) -> None:
    run = Run(MODELS["llama tied biased"], "bf16", steps=8, before=round_ties_away)
    fp32, split = train_all([run, replace(run, changes={"masters": "split"}, before=None)], *layout)
    assert fp32.reports == split.reports
    for name, weights in fp32.after.items():
        assert torch.equal(split.after[name], weights), name
        assert not torch.equal(fp32.before[name], weights)


def ties() -> nn.Linear:
    """A layer whose every weight lies in the middle between two bfloat16 numbers."""
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(
            (torch.arange(4096).view(64, 64) << 16 | 0x3F808000).to(torch.int32).view(torch.float32)
        )
        layer.weight.mul_(2.0**-100)
        assert not torch.equal(away(layer.weight), layer.weight.bfloat16())
    attach_whole(layer)
    return layer


def weights_at_the_start(mesh: DeviceMesh) -> Tensor:
    optimizer = ParallelAMPOptimizer([ties()], plan("bf16", masters="split"), mesh, average=False)
    return optimizer.all_buffers()[0].weights.clone()


def test_split_weights_are_the_same_on_all_ranks_before_the_first_step() -> None:
    """Ties too, which the owner of an element rounds away from zero."""
    ranks = run_ranks(weights_at_the_start, {"dp": 2})
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[0].view(64, 64), away(ties().weight))


N = 4096


def alike(made: Any, value: float, rule: Any, **options: Any) -> ParallelAMPOptimizer:
    """N weights that all have one value, for what is true in the mean."""
    layer = nn.Linear(N, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    attach_whole(layer)
    return ParallelAMPOptimizer([layer], made, rule=rule, weight_decay=0.0, clip=0.0, **options)


@pytest.mark.slow
def test_a_bf16_average_does_not_stand_still() -> None:
    """With a decay of 0.999, where rounding to nearest stops at a quarter of the way."""
    steps = 700
    decay = 0.999
    optimizer = alike(plan("bf16", moments="bf16"), 0.0, AdamW(betas=(0.9, decay)))
    (buffer,) = optimizer.all_buffers()
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(steps):
        buffer.grads[:N] = 1.0
        declare(optimizer)
        optimizer.step(1e-3)
        nearest = (nearest.float() * decay + (1 - decay)).bfloat16()
    mean = buffer.state["exp_avg_sq"][:N].double().mean().item()
    exact = 1 - decay**steps
    # between bfloat16 numbers that are a half or more; each step errs by half of it or less,
    # deviation
    unit = 2.0**-8
    assert abs(mean - exact) < 5 * unit / 2 * (steps / N) ** 0.5
    assert nearest <= 0.26 < exact - 0.2


@pytest.mark.parametrize("masters", ["fp32", "none"])
def test_small_updates_of_bf16_weights_add_up_in_the_mean(masters: str) -> None:
    made = plan("bf16", masters=masters, rounding="stochastic")
    steps = 40
    change = 2.0**-13
    runs = [alike(made, 1.0, SGD(momentum=0.0), seed=seed) for seed in (0, 0, 1)]
    to_nearest = alike(plan("bf16", masters="none"), 1.0, SGD(momentum=0.0))
    for optimizer in (*runs, to_nearest):
        for _ in range(steps):
            optimizer.all_buffers()[0].grads[:N] = -1.0
            declare(optimizer)
            optimizer.step(change)
    found = [optimizer.all_buffers()[0].weights[:N].double() for optimizer in (*runs, to_nearest)]
    # between bfloat16 numbers from one to two
    unit = 2.0**-7
    expected = 1 + steps * change
    # of the numbers went up once: a coin that falls so often, and of which N fell
    part = steps * change / unit
    assert part < 1
    assert abs(found[0].mean() - expected) < 5 * unit * (part * (1 - part) / N) ** 0.5
    assert (found[3] == 1).all(), "to nearest nothing moves"
    assert torch.equal(found[0], found[1]), "not reproducible"
    assert not torch.equal(found[0], found[2]), "the seed does nothing"


def spy() -> list[torch.dtype]:
    """dtypes of all that this rank sends from now on, as far as torch is told of it."""
    sent: list[torch.dtype] = []
    for name in ("isend", "all_reduce", "reduce_scatter_tensor"):
        inner = getattr(dist, name)

        def send(tensor: Tensor, *args: Any, inner: Any = inner, **options: Any) -> Any:
            sent.append(tensor.dtype)
            return inner(tensor, *args, **options)

        setattr(dist, name, send)
    return sent


Spied = tuple[torch.dtype, Tensor, Tensor, str]


def spied(
    mesh: DeviceMesh,
    plans: list[PrecisionPlan],
    values: tuple[float, ...] | None = None,
    before: Callable[[], None] | None = None,
) -> list[Spied]:
    """For each plan: dtype of what was sent over dp, the gradients of this rank, their sum, and the
    outcome."""
    if before is not None:
        before()
    found: list[Spied] = []
    sent = spy()
    for made in plans:
        layer = nn.Linear(64, 4, bias=False)
        attach_whole(layer)
        optimizer = ParallelAMPOptimizer([layer], made, mesh, average=False, clip=0.0)
        (buffer,) = optimizer.all_buffers()
        random = torch.Generator().manual_seed(optimizer.dp.rank)
        if values is None:
            buffer.grads[:256] = torch.randn(256, generator=random)
        else:
            buffer.grads[:256] = torch.tensor(values * 64)
        mine = buffer.grads[:256].clone()
        declare(optimizer)
        del sent[:]
        buffer.start_reduce()()
        (dtype,) = set(sent)
        whole = optimizer.dp.gather(buffer.local_grads.float())[:256].to(buffer.grads.dtype)
        # for it is going to be summed once more, which is no error if it is finite
        buffer.grads.div_(2)
        found.append((dtype, mine, whole, optimizer.step(1e-3).outcome))
    return found


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_gradients_travel_as_the_plan_says(compute: str) -> None:
    require_planned_travel(compute)


def require_planned_travel(compute: str, before: Callable[[], None] | None = None) -> None:
    """Each gradient is rounded to that dtype, summed, and rounded once more."""
    wanted = [
        (gradients, reduce)
        for gradients in ("fp32", compute)
        for reduce in ("", "fp32", "bf16", "fp16")
    ]
    plans = [
        plan(compute, gradients=gradients, reduce=reduce, scaling=SCALE)
        for gradients, reduce in wanted
    ]
    ranks = run_ranks(spied, {"dp": 2}, plans=plans, before=before)
    for number, (gradients, reduce) in enumerate(wanted):
        for dtype, mine, whole, _ in (rank[number] for rank in ranks):
            assert dtype == DTYPES[reduce or gradients], f"{gradients=}, {reduce=}"
            assert mine.dtype == whole.dtype == DTYPES[gradients]
            terms = [rank[number][1].to(dtype).double() for rank in ranks]
            assert torch.equal(whole, torch.stack(terms).sum(0).to(dtype).to(DTYPES[gradients])), (
                f"{gradients=}, {reduce=}"
            )  # type: ignore[union-attr]


def test_a_sum_that_overflows_on_its_way_is_skipped() -> None:
    """Its terms are no infinities, and in FP32 it would be none."""
    reduces = ("fp16", "fp32", "bf16")
    plans = [
        plan("fp16", reduce=reduce, scaling=LossScaling("constant", 1.0)) for reduce in reduces
    ]
    for rank in run_ranks(spied, {"dp": 2}, plans=plans, values=(4e4, 1.0, -1.0, -4e4)):
        for reduce, (_, mine, whole, outcome) in zip(reduces, rank, strict=True):
            assert mine.isfinite().all()
            assert whole.isinf().sum() == (128 if reduce == "fp16" else 0)
            assert outcome == ("skipped_overflow" if reduce == "fp16" else "applied")


def reduced(
    made: PrecisionPlan, dp: Axis, shards: Axis, grad: Tensor
) -> tuple[list[tuple[torch.dtype, bool]], Tensor]:
    """What a buffer sends over dp, as dtype and whether each rank needs its own chunk alone, and the
    gradients of its slice afterwards. Nothing is summed."""
    sent: list[tuple[torch.dtype, bool]] = []

    def start_sum(axis: Axis, gradients: Tensor, only_local: bool) -> Callable[[], object]:
        sent.append((gradients.dtype, only_local))
        return lambda: None

    model = nn.Linear(8, 8, bias=False)
    attach_whole(model)
    reduction = GradReduction(start_sum=start_sum)
    buffer = Buffer([model.get_parameter("weight")], made, dp, shards, 0, CPU, reduction=reduction)
    buffer.grads.copy_(grad)
    buffer.start_reduce()()
    return sent, buffer.local_grads


@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_gradients_are_scattered_if_each_rank_has_a_slice_of_its_own(
    ranks: int, shards: int
) -> None:
    grad = torch.zeros(8 * 8 + 64 * (ranks - 1))
    sent, _ = reduced(plan("fp32"), Axis("dp", 0, ranks), Axis("zero", 0, shards), grad)
    assert sent == [(torch.float32, ranks == shards)]


def test_gradients_that_do_not_travel_are_not_rounded_to_the_dtype_of_travel() -> None:
    grad = torch.linspace(0.1, 0.9, 64)
    assert not torch.equal(grad.bfloat16().float(), grad)
    made = plan("bf16", gradients="fp32", reduce="bf16")
    sent, left = reduced(made, Axis("dp"), Axis("zero"), grad)
    assert sent == [(torch.float32, True)]
    assert torch.equal(left, grad)


def kept_fp32_travels(mesh: DeviceMesh) -> dict[torch.dtype, list[torch.dtype]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    sent = spy()
    attach_whole(model)
    seen: dict[torch.dtype, list[torch.dtype]] = {}
    for gradients in ("fp32", "bf16"):
        made = plan("bf16", gradients=gradients, reduce="bf16", keep_fp32=("1.*",))
        for buffer in ParallelAMPOptimizer([model], made, mesh, average=False).all_buffers():
            del sent[:]
            buffer.start_reduce()()
            seen.setdefault(buffer.weights.dtype, []).extend(dict.fromkeys(sent))
    return seen


def test_what_is_kept_in_fp32_travels_in_fp32() -> None:
    for seen in run_ranks(kept_fp32_travels, {"dp": 2}):
        assert seen == {torch.float32: [torch.float32] * 2, torch.bfloat16: [torch.bfloat16] * 2}


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"masters": "split"}, {**NONE, "moments": "bf16"}, {"gradients": "bf16"}],
    ids=str,
)
def test_what_is_kept_in_fp32_is_trained_as_in_an_fp32_model_and_the_rest_as_without(
    changes: dict[str, Any],
) -> None:
    pattern = ("norm.*", "scale", "output.*", "embedding.weight")
    kept = {
        name
        for name in SHAPES
        if name.partition(".")[0] in ("norm", "scale", "output", "embedding")
    }
    mixed = Case("bf16", {**changes, "keep_fp32": pattern}, fine=8, restart=2, bad=(1,))
    half = replace(mixed, plan=changes)
    for axes in ({}, {"dp": 2}):
        ours, bf16, fp32 = results([mixed, half, replace(mixed, compute="fp32", plan={})], axes)
        for kind, tensors in ours.kinds.items():
            for name, values in tensors.items():
                assert torch.equal(values, (fp32 if name in kept else bf16).kinds[kind][name]), (
                    f"{kind}/{name}"
                )
        assert {name for name, w in ours.kinds["held"].items() if w.dtype == torch.float32} == kept


class Mixed(nn.Module):
    """Handles the dtypes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x.bfloat16()).float()).bfloat16())


def test_a_model_of_both_dtypes_keeps_each_in_a_buffer_of_its_own() -> None:
    model = Mixed()
    attach_whole(model)
    optimizer = ParallelAMPOptimizer(
        [model], plan("bf16", masters="split", moments="bf16", keep_fp32=("norm.*",))
    )
    model(torch.randn(4, 6)).sum().backward()
    assert optimizer.step(1e-2).outcome == "applied"
    buffers = {buffer.weights.dtype: buffer for buffer in optimizer.all_buffers()}
    assert buffers.keys() == {torch.float32, torch.bfloat16}
    norm = buffers[torch.float32]
    assert set(norm.parameters) == {model.norm.weight, model.norm.bias}
    assert norm.grads.dtype == torch.float32 and norm.remainder is None
    assert norm.masters is not None and norm.masters.data_ptr() == norm.weights.data_ptr()
    assert {values.dtype for values in norm.state.values()} == {torch.float32}
    assert {values.dtype for values in buffers[torch.bfloat16].state.values()} == {torch.bfloat16}


def test_parts_of_one_parameter_are_held_in_one_dtype() -> None:
    with raises(
        "optimizer.keep_fp32_part_of_parameter",
        names="query.weight and key.weight and value.weight",
    ):
        results([Case("bf16", {"keep_fp32": ("key.*",)})], {})
    results([Case("bf16", {"keep_fp32": ("key.*", "query.*", "value.*")}, steps=1)], {})


# What one rank keeps of each parameter: always, and its share over the ranks of a copy. Moments are
# two.
BYTES: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "bf16": ("bf16", {}, 6, 12),
    "fp16 with fp16 gradients": ("fp16", {"gradients": "fp16"}, 4, 12),
    "fp32": ("fp32", {}, 8, 8),
    "split": ("bf16", {"masters": "split"}, 6, 10),
    "bf16 moments": ("bf16", {"moments": "bf16"}, 6, 8),
    "bf16 throughout": ("bf16", {**NONE, "gradients": "bf16", "moments": "bf16"}, 4, 4),
    "split, bf16 throughout": (
        "bf16",
        {"masters": "split", "gradients": "bf16", "moments": "bf16"},
        4,
        6,
    ),
}


def measured(
    mesh: DeviceMesh, sizes: tuple[int, ...]
) -> dict[tuple[str, int], tuple[float, float]]:
    """Bytes for each parameter, as said and as found in all tensors that hang on the optimizer,
    after a step."""
    found = {}
    for name, (compute, changes, _, _) in BYTES.items():
        for size in sizes:
            layer = nn.Linear(64, 256, bias=False)  # cut without a remainder
            attach_whole(layer)
            optimizer = ParallelAMPOptimizer(
                [layer], plan(compute, **changes), mesh, average=False, zero_size=size
            )
            (layer(torch.ones(1, 64, dtype=layer.weight.dtype)).sum() * optimizer.scale).backward()
            optimizer.step(1e-2)
            kept = sum(storages(optimizer.all_buffers()).values())
            found[name, size] = optimizer.bytes_per_parameter, kept / optimizer.num_elements
    return found


def storages(buffers: list[Buffer]) -> dict[int, int]:
    """Bytes by address of every tensor's memory that is reached from the buffers and their
    parameters."""
    found: dict[int, int] = {}
    for buffer in buffers:
        values = [*vars(buffer).values(), *buffer.state.values(), *buffer.parameters]
        values += [v for p in buffer.parameters for v in (p.grad, *vars(p).values())]
        for tensor in (v for v in values if isinstance(v, Tensor)):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dp", [1, 4])
def test_bytes_per_parameter_are_those_of_the_formula(dp: int) -> None:
    for rank in run_ranks(measured, {"dp": dp}, sizes=(1, 2, 4) if dp == 4 else (1,)):
        for (name, size), (said, kept) in rank.items():
            _, _, always, shared = BYTES[name]
            assert said == kept == always + shared / size, f"{name}, {size} ranks to a copy"


def test_the_cases_are_finite_and_differ_from_each_other() -> None:
    """Or equal bits would prove little."""
    held = {name: result.kinds["held"] for name, result in alone().items()}
    for result in alone().values():
        assert all(
            values.isfinite().all()
            for tensors in result.kinds.values()
            for values in tensors.values()
        )
    for name in ("bf16 moments", "stochastic weights", "no masters", "all bf16"):
        assert not all(torch.equal(held[name][n], held["bf16"][n]) for n in SHAPES), name
