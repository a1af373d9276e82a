"""A recurrence in chunks is that token by token, forward and backward."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrent.recurrences import (
    RECURRENCES,
    LateDecays,
    WithoutState,
    assert_alike,
)

EACH = pytest.mark.parametrize("recurrence", RECURRENCES)
BOTH_WAYS = pytest.mark.parametrize("way", ["recurrent", "chunked"])


@EACH
@settings(max_examples=20)
@given(data=st.data())
def test_chunks_compute_the_recurrence_and_its_gradients(
    recurrence: str, data: st.DataObject
) -> None:
    assert_chunks_are_the_recurrence(recurrence, data)


@pytest.mark.slow
@EACH
@settings(max_examples=400)
@given(data=st.data())
def test_many_chunks_compute_the_recurrence_and_its_gradients(
    recurrence: str, data: st.DataObject
) -> None:
    assert_chunks_are_the_recurrence(recurrence, data)


def assert_chunks_are_the_recurrence(recurrence: str, data: st.DataObject) -> None:
    one = RECURRENCES[recurrence]
    drawn = data.draw(one.drawn)
    inputs, state = drawn.inputs()
    in_chunks = partial(one.module.chunked, chunk=drawn.chunk)
    found = [*one.results(in_chunks, inputs, state)]
    assert_alike(found, [*one.results(one.module.recurrent, inputs, state)])


@EACH
@BOTH_WAYS
def test_two_parts_with_the_state_between_are_the_whole(recurrence: str, way: str) -> None:
    one = RECURRENCES[recurrence]
    rule = getattr(one.module, way)
    inputs, state = one.odd.inputs()
    whole, last = rule(inputs, state)
    begun, between = rule(one.part(inputs, slice(17)), state)
    ended, end = rule(one.part(inputs, slice(17, None)), between)
    assert_alike([torch.cat((begun, ended), 2), end], [whole, last])


@EACH
@BOTH_WAYS
def test_a_document_computes_what_it_does_alone(recurrence: str, way: str) -> None:
    one = RECURRENCES[recurrence]
    rule = getattr(one.module, way)
    inputs, state = replace(one.odd, samples=1, documents=0.0).inputs()
    starts = [0, 5, 6, 22, one.odd.length]
    begins = torch.zeros(1, one.odd.length, dtype=torch.bool)
    begins[0, starts[:-1]] = True
    packed, last = rule(replace(inputs, begins=begins), state)
    alone = [rule(one.part(inputs, slice(start, stop)), None) for start, stop in pairwise(starts)]
    outputs = torch.cat([outputs for outputs, _ in alone], 2)
    assert_alike([packed, last], [outputs, alone[-1][1]])


@EACH
@pytest.mark.parametrize("fault", [LateDecays, WithoutState])
def test_a_planted_fault_is_found(
    recurrence: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = RECURRENCES[recurrence]
    inputs, state = one.odd.inputs()
    monkeypatch.setattr(one.module, one.decays, fault)
    found = [*one.results(partial(one.module.chunked, chunk=8), inputs, state)]
    with pytest.raises(AssertionError):
        assert_alike(found, [*one.results(one.module.recurrent, inputs, state)])
