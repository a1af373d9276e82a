"""The laws of layouts that a user's own parallel layer attaches."""

import pytest
import torch
from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach, layout_of


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("shape", "dim"), [((3, 7), 1), ((2, 3, 5), 2), ((2, 3, 5), 1)])
def test_a_slice_with_padding_between_its_elements_is_refused_on_every_rank(
    shape: tuple[int, ...], dim: int, rank: int
) -> None:
    part = Part.cut("w", shape, dim, Axis("tp", rank, 2))
    with pytest.raises(ValueError, match=rf"^w: dim {dim} of .* does not divide by its 2 slices"):
        attach(nn.Parameter(torch.zeros(part.padded)), Layout((part,)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("shape", "dim"), [((7, 3), 0), ((1, 7), 1), ((3, 8), 1), ((2, 3, 4), 2), ((5,), 0)]
)
def test_a_slice_whose_padding_follows_all_of_its_elements_is_taken(
    shape: tuple[int, ...], dim: int, rank: int
) -> None:
    part = Part.cut("w", shape, dim, Axis("tp", rank, 2))
    layout = Layout((part,))
    parameter = attach(nn.Parameter(torch.zeros(part.padded)), layout)
    assert layout_of(parameter) == layout
