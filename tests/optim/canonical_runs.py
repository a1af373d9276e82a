"""Training runs under canonical sums, and the comparison of their bits between layouts."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_report import StepReport
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks

LLAMA = {**MODELS["llama"], "layers": 4, "tied": False}
GPT2 = {**MODELS["gpt2"], "layers": 4, "tied": False}
MIXTRAL = {**MODELS["mixtral"], "layers": 4, "tied": False}
STEPS = 8


@dataclass(frozen=True)
class Trained:
    """The reports of the steps, and the optimizer's whole state after the last one."""

    reports: Sequence[StepReport]
    state: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.state["tensors"]


def canonical(
    model: dict[str, Any], *, options: dict[str, Any] | None = None, **fields: Any
) -> Run:
    """Return a run of eight steps of eight micro-batches with canonical sums. fields: of `Run`."""
    return Run(
        model,
        options={"canonical": True, **(options or {})},
        **{"micro_batch": 1, "steps": STEPS, **fields},
    )


def with_options(run: Run, **options: Any) -> Run:
    return replace(run, options={**run.options, **options})


def train_rank(
    mesh: DeviceMesh, runs: Sequence[Run], start: dict[str, Any] | None, first: int, last: int
) -> list[Any]:
    """The body of each rank: steps [first, last) of each run, from the state `start` if there is
    one."""
    return [_train(mesh, run, start, first, last) for run in runs]


def _train(
    mesh: DeviceMesh, run: Run, start: dict[str, Any] | None, first: int, last: int
) -> Trained:
    if run.before is not None:
        run.before()
    engine = make_engine(mesh, deepcopy(run))  # each optimizer needs an update rule of its own
    if start is not None:
        engine.optimizer.load_state_dict(start)
    made = batches(run)
    reports = [engine.step(share_of(mesh, made[n]), run.lr, n) for n in range(first, last)]
    return Trained(reports, engine.optimizer.state_dict())


def train(
    runs: Sequence[Run],
    pp: int = 1,
    dp: int = 1,
    *,
    start: dict[str, Any] | None = None,
    first: int = 0,
    last: int = 0,
) -> list[Trained]:
    """Return what the first rank has after the steps; `last` 0: after all of them."""
    ranks = run_ranks(
        train_rank,
        {"pp": pp, "dp": dp},
        runs=runs,
        start=start,
        first=first,
        last=last or runs[0].steps,
    )
    return ranks[0]


def differences(one: Trained, other: Trained) -> list[str]:
    """Return the names of what is not the same bits; signs of zeros do not count, and stages may be
    cut elsewhere."""
    found = []
    for n, (mine, its) in enumerate(zip(one.reports, other.reports, strict=True)):
        for name in ("outcome", "loss", "grad_norm", "num_zeros", "zero_ratio", "loss_scale"):
            had = getattr(mine, name)
            has = getattr(its, name)
            if had != has and (had == had or has == has):
                found.append(f"step {n}: {name} {had!r} and {has!r}")
    numbers = (
        {k: v for k, v in state.items() if k != "tensors"} for state in (one.state, other.state)
    )
    found += [] if len({str(some) for some in numbers}) == 1 else ["numbers"]
    assert one.tensors.keys() == other.tensors.keys()
    return found + [
        name for name in one.tensors if not torch.equal(one.tensors[name], other.tensors[name])
    ]
