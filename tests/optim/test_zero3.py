"""ZeRO-3: the weights of a layer are gathered when it computes, and are whole only meanwhile.

Runs are compared with ZeRO-2, which adds gradients in the same order. The norm is summed buffer by
buffer, and the two have other buffers: so nothing is clipped where bits are compared.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.weight_buffer import WeightBuffer
from megaprec.optim.weight_units import kept_buffers
from megaprec.precision.plan import LossScaling
from parallel.activation_checkpoint import Recompute
from tests.fp8.test_training import fp8
from tests.fp8.test_training import run as fp8_run
from tests.layouts import Run, batches, make_engine, share_of, train_all
from tests.models.test_mtp import MODELS as MTP_MODELS
from tests.models.test_parity import MODELS
from tests.optim.test_zero2 import Net, batch, in_dp2, optimizer_of
from tests.optim.test_zero_families import require_same_training
from tests.ranks import run_ranks
from tests.refusals import raises

Layout = tuple[int, int, int, int]  # tp, pp, dp, cp
LLAMA = Run(MODELS["llama"], micro_batch=1, clip=0.0, steps=2)
FOUR = replace(LLAMA, model={**MODELS["llama"], "layers": 4})
TIED = replace(LLAMA, model={**MODELS["gpt2"], "layers": 4})  # with a tied embedding
EXPERTS = replace(LLAMA, model={**MODELS["mixtral"], "experts": 8})
WHOLE = Recompute(fraction=1.0)
RUNS: dict[Layout, dict[str, Run]] = {
    (1, 1, 2, 1): {
        "plain": LLAMA,
        "tied": TIED,
        "bf16": replace(LLAMA, compute="bf16"),
        "masters of 16 bits more": replace(LLAMA, compute="bf16", changes={"masters": "split"}),
        "stochastic": replace(
            LLAMA, compute="bf16", changes={"masters": "none", "rounding": "stochastic"}
        ),
        "fp16": replace(LLAMA, compute="fp16", scaling=LossScaling("dynamic", initial=2.0**10)),
        "muon": replace(LLAMA, options={"rule": Muon()}),
        "ema": replace(LLAMA, options={"ema": 0.9}),
        "recomputed": replace(LLAMA, recompute=WHOLE),
        "half recomputed": replace(LLAMA, recompute=Recompute(fraction=0.5)),
        "recomputed parts": replace(
            LLAMA, recompute=Recompute(("attention", "norm", "activation"))
        ),
        "frozen": replace(LLAMA, frozen=("layers.0.*", "embedding.*")),
        "documents": replace(LLAMA, length=16, borders=3, reset=True),
        "two modules of prediction": replace(LLAMA, model=MTP_MODELS["two modules"]),
        "fp8": fp8_run(fp8("delayed"), "bf16", clip=0.0, micro_batch=2),
        "fp8 in blocks": fp8_run(fp8("blockwise"), "bf16", clip=0.0, micro_batch=2),
        "fp8 weights": replace(
            fp8_run(fp8("current", parameters=True, pad=True), "bf16", clip=0.0, micro_batch=2),
            changes={"fp8": fp8("current", parameters=True, pad=True), "parameters": "fp32"},
        ),
    },
    (1, 1, 4, 1): {
        "neighbours": replace(LLAMA, zero_size=2),
        "experts over ranks": replace(EXPERTS, expert=2),
        "experts of neighbours": replace(EXPERTS, expert=2, zero_size=2),
    },
    (2, 1, 2, 1): {
        "sequence": replace(LLAMA, sequence=True),
        "experts": replace(EXPERTS, sequence=True, expert=2),
    },
    (1, 2, 2, 1): {
        "1f1b": TIED,
        "interleaved": replace(FOUR, kind="interleaved", chunks=2),
        "gpipe": replace(TIED, kind="gpipe"),
        "interleaved and recomputed": replace(TIED, kind="interleaved", chunks=2, recompute=WHOLE),
        "two modules of prediction": replace(
            LLAMA, model=MTP_MODELS["two modules"] | {"layers": 4}, kind="interleaved", chunks=2
        ),
    },
    (1, 1, 1, 2): {
        "ring": replace(LLAMA, length=16),
        "gather": replace(LLAMA, length=16, ring=False),
    },
}
CASES = [(layout, name) for layout, runs in RUNS.items() for name in runs]
SHARDED = [{"overlap": False}, {"overlap": True}, {"overlap": True, "keep_layers": 1}]


@pytest.mark.cases(0, 1, sample=6)
@pytest.mark.parametrize(("layout", "name"), CASES)
def test_zero_3_trains_with_the_bits_of_zero_2(layout: Layout, name: str) -> None:
    run = RUNS[layout][name]
    runs = [replace(run, options={**run.options, "shard_gradients": True})]
    for options in SHARDED:
        runs.append(replace(run, options={**run.options, "shard_weights": True, **options}))
    two, *sharded = train_all(runs, *layout)
    assert any(report.outcome == "applied" for report in two.reports)
    for three in sharded:
        require_same_training(two, three)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_skipped_with_the_same_offenders_and_changes_nothing(bad: float) -> None:
    run = replace(
        LLAMA,
        compute="fp16",
        scaling=LossScaling("dynamic", initial=2.0**10),
        micro_batch=4,
        steps=4,
        plant=(1, 1, bad),
    )
    runs = [replace(run, options=options) for options in ({}, {"shard_weights": True})]
    one, three = train_all(runs, 1, 1, 2)
    assert [report.outcome for report in three.reports].count("skipped_overflow") == 1
    for first, second in zip(one.reports, three.reports, strict=True):
        assert second.outcome == first.outcome
        # the planted element is another one: the last of a rank's first buffer
        assert bool(second.offenders) == bool(first.offenders)
    assert three.scaler == one.scaler
    assert torch.equal(three.after["head.weight"], one.after["head.weight"])


@dataclass
class Gathers:
    """What is gathered on this rank: the times of each buffer, by the layer that it is of, and the
    bytes of whole weights that have memory, now and at most."""

    times: Counter[str] = field(default_factory=Counter)
    now: int = 0
    peak: int = 0


def layer_of(buffer: Buffer) -> str:
    """What a buffer holds: "layers.N", "embedding", or "final_norm" for what comes after the
    layers."""
    first, number, *_ = min(piece.part.name for piece in buffer.pieces).split(".")
    return f"{first}.{number}" if first == "layers" else first


@contextmanager
def counted_gathers(optimizer: ParallelAMPOptimizer) -> Iterator[Gathers]:
    """Count what is gathered inside."""
    gathers = Gathers()
    # the buffers' own storages, by what has memory
    names = {buffer._weights: layer_of(buffer) for buffer in optimizer.all_buffers()}
    make_room, free = WeightBuffer.make_room, WeightBuffer.free

    def counting_room(weights: WeightBuffer) -> None:
        make_room(weights)
        gathers.times[names[weights]] += 1
        gathers.now += weights.whole.nbytes
        gathers.peak = max(gathers.peak, gathers.now)

    def counting_free(weights: WeightBuffer) -> None:
        before = weights.whole.untyped_storage().nbytes()
        free(weights)
        gathers.now -= before - weights.whole.untyped_storage().nbytes()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WeightBuffer, "make_room", counting_room)
        patched.setattr(WeightBuffer, "free", counting_free)
        yield gathers


def gathered(mesh: DeviceMesh, run: Run) -> tuple[list[Gathers], dict[str, int], int]:
    """What a rank gathers in each of two steps, the bytes of its buffers, and whole ones that are
    left at the end."""
    engine = make_engine(mesh, run)
    optimizer = engine.optimizer
    found: list[Gathers] = []
    for number, batch_of_step in enumerate(batches(run)):
        with counted_gathers(optimizer) as gathers:
            engine.step(share_of(mesh, batch_of_step), run.lr, number)
        found.append(gathers)
    buffers = optimizer.all_buffers()
    sizes = {layer_of(buffer): buffer.weights.nbytes for buffer in buffers}
    left = sum(buffer.weights.untyped_storage().nbytes() for buffer in buffers)
    return found, sizes, left


SIX = {**MODELS["llama"], "layers": 6}
LATE = "final_norm"
SIX_TIED = {**MODELS["gpt2"], "layers": 6}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("recompute", [Recompute(), WHOLE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_layer_is_gathered_once_forward_and_once_backward_for_each_micro_batch(
    recompute: Recompute, overlap: bool, keep: int
) -> None:
    options = {"shard_weights": True, "overlap": overlap, "keep_layers": keep}
    run = replace(LLAMA, model=SIX, recompute=recompute, options=options, micro_batch=2)
    microbatches = 2
    for steps, sizes, left in run_ranks(gathered, {"dp": 2}, run=run):
        layers = {name: size for name, size in sizes.items() if name.startswith("layers.")}
        assert len(layers) == 6, "the weights of a layer are in one buffer"
        kept = sorted(layers)[6 - keep :]
        for gathers in steps:
            times = dict.fromkeys(layers, 2 * microbatches)
            times |= dict.fromkeys(kept, 1)
            # the backward passes of neither read weights that were given up
            times |= {"embedding": microbatches, LATE: microbatches}
            assert gathers.times == times
            beside = sizes[LATE] + keep * max(layers.values())
            assert gathers.peak <= beside + (1 + overlap) * max(layers.values())
        assert left == 0


def test_layers_are_kept_as_far_as_there_is_room() -> None:
    layer = 100

    def kept(room: int, keep_layers: int = 0) -> set[str]:
        return kept_buffers(["ab", "cd", "ef"], lambda _: layer // 2, keep_layers, room)

    assert kept(layer - 1) == set()
    assert kept(layer) == kept(2 * layer - 1) == set("ef"), "the last ones, each as a whole"
    assert kept(2 * layer) == set("cdef")
    assert kept(10 * layer) == set("abcdef")
    assert kept(layer, keep_layers=2) == kept(2 * layer, keep_layers=1) == set("cdef")
    # a tied weight of two layers takes its room once
    assert kept_buffers(["ab", "b"], lambda _: layer, 0, 2 * layer) == set("ab")


def test_a_tied_head_stays_with_its_embedding_and_is_gathered_once() -> None:
    options = {"shard_weights": True, "overlap": True}
    run = replace(LLAMA, model=SIX_TIED, options=options, micro_batch=4)
    for steps, sizes, left in run_ranks(gathered, {"dp": 2}, run=run):
        assert steps[1].times["embedding"] == 1
        beside = sizes["embedding"] + sizes[LATE]
        assert steps[1].peak <= beside + 2 * sizes["layers.0"]
        assert left == 0


def test_casts_of_fp8_do_not_outlive_the_weights() -> None:
    run = fp8_run(fp8("delayed"), "bf16", micro_batch=4, options={"shard_weights": True})
    assert run_ranks(num_casts, {"dp": 2}, run=run) == [0, 0]


def num_casts(mesh: DeviceMesh, run: Run) -> int:
    engine = make_engine(mesh, run)
    engine.step(share_of(mesh, batches(run)[0]), run.lr, 0)
    return len(engine.fp8._casts)


class Residual(nn.Module):
    """A net whose weights outside of its layers are read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor | list[Tensor]]:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x).tanh()
        return {"output": self.head(x * self.scale), "hidden": [x]}


def own_loop(mesh: DeviceMesh, **options: Any) -> list[Tensor]:
    """The weights after two steps of two micro-batches in a loop of one's own, in a net of one's
    own."""
    net: Any = Residual()
    optimizer = optimizer_of(net, mesh, clip=0.0, **options)
    for step in range(2):
        for number in range(2):
            optimizer.expect(is_last=number == 1)
            result = net(batch(mesh, 2 * step + number))
            loss = result["output"].square().mean() + result["hidden"][0].square().mean()
            (loss / 2).backward()
            optimizer.end_microbatch(number, 2)
        optimizer.step(lr=1e-2)
    with optimizer.whole_weights():
        return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_and_a_net_of_ones_own_get_the_bits_of_zero_2(overlap: bool) -> None:
    expected = in_dp2(own_loop, shard_gradients=True)
    for ours, theirs in zip(
        in_dp2(own_loop, shard_weights=True, overlap=overlap), expected, strict=True
    ):
        assert all(torch.equal(weight, other) for weight, other in zip(ours, theirs, strict=True))


def both_losses(mesh: DeviceMesh, **options: Any) -> list[Tensor]:
    """The weights after one backward pass through the graphs of two micro-batches, and one through
    a part of the layers."""
    net = Net()
    optimizer = optimizer_of(net, mesh, clip=0.0, **options)
    (net(batch(mesh, 0)).square().mean() + net(batch(mesh, 1)).square().mean()).backward()
    optimizer.step(lr=1e-2)
    x = batch(mesh, 2)
    for layer in net.layers[:2]:
        x = layer(x)
    x = x.detach()
    for layer in net.layers[2:]:
        x = layer(x)
    x.square().mean().backward()
    optimizer.step(lr=1e-2)
    assert not any(
        buffer.shards_weights and _has_memory(buffer) for buffer in optimizer.all_buffers()
    )
    with optimizer.whole_weights():
        return [parameter.detach().clone() for parameter in net.parameters()]


def _has_memory(buffer: Buffer) -> bool:
    return buffer.weights.untyped_storage().nbytes() > 0


def test_a_backward_pass_of_two_graphs_or_of_half_a_graph_finds_its_weights() -> None:
    expected = in_dp2(both_losses, shard_gradients=True)
    for overlap in (False, True):
        for ours, theirs in zip(
            in_dp2(both_losses, shard_weights=True, overlap=overlap), expected, strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def failing(mesh: DeviceMesh) -> list[Tensor]:
    """The weights after a backward pass that fails in its middle, and a whole step."""
    net = Net()
    optimizer = optimizer_of(net, mesh, clip=0.0, shard_weights=True)
    hook = net.layers[1].register_full_backward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        net(batch(mesh, 0)).square().mean().backward()
    hook.remove()
    optimizer.zero_grad()
    one_step(net, optimizer, mesh, 0)
    assert not any(map(_has_memory, optimizer.all_buffers()))
    with optimizer.whole_weights():
        return [parameter.detach().clone() for parameter in net.parameters()]


def _fail(module: nn.Module, gradients: object) -> None:
    raise RuntimeError("in the middle")


def undisturbed(mesh: DeviceMesh) -> list[Tensor]:
    net = Net()
    optimizer = optimizer_of(net, mesh, clip=0.0, shard_weights=True)
    one_step(net, optimizer, mesh, 0)
    with optimizer.whole_weights():
        return [parameter.detach().clone() for parameter in net.parameters()]


def test_after_a_backward_pass_that_failed_a_step_is_as_ever() -> None:
    for ours, theirs in zip(in_dp2(failing), in_dp2(undisturbed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def written(mesh: DeviceMesh) -> list[Tensor]:
    """Weights that a loop has written to, after a step with a learning rate of zero."""
    net = Net()
    optimizer = optimizer_of(net, mesh, shard_weights=True, weight_decay=0.0)
    weight = next(net.parameters())
    reads: list[Callable[[], object]] = [
        lambda: weight.sum(),
        lambda: weight + 1,
        lambda: torch.ones(16, 16) @ weight,
        lambda: weight.detach(),
        lambda: weight.data,
        lambda: weight[0],
        lambda: weight.tolist(),
        lambda: str(weight),
        lambda: net.state_dict(),
        lambda: net.half(),
        lambda: copy.deepcopy(net),
        lambda: torch.zeros(16, 16).copy_(weight),
        lambda: torch.stack([weight, weight]),
        lambda: torch._foreach_add([torch.ones(16, 16)], [weight]),
    ]
    for read in reads:
        with raises("optimizer.weight_without_memory", name="layers.0.weight"):
            read()
    assert weight.shape == (16, 16) and weight.dtype == torch.float32 and weight.numel() == 256
    with optimizer.whole_weights(), torch.no_grad():
        weight.clamp_(-0.01, 0.01)
        expected = [parameter.detach().clone() for parameter in net.parameters()]
        first = net(batch(mesh, 0))
    assert torch.equal(net(batch(mesh, 0)), first)
    net(batch(mesh, 0)).sum().backward()
    optimizer.step(lr=0.0)
    with optimizer.whole_weights():
        found = [parameter.detach().clone() for parameter in net.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return found


def test_weights_are_read_and_written_inside_whole_weights() -> None:
    first, second = in_dp2(written)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def resumed(mesh: DeviceMesh, before: dict[str, Any], after: dict[str, Any]) -> list[Tensor]:
    """Weights after two steps, of which the second continues the state of the first."""
    net = Net()
    optimizer = optimizer_of(net, mesh, clip=0.0, ema=0.5, **before)
    one_step(net, optimizer, mesh, 0)
    state = optimizer.state_dict()
    net = Net()
    optimizer = optimizer_of(net, mesh, clip=0.0, ema=0.5, **after)
    optimizer.load_state_dict(state)
    one_step(net, optimizer, mesh, 1)
    with optimizer.averaged_weights(), optimizer.whole_weights():
        averaged = [parameter.detach().clone() for parameter in net.parameters()]
    with optimizer.whole_weights():
        return averaged + [parameter.detach().clone() for parameter in net.parameters()]


def one_step(net: Net, optimizer: ParallelAMPOptimizer, mesh: DeviceMesh, number: int) -> None:
    optimizer.expect()
    loss = net(batch(mesh, number)).square().mean()
    loss.backward()
    optimizer.step(lr=1e-2, loss=loss.detach())


def test_state_of_any_stage_continues_under_any_other_bit_for_bit() -> None:
    one: dict[str, Any] = {}
    three = {"shard_weights": True}
    expected = in_dp2(resumed, before=one, after=one)
    for before, after in ((one, three), (three, one), (three, three)):
        for ours, theirs in zip(in_dp2(resumed, before=before, after=after), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_canonical_sums_refuse_zero_3() -> None:
    with raises("optimizer.canonical_shard_gradients"):
        optimizer_of(Net(), None, average=False, shard_weights=True, canonical=True)


def test_on_one_rank_the_weights_are_there_as_ever() -> None:
    net = Net()
    optimizer = optimizer_of(net, None, shard_weights=True)
    assert not optimizer.shards_weights
    net(torch.ones(2, 16)).sum().backward()
    optimizer.step(lr=1e-2)
    assert all(parameter.isfinite().all() for parameter in net.parameters())
