"""Laws of scale: what a rank does to start must not grow with the number of ranks.

torch's fake process group is a world of any size of which one rank is there. What the others send
is taken to be what this rank sends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megaprec.comm import gloo
from megaprec.comm.axis import Axis
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.mesh import make_mesh
from parallel.pipeline.kinds import KINDS, schedule
from parallel.pipeline.p2p import CPU, P2P

MOST = 16  # calls that make groups, on each rank


def repeated(
    tensor: Tensor, rank: int, group: dist.ProcessGroup, into: Tensor | None = None
) -> Callable[[], Tensor]:
    whole = torch.cat([tensor] * group.size())
    return (lambda: whole) if into is None else (lambda: into.copy_(whole))


@contextmanager
def fake_world(size: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A world of `size` ranks; yields the calls that make groups."""
    calls: list[str] = []

    def counted(name: str, make: Callable[..., Any], *args: Any, **named: Any) -> Any:
        calls.append(name)
        return make(*args, **named)

    for name in ("_new_group_with_tag", "split_group"):
        patch.setattr(
            distributed_c10d, name, partial(counted, name, getattr(distributed_c10d, name))
        )
    patch.setattr(gloo, "start_gather", repeated)
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield calls
    finally:
        dist.destroy_process_group()


def start(pp: int, dp: int, tp: int, cp: int = 1) -> None:
    """An engine with every kind of group: sharded state, a tied head, an FP8 history of its own,
    interleaved stages."""
    sizes = {
        "layers": 2 * pp,
        "heads": tp,
        "kv_heads": tp,
        "head_dim": 4,
        "hidden": 4 * tp,
        "ffn": 8 * tp,
    }
    config = ModelConfig(family="llama", **sizes, vocab=64, max_positions=64, tied=True)  # type: ignore[arg-type]
    Engine.build(
        config,
        plan("bf16", fp8=FP8Recipe(history="te")),
        make_mesh(pp, dp, tp, cp=cp),
        schedule("interleaved", pp, 2 * pp, 2),
        EngineOptions(micro_batch=1, seq_length=64, sequence=True),
        zero_size=2,
    )


def test_the_calls_that_make_groups_do_not_grow_with_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for pp, dp, tp, cp in ((8, 256, 8, 1), (8, 4, 2, 1), (8, 32, 8, 8), (8, 2, 2, 2)):
        with fake_world(pp * dp * tp * cp, monkeypatch) as calls:
            start(pp, dp, tp, cp)
            made.append(list(calls))
    assert made[0] == made[1]
    assert made[2] == made[3]
    assert 8 <= len(made[0]) <= len(made[2]) <= MOST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pp", [2, 7, 8])
def test_every_schedule_connects_its_stages_by_at_most_eight_splits(
    kind: str, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = schedule(kind, pp, 2 * pp, KINDS[kind].chunks)
    with fake_world(64 * pp, monkeypatch) as calls:
        mesh = make_mesh(pp, 8, 8)
        calls.clear()
        links = P2P.open(Axis.of(mesh, "pp"), s.rank_of_stage, (4,), torch.float32, CPU, "order")
        assert len(links.groups) <= len(calls) <= 8
