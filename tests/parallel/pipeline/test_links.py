"""The laws of transfers, each a trap that has silently corrupted or hung a pipeline somewhere."""

import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from parallel.pipeline.instructions import SENDS_UNDER_WAY, Instruction
from parallel.pipeline.p2p import CPU, P2P, Match
from tests.ranks import on_ranks, run_ranks
from tests.refusals import raises

both_ways_to_match = pytest.mark.parametrize("match", ["tag", "order"])
SIZE = 1 << 20  # more than a socket takes in without a reader


def open_links(
    mesh: DeviceMesh, match: Match = "tag", size: int = SIZE, stages: Sequence[int] = (0, 1)
) -> P2P:
    return P2P.open(Axis.of(mesh, "pp"), stages, (size,), torch.float32, CPU, match)


def full(value: float, size: int = SIZE) -> Tensor:
    return torch.full((size,), value)


def instructions(text: str) -> list[Instruction]:
    return list(map(Instruction.parse, text.split()))


@both_ways_to_match
@on_ranks(pp=2)
def test_a_sent_tensor_lives_until_it_is_received_and_no_longer(
    mesh: DeviceMesh, match: Match
) -> None:
    links = open_links(mesh, match)
    (send, receive) = instructions("sA0.0 rA1.0")
    if links.axis.rank == 0:
        memory = np.full(SIZE, 1.0, dtype=np.float32)
        alive = weakref.ref(memory)
        links.send(send, torch.from_numpy(memory))
        del memory
        others = [full(7.0) for _ in range(8)]  # would reuse the memory if it were free
        assert alive() is not None
        links.finish()
        assert alive() is None
        assert len(others) == 8
    else:
        time.sleep(0.3)
        assert torch.equal(links.receive(receive), full(1.0))


@on_ranks(pp=2)
def test_messages_are_told_apart_by_tag_and_not_by_order(mesh: DeviceMesh) -> None:
    links = open_links(mesh)
    sends = instructions("sA0.0 sA0.1"), instructions("sG1.1 sG1.0")
    receives = instructions("rG0.0 rG0.1"), instructions("rA1.1 rA1.0")
    rank = links.axis.rank
    for i in sends[rank]:
        links.send(i, full(10.0 * rank + i.microbatch))
    for i in receives[rank]:
        assert torch.equal(links.receive(i), full(10.0 * (1 - rank) + i.microbatch)), str(i)
    links.finish()


@on_ranks(pp=2)
def test_chunks_that_go_round_two_ranks_are_told_apart(mesh: DeviceMesh) -> None:
    links = open_links(mesh, stages=(0, 1, 0, 1))
    if links.axis.rank == 0:
        for i in instructions("sA0.0 sA2.0"):
            links.send(i, full(float(i.stage)))
        links.finish()
    else:
        for i in instructions("rA3.0 rA1.0"):
            assert torch.equal(links.receive(i), full(i.stage - 1.0)), str(i)


@both_ways_to_match
@on_ranks(pp=2)
def test_two_ranks_that_both_send_first_do_not_wait_for_each_other(
    mesh: DeviceMesh, match: Match
) -> None:
    links = open_links(mesh, match)
    sends = instructions("sA0.0 sA0.1"), instructions("sG1.0 sG1.1")
    receives = instructions("rG0.0 rG0.1"), instructions("rA1.0 rA1.1")
    rank = links.axis.rank
    for i in sends[rank]:
        links.send(i, full(10.0 * rank + i.microbatch))
    for i in receives[rank]:
        assert torch.equal(links.receive(i), full(10.0 * (1 - rank) + i.microbatch))
    links.finish()


@on_ranks(pp=2)
def test_few_sends_are_kept_however_many_there_are(mesh: DeviceMesh) -> None:
    links = open_links(mesh)
    for microbatch in range(5):
        if links.axis.rank == 0:
            links.send(Instruction.parse(f"sA0.{microbatch}"), full(float(microbatch)))
            assert sum(map(len, links.pending.values())) <= SENDS_UNDER_WAY
        else:
            assert torch.equal(
                links.receive(Instruction.parse(f"rA1.{microbatch}")), full(float(microbatch))
            )
    links.finish()
    assert not any(links.pending.values())


def exchange(mesh: DeviceMesh, match: Match) -> float:
    tp = Axis.of(mesh, "tp").rank
    links = open_links(mesh, match, size=8)
    if links.axis.rank == 0:
        links.send(Instruction.parse("sA0.0"), full(1.0 + tp, 8))
        answer = links.receive(Instruction.parse("rG0.0"))
    else:
        answer = links.receive(Instruction.parse("rA1.0"))
        links.send(Instruction.parse("sG1.0"), answer * 10)
    links.finish()
    return answer.unique().item()


@both_ways_to_match
def test_pipelines_side_by_side_do_not_hear_each_other(match: Match) -> None:
    assert run_ranks(exchange, {"pp": 2, "tp": 2}, match=match) == [10, 20, 1, 2]


@on_ranks(pp=3, dp=2)
def test_matched_by_order_each_channel_has_its_communicator(mesh: DeviceMesh) -> None:
    links = open_links(mesh, "order", size=8, stages=(0, 1, 2))
    assert all(links.axis.rank in (channel.source, channel.destination) for channel in links.groups)
    assert [group.size() for group in links.groups.values()] == [2] * (2, 4, 2)[links.axis.rank]
    assert len(set(links.groups.values())) == len(links.groups)


def test_another_shape_or_dtype_is_refused_before_it_is_sent() -> None:
    links = P2P.open(Axis("pp"), (0,), (2, 3), torch.float32)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with raises(
            "pipeline.activation_differs",
            instruction="sA0.0",
            expected_shape="[2, 3]",
            expected_dtype="torch.float32",
        ):
            links.send(Instruction.parse("sA0.0"), wrong)


def bytes_of_shares(mesh: DeviceMesh, match: Match, shape: tuple[int, ...]) -> int:
    """Bytes that a rank of the first stage sends of a message that both tensor-parallel ranks
    hold."""
    pp = Axis.of(mesh, "pp")
    tp = Axis.of(mesh, "tp")
    size = 0
    links = P2P.open(pp, (0, 1), shape, torch.float32, CPU, match, shared=tp)
    message = torch.arange(float(np.prod(shape))).view(shape)
    (send, receive) = instructions("sA0.0 rA1.0")
    if pp.rank == 0:
        links.send(send, message)
        size = sum(tensor.nbytes for pending in links.pending.values() for _, tensor in pending)
        links.finish()
        return size
    assert torch.equal(links.receive(receive), message)
    return size


@pytest.mark.parametrize(
    ("match", "shape", "part"),
    [("order", (3, 2, 4), 0.5), ("order", (3, 5), 1), ("tag", (3, 2, 4), 1)],
)
def test_matched_by_order_each_tensor_parallel_rank_sends_its_share(
    match: Match, shape: tuple[int, ...], part: float
) -> None:
    sent = run_ranks(bytes_of_shares, {"pp": 2, "tp": 2}, match=match, shape=shape)
    assert sent == [part * 4 * np.prod(shape)] * 2 + [0, 0]
