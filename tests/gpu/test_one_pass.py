"""The optimizer's statistics and update, compiled into one pass each, are those of torch's
kernels."""

import os
import shutil

import pytest
import torch
from torch import nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach
from megaprec.optim.decision import one_pass
from megaprec.optim.decision.grad_stats import statistics
from megaprec.optim.decision.one_pass import adamw_numbers, update_in_one_pass
from megaprec.optim.rules.update_rules import AdamW, Step
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import plan
from parallel.leaves import Leaves
from tools.training import compiling
from tools.training.compiling import one_pass_calls, try_calls

RULE = AdamW()
LENGTHS = {"cpu": (256,), "cuda": (1 << 22, 1 << 20)}


def compiled_leaves(device: str, monkeypatch: pytest.MonkeyPatch) -> Leaves:
    """Those of an optimizer for bf16 weights, compiled for the device."""
    monkeypatch.setattr(one_pass, "LENGTHS", LENGTHS[device])
    monkeypatch.setattr(compiling, "LENGTHS", LENGTHS[device])
    if not shutil.which((os.environ.get("CC") or "cc").split()[0]):
        pytest.skip("needs a C compiler")
    forms, reasons = try_calls([call.on(device) for call in one_pass_calls(plan("bf16"), RULE)])
    assert reasons == {}
    return Leaves(forms)


@pytest.mark.slow
def test_the_update_in_one_pass_is_that_of_the_kernels(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = compiled_leaves(device, monkeypatch)
    on = torch.device(device)
    n = sum(LENGTHS[device]) + 77
    random = torch.Generator(on).manual_seed(0)
    parameter = nn.Parameter(torch.randn(n, generator=random, device=on))
    attach(parameter, Layout((Part("weight", (n,)),)))
    buffer = Buffer([parameter], plan("bf16"), Axis("dp"), Axis("zero"), 0, on, RULE.names)
    buffer.local_grads[:n].normal_(generator=random)
    assert buffer.masters is not None
    expected = [buffer.masters.clone(), *(moments.clone() for moments in buffer.state.values())]
    skip = torch.zeros((), device=on)
    steps = torch.ones((), device=on)
    step = Step(0.1, 0.1, torch.full((), 3.0, dtype=torch.float64, device=on), skip, steps)
    RULE.update_(expected[0], buffer.local_grads.clone(), expected[1:], step)
    numbers = adamw_numbers(RULE, step)

    def refuse() -> None:
        raise AssertionError("not compiled")

    with torch.no_grad():
        for start, stop in one_pass.runs(0, n):
            (tile,) = buffer.tiles(start, stop, stop - start)
            update_in_one_pass(leaves, tile, RULE, numbers, refuse)
    for ours, theirs in zip((buffer.masters, *buffer.state.values()), expected, strict=True):
        torch.testing.assert_close(ours[:n], theirs[:n], rtol=1e-5, atol=1e-7)
    assert torch.equal(buffer.weights[:n], buffer.masters[:n].bfloat16())


@pytest.mark.slow
def test_the_statistics_in_one_pass_are_those_of_two(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = compiled_leaves(device, monkeypatch)
    on = torch.device(device)
    gradients = torch.randn(sum(LENGTHS[device]) + 77, device=on)
    gradients[::5] = 0
    ours = statistics([gradients], (), on, leaves)
    theirs = statistics([gradients], (), on)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert ours[1] == theirs[1] == len(gradients[::5])
    assert not leaves.misses, "a rest has no compiled form, and none is foreseen"
