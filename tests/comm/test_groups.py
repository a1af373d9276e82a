"""Laws of process groups: right members on every rank, whatever groups others have made before, by
few calls."""

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm import groups
from megaprec.comm.axis import Axis
from megaprec.comm.groups import make_groups, pairings
from tests.ranks import run_ranks


def members_of_splits(mesh: DeviceMesh, uneven: bool) -> list[list[int]]:
    """The members of three splits as this rank's groups have them, by what they gather."""
    if uneven:  # a group that some ranks have and others do not, as a user's own code may make
        dist.new_group([0, 1])
    found = []
    for rows in ([[0, 1], [2, 3]], [[1, 2]], [[0, 2], [3, 1]]):
        group = make_groups(torch.tensor(rows))
        ranks = (
            Axis("row", group.rank(), group.size(), group)
            .gather(torch.tensor([dist.get_rank()]))
            .tolist()
        )
        assert ranks == dist.get_process_group_ranks(group)
        found.append(ranks)
    return found


@pytest.mark.parametrize("uneven", [False, True])
def test_a_split_gives_each_rank_the_group_of_its_row(uneven: bool) -> None:
    assert run_ranks(members_of_splits, {"dp": 4}, uneven=uneven) == [
        [[0, 1], [0], [0, 2]],
        [[0, 1], [1, 2], [1, 3]],
        [[2, 3], [1, 2], [0, 2]],
        [[2, 3], [3], [1, 3]],
    ]


def test_a_world_that_can_be_split_is_split_by_one_call_with_every_rank_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's way, which a machine without GPUs cannot run: a rank outside all rows would have
    another name count."""
    calls = list[list[list[int]]]()

    def split_group(split_ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
        calls.append(split_ranks)
        return dist.group.WORLD

    monkeypatch.setattr(groups, "can_split", lambda group: True)
    monkeypatch.setattr(dist, "split_group", split_group)
    dist.init_process_group("fake", rank=0, world_size=6)
    try:
        make_groups(torch.tensor([[4, 1], [2, 5]]))
    finally:
        dist.destroy_process_group()
    assert calls == [[[4, 1], [2, 5], [0], [3]]]


def test_no_rank_occurs_twice_in_a_pairing_and_each_pair_occurs_once() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        pairs = [(a, b) for a, b in (draw.sample(range(9), 2) for _ in range(draw.randrange(30)))]
        sets = pairings(pairs)
        assert sorted(number for chosen in sets for number in chosen) == list(range(len(pairs)))
        for chosen in sets:
            ranks = [rank for number in chosen for rank in pairs[number]]
            assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize(
    ("ranks", "ring", "sets"), [(2, False, 1), (8, False, 2), (9, False, 2), (8, True, 2)]
)
def test_neighbours_need_as_many_sets_as_a_rank_has_pairs(
    ranks: int, ring: bool, sets: int
) -> None:
    pairs = [(rank, rank + 1) for rank in range(ranks - 1)] + [(0, ranks - 1)] * ring
    random.Random(0).shuffle(pairs)
    assert len(pairings(pairs)) == sets
