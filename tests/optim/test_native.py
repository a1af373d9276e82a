"""The kernels in C: statistics against float64, AdamW and rounding against torch's, bit for bit."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.grad_stats import statistics
from megaprec.optim.group_factors import Group
from megaprec.optim.main_grad import begin_accumulation
from megaprec.optim.native import Kernels
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.post_validation import PostValidationOptimizer
from megaprec.optim.update_rules import SGD, AdamW, Step
from megaprec.precision.plan import plan
from tests.ranks import run_ranks
from tests.runs import losses, train, write_run
from tools.config.run_file import load_run

INF = float("inf")
NAN = float("nan")
CPU = torch.device("cpu")
COMPILER = os.environ.get("CC") or "cc"
needs_compiler = pytest.mark.skipif(
    not shutil.which(COMPILER.split()[0]), reason=f"no C compiler {COMPILER!r}"
)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def random(n: int, scale: float = 1.0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)) * scale


@needs_compiler
@pytest.mark.parametrize("n", [0, 1, 15, 16, 63, 64, 65, 511, 513, 1 << 16, (1 << 16) + 1, 300_001])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 3e-42, 1e30])
def test_statistics_are_those_of_float64_at_any_length_and_size(
    kernels: Kernels, n: int, scale: float
) -> None:
    values = random(n, scale)
    values[::3], values[1::7] = 0.0, -0.0
    squares, zeros = kernels.statistics(values).tolist()
    assert squares == pytest.approx(values.double().square().sum().item(), rel=1e-5, abs=0)
    assert zeros == (values == 0).sum().item()


@needs_compiler
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_is_seen_wherever_it_stands(kernels: Kernels, bad: float) -> None:
    values = random(512 + 64 + 7)
    for place in range(len(values)):
        kept, values[place] = values[place].item(), bad
        assert not kernels.statistics(values)[0].isfinite(), place
        values[place] = kept
    assert kernels.statistics(values)[0].isfinite()


@needs_compiler
def test_the_largest_finite_numbers_are_finite_in_gradients_and_copies(kernels: Kernels) -> None:
    values = torch.full((70_001,), 3e38)
    squares, zeros = statistics([values], [values, values.double()], CPU, kernels).tolist()
    assert squares == pytest.approx(70_001 * float(values[0]) ** 2, rel=1e-12) and zeros == 0
    values[5] = INF
    assert statistics([random(9)], [values], CPU, kernels)[0].isnan()


@needs_compiler
def test_what_the_kernel_cannot_read_is_read_all_the_same(kernels: Kernels) -> None:
    mixed = [random(1000), random(999).double(), random(500).bfloat16()]
    mixed[1][:7] = 0.0
    torch.testing.assert_close(
        statistics(mixed, (), CPU, kernels), statistics(mixed, (), CPU), rtol=1e-6, atol=0
    )


@needs_compiler
def test_a_user_without_a_home_is_told_where_to_give_the_kernel_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as for the user of a container
    with pytest.raises(
        UserError, match=r"no place for the compiled kernel: .*; set XDG_CACHE_HOME$"
    ):
        Kernels()


@needs_compiler
def test_statistics_and_updates_are_the_same_for_any_number_of_threads(kernels: Kernels) -> None:
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append((kernels.statistics(random(700_001)), *trained(kernels=True)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other, strict=True))


class Net(nn.Module):
    """Weights that decay, a norm that does not, sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(random(301 * 67).view(301, 67))
        self.norm = nn.Parameter(random(67))
        self.two = nn.Parameter(random(129 * 31).view(129, 31))


def trained(
    mesh: DeviceMesh | None = None,
    *,
    kernels: bool,
    clip: float = 0.0,
    compute: Any = "bf16",
    beta: float = 0.9,
    **changes: Any,
) -> list[Tensor]:
    """Weights, masters and averages after five steps, of which one is skipped."""
    model = Net()
    attach_whole(model)
    groups = [Group("two", lr=0.5, weight_decay=0.3)]
    rule = AdamW((beta, 0.95))
    optimizer = ParallelAMPOptimizer(
        [model],
        plan(compute, **changes),
        mesh,
        average=False,
        rule=rule,
        groups=groups,
        clip=clip,
        native=kernels,
    )
    assert (optimizer.kernels is not None) == kernels
    for number, scale in enumerate((1.0, 1e-4, INF, 1e-4, 30.0)):
        for buffer in optimizer.all_buffers():
            for at, parameter in enumerate(buffer.parameters):
                values = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(10 * number + at)
                )
                begin_accumulation(parameter)[0].copy_(values * scale * optimizer.scale)
        report = optimizer.step(1e-2)
        assert report.outcome == ("applied" if scale < INF else "skipped_overflow")
    kept = [[b.weights, b.masters, b.remainder, *b.state.values()] for b in optimizer.all_buffers()]
    return [values.clone() for some in kept for values in some if values is not None]


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.3},
        {"beta": 0.5},
        {"compute": "fp32"},
        {"keep_fp32": ("norm",)},
        {"rounding": "stochastic"},
        {"masters": "split"},
        {"moments": "bf16"},
        {"compute": "fp16"},
        {"compute": "fp64"},
    ],
    ids=str,
)
def test_an_optimizer_with_kernels_trains_as_one_without_bit_for_bit(
    options: dict[str, Any],
) -> None:
    made = [trained(kernels=kernels, **options) for kernels in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@needs_compiler
def test_clipping_differs_by_the_rounding_of_the_norm_alone() -> None:
    made = [trained(kernels=native, clip=1.0, compute="fp32") for native in (False, True)]
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(
        made[1][0], trained(kernels=True, compute="fp32")[0], rtol=1e-5, atol=1e-7
    )


def sharded(mesh: DeviceMesh) -> bool:
    made = [trained(mesh, kernels=kernels) for kernels in (False, True)]
    return all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@needs_compiler
def test_so_it_does_under_zero() -> None:
    assert all(run_ranks(sharded, {"dp": 2}))


@needs_compiler
def test_weights_are_rounded_as_torch_rounds_every_bf16_and_what_lies_between(
    kernels: Kernels,
) -> None:
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    offsets = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (upper[:, None] + offsets).flatten().view(torch.float32)
    model = nn.ParameterList([nn.Parameter(values.nan_to_num(0.0, 0.0, 0.0).view(-1, 6))])
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("bf16"), native=True)
    (buffer,) = optimizer.all_buffers()
    ((block,),) = [blocks for _, parts in optimizer._buffer_slices for _, blocks in parts]
    assert buffer.masters is not None
    buffer.masters[: len(values)] = values
    nothing = torch.zeros(())
    kernels.adamw_(
        block, AdamW(), Step(0.0, 0.0, torch.ones((), dtype=torch.float64), nothing, nothing + 1)
    )
    finite = values.isfinite() | values.isinf()
    got = buffer.weights[: len(values)]
    wanted = buffer.masters[: len(values)].bfloat16()
    assert torch.equal(got.view(torch.int16)[finite], wanted.view(torch.int16)[finite])
    assert got[~finite].isnan().all()


@needs_compiler
def test_gradients_are_left_as_they_are_so_what_is_ignored_is_found() -> None:
    found = []
    for kernels in (False, True):
        model = Net()
        attach_whole(model)
        optimizer = ParallelAMPOptimizer(
            [model], plan("bf16", on_nonfinite="ignore"), native=kernels
        )
        for parameter in model.parameters():
            begin_accumulation(parameter)[0].fill_(0.5)
        model.one.main_grad[3, 5:9] = -INF  # type: ignore[attr-defined]
        report = optimizer.step(1e-2)
        found.append((report.outcome, report.offenders))
        assert not kernels or model.two.main_grad.eq(0.5).all()  # type: ignore[attr-defined]
    assert found[0] == found[1] and found[0][0] == "applied_nonfinite" and found[0][1][0].infs == 4


@needs_compiler
def test_a_guess_with_kernels_is_taken_back_as_one_without() -> None:
    assert all(torch.equal(a, b) for a, b in zip(guessed(False), guessed(True), strict=True))


def guessed(kernels: bool) -> list[Tensor]:
    """Weights and state after six guesses, of which two are wrong: a gradient was not finite."""
    model = Net()
    attach_whole(model)
    optimizer = PostValidationOptimizer([model], plan("bf16"), clip=0.0, native=kernels)
    stood = []
    for number, scale in enumerate((1.0, INF, 1.0, 1.0, INF, 1.0)):
        for at, parameter in enumerate(model.parameters()):
            values = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(10 * number + at)
            )
            begin_accumulation(parameter)[0].copy_(values * scale)
        if optimizer.take(1e-2) is None:
            settled = optimizer.settle()
            assert settled is not None
            stood.append(settled.stands)
    assert True in stood and stood.count(False) == 2
    kept = [(b.weights, *b.saved().values()) for b in optimizer.all_buffers()]
    return [values.clone() for some in kept for values in some]


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        UserError, match="native needs a C compiler: 'no-such-compiler' cannot be run"
    ) as error:
        trained(kernels=True)
    assert len(error.value.problems) == 1


@needs_compiler
def test_a_compiler_that_fails_is_reported_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -include {tmp_path}/absent.h")
    with pytest.raises(UserError, match=r"failed: .*absent\.h"):
        Kernels()


@needs_compiler
def test_it_is_compiled_once_and_leaves_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Kernels()
    (library,) = (tmp_path / "megaprec").iterdir()
    made = library.stat().st_mtime_ns
    Kernels()
    assert [file.stat().st_mtime_ns for file in (tmp_path / "megaprec").iterdir()] == [made]


def test_a_run_file_is_refused_at_once_if_it_asks_for_what_they_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"optimizer\.native = true is for adamw on CPUs, not for sgd"
    ):
        load_run(write_run(tmp_path), ["optimizer.native=true", "optimizer.name=sgd"])


@needs_compiler
def test_a_run_uses_them(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    made = []
    for native in ("false", "true"):
        train(
            file,
            f"optimizer.native={native}",
            "optimizer.clip=0.0",
            f"train.folder={tmp_path}/{native}",
        )
        made.append(losses(tmp_path / native))
    assert made[0] == made[1] and len(made[0]) == 6


def test_what_the_kernels_cannot_serve_is_refused() -> None:
    model = Net()
    attach_whole(model)
    with pytest.raises(UserError, match="not by SGD on cpu"):
        ParallelAMPOptimizer([model], plan("bf16"), rule=SGD(), native=True)
