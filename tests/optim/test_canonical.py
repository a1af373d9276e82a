"""Canonical sums train the same bits on any number of dp ranks and stages, by every schedule, with
or without ZeRO."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megaprec.comm import tree
from megaprec.comm.axis import Axis
from megaprec.optim.canonical import numerics
from megaprec.optim.canonical.exact_sum import ExactSum
from megaprec.optim.canonical.microbatch_sums import MicrobatchTree
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.rules.update_rules import SGD
from megaprec.optim.state.flat_buffer import start_sum
from megaprec.precision.plan import LossScaling
from tests.flips import Setting, clean
from tests.layouts import Run
from tests.models.test_sentinel import MLP, judged, transients
from tests.optim.canonical_runs import (
    GPT2,
    LLAMA,
    MIXTRAL,
    canonical,
    differences,
    train,
    with_options,
)
from tests.ranks import run_ranks

torch.set_num_threads(1)
SEARCHING = LossScaling("dynamic", initial=2.0**24)  # the first steps are skipped
RUNS: dict[str, Run] = {
    "bf16": canonical(LLAMA, compute="bf16"),
    "fp16 with skipped steps": canonical(LLAMA, compute="fp16", scaling=SEARCHING),
    "experts": canonical({**MIXTRAL, "dropout": 0.1}, compute="bf16"),
    "fp32, p-norm": canonical(GPT2, compute="fp32", options={"norm": 1.5}),
    "maximum norm": canonical(LLAMA, compute="bf16", options={"norm": math.inf}),
    "stochastic": canonical(
        LLAMA, compute="bf16", changes={"rounding": "stochastic", "moments": "bf16"}
    ),
    "remainders": canonical(LLAMA, compute="bf16", changes={"masters": "split"}),
    "bf16 gradients": canonical(LLAMA, compute="bf16", changes={"gradients": "bf16"}),
    "fp64, sgd": canonical(LLAMA, compute="fp64", options={"rule": SGD()}),
    "RAdam": canonical(GPT2, compute="bf16", options={"rule": rule("RAdam")}),
    "two samples": canonical(LLAMA, compute="bf16", micro_batch=2),
}
LAYOUTS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2)]  # pp, dp
SCHEDULES = {
    1: [("1f1b", 0)],
    2: [("1f1b", 0), ("gpipe", 0), ("interleaved", 2), ("zb-h1", 0), ("zb-v", 2)],
}


def layouts_of(run: Run, pp: int, dp: int) -> list[Run]:
    """Return the run by each schedule of `pp` ranks, and with each way of sharing `dp` ranks."""
    kinds = SCHEDULES.get(pp, [("1f1b", 0), ("zb-h2", 0)])
    found = [replace(run, kind=kind, chunks=chunks) for kind, chunks in kinds]
    if dp > 1:
        found += [replace(run, zero_size=1), with_options(run, overlap=True, bucket=300)]
    if dp > 2:
        found += [with_options(replace(run, zero_size=2), overlap=True)]
    return found


@pytest.mark.slow
def test_two_data_ranks_train_the_bits_of_one_process() -> None:
    run = replace(RUNS["bf16"], steps=3)
    (alone,) = train([run])
    for options, other in zip(
        ("", "zero_size", "overlap"), train(layouts_of(run, 1, 2), dp=2), strict=True
    ):
        assert differences(alone, other) == [], options
    assert any(report.grad_norm > run.clip for report in alone.reports), "nothing is clipped"


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("pp", "dp"), LAYOUTS)
@pytest.mark.parametrize("name", RUNS)
def test_every_layout_trains_the_bits_of_one_process(name: str, pp: int, dp: int) -> None:
    run = RUNS[name]
    (alone,) = train([run])
    outcomes = {report.outcome for report in alone.reports}
    assert outcomes == ({"applied", "skipped_overflow"} if "skipped" in name else {"applied"})
    runs = layouts_of(run, pp, dp)
    for one, other in zip(runs, train(runs, pp, dp), strict=True):
        assert differences(alone, other) == [], (one.kind, one.zero_size, one.options)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_trains_the_bits_of_an_undisturbed_one() -> None:
    run = RUNS["fp16 with skipped steps"]
    (alone,) = train([run])
    (start,) = train([run], 1, 4, last=5)
    (middle,) = train(
        [replace(run, kind="zb-v", chunks=2)], 2, 1, start=start.state, first=5, last=7
    )
    (end,) = train([replace(run, zero_size=1)], 2, 2, start=middle.state, first=7)
    reports = [*start.reports, *middle.reports, *end.reports]
    assert differences(alone, replace(end, reports=reports)) == []


@pytest.mark.slow
def test_a_canonical_step_is_checked_by_the_sentinel() -> None:
    settings = [
        Setting(canonical=True),
        Setting(canonical=True, micro_batch=6, overlap=True, zero_size=1),
    ]
    assert run_ranks(clean, {"dp": 2}, settings=settings, steps=2) == [4, 4]
    zero_bubble = Setting(canonical=True, kind="zb-h1", compute="bf16")
    assert run_ranks(clean, {"pp": 2}, settings=[zero_bubble], steps=2) == [2, 2]
    for fault in judged("dp2", transients(1), Setting(canonical=True)):
        assert (fault["ranks"], fault["module"].startswith(MLP)) == ([1], True)


@pytest.mark.slow
def test_a_skipped_step_is_traced_to_its_micro_batch() -> None:
    run = canonical(LLAMA, compute="fp16", scaling=LossScaling("constant", 2.0**40), steps=2)
    for pp, dp in ((1, 1), (2, 2)):
        for report in train([run], pp, dp)[0].reports:
            offender = report.offenders[0]
            assert (report.outcome, offender.traced, offender.samples) == (
                "skipped_overflow",
                True,
                (0, 1),
            )


# --- the tests are tested


def micro_batches_are_added_one_after_the_other() -> None:
    MicrobatchTree._sibling = lambda self, start, stop: (
        (stop, stop + 1) if start == 0 else (0, start)
    )


def ranks_are_not_added_in_adjacent_pairs() -> None:
    def folded(terms: Sequence[Tensor]) -> Tensor:
        half = len(terms) // 2
        if len(terms) == 1:
            return terms[0]
        return folded([a + b for a, b in zip(terms[:half], terms[half:], strict=True)])

    tree.add_by_tree = folded


def ranks_are_added_as_is_fastest() -> None:
    numerics.CanonicalNumerics.start_sum = staticmethod(start_sum)


def blocks_are_added_in_fp32() -> None:
    def add_(self: ExactSum, values: Tensor) -> None:
        self._units += int(Fraction(float(values.float().sum())) * 2**1074)

    ExactSum.add_ = add_


def losses_of_a_rank_are_added_first() -> None:
    def in_slots(loss: Tensor, count: int, dp: Axis, device: torch.device) -> Tensor:
        slots = torch.zeros(dp.size, count, dtype=torch.float64)
        slots[dp.rank, 0] = torch.cumsum(loss, 0)[-1]
        return slots.view(-1)

    numerics.in_slots = in_slots


MUTATIONS: list[tuple[Callable[[], None], str]] = [
    (micro_batches_are_added_one_after_the_other, "bf16"),
    (ranks_are_not_added_in_adjacent_pairs, "bf16"),
    (ranks_are_added_as_is_fastest, "bf16"),
    (blocks_are_added_in_fp32, "fp32, p-norm"),
    (losses_of_a_rank_are_added_first, "fp64, sgd"),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("mutation", "name"), MUTATIONS, ids=lambda x: getattr(x, "__name__", x))
def test_a_sum_in_another_order_is_caught(mutation: Callable[[], None], name: str) -> None:
    run = replace(RUNS[name], before=mutation, steps=6)
    (alone,) = train([run])
    four = train([run, replace(run, zero_size=1)], dp=4)
    assert any(differences(alone, other) for other in four)
