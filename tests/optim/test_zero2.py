"""ZeRO-2: gradients are reduced into their owner's slice in each backward pass, and freed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import attach_whole
from megaprec.comm.main_grad import gradient_of_step, has_gradient, main_grad_dtype, mark_gradient
from megaprec.diagnose.nonfinite_trace import Trace
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.state.grad_buffer import GradBuffer
from megaprec.precision.plan import LossScaling, plan
from tests.layouts import Result, Run, train_all
from tests.models.test_parity import MODELS
from tests.optim.test_overlap import require_same_bits
from tests.ranks import run_ranks
from tests.refusals import raises
from tests.whole_gradients import counted_whole_gradients

SMALL = 300  # elements of a bucket: most matrices of these models get one of their own
OPTIONS = {"bucket": SMALL}
NAN = float("nan")


def in_both(runs: Sequence[Run]) -> list[Run]:
    """The runs, and the same under ZeRO-2."""
    sharded = [replace(run, options={**run.options, "shard_gradients": True}) for run in runs]
    return [*runs, *sharded]


def pairs(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    half = len(results) // 2
    return zip(results[:half], results[half:], strict=True)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout",
    [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)],
    ids=lambda x: "tp{} pp{} dp{}".format(*x),
)
@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral"])
def test_with_one_micro_batch_zero_2_has_the_bits_of_zero_1(
    model: str, layout: tuple[int, int, int]
) -> None:
    tp, _, dp = layout
    run = Run(MODELS[model], compute="bf16", sequence=tp > 1, options=OPTIONS, micro_batch=8 // dp)
    runs = [
        run,
        replace(run, options={**OPTIONS, "overlap": True}),
        # gradients that travel in 16 bits, and moments and masters in 16 bits
        replace(run, changes={"reduce": "bf16", "masters": "split"}),
        replace(run, options={**OPTIONS, "rule": Muon()}),
    ]
    if dp == 4:
        runs.append(replace(run, zero_size=2))
    for one, two in pairs(train_all(in_both(runs), *layout)):
        assert any(report.outcome == "applied" for report in one.reports)
        require_same_bits(one, two)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout",
    [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)],
    ids=lambda x: "tp{} pp{} dp{}".format(*x),
)
def test_with_several_micro_batches_zero_2_differs_by_rounding_alone(
    layout: tuple[int, int, int],
) -> None:
    tp, pp, _ = layout
    run = Run(MODELS["llama"], sequence=tp > 1, options=OPTIONS, micro_batch=1)
    runs = [run, replace(run, options={**OPTIONS, "overlap": True})]
    if pp > 1:
        four = {**MODELS["gpt2"], "layers": 4}  # with a tied embedding
        kinds = (("1f1b", 1), ("interleaved", 2), ("gpipe", 1), ("zb-v", 2))
        runs = [replace(run, model=four, kind=kind, chunks=chunks) for kind, chunks in kinds]
    for one, two in pairs(train_all(in_both(runs), *layout)):
        require_close(one, two)


def require_close(one: Result, two: Result) -> None:
    """The results of two float64 runs are the same within rounding."""
    for first, second in zip(one.reports, two.reports, strict=True):
        assert first.outcome == second.outcome == "applied"
        assert second.stage_zeros == first.stage_zeros
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-12)
    for grads, others in zip(one.grads, two.grads, strict=True):
        # of the model: the gradient of some biases is 0 but for rounding
        largest = max(gradient.abs().max().item() for gradient in grads.values())
        for name, gradient in grads.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-11, atol=1e-13 * largest)
    for name, weight in one.after.items():
        torch.testing.assert_close(two.after[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("bad", [float("inf"), NAN])
def test_an_overflow_is_skipped_with_the_same_offenders_and_leaves_nothing(bad: float) -> None:
    scaling = LossScaling("dynamic", initial=2.0**10)
    run = Run(
        MODELS["llama"],
        compute="fp16",
        scaling=scaling,
        options=OPTIONS,
        micro_batch=4,
        steps=4,
        plant=(1, 1, bad),
    )
    ((one, two),) = pairs(train_all(in_both([run]), 1, 1, 2))
    assert [report.outcome for report in two.reports].count("skipped_overflow") == 1
    for first, second in zip(one.reports, two.reports, strict=True):
        # ZeRO-2 has no memory for the replay that finds the micro-batch
        names = [offender.name for offender in first.offenders]
        assert [offender.name for offender in second.offenders] == names
        # as text: NaN is NaN
        assert str(replace(second, offenders=())) == str(replace(first, offenders=()))
        assert not any(offender.traced for offender in second.offenders)
    assert two.scaler == one.scaler
    for name, weight in one.after.items():
        assert torch.equal(two.after[name], weight), name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def optimizer_of(net: Net, mesh: DeviceMesh | None, **options: Any) -> ParallelAMPOptimizer:
    attach_whole(net)
    settings = {"bucket": 1, "average": True, **options}
    return ParallelAMPOptimizer([net], plan("fp32"), mesh, **settings)


def batch(mesh: DeviceMesh, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + mesh.get_local_rank("dp"))
    return torch.randn(8, 16, generator=generator)


def in_dp2(body: Callable[..., Any], **arguments: Any) -> list[Any]:
    return run_ranks(body, {"dp": 2}, **arguments)


def loop(mesh: DeviceMesh, announced: bool, **options: Any) -> tuple[list[Tensor], int, int]:
    """Two steps of two micro-batches in a loop of one's own: the weights, and the bytes of whole
    gradients at their peak and at the end."""
    net = Net()
    with counted_whole_gradients() as counted:
        optimizer = optimizer_of(net, mesh, **options)
        for step in range(2):
            for number in range(2):
                if announced:
                    optimizer.expect(is_last=number == 1)
                (net(batch(mesh, 2 * step + number)).square().mean() / 2).backward()
                if announced:
                    optimizer.end_microbatch(number, 2)
            optimizer.step(lr=1e-2)
    optimizer.wait()
    return [parameter.detach().clone() for parameter in net.parameters()], counted.peak, counted.now


def test_a_loop_that_announces_nothing_gets_the_bits_of_zero_1() -> None:
    for ours, theirs in zip(
        in_dp2(loop, announced=False, shard_gradients=True),
        in_dp2(loop, announced=False),
        strict=True,
    ):
        for weight, other in zip(ours[0], theirs[0], strict=True):
            assert torch.equal(weight, other)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_that_announces_passes_holds_one_bucket_at_a_time(overlap: bool) -> None:
    weight_bytes = 4 * 16 * 16
    bias_bytes = 4 * 2 * 64  # padded
    layer = weight_bytes + bias_bytes
    for ours, theirs in zip(
        in_dp2(loop, announced=True, shard_gradients=True, overlap=overlap),
        in_dp2(loop, announced=True),
        strict=True,
    ):
        for weight, other in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-7)
        # with overlap one more is under way
        assert 0 < ours[1] <= layer + overlap * weight_bytes
        assert ours[2] == 0
        assert theirs[1] == 0, "without ZeRO-2 gradients are there for good"


def main_grad_of(parameter: nn.Parameter) -> object:
    return parameter.main_grad  # type: ignore[attr-defined]


def require_absent(weight: nn.Parameter) -> None:
    """The gradient of `weight` has no memory, and tells nothing but what it would be."""
    absent: Any = main_grad_of(weight)
    assert absent.shape == weight.shape and main_grad_dtype(weight) == absent.dtype
    assert not has_gradient(weight) and gradient_of_step(weight) is None
    uses: list[Callable[[], object]] = [
        lambda: absent.zero_(),
        lambda: absent.view(-1),
        lambda: absent.storage_offset(),
        lambda: absent.isfinite(),
        lambda: mark_gradient(weight),
    ]
    for use in uses:
        with raises("optimizer.gradient_without_memory", name="layers.0.weight"):
            use()
    for operator in (torch.add, torch.mul, torch.Tensor.copy_):
        with pytest.raises(TypeError):
            operator(torch.ones(weight.shape), absent)


def freed(mesh: DeviceMesh) -> None:
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=True)
    weight = next(net.parameters())
    optimizer.expect(is_last=False)
    net(batch(mesh, 0)).sum().backward()
    require_absent(weight)
    with pytest.raises(RuntimeError, match=r"reduced and freed.*local_grads"):
        _ = optimizer.all_buffers()[0].grads
    with raises("optimizer.grad_is_taken", name="layers.0.weight"):
        _ = weight.grad
    optimizer.end_microbatch(0, 2)
    net(batch(mesh, 1)).sum().backward()  # not announced, so it is reduced at its end
    assert isinstance(main_grad_of(weight), Tensor)
    optimizer.end_microbatch(1, 2)
    require_absent(weight)
    with raises("optimizer.gradient_after_reduction", name="layers.3.bias"):
        net(batch(mesh, 1)).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="no parameter of the model has a gradient"):
        optimizer.step(lr=1e-2)


def test_what_was_reduced_cannot_be_read_by_mistake_or_added_to() -> None:
    in_dp2(freed)


def abandoned(mesh: DeviceMesh) -> None:
    """A backward pass fails when the gradients of half of a bucket have come."""
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=True)
    optimizer.expect(is_last=False)
    output = net(batch(mesh, 0)).sum()
    inner = list(net.parameters())[2]
    hook = inner.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        output.backward()
    hook.remove()
    for buffer in optimizer.all_buffers():
        buffer.forget_gradients()
        assert not any(map(has_gradient, buffer.parameters))


def _fail(parameter: nn.Parameter) -> None:
    raise RuntimeError("in the middle")


def test_where_memory_is_given_up_no_parameter_counts_as_having_a_gradient() -> None:
    in_dp2(abandoned)


def traced(mesh: DeviceMesh) -> None:
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=True)
    optimizer.expect(is_last=False)
    with Trace(net) as trace:
        net(batch(mesh, 0)).sum().backward()
    assert trace.found is None


def test_a_trace_reads_no_gradient_that_has_no_memory() -> None:
    in_dp2(traced)


def missing(mesh: DeviceMesh) -> None:
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=True)
    used = net.layers[:1] if mesh.get_local_rank("dp") else net.layers
    optimizer.expect()
    x = batch(mesh, 0)
    for layer in used:
        x = layer(x)
    x.sum().backward()
    with pytest.raises(RuntimeError, match="gradients are missing on some ranks"):
        optimizer.step(lr=1e-2)


def test_a_gradient_that_one_rank_lacks_is_named_and_nothing_hangs() -> None:
    in_dp2(missing)


def half_missing(mesh: DeviceMesh) -> list[Tensor]:
    """Weights after a step of two announced passes of which one rank's first misses layers."""
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=True)
    for number in range(2):
        layers = net.layers[:2] if mesh.get_local_rank("dp") > number else net.layers
        optimizer.expect(is_last=number == 1)
        x = batch(mesh, number)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
    optimizer.step(lr=1e-2)
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_ranks_that_lack_gradients_in_a_micro_batch_reduce_as_often_as_others() -> None:
    first, second = in_dp2(half_missing)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def resumed(mesh: DeviceMesh, before: bool, after: bool) -> list[Tensor]:
    """Weights after two steps, of which the second continues the state of the first."""
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=before)
    one_step(net, optimizer, mesh, 0)
    state = optimizer.state_dict()
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_gradients=after)
    optimizer.load_state_dict(state)
    one_step(net, optimizer, mesh, 1)
    return [parameter.detach().clone() for parameter in net.parameters()]


def one_step(net: Net, optimizer: ParallelAMPOptimizer, mesh: DeviceMesh, number: int) -> None:
    optimizer.expect()
    loss = net(batch(mesh, number)).square().mean()
    loss.backward()
    optimizer.step(lr=1e-2, loss=loss.detach())


@pytest.mark.slow
def test_state_of_zero_1_continues_under_zero_2_and_back_bit_for_bit() -> None:
    expected = in_dp2(resumed, before=False, after=False)
    for before, after in ((False, True), (True, False), (True, True)):
        for ours, theirs in zip(in_dp2(resumed, before=before, after=after), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_canonical_sums_refuse_zero_2() -> None:
    with raises("optimizer.canonical_shard_gradients"):
        optimizer_of(Net(), None, average=False, shard_gradients=True, canonical=True)


def test_on_one_rank_zero_2_holds_the_gradients_as_ever() -> None:
    net = Net()
    optimizer = optimizer_of(net, None, shard_gradients=True)
    assert not optimizer.shards_gradients
    net(torch.ones(2, 16)).sum().backward()
    assert all(isinstance(main_grad_of(parameter), Tensor) for parameter in net.parameters())


def test_whole_gradients_are_zero_between_parameters_and_are_not_written_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))])
    attach_whole(parameters)
    kept = {"own": slice(0, 16), "dtype": torch.float32, "device": torch.device("cpu")}
    buffer = GradBuffer([*parameters], starts=(0, 8), size=16, sharded=True, **kept)
    monkeypatch.setattr(torch, "empty", lambda size, **given: torch.full((size,), NAN, **given))
    buffer.make_room()
    assert buffer.whole is not None
    unwritten = [True] * 3 + [False] * 5 + [True] * 5 + [False] * 3
    assert buffer.whole.isnan().tolist() == unwritten
    assert not buffer.whole.nan_to_num().any()
