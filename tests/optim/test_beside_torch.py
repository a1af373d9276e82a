"""The optimizer in a loop of the user's own on two ranks, plain, in DistributedDataParallel and cut
by fully_shard: all train the model that torch alone trains in one process."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from megaprec.checkpoint.save_load import load, save
from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import SGD
from megaprec.precision.plan import LossScaling, PrecisionPlan, plan
from tests.ranks import run_ranks
from tests.refusals import sentence

RANKS = 2
SAMPLES = 12
STEPS = 4
LR = 0.1
SCALE = 1024.0
BAD = 2  # the step whose loss is not finite on one rank, where a test asks for it
# the last with a bad step
MODES = [
    ("fp32", False),
    ("bf16", False),
    ("fp16", False),
    ("fp16", True),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_model() -> nn.Sequential:
    """Of sizes that nothing divides, with gradients of exactly 0 behind the ReLU."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with torch.no_grad():
        model[0].bias[2] = -100.0  # type: ignore[index]  # a unit that never fires
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(RANKS, SAMPLES, 5, generator=torch.Generator().manual_seed(step))[rank]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The mean over the samples of one rank."""
    return model(x).float().square().sum(-1).mean()


def make_plan(compute: str, **changes: Any) -> PrecisionPlan:
    return plan(compute, LossScaling("constant", SCALE) if compute == "fp16" else None, **changes)


def plain(model: nn.Module, compute: str) -> tuple[nn.Module, nn.Module, PrecisionPlan]:
    """The part for the optimizer, the model to call, and the plan."""
    attach_whole(model)
    return model, model, make_plan(compute)


def ddp(model: nn.Module, compute: str) -> tuple[nn.Module, nn.Module, PrecisionPlan]:
    attach_whole(model)
    wrapped = DistributedDataParallel(model)
    return wrapped, wrapped, make_plan(compute)


def ddp_around(model: nn.Module, compute: str) -> tuple[nn.Module, nn.Module, PrecisionPlan]:
    """The optimizer knows nothing of it."""
    attach_whole(model)
    return model, DistributedDataParallel(model), make_plan(compute)


def fsdp2(model: nn.Module, compute: str) -> tuple[nn.Module, nn.Module, PrecisionPlan]:
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=torch.float32)
    for module in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(module, mp_policy=policy)
    attach_whole(model)
    return model, model, make_plan(compute, parameters="fp32")


Wrapping = Callable[[nn.Module, str], tuple[nn.Module, nn.Module, PrecisionPlan]]
WRAPPINGS: dict[str, Wrapping] = {
    "plain": plain,
    "ddp": ddp,
    "ddp_around": ddp_around,
    "fsdp2": fsdp2,
}


def reference(
    compute: str, bad: bool = False
) -> tuple[dict[str, Tensor], list[tuple[float, float, int]]]:
    """Weights after all steps in float64, and loss, norm and zeros of each step: torch alone, one
    rank's samples after the other's, gradients averaged in float64."""
    model = make_model()
    masters = {name: p.detach().double() for name, p in model.named_parameters()}
    said = []
    for step in range(STEPS):
        losses = []
        grads = {name: torch.zeros_like(p) for name, p in masters.items()}
        for rank in range(RANKS):
            narrow = make_model()
            narrow.load_state_dict({name: p.float() for name, p in masters.items()})
            loss = loss_of(narrow.to(DTYPES[compute]), batch(step, rank).to(DTYPES[compute]))
            scale = SCALE if compute == "fp16" else 1.0
            (loss * scale).backward()
            losses.append(loss.item())
            for name, p in narrow.named_parameters():
                assert p.grad is not None
                grads[name] += p.grad.double() / scale / RANKS
        flat = torch.cat([grad.flatten() for grad in grads.values()])
        said.append((sum(losses) / RANKS, flat.norm().item(), int((flat == 0).sum())))
        for name, grad in grads.items() if not (bad and step == BAD) else ():
            masters[name] -= LR * grad
    return masters, said


def whole(model: nn.Module) -> list[Tensor]:
    return [
        getattr(p, "full_tensor", lambda p=p: p)().detach().float().clone()
        for p in model.parameters()
    ]


def train(wrapping: str, compute: str, bad: bool = False) -> dict[str, Any]:
    """What this rank has seen: reports, weights as the model has them, and masters by name."""
    part, model, made = WRAPPINGS[wrapping](make_model(), compute)
    if wrapping == "fsdp2":
        mesh = None
    else:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    average = True if wrapping in ("plain", "ddp_around") else None
    optimizer = ParallelAMPOptimizer(
        [part], made, mesh, average=average, rule=SGD(0.0), weight_decay=0.0, clip=0.0, lr=LR
    )
    reports = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, dist.get_rank()).to(DTYPES[compute]))
        broken = bad and step == BAD and dist.get_rank() == 1
        (loss * optimizer.scale * (torch.inf if broken else 1.0)).backward()
        reports.append(optimizer.step(loss=loss.detach()))
    tensors = optimizer.state_dict()["tensors"]
    masters = {
        name.removeprefix("weight/").removeprefix("module."): t for name, t in tensors.items()
    }
    return {
        "reports": reports,
        "weights": whole(model),
        "masters": masters,
        "elements": optimizer.num_elements,
    }


def train_all(mesh: DeviceMesh) -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {(wrapping, *mode): train(wrapping, *mode) for wrapping in WRAPPINGS for mode in MODES}


@pytest.fixture(scope="module")
def trained() -> list[dict[tuple[str, str, bool], dict[str, Any]]]:
    """By rank and run: one start of two ranks for all of them."""
    return run_ranks(train_all, {"dp": RANKS})


@pytest.mark.cases(4, sample=2)
@pytest.mark.parametrize(("compute", "bad"), MODES, ids=["fp32", "bf16", "fp16", "fp16-skipped"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_two_ranks_train_the_model_that_torch_trains_in_one_process(
    trained: list[dict[Any, Any]], wrapping: str, compute: str, bad: bool
) -> None:
    first, second = (rank[wrapping, compute, bad] for rank in trained)
    assert str(first["reports"]) == str(second["reports"])
    assert all(map(torch.equal, first["weights"], second["weights"])), (
        "the ranks hold different weights"
    )
    masters, said = reference(compute, bad)
    assert first["elements"] == sum(p.numel() for p in masters.values())
    for name, expected in masters.items():
        torch.testing.assert_close(first["masters"][name].double(), expected, rtol=2e-6, atol=2e-7)
    for held, expected in zip(first["weights"], masters.values(), strict=True):
        rounded = expected.float() if wrapping == "fsdp2" else expected.to(DTYPES[compute]).float()
        torch.testing.assert_close(held, rounded, rtol=torch.finfo(DTYPES[compute]).eps, atol=1e-6)
    for step, (report, (loss, norm, zeros)) in enumerate(zip(first["reports"], said, strict=True)):
        assert report.lr == LR
        if bad and step == BAD:
            assert report.outcome == "skipped_overflow"
            assert {o.name.removeprefix("module.") for o in report.offenders} == set(masters)
            assert sum(o.elements for o in report.offenders) == first["elements"]
            continue
        assert report.outcome == "applied"
        assert report.loss == pytest.approx(loss, rel=1e-6)
        assert report.grad_norm == pytest.approx(norm, rel=1e-5)
        assert report.num_zeros == zeros > 0


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What is said of what cannot be trained right on two ranks."""
    dp = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    data = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    made = plan("fp32")
    said = {}

    def refused(
        name: str, part: nn.Module, mesh: DeviceMesh | None = None, made: Any = made, **options: Any
    ) -> None:
        with pytest.raises(UserError) as caught:
            ParallelAMPOptimizer([part], made, mesh, **options)
        said[name] = str(caught.value)

    def named(change: Callable[[nn.Module], nn.Module] = lambda model: model) -> nn.Module:
        model = change(make_model())
        attach_whole(model)
        return model

    def one_dim(model: nn.Module) -> nn.Module:
        fully_shard(
            model, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else None
        )
        return model

    refused("no mesh", named())
    refused("no mesh in ddp", named(DistributedDataParallel))
    refused("not said", named(), dp)
    refused("other axes", named(), data, average=True)
    refused("no layout", make_model(), dp, average=True)
    refused(
        "fsdp1",
        named(lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))),
        dp,
        average=True,
    )
    keep = {"use_orig_params": True, "device_id": torch.device("cpu")}
    refused("fsdp1 kept", named(lambda m: FullyShardedDataParallel(m, **keep)), dp, average=True)
    refused("fsdp2 sum", named(one_dim), average=False)
    refused("fsdp2 overlap", named(one_dim), overlap=True)
    refused("fsdp2 zero", named(one_dim), dp, zero_size=2)
    refused("fsdp2 dtype", named(one_dim), made=plan("bf16"))
    refused("fsdp2 gradients", named(lambda m: one_dim(m.bfloat16())), made=plan("bf16"))
    refused("fsdp2 reduce", named(one_dim), made=plan("bf16", parameters="fp32", reduce="bf16"))
    return said


def test_what_cannot_be_trained_right_is_refused_in_one_line_that_says_what_to_do() -> None:
    first, second = run_ranks(refusals, {"dp": RANKS})
    assert first == second
    assert all("\n" not in line for line in first.values())
    no_mesh = sentence("optimizer.mesh_missing", ranks=2, device="cpu")
    must_say = {
        "no mesh": no_mesh,
        "no mesh in ddp": no_mesh,
        "not said": sentence("optimizer.average_unset", size=2),
        "other axes": sentence("comm.mesh_axes_unnamed", names="data", axes="pp, dp, cp, tp"),
        "no layout": sentence("optimizer.layout_missing", path="0.weight", shape=(7, 5)),
        "fsdp1": sentence("optimizer.fsdp1", path=re.compile("_flat_param$")),
        "fsdp1 kept": sentence("optimizer.fsdp1", path="0.weight"),
        "fsdp2 sum": sentence("optimizer.fsdp_averages"),
        "fsdp2 overlap": sentence(
            "optimizer.fsdp_shards_itself", key="overlap", value=True, name="0.weight"
        ),
        "fsdp2 zero": sentence(
            "optimizer.fsdp_shards_itself", key="zero_size", value=2, name="0.weight"
        ),
        "fsdp2 dtype": sentence(
            "optimizer.fsdp_parameter_dtype", name="0.weight", actual="fp32", dtype_name="bf16"
        ),
        "fsdp2 gradients": sentence(
            "optimizer.fsdp_gradient_dtype", name="0.weight", actual="bf16", dtype_name="fp32"
        ),
        "fsdp2 reduce": sentence("optimizer.fsdp_reduce_dtype"),
    }
    for name, words in must_say.items():
        assert re.search(words, first[name]), name
    assert first.keys() == must_say.keys()


def save_cut(mesh: DeviceMesh, folder: Path) -> list[Tensor]:
    part, model, made = fsdp2(make_model(), "fp32")
    optimizer = ParallelAMPOptimizer([part], made, lr=LR, clip=0.0)
    for step in range(STEPS):
        for half in batch(step, dist.get_rank()).chunk(2):  # two micro-batches
            (loss_of(model, half) / 2).backward()
        assert optimizer.step().outcome == "applied"
    save(folder, STEPS, optimizer, {})
    return whole(model)


def load_cut(mesh: DeviceMesh, path: Path) -> list[Tensor]:
    part, model, made = fsdp2(make_model(), "fp32")
    load(path, ParallelAMPOptimizer([part], made, lr=1.0))
    return whole(model)


def test_a_checkpoint_of_a_model_that_torch_has_cut_is_one_of_the_whole_model(
    tmp_path: Path,
) -> None:
    saved, same = run_ranks(save_cut, {"dp": RANKS}, folder=tmp_path)
    assert all(map(torch.equal, saved, same))
    [path] = [item for item in tmp_path.iterdir() if item.is_dir()]
    for again in run_ranks(load_cut, {"dp": RANKS}, path=path):
        assert all(map(torch.equal, again, saved))
    model = make_model()
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=1.0)
    load(path, optimizer)
    assert all(map(torch.equal, model.parameters(), saved))
    assert optimizer.param_groups[0]["lr"] == LR


@pytest.mark.slow
def test_a_mesh_may_have_some_axes_only() -> None:
    run_ranks(some_axes, {"dp": 2, "tp": 2})


def some_axes(mesh: DeviceMesh) -> None:
    sizes = {
        ("dp",): (4,),
        ("tp",): (4,),
        ("pp",): (4,),
        ("dp", "tp"): (2, 2),
        ("pp", "dp"): (2, 2),
        ("pp", "tp"): (2, 2),
    }
    for axes, shape in sizes.items():
        made = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        given = dict(zip(axes, shape, strict=True))
        model = nn.Linear(3, 5)
        attach_whole(model, Axis.of(made, "tp"), prefix=f"{Axis.of(made, 'pp').rank}.")
        optimizer = ParallelAMPOptimizer(
            [model], plan("fp32"), made, average=True, norm=float("inf")
        )
        assert {a.name: a.size for a in (optimizer.pp, optimizer.dp, optimizer.tp)} == {
            name: given.get(name, 1) for name in ("pp", "dp", "tp")
        }
        model(torch.ones(3)).sum().backward()
        report = optimizer.step(LR)
        assert (report.outcome, report.grad_norm, optimizer.num_elements) == (
            "applied",
            1.0,
            20 * given.get("pp", 1),
        )


def write_cut(mesh: DeviceMesh) -> list[float]:
    """What is left of weights that were filled before a step: at first and later, seen by autograd
    and past it."""
    left = []
    for later in (False, True):
        for through_data in (False, True):
            part, model, made = fsdp2(make_model(), "fp32")
            optimizer = ParallelAMPOptimizer([part], made, lr=0.0, clip=0.0)
            weight = next(model.parameters())
            for write in (False, True) if later else (True,):
                if write:
                    with torch.no_grad():
                        (weight.detach().to_local() if through_data else weight).fill_(0.5)  # type: ignore[attr-defined]
                loss_of(model, batch(0, dist.get_rank())).backward()
                optimizer.step()
            left.append(float((weight.detach().to_local() - 0.5).abs().amax()))  # type: ignore[attr-defined]
    return left


def test_weights_that_torch_has_cut_and_someone_has_written_to_are_where_a_step_goes_on() -> None:
    for left in run_ranks(write_cut, {"dp": RANKS}):
        assert left == [0.0] * 4
