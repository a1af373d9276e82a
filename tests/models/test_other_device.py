"""What trains on a CPU trains on another device: nothing lies where it should not, and the numbers
are the same.

The device is `tests.pretend`. Gradients are not clipped here and so weights are the same bit for
bit: the norm, which a CPU sums in another way, is the same to four digits. In fp16 a CPU makes
products in another way too.
"""

import ctypes
import math
import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.comm.axis import Axis, device_of
from megaprec.comm.layout import attach_whole
from megaprec.fp8.matmul import SLOW, describe_kernels
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS, FP8Recipe
from megaprec.precision.module_wrappers import PlannedModel
from megaprec.precision.plan import LossScaling, plan
from models.decoder.kv_cache import CachedStage
from models.engine.engine import Engine
from models.engine.passes import Share
from models.engine.replay import trace_modules
from parallel.activation_checkpoint import Recompute
from parallel.pipeline.p2p import CPU, P2P
from tests import pretend
from tests.families import CASES, OURS, config_of
from tests.layouts import (
    Fragment,
    Run,
    Trained,
    batches,
    make_engine,
    packings,
    share_of,
    train_rank,
)
from tests.ranks import on_ranks, run_ranks
from tests.runs import checkpoint, steps, tensors, write_run
from tools.config.run_file import load_run
from tools.inference.generation import Generation
from tools.inference.load import load_model
from tools.inference.sampling import Sampling
from tools.training.corpus import open_corpus
from tools.training.trainer import Trainer
from tools.verify.parity.record import Plan, record

MODEL = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "vocab": 61,
}
LLAMA = {**MODEL, "dropout": 0.1, "attention_dropout": 0.1}
FAMILIES = {
    "llama": LLAMA,
    "gpt2": {**MODEL, "family": "gpt2", "kv_heads": 4, "dropout": 0.1, "max_positions": 16},
    "gpt_neox": {**MODEL, "family": "gpt_neox", "kv_heads": 4},
    "mixtral": {**MODEL, "family": "mixtral", "experts": 4},
}
FOUR = {**LLAMA, "layers": 4}
WHOLE_WEIGHTS = {**LLAMA, "attention_dropout": 0.0}
WHOLE = {"hidden": 32, "ffn": 64, "vocab": 64, "layers": 1}
LOWERED = LossScaling("dynamic", 2.0**10, hysteresis=1)


def run(compute: str = "bf16", model: dict[str, Any] = LLAMA, **others: Any) -> Run:
    return Run(
        model,
        compute,
        **{"clip": 0.0, "steps": 3 if "plant" in others else 2, "micro_batch": 4, **others},
    )


def fp8(kind: Any, **fields: Any) -> Run:
    history = {"history_length": 4} if kind == "delayed" else {}
    return run(model={**LLAMA, **WHOLE}, changes={"fp8": FP8Recipe(kind, **history, **fields)})


def near(one: StepReport, other: StepReport, tolerance: float) -> None:
    """What two reports say must be the same, and their numbers to a relative tolerance; the norm to
    four digits."""
    torch.testing.assert_close(
        one.grad_norm, other.grad_norm, rtol=max(1e-4, tolerance), atol=0, equal_nan=True
    )
    torch.testing.assert_close(one.loss, other.loss, rtol=tolerance, atol=0)
    counted = ("num_zeros", "zero_ratio", "stage_zeros", "offenders") if tolerance else ()
    same = dict.fromkeys(("grad_norm", "loss", *counted), 0)
    assert replace(one, **same) == replace(other, **same)  # type: ignore[arg-type]
    assert [o.name for o in one.offenders] == [o.name for o in other.offenders]


def same_parts(ours: Sequence[Fragment], expected: Sequence[Fragment]) -> bool:
    pairs = zip(ours, expected, strict=True)
    return all(a.name == b.name and torch.equal(a.values.cpu(), b.values) for a, b in pairs)


def require_same(one: Run, ours: Trained, expected: Trained) -> None:
    half = one.compute == "fp16"
    for here, there in zip(ours.reports, expected.reports, strict=True):
        near(here, there, 1e-3 if half else 0.0)
    assert ours.scaler == expected.scaler and ours.num_elements == expected.num_elements
    assert same_parts(ours.before, expected.before), f"{one}: weights begin otherwise"
    if half:
        a, b = (
            torch.cat([part.values.cpu() for part in trained.grads[0]])
            for trained in (ours, expected)
        )
        assert (a - b).norm() < 1e-3 * b.norm()
        return
    for report, a, b in zip(ours.reports, ours.grads, expected.grads, strict=True):
        assert not report.changed or same_parts(a, b), f"{one}: gradients differ"
    assert same_parts(ours.after, expected.after), f"{one}: weights differ"


def emulate() -> None:
    """The device computes products of FP8 codes as the CPU does, whose bits its own are compared
    with."""
    SLOW[pretend.NAME] = SLOW["cpu"]


def train_both(mesh: DeviceMesh, runs: Sequence[Run]) -> None:
    """On the CPU, and then on the device."""
    pretend.install()
    emulate()
    with sdpa_kernel(SDPBackend.MATH):  # a CPU has a fused kernel of its own
        expected = train_rank(mesh, [replace(one, before=None) for one in runs])
        mesh = pretend.join(mesh)
        assert device_of(mesh).type == pretend.NAME
        for one, there in zip(runs, expected, strict=True):
            require_same(one, train_rank(mesh, [one])[0], there)


ALONE = {
    "families": [run(model=model) for model in FAMILIES.values()],
    "fp64 and fp32": [run("fp64", clip=0.5), run("fp32", FAMILIES["mixtral"])],
    "fp16": [run("fp16", model, scaling=LOWERED) for model in FAMILIES.values()],
    "overflow": [run(plant=(0, 1, math.inf)), run("fp16", plant=(0, 1, math.nan), scaling=LOWERED)],
    "norms": [run(clip=0.5, options={"norm": norm}) for norm in (math.inf, 1.0, 3.0)],
    "recomputed": [
        run(recompute=again)
        for again in (Recompute(("attention", "activation", "norm")), Recompute(fraction=1.0))
    ],
    "held otherwise": [
        run(changes=changes)
        for changes in (
            {"masters": "split"},
            {"masters": "none", "rounding": "stochastic", "moments": "bf16"},
            {"keep_fp32": ("*norm.weight", "*mlp*")},
            {"gradients": "bf16", "residual": torch.float32, "pipeline": torch.float32},
        )
    ],
    "fp8": [fp8(kind) for kind in EIGHT_BIT_KINDS] + [fp8("delayed", parameters=True)],
}
TOGETHER = {
    "tp": (
        {"tp": 2},
        [run(model=model, sequence=True) for model in FAMILIES.values()] + [fp8("delayed")],
    ),
    "pp": (
        {"pp": 2},
        [
            *(run(model=FOUR, kind=kind, micro_batch=2) for kind in ("1f1b", "zb-h1", "zb-v")),
            run("fp64", model={**FOUR, "tied": True}, kind="interleaved", chunks=2, micro_batch=2),
            run(plant=(1, 1, math.inf)),
        ],
    ),
    "dp": (
        {"dp": 2},
        [
            run(options={"overlap": True, "bucket": 3000}),
            run(zero_size=1, changes={"reduce": "bf16"}),
            run(plant=(1, 1, math.nan), options={"bucket": 3000}),
            fp8("current", parameters=True),
        ],
    ),
    "cp": (
        {"cp": 2},
        [
            run("fp64", WHOLE_WEIGHTS, ring=False, borders=2, reset=True),
            run("fp32", WHOLE_WEIGHTS),
            run("fp64", FOUR),
        ],
    ),
    "experts": (
        {"dp": 2},
        [
            run("fp64", FAMILIES["mixtral"], expert=2),
            run("bf16", FAMILIES["mixtral"], expert=2, zero_size=1),
        ],
    ),
    "tp and pp": (
        {"tp": 2, "pp": 2},
        [run("fp64", {**FOUR, "tied": True}, sequence=True), run(plant=(3, 1, math.nan))],
    ),
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ALONE)
def test_one_rank_trains_on_the_device_as_on_the_cpu(name: str) -> None:
    run_ranks(train_both, {}, runs=ALONE[name])


def skip_first_step(mesh: DeviceMesh) -> None:
    """On a device whose host does not wait for the decision, the update runs and keeps nothing."""
    pretend.install()
    mesh = pretend.join(mesh)
    for name in ("adamw", "muon"):
        options = {"rule": rule(name)}
        one = run(plant=(0, 0, math.nan), changes={"rounding": "stochastic"}, options=options)
        engine = make_engine(mesh, one)
        before = [weight.detach().cpu().clone() for weight in weights_of(engine)]
        report = engine.step(share_of(mesh, batches(one)[0], packings(one)[0]), one.lr, 0)
        assert report.outcome == "skipped_overflow"
        after = [weight.detach().cpu() for weight in weights_of(engine)]
        assert all(map(torch.equal, before, after)), name


def weights_of(engine: Engine) -> list[Tensor]:
    return [weight for stage in engine.stages.values() for weight in stage.parameters()]


@pytest.mark.slow
def test_a_skipped_first_step_leaves_weights_that_are_rounded_stochastically() -> None:
    run_ranks(skip_first_step, {})


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_train_together_on_the_device_as_on_the_cpu(name: str) -> None:
    axes, runs = TOGETHER[name]
    run_ranks(train_both, axes, runs=runs)


@on_ranks()
def test_tensors_of_two_devices_do_not_meet(mesh: DeviceMesh) -> None:
    pretend.install()
    there = torch.arange(6.0, device=pretend.NAME).view(2, 3)
    here = torch.ones(2, 3)
    meetings: list[Callable[[], object]] = [
        lambda: there + here,
        lambda: here.add_(there),
        lambda: torch.stack([there, here]),
        lambda: there * torch.tensor(2.0),
        lambda: there[torch.tensor([1])],
        lambda: functional.embedding(torch.tensor([1]), there),
        lambda: functional.linear(here, there),
    ]
    for meet in meetings:
        with pytest.raises(RuntimeError, match="to be on the same device"):
            meet()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=pretend.NAME, generator=torch.Generator())
    with pytest.raises(TypeError, match="convert pretend"):
        there.numpy()
    here.copy_(there)
    assert (
        here.tolist() == there.cpu().tolist() == there.to("cpu").tolist() == [[0, 1, 2], [3, 4, 5]]
    )
    assert there.sum().item() == 15


@on_ranks()
def test_tensors_of_the_device_share_memory_as_any_do(mesh: DeviceMesh) -> None:
    pretend.install()
    flat = torch.zeros(10, device=pretend.NAME)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.data = flat[2:6].view(2, 2)
    flat[2:4] = 5.0
    parameter.data[1].add_(torch.ones(2, device=pretend.NAME)).mul_(3)
    assert parameter.tolist() == [[5, 5], [3, 3]] and flat.tolist() == [
        0,
        0,
        5,
        5,
        3,
        3,
        0,
        0,
        0,
        0,
    ]
    flat.view(torch.int32)[2] = 0
    (parameter.t() * torch.arange(4.0, device=pretend.NAME).view(2, 2)).sum().backward()
    assert parameter.tolist() == [[0, 5], [3, 3]]
    assert parameter.grad is not None and parameter.grad.device == parameter.device
    assert parameter.grad.tolist() == [[0, 2], [1, 3]]


@on_ranks(dp=2)
def test_ranks_send_what_nccl_sends(mesh: DeviceMesh) -> None:
    pretend.install()
    axis = Axis.of(pretend.join(mesh), "dp")
    for refused in (
        torch.zeros(2, 3).t(),
        torch.zeros(4, dtype=torch.int16),
        torch.zeros(4, dtype=torch.float8_e5m2),
    ):
        with pytest.raises(RuntimeError, match="this group sends no"):
            axis.sum_(refused.to(pretend.NAME))
    assert axis.sum_(torch.ones(2, device=pretend.NAME)).tolist() == [2, 2]


def read(mesh: DeviceMesh) -> None:
    pretend.install()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no need to keep what was in memory
    ctypes.string_at(torch.ones(3, device=pretend.NAME).data_ptr(), 4)


def test_who_reads_the_memory_of_the_device_dies() -> None:
    with pytest.raises(pytest.fail.Exception, match="the process died"):
        run_ranks(read, {})


def tokens_stay() -> None:
    Share.on = lambda self, device: self


def averages_stay() -> None:
    inner = Buffer._allocate

    def allocate(self: Buffer, device: torch.device, state: Sequence[str]) -> None:
        inner(self, device, state)
        self.state = {name: values.cpu() for name, values in self.state.items()}

    Buffer._allocate = allocate


def count_travels_on_the_host() -> None:
    inner = Axis.sum_
    Axis.sum_ = lambda self, tensor: inner(self, tensor.cpu())


def received_on_the_host() -> None:
    inner = P2P.post_recv
    P2P.post_recv = lambda self, instruction: inner(replace(self, device=CPU), instruction)


def nobody_waits() -> None:
    inner = Axis.start_scatter_sum_
    Axis.start_scatter_sum_ = lambda self, flat: (inner(self, flat), lambda: None)[1]


def cleared_too_soon() -> None:
    inner = Axis.start_scatter_sum_
    Axis.start_scatter_sum_ = lambda self, flat: (inner(self, flat), flat.zero_())[0]


SAME = "to be on the same device"


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("plant", "axes", "caught"),
    [
        (tokens_stay, {}, SAME),
        (averages_stay, {}, SAME),
        (count_travels_on_the_host, {"dp": 2}, "no backend for tensors on cpu"),
        (received_on_the_host, {"pp": 2}, "no backend for tensors on cpu"),
        (nobody_waits, {"dp": 2}, "not close"),
        (cleared_too_soon, {"dp": 2}, "written to while it was under way"),
    ],
)
def test_what_is_forgotten_is_found(
    plant: Callable[[], None], axes: dict[str, int], caught: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=caught):
        run_ranks(train_both, axes, runs=[run(before=plant)])


def train_module(device: str, name: str) -> dict[str, Any]:
    """The optimizer's state after three steps of a module of torch's, of which the second is
    skipped."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    attach_whole(module)
    model = PlannedModel(module, plan("bf16", keep_fp32=("1.*",))).to(device)
    made = ParallelAMPOptimizer([model], model.plan, rule=rule(name), clip=0.0)
    for factor in (1.0, math.inf, 1.0):
        loss = model(torch.linspace(-1, 1, 40, device=device).view(5, 8)).square().sum() * factor
        loss.backward()
        assert made.step(1e-2).changed == (factor == 1.0)
    made.load_state_dict(made.state_dict())
    return made.state_dict()


@on_ranks()
def test_fp8_products_are_made_by_the_kernels_that_make_them_on_the_cpu(mesh: DeviceMesh) -> None:
    """A kernel that raises for whatever reason is taken for one that the device lacks."""
    pretend.install()
    del SLOW["cpu"]  # both are tried
    made = [
        [
            describe_kernels(recipe, torch.device(device), torch.bfloat16, torch.float32)
            for device in ("cpu", pretend.NAME)
        ]
        for recipe in map(FP8Recipe, EIGHT_BIT_KINDS)
    ]
    for here, there in made:
        assert here == {
            name: way.replace(f"'{pretend.NAME}'", "'CPU'") for name, way in there.items()
        }
    assert any("kernel" in way for here, _ in made for way in here.values())


@on_ranks()
def test_a_module_of_torch_trains_on_the_device_that_it_was_put_on(mesh: DeviceMesh) -> None:
    pretend.install()
    for name in ("adamw", "sgd", "Adagrad"):
        ours = train_module(pretend.NAME, name)
        expected = train_module("cpu", name)
        mine, theirs = (state.pop("tensors") for state in (ours, expected))
        assert ours == expected and mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


OVERRIDES = [
    "precision.compute=bf16",
    "optimizer.clip=0",
    "train.eval_every=2",
    "log.timeline=2",
    "checkpoint.every=2",
    "train.steps=4",
    "train.micro_batch=4",
]


def used(
    mesh: DeviceMesh, file: Path, overrides: list[str], folder: Path, first: int
) -> tuple[Any, ...]:
    """Of a run in `folder` that goes on from step `first`: what is seen of a micro-batch that
    overflows, and the optimizer's state, before and after it was taken up again. Leaves what parity
    records as well."""
    config = load_run(file, [*overrides, f"train.folder={folder}"])
    corpus = open_corpus(config)
    trainer = Trainer(config, corpus, mesh, checkpoint(folder, first) if first else None)
    trainer.run()
    state = trainer.engine.optimizer.state_dict()
    trainer.engine.optimizer.load_state_dict(state)
    again = trainer.engine.optimizer.state_dict()
    trace = trace_modules(trainer.engine.passes, trainer.share(0), 0, 0, 2.0**140)
    (folder / "parity").mkdir(exist_ok=True)
    before = load_run(file, [*overrides, f"train.folder={folder}/unused"])
    record(before, corpus, mesh, Plan(2, planted=1, into="embedding.weight"), folder / "parity")
    return trace.found, state, again


def use_both(mesh: DeviceMesh, file: Path, overrides: list[str], folder: Path) -> None:
    """On the CPU; on the device; on the device from the middle of the CPU's way on, and so with
    state in host memory."""
    pretend.install()
    emulate()
    with sdpa_kernel(SDPBackend.MATH):
        expected = used(mesh, file, overrides, folder / "cpu", 0)
        mesh = pretend.join(mesh)
        in_host_memory = ["optimizer.offload=host"]
        for name, first, more in (
            ("device", 0, []),
            ("middle", 2, []),
            ("host", 2, in_host_memory),
        ):
            if first and Axis.world(mesh).rank == 0:
                shutil.copytree(checkpoint(folder / "cpu", first), checkpoint(folder / name, first))
            Axis.world(mesh).barrier()
            found, *states = used(mesh, file, [*overrides, *more], folder / name, first)
            assert found == expected[0]
            for state, there in zip(states, expected[1:], strict=True):
                assert state["scaler"] == there["scaler"] and state["steps"] == there["steps"] == 4
                assert state["tensors"].keys() == there["tensors"].keys()
                assert all(
                    torch.equal(values, there["tensors"][key])
                    for key, values in state["tensors"].items()
                )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("dp", "more"),
    [
        (1, ["fp8.kind=current", "fp8.shadow_every=2"]),
        (2, ["fp8.kind=delayed"]),
    ],
)
def test_a_run_its_checkpoints_and_what_looks_into_them_are_the_same(
    tmp_path: Path, dp: int, more: list[str]
) -> None:
    """Checkpoints go from one device to the other in the middle of a run."""
    overrides = [*OVERRIDES, f"parallel.data={dp}", *more]
    run_ranks(use_both, {"dp": dp}, file=write_run(tmp_path), overrides=overrides, folder=tmp_path)
    cpu, *others = (tmp_path / name for name in ("cpu", "device", "middle", "host"))
    for folder in others:
        ours = tensors(checkpoint(folder, 4))
        expected = tensors(checkpoint(cpu, 4))
        assert ours.keys() == expected.keys() and all(
            torch.equal(ours[key], expected[key]) for key in ours
        )
        assert said(folder) == said(cpu)
        recorded, there = (load_file(run / "parity" / "0.safetensors") for run in (folder, cpu))
        assert recorded.keys() == there.keys()
        assert all(
            torch.equal(pretend.bits(values), pretend.bits(there[key]))
            for key, values in recorded.items()
        )
        for ours, expected in zip(steps(folder), steps(cpu)[-len(steps(folder)) :], strict=True):
            assert ours.keys() == expected.keys() and ours["loss"] == expected["loss"]
            assert ours.get("eval_loss") == expected.get("eval_loss")


def said(folder: Path) -> str:
    """What the trained model goes on with."""
    return "".join(
        Generation(
            load_model(checkpoint(folder, 4), CachedStage), "the", 8, Sampling(temperature=0)
        )
    )


def train_repeatably(mesh: DeviceMesh, runs: Sequence[Run]) -> None:
    """On the device, where torch refuses what has no deterministic kernel; and the same on the
    CPU, within the rounding of sums in another order."""
    pretend.install()
    with sdpa_kernel(SDPBackend.MATH):
        expected = train_rank(mesh, runs)
        mesh = pretend.join(mesh)
        torch.use_deterministic_algorithms(True)
        ours = train_rank(mesh, runs)
    for one, other in zip(ours, expected, strict=True):
        for here, there in zip(one.after, other.after, strict=True):
            torch.testing.assert_close(here.values.cpu(), there.values, rtol=1e-9, atol=1e-12)


def runs_of_families() -> dict[str, Run]:
    """A run of each family, those with recurrent layers first, in documents too."""
    recurrent: dict[str, Run] = {}
    others: dict[str, Run] = {}
    for case in CASES.values():
        config = config_of(case)
        model = {**OURS, **case.ours, "family": config.family}
        one = run("fp64", model, micro_batch=4)
        if config.mamba or config.delta_net:
            recurrent.setdefault(
                f"{config.family} in documents", replace(one, borders=2, reset=True)
            )
        others.setdefault(config.family, one)
    return {**recurrent, **others}


OF_FAMILIES = runs_of_families()


@pytest.mark.cases(2, sample=4)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_every_family_takes_deterministic_steps_on_the_device(name: str) -> None:
    run_ranks(train_repeatably, {}, runs=[OF_FAMILIES[name]])
