"""The recurrence of Mamba-2 is the sum that its paper writes, and exact at the ends of its ranges.
Its chunks are compared with it in `test_recurrences`."""

from dataclasses import replace
from functools import partial

import torch

from models.recurrent.state_space import chunked, recurrent
from tests.recurrent.recurrences import ODD_STATE_SPACE, RECURRENCES, assert_alike

STATE_SPACE = RECURRENCES["state space"]


def test_the_state_is_a_decayed_sum_of_outer_products() -> None:
    """Written out as one matrix of tokens by tokens, without a state."""
    inputs, _ = replace(ODD_STATE_SPACE, documents=0.0, spread=0.5).inputs()
    ages = (inputs.rate.unsqueeze(-1) * inputs.step).cumsum(-1)
    decay = (ages.unsqueeze(-2) - ages.unsqueeze(-1)).tril().exp().tril()
    scores = (inputs.query @ inputs.key.mT).repeat_interleave(3, 1)
    written = inputs.step.unsqueeze(-1) * inputs.value
    assert_alike([recurrent(inputs)[0]], [(scores * decay) @ written])


def test_a_decay_of_zero_and_one_is_exact() -> None:
    inputs, state = replace(ODD_STATE_SPACE, documents=0.0).inputs()
    step = inputs.step.clone()
    step[:, :, 3::5] = 1e4
    step[:, :, 1::5] = 0.0
    inputs = replace(inputs, step=step, rate=torch.ones_like(inputs.rate))
    assert {0.0, 1.0} <= {*inputs.log_decay.exp().flatten().tolist()}
    found = [*STATE_SPACE.results(partial(chunked, chunk=8), inputs, state)]
    assert all(values.isfinite().all() for values in found)
    assert_alike(found, [*STATE_SPACE.results(recurrent, inputs, state)])
