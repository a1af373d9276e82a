"""A tensor in chunks is whole: its parts do not overlap and have one dtype, or it is refused by its
name."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tests.other_systems import CONFIGS
from tests.refusals import raises, sentence
from tools.convert.core.chunks import Chunked
from tools.convert.core.names import megatron
from tools.convert.core.rules import matches
from tools.convert.core.tensors import Stored
from tools.convert.hf.config import from_hugging_face
from tools.convert.megatron.distributed import merge_chunks

NAME = "decoder.layers.2.mlp.linear_fc2.weight"  # [24, 40]
QUARTERS = [(0, 0), (0, 20), (12, 0), (12, 20)]


def whole(
    folder: Path,
    offsets: list[tuple[int, int]],
    dtypes: tuple[torch.dtype, ...] = (),
    single: bool = False,
) -> Tensor:
    """The tensor of quarters at `offsets`: rows of 12 and columns of 20, filled with their
    numbers."""
    model: ModelConfig = from_hugging_face(CONFIGS["llama"])
    found = matches(megatron(True, False, model), model)
    held = {
        m.foreign: Chunked(m.foreign, m.shape, [((0,) * len(m.shape), stored(folder, 0, m.shape))])
        for m in found
    }
    chunks = [
        (offset, stored(folder, number, (12, 20), dtypes[number] if dtypes else torch.float32))
        for number, offset in enumerate(offsets)
    ]
    if single:
        held[NAME] = Chunked(NAME, (), [((), stored(folder, 0, ()))])
    else:
        held[NAME] = Chunked(NAME, (24, 40), chunks)
    return merge_chunks(folder, found, held, model)[NAME].read()


def stored(
    folder: Path, number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Stored:
    file = folder / f"{number}{dtype}"
    file.write_bytes(
        torch.full((12 * 20,), float(number), dtype=dtype).view(torch.uint8).numpy().tobytes()
    )
    return Stored(file, dtype, shape, 0)


def test_parts_in_any_order_make_it(tmp_path: Path) -> None:
    expected = (
        torch.tensor([[0.0, 1.0], [2.0, 3.0]]).repeat_interleave(12, 0).repeat_interleave(20, 1)
    )
    assert torch.equal(whole(tmp_path, QUARTERS), expected)
    assert torch.equal(whole(tmp_path, QUARTERS[::-1]), 3 - expected)


@pytest.mark.parametrize("other", [(0, 0), (0, 20), (6, 0), (11, 19), (12, 0), (5, 10)])
def test_parts_that_overlap_are_refused(other: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence("convert.parts_overlap", name=NAME)):
        whole(tmp_path, [*QUARTERS[:3], other])


def test_parts_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=sentence("convert.ranks_dtypes", name=NAME, dtypes="bfloat16 and float32"),
    ):
        whole(tmp_path, QUARTERS, (torch.float32, torch.float32, torch.bfloat16, torch.float32))


def test_a_single_number_is_refused(tmp_path: Path) -> None:
    with raises("convert.tensor_scalar"):
        whole(tmp_path, [], single=True)


def test_a_part_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence("convert.part_missing", name=NAME)):
        whole(tmp_path, QUARTERS[:3])
