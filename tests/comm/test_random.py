"""The laws of random numbers: they have the right distribution and are the same however the model
is cut."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.comm.random import _normal_pairs, bits, keep, key, normal, normal_part
from megaprec.precision.plan import plan
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, attention_dropout, dropout
from tests.layouts import COVERING, LAYOUTS, Result, Run, batches, make_engine, share_of, train_all
from tests.models.test_parity import CLOSE, MODELS, differing
from tests.other_systems import usually

DROPS = {"dropout": 0.2, "attention_dropout": 0.1}
NAMES = ["llama", "gpt2"]
N = 1 << 18
INDEX = torch.arange(N)


def test_bits_are_those_of_splitmix64_as_it_is_published() -> None:
    """The first five numbers of the generator begun with 1234567, whose state grows by a constant
    with each number."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [number % 2**64 for number in bits(1234567, torch.arange(1, 6)).tolist()] == published


def runs() -> list[Run]:
    """Each model with the sequence whole and cut, and once more in other micro-batches and another
    schedule."""
    plain = [Run({**MODELS[name], **DROPS}, steps=2, micro_batch=4) for name in NAMES]
    return [
        *plain,
        *(replace(run, sequence=True) for run in plain),
        replace(plain[0], micro_batch=2, kind="gpipe"),
    ]


@cache
def alone() -> list[Result]:
    return train_all(runs()[: len(NAMES)])


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout", usually(COVERING, LAYOUTS), ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_dropout_and_initial_weights_are_the_same_in_every_layout(
    layout: tuple[int, int, int],
) -> None:
    for n, result in enumerate(train_all(runs(), *layout)):
        expected = alone()[n % len(NAMES)]
        assert all(
            torch.equal(result.before[name], weight) for name, weight in expected.before.items()
        )
        for step, (ours, theirs) in enumerate(zip(result.reports, expected.reports, strict=True)):
            assert ours.loss == pytest.approx(theirs.loss, rel=CLOSE)
            assert not (wrong := differing(result.grads[step], expected.grads[step])), (
                f"run {n}: {wrong}"
            )


def test_evaluation_drops_nothing() -> None:
    for name in NAMES:
        dropping = Run({**MODELS[name], **DROPS})
        plain = Run(MODELS[name])
        share = share_of(None, batches(plain)[0])
        engine = make_engine(None, dropping)
        expected = make_engine(None, plain)
        assert engine.evaluate(share) == expected.evaluate(share)
        assert engine.step(share, 0.0, 0).loss != expected.step(share, 0.0, 0).loss


@pytest.mark.parametrize("shape", [(7,), (7, 5), (4, 6, 3)], ids=str)
def test_a_slice_is_drawn_as_it_lies_in_the_whole(shape: tuple[int, ...]) -> None:
    whole = normal_part(Part("w", shape), 3, 0.5, torch.float64)
    for dim, size in product(range(len(shape)), (2, 3, 4, 5)):
        parts = [Part.cut("w", shape, dim, Axis("tp", rank, size)) for rank in range(size)]
        slices = [normal_part(part, 3, 0.5, torch.float64) for part in parts]
        assert all(
            torch.equal(part.take(whole), values)
            for part, values in zip(parts, slices, strict=True)
        )
        assert torch.equal(torch.cat(slices, dim), whole)
    one_by_one = torch.stack(
        [normal(key(3, "w"), torch.tensor(place)) for place in range(whole.numel())]
    )
    assert torch.equal(one_by_one.double().mul_(0.5).view(shape), whole)


def test_large_tensors_are_drawn_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("w", (50, 3))
    whole = normal_part(part, 3, 1.0, torch.float32)
    for block in (1, 7, 16):
        monkeypatch.setattr("megaprec.comm.random._BLOCK", block)
        assert torch.equal(normal_part(part, 3, 1.0, torch.float32), whole)


@cache
def drawn(seed: int, name: str) -> Tensor:
    return normal(key(seed, name), INDEX).double()


@pytest.mark.parametrize("name", ["a", "layers.0.attention.query.weight"])
def test_normal_numbers_are_normal(name: str) -> None:
    """Bounds of six standard errors, and 2.5 / sqrt(n) for the largest distance of the
    distributions (p = 7e-6)."""
    x = drawn(0, name)
    for power, (mean, variance) in enumerate(
        [(0, 1), (1, 2), (0, 15), (3, 96), (0, 945), (15, 10170)], 1
    ):
        assert abs(x.pow(power).mean() - mean) < 6 * (variance / N) ** 0.5, f"moment {power}"
    expected = torch.special.ndtr(x.sort().values)
    assert (expected - (INDEX + 0.5) / N).abs().max() < 2.5 / N**0.5
    for beyond in (1.0, 2.0, 3.0, 4.0):  # both tails
        rate = torch.special.ndtr(torch.tensor(-beyond, dtype=torch.float64)).item()
        for tail in (x, -x):
            assert abs((tail > beyond).double().mean().item() - rate) < 6 * (rate / N) ** 0.5
    assert 4 < x.abs().max() < 6.5


def test_each_number_is_the_quantile_of_its_bits() -> None:
    """Against the normal quantile in float64, over every order of magnitude of the probability that
    31 bits hold."""
    powers = 2 ** torch.arange(31)
    halves = torch.cat([powers - 1, powers, (powers * 1.37).long(), (powers * 1.99).long()]).clamp(
        max=2**31 - 1
    )
    for words, sign in ((halves, 1), (halves | (1 << 31), -1)):
        both = _normal_pairs((words << 32) | words)
        expected = sign * -torch.special.ndtri((halves.double() + 0.5) / 2**32)
        for n in (0, 1):
            torch.testing.assert_close(both[:, n].double(), expected, rtol=0, atol=2e-6)


def test_neighbours_keys_and_tensors_are_independent() -> None:
    x = drawn(0, "a")
    for lag in (1, 2, 3, 4, 7, 64, 1024, 4096):  # the two numbers of a word, words, rows
        for one, other in ((x, x), (x.square() - 1, x.square() - 1), (x.abs(), x)):
            size = (one.std() * other.std()).item()
            assert (
                abs((one[lag:] * other[:-lag]).mean() - one.mean() * other.mean())
                < 6 * size / N**0.5
            ), lag
    streams = [drawn(seed, name) for seed, name in product((0, 1), ("a", "b"))]
    for i, j in product(range(len(streams)), repeat=2):
        correlation = torch.corrcoef(torch.stack((streams[i], streams[j])))[0, 1]
        assert (abs(correlation) < 6 / N**0.5) == (i != j)


def test_a_matrix_of_numbers_has_the_spectrum_of_independent_ones() -> None:
    """The edges of Marchenko and Pastur: dependence between rows or columns would show in singular
    values."""
    x = normal_part(Part("w", (512, 256)), 0, 1.0, torch.float64)
    values = torch.linalg.svdvals(x)
    assert values[0] == pytest.approx(512**0.5 + 256**0.5, rel=0.03)
    assert values[-1] == pytest.approx(512**0.5 - 256**0.5, rel=0.06)


def test_the_standard_deviation_is_the_one_asked_for() -> None:
    assert normal_part(Part("w", (512, 512)), 0, 0.02, torch.float64).std().item() == pytest.approx(
        0.02, rel=0.01
    )


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_elements_are_kept_with_the_probability_asked_for(probability: float) -> None:
    rate = keep(key(0, "x"), INDEX, probability).double().mean().item()
    assert abs(rate - probability) <= 6 * (probability * (1 - probability) / N) ** 0.5


def masks(context: Context, name: str, place: MicrobatchInfo) -> tuple[Tensor, Tensor]:
    """What becomes of ones: residual [s, b, h] and attention weights [b, n, s, s]."""
    ones = torch.ones(16, len(place.samples), 32), torch.ones(len(place.samples), 4, 16, 16)
    return dropout(ones[0], 0.25, context, name, place), attention_dropout(
        ones[1], 0.25, context, name, place
    )


def test_every_step_layer_seed_and_sample_has_a_mask_of_its_own() -> None:
    context = Context(plan("fp32"))
    place = MicrobatchInfo(3, torch.arange(4))
    first = masks(context, "layers.0", place)
    others = [
        masks(context, "layers.1", place),
        masks(context, "layers.0", MicrobatchInfo(4, place.samples)),
        masks(context, "layers.0", MicrobatchInfo(3, place.samples + 4)),
        masks(replace(context, seed=1), "layers.0", place),
    ]
    for which, dims in ((0, (0, 1, 2)), (1, (0, 1, 2, 3))):
        kept = first[which] > 0
        assert set(first[which].unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        for other in others:
            agree = ((other[which] > 0) == kept).double().mean().item()
            assert abs(agree - (0.75**2 + 0.25**2)) < 6 * (0.25 / kept.numel()) ** 0.5, (
                "the masks are not independent"
            )
        for dim in dims:
            assert not torch.equal(kept.narrow(dim, 0, 1), kept.narrow(dim, 1, 1)), (
                f"dim {dim} repeats"
            )
        again = masks(context, "layers.0", MicrobatchInfo(3, place.samples.flip(0)))[which] > 0
        assert torch.equal(again.flip(1 - which), kept), (
            "the mask of a sample depends on where it lies"
        )


def test_nothing_is_dropped_without_a_place_or_a_probability() -> None:
    context = Context(plan("fp32"))
    x = torch.randn(4, 2, 8)
    place = MicrobatchInfo(0, torch.arange(2))
    assert dropout(x, 0.5, context, "a", None) is x
    assert dropout(x, 0.0, context, "a", place) is x
    weights = torch.randn(2, 4, 4, 4)
    assert attention_dropout(weights, 0.5, context, "a", None) is weights
    assert attention_dropout(weights, 0.0, context, "a", place) is weights
