"""The host of a GPU waits for it once a step: for the report. In between it only queues work.

Waits are counted on the device of `tests.pretend`, on which every operator runs that would run on a
GPU.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.fp8 import matmul
from megaprec.precision.plan import LossScaling
from models.engine.passes import Passes, Share
from models.feed_forward import moe
from parallel.activation_checkpoint import KEEP, Recompute
from tests import pretend
from tests.layouts import SAMPLES, Run, batches, make_engine, share_of
from tests.models.test_other_device import FAMILIES, MODEL, fp8, run
from tests.ranks import run_ranks


def waits_of_steps(mesh: DeviceMesh, runs: list[Run]) -> list[list[str]]:
    """Operators that the host waited for in the last of some steps, of each run."""
    pretend.install()
    matmul._TRIAL_SIZE = (
        128  # FP8 kernels are tried on smaller matrices, for here the CPU computes them slowly
    )
    mesh = pretend.join(mesh)
    found = []
    for one in runs:
        if one.before is not None:
            one.before()
        engine = make_engine(mesh, one)
        for number, batch in enumerate(batches(one)):
            share = share_of(mesh, batch)
            pretend.waits.clear()
            assert engine.step(share, one.lr, number).changed
        found.append(pretend.waits[:])
    return found


DENSE = {name: model for name, model in FAMILIES.items() if name != "mixtral"}
SCALED = LossScaling("constant", 2.0**10)
MIXTRAL = {**FAMILIES["mixtral"], "router_aux_loss": 0.1, "router_z_loss": 0.1}
LAYERS = MIXTRAL["layers"]


def in_precision(compute: str) -> list[Run]:
    if compute == "fp8":
        return [fp8(kind) for kind in ("delayed", "current")]
    scaling = SCALED if compute == "fp16" else None
    return [run(compute, model, scaling=scaling, clip=0.5) for model in DENSE.values()]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp16", "fp8"])
def test_the_host_waits_once_a_step(compute: str) -> None:
    for waits in run_ranks(waits_of_steps, {}, runs=in_precision(compute))[0]:
        assert len(waits) == 1, waits


WAYS = [
    run(recompute=Recompute(fraction=1.0)),
    run(options={"norm": math.inf, "overlap": True}, masked=False),
    run(model={**MODEL, "window": 4, "qk_norm": True}),
    run(changes={"masters": "split"}, zero_size=1),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_the_host_waits_once_a_step_however_the_model_is_trained(axes: dict[str, int]) -> None:
    runs = [one for one in WAYS if "dp" in axes or not one.zero_size]
    for found in run_ranks(waits_of_steps, axes, runs=runs):
        for waits in found:
            assert len(waits) == 1, waits


def masked_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """What a grouped product is: without a look at `offs` on the host, for which the CPU's own
    waits."""
    rows = torch.arange(a.shape[b.dim() - 3], device=a.device)
    firsts = functional.pad(offs, (1, 0))[:-1]
    inside = ((rows >= firsts[:, None]) & (rows < offs[:, None])).to(a.dtype)  # [experts, rows]
    if b.dim() == 2:
        return (a * inside[:, None]) @ b
    return ((a @ b) * inside[:, :, None]).sum(0)


def group_here() -> None:
    """As on a GPU: `groups_on` asks for CUDA, which this device is not."""
    torch._grouped_mm = masked_product  # type: ignore[assignment]
    moe.groups_on = lambda device, dtype, sizes: (
        device.type == pretend.NAME and dtype == torch.bfloat16
    )


@pytest.mark.parametrize(
    "recompute", [KEEP, Recompute(("activation",))], ids=["kept", "recomputed"]
)
def test_the_host_waits_for_no_expert_where_products_are_grouped(recompute: Recompute) -> None:
    grouped = replace(run(model=MIXTRAL, recompute=recompute), before=group_here)
    (waits,) = run_ranks(waits_of_steps, {}, runs=[grouped])[0]
    assert len(waits) == 1, waits


@pytest.mark.slow
def test_the_host_waits_once_a_layer_for_experts_whose_products_are_not_grouped() -> None:
    one = run("fp32", MIXTRAL)
    (waits,) = run_ranks(waits_of_steps, {}, runs=[one])[0]
    passes = SAMPLES // one.micro_batch * LAYERS
    assert len(waits) == 1 + passes, waits


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_the_host_waits_once_a_layer_for_the_counts_of_experts_on_other_ranks(compute: str) -> None:
    """In each forward pass, for the sizes of the messages; products wait no more, whether they are
    grouped or not."""
    one = replace(run(compute, MIXTRAL), expert=2, before=group_here)
    for (waits,) in run_ranks(waits_of_steps, {"dp": 2}, runs=[one]):
        passes = SAMPLES // 2 // one.micro_batch * LAYERS
        assert len(waits) == 1 + passes, waits


def a_loss_is_looked_at() -> None:
    inner = Passes.scaled_loss

    def look(self: Passes, state: Any, stage: int, logits: Tensor, rows: slice) -> Tensor:
        self.optimizer.scale.item()
        return inner(self, state, stage, logits, rows)

    Passes.scaled_loss = look


def tokens_are_moved_without_pinned_memory() -> None:
    Share.on = lambda self, device: replace(
        self, tokens=self.tokens.to(device), targets=self.targets.to(device)
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("plant", [a_loss_is_looked_at, tokens_are_moved_without_pinned_memory])
def test_a_wait_that_is_planted_is_counted(plant: Callable[[], None]) -> None:
    (waits,) = run_ranks(waits_of_steps, {}, runs=[run(masked=False, before=plant)])[0]
    assert len(waits) > 1
