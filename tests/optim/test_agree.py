"""The laws of agreement: one sum in which all ranks learn the same norm, zeros and outcome, or that
they disagree."""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.comm.main_grad import forget_gradient
from megaprec.optim.decision.consensus import (
    DIGEST_BITS,
    NUMBERS,
    GradientMeasures,
    StepConsensus,
    digest,
)
from megaprec.optim.decision.scaler import DynamicGradScaler
from megaprec.optim.guards.rank_agreement import _sum_of_bits
from megaprec.optim.guards.step_agreement import describe_missing
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import SGD
from megaprec.precision.plan import LossScaling, plan
from tests.given import declare
from tests.logical import (
    INF,
    LAYOUTS,
    MODEL,
    SHAPES,
    Case,
    give,
    gradient,
    initial,
    make_optimizer,
    results,
)
from tests.ranks import run_ranks

CLOSE = 1e-12
CPU = torch.device("cpu")
NORMS = (1.0, 2.0, 3.0, 2.5, INF)


def whole_norm(step: int, p: float) -> float:
    return torch.linalg.vector_norm(
        torch.cat([gradient(n, step).flatten() for n in SHAPES]), p
    ).item()


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("axes", [{}, *LAYOUTS], ids=str)
def test_any_norm_is_that_of_the_gathered_gradients_and_clips(axes: dict[str, int]) -> None:
    """Half of what the first step's norm is stays; without momentum that is seen in the weights."""
    lr = 0.5
    plain = ("sgd", {"momentum": 0.0})
    limits = [whole_norm(0, p) / 2 for p in NORMS]
    options = [{"norm": p, "weight_decay": 0.0} for p in NORMS]
    cases = [
        Case("fp64", options=o, clip=clip, rule=plain, lr=lr, steps=2, bad=(1,))
        for o, clip in zip(options, limits, strict=True)
    ]
    for p, clip, result in zip(NORMS, limits, results(cases, axes), strict=True):
        good, bad = result.reports
        norm = whole_norm(0, p)
        assert good.grad_norm == pytest.approx(norm, rel=CLOSE), p
        assert (good.outcome, bad.outcome) == ("applied", "skipped_overflow"), p
        assert not bad.grad_norm < INF, "a step is skipped and its norm says nothing of it"
        for name in SHAPES:
            expected = initial(name, torch.float64) - lr * gradient(name, 0) * clip / (norm + 1e-6)
            torch.testing.assert_close(result.weights[name], expected, rtol=CLOSE, atol=CLOSE)


def norms_of_equal_elements(
    mesh: DeviceMesh, values: tuple[float, ...], norms: tuple[float, ...]
) -> list[Any]:
    """Count, norm and outcome of a step whose gradients all have one size."""
    found = []
    for value, p in product(values, norms):
        optimizer = make_optimizer(mesh, Case("fp32", options={"norm": p}))
        for own in (*optimizer._counted_grads, *optimizer._grads_counted_elsewhere):
            own.fill_(-value)
        for buffer in optimizer.all_buffers():  # already summed: nothing is to be added to it
            buffer.start_reduce = lambda: lambda: None  # type: ignore[method-assign]
        declare(optimizer)
        report = optimizer.step(0.0)
        found.append((optimizer.num_elements, report.grad_norm, report.outcome))
    return found


def test_neither_huge_nor_tiny_gradients_leave_the_range_of_any_norm() -> None:
    """Whose p-th powers would."""
    values = (3e38, 1e-30)
    norms = (1.0, 2.0, 3.0, 16.0, 100.0, INF)
    for rank in run_ranks(norms_of_equal_elements, {"dp": 2}, values=values, norms=norms):
        for (value, p), (count, norm, outcome) in zip(product(values, norms), rank, strict=True):
            assert outcome == "applied"
            assert norm == pytest.approx(value * count ** (1 / p), rel=1e-6), f"{value}, {p}"


@pytest.mark.cases(3, sample=1)
@pytest.mark.parametrize("axes", [{}, *LAYOUTS, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_zeros_are_counted_by_stage(axes: dict[str, int]) -> None:
    """A tied parameter by the first stage that holds it, and no padding."""
    (result,) = results([Case("fp32")], axes)
    for step, report in enumerate(result.reports):
        stages = [0] * axes.get("pp", 1)
        for kind in MODEL:
            for name, *_ in kind.parts:
                stages[min(kind.stages[0], len(stages) - 1)] += int(
                    (gradient(name, step) == 0).sum()
                )
        assert report.stage_zeros == tuple(stages) and all(stages)
        assert report.num_zeros == sum(stages)
        assert report.zero_ratio == pytest.approx(
            sum(stages) / sum(initial(n).numel() for n in SHAPES)
        )


def collectives_of_a_step(mesh: DeviceMesh, bad: bool) -> list[str]:
    """Which collectives over the whole mesh a step makes."""
    optimizer = make_optimizer(mesh, Case("bf16", options={"norm": 3.0}))
    made: list[str] = []
    for step in range(2):  # in steps number 1, 2, 4 and so on, copies of gradients are compared too
        give(optimizer, step)
        optimizer.step(1e-2)
    for name in (
        "start_sum_",
        "max_",
        "gather",
        "start_scatter_sum",
        "start_scatter_sum_",
        "start_gather_",
        "start_gather_from",
        "barrier",
    ):
        inner = getattr(Axis, name)

        def spy(self: Axis, *args: Any, name: str = name, inner: Callable[..., Any] = inner) -> Any:
            made.extend([name] if self.name == "world" else [])
            return inner(self, *args)

        setattr(Axis, name, spy)
    give(optimizer, 2)
    if bad:
        optimizer.all_buffers()[0].grads[0] = INF
    optimizer.step(1e-2)
    return made


@pytest.mark.slow
def test_a_step_asks_the_whole_mesh_once() -> None:
    for made in run_ranks(collectives_of_a_step, {"pp": 2, "dp": 2, "tp": 2}, bad=False):
        assert made == ["start_sum_"]
    for made in run_ranks(collectives_of_a_step, {"dp": 2}, bad=True):
        assert made[0] == "start_sum_" and set(made[1:]) == {"gather", "start_sum_"}, (
            "only then it looks for the offender"
        )


def state(optimizer: ParallelAMPOptimizer) -> list[Tensor]:
    optimizer.wait()
    tensors = [optimizer.applied_steps, *optimizer.scaler.tensors()]
    for buffer in optimizer.all_buffers():
        tensors += [buffer.weights, *buffer.saved().values()]
    return [tensor.clone() for tensor in tensors]


def forget_one(optimizer: ParallelAMPOptimizer) -> None:
    forget_gradient(optimizer.all_buffers()[-1].parameters[-1])


def forget_first(optimizer: ParallelAMPOptimizer) -> None:
    forget_gradient(optimizer.all_buffers()[0].parameters[0])


def double_scale(optimizer: ParallelAMPOptimizer) -> None:
    optimizer.scaler.scale.mul_(2)


def tolerate_less(optimizer: ParallelAMPOptimizer) -> None:
    optimizer.scaler.tensors()[2].sub_(1)


def step_ahead(optimizer: ParallelAMPOptimizer) -> None:
    optimizer.applied_steps.mul_(2**16)  # in FP32 only the exponent differs


DISAGREE: list[Callable[[ParallelAMPOptimizer], None]] = [
    forget_one, forget_first, double_scale, tolerate_less, step_ahead,
]  # fmt: skip


def disagree(mesh: DeviceMesh, culprit: int) -> list[str]:
    """What is said on this rank if only rank `culprit` does each thing; nothing may change by
    it."""
    said = []
    for do in DISAGREE:
        case = Case("fp16", {"scaling": LossScaling("dynamic", initial=16.0), "masters": "fp32"})
        optimizer = make_optimizer(mesh, case)
        give(optimizer, 0)
        assert optimizer.step(1e-2).outcome == "applied"
        give(optimizer, 1)
        if optimizer.world.rank == culprit:
            do(optimizer)
        before = state(optimizer)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step(1e-2)
        assert all(torch.equal(a, b) for a, b in zip(state(optimizer), before, strict=True)), (
            do.__name__
        )
        said.append(str(raised.value))
    return said


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    ("axes", "culprit", "place"),
    [
        ({"dp": 2}, 1, "stage 0, dp rank 1, tensor rank 0"),
        ({"tp": 2}, 0, "stage 0, dp rank 0, tensor rank 0"),
        ({"pp": 2, "dp": 2}, 2, "stage 1, dp rank 0, tensor rank 0"),
    ],
    ids=str,
)
def test_ranks_that_disagree_all_raise_and_change_nothing(
    axes: dict[str, int], culprit: int, place: str
) -> None:
    ranks = run_ranks(disagree, axes, culprit=culprit)
    for said in ranks:
        for message in said[:2]:
            assert message.startswith(
                "gradients are missing on some ranks of a stage only, so nothing was changed: "
            )
            assert f": {place} has none for " in message and message.count("has none for") == 1
            assert any(f"has none for {name};" in message for name in SHAPES), message
        assert all("ranks disagree about the loss scaler" in message for message in said[2:])
    assert len({said[0] for said in ranks}) == len({said[1] for said in ranks}) == 1, (
        "each rank is told the same"
    )


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4, bias=False)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        return (self.sometimes if branch else nn.Identity())(self.always(x)).sum()


def branches(mesh: DeviceMesh, before: Callable[[], None] | None) -> list[str]:
    """Outcomes, or what was said, for a branch that no rank takes, that all take, and that one
    takes."""
    if before is not None:
        before()
    said = []
    for taken in ((False, False), (True, True), (True, False), (False, True)):
        torch.manual_seed(0)
        model = Branch()
        attach_whole(model)
        optimizer = ParallelAMPOptimizer([model], plan("fp32"), mesh, average=False, rule=SGD(0.0))
        for branch in (taken[optimizer.dp.rank], False):  # two micro-batches
            model(torch.ones(2, 4), branch).backward()
        try:
            said.append(optimizer.step(1e-2).outcome)
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_branch_taken_on_one_rank_only_is_noticed() -> None:
    require_branches_noticed()


def require_branches_noticed(before: Callable[[], None] | None = None) -> None:
    """Not if no rank takes it, and a parameter that no rank uses is none of it."""
    for nobody, everybody, first, second in run_ranks(branches, {"dp": 2}, before=before):
        assert nobody == everybody == "applied"
        assert "dp rank 1, tensor rank 0 has none for sometimes.weight, " in first
        assert "dp rank 0, tensor rank 0 has none for sometimes.weight, " in second


def lacking_many(mesh: DeviceMesh) -> str:
    """All ranks lack five hundred parameters of long names; one rank lacks one more."""
    world = Axis.world(mesh)
    names = [f"{'very.' * 80}long.{n}.weight" for n in range(500)]
    return describe_missing(names + ["the.one"] * world.rank, world, CPU, f"rank {world.rank}")


def test_the_one_that_matters_is_named_among_many() -> None:
    first, second = run_ranks(lacking_many, {"dp": 2})
    assert first == second
    assert "rank 1 has none for the.one, very." in first and "498 more" in first
    assert len(first) < 4000


def tracked() -> Iterator[DynamicGradScaler]:
    """Every state that a search of a few steps may be in."""
    for scale, good, left in product(range(-8, 33), range(4), range(3)):
        scaler = DynamicGradScaler(LossScaling("dynamic", minimum=2.0**-10))
        scaler.load_state_dict(
            {"scale": 2.0**scale, "growth_tracker": good, "hysteresis_tracker": left}
        )
        yield scaler


def test_scalers_that_differ_have_different_digests() -> None:
    """But for about one in 2**18: no part of the state is left out."""
    digests = torch.stack([digest((*scaler.tensors(), torch.tensor(7.0))) for scaler in tracked()])
    same = ((digests[:, None] == digests).sum() - len(digests)).item() / 2
    assert len(digests) == 492 and same <= 4  # chance alone makes 0.46 pairs equal
    for power in range(-30, 32):
        for numbers in ((1.0,), (1.0, 3.0)):
            first, *others = numbers
            one, other = (
                [torch.tensor(x) for x in (f, *others)] for f in (first, first * 2.0**power)
            )
            assert (digest(one) == digest(other)) == (power == 0)
    assert digest([torch.tensor(1.0), torch.tensor(2.0)]) != digest(
        [torch.tensor(2.0), torch.tensor(1.0)]
    )


@pytest.mark.parametrize("ranks", [2, 3, 1000, 16_384, 131_071, 131_072])
@pytest.mark.parametrize("mine", [0, 1, 2**17 + 1, 2**DIGEST_BITS - 1])
def test_digests_are_compared_exactly_whatever_the_number_of_ranks(ranks: int, mine: int) -> None:
    """By arithmetic: the sum over the world is that of the numbers that two kinds of ranks send."""
    consensus = StepConsensus(Axis("pp"), Axis("world", 0, ranks), 2.0, torch.device("cpu"))
    zero = torch.zeros(2, dtype=torch.float64)
    one = torch.zeros((), dtype=torch.float64)

    def packed(digest_of_all: int) -> Tensor:
        numbers = dict.fromkeys(NUMBERS, 0.0)
        numbers["agrees_globally"] = numbers["agrees_in_pp_ranks"] = digest_of_all
        return consensus.pack(GradientMeasures(zero, one), numbers)

    # so the sum is exact in whatever order the ranks are added
    assert ranks * packed(mine).max() < 2**53
    for other in {mine, mine ^ 1, 2**DIGEST_BITS - 1 - mine}:
        for others in {1, ranks // 2, ranks - 1}:
            agreed = consensus.read((ranks - others) * packed(mine) + others * packed(other))
            is_same = (agreed["agrees_globally"], agreed["agrees_in_pp_ranks"])
            assert is_same == (other == mine,) * 2, (other, others)


@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=str)
def test_told_to_ignore_it_a_step_applies_what_is_finite_and_the_scale_falls(
    axes: dict[str, int],
) -> None:
    scaling = LossScaling("dynamic", initial=16.0, hysteresis=1)
    changes = {"scaling": scaling, "on_nonfinite": "ignore"}
    spoiled, clean = results([Case("fp16", changes, steps=1, bad=bad) for bad in ((0,), ())], axes)
    assert [r.reports[0].outcome for r in (spoiled, clean)] == ["applied_nonfinite", "applied"]
    assert not spoiled.reports[0].grad_norm < INF and spoiled.reports[0].offenders
    assert (spoiled.numbers["scaler"]["scale"], clean.numbers["scaler"]["scale"]) == (8.0, 16.0)
    assert spoiled.numbers["steps"] == clean.numbers["steps"] == 1
    wrong = sum(int((spoiled.weights[n] != clean.weights[n]).sum()) for n in SHAPES)
    assert wrong == 1, "all but the one element are what they would be without it"
    assert sum(int((~weights.isfinite()).sum()) for weights in spoiled.weights.values()) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_the_bits_of_parameters_of_any_width_are_summed_as_whole_numbers(
    dtype: torch.dtype,
) -> None:
    values = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    width = dtype.itemsize
    numbers = [
        int.from_bytes(raw[start : start + width], sys.byteorder, signed=width > 1)
        for start in range(0, len(raw), width)
    ]
    assert _sum_of_bits(nn.Parameter(values, requires_grad=False)) == sum(numbers)
