"""Small runs for tests of `megaprec parity`: made ready, taken on one process and in layouts whose
ranks are forked."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import run_ranks
from tools.config.run_file import RunConfig, load_run
from tools.verify.parity.certificate import Compared, entry
from tools.verify.parity.compare import compare
from tools.verify.parity.layouts import fitted, requested_layouts
from tools.verify.parity.noise import Noise
from tools.verify.parity.ranks import RecordedRun, corpus_of, run_alone
from tools.verify.parity.record import Plan, Record, gather, record
from tools.verify.parity.repeated_updates import updates
from tools.verify.parity.runs import (
    EPSILON,
    LayoutLimits,
    alone,
    in_float64,
    made_ready,
    with_random_tokens,
)

Bug = Callable[[], None]
TRAIN = [
    "train.steps=9",
    "train.global_batch=12",
    "train.micro_batch=2",
    "train.seq_length=64",
    "train.folder=unused",
]
DROPOUT = ["model.dropout=0.1", "model.attention_dropout=0.1"]
GPT2 = ["model.preset=gpt2", "model.layers=4"]
RUNS = {
    "llama": ["model.preset=llama-demo"],
    "one key": ["model.preset=llama-demo", "model.kv_heads=1"],
    "gpt2": GPT2,
    "dropout": [*GPT2, *DROPOUT],
    "recompute": [*GPT2, *DROPOUT, "parallel.recompute=full"],
    "mixtral": ["model.family=mixtral", "model.layers=4", "model.hidden=32", "model.heads=4", "model.ffn=48",
                "model.experts=4", "model.router_z_loss=0.1"],
    "modules": ["model.preset=llama-demo", "model.layers=4", "model.mtp_layers=2"],
    "canonical": ["model.preset=llama-demo", "train.numerics=canonical", "train.threads=1"],
    "changing": ["model.preset=llama-demo", "train.batch_schedule=[[0, 4], [8, 12]]",
                 "train.seq_schedule=[[0, 16], [8, 64]]", "lr.unit=samples"],
    "fp16": ["model.preset=llama-demo", "precision.compute=fp16"],
}  # fmt: skip
PLAN = Plan(3, planted=1, into="layers.1.attention.output.weight")


@cache
def ready(run: str) -> RunConfig:
    """The run made small, on its tokens, with a clip that bites."""
    folder = Path(mkdtemp(prefix="megaprec_test_"))
    config = made_ready(
        load_run(None, [*RUNS[run], *TRAIN]), LayoutLimits(2, 2, 2), False, 2, folder
    )
    config = with_random_tokens(config, 3, folder)
    config = config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"clip": 0.01})}
    )
    return in_float64(config)


@cache
def references(run: str) -> tuple[Record, Record]:
    """On one process: as it is, and from weights moved by rounding."""
    folder = Path(mkdtemp(prefix="megaprec_test_"))
    plans = (PLAN, Plan(PLAN.steps, planted=PLAN.planted, into=PLAN.into, shaken=EPSILON["fp64"]))
    first, second = (
        run_alone(RecordedRun(alone(ready(run)), plan, folder / f"run{n}"))
        for n, plan in enumerate(plans)
    )
    return first, second


def carried_out(run: RecordedRun, bug: tuple[str, str] | None) -> Record:
    """The run in its layout. bug: a module, and the function or the name within its FAULTS that
    plants a fault."""
    run.folder.mkdir(exist_ok=True)
    run.write()
    p = run.config.parallel
    run_ranks(
        record_rank, {"tp": p.tensor, "pp": p.pipeline, "dp": p.data}, folder=run.folder, bug=bug
    )
    return gather(run.folder)


def record_rank(mesh: DeviceMesh, folder: Path, bug: tuple[str, str] | None) -> None:
    if bug is not None:
        plant(*bug)
    run = RecordedRun.read(folder)
    record(run.config, corpus_of(run.config), mesh, run.plan, run.folder)


def plant(module: str, name: str) -> None:
    """Plants a fault in this process."""
    found: Any = import_module(module)
    (getattr(found, name, None) or found.FAULTS[name].plant)()


def outcome(
    run: str, layout: str, folder: Path, bug: tuple[str, str] | None = None
) -> dict[str, Any]:
    """What the certificate says of the layout."""
    config = ready(run)
    (said,) = requested_layouts([layout], config.parallel)
    made = fitted(config, said)
    here = config.model_copy(update={"parallel": made.parallel})
    truth, shaken = references(run)
    ours = carried_out(RecordedRun(here, PLAN, folder), bug)
    found = compare(
        ours, truth, Noise(shaken), 2.0, updates(alone(config), corpus_of(config), ours)
    )
    return entry(Compared(made, "float64", here, found, ours, truth))
