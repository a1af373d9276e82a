"""Flat ranges: each element of a logical tensor is saved by one rank, all save the same amount, and
any rectangle of it can be read.
"""

from itertools import pairwise
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megaprec.checkpoint import ranges
from megaprec.checkpoint.atomic import INDEX
from megaprec.checkpoint.reader import FORMAT, Store
from megaprec.checkpoint.snapshot import owned_ranges
from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach
from megaprec.errors import UserError
from megaprec.optim.model_buffers import buckets
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import plan
from tests.checkpoint.test_checkpoint import change_index, saved
from tests.refusals import raises, sentence

SHAPES = [(), (1,), (7,), (4, 5), (3, 1), (1, 6), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rectangles_of_a_range_are_its_elements_in_their_order(shape: tuple[int, ...]) -> None:
    elements = torch.arange(prod(shape)).view(shape)
    for first in range(prod(shape)):
        for last in range(first + 1, prod(shape) + 1):
            chunk = {"offset": [0] * len(shape), "shape": list(shape), "range": [first, last]}
            found = list(ranges.blocks(chunk))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            for offset, size, start in found:
                inside = elements[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
                assert inside.reshape(-1).tolist() == list(
                    range(first + start, first + start + prod(size))
                )
            assert sum(prod(size) for _, size, _ in found) == last - first


def cut(folder: Path, whole: torch.Tensor, dice: Random) -> Store:
    """A checkpoint of one tensor that is cut into slices along a dim, and each slice into ranges,
    at random."""
    dim = dice.randrange(whole.dim())
    chunks = []
    files = list[str]()
    ends = sorted({0, whole.shape[dim], *(dice.randrange(whole.shape[dim]) for _ in range(2))})
    for start, end in pairwise(ends):
        part = whole.narrow(dim, start, end - start).contiguous()
        places = sorted({0, part.numel(), *(dice.randrange(part.numel()) for _ in range(3))})
        for first, last in pairwise(places):
            name = f"model-{len(chunks):05d}.safetensors"
            files.append(name)
            save_file({"x": part.view(-1)[first:last].clone()}, folder / name)
            offset = [start if d == dim else 0 for d in range(whole.dim())]
            chunks.append(
                {"file": name, "offset": offset, "shape": list(part.shape), "range": [first, last]}
            )
    change_index(
        lambda index: index.update(
            files={name: (folder / name).stat().st_size for name in files},
            tensors={
                "weight/x": {"dtype": "float32", "shape": list(whole.shape), "chunks": chunks}
            },
        ),
        folder,
    )
    return Store(folder)


@pytest.mark.parametrize("seed", range(12))
def test_any_rectangle_of_a_tensor_in_ranges_can_be_read(seed: int, tmp_path: Path) -> None:
    dice = Random(seed)
    shape = [dice.randrange(1, 7) for _ in range(1 + seed % 3)]
    whole = torch.arange(float(prod(shape))).view(shape)
    store = cut(saved(tmp_path), whole, dice)
    assert torch.equal(store.read("weight", "x"), whole)
    store.require("weight/x", shape)
    for _ in range(20):
        ends = [sorted(dice.sample(range(n + 1), 2)) for n in shape]
        offset = [a for a, _ in ends]
        size = [b - a for a, b in ends]
        expected = whole[tuple(slice(a, b) for a, b in ends)]
        assert torch.equal(store.rectangle("weight/x", offset, size), expected)


@pytest.mark.parametrize(
    "wrong", [[0], [2, 2], [3, 1], [0, 10**6], [0, 1, 2], [-1, 2], ["0", 1], 5]
)
def test_a_range_that_is_none_is_refused(wrong: object, tmp_path: Path) -> None:
    path = saved(tmp_path)
    change_index(
        lambda index: index["tensors"]["weight/conv.weight"]["chunks"][0].update(range=wrong), path
    )
    with pytest.raises(UserError, match=sentence("checkpoint.index_digest_differs", index=INDEX)):
        Store(path)


def test_a_range_that_the_file_does_not_have_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path)
    change_index(
        lambda index: index["tensors"]["weight/conv.weight"]["chunks"][0].update(range=[0, 30]),
        path,
    )
    with raises("checkpoint.part_missing", key="weight/conv.weight"):
        Store(path).read("weight", "conv.weight")


def test_checkpoints_of_the_format_before_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path, value=3.0)
    change_index(lambda index: index.update(format=FORMAT - 1), path)
    assert (Store(path).read("weight", "conv.weight") == 3).all()


# --- which rank saves what, in layouts that no test could start


def stage(
    tp: Axis, tied: tuple[int, ...], vocab: int = 32000, hidden: int = 1024, kv: int = 8
) -> list[nn.Parameter]:
    """One stage of a Llama-like model: 4 layers, the embedding, its norms; nothing is allocated."""
    made = []

    def add(
        dim: int | None,
        *parts: tuple[str, int, int],
        shards: int | None = None,
        ties: tuple[int, ...] = (),
    ) -> None:
        cuts = [
            Part.cut(name, (rows, columns) if columns else (rows,), dim, tp, shards)
            for name, rows, columns in parts
        ]
        shape = (sum(part.padded[0] for part in cuts), *cuts[0].padded[1:])
        made.append(
            attach(nn.Parameter(torch.empty(shape, device="meta")), Layout(tuple(cuts), tied=ties))
        )

    add(0, ("embedding", vocab, hidden), ties=tied)
    for n in range(4):
        add(None, (f"{n}.norm", hidden, 0))
        add(0, (f"{n}.query", hidden, hidden))
        add(
            0,
            (f"{n}.key", hidden // 4, hidden),
            (f"{n}.value", hidden // 4, hidden),
            shards=min(kv, tp.size),
        )
        add(1, (f"{n}.output", hidden, hidden))
        add(0, (f"{n}.gate", 3 * hidden, hidden), (f"{n}.up", 3 * hidden, hidden))
        add(1, (f"{n}.down", hidden, 3 * hidden))
    return made


# name and shard of a slice -> ranges of it, and its size
Saved = dict[tuple[str, int], list[tuple[int, int, int]]]


def saved_by(
    pp: int, dp: Axis, zero: int, tp: Axis, tied: tuple[int, ...], bucket: int, **sizes: int
) -> Saved:
    found: Saved = {}
    shards = Axis("zero", dp.rank % zero, zero)
    for alike in buckets(stage(tp, tied, **sizes), plan("bf16"), bucket):
        buffer = Buffer(alike, plan("bf16"), dp, shards, pp, torch.device("meta"))
        for piece, first, last in owned_ranges(buffer, pp):
            span = first - piece.start, last - piece.start, piece.stop - piece.start
            found.setdefault((piece.part.name, piece.part.shard), []).append(span)
    return found


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("tp", "dp", "zero", "tied", "kv"),
    [
        (8, 64, 64, (), 8),
        (8, 64, 8, (), 2),
        pytest.param(16, 32, 1, (), 4, marks=pytest.mark.slow),
        pytest.param(1, 512, 512, (), 8, marks=pytest.mark.slow),
        (2, 8, 8, (0, 1), 8),
        (4, 2, 1, (0, 1, 3), 1),
    ],
)
def test_each_element_is_saved_once_and_by_no_rank_much_more_than_by_another(
    tp: int, dp: int, zero: int, tied: tuple[int, ...], kv: int
) -> None:
    """512 ranks of a stage, or fewer whose embedding is tied. Each has at most 1.1 times the mean,
    and 64 elements of each buffer: its alignment.
    """
    together: Saved = {}
    loads = []
    for p in tied or (0,):
        for d in range(dp):
            for t in range(tp):
                mine = saved_by(
                    p, Axis("dp", d, dp), zero, Axis("tp", t, tp), tied, bucket=4_000_000, kv=kv
                )
                loads.append(
                    sum(last - first for spans in mine.values() for first, last, _ in spans)
                )
                for (name, shard), spans in mine.items():
                    owner = (name, shard) if name == "embedding" else (f"{p}.{name}", shard)
                    together.setdefault(owner, []).extend(spans)
    assert max(loads) <= 1.1 * sum(loads) / len(loads) + 64 * 12
    for part, spans in together.items():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == spans[-1][2], part
        assert all(a[1] == b[0] for a, b in pairwise(spans)), f"{part}: a hole, or written twice"
