"""Laws of the all-gather of texts: what every rank said, each once; what travels does not grow with
the ranks."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm import gathered_texts as module
from megaprec.comm.axis import Axis
from megaprec.comm.gathered_texts import gather_entries, gather_texts
from tests.ranks import on_ranks

CPU = torch.device("cpu")


@on_ranks(dp=3)
def test_each_text_comes_once_in_the_order_of_the_last_rank_that_has_it(mesh: DeviceMesh) -> None:
    world = Axis.world(mesh)
    texts = [b"one " * 9, b"", b"one " * 9]
    for round_bytes in (7, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_ROUND", round_bytes)
            assert gather_texts(texts[world.rank], world, CPU) == [b"", b"one " * 9]
    values = [{"a": 1, "b": [0.1, None]}, {"a": 2, "ü": "\n"}, {"a": 1, "b": [0.1, None]}]
    # later ranks win
    assert gather_entries(values[world.rank], world, CPU) == {
        "a": 1,
        "b": [0.1, None],
        "ü": "\n",
    }


@dataclass(frozen=True)
class Counted(Axis):
    """Rank 0 of a world whose ranks say `texts`; counts the bytes of each collective's tensors."""

    texts: tuple[bytes, ...] = ()
    moved: list[int] = field(default_factory=list)

    def gather(self, tensor: Tensor) -> Tensor:
        heads = {text: module._announcement(text) for text in {*self.texts}}
        assert torch.equal(heads[self.texts[0]], tensor)
        whole = torch.cat([heads[text] for text in self.texts])
        self.moved.append(whole.nbytes)
        return whole

    def sum_(self, tensor: Tensor) -> Tensor:
        last = {text: rank for rank, text in enumerate(self.texts)}
        whole = b"".join(sorted(last, key=last.__getitem__))
        start = sum(self.moved[1:])
        self.moved.append(tensor.nbytes)
        return tensor.copy_(
            torch.frombuffer(bytearray(whole[start : start + len(tensor)]), dtype=torch.uint8)
        )


def test_what_travels_is_24_bytes_a_rank_and_each_different_text_once() -> None:
    ranks = 16_384
    stages = 8
    values = [
        {f"layers.{stage}.weight.{n}": [0.1 * n, 2.0, 3.0] for n in range(300)}
        for stage in range(stages)
    ]
    texts = [json.dumps(value).encode() for value in values]
    world = Counted(
        "world", 0, ranks, texts=tuple(texts[rank * stages // ranks] for rank in range(ranks))
    )
    whole: dict[str, Any] = {}
    for value in values:
        whole |= value
    assert gather_entries(values[0], world, CPU) == whole
    assert world.moved == [24 * ranks, sum(map(len, texts))]


def test_no_message_is_taken_apart_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = Tensor.tolist
    monkeypatch.setattr(
        Tensor, "tolist", lambda tensor: (sizes.append(tensor.numel()), plain(tensor))[1]
    )
    draw = random.Random(0)
    texts = tuple(draw.randbytes(draw.randrange(2000)) for _ in range(500))
    assert gather_texts(texts[0], Counted("world", 0, len(texts), texts=texts), CPU) == [*texts]
    assert max(sizes, default=0) <= 16
