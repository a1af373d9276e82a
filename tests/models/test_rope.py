"""Rotary positions tell distances, and each way of stretching them does what it is there for."""

import math

import pytest
import torch
from torch import Tensor

from models.attention.rope import Rotate, frequencies, rotary_tables
from models.rope_scaling import RopeScaling, attention_factor

DIMS = 64
BASE = 10000.0
WIDE = torch.float64
ORIGINAL = 128
PLAIN = frequencies(RopeScaling(), BASE, DIMS, 1)


def scaled(kind: str, factor: float = 4.0, **parameters: float | bool) -> RopeScaling:
    return RopeScaling.model_validate(
        {"kind": kind, "factor": factor, "original_max_position_embeddings": ORIGINAL, **parameters}
    )


def turned(x: Tensor, dims: int) -> Tensor:
    """x [d] at each of ten positions: [10, d]."""
    tables = rotary_tables(RopeScaling(), BASE, dims, 10, WIDE)
    return Rotate.apply(x.expand(10, 1, 1, -1), *tables)[:, 0, 0]


@pytest.mark.parametrize("dims", [16, 6])
def test_a_product_of_turned_vectors_depends_on_their_distance_alone(dims: int) -> None:
    query, key = torch.randn(2, 16, dtype=WIDE, generator=torch.Generator().manual_seed(0))
    products = turned(query, dims) @ turned(key, dims).T
    for distance in range(-9, 10):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)
    assert not torch.isclose(products[0, 0], products[0, 1])
    # the rest does not turn
    assert torch.equal(turned(query, dims)[:, dims:], query[dims:].expand(10, -1))


def test_the_way_back_is_the_transpose() -> None:
    x = torch.randn(5, 2, 3, 8, dtype=WIDE, requires_grad=True)
    for scaling in (RopeScaling(), scaled("yarn")):
        tables = rotary_tables(scaling, BASE, 6, 5, WIDE)
        assert torch.autograd.gradcheck(lambda x, tables=tables: Rotate.apply(x, *tables), (x,))


def test_linear_puts_factor_positions_in_the_place_of_one() -> None:
    torch.testing.assert_close(
        rotary_tables(RopeScaling(kind="linear", factor=4.0), BASE, DIMS, 37, WIDE)[1][::4],
        rotary_tables(RopeScaling(), BASE, DIMS, 10, WIDE)[1],
        rtol=1e-12,
        atol=1e-12,
    )


def test_dynamic_leaves_short_sequences_alone_and_stretches_the_slowest_pair_by_what_is_needed() -> (
    None
):
    assert torch.equal(frequencies(scaled("dynamic"), BASE, DIMS, ORIGINAL), PLAIN)
    ratio = PLAIN / frequencies(scaled("dynamic"), BASE, DIMS, 3 * ORIGINAL)
    assert ratio[0] == 1  # the fastest never
    assert ratio[-1].item() == pytest.approx(4 * 3 - (4 - 1), rel=1e-12)
    assert (ratio.diff() > 0).all()


def test_llama3_divides_long_wavelengths_leaves_short_ones_and_blends_between() -> None:
    ratio = PLAIN / frequencies(
        scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0), BASE, DIMS, 1
    )
    wavelength = 2 * math.pi / PLAIN
    assert (ratio[wavelength < ORIGINAL / 4] == 1).all()
    assert (ratio[wavelength > ORIGINAL] - 4).abs().max() < 1e-12
    between = ratio[(wavelength > ORIGINAL / 4) & (wavelength < ORIGINAL)]
    assert len(between) and (between > 1).all() and (between < 4).all()


def test_yarn_leaves_pairs_that_turn_often_divides_those_that_turn_seldom_and_sharpens_attention() -> (
    None
):
    yarn = scaled("yarn", beta_fast=8.0, beta_slow=1.0)
    ratio = PLAIN / frequencies(yarn, BASE, DIMS, 1)
    turns = ORIGINAL * PLAIN / (2 * math.pi)
    assert (ratio[turns > 8][:-1] == 1).all() and (ratio[turns < 1][1:] - 4).abs().max() < 1e-12
    assert (ratio.diff() >= 0).all()
    assert attention_factor(yarn) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(scaled("yarn", attention_factor=1.7)) == 1.7
    cosine, _ = rotary_tables(yarn, BASE, DIMS, 1, WIDE)
    assert cosine[0].unique().item() == attention_factor(yarn)
