"""A step reports the loss and the tokens of each data set of a blend as a plain model counts them,
in every layout, and nothing else changes by it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_report import StepReport
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.passes import Sources
from tests import layouts, oracle
from tests.layouts import Recording, Run, fragments
from tests.ranks import run_ranks

LENGTH = 16
SAMPLES = 8
MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 48,
    "max_positions": 32,
    "init_std": 0.4,
}
RUN = Run(model=MODEL, compute="fp64", clip=0.0, length=LENGTH, samples=SAMPLES, steps=1)
# the third of four data sets has no sample in this batch, the last none that counts if masked
OF_SAMPLE = torch.tensor([1, 0, 1, 3, 0, 0, 1, 0])
SETS = 4


def batch_of(masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    dice = torch.Generator().manual_seed(5)
    tokens = torch.randint(MODEL["vocab"], (SAMPLES, LENGTH), generator=dice)
    targets = torch.randint(MODEL["vocab"], (SAMPLES, LENGTH), generator=dice)
    if not masked:
        return tokens, targets, None
    mask = (torch.rand(SAMPLES, LENGTH, generator=dice) < 0.4).float()
    mask[OF_SAMPLE == 3] = 0
    return tokens, targets, mask


def stepped(mesh: DeviceMesh | None, run: Run, masked: bool) -> tuple[StepReport, list[Any]]:
    """The report of one step on this rank's share, and the weights before it."""
    engine = layouts.make_engine(mesh, run)
    assert isinstance(engine, Engine) and isinstance(engine.optimizer, Recording)
    before = fragments(engine.optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    share = layouts.share_of(mesh, batch_of(masked))
    numbers = OF_SAMPLE[share.first : share.first + len(share.tokens)]
    return engine.step(replace(share, sources=Sources(numbers, SETS)), 0.0, 0), before


def counted_plainly(weights: dict[str, Tensor], masked: bool) -> list[tuple[float, float]]:
    """The sum of the losses and the tokens of each data set, one token after the other."""
    tokens, targets, mask = batch_of(masked)
    logits = oracle.logits(ModelConfig(**MODEL), weights, tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    sums = [[0.0, 0.0] for _ in range(SETS)]
    for sample, row in enumerate(losses.view(SAMPLES, LENGTH).tolist()):
        for position, loss in enumerate(row):
            weight = 1.0 if mask is None else mask[sample, position].item()
            sums[OF_SAMPLE[sample]][0] += weight * loss
            sums[OF_SAMPLE[sample]][1] += weight
    return [(loss, count) for loss, count in sums]


@pytest.mark.cases(1, sample=2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"tp": 2}, {"sequence": True}),
        ({}, {}),
        ({"pp": 2}, {}),
        ({"cp": 2}, {}),
        ({"dp": 2}, {}),
        ({"pp": 2, "dp": 2}, {"micro_batch": 1}),
        ({"tp": 2, "dp": 2}, {"micro_batch": 4}),
        ({"dp": 2}, {"zero_size": 2}),
        ({"tp": 2}, {"shards": 4}),
    ],
)
def test_each_data_set_has_the_loss_of_its_own_tokens(
    layout: dict[str, int], changes: dict[str, Any], masked: bool
) -> None:
    axes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1} | layout
    ranks = run_ranks(stepped, axes, run=replace(RUN, **changes), masked=masked)
    weights = layouts.assemble([before for _, before in ranks])
    expected = counted_plainly(weights, masked)
    for report, _ in ranks:
        assert len(report.sources) == SETS
        for (total, count), source in zip(expected, report.sources, strict=True):
            assert source.tokens == count
            if count:
                assert abs(source.loss - total / count) < 1e-9
            else:
                assert source.loss != source.loss
        # together they are the loss of the step
        counted = [source for source in report.sources if source.tokens]
        tokens = sum(source.tokens for source in counted)
        together = sum(source.loss * source.tokens for source in counted) / tokens
        assert abs(together - report.loss) < 1e-9


@pytest.mark.cases(0)
@pytest.mark.parametrize("layout", [{"tp": 2, "dp": 2}, {"pp": 2}])
def test_in_canonical_numerics_they_have_the_same_bits_in_every_layout(
    layout: dict[str, int],
) -> None:
    run = replace(RUN, compute="bf16", shards=4)
    ((one, _),) = run_ranks(stepped, {"pp": 1, "dp": 1, "tp": 1}, run=run, masked=True)
    axes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1} | layout
    for report, _ in run_ranks(stepped, axes, run=run, masked=True):
        assert repr(report.sources) == repr(one.sources)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_what_else_is_reported_and_trained_has_the_same_bits(family: str) -> None:
    run = replace(RUN, model={**MODEL, "family": family, "z_loss": 1e-3})
    if family == "mixtral":
        run = replace(run, model={**run.model, "experts": 4, "experts_per_token": 2})
    with_sources, without = layouts.make_engine(None, run), layouts.make_engine(None, run)
    share = layouts.share_of(None, batch_of(True))
    for number in range(3):
        plain = without.step(share, 1e-2, number)
        told = with_sources.step(replace(share, sources=Sources(OF_SAMPLE, SETS)), 1e-2, number)
        assert not plain.sources
        assert replace(told, sources=()) == plain
    for ours, theirs in zip(
        with_sources.optimizer.all_buffers(), without.optimizer.all_buffers(), strict=True
    ):
        assert torch.equal(ours.saved()["weight"], theirs.saved()["weight"])


def test_a_step_with_data_sets_sends_one_message_more_and_micro_batches_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = replace(RUN, micro_batch=1)
    engine = layouts.make_engine(None, run)
    share = layouts.share_of(None, batch_of(False))
    world = type(engine.optimizer.world)
    summed = world.sum_
    sent = list[int]()

    def counting(axis: Any, values: Tensor) -> Tensor:
        sent.append(values.numel())
        return summed(axis, values)

    monkeypatch.setattr(world, "sum_", counting)
    engine.step(share, 1e-2, 0)
    plain = [*sent]
    sent.clear()
    engine.step(replace(share, sources=Sources(OF_SAMPLE, SETS)), 1e-2, 1)
    assert sorted(sent) == sorted([*plain, 2 * SETS])


def test_losses_that_are_not_finite_are_those_of_their_data_set() -> None:
    engine = layouts.make_engine(None, RUN)
    tokens, targets, _ = batch_of(False)
    share = layouts.share_of(None, (tokens, targets, None))
    share = replace(share, sources=Sources(OF_SAMPLE, SETS))
    state = engine.passes.begin(share, 0, engine.optimizer.scale)
    assert state.source_sums is not None
    losses = torch.ones(LENGTH, 2, dtype=torch.float64)
    losses[3, 1] = torch.inf
    state.source_sums.add(losses, slice(2, 4))
    assert state.source_sums.losses.tolist() == [0, LENGTH, 0, torch.inf]
