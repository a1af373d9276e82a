"""Norms under canonical numerics do not depend on the slices, and are those of `math.fsum`."""

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.optim.canonical import consensus as canonical_consensus
from megaprec.optim.canonical.consensus import CanonicalConsensus, in_slots, total_loss
from megaprec.optim.canonical.exact_sum import LENGTH
from megaprec.optim.decision.consensus import NUMBERS, StepNumbers

CPU = torch.device("cpu")
ORDERS = [2.0, 1.0, 1.5, 3.0, 7.3, math.inf]
EMPTY: Sequence[Tensor] = ()


class Together(Axis):
    """The ranks of a world one after the other: the maximum over them is known beforehand."""

    largest = 0.0

    def max_(self, tensor: Tensor) -> Tensor:
        return tensor.fill_(Together.largest)


def agreed(
    p: float,
    ranks: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor] = EMPTY,
    losses: Sequence[float] = (),
) -> StepNumbers:
    """Return what ranks with these gradients agree on. losses: of each rank; none: zeros."""
    Together.largest = max(
        (float(v.abs().max()) for rank in ranks for v in rank if len(v)), default=0.0
    )
    sent = []
    consensus = CanonicalConsensus(Axis("pp"), Together("world", 0, len(ranks)), p, CPU)
    for rank, gradients in enumerate(ranks):
        consensus = CanonicalConsensus(Axis("pp"), Together("world", rank, len(ranks)), p, CPU)
        numbers = dict.fromkeys(NUMBERS, 1.0)
        own = torch.tensor(losses[rank], dtype=torch.float64) if losses else None
        loss = in_slots(own, 1, Axis("dp", rank, len(ranks)), CPU)
        measured = consensus.measure(gradients, copies)
        sent.append(consensus.pack(measured, {**numbers, "loss": loss}))
    return consensus.read(torch.stack(sent).sum(0))


def split(values: Tensor, seed: int, ranks: int) -> list[list[Tensor]]:
    """Return slices of the values, cut at odd places, for each rank."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, len(values), (13,), generator=generator).sort().values.tolist()
    pieces = list(values.tensor_split(cuts))
    return [pieces[rank::ranks] for rank in range(ranks)]


def gradients(kind: str) -> Tensor:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(3))
    sizes = {"usual": 1.0, "small": 1e-43, "large": 5e37}
    return values.clamp(-4, 4) * sizes[kind]


def expected(values: Tensor, p: float) -> float:
    if p == math.inf:
        return float(values.abs().max())
    exponent = math.frexp(float(values.abs().max()))[1]
    scaled = values.double().abs() * 2.0**-exponent
    return math.fsum(scaled.pow(p).tolist()) ** (1 / p) * 2.0**exponent


@pytest.mark.parametrize("p", ORDERS)
def test_a_norm_does_not_depend_on_the_slices_and_is_exact(p: float) -> None:
    for kind in ("usual", "small", "large"):
        values = gradients(kind)
        whole = agreed(p, [[values]])
        assert float(whole["norm"]) == pytest.approx(expected(values, p), rel=1e-14)
        assert bool(whole["finite"])
        assert whole["zeros"].sum() == len(values) - values.count_nonzero()
        for seed in range(3):
            cut = agreed(p, split(values, seed, seed + 1))
            assert torch.equal(cut["norm"], whole["norm"]), (kind, seed)
            assert cut["zeros"].sum() == whole["zeros"].sum()


def exact_sum(p: float, pieces: Sequence[Tensor]) -> Fraction:
    """Return the sum of powers before it is rounded."""
    numbers = CanonicalConsensus(Axis("pp"), Together("world"), p, CPU).measure(pieces, EMPTY)[1][
        : LENGTH - 1
    ]
    return Fraction(sum(int(limb) << (32 * n) for n, limb in enumerate(numbers.tolist())))


def test_powers_have_the_same_bits_in_every_slice_and_without_padding_they_have_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = gradients("usual")
    Together.largest = float(values.abs().max())
    (pieces,) = split(values, 1, 1)
    assert exact_sum(1.5, pieces) == exact_sum(1.5, [values])
    monkeypatch.setattr(
        canonical_consensus, "_powers", lambda block, e, p, length: block.double().abs_().pow_(p)
    )
    unpadded = exact_sum(1.5, pieces), exact_sum(1.5, [values])
    if (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
    ):  # whose vectors and tails of vectors differ in powers
        assert unpadded[0] != unpadded[1]


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_in_gradients_and_copies(p: float, bad: float) -> None:
    values = torch.ones(100)
    values[70] = bad
    assert not bool(agreed(p, split(values, 1, 2))["finite"])
    assert not bool(agreed(p, [[torch.ones(5)]], [values])["finite"])
    assert not math.isfinite(float(agreed(p, [[values]])["norm"]))


@pytest.mark.parametrize("p", ORDERS)
def test_no_gradients_and_zeros_have_a_norm_of_zero(p: float) -> None:
    assert float(agreed(p, [[], [torch.zeros(3)]])["norm"]) == 0.0
    assert agreed(p, [[], [torch.zeros(3)]])["zeros"].sum() == 3


@pytest.mark.parametrize("p", ORDERS)
def test_the_loss_is_the_exact_sum_whatever_the_norm(p: float) -> None:
    losses = [0.1, 0.2, 0.3]
    gradients = [[torch.tensor([3.0, -4.0])], [], [torch.ones(5)]]
    assert float(agreed(p, gradients, losses=losses)["loss"]) == math.fsum(losses)


def test_the_sum_of_losses_is_exact_in_any_order() -> None:
    losses = torch.tensor([1e16, 1.0, -1e16, 1e-3], dtype=torch.float64)
    for order in ([0, 1, 2, 3], [3, 0, 1, 2], [1, 0, 3, 2]):
        assert total_loss(losses[order]) == math.fsum([1.0, 1e-3])
    assert math.isnan(total_loss(torch.tensor([math.nan, 1.0])))
    assert total_loss(torch.tensor([math.inf, 1.0])) == math.inf
