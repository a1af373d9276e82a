"""Receives posted ahead of their use: no schedule deadlocks, even if each blocks its rank from
there on."""

import pytest

from parallel.pipeline.instructions import RECEIVES, Channel, Instruction, Message
from parallel.pipeline.kinds import KINDS, schedule
from parallel.pipeline.posting import moved, posts
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.simulation import RefusedSchedule, sends_under_way, simulate

SIZES = [(2, 4), (4, 8), (3, 7)]


def made(kind: str, ranks: int, microbatches: int) -> Schedule:
    count = microbatches + -microbatches % ranks if kind == "interleaved" else microbatches
    return schedule(kind, ranks, count)


def runs(one: Schedule) -> None:
    simulate(
        one, communicator=lambda m: Channel.of(m, one.rank_of_stage), sends=sends_under_way(one)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_a_schedule_whose_receives_block_from_where_they_are_posted_runs_to_its_end(
    kind: str, ranks: int, microbatches: int
) -> None:
    one = made(kind, ranks, microbatches)
    runs(moved(one))
    for program, after, places in zip(one.programs, moved(one).programs, posts(one), strict=True):
        assert sorted(map(str, program)) == sorted(map(str, after))
        assert [i for i in program if i not in places] == [i for i in after if i not in places]
        assert [i for i in program if i in places] == [i for i in after if i in places], (
            "receives keep their order"
        )
        assert places.keys() == {i for i in program if i.op in RECEIVES}
        assert all(places[i] <= program.index(i) for i in places)


def ahead(one: Schedule) -> float:
    """The part of the receives that is posted before at least one computation that comes before
    their use."""
    pairs = [(p, places) for p, places in zip(one.programs, posts(one), strict=True)]
    early = [
        any(Message.of(j) is None for j in p[at : p.index(i)])
        for p, places in pairs
        for i, at in places.items()
    ]
    return sum(early) / len(early)


def test_messages_travel_while_stages_compute() -> None:
    parts = {kind: ahead(made(kind, 4, 8)) for kind in KINDS}
    assert min(parts.values()) >= 0.5, parts


def test_a_receive_that_is_posted_before_what_its_message_needs_is_found() -> None:
    one = made("1f1b", 2, 4)
    text = Instruction.parse("rG0.0")
    # before the activation that the gradient needs
    first = tuple(sorted(one.programs[0], key=lambda i: i != text))
    with pytest.raises(RefusedSchedule):
        runs(Schedule((first, *one.programs[1:]), one.rank_of_stage))
